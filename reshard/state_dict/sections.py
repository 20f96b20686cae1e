"""Divide a saved tree into sections: the model, optimizers, the scheduler, and the rest.

Frameworks agree on the structure of these sections and not on their names, so a section is
identified by its structure; names decide only between several models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.errors import UnrecognisedError, UsageError
from reshard.model.adapter_names import SAVE_UNSAVED, find_unsaved
from reshard.state_dict import leaves
from reshard.state_dict import tree as trees
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.optimizers.states import MASTER_LISTS, add_masters, is_optimizer
from reshard.state_dict.tree import (
    LocalTensors,
    as_list,
    collect_tensors,
    format_path,
    is_tensor,
    walk,
)
from reshard.units import abridge

Path = tuple[Any, ...]

# DeepSpeed calls the model ``module``, Lightning ``state_dict``; torchtitan, Accelerate, verl and
# most others call it ``model``.
MODEL_KEYS = re.compile(r"state_dict|model_state_dict|(pytorch_)?model(_fsdp)?(_\d+)?|module")
_DEPTH = 3
_LISTED = 8
_WHOLE = (
    "pass the directory that contains all files of the checkpoint, its weights included. If the"
    " weights are in a folder below it (unet/, transformer/), pass that folder to read them alone"
)
_DIGITS = re.compile(r"\d+")
_NO_FLOATS = ("int", "bool")
_MIN_RATIO = 100  # the model has at least so many times the elements of the top level
_NEVER_A_MODEL = re.compile(r"rng|random_states?|sampler|data_?loader|sched|scaler", re.IGNORECASE)
RNG = re.compile(r"rng|random|generator", re.IGNORECASE)
_NAMED = {
    "scheduler": re.compile(r"(lr_?)?sched(uler)?s?(_state)?|lr_scheduler_state_dict"),
    "scaler": re.compile(r"(grad_?|loss_?)?scaler(_state)?|amp|native_amp_scaling_state"),
    "rng": re.compile(r"rng(_states?)?|random_states?(_\d+)?|rng_state_\d+"),
    "step": re.compile(r"(global_?)?(steps?|iterations?|iter)"),
    "samples": re.compile(r"global_samples"),  # this and the next are DeepSpeed's names
    "skipped_steps": re.compile(r"skipped_steps"),
}
TRAINED = "current_model_state"  # where Lightning's WeightAveraging puts the model that it trains
_AVERAGED = "_ema"  # how diffusers' examples name the average of ``unet``
_COUNTERS = ("step", "samples", "skipped_steps")
TRAIN_STATE = "train_state"  # the file in which reshard writes what is neither model nor optimizer
_OF_FRAMEWORKS = (TRAIN_STATE, "meta")  # Lightning 2.6 calls its dict of counters ``meta``
# In `TrainState.opaque`: what Accelerate 1.15 (``accelerator.py``, ``_do_sync``) saves as its step,
# among the random states: calls of ``accumulate`` in this epoch, 0 where a program makes none.
ACCUMULATED = "accelerate's micro batches"


@dataclass(slots=True)
class Sections:
    """The sections of a tree."""

    model: dict[str, Any]
    model_path: Path
    optimizers: dict[Path, Any]
    masters: frozenset[Path] = frozenset()  # the lists of masters that are in ``optimizers`` now
    scheduler: Any = None
    scaler: Any = None
    rng: Any = None
    step: int | None = None
    accumulated: int | None = None  # Accelerate's count of micro batches
    samples: int | None = None
    skipped_steps: int | None = None
    client: dict[str, Any] = field(default_factory=dict)  # everything else, by dotted path
    other_models: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)  # in the model's dict: name -> kind
    keys: dict[str, str] = field(default_factory=dict)  # section -> its dotted path in the tree


def find(tree: Any, where: str, key: str | None = None) -> Sections:
    """Divide a tree into sections.

    Args:
        key: the dotted path of the model, if the user chose one.
    """
    optimizers, masters = _add_masters(tree, _find_optimizers(tree))
    models = _find_models(tree, {*optimizers, *masters})
    if not models:
        _refuse_modules(tree, where)
    path = (
        _resolve_key(tree, where, key, models)
        if key is not None
        else _choose_model(where, models, optimizers)
    )
    item = _get_item(tree, path)
    model = _cut_like_others(models.get(path) or collect_tensors(item), models.values())
    parts = Sections(model, path, optimizers, masters)
    parts.keys["model"] = format_path(path) or "the top level"
    if len(optimizers) == 1:
        parts.keys["optimizer"] = format_path(next(iter(optimizers)))
    parts.other_models = [
        format_path(other) or "the top level" for other in models if other != path
    ]
    parts.unread = _find_opaque(item, where, path, {*optimizers, *masters, *models})
    _sort_rest(parts, tree, models)
    return parts


def _cut_like_others(
    model: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a model whose plain tensors are cut like the sharded ones of the same names in others.

    An average may be kept as the ranks' own parts (``to_local()``) beside DTensors.
    """
    sharded = {
        fqn: leaf
        for other in others
        for fqn, leaf in other.items()
        if isinstance(leaf, GlobalTensor)
    }
    return {
        fqn: _cut_like(leaf, sharded[fqn])
        if fqn in sharded and isinstance(leaf, LocalTensors)
        else leaf
        for fqn, leaf in model.items()
    }


