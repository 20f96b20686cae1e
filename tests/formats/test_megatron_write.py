"""What ``--to megatron`` writes beside tensors, for runs that skipped updates."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader as DcpReader

import reshard
from reshard import formats
from reshard.core.dtypes import FLOAT32
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.write.groups import make_groups
from reshard.training.state import TrainedGroup, TrainedParameter, Weight
from tests.support.combinations import choose_combinations
from tests.support.directories import unpack
from tests.support.megatron_values import change, copy_changed, read_root

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
EXAMPLE = ROOT / "examples" / "llama-zero3-4ranks"
DISTRIBUTED = DATA / "megatron" / "gpt2_vpp_distopt" / "torch"
COUNTED = DATA / "megatron" / "llama_tp2pp2" / "ckpt"  # torch's AdamW
PACKED = DATA / "megatron_core_0.9.0" / "mixtral_ep2.tar.xz"  # an optimizer of experts
HETEROGENEOUS = DATA / "megatron" / "heterogeneous.tar.xz"
ONE_RANK = {"tp": 1, "pp": 1, "dp": 1}
STEP, LATER = "iter_0000003", 5


@pytest.mark.parametrize(
    ("form", "adam", "distributed"),
    choose_combinations(product(["torch", "torch_dist"], ["fused", "torch"], [False, True])),
)
def test_skipped_updates_are_not_counted_by_the_optimizer(tmp_path, form, adam, distributed):
    """Three updates in five iterations: in two of them gradients overflowed."""
    source, out = copy_changed(DISTRIBUTED, tmp_path / "source", iteration=LATER), tmp_path / "out"
    options = {"ckpt_format": form, "adam": adam, "distributed_optimizer": distributed}
    reshard.split(source, out, **ONE_RANK, vpp=1, **options)
    (file,) = [*out.rglob("model_optim_rng.pt"), *out.rglob("common.pt")]
    assert file.is_relative_to(out / f"iter_{LATER:07d}")
    if adam == "fused" or distributed:
        optimizer = read_root(file)["optimizer"]["optimizer"]
        assert [group["step"] for group in optimizer["param_groups"]] == [3, 3]
    with reshard.open(out) as checkpoint:
        train = checkpoint.manifest.train
    assert train.step == LATER
    assert set(train.optimizer_step.values()) == {3.0}


@pytest.mark.parametrize("options", [{"adam": "fused"}, {"distributed_optimizer": True}])
def test_parameters_of_a_group_must_have_as_many_updates(tmp_path, options):
    def count_one_more(optimizer):
        for state in optimizer["state"].values():
            state["step"] += 1
        return optimizer

    second = "mp_rank_*_001/model_optim_rng.pt"
    source = copy_changed(COUNTED, tmp_path / "source", second, optimizer=count_one_more)
    with pytest.raises(UnsupportedError, match=r"updated 3, 4 times"):
        reshard.split(source, tmp_path / "no", tp=1, pp=1, **options)
    advised = {"ckpt_format": "torch", "adam": "torch", "distributed_optimizer": False}
    reshard.split(source, tmp_path / "out", tp=1, pp=1, **advised)
    assert_same(source, tmp_path / "out")


def test_ranks_are_numbered_as_the_written_args_state(tmp_path):
    source = copy_changed(COUNTED, tmp_path / "source", use_tp_pp_dp_mapping=True)
    reshard.split(source, tmp_path / "out", tp=2, pp=2, dp=2)
    assert_same(source, tmp_path / "out")


def assert_same(a, b):
    assert reshard.diff(a, b, kinds=["weight", "optimizer"]).same


@pytest.mark.parametrize(
    ("decays", "noted"),
    [((0.1, 0.1, 0.0), ""), ((0.1, 0.0, 0.0), "up.weight"), ((0.1, 0.1, 0.1), "norm.weight")],
)
def test_a_weight_decay_that_megatron_changes_is_noted(decays, noted):
    groups = make_groups(_trained(decays), frozenset(), "torch")
    assert [group.hyper["weight_decay"] for group in groups.groups] == [0.1, 0.0]
    decay = [note for note in groups.notes if "weight decay" in note]
    assert [note.rpartition(" ")[2] for note in decay] == [noted] * bool(noted)


@pytest.mark.parametrize(("more", "noted"), [({}, True), ({"max_lr": 1e-3, "min_lr": 0.0}, False)])
def test_groups_that_core_0_19_does_not_find_are_noted(more, noted):
    """Expect a note without the rates by which core 0.19 finds a group, or refuses to load."""
    groups = make_groups(_trained((0.1, 0.1, 0.0), more), frozenset(), "torch")
    assert any("max_lr and min_lr" in note for note in groups.notes) == noted


def test_two_weight_decays_of_matrices_are_refused():
    with pytest.raises(UnsupportedError, match=r"'up.weight': has weight_decay 0.01, but"):
        make_groups(_trained((0.1, 0.01, 0.0)), frozenset(), "torch")


def _trained(decays, more=MappingProxyType({})):
    """Return a state of two matrices and a vector, each in a group of its own."""
    groups = [
        TrainedGroup(
            {"lr": 1e-3, "weight_decay": decay, **more},
            (TrainedParameter(Weight(fqn, shape, None, FLOAT32, is_buffer=False), {}, 1.0),),
        )
        for decay, fqn, shape in zip(
            decays, ("down.weight", "up.weight", "norm.weight"), ((2, 3), (3, 2), (2,)), strict=True
        )
    ]
    manifest = SimpleNamespace(
        origin=SimpleNamespace(path="run"), train=SimpleNamespace(optimizer_step={})
    )
    members = [member for group in groups for member in group.members]
    return SimpleNamespace(groups=groups, members=members, manifest=manifest)


def test_a_slot_that_no_flat_buffer_holds_is_refused_with_advice_that_ends(tmp_path):
    """The source's own arguments ask for the distributed optimizer: no option is left out."""

    def add_slot(optimizer):
        for state in optimizer["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        return optimizer

    asked = {"optimizer": add_slot, "use_distributed_optimizer": True}
    source = copy_changed(COUNTED, tmp_path / "source", **asked)
    with pytest.raises(UnsupportedError, match="stores only exp_avg and exp_avg_sq") as refused:
        reshard.split(source, tmp_path / "no", **ONE_RANK)
    assert refused.value.remedy == "write --no-distributed-optimizer"
    reshard.split(source, tmp_path / "out", distributed_optimizer=False, **ONE_RANK)
    assert_same(source, tmp_path / "out")


def test_frozen_parameters_stay_without_optimizer_state(tmp_path):
    """Order and values say which of equal shapes is frozen; torch_dist has names."""
    embedding = "embedding.word_embeddings.weight"

    def freeze_first(optimizer):
        states = [state for number, state in sorted(optimizer["state"].items()) if number]
        for group in optimizer["param_groups"]:
            group["params"] = [number - 1 for number in group["params"] if number]
        return optimizer | {"state": dict(enumerate(states))}

    first = "mp_rank_*_000/model_optim_rng.pt"
    source = copy_changed(COUNTED, tmp_path / "source", first, optimizer=freeze_first)
    for form, place in (("torch_dist", "dist"), ("torch", "back")):
        out = tmp_path / place
        reshard.split(source, out, ckpt_format=form, **ONE_RANK)
        with reshard.open(out) as checkpoint:
            train = checkpoint.manifest.train
        owned = {fqn for group in train.param_groups for fqn in group.fqns}
        assert len(owned) == 26
        assert embedding not in owned
        source = out
    (file,) = source.rglob("model_optim_rng.pt")
    assert len(read_root(file)["optimizer"]["state"]) == 26
    reshard.split(source, tmp_path / "flat", distributed_optimizer=True, **ONE_RANK)
    with reshard.open(tmp_path / "flat") as checkpoint:
        assert checkpoint.manifest.frozen == {embedding}
    assert_same(source, tmp_path / "flat")


def test_each_optimizer_of_a_chain_keeps_its_loss_scaler(tmp_path):
    """Where the gradients of dense parameters overflowed, the experts keep their scale."""
    unpack(PACKED, tmp_path)
    source = tmp_path / "torch_dist"
    scalers = [
        {"scale": [64.0], "growth_tracker": 0, "hysteresis_tracker": 1},
        {"scale": [1024.0], "growth_tracker": 7, "hysteresis_tracker": 2},
    ]

    def scale(optimizers):
        for number, scaler in enumerate(scalers):
            held = scaler | {"scale": torch.tensor(scaler["scale"])}
            optimizers[number]["grad_scaler"] = held
        return optimizers

    change(source / STEP / "common.pt", optimizer=scale)
    reshard.split(source, tmp_path / "same", dtype="fp16", ep=2, dp=2, ckpt_format="torch")
    for file in (tmp_path / "same").rglob("model_optim_rng.pt"):
        found = [each["grad_scaler"] for each in read_root(file)["optimizer"]]
        assert [each | {"scale": each["scale"].tolist()} for each in found] == scalers
    report = reshard.split(source, tmp_path / "one", dtype="fp16", ep=1, dp=1, ckpt_format="torch")
    assert "not copied: the loss scaler of the experts' optimizer, which the new run lacks" in (
        report.notes
    )
    assert any("scales 64 and 1024" in warning for warning in report.warnings)
    (file,) = (tmp_path / "one").rglob("model_optim_rng.pt")
    assert read_root(file)["optimizer"]["grad_scaler"]["scale"].item() == 64.0


def test_masters_are_those_of_every_param_group(tmp_path):
    out = tmp_path / "out"
    reshard.split(DISTRIBUTED, out, pp=1, vpp=1, dp=1, distributed_optimizer=False)
    (file,) = out.rglob("model_optim_rng.pt")
    key = "fp32_from_fp16_params"
    change(file, optimizer=lambda optimizer: optimizer | {key: optimizer[key][:1]})
    with pytest.raises(CorruptError, match="has fp32 copies of 1 param groups, but 2 groups"):
        reshard.open(out)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_third_optimizer_of_a_chain_is_not_dropped_unseen(tmp_path, distributed):
    unpack(PACKED, tmp_path)
    run = tmp_path / "run"
    options = {"ckpt_format": "torch", "distributed_optimizer": distributed}
    reshard.split(tmp_path / "torch_dist", run, ep=2, dp=2, **options)
    for file in run.rglob("model_optim_rng.pt"):
        change(file, optimizer=lambda optimizers: [*optimizers, optimizers[1]])
    with pytest.raises(IncompleteError, match="a chain of 3 optimizers, and reshard knows"):
        reshard.split(run, tmp_path / "no", ep=1, dp=1)
    report = reshard.merge(run, tmp_path / "weights.safetensors")
    assert any("left out: it is a chain of 3 optimizers" in text for text in report.warnings)


def test_a_new_optimizer_updates_masters_of_weights_in_16_bits(tmp_path):
    out = tmp_path / "out"
    options = {"pp": 1, "vpp": 1, "dp": 1, "distributed_optimizer": False}
    reshard.split(DISTRIBUTED, out, init_optimizer="zeros", **options)
    (file,) = out.rglob("model_optim_rng.pt")
    root = read_root(file)
    weights = [weight for weight in root["model"].values() if weight is not None]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert root["args"].bf16
    optimizer = root["optimizer"]
    assert [group["step"] for group in optimizer["optimizer"]["param_groups"]] == [0, 0]
    masters = [weight for group in optimizer["fp32_from_fp16_params"] for weight in group]
    moments = [
        slot for state in optimizer["optimizer"]["state"].values() for slot in state.values()
    ]
    assert {tensor.dtype for tensor in (*masters, *moments)} == {torch.float32}
    assert len(masters) == len(weights)
    assert not any(moment.any() for moment in moments)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"adam": "torch", "distributed_optimizer": True}, "not even its own"),
        ({"adam": "torch", "ckpt_format": "torch_dist"}, "before the first update"),
        ({"adam": "torch"}, ""),
        ({"adam": "fused", "ckpt_format": "torch_dist"}, ""),
    ],
)
def test_states_of_torch_s_adam_that_megatron_does_not_load_are_noted(tmp_path, options, noted):
    options = {"pp": 1, "vpp": 1, "dp": 1, "distributed_optimizer": False, **options}
    report = reshard.split(DISTRIBUTED, tmp_path / "out", init_optimizer="zeros", **options)
    notes = [note for note in report.notes if "torch's Adam" in note]
    assert len(notes) == bool(noted)
    assert all(noted in note for note in notes)


