"""Damage a pickle, opcode by opcode, so that the result is usually still a pickle."""

from __future__ import annotations

import pickletools
from functools import lru_cache
from itertools import pairwise
from random import Random

from benchmarks.hostile import values

_GLOBALS = (
    *("os\nsystem", "builtins\neval", "torch._utils\n_rebuild_tensor_v2", "torch\nFloatStorage"),
    *("torch\nBFloat16Storage", "torch\nSize", "collections\nOrderedDict", "numpy\nndarray"),
    *("torch\nQInt8Storage", "torch.storage\nUntypedStorage", "evil\nThing", "builtins\ngetattr"),
    *("torch._utils\n_rebuild_wrapper_subclass", "torch._tensor\n_rebuild_from_type_v2"),
    *(
        "numpy.core.multiarray\n_reconstruct",
        "torch.distributed.tensor\nDTensor",
        "builtins\nbytearray",
    ),
)
_BOMBS = (  # a value twice in a value twice in ...: its text would have 2**40 letters
    b"N" + b"2\x86" * 40,
    b"X\1\0\0\0a" + b"2\x86" * 60,
)
Levels = dict[int, list[tuple[int, int]]]  # depth -> runs of opcodes
_EVERY_CODE = tuple(op.code.encode("latin-1") for op in pickletools.opcodes)
_TO_MARK = b"utle1d\x90\x91"
_STAYS = b"qrp\x94"  # what stands on top stays there
_MOST = 40_000  # opcodes; a longer pickle is damaged as bytes


def damaged(chance: Random, data: bytes) -> bytes:
    """Return a pickle with another structure, or with other opcodes."""
    ops, levels = _parsed(data)
    if not levels:
        return values.raw(chance, data)
    if chance.random() < 0.75:
        return _structure(chance, list(ops), levels)
    return _opcodes(chance, list(ops))


@lru_cache(maxsize=4096)  # seeds' pickles come again and again
def _parsed(data: bytes) -> tuple[tuple[bytes, ...], Levels]:
    ops = _split(data)
    return tuple(ops), _values(ops)


def _structure(chance: Random, ops: list[bytes], levels: Levels) -> bytes:
    """Replace a value somewhere in the object, by one of the same pickle or another.

    All depths are as likely: most readers ask most of what stands near the root.
    """
    start, stop = chance.choice(levels[chance.choice(sorted(levels))])
    other = chance.choice(levels[chance.choice(sorted(levels))])
    named = [op for op in ops[start:stop] if op[:1] in b"qrp"]  # what later opcodes refer to
    kind = chance.randrange(16)
    if kind == 15:
        ops[start:stop] = [chance.choice(_BOMBS), *named]
    elif kind % 5 == 0:
        ops[start:stop] = [*ops[slice(*other)], *named]
    elif kind % 5 == 1:
        ops[start:stop] = [b"(", *ops[start:stop], chance.choice((b"l", b"t"))]
    elif kind % 5 == 2:
        ops[start:stop] = [chance.choice((b"N", b"]", b"}", b")")), *named]
    elif stop <= start + 2 and ops[start][:1] in b"XK\x8cMJ\x8a":
        ops[start] = _other_argument(chance, ops[start])
    else:
        ops[start:stop] = [_pushed(values.value(chance)), *named]
    return b"".join(ops)


def _values(ops: list[bytes]) -> Levels:
    """Return depth -> runs of opcodes that make one value each: items of dicts, lists, tuples."""
    found: Levels = {}
    stack: list[int] = []  # the opcode at which each item begins
    marks: list[int] = []  # how many items were below
    for at, op in enumerate(ops):
        code = op[:1]
        if code == b"(":
            marks.append(len(stack))
            stack.append(at)
        elif code in _TO_MARK and marks:
            below = marks.pop()
            if below >= len(stack):  # its mark was taken for a value
                break
            items = [*stack[below + 1 :], at]
            step = 2 if code == b"u" else 1
            spans = list(pairwise(items))[step - 1 :: step]
            if spans:
                found.setdefault(len(marks), []).extend(spans)
            start = stack[below]
            del stack[below:]
            if code in b"tld":
                stack.append(start)
        else:
            info = pickletools.code2op.get(code.decode("latin-1"))
            pops = len(info.stack_before) if info else 0
            if info is None or pops > len(stack):
                break
            start = stack[-pops] if pops else at
            if pops and code not in _STAYS:
                del stack[-pops:]
            if info.stack_after and (code not in _STAYS or not pops):
                stack.extend([start] * len(info.stack_after))
    return found


def _opcodes(chance: Random, ops: list[bytes]) -> bytes:
    """Swap, insert, delete or repeat opcodes, or change their arguments."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        at = chance.randrange(len(ops))
        kind = chance.randrange(10)
        if kind == 0:
            del ops[at]
        elif kind == 1:
            ops.insert(at, ops[at] * chance.choice((1, 1, 2, 30)))
        elif kind == 2:
            other = chance.randrange(len(ops))
            ops[at], ops[other] = ops[other], ops[at]
        elif kind == 3:
            ops.insert(at, chance.choice(_EVERY_CODE) + chance.randbytes(chance.randrange(5)))
        elif kind == 4:
            ops[at] = _other_global(chance)
        elif kind in (5, 6):
            _swap_alike(chance, ops, at)
        else:
            _replace_argument(chance, ops)
        if not ops:
            return b"."
    return b"".join(ops)


def _split(data: bytes) -> list[bytes]:
    """Split a pickle into opcodes with their arguments; bytes after STOP stay with it."""
    try:
        starts = []
        for _, _, position in pickletools.genops(data):
            starts.append(position or 0)
            if len(starts) > _MOST:
                return []
    except Exception:  # noqa: BLE001 - any damage that was done before
        return []
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def _other_global(chance: Random) -> bytes:
    return b"c" + chance.choice(_GLOBALS).encode() + b"\n"


def _swap_alike(chance: Random, ops: list[bytes], at: int) -> None:
    """Exchange two arguments of the same kind."""
    alike = [i for i, op in enumerate(ops) if op[:1] == ops[at][:1]]
    other = chance.choice(alike)
    ops[at], ops[other] = ops[other], ops[at]


def _replace_argument(chance: Random, ops: list[bytes]) -> None:
    """Replace a text, number or constant that is pushed."""
    pushed = [i for i, op in enumerate(ops) if op[:1] in b"XK\x8cMJN\x88\x89\x8aG]})"]
    if not pushed:
        return
    at = chance.choice(pushed)
    ops[at] = _other_argument(chance, ops[at])


def _other_argument(chance: Random, op: bytes) -> bytes:
    """Return an opcode that pushes another value, mostly of the same kind."""
    made = values.value(chance)
    same = op[:1]
    if same in b"KMJ\x8a" and chance.random() < 0.8:
        made = values.number(chance)
    elif same in b"X\x8c" and chance.random() < 0.8:
        held = op[5 if same == b"X" else 2 :].decode("utf-8", "replace")
        made = values.bent(chance, held) if chance.random() < 0.7 else chance.choice(values.TEXTS)
    return _pushed(made)


def _pushed(value: object) -> bytes:
    """Return the opcode that pushes a value."""
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + len(text).to_bytes(4, "little") + text
    if isinstance(value, float):
        return b"F" + repr(value).encode() + b"\n"
    return {"list": b"]", "dict": b"}"}.get(type(value).__name__, b"N")
