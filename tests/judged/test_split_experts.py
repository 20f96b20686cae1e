"""Mixtures of experts split for other ranks: equal to DeepSpeed's files, and resumed by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.containers import torch_reader
from reshard.core import dtypes
from reshard.errors import UnsupportedError, UsageError
from tests.judged.alike import assert_same_tensors
from tests.judged.expected import read_expected
from tests.judged.test_split_deepspeed import Held, check_train, contents, read
from tests.judges import deepspeed_judge
from tests.judges.deepspeed_cases import CASES, Case, ds_config

SAME = "moe_z0 moe_z0_bf16_ws4 moe_z1_ws4 moe_z1_sizes moe_z1_ep1 moe_z2 moe_z2_turns".split()
ELSEWHERE = {  # the world and the ranks that share each layer, on the way there and back
    "moe_z0": (4, 1),
    "moe_z0_bf16_ws4": (6, 1),
    "moe_z1_ws4": (6, 1),
    "moe_z1_ep1": (4, 2),
    "moe_z2": (2, 1),
    "moe_z2_turns": (8, 1),
}


def split_run(source, directory, **options):
    """Split a run as the command does."""
    report = split(source, directory, SplitOptions(**options))
    assert report.verified
    return directory


def list_differing(ours, theirs):
    """Return for each file the keys whose values differ from those that DeepSpeed wrote."""
    tag = (theirs / "latest").read_text()
    names = sorted(path.name for path in (theirs / tag).iterdir())
    assert sorted(path.name for path in (ours / tag).iterdir()) == names
    model = torch_reader.read(theirs / tag / "mp_rank_00_model_states.pt").root
    found = {}
    for name in names:
        written, own = (Held(run / tag / name, model).flattened() for run in (theirs, ours))
        keys = written.keys() | own.keys()
        if wrong := [key for key in keys if written.get(key) != own.get(key)]:
            found[name] = wrong
    return found


@pytest.mark.parametrize("case", SAME)
def test_the_same_layout_gives_the_files_that_deepspeed_wrote(case, made, tmp_path):
    assert (
        list_differing(split_run(made / case / "run", tmp_path / "out"), made / case / "run") == {}
    )


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_round_trip_gives_the_files_that_deepspeed_wrote(case, made, tmp_path):
    """Over other ranks, in the form of another stage."""
    source, (world, ranks) = made / case / "run", ELSEWHERE[case]
    stage = int(read(source).origin.detail[-1])
    mesh = read(source).origin.mesh
    there = split_run(
        source, tmp_path / "a", world_size=world, ep=ranks, zero_stage=(stage + 1) % 3
    )
    found = read(there)
    assert found.origin.mesh == {"world": world, "dp": world, "ep": ranks}
    assert contents(found) == contents(read(source))
    back = {"world_size": mesh["world"], "ep": mesh["ep"], "zero_stage": stage}
    wrong = list_differing(split_run(there, tmp_path / "b", **back), source)
    batch = {"train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"}
    assert {
        key
        for keys in wrong.values()
        for key in keys
        if not key.endswith("/ds_config{}") and key.rpartition("/")[2] not in batch
    } == set()


@pytest.mark.parametrize("case", SAME)
def test_the_state_is_whole_at_another_world_size(case, made, tmp_path):
    source = read(made / case / "run")
    world = source.origin.mesh["world"] * 2
    found = read(split_run(made / case / "run", tmp_path / "out", world_size=world))
    assert contents(found) == contents(source)
    check_train(found.train, source.train, stage=int(source.origin.detail[-1]))
    assert found.tied == source.tied
    assert found.frozen == source.frozen
    assert found.origin.mesh == {**source.origin.mesh, "world": world, "dp": world}


@dataclass(frozen=True)
class Resumed:
    """One run of real DeepSpeed on what we split; ``ranks`` share each layer of experts."""

    source: str
    world: int
    ranks: tuple[int, ...]
    stage: int
    precision: str = "fp32"
    noise: float = 1e-5  # of two steps' losses
    weights_only: bool = False

    @property
    def name(self) -> str:
        """Return the name of the route."""
        shared = "".join(map(str, self.ranks))
        return f"{self.source}-{self.world}-ep{shared}-z{self.stage}-{self.precision}"

    @property
    def case(self) -> Case:
        """Return the run that continues."""
        case = CASES[self.source]
        counts = [count for count, _ in case.experts]
        config = ds_config(self.stage, self.precision)
        for key in ("use_data_before_expert_parallelism", "data_types"):
            if key in case.config:
                config[key] = case.config[key]
        zero = case.config["zero_optimization"]
        config["zero_optimization"] = {**zero, "stage": self.stage}
        config["gradient_clipping"] = case.config["gradient_clipping"]
        experts = tuple(zip(counts, self.ranks, strict=True))
        return replace(case, name=self.name, world=self.world, config=config, experts=experts)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the split; the ranks are the source's unless they change."""
        before = tuple(ranks for _, ranks in CASES[self.source].experts)
        trained = read_precision(CASES[self.source])
        return {
            "world_size": self.world,
            "zero_stage": self.stage,
            "ep": None if self.ranks == before else self.ranks[0],
            "dtype": None if self.precision == trained else self.precision,
            "weights_only": self.weights_only,
        }

    @property
    def stays(self) -> bool:
        """Return whether the layout is the source's own."""
        case = CASES[self.source]
        own = (case.world, case.experts, case.config["zero_optimization"]["stage"])
        return own == (self.world, self.case.experts, self.stage)


