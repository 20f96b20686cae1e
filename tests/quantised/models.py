"""Small quantised models on disk, and their values by a second, plain arithmetic in torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "fmt": "e4m3",
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write_model(place: Path, tensors, settings, *, files=1) -> Path:
    """Write a directory; scales go to the last file."""
    place.mkdir(parents=True)
    config = {"architectures": ["Net"], "dtype": "bfloat16"}
    if settings is not None:
        config["quantization_config"] = settings
    (place / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        return place
    is_scale = {name: name.endswith(("_scale_inv", "_scales")) for name in tensors}
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for number, file in enumerate(names):
        part = {name: t for name, t in tensors.items() if is_scale[name] == bool(number)}
        save_file(part, place / file, {"format": "pt"})
    index = {name: names[late] for name, late in is_scale.items()}
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return place


def random_codes(*shape, dtype=torch.float8_e4m3fn, seed=0) -> torch.Tensor:
    """Return random finite codes, subnormal ones and both zeros included."""
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
    codes[~codes.view(dtype).float().isfinite()] = 0
    return codes.view(dtype)


def random_scales(*shape) -> torch.Tensor:
    """Return random scales whose bits are all used."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 3e-3 + 1e-5


def scale_blocks(codes, scales, block) -> torch.Tensor:
    """Return codes times the scales of their blocks, the last of which may be smaller."""
    rows, columns = codes.shape[-2:]
    wide = scales.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return codes.float() * wide[..., :rows, :columns].float()


def unpack(packed) -> torch.Tensor:
    """Return the e2m1 values of bytes, two in a byte."""
    packed = packed.view(torch.uint8).int()
    return torch.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], -1).flatten(-2)


def mxfp4_experts(experts, rows, groups, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks and scales of GPT-OSS."""
    made = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(90, 140, (experts, rows, groups), dtype=torch.uint8, generator=made)
    return blocks, scales


def mxfp4_values(blocks, scales) -> torch.Tensor:
    """Return what transformers makes of them, as float32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a directory."""
    files = (load_file(path) for path in sorted(directory.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}


def list_differing(got, want) -> list[str]:
    """Return the names of tensors whose dtype, shape or bits differ."""
    assert got.keys() == want.keys()
    return [name for name, tensor in want.items() if not _is_same(got[name], tensor)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(a, b)
