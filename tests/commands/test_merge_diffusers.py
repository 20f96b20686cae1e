"""Merges into the directory of a model of diffusers, with the names of its ``save_pretrained``."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import reshard

# diffusers 0.42: ``save_pretrained`` of a UNet2DModel, abridged.
CONFIG = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1", "sample_size": 8}
STEM = "diffusion_pytorch_model"
WEIGHTS = {f"conv.{n}.weight": torch.full((8, 8), float(n)) for n in range(3)}


@pytest.fixture
def saved(tmp_path):
    """Return the path of trained weights, and a directory that has the config alone."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text(json.dumps(CONFIG))
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tmp_path / "unet"


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (None, [f"{STEM}.safetensors"]),
        (
            600,
            [
                *(f"{STEM}-0000{n}-of-00002.safetensors" for n in (1, 2)),
                f"{STEM}.safetensors.index.json",
            ],
        ),
    ],
    ids=["one file", "shards"],
)
def test_the_files_have_the_names_of_diffusers(limit, names, saved, tmp_path):
    source, unet = saved
    options = {} if limit is None else {"max_shard_bytes": limit}
    out = tmp_path / "out"
    report = reshard.merge(source, out, hf_dir=unet, **options)
    assert {path.name for path in out.iterdir()} == {*names, "config.json"}
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert report.load_line == f'diffusers.UNet2DModel.from_pretrained("{out}")'
    found = {}
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
