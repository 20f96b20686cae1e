"""Lines of a table's ``config`` and ``args``: constants, or fields that stand for a model's traits.

    {hidden}                    the trait; an error if the source does not state it
    {window?}                   the trait, which may be null
    {shared_ffn/expert_ffn}     the first trait divided by the second
    {dense_layers|count_first}  the trait in another form, by one of `FORMS`
    {dense_layers|others}       the layers that are not in it; see `FORMS_OF_LAYERS`
    {rope_scaling.factor=1}     an item of a trait that is a mapping; 1 if the mapping lacks it

Each line works in both directions: `Field.fill` returns the value that a file states for a model's
traits, and `Field.read` the trait that a file's value states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.errors import UsageError
from reshard.layouts.model_parallel.traits import Traits

_FIELD = re.compile(
    r"\{(?P<trait>[a-z_0-9]+)"
    r"(?:/(?P<divisor>[a-z_0-9]+)|\|(?P<form>[a-z_0-9]+)|\.(?P<item>[a-z_0-9]+)=(?P<default>[^}]*))?"
    r"(?P<optional>\?)?\}"
)
LISTS = ("list", "opposite")  # forms with 0 or 1 for each layer
KIND = "rope_type"  # the item without which a mapping such as rope_scaling has no meaning
# Traits that `Traits` computes -> the trait from which it does, which a file's value states.
_INVERSE = {"rows": "vocab", "shared_width": "shared_ffn"}
_ALIKE = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}


class FieldForm(NamedTuple):
    """A form of a trait's value in a file.

    Args:
        write: returns the file's value for the trait's; raises ValueError if it has none.
        read: returns the trait's value for the file's; raises ValueError if there is none.
        is_null: whether null stands for a value of the trait.
    """

    write: Callable[..., Any]
    read: Callable[..., Any]
    is_null: bool = False


def _count_first(numbers: tuple[int, ...]) -> int:
    if tuple(numbers) != tuple(range(len(numbers))):
        raise ValueError(f"layers {list(numbers)} are not the first layers of the model")
    return len(numbers)


def _list_others(numbers: Iterable[int], layers: int | None) -> list[int]:
    given = set(numbers)
    return [number for number in range(layers or 0) if number not in given]


def _find_period(flags: tuple[int, ...]) -> list[int]:
    flags = tuple(flags)
    lengths = range(1, len(flags) + 1)
    return list(next(flags[:n] for n in lengths if flags[n:] == flags[: len(flags) - n]))


def _make_layer_types(*types: str) -> FieldForm:
    """Return the form of a list of numbers that transformers writes as these words."""

    def read(words: list[str]) -> tuple[int, ...]:
        for word in words:
            if word not in types:
                raise ValueError(f"layers of type {word!r} are none of {' and '.join(types)}")
        return tuple(map(types.index, words))

    return FieldForm(lambda flags: [types[flag] for flag in flags], read)


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTERS = {word: letter for letter, word in _BLOCKS.items()} | {"mamba": "M", "attention": "*"}


def _write_blocks(pattern: str) -> list[str]:
    return [_BLOCKS[letter] for letter in pattern]


def _read_blocks(words: list[str]) -> str:
    other = [word for word in words if word not in _LETTERS]
    if other:
        raise ValueError(f"layers of {other[0]!r}")
    return "".join(_LETTERS[word] for word in words)


FORMS: Mapping[str, FieldForm] = {
    # The letters of a hybrid model's layers, as words of transformers.
    "blocks": FieldForm(_write_blocks, _read_blocks),
    # The number of dense layers before those with experts.
    "count_first": FieldForm(_count_first, lambda count: tuple(range(count or 0))),
    # The number of the last layer.
    "last": FieldForm(lambda count: count - 1, lambda number: number + 1),
    # A flag that states the opposite.
    "not": FieldForm(lambda value: not value, lambda value: not value),
    # A number; the file has null for zero.
    "or_none": FieldForm(lambda value: value or None, lambda value: value or 0, is_null=True),
    # A factor; the file has null for one.
    "not_one": FieldForm(
        lambda value: None if value == 1 else value,
        lambda value: 1.0 if value is None else value,
        is_null=True,
    ),
    # One value; the file has a list of one.
    "in_list": FieldForm(lambda value: [value], lambda value: value[0]),
    # A list with 0 or 1 for each layer: as it is, with the opposite meaning, and its shortest part
    # of which the list consists.
    "list": FieldForm(list, tuple),
    "opposite": FieldForm(
        lambda flags: [1 - flag for flag in flags], lambda flags: tuple(1 - flag for flag in flags)
    ),
    "period": FieldForm(_find_period, tuple),
    # Such a list in transformers' words: 1 is a layer with a sliding window,
    "layer_types": _make_layer_types("full_attention", "sliding_attention"),
    # without rotary positions,
    "chunk_types": _make_layer_types("chunked_attention", "full_attention"),
    # or of linear attention.
    "linear_types": _make_layer_types("full_attention", "linear_attention"),
}


_DENSE, _SPARSE = "dense", "sparse"


def _write_dense_types(numbers: Iterable[int], layers: int | None) -> list[str]:
    given = set(numbers)
    return [_DENSE if number in given else _SPARSE for number in range(layers or 0)]


def _read_dense_types(words: list[str], _layers: int | None) -> tuple[int, ...]:
    for word in words:
        if word not in (_DENSE, _SPARSE):
            raise ValueError(f"layers of type {word!r} are none of {_DENSE} and {_SPARSE}")
    return tuple(number for number, word in enumerate(words) if word == _DENSE)


# Forms of a list of layers' numbers that also need the number of layers, in both directions.
FORMS_OF_LAYERS: Mapping[str, FieldForm] = {
    # The numbers of all other layers.
    "others": FieldForm(_list_others, lambda numbers, layers: tuple(_list_others(numbers, layers))),
    # A word for each layer: whether its feed-forward layer has experts.
    "dense_types": FieldForm(_write_dense_types, _read_dense_types),
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field that stands for a trait, in the value of a key; see the module.

    Args:
        is_optional: whether null is a value of the key.
    """

    trait: str
    divisor: str = ""
    form: str = ""
    item: str = ""
    default: Any = None
    is_optional: bool = False

    @property
    def own(self) -> str:
        """The name of the trait that `read` returns."""
        return _INVERSE.get(self.trait, self.trait)

    @property
    def needs_others(self) -> bool:
        """Whether `read` needs a trait that another line states."""
        return bool(self.divisor) or self.form in FORMS_OF_LAYERS

    @property
    def _has_null(self) -> bool:
        return self.form in FORMS and FORMS[self.form].is_null

    def get(self, traits: Traits) -> Any:
        """Return the value that a file states for the traits of a model; None if unknown.

        Raises:
            ValueError: the file has no value for the trait.
        """
        value = traits.get(self.trait)
        if self.item:
            return (value or {}).get(self.item, self.default)
        if value is None:
            return None
        if self.divisor:
            divisor = traits.get(self.divisor)
            if not divisor or value % divisor:
                raise ValueError(f"{self.trait} {value} is not a multiple of {divisor}")
            return value // divisor
        if self.form in FORMS_OF_LAYERS:
            return FORMS_OF_LAYERS[self.form].write(value, traits.layers)
        value = FORMS[self.form].write(value) if self.form else value
        if isinstance(value, Mapping):
            return dict(value)
        return list(value) if isinstance(value, tuple) else value  # as JSON has it

    def fill(self, key: str, traits: Traits) -> Any:
        """Return the value of a key for the traits of a model.

        Raises:
            UsageError: the source does not state the trait, or the key cannot have its value.
        """
        try:
            value = self.get(traits)
        except ValueError as error:
            raise UsageError(traits.source, f"cannot have its {key}: {error}") from error
        may_be_null = self.is_optional or self.item or self._has_null
        if value is None and not may_be_null:
            raise UsageError(
                traits.source,
                f"does not state the model's {self.trait}, which {key} requires",
                "pass the config: --hf-dir DIR",
            )
        return value

    def fill_if_known(self, traits: Traits) -> Any:
        """Return the value of a key; None if the source does not state the trait."""
        try:
            return self.get(traits)
        except ValueError:
            return None

    def read(self, value: Any, known: Callable[[str], Any]) -> Any:
        """Return the trait that a file's value states.

        Args:
            known: returns a trait that other lines have given.
        """
        if self.item:
            mapping = dict(known(self.trait) or {})
            # The default of `KIND` means that there is no such mapping: see `Family.complete`.
            if value is not None and (self.item != KIND or value != self.default):
                mapping[self.item] = value
            return mapping or None
        if value is None and not self._has_null:
            return None
        if self.form in FORMS_OF_LAYERS:
            return FORMS_OF_LAYERS[self.form].read(value, known("layers"))
        if self.divisor:
            divisor = known(self.divisor)
            return value * divisor if divisor else None
        read = FORMS[self.form].read if self.form else _read_plain
        return read(normalize_name(value) if self.trait == "activation" else value)


def _read_plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def normalize_name(value: Any) -> Any:
    """Return the usual name of an activation function that has several."""
    return _ALIKE.get(value, value) if isinstance(value, str) else value


def _parse_default(text: str) -> Any:
    # Imported late, as in `rules`: commands that need no table start without it.
    import yaml  # type: ignore[import-untyped]

    return yaml.safe_load(text)


@lru_cache(maxsize=1024)
def _parse_text(text: str) -> Field | None:
    match = _FIELD.fullmatch(text)
    if match is None:
        return None
    default = match["default"]
    return Field(
        match["trait"],
        match["divisor"] or "",
        match["form"] or "",
        match["item"] or "",
        _parse_default(default) if default else None,
        is_optional=match["optional"] is not None,
    )


def parse_field(value: Any) -> Field | None:
    """Return the field that a table's value is; None for a constant."""
    return _parse_text(value) if isinstance(value, str) else None


def list_fields(
    lines: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, Field, Any]]:
    """Yield each key that a file states and a table has a field for.

    Lines that need the traits of other lines come last.
    """
    found = [
        (key, line, values[key])
        for key, text in lines.items()
        if key in values and (line := parse_field(text)) is not None
    ]
    yield from sorted(found, key=lambda item: item[1].needs_others)
