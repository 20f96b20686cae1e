"""DCP flattens lists; reshard reads them as lists again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.formats.dcp.reader import _restore_list

STATE = {
    "model": {"w": torch.arange(3.0)},
    "schedulers": [{"last_epoch": 4}, {"last_epoch": 5}],
    "history": [[{"loss": 0.5}], {"0": {"loss": 0.25}}],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_lists_of_containers_are_lists_again(tmp_path):
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp")
    with reshard.open(tmp_path / "dcp") as checkpoint:
        train = checkpoint.manifest.train
        assert train.scheduler == STATE["schedulers"]
        assert train.client["history"] == STATE["history"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_conversion_to_dcp_and_its_source_do_not_differ(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    reshard.split(tmp_path / "x.pt", tmp_path / "out", to="dcp")
    assert reshard.diff(tmp_path / "x.pt", tmp_path / "out").equal


@pytest.mark.parametrize("items", [{1: "a"}, {"0": "a"}, {0: "a", 2: "b"}, {0: "a", True: "b"}])
def test_other_keys_are_those_of_a_dict(items):
    assert _restore_list(dict(items)) == items
