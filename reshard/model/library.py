"""Facts about a model type in transformers' own source, found without importing transformers.

Importing transformers takes seconds, and most models do not need it, because their names in memory
are those in files. In doubt the answer is yes, which costs no more than the import.

Source: transformers 5.24 ``conversion_mapping.py`` (keys are model types and class names),
``modeling_utils.py`` (``_tied_weights_keys``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reshard.system.optional import install

_TIED = re.compile(r"_tied_weights_keys\s*(?::[^=\n]*)?=\s*\{(.*?)\}", re.DOTALL)
_TIED_PAIR = re.compile(r"[\"']([^\"']+)[\"']\s*:\s*[\"']([^\"']+)[\"']")
# A key of a dict, or the subscript of an assignment. ``ast`` finds the same keys in 20 ms more.
_MAPPING_KEY = re.compile(r"""["']([\w-]+)["'](?=\s*:)|(?<=\w\[)["']([\w-]+)["'](?=\])""")
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
_LAYER = re.compile(r"\bnn\.ModuleList\(\s*\[\s*(\w+)\(")
_PART = re.compile(r"^( +)self\.(\w+) = (?:nn\.)?(\w+)\(", re.MULTILINE)
_OWNS_WEIGHTS = re.compile(r"Linear|Embedding|Conv\w+|\w*Norm|Parameter")
_INDENT = 8  # columns before a statement of ``__init__`` that no condition precedes
_WORD = re.compile(r"[A-Za-z_]\w*")
INSTALL = install("torch", "transformers")
HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
"""Input embeddings of causal language models, which `HEAD` may be tied to."""


def is_installed() -> bool:
    """Return whether transformers can be imported."""
    return _find_package() is not None


def may_be_converted(config: Mapping[str, Any]) -> bool:
    """Return whether transformers may hold a model in memory in another form than in files.

    Args:
        config: content of the model's ``config.json``.
    """
    keys = _read_mapping_keys()
    if not keys:
        return False
    named = {*_list_model_types(config), *_list_classes(config)}
    # If the source of a model is not found, the answer is yes.
    return bool(named & keys) or any(
        words is None or not words.isdisjoint(keys) for words in _read_models(config)
    )


