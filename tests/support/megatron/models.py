"""Build a tiny model of any configuration of transformers, with random values everywhere.

``shrink`` keeps the features of a configuration and makes its sizes small; ``write_sources`` saves
the model by ``save_pretrained``, and once more as a training state. Its moments are functions of
the weights, so that they can be checked against them: ``exp_avg`` is twice the weight, and
``exp_avg_sq`` its square.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.support.megatron import mtp

SEED, SPREAD = 7, 0.08
STEPS = 1  # of Adam
SAMPLES, SEQUENCE = 2, 24
TOKENS = "tokens.pt"
VOCABULARY = 120
_LAYERS, _MOST_LAYERS = 4, 12
_HEADS, _GROUPS = 8, 4
_WINDOW = 6  # shorter than the sequence, so that it has an effect
_POSITIONS, _ORIGINAL_POSITIONS = 64, 16
_EXPERTS = 8
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": _POSITIONS,
    "num_attention_heads": _HEADS,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_embd": 64,
    "n_head": _HEADS,
    "n_positions": _POSITIONS,
    "ssm_state_size": 8,
    "mamba_num_heads": 16,
    "mamba_head_dim": 4,
    "n_groups": 4,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 16,
    "mamba_d_head": 4,
    "mamba_n_groups": 4,
    "mamba_d_state": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_LAYERWISE = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers")
_COUNTS_OF_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Sources:
    """The two forms of a model: ``model`` as published, ``run`` with its optimizer (DCP)."""

    model: Path
    run: Path
    tokens: torch.Tensor
    logits: torch.Tensor
    buffers: frozenset[str] = frozenset()
    mtp: tuple[torch.Tensor, ...] = ()  # logits of the layers of multi-token prediction


def read_config(source: str) -> PreTrainedConfig:
    """Return the configuration of a text, a file, a directory, or a ``model_type``."""
    if source.startswith("{"):
        return AutoConfig.for_model(**json.loads(source))
    path = Path(source)
    if path.exists():
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return AutoConfig.for_model(source)


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a tiny model with the same features."""
    values = config.to_dict()
    layers = _count_layers(values)
    for key, size in _SIZES.items():
        if values.get(key) is not None:
            values[key] = size
    _shrink_heads(config, values)
    values |= {key: layers for key in _COUNTS_OF_LAYERS if key in values}
    for key in _LAYERWISE:
        if values.get(key) is not None:
            row = list(values[key])
            values[key] = [*row, *row[-1:] * (layers - len(row))][:layers]
    if values.get("moe_layers"):  # numbers, not one value a layer
        values["moe_layers"] = sorted({n for n in values["moe_layers"] if n < layers})
    if "moe_layer_end_index" in values:
        values["moe_layer_end_index"] = layers - 1
    _shrink_experts(values)
    values |= {key: _WINDOW for key in _WINDOWS if values.get(key)}
    values |= {key: min(layers, values[key]) for key in ("max_window_layers",) if key in values}
    values |= {key: number for number, key in enumerate(_TOKENS) if key in values}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(key), dict):
            values[key] = _shrink_rope(values[key])
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = _ORIGINAL_POSITIONS
    return type(config).from_dict(values)


def _count_layers(values: dict[str, Any]) -> int:
    """Return an even number of layers that contains a whole period of what differs by layer."""
    periods = [_find_period(list(values[key])) for key in _LAYERWISE if values.get(key)]
    most = max([_LAYERS, *(each for each in periods if each <= _MOST_LAYERS)])
    # Even, because two pipeline stages share the layers.
    return most + most % 2


def _find_period(row: list[Any]) -> int:
    """Return the number of elements after which a list repeats itself."""
    return next(n for n in range(1, len(row) + 1) if row[n:] == row[: len(row) - n])


