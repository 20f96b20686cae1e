"""A real checkpoint of Megatron-core with Megatron FSDP: fsdp_dtensor, which is plain DCP."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard import formats
from reshard.core.location import Location
from reshard.errors import UnsupportedError
from reshard.formats.megatron import arguments, directory, fsdp
from reshard.layouts.model_parallel.rules import load_whole_table
from tests.support.digests import compute_digests
from tests.support.directories import unpack

DATA = Path(__file__).parents[1] / "data" / "megatron_fsdp_core_0.16.1"
STEP = "iter_0000003"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("fsdp")
    unpack(DATA / "mixtral_tp2ep2.tar.xz", place)
    return place / "run"


def test_every_tensor_has_the_bytes_of_the_live_shards(run):
    """Gate and up, which the files have apart, are one tensor, also in experts."""
    expected = json.loads((run.parent / "expected.json").read_text())
    with reshard.open(run) as checkpoint:
        manifest = checkpoint.manifest
        assert compute_digests(checkpoint) == expected["tensors"]
    assert "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight" in expected["tensors"]
    assert manifest.train.step == 3
    assert manifest.train.optimizer_step == dict.fromkeys(expected["tensors"], 3.0)
    decayed, other = manifest.train.param_groups
    assert (len(decayed.fqns), decayed.hyper["weight_decay"]) == (16, 0.01)
    assert (len(other.fqns), other.hyper["weight_decay"]) == (5, 0.0)
    assert manifest.origin.mesh == {"world": 4, "tp": 2, "pp": 1, "dp": 2, "ep": 2}
    assert reshard.verify(run, deep=True).passed


def test_the_model_has_hugging_face_s_names(run, tmp_path):
    reshard.merge(run, tmp_path / "model")
    with reshard.open(tmp_path / "model") as merged:
        assert merged["model.layers.1.block_sparse_moe.experts.1.w1.weight"].shape == (12, 8)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "mixtral"


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatron_s_other_formats_hold_the_same_state(run, tmp_path, form):
    """The module has the run's 16 bits, which another rank of FSDP computes from the masters."""
    grid = {"tp": 1, "pp": 2, "ep": 1, "dp": 2, "make_vocab_size_divisible_by": 8}
    report = reshard.split(run, tmp_path / "there", to="megatron", ckpt_format=form, **grid)
    assert any("random states" in text for text in report.dropped)
    assert reshard.diff(run, tmp_path / "there", kinds=["weight", "optimizer"]).same
    manifest = formats.read([tmp_path / "there"])
    assert {entry.dtype.name for entry in manifest.of_kind("param")} == {"bfloat16"}
    assert manifest.train.config["use_megatron_fsdp"] is False


def test_a_directory_is_recognized_by_its_keys(run, tmp_path):
    """Megatron's own keys are needed where the directory's name does not tell."""
    assert directory.is_fsdp(Location.from_paths([run / STEP]))
    renamed = shutil.copytree(run / STEP, tmp_path / "best")
    assert formats.read([renamed]).origin.format == "megatron"
    assert reshard.diff(run, renamed).same
    for name, content in ((STEP, b"model.weight"), ("step3", b"model.module.weight")):
        plain = tmp_path / name
        plain.mkdir()
        (plain / ".metadata").write_bytes(content)
        assert not directory.is_fsdp(Location.from_paths([plain]))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_parts_of_a_gated_delta_net_are_joined(tmp_path):
    """Core 0.19 stores them apart (handle_gdn_in_state_dict), so that ranks cut each part."""
    rows = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 2, "alpha": 2}
    name = "decoder.layers.0.self_attention.in_proj.weight"
    weights = {part: torch.rand(count, 8) for part, count in rows.items()}
    moments = {part: torch.rand(count, 8) for part, count in rows.items()}
    args = Namespace(tensor_model_parallel_size=2, num_layers=1)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": {f"module.{name}.{part}": weight for part, weight in weights.items()},
        "optimizer": {
            "state": {
                f"module.module.{name}.{part}": {"exp_avg": moment, "step": torch.tensor(3.0)}
                for part, moment in moments.items()
            },
            "param_to_group_meta": {f"module.{name}": {"lr": 0.01, "wd_mult": 1.0}},
        },
    }
    dcp.save(state, checkpoint_id=tmp_path / "last")
    with reshard.open(tmp_path / "last") as checkpoint:
        train = checkpoint.manifest.train
        found = checkpoint[name][...], checkpoint.optimizer("exp_avg")[name][...]
    expected = [torch.cat(list(parts.values())) for parts in (weights, moments)]
    assert all(map(torch.equal, found, expected))
    assert train.optimizer_step == {name: 3.0}
    assert [group.fqns for group in train.param_groups] == [(name,)]


def test_parts_that_tensor_parallel_ranks_cut_apart_are_refused(run):
    """A fused projection of Mamba is rank after rank, and each rank has a share of every part."""
    location, table = Location.from_paths([run / STEP]), load_whole_table("megatron")
    args = arguments.parse({"tensor_model_parallel_size": 2}, "args")
    name = "decoder.layers.0.mixer.in_proj.weight"
    with pytest.raises(UnsupportedError, match="does not tell its parts from each other"):
        fsdp._refuse_several_pieces(location, [name], args, table)
    fsdp._refuse_several_pieces(location, [f"{name}.z"], args, table)
    alone = replace(args, values={"tensor_model_parallel_size": 1})
    fsdp._refuse_several_pieces(location, [name], alone, table)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_gate_that_is_not_of_swiglu_is_not_stored_apart(tmp_path):
    """Those of SwiGLU are. Megatron-Bridge states the run in a file of its own."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    state = {"iteration": 3, "checkpoint_version": 3.0, "args": None}
    dcp.save(
        {**state, "model": {f"module.{name}": torch.rand(8, 4)}}, checkpoint_id=tmp_path / STEP
    )
    with reshard.open(tmp_path / STEP) as checkpoint:
        assert list(checkpoint) == [name]
    model = {"num_layers": 1, "hidden_size": 4, "tensor_model_parallel_size": 2}
    config = json.dumps({"model": {**model, "gated_linear_unit": True}})
    (tmp_path / STEP / "run_config.yaml").write_text(config)
    with pytest.raises(UnsupportedError, match=rf"(?s)'{name}' of 2 .*without --use-megatron-fsdp"):
        reshard.open(tmp_path / STEP)
