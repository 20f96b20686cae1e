"""Megatron's checkpoints: two real ones that are kept here, what is amiss with them, and the rules.

Against every form of every grid they are judged in ``judged/test_megatron_reader.py``.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader as DcpReader

import reshard
from reshard import formats
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.containers import torch_reader
from reshard.core.box import row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT32
from reshard.core.location import Location
from reshard.core.manifest import Entry
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
    UnsupportedError,
    UsageError,
)
from reshard.formats.megatron import dist as dist_format
from reshard.formats.megatron import grouped, names, train, translate
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.directory import covers_experts, find_ranks
from reshard.formats.megatron.optimizers import dist_flat, flat_buffers, frozen
from reshard.formats.megatron.optimizers.groups import explain_unassigned, updates_matrices
from reshard.layouts.model_parallel.rules import load_table
from reshard.state_dict.optimizers.states import ParsedOptimizer
from tests.support.digests import compute_digests
from tests.support.directories import unpack
from tests.support.megatron_values import change, read_root
from tests.support.sample_tensors import built

DATA = Path(__file__).parents[1] / "data" / "megatron"
RANKS = DATA / "gpt2_vpp_distopt" / "torch"  # two stages of two chunks, tied, several buckets
DIST = DATA / "llama_buckets_dp2" / "torch_dist"  # dp_reshardable, several buckets
RANGES = (
    DATA.parent / "megatron_core_0.15.3" / "llama_dp2" / "torch_dist"
)  # fully_sharded_model_space
PACKED = DATA.parent / "megatron_core_0.9.0" / "mixtral_ep2.tar.xz"
PACKED_019 = DATA.parent / "megatron_core_0.19.2" / "llama_mtp_tp2.tar.xz"
MUON = DATA / "muon" / "torch"
VERL = DATA.with_name("verl") / "megatron_pp2"
STEP = "iter_0000003"


@pytest.fixture
def ranks(tmp_path):
    """Return a copy that may be damaged."""
    return shutil.copytree(RANKS, tmp_path / "run")


@pytest.fixture
def dist(tmp_path):
    return shutil.copytree(DIST, tmp_path / "run")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return a function: a packed run -> the folder of its forms, which are not to be changed."""

    @functools.cache
    def find(packed):
        return unpack(packed, tmp_path_factory.mktemp("packed"))

    return find


@pytest.fixture
def old(unpacked):
    """Return two forms of a run of core 0.9.0."""
    return unpacked(PACKED)


@pytest.fixture
def new(unpacked):
    """Return two forms of a run of core 0.19.2 with a layer of multi-token prediction."""
    return unpacked(PACKED_019)


def of_019(name):
    return PACKED_019.with_name(f"{name}.tar.xz")


@pytest.mark.parametrize(
    ("place", "layers"),
    [
        (RANKS, 4),
        (DIST, 4),
        (RANGES, 2),
        *((PACKED / form, 2) for form in ("torch_dist", "torch_dist_bucket")),
        # Both have the names of torch_dist, and torch_dist has no common.pt.
        *((PACKED_019 / form, 2) for form in ("torch", "torch_dist")),
        *((of_019("mixtral_lion_ep2") / form, 2) for form in ("torch", "torch_dist")),
        *(
            (of_019("hybrid_mtp_pp2") / form, 4)
            for form in ("torch", "torch_dist", "torch_dist_gather_scatter")
        ),
    ],
    ids=lambda value: str(value).partition("data/")[2] if isinstance(value, Path) else "",
)
def test_every_tensor_has_the_bytes_that_megatron_holds(place, layers, unpacked):
    if place.parent.suffix == ".xz":
        place = unpacked(place.parent) / place.name
    expected = json.loads((place.parent / "expected.json").read_text())
    with reshard.open(place) as checkpoint:
        manifest = checkpoint.manifest
        found = compute_digests(checkpoint)
    assert found == expected["tensors"]
    assert set(manifest.train.optimizer_step.values()) == {expected["steps"]}
    assert manifest.train.step == 3
    assert manifest.train.config["num_layers"] == layers


@pytest.mark.parametrize(
    ("form", "to", "inner"),
    [
        ("torch", "torch", "mtp_model_layer"),
        ("torch_dist", "torch", "transformer_layer"),
        ("torch", "torch_dist", "transformer_layer"),
    ],
)
def test_the_torch_format_has_the_source_s_names_of_layers_of_mtp(new, tmp_path, form, to, inner):
    """Only torch_dist is the same in all versions."""
    sizes = {"tp": 1, "dp": 1, "make_vocab_size_divisible_by": 8}
    reshard.split(new / form, tmp_path / "out", to="megatron", ckpt_format=to, **sizes)
    stem = "mp_rank_00/model_optim_rng.pt" if to == "torch" else ".metadata"
    written = (tmp_path / "out" / STEP / stem).read_bytes()
    names = {"mtp_model_layer", "transformer_layer"}
    assert {name for name in names if f"mtp.layers.0.{name}.".encode() in written} == {inner}
    assert_same(new / "torch", tmp_path / "out")


def assert_same(a, b):
    assert reshard.diff(a, b, kinds=["weight", "optimizer"]).same


def test_a_directory_of_another_iteration_is_warned_of(dist):
    moved = (dist / STEP).rename(dist / "iter_0000005")
    (problem,) = find_counter_conflicts(formats.read(moved))
    assert problem == "the directory is named iter_0000005, but its files state step 3"