def _cut_like(local: LocalTensors, sharded: GlobalTensor) -> Any:
    boxes = {chunk.file: chunk.box for chunk in sharded.chunks}
    pieces = [piece for piece in local.pieces.values() if piece.box.volume]
    has_same_shapes = all(
        piece.file in boxes and boxes[piece.file].shape == piece.box.shape for piece in pieces
    )
    if len(boxes) < len(sharded.chunks) or not has_same_shapes:
        return local
    chunks = tuple(replace(piece, box=boxes[piece.file]) for piece in pieces)
    return replace(sharded, dtype=pieces[0].dtype, chunks=chunks) if chunks else local


def _find_opaque(item: Any, where: str, path: Path, read: Collection[Path]) -> dict[str, str]:
    # At the top level these include the rest of the checkpoint, which has names of its own: they
    # are only checked, not returned.
    if not isinstance(item, dict):
        return {}
    known = {key for key in item if any(at[: len(path) + 1] == (*path, key) for at in read)}
    known |= {key for key in item if _classify((key,)) or _NEVER_A_MODEL.search(str(key))}
    prefix = f"{format_path(path)}." if path else ""
    opaque = leaves.find_opaque(where, item, known, prefix=prefix)
    return opaque if path else {}


def _find_optimizers(tree: Any) -> dict[Path, Any]:
    optimizers: dict[Path, Any] = {}
    for path, node in walk(tree, _DEPTH):
        if is_optimizer(node) and not any(path[: len(p)] == p for p in optimizers):
            optimizers[path] = node
    return optimizers


def _add_masters(
    tree: Any, optimizers: Mapping[Path, Any]
) -> tuple[dict[Path, Any], frozenset[Path]]:
    complete, taken = dict(optimizers), set()
    for path, optimizer in optimizers.items():
        above = _get_item(tree, path[:-1]) if path else {}
        name = next((n for n in MASTER_LISTS if isinstance(above, dict) and n in above), None)
        added = add_masters(optimizer, above[name]) if name else None
        if added is not None:
            complete[path] = added
            taken.add((*path[:-1], name))
    return complete, frozenset(taken)


def _find_models(tree: Any, optimizers: Collection[Path]) -> dict[Path, dict[str, Any]]:
    models = {}
    for path, node in walk(tree, _DEPTH):
        inside = any(path[: len(p)] == p for p in optimizers)
        named = any(isinstance(part, str) and _NEVER_A_MODEL.search(part) for part in path)
        named = named or any(map(leaves.is_extra_state, path))
        if not inside and not named and (tensors := collect_tensors(node)):
            tensors = {k: v for k, v in tensors.items() if not _NEVER_A_MODEL.fullmatch(k)}
            if tensors:
                models[path] = tensors
    # Generator states are bytes and metrics are single values; they count as a model only if
    # nothing else does. A script's own dict may have both, so one tensor must be of floats and have
    # several elements.
    floats = {p: tensors for p, tensors in models.items() if any(map(_is_float, tensors.values()))}
    large = {
        path: tensors
        for path, tensors in floats.items()
        if any(_is_float(leaf) and _count_elements(leaf) > 1 for leaf in tensors.values())
    }
    return large or floats or models


