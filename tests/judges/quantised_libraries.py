"""Small releases of compressed-tensors and of NVIDIA's Model Optimizer, with the libraries' values.

    python -m tests.judges.quantised_libraries OUT

Each scheme becomes ``OUT/SCHEME/model``, as the library saves a Llama of one layer, and
``expected.json``: the digests of the weights that the library's own dequantisation gives, by dtype.
Every -0 counts as 0, because Model Optimizer dequantises the code of -0 to 0.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.digests import compute_digest

COMPRESSED = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_BLOCK", "FP8_DYNAMIC"]
COMPRESSED += ["NVFP4", "MXFP4", "MXFP8"]
OPTIMIZER = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_rows": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8_blocks": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}
GROUP = 32  # of integers; Kimi K2 Thinking has it, the presets have 128


def build_model() -> LlamaForCausalLM:
    """Return a model whose matrices do not consist of whole blocks of 128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=8,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def compress(scheme: str, out: Path) -> dict[str, torch.Tensor]:
    """Save a model that compressed-tensors compressed; return the weights that it decompresses."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStrategy,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model, preset = build_model(), preset_name_to_scheme(scheme, ["Linear"])
    if preset.weights.group_size == 128:
        preset.weights.group_size = GROUP
    config = QuantizationConfig(config_groups={"group_0": preset}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        weight, args = module.weight.data.float(), module.quantization_scheme.weights
        rows, columns = weight.shape
        high, wide = {
            QuantizationStrategy.TENSOR: (rows, columns),
            QuantizationStrategy.CHANNEL: (1, columns),
            QuantizationStrategy.BLOCK: args.block_structure,
        }.get(args.strategy) or (1, args.group_size)
        down, across = -(-rows // high), -(-columns // wide)
        padded = torch.nn.functional.pad(
            weight, (0, across * wide - columns, 0, down * high - rows)
        )
        blocks = padded.reshape(down, high, across, wide)
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
        if args.strategy == QuantizationStrategy.TENSOR:
            least, most = least.reshape(1), most.reshape(1)
        overall = None
        if hasattr(module, "weight_global_scale"):
            overall = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            module.weight_global_scale.data = overall
        scale, zero = calculate_qparams(least, most, args, overall)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    compressor.decompress_model(model)
    return {name: value for name, value in model.state_dict().items() if name.endswith("weight")}


def export(config: str, out: Path) -> None:
    """Save a model that Model Optimizer quantised."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    quantised = mtq.quantize(
        build_model(), getattr(mtq, config), lambda model: model(torch.arange(8)[None])
    )
    with torch.inference_mode():
        export_hf_checkpoint(quantised, dtype=torch.bfloat16, export_dir=out)


def dequantise_export(place: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights that Model Optimizer computes from the tensors that it exported."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    tensors = load_file(place / "model.safetensors")

    def dequantise(codes, scale, overall):
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        if scale is None:
            return codes
        if overall is not None:
            described = {"scale": scale, "double_scale": overall, "block_sizes": {-1: 16}}
            return NVFP4QTensor(shape, dtype, codes).dequantize(dtype, **described)
        if codes.dtype == torch.uint8:
            described = {"scale": scale, "block_sizes": {-1: 32}}
            return MXFP4QTensor(shape, dtype, codes).dequantize(dtype, **described)
        if scale.dtype == torch.uint8:
            return MXFP8QTensor(codes.shape, dtype, codes).dequantize(dtype, scale=scale)
        if scale.dim() == 4:
            wide = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
            return codes.float() * wide[: codes.shape[0], : codes.shape[1]]
        return codes.float() * (scale[:, None] if scale.dim() else scale)

    names = [name for name in tensors if name.endswith("weight")]
    return {
        name: dequantise(
            tensors[name], tensors.get(f"{name}_scale"), tensors.get(f"{name}_scale_2")
        ).to(dtype)
        for name in names
    }


def main() -> None:
    """Write all releases."""
    out = Path(sys.argv[1])
    for scheme in [*COMPRESSED, *OPTIMIZER]:
        place = out / scheme / "model"
        shutil.rmtree(place, ignore_errors=True)
        if scheme in COMPRESSED:
            expected = {"bf16": compress(scheme, place)}
        else:
            export(OPTIMIZER[scheme], place)
            kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
            expected = {name: dequantise_export(place, dtype) for name, dtype in kinds.items()}
        digests = {
            dtype: {name: compute_digest(value + 0) for name, value in values.items()}
            for dtype, values in expected.items()
        }
        (place.parent / "expected.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main()