@pytest.mark.parametrize(
    ("scheduled", "consumed", "scaler", "expected"),
    [
        (48, 96, {"scale": 1.0}, 6),  # as Megatron-core counts 12 steps of which it skips 6
        (96, 96, {"scale": 1.0}, 0),
        (48, 80, {"scale": 1.0}, None),  # a batch that grew
        (47, 96, {"scale": 1.0}, None),
        (48, 96, None, None),  # a scheduler that began anew
    ],
)
def test_steps_that_the_loss_scaler_skipped_are_counted(scheduled, consumed, scaler, expected):
    args = Arguments("args", {"global_batch_size": 8, "consumed_train_samples": consumed})
    root = {"iteration": 12, "opt_param_scheduler": {"num_steps": scheduled}}
    state = train.make_train_state(root, args, ParsedOptimizer(scaler=scaler), range(0))
    assert state.skipped_steps == expected
    translated, _ = translate.translate(replace(formats.read(DIST), train=state))
    assert translated.train.scheduler["last_epoch"] == 12 - (expected or 0)


def test_weights_are_read_beside_buffers_without_frozen_parameters(monkeypatch, tmp_path):
    def tell_nothing(*_):
        raise frozen.Ambiguous("two parameters")

    monkeypatch.setattr(flat_buffers, "choose_trained", tell_nothing)
    monkeypatch.setattr(
        dist_flat.FlatBuffers, "_get_unpadded", lambda _self, _group, _number, stored: stored[:1]
    )
    report = reshard.merge(DIST, tmp_path / "out")
    assert any("the optimizer is left out: buffer 0" in each for each in report.warnings)
    with pytest.raises(IncompleteError, match="or the run froze parameters"):
        reshard.split(DIST, tmp_path / "split", tp=2)


def test_checkpoints_that_ranks_keep_for_themselves_are_refused_by_name(ranks):
    """Megatron-LM 0.19.2 writes such files, one a rank, with a list of tensors without names."""
    kept = ranks.with_name("kept") / "0" / "iter_0000002_0_local.pt"
    kept.parent.mkdir(parents=True)
    next(ranks.rglob("model_optim_rng.pt")).rename(kept)
    for path in (kept.parent.parent, kept.parent, kept):
        with pytest.raises(UnsupportedError, match="--non-persistent-ckpt-type local"):
            formats.read(path)


def test_zarr_is_refused_by_name(old, tmp_path):
    run = tmp_path / "run"
    (run / STEP / "decoder.final_layernorm.weight").mkdir(parents=True)
    (run / STEP / "metadata.json").write_text(
        '{"sharded_backend": "zarr", "sharded_backend_version": 1, "common_backend": "torch"}'
    )
    shutil.copy(old / "torch_dist" / STEP / "common.pt", run / STEP)
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    for place in (run, run / STEP):
        with pytest.raises(UnsupportedError, match="is in the zarr format"):
            formats.read(place)


def test_the_form_of_core_0_9_is_in_the_optimizer_s_state(old):
    origin = formats.read(old / "torch_dist_bucket").origin
    assert origin.detail == "torch_dist, distributed optimizer (fully_sharded_bucket_space)"


@pytest.mark.parametrize("form", ["torch_dist", "torch_dist_bucket"])
def test_core_0_9_gets_the_only_form_that_it_loads_on_any_grid(old, tmp_path, form):
    out = tmp_path / "out"
    reshard.split(old / form, out, to="megatron", dp=2, ep=2)
    keys, wanted = (
        {
            key: tuple(stored.size)
            for key, stored in DcpReader(place / STEP).read_metadata().state_dict_metadata.items()
            if ".state." in key
        }
        for place in (out, old / "torch_dist")
    )
    assert keys == wanted
    assert keys["chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight"] == (8,)
    assert_same(old / form, out)


def test_param_groups_of_old_cores_are_in_each_rank_s_own_order(tmp_path):
    """Before 0.16 a rank's first group is that of its first parameter, and position loads it."""
    reshard.split(RANGES, tmp_path / "out", to="megatron", ckpt_format="torch", pp=2, dp=1)
    orders = []
    for stage in range(2):
        state = torch_reader.read(
            tmp_path / "out" / STEP / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        ).root
        orders.append(
            [group["wd_mult"] for group in state["optimizer"]["optimizer"]["param_groups"]]
        )
    assert orders == [[1.0, 0.0], [0.0, 1.0]]
    assert_same(RANGES, tmp_path / "out")


def test_the_grid_the_form_and_the_tied_name_are_told():
    manifest = formats.read(RANKS)
    assert manifest.origin.detail == "torch, distributed optimizer"
    assert dict(manifest.origin.mesh) == {"world": 4, "tp": 1, "pp": 2, "dp": 2, "vpp": 2}
    assert manifest.tied == {"output_layer.weight": "embedding.word_embeddings.weight"}
    held = manifest.entries["param", "embedding.word_embeddings.weight"]
    assert len(held.chunks) == 2, "the last stage's copy is a replica"
    dist = formats.read(DIST)
    assert dist.origin.detail == "torch_dist, distributed optimizer (dp_reshardable)"
    assert [len(group.fqns) for group in dist.train.param_groups] == [18, 9]


