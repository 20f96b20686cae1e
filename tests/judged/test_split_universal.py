"""Universal checkpoints that reshard writes: read back, compared with DeepSpeed's, loaded by it."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from tests.judged.alike import assert_same_tensors
from tests.judged.expected import read_expected
from tests.judged.test_split_deepspeed import check_train, contents, read, run_of, torch_loaded
from tests.judges import deepspeed_judge, split_worker
from tests.judges.deepspeed_cases import ADAMW, CASES, Case, ds_config
from tests.judges.ranks import run_in_turn
from tests.trainer import worlds

READ = """
    z0_fp16_overflow z0_fp32 z1_adagrad z1_full z1_round_robin z2_elastic z2_groups_tiny z3_full
    z3_subgroups_groups z3_zero_init_tied_ws4 bf16opt_groups_ws4 hf_z3_tied
""".split()
CONVERTED = ("universal_z1", "universal_z2", "universal_z3", "universal_bf16opt")
LEFT_OUT = {  # of optimizer_state.pt: how the source was cut, which nothing asks for
    *("zero_stage", "group_paddings", "param_alignment_paddings", "partition_count"),
    *("fp32_flat_groups",),
}


def universal(source, destination, **options):
    reshard.split(source, destination, to="ds-universal", **options)
    return destination


@pytest.mark.parametrize("case", READ)
def test_it_reads_back_as_the_same_state(case, made, tmp_path):
    source = read(run_of(case, made))
    found = read(universal(run_of(case, made), tmp_path / "out", world_size=5))
    assert contents(found) == contents(source)
    check_train(found.train, source.train, stage=1)
    for part in ("tied", "frozen"):
        assert getattr(found, part) == getattr(source, part)
    assert found.trained_dtypes.items() <= source.trained_dtypes.items()
    assert found.origin.precision == source.origin.precision
    assert found.origin.mesh["world"] == 5


def test_it_is_split_to_native_ranks_of_the_runs_stage(made, tmp_path):
    source = run_of("z3_groups_decay", made)
    middle = universal(source, tmp_path / "universal")
    report = reshard.split(middle, tmp_path / "native", world_size=3)
    assert report.target == "deepspeed stage 3"
    found = read(tmp_path / "native")
    assert contents(found) == contents(read(source))
    check_train(found.train, read(source).train, stage=3)


@pytest.mark.parametrize("case", CONVERTED)
def test_the_files_are_those_of_ds_to_universal(case, made, tmp_path):
    """Name by name and value by value, but for what no loader reads, and what one lacks."""
    (theirs,) = (made / case / "universal").glob("global_step*")
    out = universal(run_of(case, made), tmp_path / "out")
    (ours,) = out.glob("global_step*_universal")
    assert (out / "latest_universal").read_text() == ours.name
    manifest = read(out)
    trained = {fqn for group in manifest.train.param_groups for fqn in group.fqns}
    held = {folder.name for folder in (ours / "zero").iterdir() if folder.is_dir()}
    assert held == trained
    sharded = case == "universal_z3"
    for fqn in trained:
        names = {path.name for path in (theirs / "zero" / fqn).iterdir()}
        assert {path.name for path in (ours / "zero" / fqn).iterdir()} == names | {"step.pt"}
        for name in names:
            check_tensor_file(ours / "zero" / fqn / name, theirs / "zero" / fqn / name, sharded)
    check_optimizer_file(*(torch_loaded(d / "zero" / "optimizer_state.pt") for d in (ours, theirs)))
    for path in theirs.glob("*_rank_0*_model_states.pt"):
        if "zero_pp_rank_1" not in path.name:
            check_model_file(torch_loaded(ours / path.name), torch_loaded(path))


def check_tensor_file(ours, theirs, sharded):
    found, wanted = torch_loaded(ours), torch_loaded(theirs)
    if sharded:  # a bare flat tensor, there
        found, wanted = {"param": found["param"].flatten()}, {"param": wanted}
    if not isinstance(wanted, dict):
        found, wanted = {"step": found}, {"step": wanted}
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype
            assert torch.equal(found[key], value), (ours, key)
        else:
            assert found[key] == value


def check_optimizer_file(ours, theirs):
    assert theirs.keys() - ours.keys() <= LEFT_OUT
    for key in ours.keys() & theirs.keys() - {"loss_scaler", "optimizer_state_dict"}:
        assert ours[key] == theirs[key], key
    if "optimizer_state_dict" in theirs:
        wanted = theirs["optimizer_state_dict"]
        found = ours["optimizer_state_dict"]
        assert found["state"][0]["step"] == wanted["state"][0]["step"]
        assert found["param_groups"] == wanted["param_groups"]


def check_model_file(ours, theirs):
    assert set(ours) == set(theirs) | {"universal_checkpoint_info"}
    check_tensors(ours.pop("module"), theirs.pop("module"))
    found, wanted = ours.pop("frozen_param_fragments"), theirs.pop("frozen_param_fragments")
    if None not in (found, wanted):  # not listed at stage 1, in pieces at stage 3
        check_tensors(found, wanted)
        assert ours["frozen_param_shapes"] == theirs["frozen_param_shapes"]
    for key in theirs.keys() - {"frozen_param_shapes", "ds_config", "dp_world_size"}:
        assert ours[key] == theirs[key], key


def check_tensors(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name


def test_a_checkpoint_of_ds_to_universal_is_written_again(made, tmp_path):
    source = made / "universal_z3" / "universal"
    found = read(universal(source, tmp_path / "out"))
    assert contents(found) == contents(read(source))
    check_train(found.train, read(source).train, stage=3)


@contextmanager
def few_descriptors():
    """Allow this process 50 descriptors beside those that the tests have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 50, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_files_need_few_descriptors(tmp_path):
    model = torch.nn.ParameterDict({f"p{i}": torch.full((2, 3), float(i)) for i in range(250)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    with few_descriptors():
        universal(tmp_path / "checkpoint.pt", tmp_path / "out", workers=2)
        found = read(tmp_path / "out")
    assert contents(found) == contents(read(tmp_path / "checkpoint.pt"))
    assert len(list((tmp_path / "out").rglob("*.pt"))) == 4 * 250 + 3


# Loaded by real DeepSpeed


@dataclass(frozen=True)
class Loaded:
    """One run of real DeepSpeed on a universal checkpoint.

    Args:
        source: the case whose checkpoint is converted.
        case: the run that loads it: its configuration, model and groups.
    """

    source: str
    case: Case
    ranks: int

    @property
    def name(self):
        return f"{self.source}-{self.case.name}-{self.ranks}"

    @property
    def noise(self):
        """Return how far two steps' losses may differ: other ranks add gradients otherwise."""
        if "fp32" in self.case.name:
            return 3e-6  # six units in the last place of a loss; the processor matters too
        return 1e-3 if "z0" in self.source else 1e-4  # stage 0 also rounds gradients elsewhere


FOUR, WHOLE_GRID = "z2_bf16_ws4", [(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3)]
TIED = {"model": "menagerie_tied"}
RUNS = [
    *(
        Loaded(FOUR, Case(f"z{stage}", ranks, ds_config(stage, "bf16"), **TIED), ranks)
        for stage, ranks in WHOLE_GRID
    ),
    Loaded("z3_bf16_ws4", CASES["z3_bf16_ws4"], 4),
    Loaded("z3_fp32_ws3", CASES["z1_fp32_ws3"], 2),
    Loaded("z0_fp16_overflow", CASES["z2_fp16"], 3),
    Loaded("z1_elastic", CASES["z1_bf16"], 3),
    Loaded("z1_round_robin", CASES["z2_bf16"], 3),
    Loaded("z1_groups_tiny", CASES["bf16opt_groups_ws4"], 1),
    Loaded("z3_groups_tiny", CASES["z3_groups_tiny"], 3),
    Loaded("z1_full", CASES["z3_full"], 3),
    Loaded("z2_amsgrad", CASES["z2_amsgrad"], 3),
    Loaded("z2_sgd", CASES["z1_sgd"], 3),
    Loaded("z2_checkpointed", CASES["z3_checkpointed"], 2),
    Loaded("z3_checkpointed", CASES["z2_checkpointed"], 3),
]
REFUSED = [  # what no universal checkpoint can be loaded into, and how DeepSpeed says so
    (Loaded("z2_fp32", CASES["z0_fp32"], 1), "'NoneType' object has no attribute 'copy'"),
    (Loaded("z2_groups_tiny", CASES["z2_groups_tiny"], 2), "list index out of range"),
    (Loaded("z2_sgd", CASES["z3_sgd"], 1), "KeyError: 'step'"),
]
WRONG = Loaded("z1_round_robin", CASES["z1_round_robin"], 2)
ROUND = Case(  # makes a run, and DeepSpeed's own conversion of it
    *("round", 2, ds_config(2, "bf16", {"round_robin_gradients": True})),
    model="llama",
    universal=True,
)
FSDP = [
    Loaded(
        "fsdp", Case(f"fp32_z{stage}", ranks, ds_config(stage, "fp32"), model="llama_tied"), ranks
    )
    for stage, ranks in ((2, 3), (3, 2))
]


@pytest.fixture(scope="module")
def fsdp(made, tmp_path_factory):
    """Save a real FSDP 2 run of two ranks with DCP; return its state and its next losses."""
    place = tmp_path_factory.mktemp("fsdp")
    arguments = (place, run_of("hf_z1_fp32_tied", made), 3, 2)
    jobs = [("fsdp", split_worker.save_llama, *arguments)]
    losses = worlds.run(2, run_in_turn, jobs)[0]["fsdp"]
    assert isinstance(losses, list), losses
    return place, losses


@pytest.fixture(scope="module")
def loaded(made, fsdp, tmp_path_factory) -> dict[str, Any]:
    """Run -> what DeepSpeed holds and how it goes on; one process for all: imports take long."""
    place = tmp_path_factory.mktemp("loaded")
    jobs, directories = {}, {"fsdp": universal(fsdp[0] / "dcp", place / "fsdp")}
    for run in [*RUNS, *(run for run, _ in REFUSED), WRONG, *FSDP]:
        if run.source not in directories:
            out = place / "universal" / run.source
            out.parent.mkdir(exist_ok=True)
            directories[run.source] = universal(run_of(run.source, made), out)
        told = {"load": directories[run.source], "steps": 2, "case": run.case, "universal": True}
        jobs[run.name] = run.ranks, told
    jobs[ROUND.name] = ROUND.world, {"case": ROUND}
    found = deepspeed_judge.JUDGE.run(place / "out", jobs)
    assert isinstance(found[ROUND.name], dict), found[ROUND.name]
    found[ROUND.name] |= {"out": place / "out" / ROUND.name}
    return found


def off(losses, wanted):
    """Return relative differences."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_deepspeed_continues_from_it(run, loaded, made):
    got = loaded[run.name]
    assert isinstance(got, dict), got
    wanted = read_expected(made / run.source)
    found = got["loaded"]
    for part in ("params", "frozen", "buffers", "live"):
        assert_same_tensors(found[part], wanted[part])
    for slot, tensors in wanted["slots"].items():
        assert_same_tensors(found["slots"][slot], tensors)
    assert set(found["optimizer_steps"].values()) == set(wanted["optimizer_steps"].values())
    for name in ("step", "skipped", "lr", "scheduler", "client_state"):
        assert found["train"][name] == wanted["train"][name], name
    if None not in (found["train"]["loss_scale"], wanted["train"]["loss_scale"]):
        assert found["train"]["loss_scale"] == wanted["train"]["loss_scale"]
    for group, other in zip(
        found["train"]["param_groups"], wanted["train"]["param_groups"], strict=True
    ):
        assert {**group, "fqns": set(group["fqns"])} == {**other, "fqns": set(other["fqns"])}
    differences = off(got["losses"], wanted["next"]["losses"])
    assert differences[0] <= 1e-6, differences
    assert differences[1] <= run.noise, differences
    if run.source == run.case.name and run.ranks == run.case.world:
        assert differences == [0.0, 0.0]
        for name, value in wanted["next"]["params"].items():
            assert torch.equal(got["params"][name], value), name


@pytest.mark.parametrize("run", FSDP, ids=lambda run: run.name)
def test_fsdp_continues_under_zero(run, loaded, fsdp):
    place, losses = fsdp
    got = loaded[run.name]
    assert isinstance(got, dict), got
    wanted = torch.load(place / split_worker.EXPECTED)
    for name, value in got["loaded"]["params"].items():
        assert torch.equal(value, wanted["model"][name]), name
        for slot in ("exp_avg", "exp_avg_sq"):
            state = wanted["optim"]["state"][name]
            assert torch.equal(got["loaded"]["slots"][slot][name], state[slot]), (slot, name)
    assert set(got["loaded"]["optimizer_steps"].values()) == {3.0}
    (group,) = got["loaded"]["train"]["param_groups"]
    assert group["lr"] == ADAMW["params"]["lr"]
    assert max(off(got["losses"], losses)) <= 1e-6


@pytest.mark.parametrize(("run", "word"), REFUSED, ids=["stage 0", "small group", "no Adam"])
def test_what_deepspeed_cannot_load(run, word, loaded):
    """The report says so: stage 0, a group too small for the ranks, no Adam at stage 3."""
    assert isinstance(loaded[run.name], str)
    assert word in loaded[run.name]


def test_deepspeed_scatters_it_where_parameters_go_round(loaded, made, tmp_path):
    """And the report says that too; another run loads the same files (``RUNS``)."""
    wanted = read_expected(made / WRONG.source)
    found = loaded[WRONG.name]["loaded"]["params"]
    assert any(not torch.equal(found[name], value) for name, value in wanted["params"].items())
    report = reshard.split(run_of(WRONG.source, made), tmp_path / "out", to="ds-universal")
    assert any("must not have round_robin_gradients" in note for note in report.notes)


def test_wrong_output_of_ds_to_universal_causes_a_warning(loaded):
    """It says nothing itself; from the run itself everything is right."""
    expected = loaded[ROUND.name]
    wrong = []
    for name in ("run", "universal"):
        source = expected["out"] / name
        with reshard.open(source) as checkpoint:
            equal = [torch.equal(checkpoint[n][...], v) for n, v in expected["params"].items()]
            warned = any("round_robin" in text for text in checkpoint.manifest.warnings)
        wrong.append((equal.count(False) > 0, warned))
    assert wrong == [(False, False), (True, True)]


NOTES = {
    "z2_groups_tiny": (
        "param group 2 has 1 elements",
        "each group keeps its script's weight_decay, lr",
    ),
    "z2_sgd": ("does not load at stage 3",),
    "z2_amsgrad": ("stage 3 does not load max_exp_avg_sq",),
    "z1_elastic": ("does not keep hyper-parameters",),
    "z1_bf16": ("restores no frozen parameter and no buffer", "its own counter after loading"),
}


@pytest.mark.parametrize("case", NOTES)
def test_the_report_states_requirements_of_the_loading_run(case, made, tmp_path):
    out = Path(tmp_path, "out")
    report = reshard.split(run_of(case, made), out, to="ds-universal", dry_run=True)
    for text in NOTES[case]:
        assert any(text in note for note in report.notes), (text, report.notes)
