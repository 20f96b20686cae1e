"""The names of an adapter's tensors: in a model that is trained, and in PEFT's own file.

In the model an adapter's name stands in those of its tensors, ``q_proj.lora_A.default.weight``; in
the file it does not. Both as PEFT 0.21 has them, ``utils/save_and_load.py``
(get_peft_model_state_dict) and ``tuners/tuners_utils.py`` (BaseTuner).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reshard.units import some

ROOT = "base_model.model."  # where a PeftModel has the model that it adapts
DEFAULT = "default"  # what PEFT calls an adapter that nobody named
SAVED_MODULE = "modules_to_save"
TOKENS = "trainable_tokens_delta"
MAGNITUDE = "lora_magnitude_vector"
IN, OUT = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")
START_AT_ZERO = ("lora_B", "lora_embedding_A")  # LoraLayer.reset_lora_parameters
MATRICES = (*IN, *OUT, MAGNITUDE)
_ROLES = frozenset((*MATRICES, SAVED_MODULE, TOKENS))
_LEAVES = ("weight", "bias")
_EMBEDDINGS = ("embed_tokens", "lm_head")  # utils/constants.py


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of an adapter.

    Args:
        layer: the module that is adapted, or saved with the adapter.
        role: ``lora_A`` and so on, ``modules_to_save`` or ``trainable_tokens_delta``.
        adapter: its name; empty in PEFT's file.
        saved_as: its name in PEFT's file.
    """

    fqn: str
    layer: str
    role: str
    adapter: str
    saved_as: str


def part(fqn: str) -> Part | None:
    """What of an adapter a tensor is, if its name is one that PEFT gives.

    >>> part("h.q_proj.lora_A.default.weight").saved_as
    'base_model.model.h.q_proj.lora_A.weight'
    >>> part("base_model.model.head.modules_to_save.default.weight").saved_as
    'base_model.model.head.weight'
    """
    path = rooted(fqn).split(".")
    for at in reversed(range(1, len(path))):
        role = path[at]
        if role not in _ROLES:
            continue
        layer, rest = ".".join(path[:at]), path[at + 1 :]
        if role == SAVED_MODULE and len(rest) > 1:
            return Part(fqn, layer, role, rest[0], ".".join([layer, *rest[1:]]))
        if role != SAVED_MODULE:
            leaf = rest.pop() if rest and rest[-1] in _LEAVES else ""
            if len(rest) > 1:
                return None
            # PEFT's files keep the name that a magnitude had before it became a module
            tail = [leaf] if leaf and role != MAGNITUDE else []
            saved_as = ".".join([layer, role, *tail])
            return Part(fqn, layer, role, rest[0] if rest else "", saved_as)
    return None


def parts(fqns: Iterable[str]) -> list[Part]:
    """The tensors of adapters among these."""
    return [found for fqn in fqns if (found := part(fqn))]


def told(fqns: Iterable[str]) -> list[str]:
    """That adapters among weights are not added to these, and what to do with them."""
    found = parts(fqns)
    lora = [each for each in found if each.role in MATRICES]
    if not lora:
        return []
    called = list(dict.fromkeys(each.adapter or DEFAULT for each in found))
    text = (
        f"{len(lora)} tensors of LoRA adapters ({some([each.fqn for each in lora])}) are written"
        " under PEFT's names, not added to the weights that they adapt: --adapter"
        f" {' or '.join(called)} writes one alone, as PeftModel.from_pretrained loads it, and"
        " merge_and_unload adds it"
    )
    return [text]


def unknown(fqns: Iterable[str]) -> list[str]:
    """Names that look like a LoRA layer's and are none that are known here."""
    return [
        fqn
        for fqn in fqns
        if any(word.startswith("lora_") for word in fqn.split(".")) and part(fqn) is None
    ]


def rooted(fqn: str) -> str:
    """A name as a PeftModel has it: what wraps that goes, and its root is put before all others.

    >>> rooted("model.base_model.model.norm.weight"), rooted("norm.weight")
    ('base_model.model.norm.weight', 'base_model.model.norm.weight')
    """
    at = f".{fqn}".find(f".{ROOT}")
    return fqn[at:] if at >= 0 else ROOT + fqn


def bare(layer: str) -> str:
    """A layer's name in the model that is adapted."""
    return layer.removeprefix(ROOT).removesuffix(".base_layer")


def saved(
    fqns: Iterable[str], found: Iterable[Part], name: str, config: Mapping[str, Any]
) -> dict[str, str]:
    """Fqn -> name in PEFT's file, of everything that PEFT saves of an adapter.

    Args:
        fqns: of all weights, second names of tied ones too.
        found: the `parts` among them.
        name: the adapter's; empty where the source is PEFT's own file, all of which it is.
    """
    if not name:
        return {fqn: rooted(fqn) for fqn in fqns}
    held = {each.fqn: each for each in found}
    also = _saved_of_base(held.values(), config)
    chosen = {}
    for fqn in fqns:
        if fqn not in held and also(rooted(fqn)):
            chosen[fqn] = rooted(fqn)
        elif fqn in held and held[fqn].adapter == name:
            chosen[fqn] = held[fqn].saved_as
    return chosen


def _saved_of_base(found: Iterable[Part], config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Which of the base model's tensors go along: biases that were trained, adapted embeddings."""
    layers = {each.layer for each in found if each.role in MATRICES}
    targets, bias = config.get("target_modules"), config.get("bias") or "none"
    embeds = isinstance(targets, str) or not set(_EMBEDDINGS).isdisjoint(targets or ())
    if config.get("trainable_token_indices") is not None:
        embeds = False
    embeddings = [each for each in layers if embeds and each.rpartition(".")[2] in _EMBEDDINGS]
    prefixes = tuple(f"{each}.base_layer." for each in embeddings)

    def wanted(fqn: str) -> bool:
        owner = fqn.removesuffix(".base_layer.bias")
        return (
            (bias == "all" and fqn.endswith(".bias"))
            or (bias == "lora_only" and owner != fqn and owner in layers)
            or fqn.startswith(prefixes)
        )

    return wanted