def test_a_step_is_chosen_by_number_or_name_and_release_is_followed(ranks):
    (ranks / "latest_checkpointed_iteration.txt").unlink()
    for tag in ("3", STEP):
        assert formats.read(ranks, tag=tag).train.step == 3
    (ranks / STEP).rename(ranks / "release")
    (ranks / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert formats.read(ranks).origin.path.endswith("release")


@pytest.mark.parametrize("name", ["mp_rank_00_001", "mp_rank_00_001/model_optim_rng.pt"])
def test_one_rank_is_not_the_checkpoint(name):
    with pytest.raises(UsageError, match=rf"pass the directory above: .*{STEP}"):
        formats.read(RANKS / STEP / name)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_file_of_torch_dist_stands_for_its_directory(name):
    assert formats.read(DIST / STEP / name).origin.format == "megatron"


def test_a_missing_rank_is_named(ranks):
    shutil.rmtree(ranks / STEP / "mp_rank_00_000")
    with pytest.raises(IncompleteError, match=r"tp 1, pp 2.* mp_rank_00_000 is missing"):
        formats.read(ranks)


def test_a_folder_of_another_grid_is_named(ranks):
    shutil.copytree(ranks / STEP / "mp_rank_00_000", ranks / STEP / "mp_rank_01_000")
    with pytest.raises(StaleError, match="also contains mp_rank_01_000"):
        formats.read(ranks)


@pytest.mark.parametrize(("name", "value"), [("iteration", 7), ("seed", 5)])
def test_a_rank_of_another_step_or_run_is_named(ranks, name, value):
    change(ranks / STEP / "mp_rank_00_001" / "model_optim_rng.pt", **{name: value})
    said = f"mp_rank_00_001.*states {name} {value}, but mp_rank_00_000 states"
    with pytest.raises(CorruptError, match=said):
        formats.read(ranks)


def test_an_optimizer_that_is_too_small_may_lack_frozen_parameters(ranks):
    first, second = sorted((ranks / STEP).iterdir())
    shutil.copy(second / "distrib_optim.pt", first / "distrib_optim.pt")
    with pytest.raises(CorruptError, match=r"froze parameters .* move distrib_optim.pt of all"):
        formats.read(ranks)
    for rank in (first, second):
        (rank / "distrib_optim.pt").unlink()
    assert not formats.read(ranks).has_optimizer


def test_a_flat_buffer_that_no_parameter_fills_is_refused(ranks):
    file = min((ranks / STEP).iterdir()) / "distrib_optim.pt"
    buffers = torch.load(file, weights_only=False)
    count = sum(type(number) is int for number in buffers)
    torch.save({**buffers, count: buffers[0]}, file)
    with pytest.raises(CorruptError, match=f"has flat buffer {count}, which no parameter"):
        formats.read(ranks)


def test_a_flat_buffer_of_torch_dist_that_no_parameter_fills_is_refused(monkeypatch):
    monkeypatch.setattr(flat_buffers, "group_buffers", lambda _params, _args: [])
    with pytest.raises(CorruptError, match="has flat buffer 0, which no parameter"):
        formats.read(DIST)


def test_flat_buffers_of_a_longer_chain_are_left_out(monkeypatch):
    monkeypatch.setattr(dist_flat.FlatBuffers, "_numbers", range(3))
    manifest = formats.read(DIST)
    assert any("left out: it is a chain of 3 optimizers" in text for text in manifest.warnings)


def test_the_optimizer_s_files_are_of_all_ranks_or_of_none(ranks):
    first, second = sorted((ranks / STEP).iterdir())
    (second / "distrib_optim.pt").unlink()
    with pytest.raises(IncompleteError, match=r"distrib_optim\.pt is missing"):
        formats.read(ranks)
    (first / "distrib_optim.pt").unlink()
    manifest = formats.read(ranks)
    assert not manifest.has_optimizer
    assert any("the checkpoint lacks the optimizer's state" in text for text in manifest.warnings)


def test_parts_of_a_layer_wise_optimizer_are_not_taken_for_the_whole(tmp_path):
    """Megatron saves the first data-parallel rank's part where the whole would be."""
    run = shutil.copytree(MUON, tmp_path / "run")
    folder = run / STEP / "mp_rank_00"
    for number in range(2):
        shutil.copy(folder / "model_optim_rng.pt", folder / f"layer_wise_optimizer_{number}.pt")
    manifest = formats.read(run)
    assert not manifest.has_optimizer
    assert any("layer_wise_optimizer_N.pt" in text for text in manifest.warnings)
    with pytest.raises(IncompleteError, match="each data-parallel rank has") as error:
        reshard.split(run, tmp_path / "out")
    assert "--ckpt-format torch_dist" in error.value.remedy
    reshard.merge(run, tmp_path / "weights.safetensors")


def test_without_what_all_ranks_share_torch_dist_is_incomplete(dist, tmp_path):
    (dist / STEP / "common.pt").unlink()
    with pytest.raises(IncompleteError, match=r"neither common.pt nor common_state"):
        formats.read(dist)
    with pytest.raises(UnrecognisedError) as error:
        formats.read(dist / STEP, force="torch")
    assert error.value.remedy == (
        "choose one with --key optimizer, or that of the top level with --key ''"
    )
    reshard.merge(dist / STEP, tmp_path / "weights.safetensors", source_format="torch", key="")
    weights = load_file(tmp_path / "weights.safetensors")
    assert len(weights["decoder.layers.self_attention.linear_proj.weight"]) == 4


def test_copies_that_differ_are_refused_or_the_first_is_taken(ranks, tmp_path):
    """The last stage's copy of the embedding, in the weights and in the optimizer's."""
    last = ranks / STEP / "mp_rank_00_001" / "distrib_optim.pt"
    root = torch.load(last, weights_only=True)
    (state,) = root[1].values()
    state["param"][5] += 1
    torch.save(root, last)
    with pytest.raises(DifferentError, match=r"embedding.word_embeddings.weight: differs between"):
        reshard.merge(ranks, tmp_path / "no.safetensors")
    with pytest.raises(DifferentError, match="--replicas first"):
        reshard.split(ranks, tmp_path / "no", to="dcp", world_size=1)
    assert not (tmp_path / "no").exists()
    report = reshard.merge(ranks, tmp_path / "first.safetensors", replicas="first")
    assert any("the first rank's is written" in text for text in report.warnings)
    reshard.merge(RANKS, tmp_path / "whole.safetensors")
    assert reshard.diff(tmp_path / "first.safetensors", tmp_path / "whole.safetensors").same


# The rules, against what Megatron-core's own functions gave for these arguments


def stated(layers, stages, chunks=None, **more):
    given = {"num_layers": layers, "pipeline_model_parallel_size": stages, **more}
    if chunks:
        given["virtual_pipeline_model_parallel_size"] = chunks
    return Arguments("args", given)


FIRST, LAST = (f"decoder_{which}_pipeline_num_layers" for which in ("first", "last"))
ACCOUNTED = {f"account_for_{part}_in_pipeline_split": True for part in ("embedding", "loss")}


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (stated(8, 4), [[2, 2, 2, 2]]),
        (stated(8, 2, 2), [[2, 2], [2, 2]]),
        (stated(8, 3, **{FIRST: 2}), [[2, 3, 3]]),
        (stated(9, 4, **{FIRST: 1, LAST: 2}), [[1, 3, 3, 2]]),
        (stated(6, 4, **ACCOUNTED), [[1, 2, 2, 1]]),
        (stated(7, 2, 2, pipeline_model_parallel_layout="Et|(tt|)*2tt,L"), [[1, 2], [2, 2]]),
    ],
)
def test_layers_lie_over_stages_as_megatron_lays_them(args, wanted):
    assert [list(stages) for stages in args.list_layers()] == wanted


