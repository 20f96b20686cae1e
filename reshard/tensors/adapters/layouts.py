"""Matching of the matrices of an adapter to dims of base weights, by their shapes.

PEFT does not store which dim of a weight belongs to which matrix: it follows from the class of the
layer and from the version of PEFT. ``nn.Linear`` stores (out, in), ``Conv1D`` (in, out). Weights of
experts are 3-D: PEFT 0.18 takes every such weight for (experts, in, out); PEFT 0.19 and later take
only those of layers that state ``is_transposed`` for it, and the others for (experts, out, in)
(``tuners/lora/layer.py``, ParamWrapper.update_layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from reshard.core.box import Index
from reshard.errors import UnsupportedError, UsageError
from reshard.tensors.adapters.product import Order

ORDERS: tuple[Order, ...] = ("out_in", "in_out")


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair of matrices, the weight that it belongs to, and how the weight stores its dims."""

    weight: str
    orders: tuple[Order, ...]  # two if the shapes allow both
    experts: int = 1


def fit(weight: str, shape: Index, a: Index, b: Index, *, is_embedding: bool) -> Fit | None:
    """Return how the product of two matrices fits into a weight, or None if it does not.

    Args:
        shape: the shape of the weight.
        a: the shape of ``lora_A``.
        b: the shape of ``lora_B``.
        is_embedding: whether the matrices are ``lora_embedding_A`` and ``lora_embedding_B``.
    """
    if len(a) > 2:  # convolutions without groups; the second kernel is 1 x 1
        ones = (1,) * (len(a) - 2)
        plain = len(a) == len(shape) and a[1:] == shape[1:] and b == (shape[0], a[0], *ones)
        return Fit(weight, ("out_in",)) if plain else None
    if len(a) != 2 or len(b) != 2 or len(shape) not in (2, 3) or a[0] != b[1]:
        return None
    experts = shape[0] if len(shape) == 3 else 1
    if experts < 1 or a[0] % experts or (len(shape) == 3 and experts == 1):
        return None
    sizes = {"out_in": (b[0], a[1]), "in_out": (a[1], b[0])}
    orders = tuple(order for order in ORDERS if sizes[order] == shape[-2:])
    if is_embedding:  # Embedding.get_delta_weight transposes the product
        orders = tuple(order for order in orders if order == "in_out") if len(shape) == 2 else ()
    return Fit(weight, orders, experts) if orders else None


def assign(layer: str, candidates: Sequence[Mapping[str, Fit]], names: Sequence[str]) -> list[Fit]:
    """Return the weight of each pair of matrices on one module; no weight has two pairs.

    Args:
        candidates: of each pair, the weights that it fits.
        names: the weights of the module that may be adapted.

    Raises:
        UsageError: a pair fits no weight: the base is another model.
        UnsupportedError: the shapes do not decide which weight a pair belongs to.
    """
    found = [
        order
        for order in permutations(names, len(candidates))
        if all(name in fits for name, fits in zip(order, candidates, strict=True))
    ]
    if not found:
        raise UsageError(
            layer,
            "no weight of the base model has the shape of this layer's LoRA product (lora_B x"
            " lora_A)",
            "pass the base model that the adapter was trained on",
        )
    if len(found) > 1:
        raise UnsupportedError(
            layer,
            f"several weights of this module have the shape of its LoRA product: {list(names)}",
            "merge this adapter with PEFT",
        )
    return [fits[name] for name, fits in zip(found[0], candidates, strict=True)]


def choose_order(fit: Fit, others: Sequence[Fit], *, fan_in_fan_out: bool) -> Order | None:
    """Return how a weight stores its dims, or None if nothing decides it.

    A square weight allows both orders. The other weights of the adapter decide then: first those of
    the same name in other layers, then all of the same number of dims. For a matrix that nothing
    else decides, the adapter's configuration does; PEFT sets ``fan_in_fan_out`` as the layer is.
    """
    if len(fit.orders) == 1:
        return fit.orders[0]
    alike = [other for other in others if (other.experts > 1) == (fit.experts > 1)]
    leaf = fit.weight.split(".")[-2:]
    known: set[Order] = set()
    for group in ([other for other in alike if other.weight.split(".")[-2:] == leaf], alike):
        known = {other.orders[0] for other in group if len(other.orders) == 1}
        if len(known) == 1:
            return known.pop()
    if fit.experts > 1 or known:  # known: the other weights contradict each other
        return None
    return "in_out" if fan_in_fan_out else "out_in"
