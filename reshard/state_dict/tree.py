"""Join the nested state of all ranks' files: dicts as saved, each tensor replaced by its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.containers.numpy_arrays import Array
from reshard.containers.pickles.values import Call, rebuild_dict, rebuild_sequence
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core.box import Index
from reshard.core.chunks import Chunk
from reshard.core.manifest import SourceFile
from reshard.errors import MIXED, TWO_RUNS, CorruptError, StaleError, shown
from reshard.quantised import moments
from reshard.state_dict import sharded_reader
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.system.paths import as_path

_SAVER_DEPTH = 6  # of the containers in which a file's sharded tensors are looked for


@dataclass(frozen=True, slots=True)
class LocalTensors:
    """Plain tensors under one key, by rank: copies of one tensor, or each rank's slice of it.

    The files do not state which; the tensor's global shape decides.

    Args:
        array: the pickle's description of the numpy array that the tensor is; None for tensors.
    """

    pieces: Mapping[int, Chunk]
    array: Call | None = None

    def shapes(self) -> set[Index]:
        """Return the shapes that the ranks have."""
        return {chunk.box.shape for chunk in self.pieces.values()}

    def as_copies(self) -> GlobalTensor | None:
        """Return the tensor of which every rank has a copy; None if shapes or dtypes differ."""
        first = next(iter(self.pieces.values()))
        if any((c.box, c.dtype) != (first.box, first.dtype) for c in self.pieces.values()):
            return None
        return GlobalTensor(first.dtype, first.box.shape, tuple(self.pieces.values()))


# Path -> the value that differs and its file, the first rank's value and its file.
Differing = dict[tuple[Any, ...], tuple[Any, str, Any, str]]


@dataclass(slots=True)
class ParsedTree:
    """The tree of all ranks, before any section is identified, and what is known about the files.

    Args:
        globals: names that the pickles refer to.
        differing: where plain values of the ranks differ, and how.
        plain_is_buffer: whether a plain tensor beside sharded ones is a buffer.
        ordered: whether weights are in the model's order.
        proved: whether the files state how large each tensor is.
        saved_modules: ``modules_to_save`` of PEFT's configuration beside an adapter.
        modules: files with the weights of one module each -> the first part of the names that these
            weights have in the whole model.
        directory: the directory to which the program saved, if the files state it.
    """

    root: Any
    where: str
    files: dict[str, SourceFile]
    world: int = 1
    globals: set[str] = field(default_factory=set)
    differing: Differing = field(default_factory=dict)
    plain_is_buffer: bool = True
    ordered: bool = True
    proved: bool = True
    saved_modules: Sequence[str] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    notes: list[str] = field(default_factory=list)


def as_global(leaf: Any) -> GlobalTensor | None:
    """Return the tensor that a leaf is, if its global shape is certain."""
    return (
        leaf.as_copies()
        if isinstance(leaf, LocalTensors)
        else leaf
        if isinstance(leaf, GlobalTensor)
        else None
    )


def is_tensor(value: Any) -> bool:
    """Return whether a leaf is a tensor of either kind."""
    return isinstance(value, (GlobalTensor, LocalTensors))


def convert_file(file: TorchFile, rank: int = 0) -> Any:
    """Return the object that one rank saved, with its tensors described.

    Raises:
        UnsupportedError: a tensor is not plain and strided.
        CorruptError: containers are nested too deep.
    """
    try:
        return _convert(file.root, lambda value: _convert_leaf(file, rank, value), {})
    except RecursionError as error:
        raise CorruptError(file.path, "its containers are nested too deep") from error


def find_saver(file: TorchFile) -> sharded_reader.Saver | None:
    """Return what the sharded tensors of a file state about its rank; None if they do not."""
    root = file.root if isinstance(file.root, (dict, list, tuple)) else ()
    savers = (
        saver
        for _, node in walk(root, _SAVER_DEPTH)
        for value in (node.values() if isinstance(node, dict) else node)
        if (saver := sharded_reader.read_saver(value))
    )
    return max(savers, key=lambda saver: saver.needed, default=None)


def _convert_leaf(file: TorchFile, rank: int, value: Any) -> Any:
    if isinstance(value, Tensor):
        return LocalTensors({rank: value.chunk}, value.call if isinstance(value, Array) else None)
    if isinstance(value, Call):
        values = moments.describe(value)
        if values is not None:
            return LocalTensors({rank: values})
        described = sharded_reader.describe_shards(file, value)
        return value if described is None else described
    return value


def _convert(value: Any, leaf: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """Copy a container; a shared one is converted once, whatever refers to it."""
    if not isinstance(value, (dict, list, tuple)):
        return leaf(value)
    # The whole tree stays alive meanwhile, so an id belongs to one container.
    if id(value) not in done:
        done[id(value)] = None  # a cycle ends here
        if isinstance(value, dict):
            items = {key: _convert(item, leaf, done) for key, item in value.items()}
            done[id(value)] = rebuild_dict(value, items)
        else:
            elements = (_convert(item, leaf, done) for item in value)
            done[id(value)] = rebuild_sequence(value, elements)
    return done[id(value)]


def join_trees(trees: Sequence[Any], names: Sequence[str]) -> tuple[Any, Differing]:
    """Join the trees that the ranks saved, in rank order.

    Returns:
        The tree, and the plain values that differ.

    Raises:
        CorruptError: ranks disagree on a tensor's shape, dtype or kind.
        StaleError: ranks divided a tensor in different ways.
    """
    joiner = _Joiner()
    try:
        root = joiner.join(list(zip(trees, names, strict=True)), ())
    except RecursionError as error:
        raise CorruptError(names[0], "its containers are nested too deep") from error
    return root, joiner.differing


class _Joiner:
    """Walks all ranks' trees at once; a shared container is joined once."""

    def __init__(self) -> None:
        self.differing: Differing = {}
        self._done: dict[tuple[int, ...], Any] = {}

    def join(self, values: list[tuple[Any, str]], path: tuple[Any, ...]) -> Any:
        first = values[0][0]
        if len(values) == 1:
            return first
        if isinstance(first, (dict, list, tuple)):
            identity = tuple(id(value) for value, _ in values)
            if identity not in self._done:
                self._done[identity] = None  # a cycle ends here
                self._done[identity] = self._join_containers(values, path)
            return self._done[identity]
        if any(is_tensor(value) for value, _ in values):
            return _join_tensors(values, path)
        if other := next((each for each in values[1:] if _differs(first, each[0])), None):
            self.differing[path] = (*other, *values[0])
        return first

    def _join_containers(self, values: list[tuple[Any, str]], path: tuple[Any, ...]) -> Any:
        first = values[0][0]
        if isinstance(first, dict) and all(isinstance(value, dict) for value, _ in values):
            # Keys may differ: an FSDP 1 rank has no state of parameters that it has no part of.
            keys = dict.fromkeys(key for value, _ in values for key in value)
            items = {
                key: self.join([(v[key], name) for v, name in values if key in v], (*path, key))
                for key in keys
            }
            return rebuild_dict(first, items)
        others = (v for v in values if type(v[0]) is not type(first) or len(v[0]) != len(first))
        if not (other := next(others, None)):
            elements = (
                self.join([(value[i], name) for value, name in values], (*path, i))
                for i in range(len(first))
            )
            return rebuild_sequence(first, elements)
        self.differing[path] = (*other, *values[0])
        return first


