"""Files that hold a module itself, which its own class alone can read."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.errors import UnrecognisedError


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("key", "at"), [("", "module, of"), ("model", "module under 'model', of")])
def test_a_whole_module_is_refused_by_its_class(key, at, zipped, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    saved = {"epoch": 1, key: model} if key else model
    torch.save(saved, tmp_path / "last.pt", _use_new_zipfile_serialization=zipped)
    for source in (tmp_path, tmp_path / "last.pt"):
        with pytest.raises(UnrecognisedError, match=f"{at} class torch.nn.modules") as refused:
            reshard.open(source)
        assert "save model.state_dict()" in refused.value.remedy
