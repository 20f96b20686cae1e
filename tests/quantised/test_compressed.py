"""Releases of compressed-tensors and Model Optimizer: values of the libraries, and refusals."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard import formats
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.coded_values import dequantise
from reshard.quantised import decode, loops
from reshard.tensors.lazy import Checkpoint
from tests.judged.conftest import KEPT
from tests.judges.quantised_libraries import COMPRESSED, OPTIMIZER
from tests.quantised.models import random_codes, unpack, write_model
from tests.support.digests import compute_digest
from tests.support.directories import unpack as unpack_archive

INTEGERS = {"quant_method": "compressed-tensors"}
INTEGERS["config_groups"] = {"group_0": {"weights": {"group_size": 32, "symmetric": True}}}
ASYMMETRIC = {"quant_method": "compressed-tensors"}
ASYMMETRIC["config_groups"] = {"group_0": {"weights": {"group_size": 32, "symmetric": False}}}
OPTIMIZED = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Return a directory with ``<scheme>/model`` and ``<scheme>/expected.json``."""
    place = tmp_path_factory.mktemp("releases")
    for archive in (KEPT / "quantised").iterdir():
        unpack_archive(archive, place)
    return place


@pytest.mark.parametrize("scheme", [*COMPRESSED, *OPTIMIZER])
def test_values_are_those_of_the_library(releases, tmp_path, scheme):
    expected = json.loads((releases / scheme / "expected.json").read_text())
    for dtype, digests in expected.items():
        out = tmp_path / dtype
        assert formats.read(releases / scheme / "model").origin.precision == "bfloat16"
        reshard.merge(releases / scheme / "model", out, dtype=dtype)
        values = load_file(out / "model.safetensors")
        assert {name: compute_digest(value + 0) for name, value in values.items()} == digests
        assert "quantization_config" not in json.loads((out / "config.json").read_text())


