"""Universal directories of DeepSpeed: which files are opened, and in which order."""

from __future__ import annotations

from reshard.formats.deepspeed import universal
from reshard.location import Location


def test_model_parallel_ranks_are_opened_by_their_numbers(tmp_path, monkeypatch):
    """Text orders the hundredth rank before the tenth."""
    for rank in range(101):
        (tmp_path / f"mp_rank_{rank:02d}_model_states.pt").touch()
    monkeypatch.setattr(universal, "open_model", lambda path: path.name)
    opened = universal._open_models(Location.of([tmp_path]))
    assert opened == [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(101)]
