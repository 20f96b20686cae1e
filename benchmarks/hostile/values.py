"""Damage bytes, numbers, texts and JSON; each function takes a `Random` and returns bytes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

Damage = Callable[[Random, bytes], bytes]

NUMBERS = (
    *(
        0,
        1,
        -1,
        2,
        7,
        127,
        128,
        255,
        256,
        65535,
        65536,
        -(2**31),
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
    ),
    *(
        2**40,
        2**53 + 1,
        2**62,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64 - 1,
        2**64,
        2**100,
        10**30,
        -(10**30),
    ),
)
TEXTS = (
    *(
        "",
        ".",
        "..",
        "/",
        "../../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\0b",
        "\x1b[31mred\x1b[0m",
    ),
    *(
        "\x1b]0;title\x07",
        "line\nline",
        "\r\x1b[2K",
        "\u202egnp.exe",
        "\ud800",
        "e\u0301",
        "A",
        "a",
    ),
    *(
        "x" * 5000,
        "%s%n",
        "{0.__class__}",
        "{{7*7}}",
        "</script><script>1</script>",
        "__metadata__",
    ),
    *("0", "-1", "00", "1e999", "nan", "None", "step", "module", "optimizer_state_dict", "weight"),
    *(
        "torch.float32",
        "float32",
        "BF16",
        "F8_E4M3",
        "99999999999999999999",
        "\N{ARABIC-INDIC DIGIT ONE}",
    ),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        {"": {}},
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        "text",
    ),
)


def number(chance: Random) -> int:
    """Return a number at some limit."""
    return chance.choice(NUMBERS) + chance.choice((0, 0, 0, 1, -1))


def value(chance: Random) -> Any:
    """Return a random plain value."""
    kind = chance.randrange(3)
    if kind == 0:
        return number(chance)
    return chance.choice(TEXTS) if kind == 1 else chance.choice(VALUES)


def bent(chance: Random, text: str) -> str:
    """Return a slightly different name: another number, a part doubled or lost, odd letters."""
    digits = [match.span() for match in re.finditer(r"\d+", text)]
    kind = chance.randrange(4)
    if digits and kind < 2:
        start, stop = chance.choice(digits)
        made = chance.choice((str(abs(number(chance))), "9" * 5000, "-1", "", "\u0663", "\xb2"))
        return text[:start] + made + text[stop:]
    parts = text.split(".")
    at = chance.randrange(len(parts))
    if kind == 2:
        parts[at : at + 1] = chance.choice(([], [parts[at]] * 2, [parts[at].upper()]))
    else:
        parts[at] += chance.choice(("\x1b[31m", "\n", "/..", "\0", "\u202e", " ", "\ud800", "_"))
    return ".".join(parts)


def raw(chance: Random, data: bytes) -> bytes:
    """Damage bytes without regard to a format."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        at = chance.randrange(len(made)) if made else 0
        size = chance.choice((1, 1, 2, 4, 8, 16, 64, 512))
        kind = chance.randrange(9)
        if kind == 0 and made:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and made:
            made[at : at + size] = chance.choice((b"\0", b"\xff", b"\x7f", b"PK")) * size
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:at] = chance.randbytes(size)
        elif kind == 4:
            del made[at : at + size]
        elif kind == 5:
            made[at:at] = made[max(at - size, 0) : at] * chance.randint(1, 20)
        elif kind == 6:
            layout = chance.choice(("<I", "<Q", "<H", ">I"))
            width = struct.calcsize(layout)
            made[at : at + width] = struct.pack(layout, number(chance) % (1 << 8 * width))
        elif kind == 7:
            made += chance.randbytes(size) if chance.random() < 0.5 else bytes(size * 8)
        else:
            other = chance.randrange(len(made)) if made else 0
            made[at : at + size] = made[other : other + size]
    return bytes(made)


def text(chance: Random, data: bytes) -> bytes:
    """Return a small text file to replace another, or change a word of it."""
    if chance.random() < 0.4:
        return chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    words = data.split(b" " if b" " in data else b"\n")
    at = chance.randrange(len(words))
    if chance.random() < 0.3:
        del words[at]
    else:
        made = value(chance)
        words[at] = str(made).encode("utf-8", "surrogatepass")[:6000]
    return (b" " if b" " in data else b"\n").join(words)


