"""Resume checkpoints with real DeepSpeed, and compare with the run that saved them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.judged.alike import assert_same_tensors
from tests.judged.expected import read_expected
from tests.judges import deepspeed_judge


@dataclass(frozen=True)
class Resumed:
    """One run of real DeepSpeed: ``case`` at ``ranks`` ranks, from a checkpoint of ``source``."""

    source: str
    case: str
    ranks: int
    stage: int

    @property
    def noise(self):
        """Return how far two steps' losses may differ: other ranks add gradients otherwise."""
        if "fp32" in self.case:
            return 3e-6  # six units in the last place of a loss; the processor matters too
        return 1e-3 if "z0" in self.source else 3e-4  # stage 0 also rounds gradients elsewhere

    def __str__(self) -> str:
        return f"{self.source}-{self.case}-{self.ranks}"


def resume_all(directories: Mapping[Resumed, Path], place: Path, **how: Any) -> dict[Resumed, Any]:
    """Load each directory and train two steps; return what failed as text.

    Args:
        how: arguments for loading, as in `deepspeed_train.load`.
    """
    told = {"compile_aio": False, "steps": 2, "how": how}
    jobs = {
        str(run): (run.ranks, {**told, "like": run.case, "load": directory.resolve()})
        for run, directory in directories.items()
    }
    found = deepspeed_judge.JUDGE.run(place / "out", jobs)
    return {run: found[str(run)] for run in directories}


def assert_goes_on(run: Resumed, got: Any, made: Path) -> None:
    """Compare the loaded state bitwise, and the next losses, with those of the run that saved."""
    assert isinstance(got, dict), got
    wanted = read_expected(made / run.source)
    loaded = got["loaded"]
    for part in ("params", "frozen", "buffers", "live"):
        assert_same_tensors(loaded[part], wanted[part])
    for slot, tensors in wanted["slots"].items():
        assert_same_tensors(loaded["slots"][slot], tensors)
    assert set(loaded["optimizer_steps"].values()) == set(wanted["optimizer_steps"].values())
    for name in ("step", "skipped", "lr", "loss_scale"):
        if name != "loss_scale" or wanted["train"][name] is not None:
            assert loaded["train"][name] == wanted["train"][name], name
    assert len(loaded["train"]["param_groups"]) == len(wanted["train"]["param_groups"])
    off = [abs(a - b) for a, b in zip(got["losses"], wanted["next"]["losses"], strict=True)]
    assert off[0] <= 1e-6, off
    assert off[1] <= run.noise, off
    if run.source == run.case and run.ranks == 2:
        assert off == [0.0, 0.0]
        assert_same_tensors(got["params"], wanted["next"]["params"])
