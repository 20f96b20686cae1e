"""Plans of tensor parallelism: which parameters are cut, along which dim.

A pattern names modules or parameters; each of its dot-separated parts may have wildcards. A style
says how they are cut, with the meaning of torch's ``parallelize_module``:

    colwise     ``ColwiseParallel``: weight and bias of a Linear along dim 0, an Embedding along 1
    rowwise     ``RowwiseParallel``: the weight of a Linear along dim 1, its bias replicated, an
                Embedding along 0
    replicate   whole on every rank, as a DTensor (``SequenceParallel``)
    0, 1 ...    the dim of every parameter of the module

A parameter that no pattern names is not a DTensor on this axis. transformers' plans use other names
for the same cuts; those of packed weights (gate and up in one) are not blocks of a tensor.

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

from reshard.core.box import Index
from reshard.core.manifest import Placement
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.mesh import ROLES
from reshard.layouts.partition import Cut
from reshard.model import ModelShapes

Style = str | int

_OURS = ("colwise", "rowwise", "replicate")
_TRANSFORMERS: Mapping[str, Style | None] = {  # None: the parameters are not cut
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
class TensorPlan:
    """Patterns with their styles.

    Args:
        source: the file or the model that the plan comes from.
        embeddings: parameters of the model's Embeddings; None if no model is known.
        from_user: whether the user wrote the plan: every pattern must then match a parameter.
        by_name: whether each pattern is the name of a parameter.
    """

    source: str
    styles: Mapping[str, Style]
    embeddings: frozenset[str] | None = None
    from_user: bool = False
    by_name: bool = False


def read(path: Path, model: ModelShapes | None = None) -> TensorPlan:
    """Read a plan from a file: a JSON object, pattern -> style.

    Raises:
        UsageError: the file is not a valid plan.
    """
    try:
        styles = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(path, f"is not JSON: {error}") from error
    form = (
        f'write {{"model.layers.*.self_attn.q_proj": "colwise", ...}}: {"|".join(_OURS)} or a dim'
    )
    if not isinstance(styles, dict) or not styles:
        raise UsageError(path, "is not a tensor-parallel plan", form)
    for pattern, style in styles.items():
        if style not in _OURS and (type(style) is not int or style < 0):
            raise UsageError(path, f"{pattern!r} has the unsupported style {style!r}", form)
    return TensorPlan(str(path), styles, model.embeddings if model else None, from_user=True)


def get_declared_plan(model: ModelShapes) -> TensorPlan:
    """Return the plan that a transformers model declares (``model.tp_plan``).

    Raises:
        UsageError: the model has no plan.
    """
    if not model.tensor_plan:
        raise UsageError(
            model.source,
            "has no tensor-parallel plan (base_model_tp_plan)",
            "write a plan and pass it: --tp-plan FILE",
        )
    named = {pattern: _TRANSFORMERS.get(s, s) for pattern, s in model.tensor_plan.items()}
    styles = {pattern: style for pattern, style in named.items() if style is not None}
    return TensorPlan(model.source, styles, model.embeddings)


def get_stored_plan(where: str, placements: Mapping[str, Placement]) -> TensorPlan | None:
    """Return how the source's own tensor-parallel axis cuts its DTensors; None without one."""
    cuts = {
        fqn: dim
        for fqn, placement in placements.items()
        for name, dim in placement
        if ROLES.get(name) == "tensor"
    }
    styles = {fqn: "replicate" if dim is None else dim for fqn, dim in cuts.items()}
    return TensorPlan(where, styles, by_name=True) if styles else None


def find_cuts(
    plan: TensorPlan, parameters: Iterable[tuple[Sequence[str], Index]]
) -> dict[str, Cut | None]:
    """Return the cut of each parameter that the plan matches, by its first name; None: replicated.

    Args:
        parameters: pairs of the names of a parameter, and its shape.

    Raises:
        UsageError: a pattern of the user's plan matches no parameter, or no pattern of the model's
            plan does; a style does not fit a parameter, or two styles contradict each other.
        UnsupportedError: a weight is packed, or a style is unknown.
    """
    result: dict[str, Cut | None] = {}
    used: set[str] = set()
    for names, shape in parameters:
        styles = {name: _find_style(plan, name) for name in names}
        used.update(pattern for pattern, _ in filter(None, styles.values()))
        named_cuts = {
            name: _resolve_cut(plan, name, shape, style[1])
            for name, style in styles.items()
            if style
        }
        if not named_cuts:
            continue
        if len(set(named_cuts.values())) > 1 or len(named_cuts) < len(names):
            raise UsageError(
                plan.source,
                f"{' and '.join(map(repr, names))} are one tensor, but have different cuts:"
                f" {', '.join((f'{name}: {style[1]}' for name, style in styles.items() if style))}",
                "give all of its names a style that cuts the same dim",
            )
        result[names[0]] = named_cuts[names[0]]
    unused = [pattern for pattern in plan.styles if pattern not in used]
    if unused and (plan.from_user or not used):
        raise UsageError(
            plan.source, f"the pattern {unused[0]!r} matches no parameter of the checkpoint"
        )
    return result


def _find_style(plan: TensorPlan, fqn: str) -> tuple[str, Style] | None:
    if plan.by_name:
        return (fqn, plan.styles[fqn]) if fqn in plan.styles else None
    module, _, _ = fqn.rpartition(".")
    for name in filter(None, (fqn, module)):
        hits = [(p, style) for p, style in plan.styles.items() if _matches(p, name)]
        if len({style for _, style in hits}) > 1:
            listed = ", ".join(f"{pattern!r} {style}" for pattern, style in hits)
            raise UsageError(plan.source, f"has several styles for {name!r}: {listed}")
        if hits:
            return hits[0]
    return None


def _matches(pattern: str, name: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _resolve_cut(plan: TensorPlan, fqn: str, shape: Index, style: Style) -> Cut | None:
    if style == "replicate":
        return None
    if isinstance(style, int):
        if style >= len(shape):
            raise UsageError(plan.source, f"cuts dim {style} of {fqn!r}, which has shape {shape}")
        return Cut(style)
    if style not in ("colwise", "rowwise"):
        raise UnsupportedError(
            f"{fqn!r}",
            f"has the style {style} in {plan.source}, with which a rank would store several blocks"
            " of it",
            "write DCP instead (--to dcp), which any mesh can load",
        )
    return _compute_layer_cut(fqn, shape, style, plan)


def _compute_layer_cut(fqn: str, shape: Index, style: str, plan: TensorPlan) -> Cut | None:
    module, _, leaf = fqn.rpartition(".")
    if plan.embeddings is None and any(word in module.rpartition(".")[2] for word in _MAY_EMBED):
        raise UsageError(
            plan.source,
            f"{module!r} has the style {style} and may be an Embedding, whose cut differs from a"
            " Linear's",
            "state the dim in the plan, or pass the model: --model config.json|DIR|module:factory",
        )
    if len(shape) < 2:
        if leaf != "bias":
            raise UsageError(
                plan.source,
                f"{fqn!r} has the style {style} of a Linear, but shape {shape}",
                "state the dim in the plan, or replicate it",
            )
        return Cut(0) if style == "colwise" else None
    # colwise cuts the output features: dim 0 of a Linear's weight, dim 1 of an Embedding's.
    embeds = plan.embeddings is not None and fqn in plan.embeddings
    return Cut(len(shape) - (2 if (style == "colwise") != embeds else 1))