def _refuse_modules(tree: Any, where: str) -> None:
    """Refuse a file of whole modules, which ``torch.save(model, path)`` writes."""
    items = tree if isinstance(tree, dict) else {"": tree}
    for key, item in items.items():
        if isinstance(item, Call) and isinstance(item.get("_parameters"), dict):
            at = f" under {key!r}" if len(items) > 1 else ""  # beside what else it holds
            raise UnrecognisedError(
                where,
                f"holds a whole module{at}, of class {item.name}, and no state dict",
                "load it where its class can be imported, and save model.state_dict()",
            )


def _choose_model(where: str, models: Mapping[Path, Any], optimizers: Mapping[Path, Any]) -> Path:
    preferred = [path for path in models if path and MODEL_KEYS.fullmatch(str(path[-1]))]
    scattered = [path for path, state in models.items() if trees.is_in_several_files(state)]
    names = list_trained(map(format_path, models))
    own = [path for path in models if format_path(path) in names]
    # A model in several files comes first: a merged copy of it may be beside the rank files.
    for candidates in (scattered, preferred, own):
        if len(candidates) == 1:
            return candidates[0]
    sizes = {path: sum(map(_count_elements, state.values())) for path, state in models.items()}
    largest = max(sizes, key=lambda path: sizes[path], default=())
    if not preferred and () in sizes and (not largest or _is_incidental(sizes, largest)):
        return largest
    if models:
        raise _build_choice_error(where, models)
    if not optimizers:
        raise UnrecognisedError(where, "holds no state dict", _WHOLE)
    states = [optimizer.get("state") for optimizer in optimizers.values()]
    trained = [str(key) for state in states if isinstance(state, dict) for key in state]
    hint = SAVE_UNSAVED if find_unsaved(trained, ()) else _WHOLE
    raise UnrecognisedError(where, "holds an optimizer but no weights", hint)


def _build_choice_error(where: str, models: Mapping[Path, Mapping[str, Any]]) -> UnrecognisedError:
    # Models whose paths differ only in numbers may be the shards of one in an unknown layout, each
    # of which looks like a complete model.
    named = [format_path(path) or "the top level" for path in models]
    found = ", ".join(named[:_LISTED]) + (" ..." if len(named) > _LISTED else "")
    key = next(format_path(path) for path in models if path)
    if len({_DIGITS.sub("0", name) for name in named}) == 1:
        return UnrecognisedError(
            where,
            f"contains state dicts under {found}: several models, or the shards of one in a layout"
            " that reshard does not know",
            f"if each is a complete model, choose one with --key {key}; if they are shards, save"
            " the full model with the program that wrote them",
        )
    top = ", or that of the top level with --key ''" if () in models else ""
    return UnrecognisedError(
        where, f"contains state dicts under {found}", f"choose one with --key {key}{top}"
    )


def _is_incidental(sizes: Mapping[Path, int], largest: Path) -> bool:
    return len(sizes) == 2 and sizes[()] * _MIN_RATIO < sizes[largest]


def _is_float(leaf: Any) -> bool:
    if isinstance(leaf, GlobalTensor):
        return leaf.dtype.family not in _NO_FLOATS
    return any(chunk.dtype.family not in _NO_FLOATS for chunk in leaf.pieces.values())


def _count_elements(leaf: Any) -> int:
    if isinstance(leaf, GlobalTensor):
        return prod(leaf.shape)
    return int(sum(chunk.box.volume for chunk in leaf.pieces.values()))


