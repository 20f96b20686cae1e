"""The Hugging Face model directory: sharded weights with an index, and its JSON files.

Sources: transformers 5 ``modeling_utils.py`` (file names, ``{"format": "pt"}``), huggingface_hub 1
``serialization/_base.py`` (greedy shards in state-dict order, ``metadata.total_size``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.dtypes import DType
from reshard.errors import (
    CorruptError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from reshard.files import small
from reshard.formats import safetensors, torch_file
from reshard.formats.place import Place
from reshard.formats.state_dict import assemble, parts, tree
from reshard.manifest import (
    BUFFER,
    PARAM,
    Entry,
    Manifest,
    Origin,
    OutputFile,
    Skeleton,
    SourceFile,
    keyed,
)
from reshard.model import ModelShapes
from reshard.pickles import trust

NAME = "huggingface"
METADATA = {"format": "pt"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_INDEX = re.compile(r"[\w.-]+\.(safetensors|bin)\.index(\.\w+)?\.json")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<of>\d+)\.safetensors")
_COMPANIONS = re.compile(
    r"(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|processor_config|video_preprocessor_config|image_processor_config|chat_template.*)\.json"
    r"|merges\.txt|vocab\.txt|.*\.(model|tiktoken|jinja)"
)
_MODEL_CODE = re.compile(r"(modeling|configuration|tokenization|processing|image_processing)_")
_EMBEDDING = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared)\.weight"
)


def detect(place: Place) -> bool:
    """Whether safetensors (or indexed .bin) weights lie at this file or directory."""
    if place.chosen:
        return _is_index(place.chosen) or place.chosen.endswith(".safetensors")
    return index_of(place) is not None or any(name.endswith(".safetensors") for name in place.files)


def index_of(place: Place) -> str | None:
    """The name of a directory's index of shards; of several that are no model's, none."""
    usual = next((name for name in _INDEXES if name in place.files), None)
    others = [name for name in place.files if _is_index(name)]
    return usual or (others[0] if len(others) == 1 else None)


def _is_index(name: str) -> bool:
    """Diffusers and adapters name theirs otherwise; a variant stands before ``json``."""
    return _INDEX.fullmatch(name) is not None


def read(place: Place) -> Manifest:
    """Read a directory through its index, a directory of one file, or one file.

    Raises:
        UnsafeError: the index names a file outside its directory.
        IncompleteError: a shard, or a tensor that the index promises, is missing.
        CorruptError: shards and index contradict each other.
        UnrecognisedError: several files and no index.
    """
    if place.chosen and not _is_index(place.chosen):
        return _read_file(place.path)
    if not place.chosen and "model.safetensors" in place.files:
        # as transformers chooses, before any .bin index
        return _read_file(place.files["model.safetensors"])
    index = place.chosen or index_of(place)
    if index is not None:
        return _read_indexed(place, place.files[index])
    found = [path for path in place.files.values() if path.suffix == ".safetensors"]
    if is_whole_set(place):
        return _read_unindexed(place.path, sorted(found))
    if len(found) != 1:
        raise UnrecognisedError(
            place,
            f"holds {len(found)} safetensors files and no index that says how they belong"
            f" together: {', '.join(file.name for file in found[:4])}",
            "fetch model.safetensors.index.json; or give one file, if it is a model by itself",
        )
    return _read_file(found[0])


def is_whole_set(place: Place) -> bool:
    """Whether the safetensors files are all shards of one save, by their names: 1 to N of N."""
    names = [name for name in place.files if name.endswith(".safetensors")]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    numbers = sorted(int(match["number"]) for match in shards)
    return (
        1 < len(names) == len(shards)
        and len({(match["stem"], match["of"]) for match in shards}) == 1
        and numbers == list(range(1, int(shards[0]["of"]) + 1))
    )


def _read_unindexed(directory: Path, shards: Sequence[Path]) -> Manifest:
    """All shards of a save whose index is lost: each says itself what it holds."""
    read = [_read_shard(path) for path in shards]
    entries = [entry for held, _, _ in read for entry in held]
    made = _manifest(directory, entries, {source.path: source for _, source, _ in read}, set())
    text = f"no model.safetensors.index.json: {len(shards)} shards belong together by their names"
    return replace(made, warnings=(*made.warnings, text))


def _read_file(path: Path) -> Manifest:
    entries, source, globals_ = _read_shard(path)
    return _manifest(path, entries, {source.path: source}, globals_)


def _read_indexed(place: Place, index: Path) -> Manifest:
    try:
        weight_map = json.loads(small(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        safe = all(_is_plain_name(name) for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(index, f"is not an index: no weight_map ({error})") from error
    if not safe:
        bad = next(name for name in names if not _is_plain_name(name))
        raise UnsafeError(
            index,
            f"names the file {bad!r}, which lies outside the directory",
            "the index was tampered with: do not use this checkpoint",
        )
    entries: list[Entry] = []
    sources: dict[str, SourceFile] = {}
    globals_: set[str] = set()
    for name in names:
        shard = place.files.get(name)
        if shard is None:
            raise IncompleteError(index, f"names {name}, which is missing", "fetch that file")
        held, source, seen = _read_shard(shard)
        _check_shard(index, shard, {entry.fqn for entry in held}, weight_map)
        entries += held
        sources[source.path] = source
        globals_ |= seen
    order = {fqn: position for position, fqn in enumerate(weight_map)}
    entries.sort(key=lambda entry: order[entry.fqn])
    return _manifest(index.parent, entries, sources, globals_)


def _is_plain_name(name: str) -> bool:
    return bool(name) and PurePosixPath(name).name == name and name not in (".", "..")


def _check_shard(index: Path, shard: Path, held: set[str], weight_map: Mapping[str, str]) -> None:
    promised = {fqn for fqn, name in weight_map.items() if name == shard.name}
    if promised - held:
        fqn = min(promised - held)
        raise IncompleteError(index, f"says that {shard.name} holds {fqn!r}; it does not")
    if held - promised:
        fqn = min(held - promised)
        raise StaleError(
            shard, f"holds {fqn!r}, which {index.name} does not list there: a stale index or shard"
        )


def _read_shard(path: Path) -> tuple[list[Entry], SourceFile, set[str]]:
    if path.suffix != ".safetensors":
        file = torch_file.read(path)
        state = parts.find(tree.of_file(file), str(path)).model
        held = [
            Entry(name, PARAM, tensor.dtype, tensor.shape, tensor.chunks)
            for name, leaf in state.items()
            if (tensor := tree.logical(leaf))
        ]
        return held, file.source(), file.globals
    shard = safetensors.read(path)
    entries = [
        Entry(name, PARAM, chunk.dtype, chunk.box.shape, (chunk,))
        for name, chunk in shard.tensors.items()
    ]
    return entries, shard.source, set()


def _manifest(
    path: Path, entries: list[Entry], sources: dict[str, SourceFile], globals_: set[str]
) -> Manifest:
    return Manifest(
        origin=Origin(
            format=NAME if path.is_dir() else "safetensors",
            path=str(path),
            detail=f"{len(sources)} file{'s' if len(sources) != 1 else ''}",
            mesh={"world": 1},
            precision=assemble.most_common_dtype(entries),
        ),
        entries=keyed(entries),
        files=sources,
        trained_dtypes={entry.fqn: entry.dtype for entry in entries},
        unknown_globals=trust.unknown(globals_),
        ordered=False,  # files and index are sorted by name, or by dtype and name
    )


def described(manifest: Manifest, model: ModelShapes) -> Manifest:
    """A model's weights in the model's order, its buffers known as such, its tied names listed.

    Raises:
        UsageError: the model is another one.
        UnsupportedError: the files hold both names of a tied tensor.
    """
    shapes = {**model.parameters, **model.buffers}
    held: dict[str, Entry] = {}
    for entry in manifest.entries.values():
        first = model.tied.get(entry.fqn, entry.fqn)
        wanted = shapes.get(first)
        if wanted != entry.shape:
            found = f"of {entry.shape}, in the model of {wanted}" if wanted else "not in the model"
            raise UsageError(model.source, f"is another model: {entry.fqn!r} is {found}")
        if first in held:
            raise UnsupportedError(
                manifest.origin.path,
                f"stores {held[first].fqn!r} and {entry.fqn!r}, which are one tensor in the model",
                "reshard merge compares them and writes one",
            )
        held[first] = replace(entry, kind=BUFFER if first in model.buffers else PARAM)
    lacking = [fqn for fqn in shapes if fqn not in held]
    if lacking:
        raise UsageError(model.source, f"is another model: no file holds {lacking[0]!r}")
    names = [*model.tied.items(), *((first, first) for first in held)]
    tied = {alias: held[first].fqn for alias, first in names if held[first].fqn != alias}
    return replace(manifest.with_entries(held[fqn] for fqn in shapes), tied=tied, ordered=True)


# ---------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Companions:
    """The files that make weights a model directory; ``config`` is parsed, the rest is copied."""

    directory: Path | None
    config: dict[str, Any] | None
    others: tuple[Path, ...]


def companions(hf_dir: Path | None, near: Sequence[Path]) -> Companions:
    """Config, tokenizer and processor files from ``hf_dir``, else from beside the checkpoint.

    Raises:
        UsageError: ``hf_dir`` was given and has no config.json.
        CorruptError: config.json is not JSON.
    """
    candidates = [hf_dir] if hf_dir else [*near, *(path / "huggingface" for path in near)]
    for place in candidates:
        config = place / "config.json"
        if config.is_file():
            if not hf_dir and not is_model_config(config):
                continue  # some other program's config.json
            parsed = json_object(config)
            others = [
                child
                for child in sorted(place.iterdir())
                if child.is_file() and _belongs(child.name, parsed)
            ]
            return Companions(place, parsed, tuple(others))
    if hf_dir:
        raise UsageError(hf_dir, "has no config.json", "--hf-dir needs a Hugging Face model")
    return Companions(None, None, ())


def is_model_config(path: Path) -> bool:
    """Whether a ``config.json`` is transformers'.

    Raises:
        CorruptError: it is not JSON.
    """
    return bool({"model_type", "architectures"} & json_object(path).keys())


def _belongs(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a file beside config.json is part of the model; code only where auto_map asks."""
    if name.endswith(".py"):
        return bool(config.get("auto_map")) and _MODEL_CODE.match(name) is not None
    return name != "config.json" and _COMPANIONS.fullmatch(name) is not None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CorruptError: it holds something else.
    """
    try:
        config = json.loads(small(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CorruptError(path, "is not a JSON object")
    return config


def matched_config(
    config: Mapping[str, Any], tensors: Sequence[tuple[Entry, DType]], dtype: str, *, untied: bool
) -> tuple[dict[str, Any], list[str]]:
    """The config with dtype and vocab_size as written, and what was changed."""
    updated = json.loads(json.dumps(config))
    changes: list[str] = []

    def put(section: dict[str, Any], key: str, value: Any) -> None:
        if section.get(key) != value:
            changes.append(f"config.json: {key} {section.get(key)!r} -> {value!r}")
            section[key] = value

    sections = [updated, *(value for value in updated.values() if isinstance(value, dict))]
    keyed_sections = [(s, k) for s in sections for k in ("dtype", "torch_dtype") if k in s]
    for section, key in keyed_sections or [(updated, "dtype")]:
        if key in section or section is updated:
            put(section, key, dtype)
    rows = {entry.shape[0] for entry, _ in tensors if _EMBEDDING.fullmatch(entry.fqn)}
    sized = [section for section in sections if "vocab_size" in section]
    if len(rows) == 1 and len(sized) == 1:
        put(sized[0], "vocab_size", rows.pop())
    if untied and updated.get("tie_word_embeddings") is not False:
        put(updated, "tie_word_embeddings", False)
    return updated, changes


def lay_out(
    tensors: Sequence[tuple[Entry, DType]],
    *,
    max_shard_bytes: int,
    texts: Mapping[str, bytes],
    metadata: Mapping[str, str],
) -> Skeleton:
    """Shards with their index (none for a single shard), and the given small files.

    Args:
        tensors: entries in state-dict order, each with the dtype to write.
        texts: name -> content of the files beside the weights.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    files = [OutputFile(name, len(data), ((0, data),)) for name, data in sorted(texts.items())]
    entries: list[Entry] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = single_file(name, shard, metadata)
        files += made.files
        entries += made.entries
        weight_map.update((entry.fqn, name) for entry, _ in shard)
    if len(shards) > 1:
        data = _index(weight_map, tensors)
        files.append(OutputFile(_INDEXES[0], len(data), ((0, data),)))
    return Skeleton(tuple(files), tuple(entries))


