"""The table of optimizers: the slots of each, and whether it counts its updates.

The shapes in a file decide first: a slot of its parameter's shape is per element, whatever the
table says, so an optimizer that is not in the table can be read, too. The table answers what shapes
cannot: whether a missing counter is a loss, and whether a 0-d slot of a 0-d parameter is per
element.

Sources: torch 2.13 ``torch/optim``; lion-pytorch 0.2; DeepSpeed 0.19.8 ``runtime/zero/muon``;
transformers 5 ``optimization.py`` (Adafactor); schedulefree 1.4; the authors' AdEMAMix and Shampoo;
torch-optimi 0.3.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import inf, sqrt
from typing import Any, Literal, NamedTuple

from reshard.core.box import Index
from reshard.quantised import BITSANDBYTES

Counter = Literal["state", "group", "none"]


class OptimizerTraits(NamedTuple):
    """One optimizer.

    Args:
        elements: slots of the parameter's shape, which every way of cutting it cuts too.
        optional: of those, the ones that only some settings keep.
        matrices: slots of a shape of their own; ZeRO's and FSDP 1's flat tensors have no place for
            them.
        vectors: slots of the parameter's shape that a parameter of at most one dim, which a flat
            tensor is, has in place of ``matrices``.
        scalars: 0-d slots, the same for all parameters that were updated as often.
        recomputed: 0-d slots that each update computes from the parameter before it uses them. A
            rank of ZeRO or FSDP has the value of its own piece.
        counter: where it counts its updates: in each parameter's state, in its param group, or
            nowhere.
        never_negative: slots that are sums, means or maxima of squares or magnitudes.
    """

    name: str
    elements: tuple[str, ...]
    optional: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    counter: Counter = "state"
    never_negative: tuple[str, ...] = ()

    def fits(self, slots: Collection[str]) -> bool:
        """Return whether these are all slots of the optimizer."""
        held = set(slots)
        known = {*self.elements, *self.optional, *self.matrices, *self.vectors}
        known |= {*self.scalars, *self.recomputed}
        required = {*self.elements, *self.scalars}
        return held <= known and (required <= held or bool(self.matrices and held))


MOMENTS = ("exp_avg", "exp_avg_sq")  # of every Adam
AMSGRAD = "max_exp_avg_sq"
_MOST_ROUNDING = 0.5  # relative: with more, moments of 16 bits show nothing
_OF_ADAM = {"betas", "eps"}  # hyper-parameters
# Groups of torch's Adam and AdamW have "amsgrad"; those of DeepSpeed's and apex's FusedAdam have
# "bias_correction", and those of FusedLamb, which scales updates, "max_coeff" as well (DeepSpeed
# 0.19.8 ops/lamb/fused_lamb.py). RAdam and NAdam of torch 2.13 have neither of the first two.
_ADAM_ALONE = ("amsgrad", "bias_correction")
# Hyper-parameters of optimizers that always keep state: Adam and its relatives, RMSprop, Adadelta,
# Adagrad, Rprop and ASGD of torch 2.13.
_OF_STATE = ("betas", "centered", "rho", "initial_accumulator_value", "etas", "lambd")
_RELATIVES = ("max_coeff", "momentum_decay")
ROWS = (
    OptimizerTraits(
        "Adam, AdamW, RAdam, LAMB",
        MOMENTS,
        optional=(AMSGRAD,),
        never_negative=("exp_avg_sq", AMSGRAD),
    ),
    OptimizerTraits(
        "LAMB",  # pytorch-lamb, pytorch_optimizer 4.1
        MOMENTS,
        recomputed=("weight_norm", "adam_norm", "trust_ratio"),
        never_negative=("exp_avg_sq",),
    ),
    OptimizerTraits(
        "NAdam",
        MOMENTS,
        scalars=("mu_product",),
        never_negative=("exp_avg_sq",),
    ),
    OptimizerTraits(
        "StableAdamW",
        MOMENTS,
        optional=("kahan_comp", "mean_square"),
        scalars=("eps_sq",),
        counter="group",
        never_negative=("exp_avg_sq",),
    ),
    OptimizerTraits("Adamax", ("exp_avg", "exp_inf"), never_negative=("exp_inf",)),
    OptimizerTraits(
        "AdEMAMix",
        ("exp_avg_slow", "exp_avg_sq"),
        optional=("exp_avg", "exp_avg_fast"),
        never_negative=("exp_avg_sq",),
    ),
    OptimizerTraits("Lion", ("exp_avg",), counter="none"),
    OptimizerTraits(
        "Muon",
        ("momentum_buffer",),
        counter="none",  # the Adam beside it counts
    ),
    OptimizerTraits("SGD", (), optional=("momentum_buffer",), counter="none"),
    OptimizerTraits("Adagrad", ("sum",), never_negative=("sum",)),
    OptimizerTraits(
        "Adadelta",
        ("square_avg", "acc_delta"),
        never_negative=("square_avg", "acc_delta"),
    ),
    OptimizerTraits(
        "RMSprop",
        ("square_avg",),
        optional=("momentum_buffer", "grad_avg"),
        never_negative=("square_avg",),
    ),
    OptimizerTraits("Rprop", ("prev", "step_size"), never_negative=("step_size",)),
    OptimizerTraits("ASGD", ("ax",), scalars=("eta", "mu")),
    OptimizerTraits(
        "Adafactor",
        (),
        optional=("exp_avg",),
        matrices=("row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"),
        vectors=("variance", "exp_avg_sq"),
        recomputed=("RMS",),
        never_negative=("variance", "row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"),
    ),
    OptimizerTraits(
        "schedule-free AdamW",
        ("z", "exp_avg_sq"),
        optional=("exp_avg",),
        counter="group",  # as k, beside weight_sum and lr_max
        never_negative=("exp_avg_sq",),
    ),
    OptimizerTraits("schedule-free SGD", ("z",), optional=("momentum_buffer",), counter="group"),
    OptimizerTraits(
        "Shampoo",
        (),
        optional=("momentum_buffer", "exp_avg", "exp_avg_sq"),
        matrices=("precond_0", "precond_1", "inv_precond_0", "inv_precond_1", "GG", "Q"),
    ),
)
# bitsandbytes 0.50 ``optim/optimizer.py``: every ``Optimizer2State`` has a mean of squares in
# ``state2``, in float32 or as codes: the scales of all codes are largest magnitudes.
_OF_BITSANDBYTES = ("state2", "absmax1", "absmax2", "qmap2")
# Numbers in a param group that a script or a schedule sets, so that all ranks have the same.
SETTINGS = frozenset(
    """
    lr initial_lr max_lr min_lr swa_lr betas beta1 beta2 beta3 eps weight_decay momentum dampening
    base_momentum max_momentum alpha rho lambd t0 lr_decay weight_lr_power d0 d_coef growth_rate
    """.split()
)
NEVER_NEGATIVE = frozenset(
    [
        *(name for row in ROWS for name in row.never_negative),
        *(f"{prefix}{name}" for prefix in ("", BITSANDBYTES) for name in _OF_BITSANDBYTES),
    ]
)
"""The ``never_negative`` slots of the whole table, and those of bitsandbytes."""

MATRICES = frozenset(name for row in ROWS for name in row.matrices)
"""Slots of a shape of their own, which may be the parameter's by chance."""

