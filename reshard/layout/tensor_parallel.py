"""How tensor parallelism cuts each parameter: a plan of patterns, from a file or from a model.

A pattern names modules or parameters, a part a dot, and each part may have wildcards. A style says
what happens to them, as torch's ``parallelize_module`` has it:

    colwise     ``ColwiseParallel``: weight and bias of a Linear along dim 0, an Embedding along 1
    rowwise     ``RowwiseParallel``: the weight of a Linear along dim 1, its bias replicated, an
                Embedding along 0
    replicate   whole on every rank, as a DTensor (``SequenceParallel``)
    0, 1 ...    the dim of every parameter of the module

What no pattern names is no DTensor of that axis. transformers' plans are in its own words, and give
the same cuts; those of packed weights (gate and up in one) are no blocks of a tensor.

Sources: torch 2.13 ``distributed/tensor/parallel/api.py``, ``style.py``; transformers 5.23
``distributed/tensor_parallel.py`` (``shard_param`` of each style), ``distributed/mixin.py``
(``init_parallel_plans``, ``_expand_parallel_plan``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from reshard.box import Index
from reshard.errors import UnsupportedError, UsageError
from reshard.layout.partition import Cut
from reshard.model import ModelShapes

Style = str | int

_OURS = ("colwise", "rowwise", "replicate")
_TRANSFORMERS: Mapping[str, Style | None] = {  # None: its parameters stay what they are
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), "colwise"),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), "rowwise"),
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
    **dict.fromkeys(
        """
        sequence_parallel replicated_with_grad_allreduce mla_kv_a_proj all_reduce moe_tp_experts
        moe_identity_expert local_params replicate
        """.split()
    ),
}
_MAY_EMBED = ("emb", "wte", "wpe")  # in the name of a module that may be an Embedding


@dataclass(frozen=True, slots=True)
class Plan:
    """Patterns with their styles.

    Args:
        source: the file, or the model.
        embeddings: the parameters of the model's Embeddings; None where no model says.
        told: whether the user wrote it: every pattern must then name something.
    """

    source: str
    styles: Mapping[str, Style]
    embeddings: frozenset[str] | None = None
    told: bool = False


def read(path: Path, model: ModelShapes | None = None) -> Plan:
    """A plan from a file: a JSON object, pattern -> style.

    Raises:
        UsageError: it is none.
    """
    try:
        styles = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(path, f"is no JSON: {error}") from error
    form = (
        f'write {{"model.layers.*.self_attn.q_proj": "colwise", ...}}: {"|".join(_OURS)} or a dim'
    )
    if not isinstance(styles, dict) or not styles:
        raise UsageError(path, "is no plan of tensor parallelism", form)
    for pattern, style in styles.items():
        if style not in _OURS and (type(style) is not int or style < 0):
            raise UsageError(path, f"{pattern!r} has the style {style!r}", form)
    return Plan(str(path), styles, model.embeddings if model else None, told=True)


def of_model(model: ModelShapes) -> Plan:
    """The plan that a transformers model brings (``model.tp_plan``).

    Raises:
        UsageError: it has none.
    """
    if not model.tensor_plan:
        raise UsageError(
            model.source,
            "has no plan of tensor parallelism (base_model_tp_plan)",
            "write one: --tp-plan FILE",
        )
    named = {pattern: _TRANSFORMERS.get(s, s) for pattern, s in model.tensor_plan.items()}
    styles = {pattern: style for pattern, style in named.items() if style is not None}
    return Plan(model.source, styles, model.embeddings)


def cuts(plan: Plan, parameters: Iterable[tuple[Sequence[str], Index]]) -> dict[str, Cut | None]:
    """How each parameter that the plan touches is cut, by its first name; None: replicated.

    Args:
        parameters: the names that each has, and its shape.

    Raises:
        UsageError: a pattern of the user's names nothing, or none of the model's does; styles that
            do not fit a parameter, or contradict each other.
        UnsupportedError: a packed weight, or a style that is not known.
    """
    found: dict[str, Cut | None] = {}
    used: set[str] = set()
    for names, shape in parameters:
        styles = {name: _style(plan, name) for name in names}
        used.update(pattern for pattern, _ in filter(None, styles.values()))
        made = {name: _cut(plan, name, shape, style[1]) for name, style in styles.items() if style}
        if not made:
            continue
        if len(set(made.values())) > 1 or len(made) < len(names):
            raise UsageError(
                plan.source,
                f"{' and '.join(map(repr, names))} are one tensor, and are not cut alike:"
                f" {', '.join(f'{name}: {style[1]}' for name, style in styles.items() if style)}",
                "give a style for each name that leads to the same dim",
            )
        found[names[0]] = made[names[0]]
    unused = [pattern for pattern in plan.styles if pattern not in used]
    if unused and (plan.told or not used):
        raise UsageError(plan.source, f"{unused[0]!r} names no parameter of the checkpoint")
    return found


def _style(plan: Plan, fqn: str) -> tuple[str, Style] | None:
    """The pattern that names a parameter, else one that names its module.

    Raises:
        UsageError: two of a kind disagree.
    """
    module, _, _ = fqn.rpartition(".")
    for name in filter(None, (fqn, module)):
        hits = [(p, style) for p, style in plan.styles.items() if _names(p, name)]
        if len({style for _, style in hits}) > 1:
            told = ", ".join(f"{pattern!r} {style}" for pattern, style in hits)
            raise UsageError(plan.source, f"has several styles for {name!r}: {told}")
        if hits:
            return hits[0]
    return None


def _names(pattern: str, name: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _cut(plan: Plan, fqn: str, shape: Index, style: Style) -> Cut | None:
    if style == "replicate":
        return None
    if isinstance(style, int):
        if style >= len(shape):
            raise UsageError(plan.source, f"cuts dim {style} of {fqn!r}, which has shape {shape}")
        return Cut(style)
    if style not in ("colwise", "rowwise"):
        raise UnsupportedError(
            f"{fqn!r}",
            f"is {style} in {plan.source}: a rank would hold several blocks of it",
            "write DCP instead, which any mesh reads",
        )
    return _of_linear(fqn, shape, style, plan)


def _of_linear(fqn: str, shape: Index, style: str, plan: Plan) -> Cut | None:
    module, _, leaf = fqn.rpartition(".")
    if plan.embeddings is None and any(word in module.rpartition(".")[2] for word in _MAY_EMBED):
        raise UsageError(
            plan.source,
            f"{module!r} has the style {style}, and may be an Embedding, which is cut across",
            "give the dim, or say which model it is: --model config.json|DIR|module:factory",
        )
    if len(shape) < 2:
        if leaf != "bias":
            raise UsageError(
                plan.source,
                f"{fqn!r} has the style {style} of a Linear, and shape {shape}",
                "give the dim, or replicate",
            )
        return Cut(0) if style == "colwise" else None
    embeds = plan.embeddings is not None and fqn in plan.embeddings
    return Cut(len(shape) - (2 if (style == "colwise") != embeds else 1))
