"""Mixtures of experts that real DeepSpeed saved: conversions, and damaged files.

Their weights, masters and moments are compared in ``test_deepspeed.py``, as every case's are.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    StaleError,
    UnsupportedError,
    UsageError,
)
from tests.judged.alike import list_tensors
from tests.judges.deepspeed_cases import CASES
from tests.judges.deepspeed_models import MoeToy

MIXTURES = [name for name, case in CASES.items() if case.kind == "moe"]
FORMS = ["moe_z0", "moe_z1_sizes", "moe_z2"]


@pytest.mark.parametrize("case", MIXTURES)
def test_one_rank_with_all_experts_loads_the_merged_model(case, made, tmp_path):
    model = MoeToy([(count, 1) for count, _ in CASES[case].experts])
    report = reshard.merge(made / case / "run", tmp_path / "x.safetensors", dtype="fp32")
    model.load_state_dict(load_file(tmp_path / "x.safetensors"), strict=True)
    assert report.verified
    with reshard.open(made / case / "run") as checkpoint:
        assert list(checkpoint) == list(model.state_dict())
        mesh = checkpoint.manifest.origin.mesh
    world = CASES[case].world
    ranks = max(size for _, size in CASES[case].experts)
    assert mesh == {"world": world, "dp": world, "ep": ranks}


@pytest.mark.parametrize("target", ["dcp", "torch"])
@pytest.mark.parametrize("case", FORMS)
def test_the_state_goes_to_another_format_whole(case, target, made, tmp_path):
    split(made / case / "run", tmp_path / "out", SplitOptions(to=target))
    got, want = list_tensors(tmp_path / "out"), list_tensors(made / case / "run")
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def test_rules_are_read_for_a_run_without_cuts(made, tmp_path):
    (tmp_path / "rules.yaml").write_text("- 1")
    options = SplitOptions(rules=tmp_path / "rules.yaml")
    with pytest.raises(UsageError, match=r"rules\.yaml"):
        split(made / "moe_z2" / "run", tmp_path / "out", options)


@pytest.mark.parametrize(
    ("case", "lost", "message"),
    [
        ("moe_z0", "layer_1_expert_1_mp_rank_00_model_states.pt", "6 experts in 2 layers"),
        ("moe_z0", "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00"),
        ("moe_z0", "expp_rank_0_mp_rank_00_optim_states.pt", "expp_rank_0_mp_rank_00"),
        ("moe_z0", "expp_rank_1_mp_rank_00_optim_states.pt", "2 expert-parallel ranks"),
        ("moe_z1_sizes", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "4 ranks .*_rank_3_"),
    ],
)
def test_a_missing_file_is_named(case, lost, message, copied, tmp_path):
    run = copied(case)
    next(run.rglob(lost)).unlink()
    with pytest.raises(IncompleteError, match=message):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_a_file_of_a_larger_model_is_detected(copied, tmp_path):
    run = copied("moe_z2")
    expert = next(run.rglob("layer_1_expert_1_*"))
    expert.with_name("layer_1_expert_2_mp_rank_00_model_states.pt").write_bytes(expert.read_bytes())
    with pytest.raises(StaleError, match="that the model does not have"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_an_expert_under_another_experts_name_is_detected(copied, tmp_path):
    run = copied("moe_z2")
    first, second = sorted(run.rglob("layer_1_expert_*"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptError, match="does not contain exactly expert 1"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_an_expert_that_lacks_a_parameter_is_detected(copied, tmp_path):
    run = copied("moe_z0")
    path = next(run.rglob("layer_0_expert_2_*"))
    held = torch.load(path, weights_only=False)
    del held["layers.0.deepspeed_moe.experts.deepspeed_experts.2.2.bias"]
    torch.save(held, path)
    with pytest.raises(
        CorruptError, match=r"same tensors of its expert as layer_0_expert_0.*: 2\.bias"
    ):
        reshard.merge(run, tmp_path / "x.safetensors")


@pytest.mark.parametrize("keeps_own", [False, True])
def test_an_expert_of_a_tensor_parallel_run_is_detected(keeps_own, copied, tmp_path):
    run = copied("moe_z2")
    path = next(run.rglob("layer_0_expert_1_mp_rank_00_model_states.pt"))
    path.with_name(path.name.replace("rank_00", "rank_01")).write_bytes(path.read_bytes())
    if not keeps_own:
        path.unlink()
    with pytest.raises(StaleError, match=r"expert_1_mp_rank_01.*more tensor-parallel ranks"):
        reshard.merge(run, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (
            "mp_rank_00_model_states.pt",
            "mp_rank_01_model_states.pt",
            "experts of a pipeline-parallel run",
        ),
        (
            "layer_0_expert_1_mp_rank_00_model_states.pt",
            "expert_1_mp_rank_00_model_states.pt",
            "expert_N files without a layer number",
        ),
    ],
)
def test_experts_in_unsupported_layouts_are_refused(source, name, message, copied, tmp_path):
    run = copied("moe_z2")
    path = next(run.rglob(source))
    path.with_name(name).write_bytes(path.read_bytes())
    with pytest.raises(UnsupportedError, match=message):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_missing_optimizers_of_all_expert_ranks_are_detected(copied, tmp_path):
    run = copied("moe_z0")
    for path in run.rglob("expp_rank_*"):
        path.unlink()
    with pytest.raises(IncompleteError, match="without ZeRO, but no expp_rank"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_optimizers_of_runs_with_and_without_zero_are_not_mixed(made, copied, tmp_path):
    run = copied("moe_z0")
    other = next((made / "moe_z2" / "run").rglob("*zero_pp_rank_0_*"))
    (next(run.rglob("layer_0_expert_0_*")).parent / other.name).write_bytes(other.read_bytes())
    with pytest.raises(StaleError, match=r"with ZeRO .* and of one without"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_what_all_ranks_hold_is_compared_between_their_optimizers(copied, tmp_path):
    """Without ZeRO each expert-parallel rank saves the moments of the rest of the model too."""
    run = copied("moe_z0")
    path = next(run.rglob("expp_rank_1_*"))
    held = torch.load(path, weights_only=False)
    held["optimizer"]["state"][0]["exp_avg"] += 1
    torch.save(held, path)
    with pytest.raises(DifferentError, match=r"embed\.weight"):
        split(run, tmp_path / "out", SplitOptions(to="dcp"))


LISTS = "param_shapes buffer_names frozen_param_shapes frozen_param_fragments shared_params"
OF_LATER_VERSIONS = f"{LISTS} optimizer ds_config ds_version ds_autoep_layers".split()


def make_older(run):
    """Leave a run as DeepSpeed before 0.19 does: few lists, and files of no further optimizer.

    Source: DeepSpeed 0.16.9 and 0.18.9 ``runtime/engine.py``, ``_save_moe_checkpoint``.
    """
    path = next(run.rglob("mp_rank_00_model_states.pt"))
    held = torch.load(path, weights_only=False)
    kept = {key: value for key, value in held.items() if key not in OF_LATER_VERSIONS}
    torch.save(kept, path)
    for zero in [*path.parent.glob("*zero_pp_rank_0_*"), *path.parent.glob("*zero_pp_rank_1_*")]:
        states = torch.load(zero, weights_only=False)["optimizer_state_dict"]
        is_bf16_optimizer = "zero_stage" not in states
        name = "expp_rank_" + zero.name.partition("_pp_rank_")[2]
        torch.save({"optimizer": states if is_bf16_optimizer else None}, zero.with_name(name))
    return path


@pytest.mark.parametrize(
    "case", ["moe_z1_ws4", "moe_z1_sizes", "moe_z2", "moe_z2_turns", "moe_bf16opt"]
)
def test_a_run_of_an_older_version_has_the_same_state(case, made, copied, tmp_path):
    run = copied(case)
    make_older(run)
    assert reshard.diff(run, made / case / "run").same
    if case != "moe_z1_sizes":  # its layers have no common number of expert-parallel ranks
        reshard.split(run, tmp_path / "there", world_size=6)
        reshard.split(made / case / "run", tmp_path / "wanted", world_size=6)
        assert reshard.diff(tmp_path / "there", tmp_path / "wanted").same


def test_an_older_run_with_a_parameter_that_its_module_lacks_is_detected(copied, tmp_path):
    run = copied("moe_z2")
    path = make_older(run)
    held = torch.load(path, weights_only=False)
    del held["module"]["norm.bias"]
    torch.save(held, path)
    with pytest.raises(CorruptError, match=r"holds elements of 'norm\.bias', but"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_an_older_run_says_that_its_buffers_are_not_listed(copied):
    run = copied("moe_z2")
    path = make_older(run)
    held = torch.load(path, weights_only=False)
    held["module"]["scale"] = torch.ones(2)
    torch.save(held, path)
    with reshard.open(run) as checkpoint:
        assert any("list the buffers" in text for text in checkpoint.manifest.warnings)
