"""Read GPT-NeoX's settings: the user's YAML files, in ``configs/`` beside the states.

The states themselves hold only a few sizes. Source: GPT-NeoX ea7aefd ``megatron/checkpointing.py``
(``save_ds_checkpoint``), ``megatron/neox_arguments/`` (names, defaults; ``-`` and ``_`` are one),
``megatron/model/transformer.py``, ``megatron/model/activations.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.containers.yaml_files import parse_yaml
from reshard.core.schema import NUMBER, TEXT, expect, fields, maybe
from reshard.errors import CorruptError
from reshard.layouts.model_parallel.traits import Traits
from reshard.system.paths import as_path

FOLDER = "configs"
_POSITIONS = {"rotary": "rope"}
_BIASES = ("use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms")
_WHOLE_ATTENTION = {"global", "flash"}  # two implementations of the same
_KINDS = fields(
    **dict.fromkeys(("rotary_emb_base", "rotary_pct", "layernorm_epsilon"), maybe(NUMBER)),
    **dict.fromkeys(("activation", "pos_emb", "norm"), maybe(TEXT)),
)
_MAX_BYTES = 1 << 17


def read_settings(checkpoint: str) -> dict[str, Any] | None:
    """Read the settings beside a tag directory; return None if they were not saved."""
    settings: dict[str, Any] = {}
    for path, data in read_files(checkpoint).items():
        root = parse_yaml(path, data.decode(errors="replace"))
        if isinstance(root, dict):
            settings |= {str(key).replace("-", "_"): value for key, value in root.items()}
    return settings or None


def read_files(checkpoint: str) -> dict[Path, bytes]:
    """Read the files of the settings: path -> content.

    Raises:
        CorruptError: one is not a plain file, or too large for settings.
    """
    folder = as_path(checkpoint) / FOLDER
    paths = sorted(folder.glob("*.y*ml")) if folder.is_dir() else []
    contents = {}
    for path in paths:
        if not path.is_file():
            raise CorruptError(
                path, "is not a regular file, which is how GPT-NeoX saves its settings"
            )
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError(path, f"has more than {_MAX_BYTES} bytes, too many for settings")
        contents[path] = path.read_bytes()
    return contents


def choose_table(checkpoint: str) -> tuple[str, list[str]]:
    """Return the table of how tensor-parallel ranks share the model, and notes.

    With ``gpt_j_residual``, each rank adds its own bias before the outputs are reduced.
    """
    settings = read_settings(checkpoint)
    note = (
        "no file states whether GPT-NeoX ran with gpt_j_residual, in which row-parallel"
        " layers have biases that add up. reshard treats them as copies; copy the run's"
        " configs/ beside the states, or declare the biases as summed with --rules"
    )
    if settings is None:
        return "megatron", [note]
    return "neox_parallel" if settings.get("gpt_j_residual") else "megatron", []


def read_traits(settings: Mapping[str, Any], padded_vocab: Any, source: str) -> Traits:
    """Return the traits of the model that these settings describe."""
    expect(source, settings, _KINDS, FOLDER)
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    known = type(heads) is int and type(hidden) is int and heads > 0
    activation = str(settings.get("activation") or "gelu")
    # The fused kernel computes the tanh approximation of GELU, the plain one the exact function.
    fused = activation == "gelu" and bool(settings.get("bias_gelu_fusion"))
    positions = str(settings.get("pos_emb") or "learned")
    ffn = settings.get("intermediate_size") or (4 * hidden if type(hidden) is int else None)
    return Traits(
        source=source,
        layers=settings.get("num_layers"),
        hidden=hidden,
        heads=heads,
        groups=settings.get("num_kv_heads") or heads,
        head_dim=hidden // heads if known else None,  # type: ignore[operator]
        ffn=ffn,
        padded_vocab=padded_vocab if type(padded_vocab) is int else None,
        positions=_POSITIONS.get(positions, positions),
        max_positions=settings.get("max_position_embeddings"),
        rope_theta=float(settings.get("rotary_emb_base") or 10000),
        rotary_percent=float(settings.get("rotary_pct") or 1.0),
        window=settings.get("sliding_window_width"),
        activation="gelu_pytorch_tanh" if fused else activation,
        norm=str(settings.get("norm") or "layernorm"),
        norm_eps=float(settings.get("layernorm_epsilon") or 1e-5),
        qk_norm=bool(settings.get("use_qk_layernorm")),
        parallel_residual=bool(settings.get("gpt_j_residual")),
        tied=not settings.get("no_weight_tying"),
        unsupported=tuple(_find_unsupported(settings)),
    )


def _find_unsupported(settings: Mapping[str, Any]) -> list[str]:
    features = {
        "one norm for attention and feed-forward layer (gpt_j_tied)": settings.get("gpt_j_tied"),
        "gated linear units (activation)": str(settings.get("activation")).endswith("glu"),
        "sparse attention (attention_config)": bool(
            _list_attention(settings.get("attention_config")) - _WHOLE_ATTENTION
        ),
        "experts (moe_num_experts)": (settings.get("moe_num_experts") or 1) != 1,
        "scaled widths (use_mup)": settings.get("use_mup"),
        "layers without biases": any(settings.get(name) is False for name in _BIASES),
        "layers of Transformer Engine": any(
            settings.get(name) for name in settings if name[:3] == "te_"
        ),
    }
    return [feature for feature, is_used in features.items() if is_used]


def _list_attention(value: Any) -> set[str]:
    """Return the kinds of attention, as ``[[["local", "global"], "all"]]`` states them."""
    if isinstance(value, list):
        return set[str]().union(*map(_list_attention, value))
    return {value} - {"all"} if isinstance(value, str) else set()
