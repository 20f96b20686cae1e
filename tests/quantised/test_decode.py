"""Dequantised weights: values, boxes, windows, and what is refused."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard import formats
from reshard.errors import (
    CorruptError,
    IncompleteError,
    UnsupportedError,
    UsageError,
)
from reshard.formats.coded_values import dequantise
from reshard.quantised import decode
from reshard.system.files import Descriptor
from reshard.tensors.lazy import Checkpoint
from tests.quantised.models import (
    FP8,
    MXFP4,
    mxfp4_experts,
    mxfp4_values,
    random_codes,
    random_scales,
    scale_blocks,
    unpack,
    write_model,
)

BLOCK = (128, 128)
E8M0 = torch.float8_e8m0fnu


def exponents(*shape):
    made = torch.Generator().manual_seed(2)
    return torch.randint(100, 140, shape, dtype=torch.uint8, generator=made)


def fused(codes, scales):
    """Return the values of a gate and an up projection whose blocks are counted separately."""
    half, high = codes.shape[-2] // 2, scales.shape[-2] // 2
    parts = [(codes[..., :half, :], scales[..., :high, :])]
    parts += [(codes[..., half:, :], scales[..., high:, :])]
    return torch.cat([scale_blocks(*part, BLOCK) for part in parts], -2)


def case(codes, scales, want, settings=FP8, *, name="a.weight", scale="a.weight_scale_inv"):
    """Return the tensors of a model, what its config states, and the values."""
    return {name: codes, scale: scales}, settings, {name: want}


def in_blocks(codes, scales, block=BLOCK, name="a.weight", **settings):
    want = scale_blocks(codes, scales, block)
    return case(codes, scales, want, FP8 | settings, name=name, scale=f"{name}_scale_inv")


def in_halves(rows, high):
    codes, scales, name = random_codes(2, rows, 130), random_scales(2, high, 2), "e.gate_up_proj"
    return case(codes, scales, fused(codes, scales), name=name, scale=f"{name}_scale_inv")


SMALL, ONE, ROWS = random_codes(5, 7), torch.tensor(0.37), random_scales(5, 1)
WHOLE = {**FP8, "weight_block_size": None}
VLLM = case(SMALL, ONE[None].clone(), SMALL.float() * ONE, WHOLE, scale="a.weight_scale")
EDGES, POWERS = random_codes(130, 129), exponents(2, 2)
WIDE, LINES = random_codes(2, 5, 96), exponents(2, 5, 3)
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
PACKED, EIGHTS = random_codes(6, 32, seed=3).view(torch.int8), exponents(6, 2).view(E8M0)
V4 = {**FP8, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}
NO_ROWS, NO_SCALES = torch.empty(0, 128, dtype=torch.float8_e4m3fn), torch.empty(0, 1)
NAN = torch.tensor([[127, 255, 1, 126]], dtype=torch.uint8).view(torch.float8_e4m3fn)
OF_POWERS = scale_blocks(EDGES, POWERS.view(E8M0), BLOCK)
CASES = {
    "edge blocks": in_blocks(random_codes(200, 300), random_scales(2, 3)),
    "3-D": in_blocks(
        *(random_codes(3, 40, 6), random_scales(3, 3, 1), (16, 8), "a.up"),
        weight_block_size=[16, 8],
    ),
    "fused halves": in_halves(200, 2),
    "fused edges": in_halves(300, 4),
    "per tensor, 0-d": case(SMALL, ONE, SMALL.float() * ONE, WHOLE),
    "vLLM's names": (VLLM[0] | {"a.input_scale": ONE}, *VLLM[1:]),
    "a scale for each row": case(SMALL, ROWS, SMALL.float() * ROWS, WHOLE),
    "e5m2, bf16 scales": in_blocks(
        random_codes(130, 4, dtype=torch.float8_e5m2), random_scales(2, 1).bfloat16()
    ),
    "ue8m0": case(EDGES, POWERS.view(E8M0), OF_POWERS),
    "ue8m0 as bytes": case(EDGES, POWERS, OF_POWERS),
    "MXFP8": case(WIDE, LINES, scale_blocks(WIDE, LINES.view(E8M0), (1, 32)), MXFP8),
    "DeepSeek V4's experts": case(
        *(PACKED, EIGHTS, scale_blocks(unpack(PACKED), EIGHTS, (1, 32)), V4), scale="a.scale"
    ),
    "no rows": case(NO_ROWS, NO_SCALES, torch.empty(0, 128)),
    "NaN codes": case(NAN, torch.full((1, 1), 0.5), NAN.float() * 0.5),
}


def same(got, want):
    """Return whether two tensors are equal bit by bit; a NaN equals any other."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        torch.nan_to_num(got, nan=1.0), torch.nan_to_num(want, nan=1.0)
    )


