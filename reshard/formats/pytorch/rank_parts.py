"""Join plain tensors of which every rank saved its own part, by the cuts in the user's rules.

Expert-parallel ranks keep their experts outside of the mesh, for example: no file states that these
are parts, and not copies of one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reshard.core.manifest import PARAM, Entry
from reshard.formats.huggingface.slices import load_rules
from reshard.layouts.model_parallel.shards import gather
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import LocalTensors, ParsedTree, walk
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.layouts.model_parallel.shards import Split

_DEPTH = 6  # of the containers with tensors: the slots of a parameter among several parts


def join_by_rules(tree: ParsedTree, rules: Path | None) -> None:
    """Replace the parts in a tree by whole tensors; an optimizer's slots are cut as its weights."""
    dicts = [(path, node) for path, node in walk(tree.root, _DEPTH) if isinstance(node, dict)]
    names = {part for path, node in dicts for part in (*path, *node) if isinstance(part, str)}
    table = load_rules(rules, names)
    if table is None:
        return
    splits = {name: m.rule.split(gated=True) for name in names if (m := table.find(name, {}))}
    joined = 0
    for path, node in dicts:
        for key, leaf in node.items():
            name = next((part for part in (*path, key) if part in splits), None)
            if name is not None and isinstance(leaf, LocalTensors) and len(leaf.pieces) > 1:
                whole = _join(name, leaf, splits[name])
                node[key] = whole or leaf
                joined += whole is not None
    if joined:
        tree.notes.append(f"{counted(joined, 'plain tensor')} joined as {rules} states")


def _join(name: str, leaf: LocalTensors, split: Split) -> GlobalTensor | None:
    pieces = [
        Entry(name, PARAM, chunk.dtype, chunk.box.shape, (chunk,))
        for _, chunk in sorted(leaf.pieces.items())
    ]
    if split.dim is None or split.dim >= len(pieces[0].shape):  # copies, as the count of steps
        return None
    whole = gather(pieces, split)
    return GlobalTensor(whole.dtype, whole.shape, tuple(whole.chunks))
