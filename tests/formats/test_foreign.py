"""Checkpoints of libraries that reshard does not read are refused by name."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reshard
from reshard.errors import UnsupportedError
from reshard.formats import registry

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "place", "files"),
    [
        (
            "fairseq2",
            "run/checkpoints/step_10",
            [
                "model/pp_00/tp_00/sdp_00.pt",
                "optimizer/pp_00/tp_00/sdp_00.pt",
                "trainer/rank_00.pt",
            ],
        ),
        ("fairseq2", "step_10/model/pp_00/tp_00", ["sdp_00.pt", "sdp_01.pt"]),
        (
            "OLMo's Local",
            "run/step10",
            ["model/rank0.pt", "optim/rank0.pt", "train/rank0.pt", "metadata.yaml"],
        ),
        ("torchsnapshot", "snapshot", [".snapshot_metadata", "0/model/weight"]),
        ("Orbax", "run/100", ["_CHECKPOINT_METADATA", "default/manifest.ocdbt"]),
        ("Orbax", "items", ["_METADATA", "manifest.ocdbt", "d/0"]),
        ("PaddlePaddle", "checkpoint-5", ["model.safetensors", "master_weights.safetensors"]),
    ],
)
def test_a_library_is_named(tmp_path, name, place, files):
    """Refuse its run, its checkpoint, and one file of several that look like whole models."""
    for each in files:
        path = tmp_path / place / each
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".pt":
            torch.save({"weight": torch.ones(2)}, path)
        elif path.suffix == ".safetensors":
            save_file({"weight": torch.ones(2)}, path)
        else:
            path.write_text("{}")
    checkpoint = tmp_path / place
    paths = [checkpoint, *([checkpoint / files[1]] if "sdp_01" in files[1] else [])]
    for path in [*paths, *([tmp_path / "run"] if (tmp_path / "run").is_dir() else [])]:
        with pytest.raises(UnsupportedError, match=f"of {name}") as caught:
            reshard.inspect(path)
        assert caught.value.remedy


def test_a_format_of_another_package_may_read_what_a_library_saved(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / ".snapshot_metadata").write_text("{}")

    def detect(location):
        return ".snapshot_metadata" in location.files

    theirs = replace(registry.get_format("huggingface"), name="theirs", detect=detect)
    with registry.add_format(theirs):
        assert reshard.inspect(tmp_path).manifest.entries


def test_a_format_of_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(registry, "_load_extensions", tuple)
    run = ROOT / "plugins" / "nanotron" / "tests" / "data" / "llama_pp2" / "ckpt"
    for path in (run, run / "3"):
        with pytest.raises(UnsupportedError, match="of nanotron, which the package") as caught:
            reshard.inspect(path)
        assert caught.value.remedy.endswith("pip install . ./plugins/nanotron")  # on no index


def test_weights_of_paddlenlp_are_not_taken_for_those_of_transformers(tmp_path):
    """Refuse it by its config: linear layers have the same names, and transposed weights."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2, 3)}, source / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (source / "config.json").write_text(json.dumps(config))
    assert reshard.inspect(source).manifest.entries
    (source / "config.json").write_text("{")
    assert reshard.inspect(source).manifest.entries
    (source / "config.json").write_text(json.dumps({**config, "paddlenlp_version": None}))
    with pytest.raises(UnsupportedError, match="may be transposed"):
        reshard.merge(source, tmp_path / "out")
    assert reshard.inspect(source, source_format="huggingface").manifest.entries


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_metadata_of_bytecheckpoint_are_not_those_of_dcp(tmp_path):
    """Refuse it: its files have bytes of tensors alone, where DCP's metadata place whole items."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    metadata.bytecheckpoint_version = "0.0.2"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedError, match="ByteCheckpoint"):
        reshard.inspect(tmp_path)