def _shrink_heads(config: PreTrainedConfig, values: dict[str, Any]) -> None:
    heads, groups = config.num_attention_heads, values.get("num_key_value_heads")
    if groups is not None:
        values["num_key_value_heads"] = {heads: _HEADS, 1: 1}.get(groups, _GROUPS)
    width = values.get("hidden_size", 0) // _HEADS
    if values.get("head_dim") is not None and config.head_dim * heads == config.hidden_size:
        values["head_dim"] = width
    if values.get("qk_rope_head_dim"):  # latent attention: the dims of a head follow from its parts
        values["head_dim"] = values["qk_rope_head_dim"]
        values["qk_head_dim"] = values["qk_rope_head_dim"] + values["qk_nope_head_dim"]


def _shrink_experts(values: dict[str, Any]) -> None:
    values |= {key: _EXPERTS for key in EXPERT_COUNTS if values.get(key)}
    values |= {key: min(3, values[key] or 3) for key in _TOP_K if key in values}
    if (values.get("n_group") or 1) > 1:  # two experts of each chosen group, as DeepSeek V3 has
        values |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    if values.get("first_k_dense_replace"):
        values["first_k_dense_replace"] = 1


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling of rotary positions that has an effect on the first positions, too."""
    rope = {k: _shrink_rope(v) if isinstance(v, dict) else v for k, v in rope.items()}
    # Megatron-core has Llama 3's numbers as constants, so they must stay.
    if "original_max_position_embeddings" in rope and rope.get("rope_type") != "llama3":
        rope["original_max_position_embeddings"] = _ORIGINAL_POSITIONS
    return rope


def write_sources(config: PreTrainedConfig, place: Path) -> Sources:
    """Save a random model of a configuration in both forms, and compute its logits."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *_list_saved_buffers(model)]:
            tensor.add_(torch.randn_like(tensor), alpha=SPREAD)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, SEQUENCE))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits.float()
    model.save_pretrained(place / "model")
    place.mkdir(parents=True, exist_ok=True)
    torch.save(tokens, place / TOKENS)
    more = mtp.build(model, SPREAD)
    named = {} if more is None else mtp.name_as_published(more, config.num_hidden_layers)
    if more is None:
        _save_run(model, place / "run")
    else:
        path = place / "model" / "model.safetensors"
        save_file(load_file(path) | mtp.split_experts(named), path, {"format": "pt"})
        _save_run(_WithMore(model, named), place / "run")
        # reshard needs the config, because transformers' own class lacks these tensors.
        config.save_pretrained(place / "run")
    predicted = [] if more is None else mtp.compute_logits(model, more, tokens)
    held = [*_list_saved_buffers(model), *named.values()]
    held = [tensor for tensor in held if not isinstance(tensor, torch.nn.Parameter)]
    held += [param for param in model.parameters() if not param.requires_grad]
    # Buffers are found by their random values: published names may differ from those in memory.
    published = load_file(place / "model" / "model.safetensors")
    buffers = frozenset(n for n, t in published.items() if any(torch.equal(t, b) for b in held))
    return Sources(place / "model", place / "run", tokens, logits, buffers, tuple(predicted))


class _WithMore(torch.nn.Module):
    """The tensors of a model and further ones, as one module."""

    def __init__(self, model: torch.nn.Module, named: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in (
            *model.named_parameters(),
            *((name, b) for name, b in model.named_buffers() if name in model.state_dict()),
            *named.items(),
        ):
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(last, tensor)
            else:
                module.register_buffer(last, tensor)


def _list_saved_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the floating-point buffers that are saved with the weights."""
    saved = {tensor.data_ptr() for tensor in model.state_dict().values()}
    return [b for b in model.buffers() if b.data_ptr() in saved and b.is_floating_point()]


def _save_run(model: torch.nn.Module, path: Path) -> None:
    """Save a training state of the model: Adam after a step, with moments that can be checked."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    for param in trained:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for weight, state in optimizer.state.items():
        state["exp_avg"].copy_(2 * weight.detach())
        state["exp_avg_sq"].copy_(weight.detach().square())
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"model": weights, "optim": moments}, checkpoint_id=path, no_dist=True)