RECOMPUTED = frozenset(name for row in ROWS for name in row.recomputed)
"""Slots of which any value serves, because the next update replaces it unread."""

PER_ELEMENT = frozenset(name for row in ROWS for name in (*row.elements, *row.optional))
"""Slots that have the shape of their parameter in every optimizer of the table."""

SCALARS = frozenset(name for row in ROWS for name in row.scalars) | RECOMPUTED
"""0-d slots of the table."""


def find(slots: Collection[str]) -> OptimizerTraits | None:
    """Return the first optimizer that has these slots; None for one that is not in the table."""
    return next((row for row in ROWS if slots and row.fits(slots)), None)


def infer_shape(shapes: Mapping[str, Index]) -> Index | None:
    """Infer the shape of a parameter from those of its slots; None if there are none.

    Adafactor keeps a row and a column instead of the largest: torch's as (7, 1) and (1, 13),
    transformers' as (7,) and (13,).

    >>> infer_shape({"row_var": (7, 1), "col_var": (1, 13)})
    (7, 13)
    """
    row, column = shapes.get("exp_avg_sq_row"), shapes.get("exp_avg_sq_col")
    if row and column:
        return (*row, column[-1])
    # bitsandbytes has scales and tables beside them; its AdEMAMix stacks two moments in state1.
    for prefix in (BITSANDBYTES, ""):
        for name in (f"{prefix}state2", f"{prefix}state1"):
            if name in shapes:
                return shapes[name]
    most = max(map(len, shapes.values()), default=None)
    dims = zip(*(shape for shape in shapes.values() if len(shape) == most), strict=True)
    return None if most is None else tuple(max(extents) for extents in dims)