@pytest.mark.parametrize(
    ("layout", "stage"),
    [
        (None, 1),
        ("E|tmL", 1),
        ("Et|m|L", 1),
        ([["embedding", "decoder"], ["mtp"], ["loss"]], 1),
        ({"class": "PipelineParallelLayerLayout", "state": {"input_data": "Etm|L"}}, 0),
        ([[{"class": "LayerType", "args": (5,)}], ["loss"]], 0),
    ],
)
def test_a_layout_states_the_stage_that_predicts_more_tokens(layout, stage):
    values = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": layout}
    assert Arguments("args", values).locate_mtp(2) == stage
    assert Arguments("args", {**values, "mtp_num_layers": None}).locate_mtp(2) is None


@pytest.mark.parametrize(
    ("last", "wanted"),
    [  # ``RankGenerator`` with the order tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp
        (False, [(0, 0), (1, 0), (0, 0), (1, 0), (0, 0), (1, 0), (0, 0), (1, 0), (0, 1)]),
        (True, [(0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1), (0, 0)]),
    ],
)
def test_ranks_lie_in_the_order_of_the_mapping(last, wanted):
    axes = dict.fromkeys(("tensor_model", "pipeline_model", "context"), 2)
    sizes = {f"{axis}_parallel_size": size for axis, size in axes.items()}
    args = Arguments("args", {**sizes, "world_size": 16, "use_tp_pp_dp_mapping": last})
    assert [args.locate_rank(rank)[:2] for rank in range(9)] == wanted


def test_layers_that_do_not_divide_are_refused():
    with pytest.raises(CorruptError, match="7 layers over 2 pipeline stages"):
        stated(7, 2).list_layers()


def entry_of(tensor, name):
    chunk = Chunk(whole(tensor.shape), "f", 0, row_major(tensor.shape, 4), FLOAT32)
    return Entry(name, "param", FLOAT32, tuple(tensor.shape), (chunk,))


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_query_key_and_value_of_old_versions_are_ordered_as_megatron_orders_them(version, shape):
    heads, width = 4, 2
    stored = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    rest = shape[1:]
    want = stored
    if version == 0:  # checkpointing.py, _transpose_first_dim: splits first
        want = stored.view(3, heads, width, *rest).transpose(0, 1).contiguous()
        want = want.view(shape)
    elif version == 1.0:  # splits last
        want = stored.view(heads, width, 3, *rest).transpose(1, 2).contiguous().view(shape)
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    args = Arguments("args", {"num_attention_heads": 8, "tensor_model_parallel_size": 2})
    (found,) = grouped.reorder_heads([entry_of(stored, name)], version, args)
    assert torch.equal(built(found, {"f": stored.flatten()}), want)


def test_modules_before_megatron_core_are_dicts_in_dicts_of_other_names(tmp_path):
    """Megatron-LM 2.x: ``megatron/model/language_model.py``, ``gpt_model.py``."""
    run, second = tmp_path / "run", "word_embeddings_for_head"
    reshard.split(RANKS, run, weights_only=True)
    reshard.merge(run, tmp_path / "wanted")
    older = {
        "decoder.": "transformer.",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    }
    for path in run.rglob("model_optim_rng.pt"):
        chunks = {key: value for key, value in read_root(path).items() if key.startswith("model")}
        for key, chunk in chunks.items():
            inner = {name: value for name, value in chunk.items() if "_extra" not in name}
            head = inner.pop("output_layer.weight", None)
            for pair in older.items():
                inner = {name.replace(*pair): value for name, value in inner.items()}
            nested = {} if head is None else {second: {"weight": head}}
            change(path, **{key: {"language_model": inner, **nested}})
    reshard.merge(run, tmp_path / "out")
    first, other = (load_file(tmp_path / n / "model.safetensors") for n in ("wanted", "out"))
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)