def single_file(
    name: str, tensors: Sequence[tuple[Entry, DType]], metadata: Mapping[str, str]
) -> Skeleton:
    """One safetensors file."""
    header, placed, nbytes = safetensors.lay_out(name, tensors, metadata)
    return Skeleton((OutputFile(name, nbytes, ((0, header),)),), tuple(placed))


def _shards(
    tensors: Iterable[tuple[Entry, DType]], limit: int
) -> Iterable[list[tuple[Entry, DType]]]:
    """Greedy, in order; a tensor larger than the limit has a shard of its own."""
    shard: list[tuple[Entry, DType]] = []
    size = 0
    for entry, dtype in tensors:
        nbytes = entry.numel * dtype.itemsize
        if nbytes > limit:
            yield [(entry, dtype)]
            continue
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((entry, dtype))
        size += nbytes
    if shard:
        yield shard


def _index(weight_map: Mapping[str, str], tensors: Iterable[tuple[Entry, DType]]) -> bytes:
    tensors = list(tensors)
    total = sum(entry.numel * dtype.itemsize for entry, dtype in tensors)
    parameters = sum(prod(entry.shape) for entry, _ in tensors)
    index = {
        "metadata": {"total_parameters": parameters, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json_text(index)


def json_text(value: Any) -> bytes:
    r"""JSON as transformers writes its files: two spaces, sorted keys, a newline at the end.

    Half of a surrogate pair, which a source's JSON may hold, is no UTF-8: all is escaped then.

    >>> json_text({"a": "\xe9"}), json_text({"a": "\ud800"})
    (b'{\n  "a": "\xc3\xa9"\n}\n', b'{\n  "a": "\\ud800"\n}\n')
    """
    try:
        return _json_lines(value, ascii_only=False).encode()
    except UnicodeEncodeError:
        return _json_lines(value, ascii_only=True).encode()


def _json_lines(value: Any, *, ascii_only: bool) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=ascii_only) + "\n"
