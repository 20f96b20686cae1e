"""Every optimizer at every ZeRO stage, for other ranks, in the real DeepSpeed engine.

``python -m tests.judged.test_optimizers DIRECTORY`` runs every optimizer, stage and target and
prints the table of ``docs/optimizers.md``; here stand the cells that cover what differs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.errors import DifferentError, ReshardError, UnsupportedError
from tests.judged.damage import edit_file
from tests.judges import optimizers, server
from tests.judges.optimizers import Kind

pytestmark = pytest.mark.slow

JUDGE = server.Judge(
    *("tests.judges.optimizers_worker", "DeepSpeed", {}),
    like=server.DEEPSPEED,
    result=server.EXPECTED,
)
NOISE = 3e-4  # two steps' losses at another number of ranks: the order of gradients, in bf16
BUFFERS = 6e-3  # zero.Init makes the buffers in bf16, too: the same weights have other losses
# It scales by the mean square of the piece that a rank has.
OWN_NOISE = {"adafactor": 5e-3, "hf_adafactor": 5e-3}
NOT_IN_DEEPSPEED = {("adagrad", 0)}  # its engine cannot save it: state made for other parameters
FIRST_RANKS = 2


@dataclass(frozen=True)
class Cell:
    """A run, and what becomes of it.

    Args:
        stage: of the target; None: that of the run. -1: a universal checkpoint, at that of the run.
    """

    kind: Kind
    ranks: int
    stage: int | None = None

    @property
    def source(self) -> str:
        """Return the name of the run."""
        kind = self.kind
        also = "_without_frozen" * kind.exclude_frozen + "_low_masters" * kind.low_masters
        also += "_zero_init" * kind.zero_init + "_sub_groups" * kind.sub_groups
        return f"{kind.optimizer}_z{kind.stage}_{kind.precision}_{kind.groups}{also}"

    @property
    def name(self) -> str:
        """Return the name of the cell."""
        stage = self.kind.stage if self.stage is None else self.stage
        return f"{self.source}-{'universal' if stage < 0 else f'z{stage}'}-{self.ranks}"

    @property
    def loads(self) -> Kind:
        """Return how the run continues."""
        stage = self.kind.stage if self.stage in (None, -1) else self.stage
        return replace(self.kind, stage=stage, zero_init=self.kind.zero_init and stage == 3)

    def write(self, runs: Path, out: Path) -> Path:
        """Split the run."""
        run = runs / self.source / "run"
        if self.stage == -1:
            reshard.split(run, out / self.name, to="ds-universal")
        else:
            stage = self.kind.stage if self.stage is None else self.stage
            reshard.split(run, out / self.name, world_size=self.ranks, zero_stage=stage)
        return out / self.name


def list_cells(optimizer: str) -> list[Cell]:
    """Return all targets of an optimizer: the same size, smaller, larger, universal."""
    stages = [stage for stage in range(4) if (optimizer, stage) not in NOT_IN_DEEPSPEED]
    if optimizer == "shampoo":  # its matrices need whole parameters
        stages = [stage for stage in stages if stage == 0]
    made = [Cell(Kind(optimizer, stage), ranks) for stage in stages for ranks in (2, 1, 3)]
    return [*made, *(Cell(Kind(optimizer, stage), 3, -1) for stage in stages if stage)]


COVERING = [
    Cell(Kind("nadam", 1), 3),
    Cell(Kind("nadam", 2), 2),
    Cell(Kind("nadam", 2), 1, 3),
    Cell(Kind("nadam", 3, sub_groups=True), 3),
    Cell(Kind("nadam", 0), 3, 2),
    Cell(Kind("asgd", 2), 2, 0),
    Cell(Kind("muon", 0), 2),
    Cell(Kind("muon", 0, "fp32"), 3),
    Cell(Kind("muon", 0), 3, 2),
    Cell(Kind("muon", 3), 1, 0),
    Cell(Kind("muon", 1), 3),
    Cell(Kind("muon", 2), 2),
    Cell(Kind("muon", 2), 1),
    Cell(Kind("muon", 2), 3, 3),
    Cell(Kind("muon", 3), 3, 2),
    Cell(Kind("muon", 3, zero_init=True), 3),
    Cell(Kind("muon", 3, zero_init=True), 2, 2),
    Cell(Kind("lion", 3), 2),
    Cell(Kind("lion", 3), 3, 1),
    Cell(Kind("lion", 1), 3, -1),
    Cell(Kind("schedule_free", 2), 3),
    Cell(Kind("ademamix", 3), 1),
    Cell(Kind("adafactor", 0), 3),
    Cell(Kind("adafactor", 2), 3, -1),
    Cell(Kind("hf_adafactor", 2), 3, -1),
    # At stage 3, DeepSpeed can have NaN for a parameter that is not used, and the RMS spreads it.
    Cell(Kind("hf_adafactor", 1), 3, 3),
    Cell(Kind("shampoo", 0), 3),
    Cell(Kind("adamw", 3, exclude_frozen=True), 3),
    Cell(Kind("adamw", 3, exclude_frozen=True), 2, 2),
    Cell(Kind("adamw", 2, groups="tiny"), 3),
    Cell(Kind("adamw", 1, low_masters=True), 2),
    Cell(Kind("adamw", 3, low_masters=True), 3),
]


def made_of(cells: Iterable[Cell], place: Path) -> dict[str, Any]:
    """Make the runs of the cells; run -> what its engine held."""
    return JUDGE.run(place, {cell.source: (FIRST_RANKS, {"kind": cell.kind}) for cell in cells})


def resumed_of(cells: Iterable[Cell], runs: Path, place: Path) -> dict[str, Any]:
    """Split and resume; cell -> what its engine held, or why there is none."""
    jobs, found = {}, dict[str, Any]()
    place.mkdir()
    for cell in cells:
        try:
            load = cell.write(runs, place)
        except ReshardError as refusal:
            found[cell.name] = str(refusal)
            continue
        told = {"kind": cell.loads, "load": load, "universal": cell.stage == -1}
        jobs[cell.name] = cell.ranks, told
    return found | JUDGE.run(place / "out", jobs)


def list_differences(got: Any, wanted: Any) -> list[str]:
    """Return the values in which two engines differ, bit for bit."""
    names = sorted(got.keys() | wanted.keys())
    return [
        f"{name} of {fqn}"
        for name in names
        for fqn in sorted(got.get(name, {}).keys() | wanted.get(name, {}).keys())
        if not _same(got.get(name, {}).get(fqn), wanted.get(name, {}).get(fqn))
    ]


def _same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one.float().flatten(), other.float().flatten())
    return type(one) is type(other) and bool(one == other)


def measure_distance(got: Any, wanted: Any) -> float:
    """Return the largest difference between the losses of the next steps."""
    return max(abs(a - b) for a, b in zip(got["next"], wanted["next"], strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the directory for all runs."""
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def runs(place):
    """Run -> what its engine held."""
    return made_of(COVERING, place / "runs")


