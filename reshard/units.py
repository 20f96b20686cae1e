"""Sizes, counts and lists as text for people, and their arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isqrt
from typing import Any

from reshard.errors import UsageError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_LONGEST = 24  # maximum characters of a size
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size: ``5GB`` (decimal, like Hugging Face), ``512MiB`` or a number.

    >>> parse_bytes("5GB", "--max-shard-size"), parse_bytes("1KiB", "x")
    (5000000000, 1024)

    Raises:
        UsageError: the text is not a size, or less than a byte.
    """
    match = _SIZE.fullmatch(text)
    if match is not None and len(text) <= _LONGEST:
        factor = _FACTORS[match[2].upper()]
        if match[3]:
            factor = 1024 ** "_KMGT".index(match[2].upper() or "_")
        nbytes = int(float(match[1]) * factor)
        if nbytes:
            return nbytes
    raise UsageError(f"{option} {text}", "is not a size", "write e.g. 5GB or 512MiB")


def show_bytes(nbytes: float) -> str:
    """Return a size as text with three digits.

    >>> show_bytes(1_234_000)
    '1.23 MB'
    """
    number, unit = _scaled(nbytes, ("B", "KB", "MB", "GB", "TB"))
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"


def show_count(count: float) -> str:
    """Return a number of parameters as text.

    >>> show_count(1_234_000_000)
    '1.23 B'
    """
    number, unit = _scaled(count, ("", "K", "M", "B", "T"))
    return f"{number:.3g} {unit}".strip()


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, singular or plural.

    >>> counted(1, "file"), counted(2, "copy", "copies")
    ('1 file', '2 copies')
    """
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def either(items: Sequence[object]) -> str:
    """Return several choices as a part of a sentence.

    >>> either([2, 3, 4]), either([10, 15]), either([1])
    ('2, 3 or 4', '10 or 15', '1')
    """
    texts = [str(item) for item in items]
    return " or ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def round_up(number: int, multiple: int) -> int:
    """Return a number rounded up to a multiple: a size with its padding.

    >>> round_up(101, 8), round_up(104, 8)
    (104, 104)
    """
    return -(-number // multiple) * multiple


def find_nearest_divisors(number: int, near: int) -> list[int]:
    """Return the four divisors of a number that are nearest to another one, in ascending order.

    >>> find_nearest_divisors(12, 5), find_nearest_divisors(7, 5)
    ([2, 3, 4, 6], [1, 7])
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    divisors = {divisor for n in small for divisor in (n, number // n)}
    return sorted(sorted(divisors, key=lambda size: abs(size - near))[:4])


def abridge(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, and the number of further ones.

    >>> abridge(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def make_natural_key(name: str) -> list[Any]:
    """Return a sort key that orders the numbers in names by value.

    >>> sorted(["v10", "v9"], key=make_natural_key)
    ['v9', 'v10']
    """
    # Text and numbers alternate, so that a part is only compared with one of its own kind.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def shorten(value: object, most: int) -> str:
    """Return a value as text, cut after ``most`` characters.

    >>> shorten("a long text", 8)
    'a lon...'
    """
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _scaled(value: float, names: tuple[str, ...]) -> tuple[float, str]:
    *small, largest = names
    for name in small:
        if value < 1000:
            return value, name
        value /= 1000
    return value, largest
