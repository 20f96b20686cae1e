"""``merge --quantise-like``: codes and scales of releases, and of other values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard import formats
from reshard.commands.merge.quantising import Release
from reshard.errors import CorruptError, UnsupportedError, UsageError
from reshard.quantised import tiles
from reshard.quantised.tiles import KeptScales, Matrix, quantise
from reshard.tensors.lazy import Checkpoint
from tests.quantised.models import (
    FP8,
    MXFP4,
    list_differing,
    mxfp4_experts,
    random_codes,
    random_scales,
    read_tensors,
    scale_blocks,
    unpack,
    write_model,
)
from tests.quantised.test_decode import CASES

WHOLE = ("per tensor, 0-d", "vLLM's names")
UE8M0 = torch.float8_e8m0fnu
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


def round_trip(source, place, dtype):
    """Dequantise a release and quantise the values like it."""
    place.mkdir()
    reshard.merge(source, place / "values", dtype=dtype)
    reshard.merge(place / "values", place / "codes", quantise_like=source)
    return read_tensors(place / "codes")


@pytest.mark.parametrize("case", [case for case in CASES if case not in WHOLE])
def test_values_of_a_release_get_its_bytes(tmp_path, case):
    """Whatever the codes and scales: zeros, scales of blocks that use small codes only."""
    tensors, settings, _ = CASES[case]
    stored = {**tensors, "bias": torch.arange(5.0), "norm.weight": torch.randn(5).bfloat16()}
    source = write_model(tmp_path / "m", stored, settings)
    for dtype in ("fp32", "bf16"):
        assert list_differing(round_trip(source, tmp_path / dtype, dtype), stored) == []
    reshard.merge(source, tmp_path / "direct", quantise_like=source)
    assert list_differing(read_tensors(tmp_path / "direct"), stored) == []
    assert json.loads((tmp_path / "direct" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def experts(seed):
    """Return experts of GPT-OSS with a code of 6 or 4 in each group, as a quantiser writes them."""
    blocks, scales = mxfp4_experts(3, 300, 4, seed)
    blocks[..., 0] = 0x17 if seed else 0xE1
    return {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}


def test_mxfp4_experts_of_a_release_get_its_bytes(tmp_path):
    blocks, scales = mxfp4_experts(3, 300, 4)
    blocks[0, :40] &= 0x99  # groups without codes above 0.5, and of zeros
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    source = write_model(tmp_path / "m", stored, MXFP4, files=2)
    for dtype in ("fp32", "bf16"):
        assert list_differing(round_trip(source, tmp_path / dtype, dtype), stored) == []


def test_mxfp4_codes_follow_from_the_values(tmp_path):
    """The release has other values: its bytes cannot be copied."""
    stored = experts(1)
    source = write_model(tmp_path / "m", stored, MXFP4)
    other = write_model(tmp_path / "other", experts(0), MXFP4)
    for dtype in ("fp32", "bf16"):
        reshard.merge(source, tmp_path / dtype, dtype=dtype)
        reshard.merge(tmp_path / dtype, tmp_path / f"{dtype}q", quantise_like=other)
        assert list_differing(read_tensors(tmp_path / f"{dtype}q"), stored) == []


def with_largest(codes, block):
    """Return codes with 448 in each block."""
    high, wide = block
    codes.view(torch.uint8)[..., ::high, ::wide] = 126
    return codes


def test_float32_scales_follow_from_float32_values(tmp_path):
    """Also where 448 times the scale is rounded, so that a division by 448 gives its neighbour."""
    block = (16, 8)
    settings = {**FP8, "weight_block_size": [*block]}
    codes, scales = with_largest(random_codes(3, 400, 301), block), random_scales(3, 25, 38)
    largest = (scales * 448) / 448
    assert 0 < (largest != scales).sum() < scales.numel() / 4
    stored = {"a.weight": codes, "a.weight_scale_inv": scales}
    source = write_model(tmp_path / "m", stored, settings)
    other = {"a.weight": random_codes(3, 400, 301, seed=5), "a.weight_scale_inv": scales + 1}
    write_model(tmp_path / "other", other, settings)
    reshard.merge(source, tmp_path / "values", dtype="fp32")
    reshard.merge(tmp_path / "values", tmp_path / "codes", quantise_like=tmp_path / "other")
    assert list_differing(read_tensors(tmp_path / "codes"), stored) == []


def plain(values, block, scale):
    """Return codes and scales by torch, block by block."""
    high, wide = block
    rows, columns = values.shape
    grid = torch.empty(-(-rows // high), -(-columns // wide))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            grid[i, j] = scale(values[i * high :, j * wide :][:high, :wide].abs().max())
    spread = grid.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    return (values / spread).to(torch.float8_e4m3fn), grid


def power(amax):
    return torch.pow(2.0, torch.ceil(torch.log2(amax / 448)))


@pytest.mark.parametrize("scales", [torch.float32, UE8M0, torch.bfloat16])
def test_other_values_are_quantised_as_deepseek_does(tmp_path, scales):
    """``amax / 448``, or the next power of two; torch rounds the codes."""
    block, shape = (128, 128), (200, 300)
    torch.manual_seed(1)
    values = torch.randn(shape) * torch.logspace(-9, 1, 300)
    values[:128, :128] = 0
    values[150, 200] = -0.0

    def scale(amax):
        if not amax:
            return 1.0
        return power(amax) if scales == UE8M0 else (amax / 448).to(scales).float()

    codes, grid = plain(values, block, scale)
    release = {"a.weight": random_codes(*shape), "a.weight_scale_inv": grid.to(scales)}
    source = write_model(tmp_path / "m", release, FP8)
    write_model(tmp_path / "run", {"a.weight": values}, None)
    report = reshard.merge(tmp_path / "run", tmp_path / "out", quantise_like=source)
    want = {"a.weight": codes, "a.weight_scale_inv": grid.to(scales)}
    assert list_differing(read_tensors(tmp_path / "out"), want) == []
    assert any("1 weight quantised to fp8" in text for text in report.changes)


def test_other_values_are_quantised_as_triton_kernels_does(tmp_path):
    """The next power of two of ``amax / 6``; the nearest code, and the even one of two."""
    torch.manual_seed(2)
    values = torch.randn(2, 96, 70) * torch.logspace(-9, 4, 70)
    values[0, :, 3] = torch.linspace(-6, 6, 96)  # many are halfway between two codes
    groups = values.transpose(1, 2).reshape(2, 70, 3, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1).double() / 6))
    scaled = groups.double() / torch.pow(2.0, exponents)[..., None]
    far = (scaled.abs()[..., None] - E2M1).abs()
    even = torch.arange(8) % 2 == 0
    nearest = (far * 4 + ~even * 1e-9).argmin(-1) | (scaled.signbit() * 8)
    blocks = (nearest[..., 0::2] | nearest[..., 1::2] << 4).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8)
    release, _ = mxfp4_experts(2, 70, 3)
    stored = {"e.down_proj_blocks": release, "e.down_proj_scales": scales}
    source = write_model(tmp_path / "m", stored, MXFP4)
    write_model(tmp_path / "run", {"e.down_proj": values}, None)
    reshard.merge(tmp_path / "run", tmp_path / "out", quantise_like=source)
    want = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    assert list_differing(read_tensors(tmp_path / "out"), want) == []


@pytest.fixture
def trained(tmp_path):
    """Write a run in which some blocks of a release have changed, and the release."""
    codes, scales = random_codes(300, 700), random_scales(3, 6)
    stored = {"a.weight": codes, "a.weight_scale_inv": scales, "b": torch.arange(7.0)}
    source = write_model(tmp_path / "m", stored, FP8)
    values = scale_blocks(codes, scales, (128, 128))
    values[140, 5] += 1
    values[299, 699] += 5
    save_file({"a.weight": values, "b": stored["b"]}, tmp_path / "run.safetensors")
    return tmp_path / "run.safetensors", source, stored


def test_only_blocks_that_changed_are_quantised_anew(trained, tmp_path):
    run, source, stored = trained
    reshard.merge(run, tmp_path / "out", quantise_like=source)
    got = read_tensors(tmp_path / "out")
    changed = got["a.weight_scale_inv"] != stored["a.weight_scale_inv"]
    assert changed.nonzero().tolist() == [[1, 0], [2, 5]]
    same = got["a.weight"].view(torch.uint8) == stored["a.weight"].view(torch.uint8)
    same[128:256, :128] = True
    same[256:, 640:] = True
    assert same.all()


def test_any_window_and_any_number_of_workers_write_the_same_bytes(trained, tmp_path):
    run, source, _ = trained
    written = set()
    for number, (workers, memory) in enumerate([(1, 256 << 10), (3, 1 << 20), (2, 256 << 20)]):
        out = tmp_path / str(number)
        options = {"workers": workers, "max_memory_bytes": memory}
        reshard.merge(run, out, quantise_like=source, **options)
        written.add((out / "model.safetensors").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tiles_and_bands_of_any_size_have_the_same_bytes(trained, tmp_path, monkeypatch, dtype):
    run, source, _ = trained
    reshard.merge(run, tmp_path / "values.safetensors", dtype=dtype)
    for number, (tile, band) in enumerate([(1 << 20, 2 << 20), (1, 1), (256 * 700, 1)]):
        monkeypatch.setattr(tiles, "_TILE", tile)
        monkeypatch.setattr(tiles, "_BAND_NBYTES", band)
        reshard.merge(tmp_path / "values.safetensors", tmp_path / str(number), quantise_like=source)
    written = [(tmp_path / str(n) / "model.safetensors").read_bytes() for n in range(3)]
    assert written[0] == written[1] == written[2]


def test_scales_come_after_codes_so_that_values_are_read_once(tmp_path, monkeypatch):
    """A file has fp32 scales before codes."""
    stored = {}
    for seed, name in enumerate("abc"):
        codes, scales = random_codes(300, 700, seed=seed), random_scales(3, 6)
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}
    source = write_model(tmp_path / "m", stored, FP8)
    torch.manual_seed(3)
    values = {f"{name}.weight": torch.randn(300, 700).bfloat16() for name in "abc"}
    save_file(values, tmp_path / "run.safetensors")
    computed = []
    original = Matrix._compute_tile

    def noted(self, codes, *rest):
        computed.append((self.values.fqn, codes is not None))
        return original(self, codes, *rest)

    monkeypatch.setattr(Matrix, "_compute_tile", noted)
    reshard.merge(tmp_path / "run.safetensors", tmp_path / "o", quantise_like=source, workers=1)
    assert sorted(computed) == [(f"{name}.weight", True) for name in "abc"]


def test_scales_follow_codes_before_their_memory_is_needed(tmp_path, monkeypatch):
    """Scales are kept for the experts of two weights, however many weights a file has."""
    blocks, scales = mxfp4_experts(2, 64, 4)
    stored = {}
    for name in "abcdef":
        stored[f"{name}_proj_blocks"] = blocks.clone()
        stored[f"{name}_proj_scales"] = scales.clone()
    source = write_model(tmp_path / "m", stored, MXFP4)
    reshard.merge(source, tmp_path / "values", dtype="bf16")
    tensors = load_file(tmp_path / "values" / "model.safetensors")
    save_file({name: t * 3 for name, t in tensors.items()}, tmp_path / "run.safetensors")
    computed = []
    original = Matrix._compute_tile

    def noted(self, codes, *rest):
        computed.append(codes is not None)
        return original(self, codes, *rest)

    monkeypatch.setattr(Matrix, "_compute_tile", noted)
    monkeypatch.setattr(tiles, "_KEPT_BYTES", 4 * (64 * 4 + 64 * 4 // 8))
    reshard.merge(tmp_path / "run.safetensors", tmp_path / "o", quantise_like=source, workers=1)
    assert computed == [True] * 12


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_codes_and_scales_can_be_read_in_any_order(trained, tmp_path, method):
    """Some blocks have the values of the release, and others have not."""
    run, source, _ = trained
    if method == "mxfp4":
        source = write_model(tmp_path / "4", experts(1), MXFP4)
        reshard.merge(source, tmp_path / "values", dtype="bf16")
        tensors = load_file(tmp_path / "values" / "model.safetensors")
        for tensor in tensors.values():
            tensor[1, 5, 7] += 1
            tensor[2, 9] *= 3
        run = tmp_path / "other.safetensors"
        save_file(tensors, run)
    manifest, release = formats.read(run), Release.open(source, [])
    values = {entry.fqn: entry for entry in manifest.entries.values()}
    found = []
    for order in (1, -1):
        kept = KeptScales()
        parts = [
            part for n, pair in release.pairs.items() for part in quantise(values[n], pair, kept)
        ]
        files = {**manifest.files, **release.manifest.files}
        entries = {part.key: part for part in parts}
        with Checkpoint(replace(manifest, entries=entries, files=files)) as checkpoint:
            found.append({part.fqn: checkpoint[part.fqn][...] for part in parts[::order]})
    assert list_differing(*found) == []


def test_windows_of_an_expert_read_its_values_once(tmp_path, monkeypatch):
    """A window has at least a whole tile, so no tile is computed by two workers."""
    blocks, scales = mxfp4_experts(2, 700, 16)
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    source = write_model(tmp_path / "m", stored, MXFP4)
    reshard.merge(source, tmp_path / "values", dtype="bf16")
    computed = []
    original = Matrix._compute_tile

    def counted(self, codes, first, *rest):
        if codes is not None:  # a worker can need scales before another one has computed the codes
            computed.append((self.number, first))
        return original(self, codes, first, *rest)

    monkeypatch.setattr(Matrix, "_compute_tile", counted)
    options = {"workers": 3, "max_memory_bytes": 768 << 10}  # 128 KiB a window, 175 an expert
    reshard.merge(tmp_path / "values", tmp_path / "codes", quantise_like=source, **options)
    assert sorted(computed) == [(0, 0), (1, 0)]
    assert list_differing(read_tensors(tmp_path / "codes"), stored) == []


def test_a_release_of_another_model_is_refused(trained, tmp_path):
    run, source, stored = trained
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="writes a directory"):
        reshard.merge(run, tmp_path / "out.safetensors", quantise_like=source)
    write_model(tmp_path / "plain", {"a.weight": torch.zeros(300, 700)}, None)
    with pytest.raises(UsageError, match="is not a quantised model"):
        reshard.merge(run, out, quantise_like=tmp_path / "plain")
    wide = {**stored, "a.weight": random_codes(300, 701)}
    write_model(tmp_path / "wide", wide, FP8)
    with pytest.raises(UsageError, match=r"\(300, 701\), but in the merged model"):
        reshard.merge(run, out, quantise_like=tmp_path / "wide")
    named = {name.replace("a.", "c."): value for name, value in stored.items()}
    write_model(tmp_path / "named", named, FP8)
    with pytest.raises(UsageError, match=r"it quantises c\.weight"):
        reshard.merge(run, out, quantise_like=tmp_path / "named")
    with pytest.raises(UsageError, match="writes the names of the release"):
        reshard.merge(run, out, quantise_like=source, names="module")
    assert not out.exists()


@pytest.mark.parametrize("case", WHOLE)
def test_scales_that_blocks_do_not_have_are_refused(tmp_path, case):
    tensors, settings, want = CASES[case]
    source = write_model(tmp_path / "m", tensors, settings)
    write_model(tmp_path / "run", want, None)
    with pytest.raises(UnsupportedError, match=r"one scale for a whole tensor|of activations"):
        reshard.merge(tmp_path / "run", tmp_path / "out", quantise_like=source)


def test_weights_that_only_one_side_has_are_named(trained, tmp_path):
    _, source, stored = trained
    more = {f"mtp.{name}": value.clone() for name, value in stored.items()}
    write_model(tmp_path / "more", {**stored, **more}, FP8)
    reshard.merge(source, tmp_path / "run", dtype="bf16")
    report = reshard.merge(tmp_path / "run", tmp_path / "out", quantise_like=tmp_path / "more")
    assert "only the release has mtp.a.weight, mtp.b: not in the output" in report.warnings
    assert list_differing(read_tensors(tmp_path / "out"), stored) == []


def test_values_without_a_scale_are_refused(trained, tmp_path):
    run, source, _ = trained
    values = load_file(run)
    values["a.weight"][7, 7] = torch.nan
    save_file(values, run)
    with pytest.raises(CorruptError, match="infinite values or NaN"):
        reshard.merge(run, tmp_path / "out", quantise_like=source)
    assert not (tmp_path / "out").exists()


def test_packed_experts_follow_from_the_values(tmp_path):
    """DeepSeek V4: two codes of e2m1 in an int8, 32 neighbours of a row share a power of two."""
    packed = random_codes(6, 32, seed=3).view(torch.uint8)
    packed[:, ::16] = 0x17
    powers = torch.randint(100, 140, (6, 2), dtype=torch.uint8).view(UE8M0)
    settings = {**FP8, "expert_dtype": "fp4", "scale_fmt": "ue8m0"}
    stored = {"a.weight": packed.view(torch.int8), "a.scale": powers}
    write_model(
        tmp_path / "m", {**stored, "a.weight": random_codes(6, 32).view(torch.int8)}, settings
    )
    values = scale_blocks(unpack(packed), powers, (1, 32))
    write_model(tmp_path / "run", {"a.weight": values}, None)
    reshard.merge(tmp_path / "run", tmp_path / "out", quantise_like=tmp_path / "m")
    assert list_differing(read_tensors(tmp_path / "out"), stored) == []