def document(chance: Random, data: bytes) -> bytes:  # noqa: PLR0911 - a return a form
    """Return a JSON document with other values, keys and types, sometimes malformed."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return raw(chance, data)
    for _ in range(chance.choice((1, 1, 2, 3))):
        tree = altered(chance, tree)
    if _holds_itself(tree):  # after several changes, of nodes that stand in two places
        return raw(chance, data)
    made = json.dumps(tree).encode()
    kind = chance.randrange(12)
    if kind == 0:
        return b"[" * 100_000 + made
    if kind == 1:
        return b"\xef\xbb\xbf" + made
    if kind == 2:
        return made.decode().encode("utf-16")
    if kind == 3:
        return made.replace(b"{", b'{"a":1,"a":2,', 1)
    if kind == 4:
        return made.replace(b"1", b"1" * 5000, 1)
    return made


def settings(chance: Random, data: bytes) -> bytes:
    """Return a YAML document with other values (JSON is YAML too), or with features JSON lacks."""
    kind = chance.randrange(8)
    if kind < 3:
        return text(chance, data)
    try:
        held = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text(chance, data)
    made = json.dumps(altered(chance, held) if isinstance(held, dict) else held, default=str)
    if kind == 3:
        return (_bomb(chance, list(held) if isinstance(held, dict) else ["a"]) + "\n").encode()
    if kind == 4:
        odd = ("!!python/object:os.system x", "2001-99-99", "1:1" + ":1" * 900, "&a [*a]", "0x")
        return b"a: " + chance.choice(odd).encode() + b"\nb: " + made.encode()
    return made.encode()


def _bomb(chance: Random, keys: list[Any]) -> str:
    """Write aliases of aliases, which stand for a billion values, under a key that is read."""
    steps = chance.randint(3, 14)
    merged = chance.random() < 0.5
    first, each = ("{k: 1}", "{{<<: [{}]}}") if merged else ("[x]", "[{}]")
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {each.format(','.join([f'*a{n - 1}'] * 9))}" for n in range(1, steps)]
    return "\n".join([*lines, f"{json.dumps(str(chance.choice(keys)))}: *a{steps - 1}"])


def altered(chance: Random, tree: Any) -> Any:  # noqa: C901, PLR0912 - one branch a change
    """Replace, remove, rename or double one node in a tree of dicts and lists."""
    spots: list[tuple[Any, Any]] = []
    waiting = [tree] if isinstance(tree, (dict, list)) else []
    while waiting and len(spots) < 20_000:
        node = waiting.pop()
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in list(children):
            spots.append((node, key))
            if isinstance(child, (dict, list)):
                waiting.append(child)
    if not spots or chance.random() < 0.02:
        return value(chance)
    node, key = chance.choice(spots)
    other_node, other_key = chance.choice(spots)
    kind = chance.randrange(7)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        other = bent(chance, key) if chance.random() < 0.5 else chance.choice(TEXTS)
        node[other] = node.pop(key)
    elif kind == 2:
        node[key] = other_node[other_key] if other_node[other_key] is not node else None
        if _holds_itself(tree):
            node[key] = None
    elif kind == 3:
        node[key] = [node[key]]
    elif kind == 4 and isinstance(node, list):
        node.insert(key, node[key])
    elif isinstance(node[key], int) and kind < 6:
        node[key] = number(chance)
    elif isinstance(node[key], str) and kind < 6:
        node[key] = bent(chance, node[key])
    else:
        node[key] = value(chance)
    return tree


def _holds_itself(tree: Any) -> bool:
    try:
        json.dumps(tree)
    except (ValueError, RecursionError):
        return True
    return False


def header(chance: Random, data: bytes) -> bytes:
    """Return the JSON of a safetensors file, with a true or false length."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data):
        return raw(chance, data)
    made = document(chance, data[8 : 8 + size])
    told = number(chance) % (1 << 64) if chance.random() < 0.1 else len(made)
    body = data[8 + size :]
    if chance.random() < 0.2:
        body = raw(chance, body)
    return told.to_bytes(8, "little") + made + body
