"""Megatron numbers optimizer states by the order of its modules: every known name has a place."""

from __future__ import annotations

import re
from itertools import filterfalse

import pytest

from reshard.formats.megatron import parameter_order
from reshard.layouts.model_parallel.rules import load_whole_table

NAMES = {
    pattern.text
    for rule in load_whole_table("megatron").rules
    for dialect in ("local", "te")
    for pattern in rule.get_patterns(dialect)
}


def name_first(pattern: str, last: str = "weight") -> str:
    """Return the name of a parameter of the first layer and of the first expert."""
    return re.sub(r"\{.*?\}", "0", pattern.replace("{p}", last))


def test_every_name_of_a_table_has_a_place():
    assert len(NAMES) > 50
    assert sorted(filterfalse(parameter_order.has_place, map(name_first, NAMES))) == []


@pytest.mark.parametrize("pattern", sorted(name for name in NAMES if "{p}" in name))
def test_a_bias_is_behind_its_weight(pattern):
    """As ``named_parameters`` lists them; torch_dist may list either first."""
    weight, bias = (
        parameter_order.sort_key(name_first(pattern, last)) for last in ("weight", "bias")
    )
    assert weight < bias


def test_a_module_that_megatron_lacks_has_none():
    assert not parameter_order.has_place("decoder.layers.0.self_attention.gate.weight")
    assert not parameter_order.has_place("mtp.layers.0.other.weight")
    assert parameter_order.has_place("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight")
    assert parameter_order.has_place("output_layer.weight")


def test_towers_keep_the_order_of_their_file_behind_the_language_model():
    """Of a LLaVAModel of Megatron-core 0.16.1, which has layers in both models."""
    names = [
        "language_model.embedding.word_embeddings.weight",
        "language_model.decoder.layers.0.input_layernorm.weight",
        "language_model.decoder.final_layernorm.weight",
        "language_model.output_layer.weight",
        "vision_model.class_token",
        "vision_model.conv1.weight",
        "vision_model.conv1.bias",
        "vision_model.position_embeddings.weight",
        "vision_model.decoder.layers.0.input_layernorm.weight",
        "vision_projection.encoder.linear_fc1.weight",
    ]
    assert parameter_order.find_misplaced(names) is None
    assert parameter_order.find_misplaced(reversed(names)) == names[-1]