@pytest.mark.parametrize("name_of_case", CASES)
def test_fp8_weights_have_the_values_of_a_plain_arithmetic(tmp_path, name_of_case):
    tensors, settings, want = CASES[name_of_case]
    norm = torch.randn(5).bfloat16()
    source = write_model(tmp_path / "m", {**tensors, "norm.weight": norm}, settings)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        reshard.merge(source, tmp_path / name, dtype=name)
        got = load_file(tmp_path / name / "model.safetensors")
        assert got.keys() == {"norm.weight", *want}
        assert all(same(got[fqn], value.to(dtype)) for fqn, value in want.items())
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_mxfp4_experts_have_the_values_of_transformers(tmp_path):
    tensors, want = {}, {}
    for name, shape in {"gate_up_proj": (3, 10, 4), "down_proj": (3, 33, 1)}.items():
        blocks, scales = mxfp4_experts(*shape)
        tensors |= {f"e.{name}_blocks": blocks, f"e.{name}_scales": scales}
        want[f"e.{name}"] = mxfp4_values(blocks, scales)
    source = write_model(tmp_path / "m", tensors, MXFP4, files=2)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        reshard.merge(source, tmp_path / name, dtype=name)
        got = load_file(tmp_path / name / "model.safetensors")
        assert got.keys() == want.keys()
        assert all(same(got[fqn], value.to(dtype)) for fqn, value in want.items())


@pytest.fixture
def mixed(tmp_path):
    """Write a model of one fp8 weight with edge blocks, and its scales in another file."""
    codes, scales = random_codes(3, 300, 333), random_scales(3, 3, 3)
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales, "b": torch.randn(3).bfloat16()}
    source = write_model(tmp_path / "m", tensors, FP8, files=2)
    return source, scale_blocks(codes, scales, BLOCK)


def test_any_window_and_any_number_of_workers_write_the_same_bytes(mixed, tmp_path):
    source, want = mixed
    written = set()
    for number, (workers, memory) in enumerate([(1, 256 << 10), (3, 1 << 20), (2, 256 << 20)]):
        out = tmp_path / str(number)
        reshard.merge(source, out, dtype="bf16", workers=workers, max_memory_bytes=memory)
        written.add((out / "model.safetensors").read_bytes())
    assert len(written) == 1
    assert same(load_file(out / "model.safetensors")["a.weight"], want.bfloat16())


def test_windows_of_an_expert_read_its_codes_once(tmp_path, monkeypatch):
    blocks, scales = mxfp4_experts(2, 512, 8)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    source = write_model(tmp_path / "m", tensors, MXFP4)
    read, pread = [], Descriptor.read_into

    def count(self, byte_offset, target):
        read.append(len(target) if self.path.startswith(str(source)) else 0)
        pread(self, byte_offset, target)

    monkeypatch.setattr(Descriptor, "read_into", count)
    settings = {"dtype": "bf16", "workers": 1, "max_memory_bytes": 256 << 10, "verify": False}
    reshard.merge(source, tmp_path / "out", **settings)
    assert sum(read) <= 1.2 * (blocks.nbytes + scales.nbytes)


def values_of(source):
    return Checkpoint(dequantise(formats.read(source))[0])


