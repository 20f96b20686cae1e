"""Checks of numbers that a file states: ranks, layers, elements, indices.

Without an upper bound, a checkpoint of a few bytes could cause a trillion operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.errors import ALTERED, CorruptError, shown

MOST = 1 << 20  # upper bound of ranks, layers and experts
_MOST_DIGITS = 9  # digits of an index
# Keys of a model's config that transformers' models cannot do without, so that 0 is impossible.
_SIZES = frozenset(
    "hidden_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads"
    " intermediate_size num_layers n_layer n_layers n_head n_heads n_embd d_model d_ff".split()
)
_MAY_BE_ZERO = frozenset(("intermediate_size", "d_ff"))  # of an MLP without elements
_MOST_LAYERS = 1 << 10  # transformers builds one in 20 ms; no published model has more than 1000
_LIMITS = (  # of the numbers under other keys of a config, by their names
    (re.compile(r"(^|_)layers?$"), _MOST_LAYERS),
    (re.compile(r"(^|_)(heads?|experts)$"), 1 << 16),
    (re.compile(r"(^|_)((hidden|intermediate|vocab|inner|ffn)_size|dims?|n_embd|d_\w+)$"), 1 << 31),
)


def check_count(where: object, what: str, value: Any, *, default: int | None = None) -> int:
    """Return a value if it is a number of at least 1.

    Args:
        what: the thing that is counted, for the message.
        default: the number to return in place of None or 0; None accepts neither.

    Raises:
        CorruptError: the value is not a number, or out of range.
    """
    if default is not None and (value is None or value == 0):
        return default
    if type(value) is not int or not 1 <= value <= MOST:
        raise CorruptError(
            where,
            f"states {shown(value)} for {what}; expected a number from 1 to {MOST}",
            ALTERED,
        )
    return value


def check_config(where: object, config: Mapping[str, Any]) -> None:
    """Check the sizes that the config of a transformers model states, also in configs inside it.

    Raises:
        CorruptError: one is not an integer, is zero or negative, or is larger than any model's.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_config(where, value)
        elif value is None or not isinstance(key, str):
            continue  # a class of transformers can derive a size that its config leaves out
        elif most := next((most for name, most in _LIMITS if name.search(key)), None):
            is_size = key in _SIZES and not isinstance(value, list)
            least = 0 if key in _MAY_BE_ZERO else 1
            numbers = value if isinstance(value, list) else [value]  # or one for each layer
            for number in numbers:
                if is_size and type(number) is not int:
                    expected = "an integer"
                elif isinstance(number, (int, float)) and not number <= most:
                    expected = f"at most {most}"
                elif is_size and number < least:
                    expected = f"at least {least}"
                else:
                    continue
                raise CorruptError(
                    where, f"states {shown(number)} for {key}; expected {expected}", ALTERED
                )


def parse_index(text: str) -> int | None:
    """Return the value of an index in a name or a document; None if the text is not an index.

    A text of more than nine digits is not an index. (Python raises an error for more than 4300.)

    >>> parse_index("007"), parse_index("-1"), parse_index("9" * 5000)
    (7, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None