def integers(*shape, zeros=True):
    """Return tensors of integers of 4 bits in groups of 32 columns, and their values."""
    chance = torch.Generator().manual_seed(3)
    *lead, rows, columns = shape
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (*lead, rows, columns // 8), generator=chance)
    codes = words.to(torch.int32).contiguous().view(torch.uint8)
    scales = torch.rand(*lead, rows, columns // 32, generator=chance).bfloat16()
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - 8
    tensors = {
        "a.weight_packed": words.to(torch.int32),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor(shape),
    }
    if zeros:
        points = torch.randint(0, 16, scales.shape, generator=chance)
        padded = torch.nn.functional.pad(points, (0, 0, 0, -rows % 8))
        parts = padded.reshape(*lead, -1, 8, columns // 32) << 4 * torch.arange(8)[:, None]
        packed = parts.sum(-2)
        packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
        tensors["a.weight_zero_point"] = packed
        numbers -= (points - 8).repeat_interleave(32, -1)
    return tensors, numbers * scales.float().repeat_interleave(32, -1)


def nvfp4(rows, columns):
    """Return tensors of a weight in NVFP4 of Model Optimizer, and its values."""
    codes = random_codes(rows, columns // 2, dtype=torch.float8_e5m2).view(torch.uint8)
    scales = random_codes(rows, columns // 16, seed=4)
    factor = torch.tensor(0.0173)
    wide = (scales.float() * factor).repeat_interleave(16, -1)
    names = {"a.weight": codes, "a.weight_scale": scales, "a.weight_scale_2": factor}
    return names, unpack(codes) * wide


CASES = {
    "integers": (*integers(2, 37, 96, zeros=False), INTEGERS),
    "zero points": (*integers(2, 37, 96), ASYMMETRIC),
    "nvfp4": (*nvfp4(37, 96), OPTIMIZED),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [True, False])
def test_any_box_has_the_values_of_a_plain_arithmetic(tmp_path, monkeypatch, case, compiled):
    if not compiled:
        monkeypatch.setattr(loops, "_compiled", None)
    monkeypatch.setattr(decode, "_BLOCK", 500)
    tensors, want, settings = CASES[case]
    source = write_model(tmp_path / "m", tensors, settings)
    draw = random.Random(0)
    with Checkpoint(dequantise(formats.read(source))[0]) as checkpoint:
        tensor = checkpoint["a.weight"]
        assert tensor.shape == tuple(want.shape)
        for _ in range(60):
            starts = [draw.randrange(size) for size in want.shape]
            sizes = zip(starts, want.shape, strict=True)
            cut = tuple(slice(start, draw.randint(start + 1, size)) for start, size in sizes)
            assert torch.equal(tensor[cut], want[cut].bfloat16()), cut
    reshard.merge(source, tmp_path / "fp32", dtype="fp32", workers=2, max_memory_bytes=256 << 10)
    assert torch.equal(load_file(tmp_path / "fp32" / "model.safetensors")["a.weight"], want)


E4M3 = torch.float8_e4m3fn
WRONG = [  # a sound model, a tensor, its other value (None: it is missing), and what is said
    ("integers", "a.weight_scale", None, IncompleteError, "scale is missing"),
    ("integers", "a.weight_shape", None, IncompleteError, "no weight_shape"),
    ("zero points", "a.weight_zero_point", None, IncompleteError, "weight_zero_point is missing"),
    ("nvfp4", "a.weight_scale_2", None, IncompleteError, "a.weight_global_scale or a.weight_scale"),
    ("nvfp4", "b.weight_scale", torch.ones(2), IncompleteError, "belong to no quantised weight"),
    ("integers", "a.weight_shape", torch.tensor([2, 37, 95]), UnsupportedError, "packs a weight"),
    ("integers", "a.weight_scale", torch.ones(2, 37, 5), UnsupportedError, "that of no scheme in"),
    ("nvfp4", "a.weight_scale", torch.ones(37, 4).to(E4M3), CorruptError, "do not fit"),
    ("nvfp4", "a.weight_scale", torch.ones(37, 6), UnsupportedError, "reshard does not know"),
    ("integers", "a.weight_zero_point", torch.ones(2, 37, 3).char(), UnsupportedError, "in int8"),
    ("nvfp4", "a.weight_scale_2", torch.tensor(float("inf")), CorruptError, "is inf"),
    ("integers", "a.weight_g_idx", torch.zeros(96).int(), UnsupportedError, "not in the order of"),
    ("nvfp4", "a.pre_quant_scale", torch.ones(96), UnsupportedError, "inputs are scaled as well"),
]


@pytest.mark.parametrize(("sound", "name", "value", "error", "text"), WRONG)
def test_what_does_not_give_the_weights_is_refused(tmp_path, sound, name, value, error, text):
    tensors, _, settings = CASES[sound]
    changed = tensors | {name: value}
    stored = {key: tensor for key, tensor in changed.items() if tensor is not None}
    source = write_model(tmp_path / "m", stored, settings)
    with pytest.raises(error, match=text):
        reshard.merge(source, tmp_path / "out", dtype="bf16")


def test_rotated_weights_are_refused(tmp_path):
    tensors, _, settings = CASES["integers"]
    rotated = settings | {"transform_config": {"config_groups": {"u": {}}}}
    source = write_model(tmp_path / "m", tensors, rotated)
    with pytest.raises(UnsupportedError, match="weights were rotated"):
        reshard.merge(source, tmp_path / "out", dtype="bf16")


def test_zero_points_of_zero_change_nothing(tmp_path):
    tensors, want, settings = CASES["integers"]
    zeros = {"a.weight_zero_point": torch.zeros(2, 37, 3, dtype=torch.int8)}
    source = write_model(tmp_path / "m", tensors | zeros, settings)
    reshard.merge(source, tmp_path / "out", dtype="fp32")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], want)


def test_codes_are_copied_and_not_written_anew(releases, tmp_path):
    source = releases / "W4A16" / "model"
    report = reshard.inspect(source)
    assert report.to_dict()["quantisation"] == "compressed-tensors"
    stated = f"compressed-tensors, as {source / 'config.json'} states; the tensors are codes"
    assert f"quantised   {stated}" in str(report)
    reshard.merge(source, tmp_path / "copy")
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    stored = load_file(source / "model.safetensors")
    assert copied.keys() == stored.keys()
    assert all(torch.equal(copied[name], stored[name]) for name in stored)
    with pytest.raises(UnsupportedError, match="quantised with 'compressed-tensors'"):
        reshard.merge(tmp_path / "copy", tmp_path / "again", quantise_like=source)