@pytest.mark.parametrize("kept", [0, 16 << 20])
@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_any_box_can_be_read(mixed, tmp_path, monkeypatch, method, kept):
    monkeypatch.setattr(decode, "_KEPT", kept)
    monkeypatch.setattr(decode, "_BLOCK", 500)
    source, want = mixed
    if method == "mxfp4":
        blocks, scales = mxfp4_experts(3, 37, 4)
        tensors = {"a.weight_blocks": blocks, "a.weight_scales": scales}
        source, want = write_model(tmp_path / "4", tensors, MXFP4), mxfp4_values(blocks, scales)
    draw = random.Random(0)
    with values_of(source) as checkpoint:
        tensor = checkpoint["a.weight"]
        assert tensor.shape == tuple(want.shape)
        for _ in range(60):
            cut = []
            for size in want.shape:
                start = draw.randrange(size)
                cut.append(slice(start, draw.randint(start + 1, size)))
            assert same(tensor[tuple(cut)], want[tuple(cut)].bfloat16()), cut


def test_values_are_served_and_named_in_other_processes(mixed, tmp_path):
    source, _ = mixed
    reshard.merge(source, tmp_path / "out", dtype="bf16")
    with reshard.open_files(source, dtype="bf16") as files:
        assert set(files) == {path.name for path in (tmp_path / "out").iterdir()}
        for path in (tmp_path / "out").iterdir():
            assert files.open(path.name).read() == path.read_bytes()
    manifest = dequantise(formats.read(source))[0]
    again = pickle.loads(pickle.dumps(manifest))
    with Checkpoint(again) as one, Checkpoint(manifest) as other:
        assert same(one["a.weight"][...], other["a.weight"][...])


def test_a_conversion_starts_from_the_values(mixed, tmp_path):
    from tests.support.sample_tensors import same as all_same

    source, want = mixed
    reshard.split(source, tmp_path / "dcp", to="dcp", init_optimizer="none")
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.keys() == {"a.weight", "b"}
        assert all_same(checkpoint["a.weight"][...], want.bfloat16())
    config = json.loads((tmp_path / "dcp" / "config.json").read_text())
    assert "quantization_config" not in config


def test_without_a_dtype_codes_and_scales_are_copied(mixed, tmp_path):
    source, _ = mixed
    for given in ({}, {"dtype": "keep"}):
        out = tmp_path / f"out{len(given)}"
        report = reshard.merge(source, out, **given)
        assert report.trained_in == "bfloat16"
        shards = [load_file(path) for path in sorted(source.glob("*.safetensors"))]
        got = load_file(out / "model.safetensors")
        stored = {name: t for shard in shards for name, t in shard.items()}
        assert got.keys() == stored.keys()
        assert all(
            torch.equal(t.view(torch.uint8), got[n].view(torch.uint8)) for n, t in stored.items()
        )
        assert json.loads((out / "config.json").read_text())["quantization_config"] == FP8
    report = reshard.merge(source, tmp_path / "one.safetensors")
    assert any("codes and scales of fp8" in text for text in report.warnings)


def test_codes_beside_a_config_that_does_not_state_them_are_refused(mixed, tmp_path):
    source, _ = mixed
    other = write_model(tmp_path / "other", {"b": torch.ones(3)}, None)
    with pytest.raises(UsageError, match="does not state the quantisation"):
        reshard.merge(source, tmp_path / "out", hf_dir=other)
    reshard.merge(source, tmp_path / "values", hf_dir=other, dtype="bf16")


def test_weights_in_fp32_that_are_rounded_are_named(tmp_path):
    bias = torch.randn(4)
    tensors = {"a.weight": CODES, "a.weight_scale_inv": random_scales(2, 3), "gate.bias": bias}
    source = write_model(tmp_path / "m", tensors, FP8)
    report = reshard.merge(source, tmp_path / "rounded", dtype="bf16")
    assert any("rounded: gate.bias; --keep-fp32" in text for text in report.warnings)
    report = reshard.merge(source, tmp_path / "kept", dtype="bf16", keep_fp32=["bias"])
    assert not any("rounded" in text for text in report.warnings)
    assert same(load_file(tmp_path / "kept" / "model.safetensors")["gate.bias"], bias)


def test_a_quantised_base_supplies_values(mixed, tmp_path):
    source, want = mixed
    trained = torch.randn(3).bfloat16()
    save_file({"b": trained}, tmp_path / "trained.safetensors")
    out = tmp_path / "out"
    report = reshard.merge(tmp_path / "trained.safetensors", out, fill_missing_from=source)
    got = load_file(out / "model.safetensors")
    assert got.keys() == {"a.weight", "b"}
    assert same(got["a.weight"], want.bfloat16())
    assert torch.equal(got["b"], trained)
    assert "1 weight dequantised from fp8" in " ".join(report.changes)
    assert "quantization_config" not in (out / "config.json").read_text()