def needs_count(slots: Collection[str]) -> bool:
    """Return whether an optimizer with these slots needs the number of its updates to continue.

    One that is not in the table needs it if it keeps the moments of Adam.

    >>> needs_count(["exp_avg", "exp_avg_sq"]), needs_count(["exp_avg"])
    (True, False)
    """
    row = find(slots)
    return row.counter == "state" if row else has_moments(slots)


def has_moments(slots: Collection[str]) -> bool:
    """Return whether both moments of Adam are among the slots, those of its relatives included."""
    return set(MOMENTS) <= set(slots)


def is_adam(hyper: Mapping[str, Any]) -> bool:
    """Return whether a param group is that of an Adam or AdamW, and of none of their relatives."""
    named = any(name in hyper for name in _ADAM_ALONE)
    return named and not any(name in hyper for name in _RELATIVES)


def keeps_state(hyper: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of these hyper-parameters has state after its first update.

    >>> keeps_state({"lr": 1, "betas": (0.9, 0.99)}), keeps_state({"lr": 1, "momentum": 0})
    (True, False)
    """
    return bool(hyper.get("momentum")) or any(name in hyper for name in _OF_STATE)


def is_of_bitsandbytes(slots: Collection[str]) -> bool:
    """Return whether these are the slots of an optimizer of bitsandbytes, whatever its kind."""
    return any(f"{prefix}state1" in slots for prefix in (BITSANDBYTES, ""))


def name_slots(kinds: Iterable[str]) -> dict[str, str]:
    """Return each slot with its name for reports, which is that of torch's Adam for bitsandbytes'.

    With a second state, the first is the mean of gradients (see `_OF_BITSANDBYTES`).

    >>> name_slots(["state1", "state2", "absmax2"])
    {'state1': 'exp_avg', 'state2': 'exp_avg_sq', 'absmax2': 'absmax of exp_avg_sq'}
    """
    shown = {kind: kind.removeprefix(BITSANDBYTES) for kind in kinds}
    if "state2" in shown.values():
        parts = {"state": "{}", "absmax": "absmax of {}", "qmap": "qmap of {}"}
        names = {
            f"{part}{number}": text.format(moment)
            for part, text in parts.items()
            for number, moment in enumerate(MOMENTS, 1)
        }
        shown = {kind: names.get(name, name) for kind, name in shown.items()}
    return shown


def has_joint_state(hyper: Collection[str]) -> bool:
    """Return whether an optimizer keeps one state for all parameters (torch's LBFGS).

    Args:
        hyper: the keys of a param group.
    """
    return {"history_size", "line_search_fn"} <= set(hyper)


def find_missing_of_adam(
    slots: Collection[str], hyper: Collection[str], step: float | None
) -> str | None:
    """Return what the state of an Adam lacks; None if it is complete, or not the state of an Adam.

    Other optimizers share slot names with Adam: Lion has exp_avg alone, Adamax a further slot,
    Adafactor an exp_avg_sq of vectors. Hyper-parameters distinguish an incomplete Adam from them.

    Args:
        hyper: the keys of the param group.
    """
    half = set(slots) <= {*MOMENTS, AMSGRAD} and set(hyper) >= _OF_ADAM
    if not half and not has_moments(slots):
        return None
    missing = (name for name in MOMENTS if name not in slots)
    is_counted = step is not None or "step" in hyper
    return next(missing, None if is_counted else "step")


def is_scalar(slot: str, shapes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether a slot is one 0-d value for each parameter.

    Args:
        shapes: the shape of the slot and that of its parameter, for every parameter that has the
            slot. If all parameters are 0-d, the shapes do not tell, and the table decides.
    """
    if any(own for own, _ in shapes):
        return False
    return slot in SCALARS or any(of_parameter for _, of_parameter in shapes)


def is_bounded(hyper: Mapping[str, Any], slots: Collection[str]) -> bool:
    """Return whether a param group is one of Adam or AdamW, whose updates are bounded."""
    has_slots = set(MOMENTS) <= set(slots) <= {*MOMENTS, AMSGRAD}
    return has_slots and is_adam(hyper) and _has_betas(hyper)


def _has_betas(hyper: Mapping[str, Any]) -> bool:
    # torch's Adam also takes tensors.
    match hyper.get("betas"):
        case (int() | float(), int() | float()):
            return True
    return False


def bound_update(hyper: Mapping[str, Any], largest: float, updates: float) -> float:
    """Return how far one update of Adam can move a weight, in units of the learning rate.

    Both moments are weighted means of the same gradients ``g``: ``m = sum(a * g)``, ``v = sum(b *
    g**2)``. By Cauchy-Schwarz, ``|m| / sqrt(v)`` is at most ``sqrt(sum(a**2 / b))``, which grows
    with the number of updates. Decoupled weight decay adds ``weight_decay * |weight|``.

    Args:
        largest: the largest magnitude of a weight.
        updates: the highest number of updates that the optimizer has made.
    """
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    ratio = beta1 * beta1 / beta2 if beta2 else inf
    if beta2 >= 1 or ratio >= 1:
        return inf  # the series diverges
    squared = (1 - beta1) ** 2 / ((1 - beta2) * (1 - ratio))
    if hyper.get("bias_correction", True):
        squared *= (1 - beta2**updates) * (1 - ratio**updates) / (1 - beta1**updates) ** 2
    return sqrt(max(squared, 1.0)) + abs(float(hyper.get("weight_decay") or 0)) * largest


class MomentBound(NamedTuple):
    """What some updates of Adam can do to both moments, for any gradients.

    ``v >= least * v0``, and ``|m - kept * m0| <= reach * sqrt(v - decayed * v0)``; with fewer
    updates, ``kept`` and ``decayed`` are larger.

    Args:
        least: ``decayed`` with room for the rounding of each update.
        rounding: relative rounding of all updates together.
    """

    kept: float
    decayed: float
    least: float
    reach: float
    rounding: float


def bound_moments(hyper: Mapping[str, Any], updates: int, rounding: float) -> MomentBound | None:
    """Return what updates with these betas can do to the moments; None if anything is possible.

    With ``v - beta2**k * v0 = sum(b * g**2)`` and ``m - beta1**k * m0 = sum(a * g)``, the bound is
    that of Cauchy-Schwarz, as in `bound_update`.

    Args:
        updates: the number ``k`` of updates.
        rounding: relative rounding of a stored moment.
    """
    beta1, beta2 = (float(beta) for beta in hyper["betas"])
    lost = 2 * updates * rounding
    if not (0 <= beta1 < 1 and beta1 * beta1 < beta2 < 1) or lost > _MOST_ROUNDING:
        return None
    ratio = beta1 * beta1 / beta2
    terms = (1 - ratio**updates) / (1 - ratio)
    decayed = beta2**updates
    reach = (1 - beta1) * sqrt(terms / (1 - beta2))
    return MomentBound(beta1**updates, decayed, decayed * (1 - lost), reach, lost)