def test_nemo_s_keys_and_counters(monkeypatch):
    """NeMo 2 puts ``module.`` before each parameter; its optimizer and step are Lightning's."""
    wanted = formats.read(RANGES)
    flat, of_file = dist_format.dcp.read_flat, dist_format.tree.convert_file

    def prefixed(place):
        found = flat(place)
        keys = {k: re.sub(r"^(optimizer\.state\.\w+\.|)", r"\1module.", k) for k in found.root}
        return replace(found, root={keys[key]: value for key, value in found.root.items()})

    def of_lightning(file, *rank):
        root = of_file(file, *rank)
        if not isinstance(root, dict) or "iteration" not in root:
            return root
        return {**root, "optimizer": [root["optimizer"]], "global_step": root.pop("iteration")}

    monkeypatch.setattr(dist_format.dcp, "read_flat", prefixed)
    monkeypatch.setattr(dist_format.tree, "convert_file", of_lightning)
    found = formats.read(RANGES)
    assert found.entries == wanted.entries
    assert found.train.step == 3
    assert found.train.param_groups == wanted.train.param_groups
    assert found.train.optimizer_step == wanted.train.optimizer_step


def test_a_config_states_the_model_of_a_run_without_arguments(tmp_path, monkeypatch):
    """A run of verl has neither ``args`` nor an iteration, but a config in ``huggingface``."""
    reshard.merge(DIST, tmp_path / "wanted")
    of_file = dist_format.tree.convert_file

    def of_verl(file, *rank):
        root = of_file(file, *rank)
        if not isinstance(root, dict):
            return root
        return {key: value for key, value in root.items() if key not in ("args", "iteration")}

    monkeypatch.setattr(dist_format.tree, "convert_file", of_verl)
    run = tmp_path / "run"
    actor = run / "global_step_3" / "actor"
    shutil.copytree(DIST / STEP, actor / "dist_ckpt")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    report = reshard.merge(run, tmp_path / "unknown")
    assert any("does not state a model" in note for note in report.changes)
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"model_type": "bert"}')
    for name in ("other", "other.safetensors"):
        report = reshard.merge(run, tmp_path / name)
        notes = [*report.changes, *report.warnings]
        problem = "describes a model of type bert, for which reshard has no table"
        assert any(problem in note for note in notes)
    shutil.copy(tmp_path / "wanted" / "config.json", actor / "huggingface")
    reshard.merge(run, tmp_path / "merged")
    assert reshard.diff(tmp_path / "wanted", tmp_path / "merged").same
    with pytest.raises(IncompleteError, match="dist_ckpt_optim_fully_reshardable"):
        reshard.split(run, tmp_path / "split", to="dcp")
    report = reshard.merge(run, tmp_path / "file.safetensors")
    assert any("pass --names hf for those of Hugging Face" in note for note in report.warnings)