def test_plain_weights_do_not_get_the_config_of_a_quantised_model(mixed, tmp_path):
    source, _ = mixed
    save_file({"a.weight": torch.ones(300, 333)}, tmp_path / "trained.safetensors")
    report = reshard.merge(tmp_path / "trained.safetensors", tmp_path / "out", hf_dir=source)
    assert "quantization_config (fp8) left out" in " ".join(report.changes)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


CODES = random_codes(200, 300)


def stored(codes=CODES, scales=None, **settings):
    """Return a model with a weight in blocks of 128 x 128, and what its config states."""
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    return {name: t for name, t in tensors.items() if t is not None}, FP8 | settings


def state(method):
    return {"a.weight": torch.ones(2, dtype=torch.uint8)}, {"quant_method": method}


SCALES = random_scales(2, 3)
BYTES = torch.zeros(1, 2, 3, 8, dtype=torch.uint8)
OF_BITSANDBYTES = {"a.weight": torch.ones(2, dtype=torch.int8)}, {"load_in_8bit": True}
METHODS = ("gptq", "awq", "bitsandbytes", "quanto", "torchao")
WRONG = [
    (*stored(), IncompleteError, "a.weight_scale_inv is missing"),
    (*stored(None, SCALES), IncompleteError, "does not belong to any float8 weight"),
    (*stored(CODES, random_scales(4, 5)), CorruptError, r"128 x 128: expected \(2, 3\)"),
    (*stored(CODES, SCALES, weight_block_size=[128, 0]), CorruptError, "two positive integers"),
    (*stored(CODES, SCALES * torch.nan), CorruptError, "a scale of 'a.weight' is nan"),
    (*stored(CODES, SCALES * torch.inf), CorruptError, "a scale of 'a.weight' is inf"),
    (*stored(CODES, SCALES.double()), UnsupportedError, "float64, which reshard does not support"),
    (*stored(CODES[0].contiguous(), random_scales(1)), UnsupportedError, "not a matrix"),
    ({"a_blocks": mxfp4_experts(1, 2, 3)[0]}, MXFP4, IncompleteError, "'a_scales' is missing"),
    ({"a_blocks": BYTES, "a_scales": BYTES[..., 0].clone()}, MXFP4, CorruptError, "expected uint8"),
    *((*state(name), UnsupportedError, f"quantised with '{name}'") for name in METHODS),
    (*OF_BITSANDBYTES, UnsupportedError, "quantised with 'bitsandbytes'"),
    (stored(CODES, SCALES)[0], None, UnsupportedError, "no config.json with a quantization_config"),
]


@pytest.mark.parametrize(("tensors", "settings", "error", "text"), WRONG)
def test_what_cannot_be_dequantised_is_refused_by_name(tmp_path, tensors, settings, error, text):
    source = write_model(tmp_path / "m", tensors, settings)
    with pytest.raises(error, match=text):
        reshard.merge(source, tmp_path / "merged", dtype="bf16")
    with pytest.raises(error, match=text):
        reshard.split(source, tmp_path / "dcp", to="dcp", init_optimizer="none")
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
def test_a_statement_in_a_file_of_its_own_counts_and_goes_along(tmp_path, name):
    source = write_model(tmp_path / "m", {"a.weight": torch.ones(2, dtype=torch.int8)}, None)
    (source / name).write_text("{}")
    with pytest.raises(UnsupportedError, match="quantised with"):
        reshard.merge(source, tmp_path / "values", dtype="bf16")
    reshard.merge(source, tmp_path / "codes")
    assert (tmp_path / "codes" / name).read_text() == "{}"


def test_float8_weights_without_scales_or_config_are_their_own_values(tmp_path):
    save_file({"a": CODES}, tmp_path / "m.safetensors")
    reshard.split(tmp_path / "m.safetensors", tmp_path / "dcp", to="dcp", init_optimizer="none")
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert torch.equal(checkpoint["a"][...].float(), CODES.float())