def read_precision(case: Case) -> str:
    """Return the precision in which a case is trained."""
    return next((name for name in ("bf16", "fp16") if name in case.config), "fp32")


RUNS = (  # on the same layout the files are those of DeepSpeed itself, which is tested above
    Resumed("moe_z1_ws4", 2, (2, 2), 1),
    Resumed("moe_z1_ws4", 2, (1, 1), 2),
    Resumed("moe_z1_ws4", 4, (2, 2), 2, "fp16", 1e-3),
    Resumed("moe_z0", 2, (2, 2), 0),
    Resumed("moe_z0", 4, (1, 1), 0),
    Resumed("moe_z1_ep1", 2, (1, 1), 1),
    Resumed("moe_z1_ep1", 4, (2, 2), 1),
    Resumed("moe_z2", 4, (2, 2), 2, "bf16", 1e-3),
    Resumed("moe_z1_sizes", 4, (2, 2, 2), 1, "bf16", 1e-3),
    Resumed("moe_z0_bf16_ws4", 2, (2, 2), 0, "bf16", 1e-3),
    Resumed("moe_z2_turns", 2, (1, 1), 1, "bf16", 1e-3),
    Resumed("moe_bf16opt", 4, (2, 2), 1, "bf16"),
    Resumed("moe_z1_sizes", 2, (1, 1, 1), 2, "bf16", weights_only=True),
)


@pytest.fixture(scope="module")
def resumed(made, tmp_path_factory) -> dict[str, Any]:
    """Resume each run with DeepSpeed, all in one process: imports take long."""
    place = tmp_path_factory.mktemp("resumed")
    (place / "runs").mkdir()
    jobs = {}
    for run in RUNS:
        directory = split_run(made / run.source / "run", place / "runs" / run.name, **run.options)
        told = {"compile_aio": False, "case": run.case, "load": directory.resolve(), "steps": 2}
        told["how"] = {"load_module_only": run.weights_only}
        jobs[run.name] = run.world, told
    return deepspeed_judge.JUDGE.run(place / "out", jobs)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_deepspeed_resumes_from_it(run, resumed, made):
    got = resumed[run.name]
    assert isinstance(got, dict), got
    wanted = read_expected(made / run.source)
    loaded = got["loaded"]
    dtype = getattr(torch, dtypes.parse(run.precision).name)
    if run.weights_only:  # the masters begin anew, from these
        wanted |= {
            "params": wanted["live"],
            "slots": {},
            "optimizer_steps": {},
            "train": loaded["train"],
        }
    for part in ("params", "frozen", "buffers", "live"):
        assert loaded[part].keys() == wanted[part].keys()
        for name, value in wanted["params" if part == "live" else part].items():
            kept = value.to(dtype) if part == "live" else value
            assert torch.equal(loaded[part][name], kept), (part, name)
    for slot, tensors in wanted["slots"].items():
        assert_same_tensors(loaded["slots"][slot], tensors)
    assert set(loaded["optimizer_steps"].values()) == set(wanted["optimizer_steps"].values())
    called = {g["name"] for g in loaded["train"]["param_groups"] if g.get("moe")}
    assert called == {f"ep_size_{ranks}" for ranks in run.ranks}
    assert set(loaded["train"]["lr"]) == set(wanted["train"]["lr"])
    for name in ("step", "skipped"):
        assert loaded["train"][name] == wanted["train"][name], name
    off = [abs(a - b) for a, b in zip(got["losses"], wanted["next"]["losses"], strict=True)]
    assert run.weights_only or max(off) <= run.noise, off  # without steps it sees other batches
    if run.stays:
        assert off == [0.0, 0.0]
        assert_same_tensors(got["params"], wanted["next"]["params"])


@pytest.mark.parametrize(
    ("case", "options", "error", "message"),
    [
        ("moe_z2", {"to": "ds-universal"}, UnsupportedError, "no universal layout"),
        (
            "moe_z2",
            {"zero_stage": 3},
            UnsupportedError,
            "does not support its own layers of experts",
        ),
        ("moe_z2", {"world_size": 3}, UsageError, "does not divide the 3 data-parallel"),
        ("moe_z2", {"world_size": 4, "ep": 4}, UsageError, "does not divide the 2 experts"),
        (
            "moe_z1_sizes",
            {"zero_stage": 0},
            UnsupportedError,
            "no file states which layer",
        ),
        ("moe_z1_sizes", {"world_size": 8, "tp": 2}, UsageError, "no file states how such ranks"),
        ("z2_bf16", {"world_size": 2, "ep": 2}, UsageError, "contains no experts"),
    ],
)
def test_what_cannot_be_loaded_is_refused(case, options, error, message, made, tmp_path):
    with pytest.raises(error, match=message):
        split(made / case / "run", tmp_path / "out", SplitOptions(**options))
    assert list(tmp_path.iterdir()) == []
