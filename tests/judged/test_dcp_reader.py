"""`reshard.dcp`: real checkpoints into live FSDP2, FSDP1, DDP and plain models, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import reshard
import reshard.dcp
from tests.judged.expected import read_expected
from tests.judges import dcp_reader_worker as worker
from tests.judges.dcp_reader_worker import fails, menagerie, resumed, weights_only
from tests.judges.ranks import run_in_turn
from tests.trainer import worlds

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-zero3-4ranks"
WRONG = {
    "missing": ("IncompleteError", "does not have 'model.extra.weight'", "allow_partial_load"),
    "slot": ("IncompleteError", "max_exp_avg_sq", "which the target requests"),
    "more": ("IncompleteError", "'optim.state.extra.exp_avg'", "trains more parameters now"),
    "shape": ("ValueError", "Size mismatch", "model.model.norm.weight"),
    "ema": ("IncompleteError", "does not have 'ema.", "weights and optimizer state alone"),
    "groups": (
        "UsageError",
        "has 1 parameter groups, but the target has 2",
        "of its first parameter",
    ),
    "prefix": ("UsageError", "is in ", 'StorageReader(..., model="net")'),
    "optimizer prefix": ("UsageError", "is in ", 'StorageReader(..., optimizer="adam")'),
    "two prefixes": ("UsageError", "'model' and 'teacher.model'", 'StorageReader(..., model="'),
    "numbers": ("UsageError", "by its number", "get_optimizer_state_dict"),
    "fresh": ("UsageError", "has param groups and no state", "get_optimizer_state_dict"),
    "integers": ("DifferentError", "float32 in the checkpoint", "torch.int32 in the target"),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a directory that transformers saved: bf16 weights only, without the tied head."""
    place = tmp_path_factory.mktemp("pretrained")
    worker.llama(EXAMPLE, torch.bfloat16, seed=5).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def judged(made):
    """Return case -> the directory with checkpoint and config.json, and DeepSpeed's next losses."""

    def of(case):
        (pointer,) = (made / case / "run").rglob("latest")
        expected = read_expected(made / case)
        return pointer.parent, expected["train"]["step"], expected["next"]["losses"]

    return of


@pytest.fixture(scope="module")
def two(judged, pretrained):
    z3, step, _ = judged("hf_z3_tied")
    fp32, fp32_step, _ = judged("hf_z1_fp32_tied")
    bf16 = torch.bfloat16
    jobs = [
        ("fsdp2", resumed, "fsdp2", EXAMPLE),
        ("fsdp2 bf16", resumed, "fsdp2", z3, "nested", 2, step, bf16),
        ("fsdp2 fp32", resumed, "fsdp2", fp32, "nested", 2, fp32_step),
        ("fsdp2 flat", resumed, "fsdp2", EXAMPLE, "flat"),
        ("fsdp2 app", resumed, "fsdp2", EXAMPLE, "app"),
        ("ddp", resumed, "ddp", fp32, "nested", 2, fp32_step),
        ("ddp flat", resumed, "ddp", EXAMPLE, "flat"),
        ("fsdp1", resumed, "fsdp1", fp32, "nested", 2, fp32_step),
        ("fsdp1 flat", resumed, "fsdp1", EXAMPLE, "flat"),
        ("fsdp1 without mesh", resumed, "fsdp1 without mesh", EXAMPLE),
        ("weights at the top", weights_only, "fsdp2", EXAMPLE),
        ("weights under a name", weights_only, "fsdp2", EXAMPLE, "net"),
        ("weights of ddp by its names", weights_only, "ddp", EXAMPLE, "own names"),
        ("weights cast", weights_only, "fsdp2", EXAMPLE, "top", bf16),
        ("pretrained", weights_only, "fsdp2", pretrained, "top", bf16),
        ("pretrained widened", weights_only, "fsdp2", pretrained),
        *((f"wrong {change}", fails, EXAMPLE, change) for change in WRONG),
        ("weights for training", fails, pretrained, "nothing"),
    ]
    return worlds.run(2, run_in_turn, jobs)


@pytest.fixture(scope="module")
def three(judged):
    fp32, step, _ = judged("hf_z1_fp32_tied")
    jobs = [
        ("fsdp2", resumed, "fsdp2", EXAMPLE),
        ("fsdp2 fp32", resumed, "fsdp2", fp32, "nested", 2, step),
    ]
    return worlds.run(3, run_in_turn, jobs)