@pytest.fixture(scope="module")
def resumed(runs, place):
    """Return cell -> what its engine held; one process does all."""
    assert all(not isinstance(held, str) for held in runs.values()), runs
    return resumed_of(COVERING, place / "runs", place / "resumed")


@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: cell.name)
def test_the_engine_continues_with_the_same_state(cell, runs, resumed):
    got, wanted = resumed[cell.name], runs[cell.source]
    assert not isinstance(got, str), got
    assert not list_differences(got["held"], wanted["held"])
    if cell.ranks == FIRST_RANKS and cell.loads.stage == cell.kind.stage:
        assert got["next"] == wanted["next"]
        assert not list_differences(got["after"], wanted["after"])
    noise = NOISE if cell.loads.zero_init == cell.kind.zero_init else BUFFERS
    assert measure_distance(got, wanted) <= OWN_NOISE.get(cell.kind.optimizer, noise)


def test_verify_passes_for_every_optimizer(runs, place):
    """Muon's matrices count nothing, the Adam beside them does."""
    for name in runs:
        report = reshard.verify(place / "runs" / name / "run", deep=True)
        assert not [check.failures for check in report.checks if check.failures], name


def test_the_order_of_muon_at_stage_3_is_reported(runs, place, tmp_path):
    """Without zero.Init: no file of another stage shows whether the new run has it."""
    told = [
        reshard.split(place / "runs" / source / "run", tmp_path / source, zero_stage=3).notes
        for source in ("muon_z2_bf16_one", "muon_z3_bf16_one", "adamw_z2_bf16_tiny")
    ]
    assert ["zero.Init" in " ".join(notes) for notes in told] == [True, False, False]


