"""A real checkpoint of Megatron FSDP: DCP with uneven shards, and optimizer states by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import reshard
from reshard.tensors.lazy import LazyTensor
from tests.support.directories import unpack

PACKED = Path(__file__).parents[1] / "data" / "megatron_fsdp_0.6.1" / "ws3.tar.xz"


@pytest.fixture
def saved(tmp_path):
    unpack(PACKED, tmp_path)
    return tmp_path / "ckpt"


def test_every_tensor_has_the_sum_of_the_live_shards(saved):
    expected = json.loads((saved.parent / "expected.json").read_text())
    with reshard.open(saved) as checkpoint:
        manifest = checkpoint.manifest
        names = {fqn for _, fqn in manifest.entries} - {"count"}
        assert names == set(expected)
        assert max(len(entry.chunks) for entry in manifest.entries.values()) == 2
        for (kind, fqn), entry in manifest.entries.items():
            if fqn == "count":
                continue
            total = LazyTensor(entry, checkpoint._pool)[...].double().sum().item()
            assert total == pytest.approx(expected[fqn][kind], abs=1e-9), (kind, fqn)
    steps = {name: held["step"] for name, held in expected.items()}
    assert manifest.train.optimizer_step == steps
    (group,) = manifest.train.param_groups
    assert (len(group.fqns), group.hyper["weight_decay"]) == (len(expected), 0.01)


def test_weights_lose_the_wrapper_s_name(saved, tmp_path):
    reshard.merge(saved, tmp_path / "model.safetensors")
    with reshard.open(tmp_path / "model.safetensors") as merged:
        assert merged["blocks.1.up.weight"].shape == torch.Size((53, 10))
        assert int(merged["count"][...]) == 5


def test_another_number_of_ranks_holds_the_same(saved, tmp_path):
    report = reshard.split(saved, tmp_path / "out", world_size=2)
    assert reshard.diff(saved, tmp_path / "out").same
    about, wanted = (
        FileSystemReader(path).read_metadata().planner_data for path in (tmp_path / "out", saved)
    )
    assert about == wanted  # Megatron FSDP looks for ``model.module.*``
    assert report.notes == []
    assert not any("wrapper prefixes" in text for text in report.derived)