def test_values_of_a_script_do_not_replace_megatron_s_own(tmp_path):
    """A script's args, for example, are not those by which Megatron reads its files."""
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    for file in source.rglob("zero_pp_rank_*_model_states.pt"):
        root = torch.load(file, weights_only=False)
        torch.save({**root, "args": {"lr": 1}, "checkpoint_version": 1, "epoch": 2}, file)
    report = reshard.split(source, tmp_path / "out", to="megatron", tp=2, dp=1)
    assert {"not copied: args", "not copied: checkpoint_version"} <= set(report.notes)
    train = formats.read(tmp_path / "out").train
    assert train.config["tensor_model_parallel_size"] == 2
    assert train.client["epoch"] == 2


def test_states_are_not_numbered_in_an_order_that_is_not_known(tmp_path):
    one, two = (f"decoder.layers.0.{norm}_layernorm.weight" for norm in ("input", "pre_mlp"))
    names = {one: two, two: one}

    def swap(model):
        return {names.get(n, n): model[names.get(n, n)] for n in model}

    source = copy_changed(COUNTED, tmp_path / "source", model=swap)
    with pytest.raises(UnsupportedError, match=r"layernorm.weight' is in a module whose position"):
        reshard.split(source, tmp_path / "no", **ONE_RANK)
    reshard.split(source, tmp_path / "weights", weights_only=True, **ONE_RANK)
    reshard.split(source, tmp_path / "named", ckpt_format="torch_dist", **ONE_RANK)
    assert_same(source, tmp_path / "named")