def test_a_value_that_differs_between_ranks_is_refused(runs, place, tmp_path):
    run = shutil.copytree(place / "runs" / "nadam_z2_bf16_one" / "run", tmp_path / "run")
    (second,) = run.rglob("*pp_rank_1_*optim_states.pt")

    def change(root):
        states = root["optimizer_state_dict"]["base_optimizer_state"]["state"]
        states[0]["mu_product"] *= 2

    edit_file(second, change)
    with pytest.raises(DifferentError, match=r"mu_product of .*: differs between"):
        reshard.split(run, tmp_path / "split", world_size=3)


@pytest.mark.parametrize("source", ["nadam_z2_bf16_one", "muon_z2_bf16_one"])
def test_a_universal_checkpoint_is_refused_where_the_engine_could_not_use_it(
    runs, place, tmp_path, source
):
    with pytest.raises(UnsupportedError, match="write native rank files"):
        reshard.split(place / "runs" / source / "run", tmp_path / "u", to="ds-universal")


def test_requirements_of_a_universal_checkpoint_are_reported(runs, place, tmp_path):
    """Counters in Python, as DeepSpeed's own Adam has; groups without a learning rate."""
    run = shutil.copytree(place / "runs" / "adamw_z2_bf16_tiny" / "run", tmp_path / "run")

    def count_in_python(root):
        held = root["optimizer_state_dict"]["base_optimizer_state"]
        for state in held["state"].values():
            state["step"] = int(state["step"])
        for group in held["param_groups"]:
            del group["capturable"]
            group["bias_correction"] = True

    def be_elastic(root):
        held = root["optimizer_state_dict"]["base_optimizer_state"]
        root["optimizer_state_dict"]["base_optimizer_state"] = list(held["state"].values())

    states = sorted(run.rglob("*_optim_states.pt"))
    for path in states:
        edit_file(path, count_in_python)
    told = reshard.split(run, tmp_path / "counted", to="ds-universal").notes
    assert any('state["step"] = torch.tensor(float(' in note for note in told)
    for path in states:
        edit_file(path, be_elastic)
    (model,) = run.rglob("mp_rank_00_model_states.pt")
    edit_file(model, lambda root: root.update(lr_scheduler={"last_batch_iteration": 2}))
    told = reshard.split(run, tmp_path / "elastic", to="ds-universal").notes
    assert any("engine.lr_scheduler.get_lr()" in note for note in told)