@pytest.fixture(scope="module")
def alone(judged, made):
    fp32, step, _ = judged("hf_z1_fp32_tied")
    jobs = [
        ("plain", resumed, "plain", fp32, "nested", 2, step),
        ("masters", resumed, "plain", judged("hf_z2_tied")[0]),
        ("menagerie", menagerie, made / "z3_subgroups_groups" / "run"),
        ("backwards", menagerie, made / "z3_subgroups_groups" / "run", "backwards"),
        ("mixed", menagerie, made / "z3_subgroups_groups" / "run", "mixed"),
        ("scalars", worker.scalars, EXAMPLE),
        ("unfinished", worker.unfinished, EXAMPLE),
        ("careless", worker.careless, EXAMPLE),
        ("partly", worker.partly, EXAMPLE),
        ("everything", worker.everything, EXAMPLE),
    ]
    return worlds.run(1, run_in_turn, jobs)[0]


def optimizer_bytes(source, *kinds):
    with reshard.open(source) as checkpoint:
        entries = checkpoint.manifest.entries.values()
        return sum(entry.nbytes for entry in entries if not kinds or entry.kind in kinds)


def test_two_ranks_load_the_values_of_the_checkpoint(two):
    for found in two:
        for name, result in found.items():
            if not name.startswith("wrong") and name != "weights for training":
                assert result.get("at") is None, result["at"]
                assert result["differing"] == [], name


def test_three_ranks_have_uneven_shards_of_the_same_state(three):
    for found in three:
        for name, result in found.items():
            assert result.get("at") is None, result["at"]
            assert result["differing"] == [], name


def test_two_dims_of_shards():
    for found in worlds.run(4, run_in_turn, [("2d", worker.two_dims, EXAMPLE)]):
        assert found["2d"].get("at") is None, found["2d"]["at"]
        assert found["2d"]["differing"] == []


def test_training_goes_on_as_in_deepspeed(two, three, alone, judged):
    _, _, expected = judged("hf_z1_fp32_tied")
    runs = {
        "fsdp2@2": two[0]["fsdp2 fp32"],
        "fsdp2@3": three[0]["fsdp2 fp32"],
        "ddp@2": two[0]["ddp"],
        "fsdp1@2": two[0]["fsdp1"],
        "plain": alone["plain"],
    }
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(expected, rel=2e-6), name
    _, _, expected = judged("hf_z3_tied")
    assert two[0]["fsdp2 bf16"]["losses"] == pytest.approx(expected, rel=2e-3)


def test_a_rank_reads_its_own_bytes_only(two, three):
    total = optimizer_bytes(EXAMPLE)
    for world, found in ((2, two), (3, three)):
        shares = [rank["fsdp2"]["nbytes"] for rank in found]
        assert sum(shares) == total  # the tied head is not read twice, nor is anything else
        assert max(shares) < 1.1 * total / world
    assert [rank["ddp flat"]["nbytes"] for rank in two] == [total, total]
    weights = optimizer_bytes(EXAMPLE, "master")
    assert sum(rank["weights at the top"]["nbytes"] for rank in two) == weights


@pytest.mark.parametrize("change", WRONG)
def test_state_that_does_not_fit_is_named(two, change):
    error, *texts = WRONG[change]
    for found in two:
        raised = found[f"wrong {change}"]
        assert error in raised["raised"].values()
        for text in texts:
            assert text in raised["text"]


def test_weights_alone_do_not_fill_an_optimizer(two):
    raised = two[0]["weights for training"]
    assert set(raised["raised"].values()) == {"IncompleteError"}
    assert "optim." in raised["text"]


def test_plain_models_and_odd_tensors(alone):
    for name in ("plain", "masters", "menagerie", "backwards", "everything"):
        assert alone[name].get("at") is None, alone[name]["at"]
        assert alone[name]["differing"] == [], name
    groups = [(lr, decay) for lr, decay, _ in alone["menagerie"]["groups"]]
    assert groups == [(1e-3, 0.0), (1e-3, 0.1), (3e-3, 0.05)]
    assert alone["backwards"]["groups"] == alone["menagerie"]["groups"]