def test_verl_saves_one_checkpoint_in_three_directories(tmp_path):
    """Weights, optimizer with scheduler, and random states; the grid is in a JSON file."""
    shutil.copytree(VERL, tmp_path / "run")
    actor = tmp_path / "run" / "global_step_3" / "actor"
    for place in (tmp_path / "run", actor.parent, actor):
        with reshard.open(place) as checkpoint:
            train = checkpoint.manifest.train
            assert checkpoint.manifest.origin.mesh["pp"] == 2
            assert not checkpoint.manifest.warnings  # every file is read
            assert (train.step, train.scheduler["num_steps"]) == (3, 24)
            assert train.rng
            assert len(train.param_groups) == 2
    # The weights are those of the masters only if the flat buffers are divided as they were.
    checks = {check.name: check for check in reshard.verify(actor, deep=True).checks}
    assert checks["masters"].status == "passed"
    assert "15 weights" in checks["masters"].looked_at
    (actor / "model" / "huggingface").mkdir()
    with pytest.raises(IncompleteError, match=r"pass .*actor, which has all parts"):
        reshard.inspect(actor / "optimizer")
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"vocab_size": 24, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}
    (actor / "model" / "huggingface" / "config.json").write_text(json.dumps(config))
    report = reshard.merge(actor, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    assert report.tensors == 21
    # With a bridge (verl's default) the weights are a Hugging Face model.
    bridged = tmp_path / "bridged"
    shutil.copytree(actor, bridged)
    shutil.rmtree(bridged / "model" / "dist_ckpt")
    shutil.rmtree(bridged / "model" / "huggingface")
    reshard.merge(actor, bridged / "model" / "huggingface", dtype="bf16")
    contents = bridged / "ckpt_contents.json"
    contents.write_text(contents.read_text().replace("model/dist_ckpt", "model/huggingface"))
    assert reshard.diff(actor, bridged).same
    reshard.merge(bridged, tmp_path / "again")
    assert reshard.diff(tmp_path / "model", tmp_path / "again").same
    config["vocab_size"] = 23
    (bridged / "model" / "huggingface" / "config.json").write_text(json.dumps(config))
    weights = load_file(bridged / "model" / "huggingface" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:23].clone()
    save_file(weights, bridged / "model" / "huggingface" / "model.safetensors")
    with pytest.raises(UnsupportedError, match="Megatron padded the vocabulary"):
        reshard.inspect(bridged)
    reshard.split(actor, tmp_path / "tp2", to="megatron", tp=2, pp=1)
    difference = reshard.diff(actor, tmp_path / "tp2", ignore=["rng"])
    assert not difference.unequal
    assert not difference.only_a


def test_a_part_that_verl_saved_is_missed(tmp_path):
    shutil.copytree(VERL / "global_step_3" / "actor", tmp_path / "actor")
    shutil.rmtree(tmp_path / "actor" / "optimizer")
    with pytest.raises(IncompleteError, match=r"optimizer/dist_ckpt is missing or incomplete"):
        reshard.inspect(tmp_path / "actor")
    stated = tmp_path / "actor" / "ckpt_contents.json"
    stated.write_text(stated.read_text().replace('"peft": false', '"peft": true'))
    with pytest.raises(UnsupportedError, match="only the weights of an adapter"):
        reshard.inspect(tmp_path / "actor")


def test_verl_s_migration_links_one_directory_to_three(tmp_path):
    for part in ("model", "optimizer", "extra"):
        shutil.copytree(RANGES / STEP, tmp_path / "actor" / part / "dist_ckpt")
    assert reshard.diff(RANGES, tmp_path / "actor").same


def test_buffers_of_adam_beside_a_layer_wise_muon_have_its_parameters_alone(unpacked):
    """Muon's states have names; in the other form of the same run, Adam's have them, too."""
    run = unpacked(of_019("muon_dp2"))
    expected = json.loads((run / "expected.json").read_text())["tensors"]
    flat, named = run / "dp_reshardable", run / "fully_reshardable"
    with reshard.open(flat) as checkpoint:
        found = compute_digests(checkpoint)
        muons, *adams = checkpoint.manifest.train.param_groups
    assert {fqn: held | found[fqn] for fqn, held in expected.items()} == {
        fqn: found[fqn] for fqn in expected
    }
    assert (set(muons.fqns), [len(adam.fqns) for adam in adams]) == (set(expected), [2, 5])
    assert_same(flat, named)


@pytest.mark.parametrize("form", ["torch", "torch_dist", "torch_dist_gather_scatter"])
def test_hybrid_models_of_core_0_19_state_their_stages_by_bars(unpacked, tmp_path, form):
    """Stages of one and three layers; the last one also has MTP, of an attention and an MLP."""
    run, out = unpacked(of_019("hybrid_mtp_pp2")), tmp_path / "out"
    sizes = {"tp": 1, "pp": 2, "dp": 1, "stage_layers": "3,1", "make_vocab_size_divisible_by": 8}
    reshard.split(run / form, out, ckpt_format="torch", **sizes)
    assert_same(run / form, out)
    places = (run / "torch" / STEP, out / STEP)
    before, after = (
        [read_root(path) for path in sorted(place.rglob("model_optim_rng.pt"))] for place in places
    )
    assert after[0]["args"].hybrid_layer_pattern == "M*-|M/*-"
    # The second Mamba layer is the last layer of both, and the optimizer numbers its parameters.
    old, new = (
        [name for name in root["model"] if ".mixer." in name or name.startswith("mtp.")]
        for root in (before[1], after[1])
    )
    old = [name.replace("decoder.layers.2.", "decoder.layers.0.") for name in old]
    assert "decoder.layers.0.mixer.conv1d_weight" in old
    assert "mtp.layers.0.mtp_model_layer.layers.0.self_attention.core_attention._extra_state" in old
    assert set(new) == set(old)
    assert [n for n in new if "_extra" not in n] == [n for n in old if "_extra" not in n]
    reshard.split(out, tmp_path / "whole", ckpt_format="torch_dist", tp=1, pp=1, dp=1)
    with reshard.open(tmp_path / "whole") as checkpoint:
        assert checkpoint.manifest.train.config["hybrid_layer_pattern"] == "M*-M/*-"
        keys = DcpReader(tmp_path / "whole" / STEP).read_metadata().state_dict_metadata
    assert "decoder.layers.0.mixer.conv1d.weight.x" in keys
    assert "output_layer._extra_state/shard_0_1" in keys
    assert_same(tmp_path / "whole", out)


def test_hybrid_models_have_the_names_of_their_files(tmp_path):
    """Their layers are those of ``--spec``, whatever ``--transformer-impl`` is."""
    unpack(of_019("hybrid_mtp_pp2"), tmp_path)
    for path in (tmp_path / "torch").rglob("model_optim_rng.pt"):
        change(path, transformer_impl="local")
    sizes = {"tp": 1, "pp": 1, "dp": 1, "make_vocab_size_divisible_by": 8}
    report = reshard.split(tmp_path / "torch", tmp_path / "dist", ckpt_format="torch_dist", **sizes)
    assert any("mixer.in_proj.layer_norm_weight, as transformer_en" in w for w in report.warnings)
    real, written = (
        DcpReader(tmp_path / run / STEP).read_metadata().state_dict_metadata
        for run in ("torch_dist", "dist")
    )
    assert {key for key in real if key.startswith("decoder.")} <= written.keys()


def test_mamba_layers_of_an_unknown_version_get_the_older_names(unpacked, tmp_path):
    run = unpacked(of_019("hybrid_mtp_pp2"))
    sizes = {"tp": 1, "pp": 1, "dp": 1, "make_vocab_size_divisible_by": 8}
    report = reshard.split(run / "torch", tmp_path / "dist", ckpt_format="torch_dist", **sizes)
    common = tmp_path / "dist" / STEP / "common.pt"
    args = read_root(common)["args"]
    del vars(args)[names.CONVOLUTION_SINCE_019]
    change(common, args=args)
    told = [
        reshard.split(tmp_path / "dist", tmp_path / "old", ckpt_format="torch", **sizes),
        report,
    ]
    assert ["core 0.18 and earlier" in " ".join(each.notes) for each in told] == [True, False]
    written = (tmp_path / "old" / STEP / "mp_rank_00" / "model_optim_rng.pt").read_bytes()
    assert b"mixer.conv1d.weight" in written
    assert b"mixer.conv1d_weight" not in written
    assert_same(tmp_path / "dist", tmp_path / "old")


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_lion_has_the_matrices_of_layers_and_of_experts_and_adam_the_rest(unpacked, tmp_path, form):
    """A chain of three: Lion's groups do not name their optimizer, those of Adam do."""
    source = unpacked(of_019("mixtral_lion_ep2")) / form
    options = {"pp": 2, "ep": 2, "dp": 2, "make_vocab_size_divisible_by": 8}
    for to in ("torch", "torch_dist"):
        report = reshard.split(source, tmp_path / f"{to}_out", ckpt_format=to, **options)
        assert not any("Adam" in note for note in report.notes)
        assert_same(source, tmp_path / f"{to}_out")
    with pytest.raises(UnsupportedError, match="optimizer of the matrices") as refused:
        reshard.split(source, tmp_path / "no", distributed_optimizer=True, **options)
    assert "--no-distributed-optimizer" in refused.value.remedy
    for place in (source, tmp_path / "torch_out", tmp_path / "torch_dist_out"):
        with reshard.open(place) as checkpoint:
            train = checkpoint.manifest.train
            adams = set(checkpoint.optimizer("exp_avg_sq"))
            lions = set(checkpoint) - adams
        assert {name.split(".")[-2] for name in lions} == {
            *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"),
        }
        members = {"adam": set(adams), None: lions}
        for group in train.param_groups:
            members[group.hyper.get("optimizer")] -= set(group.fqns)
        assert members == {"adam": set(), None: set()}
        assert train.optimizer_step.keys() == adams


def test_a_rank_without_the_optimizer_of_its_stage_is_refused(unpacked, tmp_path):
    """Its experts would have no state, and the dense layers that of another rank."""
    run = unpacked(of_019("mixtral_lion_ep2")) / "torch"
    for rank in ("000", "001"):
        copy = shutil.copytree(run, tmp_path / rank)
        path = copy / STEP / f"mp_rank_00_{rank}" / "model_optim_rng.pt"
        change(path, optimizer=None)
        with pytest.raises(IncompleteError, match=f"rank_00_{rank}/.*has no optimizer, but other"):
            formats.read([copy])


@pytest.mark.parametrize(
    ("kinds", "is_known"),
    [
        ([{"wd_mult": 1.0}, {"wd_mult": 0.0}], True),
        ([{"wd_mult": 1.0}], True),  # the norms are frozen
        ([{"wd_mult": 1.0}, {"wd_mult": 1.0, "eps": 1e-6}], False),
        ([{"wd_mult": 1.0, "default_config": False}, {"wd_mult": 0.0}], False),
    ],
)
def test_groups_that_megatron_does_not_make_are_not_guessed(kinds, is_known):
    """torch_dist lists no members of groups."""
    params = {"decoder.layers.0.mlp.linear_fc1.weight": (8, 4), "decoder.final_norm.weight": (4,)}
    args = Arguments("args", {})
    reason = explain_unassigned(kinds, params, args, load_table("megatron"))
    assert (reason == "") == is_known


def test_one_layer_of_mtp_may_stand_for_several(new, tmp_path):
    """Megatron counts how often it is applied (--mtp-use-repeated-layer)."""
    source = shutil.copytree(new / "torch", tmp_path / "source")
    for file in source.rglob("model_optim_rng.pt"):
        args = read_root(file)["args"]
        args.mtp_num_layers, args.mtp_use_repeated_layer = 3, True
        change(file, args=args)
    options = {"tp": 1, "dp": 1, "make_vocab_size_divisible_by": 8}
    reshard.split(source, tmp_path / "out", to="megatron", **options)
    with reshard.open(tmp_path / "out") as checkpoint:
        assert checkpoint.manifest.train.config["mtp_num_layers"] == 3
    assert_same(source, tmp_path / "out")


def test_mup_and_decoupled_rates_give_parameters_other_groups(unpacked, tmp_path):
    """Only the form torch lists the members of its groups, and only torch_dist names the states."""
    run, out = unpacked(of_019("llama_mup_tp2")), tmp_path / "out"
    torch, dist = run / "torch", run / "torch_dist"
    sizes = {"tp": 1, "pp": 2, "dp": 1, "make_vocab_size_divisible_by": 8}
    report = reshard.split(dist, out, to="megatron", ckpt_format="torch", **sizes)
    assert "core 0.16 to 0.18" in " ".join(report.notes)
    found = []
    for path in (torch, dist, out):
        with reshard.open(path) as checkpoint:
            groups = checkpoint.manifest.train.param_groups
        found.append({frozenset(group.fqns): group.hyper["max_lr"] for group in groups})
    ends, scaled = {"embedding.word_embeddings.weight", "output_layer.weight"}, 0.01 * 4 / 8
    assert found == [found[0]] * 3
    assert found[0][frozenset(ends)] == 0.03
    (matrices,) = (fqns for fqns, rate in found[0].items() if rate == scaled)
    assert len(matrices) == 8
    assert sorted(found[0].values()) == [scaled, 0.01, 0.03]
    assert_same(torch, dist)
    assert_same(out, dist)


@pytest.mark.parametrize(
    ("group", "is_muon"),
    [
        ({"momentum_beta": 0.95, "use_nesterov": False, "weight_decay": 0.01}, True),
        ({"momentum": 0.95, "weight_decay": 0.01}, True),  # of emerging_optimizers 0.3
        ({"momentum": 0.9, "dampening": 0, "nesterov": False}, False),  # torch's SGD
        ({"betas": (0.9, 0.999), "optimizer": "adam"}, False),
    ],
)
def test_the_settings_of_a_group_tell_muon_from_other_optimizers(group, is_muon):
    assert updates_matrices([group], [group]) == is_muon


def test_muon_has_the_matrices_and_adam_the_rest(tmp_path):
    """A chain of two optimizers that are not those of dense layers and of experts."""
    report = reshard.split(MUON, tmp_path / "dist", to="megatron", dp=1, ckpt_format="torch_dist")
    assert report.optimizer_tensors_out == report.optimizer_tensors_in  # not the modules' states
    for place in (MUON, tmp_path / "dist"):
        with reshard.open(place) as checkpoint:
            matrices = set(checkpoint.optimizer("momentum_buffer"))
            assert {name.split(".")[-2] for name in matrices} == {
                *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
            }
            assert set(checkpoint.optimizer("exp_avg")) == set(checkpoint) - matrices
            groups = [set(group.fqns) for group in checkpoint.manifest.train.param_groups]
            ends = {"embedding.word_embeddings.weight", "output_layer.weight"}
            assert groups == [matrices, ends, set(checkpoint) - matrices - ends]
    reshard.split(tmp_path / "dist", tmp_path / "torch", ckpt_format="torch")
    assert reshard.diff(MUON, tmp_path / "torch").same
    checks = {check.name: check for check in reshard.verify(MUON, deep=True).checks}
    assert checks["masters"].status == "passed"  # the masters are in the order of the states
    assert "9 weights" in checks["masters"].looked_at


def test_experts_that_more_ranks_share_than_layers_are_not_all_saved():
    """core_v0.16.1 lets two ranks write one file, of which one part of each expert is left."""
    values = {"num_experts": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert not covers_experts(Arguments("args", values))
    assert covers_experts(Arguments("args", {**values, "tensor_model_parallel_size": 2}))
    assert covers_experts(Arguments("args", {**values, "expert_tensor_parallel_size": 1}))
    with pytest.raises(UnsupportedError, match="2 ranks share each expert"):
        find_ranks(Location([DIST]), Arguments("args", values))


@pytest.mark.parametrize(("form", "told"), [("torch_dist", True), ("torch", False)])
def test_an_older_core_is_told_which_form_it_loads(form, told, tmp_path):
    """Up to 0.14 Megatron-core knows flat ranges, which 0.16 refuses, and not fully_reshardable."""
    report = reshard.split(RANGES, tmp_path / "out", to="megatron", dp=1, ckpt_format=form)
    assert any("Megatron-core up to 0.15 loads" in note for note in report.notes) is told
    difference = reshard.diff(RANGES, tmp_path / "out")
    assert not difference.unequal
    assert not difference.only_a
    with reshard.open(tmp_path / "out") as written:
        assert ("fully_sharded_model_space" in written.manifest.origin.detail) is told


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, None),
        ({"overlap_grad_reduce": True}, 40_000_000),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 128}, 128),
        ({"overlap_grad_reduce": True, "data_parallel_size": 64}, 64_000_000),
        ({"overlap_grad_reduce": True, "overlap_param_gather_with_optimizer_step": True}, None),
    ],
)
def test_buckets_are_closed_where_megatron_overlaps_their_reduction(given, size):
    assert Arguments("args", given).get_bucket_size(stage=0, chunk=0) == size
    assert Arguments("args", given).get_bucket_size(stage=1, chunk=0) is None
    assert Arguments("args", given).get_bucket_size(stage=0, chunk=1) is None