def _resolve_key(tree: Any, where: str, key: str, models: Mapping[Path, Any]) -> Path:
    by_name = {format_path(path): path for path in models}
    if key in by_name:
        return by_name[key]
    path: Path = ()
    node = tree
    for part in key.split("."):
        keys = {str(k): k for k in node} if isinstance(node, dict) else {}
        if part not in keys:
            choices = ", ".join(keys) or "nothing"
            raise UsageError(
                f"--key {key}", f"{where} contains no {part!r} there; it contains {choices[:200]}"
            )
        path, node = (*path, keys[part]), node[keys[part]]
    if collect_tensors(node):
        return path
    inside = [inner for inner in models if inner[: len(path)] == path]
    if len(inside) == 1:
        return inside[0]
    known = abridge([format_path(found) for found in inside or models if found], _LISTED)
    raise UsageError(
        f"--key {key}",
        f"the value in {where} is not a state dict",
        f"choose one of {known}" if known else "",
    )


def list_trained(models: Iterable[str]) -> list[str]:
    """Return the names of several models without those of averages of others."""
    names = list(models)
    averages = {f"{name}{_AVERAGED}" for name in names}
    return [name for name in names if name not in averages]


def find_trained(parts: Sections) -> str:
    """Return the name of the trained weights if the model is an average of them, else "".

    Lightning's callback WeightAveraging puts the average in place of the model (Lightning 2.6
    ``callbacks/weight_averaging.py``, ``on_save_checkpoint``).
    """
    name = format_path(parts.model_path)
    trained = TRAINED if name == "state_dict" else name.removesuffix(_AVERAGED)
    return trained if trained in parts.other_models else ""


def parse_number(path: Path) -> int:
    """Return the number in a section's name (``optimizer_1``); 0 without one."""
    matches = (re.search(r"_(\d+)$", str(part)) for part in path)
    return next((int(match[1]) for match in matches if match), 0)


def _get_item(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part] if isinstance(tree, dict) else (as_list(tree) or [])[part]
    return tree


def _sort_rest(parts: Sections, tree: Any, models: Mapping[Path, Any]) -> None:
    taken = {*parts.optimizers, *parts.masters, *models}
    waiting: list[tuple[Path, Any]] = [((), tree)]
    while waiting:
        path, node = waiting.pop(0)
        for key, value in trees.list_items(node):
            at = (*path, key)
            if is_tensor(value) and str(key) in models.get(path, ()):
                continue
            if at in taken:
                continue
            inside = any(t[: len(at)] == at for t in taken)
            if inside or (len(at) == 1 and _classify(at) is None and _has_named_sections(value)):
                waiting.append((at, value))
            else:
                _sort_one(parts, at, value)


def _classify(path: Path) -> str | None:
    name = str(path[-1])
    return next((kind for kind, pattern in _NAMED.items() if pattern.fullmatch(name)), None)


def _has_named_sections(value: Any) -> bool:
    return isinstance(value, dict) and any(_classify((key,)) for key in value)


def _sort_one(parts: Sections, path: Path, value: Any) -> None:
    kind = _classify(path)
    if kind in _COUNTERS and type(value) is int and len(path) > 1 and path[0] not in _OF_FRAMEWORKS:
        # A script's own dict may count anything, so its value is also kept under its own name.
        parts.client[format_path(path)] = value
    own = path[1:] if path[0] == TRAIN_STATE and len(path) > 1 else path
    if kind is not None and (kind not in _COUNTERS or len(own) == 1):
        parts.keys.setdefault(kind, format_path(own))
    if kind == "step" and type(value) is int:
        parts.step = value if parts.step is None else max(parts.step, value)
    elif kind in ("samples", "skipped_steps") and type(value) is int:
        setattr(parts, kind, value)
    elif kind == "rng" and isinstance(value, dict) and type(value.get("step")) is int:
        parts.accumulated = value["step"]
        parts.rng = {name: state for name, state in value.items() if name != "step"} or None
    elif kind in ("scheduler", "scaler", "rng") and value and getattr(parts, kind) is None:
        while kind == "scheduler" and isinstance(value, dict) and len(value) == 1:
            (key,) = value  # slime saves {"lr_scheduler_state": {"lr_scheduler": ...}}
            if _classify((key,)) != kind or not isinstance(value[key], dict):
                break
            value = value[key]
        setattr(parts, kind, value)  # only the outermost: an inner one is the script's own
    else:
        parts.client[format_path(own)] = value
