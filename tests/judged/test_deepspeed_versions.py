"""Checkpoints that older DeepSpeeds wrote (`tests/data`), against what their live engines held."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from tests.judged.conftest import KEPT
from tests.judged.damage import edit_file
from tests.judged.expected import read_expected

CASES = sorted(str(place.relative_to(KEPT)) for place in KEPT.glob("deepspeed_*/*"))
WITHOUT_HYPER = {"deepspeed_0.16.4/z2_elastic"}


@pytest.fixture(params=CASES)
def case(request):
    return request.param


@pytest.fixture
def expected(case):
    return read_expected(KEPT / case)


def assert_state(source, expected, *, hyper=True):
    """Compare masters, slots, counters and groups with the engine's."""
    tied = expected["tied"]
    with reshard.open(source) as checkpoint:
        for slot, tensors in expected["slots"].items():
            held = checkpoint.optimizer(slot)
            assert held.keys() == tensors.keys()
            assert all(torch.equal(held[name][...], tensors[name]) for name in tensors)
        train = checkpoint.manifest.train
    assert (train.step, train.skipped_steps) == (expected["step"], expected["skipped"])
    assert set(train.optimizer_step.values()) == set(expected["steps"].values())
    assert train.optimizer_step.keys() == expected["params"].keys()
    groups = [{tied.get(name, name) for name in names} for names in expected["members"]]
    assert [set(group.fqns) for group in train.param_groups] == groups
    for group, wanted in zip(train.param_groups, expected["hyper"], strict=True):
        assert not hyper or group.hyper["lr"] == wanted["lr"]
        assert not hyper or group.hyper["weight_decay"] == wanted["weight_decay"]


def test_weights_are_the_engines(case, expected, tmp_path):
    out = tmp_path / "m.safetensors"
    report = reshard.merge(KEPT / case / "run", out, dtype="fp32")
    assert report.dropped_aliases == expected["tied"]
    merged = load_file(out)
    wanted = expected["live"] | expected["params"] | expected["buffers"]
    assert merged.keys() == wanted.keys() - expected["tied"].keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name


def test_the_rest_of_the_state_is_the_engines(case, expected):
    assert_state(KEPT / case / "run", expected, hyper=case not in WITHOUT_HYPER)


def test_a_split_for_other_ranks_holds_the_same(case, expected, tmp_path):
    if case in WITHOUT_HYPER:
        with pytest.raises(
            reshard.errors.IncompleteError, match="does not keep the hyper-parameters"
        ):
            reshard.split(KEPT / case / "run", tmp_path / "s", world_size=3)
        groups = tmp_path / "groups.json"
        groups.write_text('[{"lr": 0.1}]')
        with pytest.raises(
            reshard.errors.UsageError, match="group 0: does not state betas, eps, weight_decay"
        ):
            reshard.split(KEPT / case / "run", tmp_path / "s", world_size=3, param_groups=groups)
        groups.write_text('[{"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}]')
        reshard.split(KEPT / case / "run", tmp_path / "s", world_size=3, param_groups=groups)
    else:
        reshard.split(KEPT / case / "run", tmp_path / "s", world_size=3)
        assert_state(tmp_path / "s", expected)


@pytest.mark.parametrize(
    ("case", "is_noted"),
    [
        ("deepspeed_0.14.5/z3_mics_ws4", True),
        ("deepspeed_0.8.3/z2_apexadam", False),
        ("deepspeed_0.19.8/z3_nvme_sub", False),
    ],
)
def test_older_versions_cannot_load_a_universal_checkpoint_at_stage_3(case, is_noted, tmp_path):
    """DeepSpeed 0.18.9 ``stage3.py``, ``load_hp_checkpoint_state``: it expects a bare tensor."""
    report = reshard.split(KEPT / case / "run", tmp_path / "u", to="ds-universal")
    assert any("before 0.19" in note for note in report.notes) == is_noted