@pytest.mark.parametrize(
    ("grid", "counts"),
    [
        ({"pp": 2}, [(2, 2)]),
        ({"pp": 2, "stage_layers": "1,3"}, [(1, 3)]),
        ({"pp": 4, "stage_layers": "0,1,2,1"}, [(0, 1, 2, 1)]),
        ({"pp": 2, "vpp": 2, "stage_layers": "1,1,2,0"}, [(1, 1), (2, 0)]),
    ],
)
def test_the_arguments_state_the_layers_of_each_stage(tmp_path, grid, counts):
    flags = {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}
    source = copy_changed(COUNTED, tmp_path / "source", **flags)
    reshard.split(source, tmp_path / "out", tp=1, dp=1, **grid)
    file = next((tmp_path / "out").rglob("model_optim_rng.pt"))
    args = Arguments(str(file), vars(read_root(file)["args"]))
    assert list(args.list_layers()) == counts
    assert_same(source, tmp_path / "out")


@pytest.fixture(scope="module")
def heterogeneous(tmp_path_factory):
    """Return a run whose layers have linear layers, or nothing, for attention and MLP."""
    folder = tmp_path_factory.mktemp("heterogeneous")
    return unpack(HETEROGENEOUS, folder)


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_layers_that_differ_go_to_other_ranks(heterogeneous, tmp_path, form):
    own, there, back = heterogeneous / form, tmp_path / "there", tmp_path / "back"
    other = "torch" if form == "torch_dist" else "torch_dist"
    reshard.split(own, there, tp=2, pp=4, dp=1, ckpt_format=other)
    reshard.split(there, back, tp=1, pp=2, dp=1, ckpt_format=form)
    for found in (there, back):
        assert_same(own, found)
    if form == "torch_dist":
        assert _list_keys(back) == _list_keys(own)
        return
    for file in own.rglob("model_optim_rng.pt"):
        theirs, ours = read_root(file), read_root(back / file.relative_to(own))
        # torch_dist does not list the extra state of the output layer, which is empty.
        wanted = [name for name in theirs["model"] if name != "output_layer._extra_state"]
        assert [name for name in ours["model"] if name in wanted] == wanted
        optimizer, own_optimizer = (each["optimizer"]["optimizer"] for each in (ours, theirs))
        for number, state in own_optimizer["state"].items():
            assert torch.equal(optimizer["state"][number]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize(
    ("stated", "is_stacked"),
    [
        ({}, True),
        ({"moe_layer_freq": 1}, True),
        ({"moe_layer_freq": [0, 0, 0, 0]}, False),
        ({"linear_attention_freq": [0, 0, 0, 0]}, False),
        ({"hetereogenous_dist_checkpoint": True}, False),
    ],
)
def test_layers_have_numbers_where_megatron_expects_them(tmp_path, stated, is_stacked):
    """Megatron decides it by the arguments, also if all layers are alike."""
    source = copy_changed(COUNTED, tmp_path / "source", **stated)
    reshard.split(source, tmp_path / "out", ckpt_format="torch_dist")
    keys = _list_keys(tmp_path / "out")
    assert ("decoder.layers.self_attention.linear_proj.weight" in keys) is is_stacked
    assert ("decoder.layers.3.self_attention.linear_proj.weight" in keys) is not is_stacked


def test_a_gated_matrix_is_recognised_by_the_name_of_its_activation(tmp_path):
    """Megatron and its forks differ in which argument says it; ``swiglu`` is only one."""
    source = copy_changed(COUNTED, tmp_path / "source", swiglu=False, glu_activation="swiglu")
    reshard.split(source, tmp_path / "out", tp=4, pp=1)
    assert_same(source, tmp_path / "out")


def _list_keys(run):
    """Return the keys of a torch_dist directory, but those of random states."""
    held = DcpReader(run / STEP).read_metadata().state_dict_metadata
    return {key: getattr(stored, "size", None) for key, stored in held.items() if "rng" not in key}
