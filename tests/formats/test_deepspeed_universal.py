"""Universal directories of DeepSpeed: which files are opened, and in which order."""

from __future__ import annotations

import pytest

from reshard.core.location import Location
from reshard.formats.deepspeed import universal


@pytest.mark.parametrize(
    "name", ["mp_rank_{:02d}_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"]
)
def test_ranks_are_opened_by_their_numbers(name, tmp_path, monkeypatch):
    """Text orders the hundredth rank before the tenth."""
    for rank in range(101):
        (tmp_path / name.format(rank)).touch()
    (tmp_path / name.replace("{", "x{").format(1)).touch()  # no rank's
    monkeypatch.setattr(universal, "open_model", lambda path: path.name)
    opened = universal._open_models(Location.from_paths([tmp_path]))
    assert opened == [name.format(rank) for rank in range(101)]