def _differs(a: Any, b: Any) -> bool:
    """Return whether two plain values differ; objects are compared by class only."""
    if isinstance(a, Call) and isinstance(b, Call):
        return a.name != b.name
    return bool(a != b) and not (a != a and b != b)  # noqa: PLR0124 - two NaN are equal here


def _join_tensors(values: list[tuple[Any, str]], path: tuple[Any, ...]) -> Any:
    first, first_name = next((value, name) for value, name in values if is_tensor(value))
    chunks: list[Chunk] = []
    pieces: dict[int, Chunk] = {}
    for value, name in values:
        same = type(value) is type(first)
        if same and isinstance(first, GlobalTensor):
            same = value.shape == first.shape and _have_one_dtype(value, first)
        if not same:
            raise CorruptError(
                name,
                f"{format_path(path)!r} is {_describe(value)}, but {_describe(first)} in"
                f" {first_name}",
                MIXED,
            )
        if isinstance(value, GlobalTensor) and value.division != first.division:
            raise StaleError(
                name,
                f"has {format_path(path)!r} {value.division}, but {as_path(first_name).name} has it"
                f" {first.division}",
                TWO_RUNS,
            )
        if isinstance(value, GlobalTensor):
            chunks += value.chunks
        else:
            pieces.update(value.pieces)
    if isinstance(first, GlobalTensor):
        dtype = moments.choose_dtype(chunks, first.dtype)
        return replace(first, dtype=dtype, chunks=tuple(chunks))
    return LocalTensors(pieces)


def _have_one_dtype(a: GlobalTensor, b: GlobalTensor) -> bool:
    # torchao stores no codes of a shard that is small.
    return a.dtype == b.dtype or moments.has_codes((*a.chunks, *b.chunks))


def _describe(value: Any) -> str:
    if isinstance(value, GlobalTensor):
        return f"a sharded {value.dtype} {value.shape}"
    if isinstance(value, LocalTensors):
        return f"a plain tensor of {sorted(value.shapes())}"
    return shown(value)


def format_path(path: Sequence[Any]) -> str:
    """Return a path as dotted text."""
    return ".".join(map(str, path))


def collect_tensors(tree: Any) -> dict[str, Any]:
    """Return the tensors of one dict by name; nothing if it is not a dict.

    Raises:
        CorruptError: two keys are equal as text.
    """
    tensors: dict[str, Any] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            if is_tensor(value):
                if str(key) in tensors:
                    raise CorruptError(str(key), "is the name of two tensors in one state dict")
                tensors[str(key)] = value
    return tensors


def is_in_several_files(state: Mapping[str, Any]) -> bool:
    """Return whether the tensors of a state dict are stored in more than one file."""
    files: set[str] = set()
    for leaf in state.values():
        chunks = leaf.chunks if isinstance(leaf, GlobalTensor) else leaf.pieces.values()
        files.update(chunk.file for chunk in chunks)
    return len(files) > 1


def as_list(value: Any) -> list[Any] | None:
    """Return a list, also if it was saved as a dict of positions, as DCP flattens it."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return [value[key] for key in sorted(value)]
    return None


def list_items(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys, or the positions, of a container's items, with the items."""
    return node.items() if isinstance(node, dict) else enumerate(as_list(node) or ())


def walk(tree: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every container down to a depth, the root first, each once, with its first path."""
    seen: set[int] = set()
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    for path, node in waiting:  # the list grows meanwhile, so containers come level by level
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        if len(path) < depth:
            waiting += [
                ((*path, key), value)
                for key, value in list_items(node)
                if isinstance(value, (dict, list, tuple))
            ]
