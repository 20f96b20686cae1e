"""The model of a nanotron run, as ``model_config.json`` and the tensors state it.

Source: nanotron at 2411b02 ``config/models_config.py``, ``models/{llama,qwen}.py``.
"""

from __future__ import annotations

from reshard.core.manifest import PARAM, Manifest
from reshard.layouts.model_parallel.traits import Traits
from reshard_nanotron import layout
from reshard_nanotron.directory import MODEL_CONFIG

FLAGS = {"llama": "is_llama_config", "qwen2": "is_qwen2_config"}
"""Family -> the key of ``model_config.json`` that states it."""
_EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
_QKV_BIAS = "model.decoder.0.pp_block.attn.qkv_proj.bias"
_UNSUPPORTED = {  # settings of models that transformers does not have
    "rope_interleaved": "rotations of neighbouring elements (rope_interleaved)",
    "rope_scaling": "scaled rotary positions (rope_scaling)",
    "moe_config": "experts (moe_config)",
    "no_rope_layer": "layers without rotary positions (no_rope_layer)",
    "sliding_window_size": "a sliding window (sliding_window_size)",
}


def find_traits(manifest: Manifest) -> Traits | None:
    """Return the traits of a Llama or Qwen2; None for another model, or if no file states it."""
    facts = manifest.train.opaque.get(layout.KEY)
    config = facts.config if facts is not None else None
    embedding = manifest.entries.get((PARAM, _EMBEDDING))
    if not config or embedding is None or not any(config.get(flag) for flag in FLAGS.values()):
        return None
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return Traits(
        source=f"{manifest.origin.path}/{MODEL_CONFIG}",
        layers=config.get("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=hidden // heads if hidden and heads else None,
        ffn=config.get("intermediate_size"),
        vocab=embedding.shape[0],
        positions="rope",
        max_positions=config.get("max_position_embeddings"),
        rope_theta=float(config.get("rope_theta") or 10000.0),
        activation=config.get("hidden_act"),
        gated=True,
        norm="rmsnorm",
        norm_eps=config.get("rms_norm_eps"),
        linear_bias=False,
        qkv_bias=(PARAM, _QKV_BIAS) in manifest.entries,
        tied=bool(config.get("tie_word_embeddings")),
        unsupported=tuple(text for key, text in _UNSUPPORTED.items() if config.get(key)),
    )