def test_groups_with_other_members_are_refused(alone):
    assert alone["mixed"]["raised"] == {0: "UsageError"}
    assert "are in one group of the target, but in two of the checkpoint" in alone["mixed"]["text"]


def test_scalars_take_the_targets_types_and_switches_stay(alone):
    rate = float(torch.tensor(0.01))
    assert alone["scalars"] == (4, rate, (0.9, 0.999), None, False)
    assert alone["unfinished"]["raised"] == {0: "IncompleteError"}
    assert "does not have 'optim.param_groups.0.momentum'" in alone["unfinished"]["text"]


def test_shapes_are_compared_where_the_planner_does_not(alone):
    assert alone["careless"]["raised"] == {0: "DifferentError"}
    assert "has shape (32,) in the checkpoint, but (64,) in the target" in alone["careless"]["text"]


def test_a_load_without_a_target_returns_everything(alone):
    found = alone["everything"]
    assert (found["lr"], found["params"]) == (0.01, 20)
    assert (found["step"], found["step type"]) == (4.0, "torch.float32")


def test_the_planner_decides_whether_a_partial_load_is_allowed(alone):
    assert alone["partly"] == (True, [1.0, 1.0], 7)


def test_casts(tmp_path):
    values = torch.tensor([[1.0, 2.0, 3.0], [1e6, float("inf"), 1e-9]])
    whole = torch.arange(6).reshape(2, 3)
    save_file({"w": values, "n": whole}, tmp_path / "x.safetensors")
    source = tmp_path / "x.safetensors"
    bf16, half = torch.bfloat16, torch.float16
    jobs = [
        ("bf16", worker.into, source, "w", (2, 3), bf16),
        ("fp16", worker.into, source, "w", (2, 3), half),
        ("int32", worker.into, source, "n", (2, 3), torch.int32),
        ("same", worker.into, source, "n", (2, 3), torch.int64),
    ]
    (found,) = worlds.run(1, run_in_turn, jobs)
    assert found["bf16"] == values.bfloat16().tolist()
    assert found["same"] == whole.tolist()
    assert found["fp16"]["raised"] == {0: "DifferentError"}
    assert (
        "1 finite value of float32 would become infinite in torch.float16" in found["fp16"]["text"]
    )
    assert found["int32"]["raised"] == {0: "DifferentError"}


def test_wrappers_in_the_checkpoints_names(tmp_path):
    values = torch.randn(5, 3)
    save_file({"module._orig_mod.w": values}, tmp_path / "x.safetensors")
    jobs = [("w", worker.into, tmp_path / "x.safetensors", "w", (5, 3), torch.float32)]
    (found,) = worlds.run(1, run_in_turn, jobs)
    assert found["w"] == values.tolist()


def test_a_target_that_is_not_contiguous(tmp_path):
    values = torch.randn(130, 70)
    save_file({"w": values}, tmp_path / "x.safetensors")
    source = tmp_path / "x.safetensors"
    jobs = [
        (str(dtype), worker.into, source, "w", (130, 70), dtype, True)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    (found,) = worlds.run(1, run_in_turn, jobs)
    assert found["torch.float32"] == values.tolist()
    assert found["torch.bfloat16"] == values.bfloat16().tolist()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("is_written", [True, False])
def test_an_optimizer_of_named_parameters(is_written, tmp_path):
    """Load the groups of a live optimizer that have ``param_names``, which DCP asks for."""
    source = tmp_path / "state.pt"
    saved, optimizer = make_named()
    saved(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, source)
    live, loaded = make_named()
    weights, state = get_state_dict(live, loaded)
    target = {"model": weights, "optim": state}
    if is_written:
        reshard.split(source, tmp_path / "out", to="dcp", world_size=2)
        dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    else:
        dcp.load(target, storage_reader=reshard.dcp.StorageReader(source), no_dist=True)
    set_state_dict(live, loaded, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(live.weight, saved.weight)
    for name, wanted in zip(("weight", "bias"), saved.parameters(), strict=True):
        held = loaded.state[live.get_parameter(name)]
        assert torch.equal(held["exp_avg"], optimizer.state[wanted]["exp_avg"])
    assert [g["param_names"] for g in loaded.param_groups] == [["weight"], ["bias"]]


def make_named():
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [each]} for each in model.named_parameters()]
    return model, torch.optim.AdamW(groups, lr=1e-2)
