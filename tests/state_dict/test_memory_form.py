"""Weights of PEFT's own file under the names of the model that was trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.core.dtypes import FLOAT32
from reshard.model import ModelShapes
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.memory_form import restore_adapter_form

LAYERS = [f"base_model.model.layers.{layer}.{name}" for layer in (2, 10) for name in "kvq"]
BASE = [f"layers.{layer}.{name}.weight" for layer in (2, 10) for name in "kvq"]  # as OPT has them


def make_state(*names):
    return {fqn: GlobalTensor(FLOAT32, (2, 4), ()) for fqn in sorted(names)}


def make_model(*names):
    return ModelShapes("model", dict.fromkeys(names, (2, 4)), {"mask": (3,)}, {})


SAVED = make_state(*(f"{layer}.lora_{part}.weight" for layer in LAYERS for part in "AB"))
TRAINED = [f"{layer}.lora_{part}.default.weight" for layer in LAYERS for part in "AB"]


@pytest.mark.parametrize("names", [BASE, [*TRAINED, "base_model.model.norm.weight"]])
def test_the_names_and_their_order_are_those_of_the_model(names):
    state, model = restore_adapter_form(SAVED, make_model(*names))
    assert list(model.parameters) == list(state) == TRAINED
    assert not model.buffers
    for fqn, tensor in state.items():
        assert tensor is SAVED[fqn.replace(".default", "")]


def test_a_module_that_is_saved_whole_has_its_own_name_in_the_model():
    saved = SAVED | make_state("base_model.model.head.weight")
    head = "base_model.model.head.modules_to_save.default.weight"
    state, model = restore_adapter_form(saved, make_model(head, *TRAINED))
    assert list(model.parameters) == list(state) == [head, *TRAINED]
    assert state[head] is saved["base_model.model.head.weight"]


@pytest.mark.parametrize(
    ("saved", "names"),
    [
        (SAVED, BASE[1:]),  # a module is missing
        (SAVED, TRAINED[1:]),
        (SAVED | make_state("base_model.model.head.weight"), BASE),  # the base lacks it
        (make_state(*TRAINED), TRAINED),  # the names of the model already
        (make_state(*BASE), BASE),
    ],
)
def test_other_state_dicts_stay_as_they_are(saved, names):
    model = make_model(*names)
    assert restore_adapter_form(saved, model) == (saved, model)


def test_matrices_of_embeddings_and_magnitudes():
    roles = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    saved = make_state(*(f"base_model.model.embed.{role}" for role in roles))
    state, model = restore_adapter_form(saved, make_model("embed.weight"))
    named = [f"base_model.model.embed.{role}.default" for role in roles]
    named[2] += ".weight"  # since PEFT 0.10 it is a module, under its older name in files
    assert list(model.parameters) == named
    assert state.keys() == set(named)


def test_a_base_model_tells_the_order_of_whole_modules_and_of_another_adapters_name():
    saved = SAVED | make_state("base_model.model.head.weight")
    optimized = [fqn.replace("default", "polite") for fqn in TRAINED]
    state, model = restore_adapter_form(
        saved, make_model("head.weight", *BASE), ["head"], optimized
    )
    head = "base_model.model.head.modules_to_save.polite.weight"
    assert list(model.parameters) == list(state) == [head, *optimized]


def test_the_place_of_a_tied_module_is_its_own():
    """``head`` is the last module, though its base weight is the first one's."""
    head = "base_model.model.head"
    saved = SAVED | make_state(f"{head}.lora_A.weight", f"{head}.lora_B.weight")
    base = make_model("embed.weight", *BASE)
    names = ("embed.weight", *BASE, "head.weight")
    base = replace(base, tied={"head.weight": "embed.weight"}, names=names)
    state, _ = restore_adapter_form(saved, base)
    assert list(state) == [*TRAINED, *(f"{head}.lora_{part}.default.weight" for part in "AB")]


def test_two_adapters_at_one_place_have_no_order():
    both = make_state(*TRAINED, *(fqn.replace("default", "polite") for fqn in TRAINED))
    base = make_model(*BASE)
    assert restore_adapter_form(both, base)[1] == base
