"""Find the keys of a transformers config that change a model and that a family does not implement.

Weights under another framework's names compute the same only if every setting that transformers
uses is known on the other side. A family's table lists the keys that it implements (``config``) and
the neutral values of others (``neutral``); this module lists what holds for every family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ANY = "any"  # no value of the key changes what the family computes
EACH = "each"  # a list, each of whose elements is one of these

# Generation settings were part of a config before transformers had generation_config.json
# (transformers 4.57, configuration_utils.PreTrainedConfig._get_global_generation_defaults).
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores prefix remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_TOKENS = """
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id tokenizer_class
    unk_token_id
"""
# Dropout and the losses of a router act in training alone; summary_* and labels shape the heads of
# classifiers, which none of the tables has.
_TRAINING = """
    attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop classifier_dropout
    embd_dropout embd_pdrop gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    initializer_range label2id num_labels output_router_logits problem_type resid_dropout
    resid_pdrop residual_dropout router_jitter_noise summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params finetuning_task
"""
# How transformers runs the model: what is returned, kernels, precision of intermediate results.
# pretraining_tp and slow_but_exact sum the same products in another order.
_RUNNING = """
    attn_implementation chunk_size_feed_forward dtype experts_implementation output_attentions
    output_hidden_states pretraining_tp reorder_and_upcast_attn return_dict slow_but_exact
    tf_legacy_loss torch_dtype torchscript transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache use_return_dict
"""
IRRELEVANT = frozenset(f"{_GENERATION}{_TOKENS}{_TRAINING}{_RUNNING}".split())

# Settings of other models' classes, at the value at which they change nothing.
NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": [False],
    "attn_logit_softcapping": [],
    "embedding_multiplier": [1],
    "final_logit_softcapping": [],
    "is_decoder": [False, True],
    "is_encoder_decoder": [False],
    "layer_types": {EACH: ["full_attention"]},
    "logit_scale": [1],
    "logits_scaling": [1],
    "no_rope_layers": {EACH: [1]},  # SmolLM3: 1 is a layer with rotary positions
    "no_rope_layer_interval": ANY,  # its only use is to compute no_rope_layers
    "partial_rotary_factor": [1],
    "pruned_heads": [{}],
    "residual_multiplier": [1],
    "tie_encoder_decoder": [False],
    "use_mrope": [False],
    "use_qk_norm": [False],
    "use_sliding_window": [False],
}


def find_changing_keys(
    config: Mapping[str, Any],
    implemented: Mapping[str, Any],
    neutral: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> Iterator[str]:
    """Yield each key that may change what the model computes, with its value.

    Args:
        implemented: the keys that the family implements.
        neutral: the family's own neutral values, by key.
        defaults: the defaults of the family's class in transformers, which the family implements.
    """
    missing = object()  # None is a value that a default may have
    allowed = {**NEUTRAL, **neutral}
    for key, value in config.items():
        if key in implemented or key in IRRELEVANT or key.startswith("_") or value is None:
            continue
        if defaults.get(key, missing) != value and not _is_neutral(value, allowed.get(key, [])):
            yield f"{key} is {value!r}"


def _is_neutral(value: Any, allowed: Any) -> bool:
    """Return whether a value is one of those that change nothing in a family."""
    if allowed == ANY:
        return True
    if isinstance(allowed, Mapping):
        return isinstance(value, list) and all(each in allowed[EACH] for each in value)
    return value in allowed