def may_lack_weights(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a model may have weights in its layers of which no tensor is stored.

    Args:
        config: content of the model's ``config.json``.
        names: the tensors that are stored.
    """
    if _states_experts(config) and not any("expert" in name for name in names):
        return True
    numbers: set[str] = set()
    inside: set[tuple[str, ...]] = set()  # names inside a layer, which most layers share
    for name in names:
        words = name.split(".")
        place = next((place for place, word in enumerate(words) if word.isdigit()), None)
        if place is not None:
            numbers.add(words[place])
            inside.add(tuple(words[place + 1 :]))
    layers = config.get("num_hidden_layers")
    if type(layers) is int and len(numbers) < layers:
        return True
    stored = {path for words in inside for path in _list_paths(words)}
    kinds = (_list_layers(model_type) for model_type in _list_model_types(config))
    # A file of a model type may have layers of other parts (audio), so one kind must be complete.
    return any(kind and not any(parts <= stored for parts in kind) for kind in kinds)


def _states_experts(config: Mapping[str, Any]) -> bool:
    return any(
        _states_experts(value)
        if isinstance(value, dict)
        else "experts" in key and type(value) is int and value > 0
        for key, value in config.items()
    )


def _list_paths(words: Sequence[str]) -> Iterator[str]:
    """Yield the paths to a tensor and its modules, from the layer and from each list inside it.

    >>> list(_list_paths(["experts", "3", "up", "weight"]))
    ['experts', 'experts.3', 'experts.3.up', 'experts.3.up.weight', 'up', 'up.weight']
    """
    starts = (0, *(place + 1 for place, word in enumerate(words) if word.isdigit()))
    for start in starts:
        for end in range(start + 1, len(words) + 1):
            yield ".".join(words[start:end])


@cache
def _list_layers(model_type: str) -> list[set[str]]:
    text = _read_modeling(model_type) or ""
    pieces = _CLASS.split(text)[1:]  # the name and the body of each class in turn
    classes = dict(zip(pieces[::2], pieces[1::2], strict=True))
    layers = (_list_parts(classes, kind) for kind in set(_LAYER.findall(text)))
    return [parts for parts in layers if parts]


def _list_parts(classes: Mapping[str, str], kind: str) -> set[str]:
    others = {name: body for name, body in classes.items() if name != kind}
    assigned = _PART.findall(classes.get(kind, ""))
    times = Counter(part for _, part, _ in assigned)
    paths = set()
    for indent, part, its_kind in assigned:
        if its_kind in others:
            inner = {f"{part}.{path}" for path in _list_parts(others, its_kind)}
        else:
            inner = {part} if _OWNS_WEIGHTS.fullmatch(its_kind) else set()
        if len(indent) == _INDENT:
            paths |= inner
        elif inner and times[part] > 1:  # each branch of a condition assigns it
            paths.add(part)
    return paths


def may_be_inside(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a model may be only a part of what is stored (TRL's ``v_head`` beside it).

    Args:
        config: content of the model's ``config.json``.
        names: the tensors that are stored.
    """
    sources = [words for words in _read_models(config) if words is not None]
    firsts = {name.partition(".")[0] for name in names}
    return bool(sources) and not firsts <= _read_heads().union(*sources)


def may_be_tied(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a stored tensor may be an alias that transformers leaves out of files.

    Args:
        config: content of the model's ``config.json``.
        names: the tensors that are stored. Heads of `EMBEDDINGS` do not count: `weights.find_heads`
            finds them without a model.
    """
    patterns: set[str] = set()
    for model_type in _list_model_types(config):
        text = _read_modeling(model_type)
        for block in _TIED.findall(text or ""):
            pairs = _TIED_PAIR.findall(block)
            patterns |= {alias for alias, kept in pairs if not _is_known_head(alias, kept)}
    found = [re.compile(pattern) for pattern in patterns]
    return any(pattern.search(name) for name in names for pattern in found)


def _is_known_head(alias: str, kept: str) -> bool:
    prefix = alias.removesuffix(HEAD)
    return alias == prefix + HEAD and kept.removeprefix(prefix) in EMBEDDINGS


@cache
def _find_package() -> Path | None:
    """Return the folder of the installed transformers; finding it runs none of its code."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


@cache
def _read_mapping_keys() -> frozenset[str]:
    package = _find_package()
    path = package / "conversion_mapping.py" if package else None
    if path is None or not path.is_file():
        return frozenset()
    # The mapping is a dict literal, to which later statements assign further keys.
    found = _MAPPING_KEY.findall(path.read_text(encoding="utf-8"))
    return frozenset(key or subscript for key, subscript in found)


def _list_model_types(config: Mapping[str, Any]) -> Iterator[str]:
    found = config.get("model_type")
    if isinstance(found, str):
        yield found
    for value in config.values():
        if isinstance(value, dict):
            yield from _list_model_types(value)


def _list_classes(config: Mapping[str, Any]) -> list[str]:
    classes = config.get("architectures")
    return [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []


def _read_models(config: Mapping[str, Any]) -> Iterator[frozenset[str] | None]:
    for model_type in _list_model_types(config):
        text = _read_modeling(model_type)
        yield None if text is None else frozenset(_WORD.findall(text))


@cache
def _read_heads() -> frozenset[str]:
    # Model types share heads: ``score`` is in GenericForSequenceClassification (transformers 5).
    package = _find_package()
    path = package and package / "modeling_layers.py"
    return frozenset(_WORD.findall(path.read_text("utf-8")) if path and path.is_file() else ())


@cache
def _read_modeling(model_type: str) -> str | None:
    package = _find_package()
    if package is None or not re.fullmatch(r"[\w-]+", model_type):
        return None
    name = model_type.replace("-", "_")
    for folder in (name, name.removesuffix("_text")):
        path = package / "models" / folder / f"modeling_{folder}.py"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
