"""What GPT-NeoX keeps of its settings: the user's YAML files, in ``configs/`` beside the states.

The states themselves say a few sizes alone. Source: GPT-NeoX ea7aefd ``megatron/checkpointing.py``
(``save_ds_checkpoint``), ``megatron/neox_arguments/`` (names, defaults; ``-`` and ``_`` are one),
``megatron/model/transformer.py``, ``megatron/model/activations.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError
from reshard.model_parallel.traits import Traits
from reshard.paths import as_path
from reshard.schema import NUMBER, TEXT, expect, fields, maybe

FOLDER = "configs"
_POSITIONS = {"rotary": "rope"}
_BIASES = ("use_bias_in_attn_linear", "use_bias_in_mlp", "use_bias_in_norms")
_SAID = fields(
    **dict.fromkeys(("rotary_emb_base", "rotary_pct", "layernorm_epsilon"), maybe(NUMBER)),
    **dict.fromkeys(("activation", "pos_emb", "norm"), maybe(TEXT)),
)
_MAX_BYTES = 1 << 17
_MAX_VALUES = 1 << 17


def settings(checkpoint: str) -> dict[str, Any] | None:
    """The settings of a run, of its tag directory; None where they were not saved.

    Raises:
        CorruptError: a file of them is no YAML, or too large for settings.
    """
    found: dict[str, Any] = {}
    for path, data in files(checkpoint).items():
        root = _loaded(path, data.decode(errors="replace"))
        if isinstance(root, dict):
            found |= {str(key).replace("-", "_"): value for key, value in root.items()}
    return found or None


def _loaded(path: Path, text: str) -> Any:
    """The document in a file, whose aliases do not make it grow without end.

    Raises:
        CorruptError: it is no YAML, or they do.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        loader = yaml.SafeLoader(text)  # which looks at every letter
        node = loader.get_single_node()
        if _values(node, {}) > _MAX_VALUES:
            raise CorruptError(path, f"has more than {_MAX_VALUES} values, by its aliases")
        return loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no date, digits without end
        raise CorruptError(path, f"is no YAML: {(str(error).splitlines() or [''])[0]}") from error


def _values(node: Any, counted: dict[int, int]) -> int:
    """How many values a node of YAML stands for; one within itself stands for too many."""
    inside = getattr(node, "value", None)
    if not isinstance(inside, list):
        return 1
    if id(node) not in counted:
        counted[id(node)] = _MAX_VALUES
        parts = (part for item in inside for part in (item if isinstance(item, tuple) else [item]))
        counted[id(node)] = 1 + sum(_values(part, counted) for part in parts)
    return counted[id(node)]


def files(checkpoint: str) -> dict[Path, bytes]:
    """The files of the settings and what they hold.

    Raises:
        CorruptError: one is no file, or too large for settings.
    """
    folder = as_path(checkpoint) / FOLDER
    paths = sorted(folder.glob("*.y*ml")) if folder.is_dir() else []
    found = {}
    for path in paths:
        if not path.is_file():
            raise CorruptError(path, "is no file: GPT-NeoX keeps its settings in files")
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError(path, f"is larger than {_MAX_BYTES} bytes: no settings")
        found[path] = path.read_bytes()
    return found


def has_summed_biases(said: Mapping[str, Any]) -> bool:
    """Whether each tensor-parallel rank adds biases of its own before they are reduced."""
    return bool(said.get("gpt_j_residual"))


def traits(said: Mapping[str, Any], padded_vocab: Any, source: str) -> Traits:
    """The model that such settings make."""
    expect(source, said, _SAID, FOLDER)
    heads, hidden = said.get("num_attention_heads"), said.get("hidden_size")
    known = type(heads) is int and type(hidden) is int and heads > 0
    activation = str(said.get("activation") or "gelu")
    fused = activation == "gelu" and bool(said.get("bias_gelu_fusion"))
    positions = str(said.get("pos_emb") or "learned")
    ffn = said.get("intermediate_size") or (4 * hidden if type(hidden) is int else None)
    return Traits(
        source=source,
        layers=said.get("num_layers"),
        hidden=hidden,
        heads=heads,
        groups=said.get("num_kv_heads") or heads,
        head_dim=hidden // heads if known else None,  # type: ignore[operator]
        ffn=ffn,
        padded_vocab=padded_vocab if type(padded_vocab) is int else None,
        positions=_POSITIONS.get(positions, positions),
        max_positions=said.get("max_position_embeddings"),
        rope_theta=float(said.get("rotary_emb_base") or 10000),
        rotary_percent=float(said.get("rotary_pct") or 1.0),
        window=said.get("sliding_window_width"),
        activation="gelu_pytorch_tanh" if fused else activation,
        norm=str(said.get("norm") or "layernorm"),
        norm_eps=float(said.get("layernorm_epsilon") or 1e-5),
        qk_norm=bool(said.get("use_qk_layernorm")),
        parallel_residual=bool(said.get("gpt_j_residual")),
        tied=not said.get("no_weight_tying"),
        odd=tuple(_odd(said)),
    )


def _odd(said: Mapping[str, Any]) -> list[str]:
    """What GPTNeoXForCausalLM has not."""
    found = {
        "one norm for attention and feed-forward layer (gpt_j_tied)": said.get("gpt_j_tied"),
        "gated linear units (activation)": str(said.get("activation")).endswith("glu"),
        "experts (moe_num_experts)": (said.get("moe_num_experts") or 1) != 1,
        "widths scaled (use_mup)": said.get("use_mup"),
        "layers without biases": any(said.get(name) is False for name in _BIASES),
        "layers of Transformer Engine": any(said.get(name) for name in said if name[:3] == "te_"),
    }
    return [what for what, is_so in found.items() if is_so]