def use_nested_dict(args):
    return {"model": {"num_layers": 4}, "parallel": vars(args)}


def use_old_name(args):
    """Return arguments as Megatron-LM before 2.5 names them."""
    stages = args.pipeline_model_parallel_size
    return Namespace(model_parallel_size=2, pipeline_model_parallel_size=stages)


@pytest.mark.parametrize("use", [vars, use_nested_dict, use_old_name, lambda args: args])
def test_a_file_of_one_rank_alone_is_refused(tmp_path, use):
    ranks = DATA / "llama_tp2pp2" / "ckpt" / STEP
    file = shutil.copy(ranks / "mp_rank_00_000" / "model_optim_rng.pt", tmp_path / "model.pt")
    change(file, args=use(read_root(file)["args"]))
    with pytest.raises(UnsupportedError, match=r"one of Megatron's .* ranks: it states tp 2, pp 2"):
        reshard.open(file)


def test_buffers_of_stages_that_no_argument_states_are_left_out(dist):
    change(dist / STEP / "common.pt", pipeline_model_parallel_size=3)
    with reshard.open(dist) as checkpoint:
        (note,) = checkpoint.manifest.warnings
        assert {kind for kind, _ in checkpoint.manifest.entries} == {"param"}
    assert "do not state how 4 layers are divided among 3 pipeline stages" in note