def test_all_names_without_a_value_are_listed_in_one_error(tmp_path):
    """As before DeepSpeed 0.9.1: a run of 0.9.1 without its frozen weights.

    ``torch.load`` gives every empty placeholder a storage of its own, so no tie is left, either.
    """
    shutil.copytree(KEPT / "deepspeed_0.9.1/z3_sub/run", tmp_path / "run")
    for path in (tmp_path / "run").rglob("*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        frozen = ("frozen_param_shapes", "frozen_param_fragments")
        torch.save({key: value for key, value in states.items() if key not in frozen}, path)
    with pytest.raises(reshard.errors.IncompleteError) as refusal:
        reshard.merge(tmp_path / "run", tmp_path / "m.safetensors")
    assert "--exclude '^(frozen\\.weight|frozen\\.bias|head\\.weight)$'" in str(refusal.value)
    with reshard.open(tmp_path / "run") as checkpoint:
        (note,) = checkpoint.manifest.warnings
    assert "before 0.9.1 does not save frozen weights at stage 3" in note


def test_shapes_are_read_from_the_optimizers_files(tmp_path):
    """As before DeepSpeed 0.6.0: a run of a later one, with them moved there."""
    pytest.importorskip("deepspeed")  # whose loss scaler is pickled in the files
    case = KEPT / "deepspeed_0.6.7/z2_oldadam"
    shutil.copytree(case / "run", tmp_path / "run")
    (model,) = (tmp_path / "run").rglob("mp_rank_00_model_states.pt")
    states = torch.load(model, weights_only=False)
    shapes = states.pop("param_shapes")
    torch.save(states, model)
    for path in (tmp_path / "run").rglob("*_optim_states.pt"):
        torch.save({**torch.load(path, weights_only=False), "param_shapes": shapes}, path)
    assert_state(tmp_path / "run", read_expected(case))


FUSED = KEPT / "deepspeed_0.19.8" / "z0_fused_groups" / "run"


def optimizer_of(run):
    (path,) = run.rglob("mp_rank_00_model_states.pt")
    return torch.load(path, weights_only=False)["optimizer"]


def test_a_fused_optimizer_is_written_as_deepspeed_wrote_it(tmp_path):
    reshard.split(FUSED, tmp_path / "s", world_size=3)
    theirs, ours = optimizer_of(FUSED), optimizer_of(tmp_path / "s")
    assert list(ours) == list(theirs)
    pairs = zip(ours["fp32_groups_flat"], theirs["fp32_groups_flat"], strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    inner, wanted = ours["optimizer_state_dict"], theirs["optimizer_state_dict"]
    assert [g["params"] for g in inner["param_groups"]] == [[0], [1]]
    for group, known in zip(inner["param_groups"], wanted["param_groups"], strict=True):
        assert known.items() <= group.items()
    assert inner["state"].keys() == wanted["state"].keys()
    for number, slots in wanted["state"].items():
        held = inner["state"][number]
        assert held.keys() == slots.keys()
        assert held["step"] == slots["step"]
        assert all(torch.equal(held[name], slots[name]) for name in ("exp_avg", "exp_avg_sq"))


def test_a_fused_optimizer_in_another_order_is_not_guessed(tmp_path):
    """Its sizes are the same; the weights are not those of its masters."""
    run = shutil.copytree(FUSED, tmp_path / "run")
    edit_file(
        next(run.rglob("mp_rank_00_model_states.pt")),
        lambda root: root["optimizer"]["fp32_groups_flat"][0].copy_(
            root["optimizer"]["fp32_groups_flat"][0].roll(60)
        ),
    )
    report = reshard.merge(run, tmp_path / "m.safetensors", dtype="fp32")
    assert any("an order that no file states" in text for text in report.warnings)
    assert report.from_master == 0
    with pytest.raises(reshard.errors.IncompleteError, match="cannot be assigned to parameters"):
        reshard.split(run, tmp_path / "s", world_size=3)


def test_states_of_data_efficiency_are_written_as_they_are(tmp_path):
    """DeepSpeed's curriculum sampler keeps a numpy random state and numpy integers."""
    random = np.random.RandomState(3).get_state()
    sampler = {"batch": [4, 2], "data_cluster_current_position": [np.int64(36)]}
    sampler |= {"current_difficulties": {"seqlen": 7}, "np_rng_state": random}
    ltd = {"consumed_layer_tokens": 1752, "current_value": 18}
    run = shutil.copytree(FUSED, tmp_path / "run")
    edit_file(
        next(run.rglob("mp_rank_00_model_states.pt")),
        lambda root: root.update(data_sampler=sampler, random_ltd=ltd),
    )
    report = reshard.split(run, tmp_path / "s", world_size=3)
    assert not any("not copied" in note for note in report.notes)
    (path,) = (tmp_path / "s").rglob("mp_rank_00_model_states.pt")
    found = torch.load(path, weights_only=False)
    assert found["random_ltd"] == ltd
    kept = found["data_sampler"]
    assert kept["np_rng_state"][0] == "MT19937"
    assert np.array_equal(kept["np_rng_state"][1], random[1])
    assert kept["np_rng_state"][2:] == random[2:]
    assert {**kept, "np_rng_state": random} == sampler


def test_buffers_inside_random_ltd_are_found(tmp_path):
    """DeepSpeed 0.19.8 hides the wrapper in the module's names, but not in ``buffer_names``."""
    case = KEPT / "deepspeed_0.19.8" / "z3_nvme_sub"
    run = shutil.copytree(case / "run", tmp_path / "run")
    for path in run.rglob("*model_states.pt"):
        edit_file(path, wrap_buffers)
    expected = read_expected(case)
    reshard.merge(run, tmp_path / "m.safetensors", dtype="bf16")
    merged = load_file(tmp_path / "m.safetensors")
    for name, buffer in expected["buffers"].items():
        assert merged[name].dtype == buffer.dtype
        assert torch.equal(merged[name], buffer)


def wrap_buffers(root):
    names = [name.rpartition(".") for name in root["buffer_names"]]
    root["buffer_names"] = [
        f"{layer}.random_ltd_layer.{name}" if layer else f"random_ltd_layer.{name}"
        for layer, _, name in names
    ]


def test_a_shard_of_a_base_weight_is_not_the_weight(tmp_path):
    """DeepSpeed 0.19.8 saves the first rank's shard alone of an OptimizedLinear's weight."""
    whole = torch.randn(24, 16).bfloat16()
    run = shutil.copytree(FUSED, tmp_path / "run")
    layer = {
        "q.weight": whole.flatten()[:192].clone(),
        "q.lora_weight_1.weight": torch.ones(4, 16).bfloat16(),
        "q.lora_weight_2.weight": torch.ones(24, 4).bfloat16(),
    }
    edit_file(
        next(run.rglob("mp_rank_00_model_states.pt")), lambda root: root["module"].update(layer)
    )
    with pytest.raises(reshard.errors.IncompleteError, match=r"lists 'q\.weight', but no rank"):
        reshard.merge(run, tmp_path / "m.safetensors")
    with pytest.raises(reshard.errors.IncompleteError, match=r"lists 'q\.weight', but no rank"):
        reshard.split(run, tmp_path / "s", world_size=3)
    with reshard.open(FUSED) as checkpoint:
        norm = checkpoint["norm.bias"][...].clone()
    save_file({"q.weight": whole, "norm.bias": norm}, tmp_path / "base.safetensors")
    report = reshard.merge(
        run, tmp_path / "m.safetensors", fill_missing_from=tmp_path / "base.safetensors"
    )
    assert any("base_weight_sharding" in text for text in report.warnings)
    assert torch.equal(load_file(tmp_path / "m.safetensors")["q.weight"], whole)


def test_codes_without_scales_are_not_weights(tmp_path):
    """DeepSpeed 0.19.8, ``zero_quantized_nontrainable_weights``, whose quantizer needs CUDA."""
    run = shutil.copytree(KEPT / "deepspeed_0.19.8" / "z3_nvme_sub" / "run", tmp_path / "run")
    for path in run.rglob("*model_states.pt"):
        edit_file(path, quantise_frozen)
    with pytest.raises(
        reshard.errors.IncompleteError, match=r"lists 'frozen\.weight', but no rank"
    ):
        reshard.merge(run, tmp_path / "m.safetensors")
    with pytest.raises(
        reshard.errors.IncompleteError, match=r"lists 'frozen\.weight', but no rank"
    ):
        reshard.split(run, tmp_path / "s", world_size=3)
    with reshard.open(run) as checkpoint:
        assert any("without their scales" in text for text in checkpoint.manifest.warnings)


def quantise_frozen(root):
    fragments = root["frozen_param_fragments"]
    fragments["frozen.weight"] = (fragments["frozen.weight"] * 100).to(torch.int8)