def test_zenflows_masters_are_older_than_its_weights(runs, place, tmp_path):
    """As real runs have it, whose CPU optimizer takes minutes to compile: a column is newer."""
    run = shutil.copytree(place / "runs" / "adamw_z2_bf16_tiny" / "run", tmp_path / "run")
    (model,) = run.rglob("mp_rank_00_model_states.pt")
    name = "llama.model.layers.0.self_attn.q_proj.weight"

    def change(root):
        root["module"][name][:, 3] += 1.0
        root["ds_config"]["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}

    edit_file(model, change)
    weights = torch.load(model, weights_only=False)["module"]
    report = reshard.verify(run, deep=True)
    assert not [check.failures for check in report.checks if check.failures]
    merged = reshard.merge(run, tmp_path / "m.safetensors", dtype="fp32")
    assert any("newer than their fp32 masters" in text for text in merged.warnings)
    for fqn, value in load_file(tmp_path / "m.safetensors").items():
        assert torch.equal(value, weights[fqn].to(value.dtype)), fqn
    reshard.split(run, tmp_path / "split", world_size=3)
    with reshard.open(tmp_path / "split") as split:
        assert torch.equal(split[name][...].float(), weights[name].float())


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_keep_the_dtype_that_the_run_has(runs, place, tmp_path, stage):
    """With ``bf16_master_weights_and_grads`` they are not float32; `diff` tells dtypes apart."""
    run = place / "runs" / f"adamw_z{stage}_bf16_one_low_masters" / "run"
    for how in ({"world_size": 3}, {"to": "ds-universal"}):
        out = tmp_path / how.get("to", "native")
        reshard.split(run, out, **how)
        with reshard.open(out) as made:
            masters = {entry.dtype.name for entry in made.manifest.of_kind("master")}
        assert masters == {"bfloat16"}
        assert not reshard.diff(run, out).unequal


def test_a_matrix_has_no_place_in_a_flat_tensor(runs, place, tmp_path):
    run = place / "runs" / "shampoo_z0_bf16_one" / "run"
    with pytest.raises(UnsupportedError, match="stage 0 keeps it"):
        reshard.split(run, tmp_path / "s", world_size=2, zero_stage=2)


@pytest.mark.parametrize("optimizer", ["adafactor", "hf_adafactor"])
def test_flat_adafactor_has_no_place_in_whole_parameters(optimizer, runs, place, tmp_path):
    run = place / "runs" / f"{optimizer}_z2_bf16_one" / "run"
    with pytest.raises(UnsupportedError, match="write stage 1, 2 or 3"):
        reshard.split(run, tmp_path / "s", world_size=2, zero_stage=0)
    whole = ({"to": "torch"}, {"to": "fsdp2"}, {"to": "accelerate", "state_dict_type": "unsharded"})
    for target in whole:
        with pytest.raises(UnsupportedError, match=r"write --to fsdp or --to deepspeed"):
            reshard.split(run, tmp_path / "s", **target)
        reshard.split(run, tmp_path / target["to"], **target, weights_only=True)
    notes = reshard.split(run, tmp_path / "dcp", to="dcp").notes
    assert any("only FSDP 1 continues from this optimizer" in note for note in notes)


@pytest.mark.parametrize(("version", "clips"), [("0.19.8", True), ("0.18.9", False)])
def test_a_norm_that_only_deepspeeds_default_clips_to_is_reported(
    version, clips, runs, place, tmp_path
):
    """Stage 3 does not store it; from 0.19.3 on, a configuration without a norm clips to 1."""
    source = place / "runs" / "adamw_z3_bf16_one_without_frozen" / "run"
    run = shutil.copytree(source, tmp_path / "run")

    def leave_out(root):
        root["ds_version"] = version
        root.get("ds_config", {}).pop("gradient_clipping", None)

    for path in run.rglob("*_states.pt"):
        edit_file(path, leave_out)
    notes = reshard.split(run, tmp_path / "dcp", to="dcp").notes
    assert any("set gradient clipping to 1 in the new run" in note for note in notes) == clips


@pytest.mark.parametrize("ranks", [2, 4])
def test_padding_longer_than_a_ranks_piece(runs, place, tmp_path, ranks):
    """A group of one element as DeepSpeed up to 0.15.4 saves it: the last rank keeps padding."""
    pytest.importorskip("deepspeed")  # whose loss scaler is pickled in the files
    made = place / "runs" / "adamw_z2_bf16_tiny" / "run"
    reshard.split(made, tmp_path / "run", world_size=ranks)
    files = sorted((tmp_path / "run").rglob("*_optim_states.pt"))
    (model,) = (tmp_path / "run").rglob("mp_rank_00_model_states.pt")
    shapes = torch.load(model, weights_only=False)["param_shapes"]
    ends = [sum(shape.numel() for shape in group.values()) for group in shapes]
    kept = []
    for number, file in enumerate(files):
        root = torch.load(file, weights_only=False)
        as_before_0_15_5(root["optimizer_state_dict"], ends, number, ranks)
        torch.save(root, file)
        pieces = root["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        kept.append(min(piece.numel() for piece in pieces))
    assert kept == {2: [2, 1], 4: [2, 2, 2, 0]}[ranks]
    wanted = runs["adamw_z2_bf16_tiny"]["held"]
    with reshard.open(tmp_path / "run") as checkpoint:
        for name, value in wanted["exp_avg"].items():
            assert torch.equal(checkpoint.optimizer("exp_avg")[name][...].flatten(), value), name
    reshard.merge(tmp_path / "run", tmp_path / "m.safetensors", dtype="fp32")
    merged = load_file(tmp_path / "m.safetensors")
    for name, value in wanted["weight"].items():
        assert torch.equal(merged[name].flatten(), value), name


def as_before_0_15_5(root, ends, number, ranks):
    """Cut a rank's masters as those versions did: all padding of a group is the last rank's.

    DeepSpeed 0.15.4 ``stage_1_and_2.py``: ``groups_padding`` is 0 but for the last partition, and
    ``_get_groups_without_padding`` takes ``group[:lean_length]``, whose bound may be negative.
    """
    pieces, paddings = root["single_partition_of_fp32_groups"], root["group_paddings"]
    for group, end in enumerate(ends):
        numel = root["base_optimizer_state"]["state"][group]["exp_avg"].numel()
        full = torch.cat([pieces[group].detach(), torch.zeros(paddings[group])])
        paddings[group] = numel * ranks - end if number == ranks - 1 else 0
        pieces[group] = full[: numel - paddings[group]].clone()
    del root["param_alignment_paddings"]


def table(directory: Path) -> None:
    """Print a row an optimizer of every cell that there is."""
    say = sys.stdout.write
    say("| optimizer | target | " + " | ".join(f"ZeRO {stage}" for stage in range(4)) + " |" + "\n")
    say("|---|---|---|---|---|---|\n")
    for optimizer in optimizers.NAMES:
        cells = list_cells(optimizer)
        wanted = made_of(cells, directory / optimizer)
        found = resumed_of(cells, directory / optimizer, directory / f"{optimizer}_to")
        by_place = {(c.kind.stage, c.stage == -1, c.ranks): c for c in cells}
        for universal, ranks in ((False, 2), (False, 1), (False, 3), (True, 3)):
            words = "universal" if universal else "split"
            row = [by_place.get((stage, universal, ranks)) for stage in range(4)]
            shown = [_shown(cell, found, wanted) if cell else "-" for cell in row]
            say(f"| {optimizer} | {words} 2 -> {ranks} | {' | '.join(shown)} |\n")
            sys.stdout.flush()
        shutil.rmtree(directory / optimizer)
        shutil.rmtree(directory / f"{optimizer}_to")


def _shown(cell: Cell, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    got, before = found[cell.name], wanted[cell.source]
    if isinstance(before, str):
        return "not in DeepSpeed"
    if isinstance(got, str):
        return "DeepSpeed fails" if "failed" in got.splitlines()[0] else "refused"
    wrong = list_differences(got["held"], before["held"])
    off = measure_distance(got, before)
    return f"WRONG {wrong[0]}" if wrong else "bitwise" if not off else f"{off:.0e}"


if __name__ == "__main__":
    table(Path(sys.argv[1]))
