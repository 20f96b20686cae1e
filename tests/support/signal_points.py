"""Find the points of a program where Python can run a signal handler, and interrupt there.

Handlers run in the main thread: where a function begins, where a loop turns, after a call, and in a
call that waits, which is as if it came before the call.
"""

from __future__ import annotations

import dis
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

Point = list[Any]  # a function's file and its name, the offset of an instruction, the how manyeth

_CALLS = {name for name in dis.opmap if name.startswith("CALL")}
_AFTER = {*_CALLS, "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"}
_OF_OLD = sys.version_info < (3, 11)  # no names of functions in code that say where they are


class Points:
    """Traces the main thread.

    Args:
        files: words, of which one must be in the name of a function's file.
        strike: at which point the signal comes; None: they are counted only.
    """

    def __init__(self, files: list[str], strike: Point | None, number: int) -> None:
        self.files = files
        self.strike = strike
        self.number = number
        self.seen: Counter[tuple[str, str, int]] = Counter()
        self._offsets: dict[CodeType, frozenset[int]] = {}

    @property
    def all(self) -> list[Point]:
        """Return the points that were counted, and how often."""
        return [[*point, count] for point, count in self.seen.items()]

    def install(self) -> None:
        sys.settrace(self._begin)

    def _begin(self, frame: FrameType, _event: str, _: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._offsets:
            found = any(word in code.co_filename for word in self.files)
            if self.strike is not None:
                found = found and [code.co_filename, _name(code)] == self.strike[:2]
            self._offsets[code] = _offsets(code) if found else frozenset()
        if not self._offsets[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._go_on

    def _go_on(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        code, offset = frame.f_code, frame.f_lasti
        if event == "opcode" and offset in self._offsets[code]:
            here = code.co_filename, _name(code), offset
            self.seen[here] += 1
            if [*here, self.seen[here]] == self.strike:
                os.kill(os.getpid(), self.number)  # whose handler runs, and raises, here
        return self._go_on


def _name(code: CodeType) -> str:
    return f"{code.co_name} {code.co_firstlineno}" if _OF_OLD else code.co_qualname


def _offsets(code: CodeType) -> frozenset[int]:
    """Return offsets where signals are handled: before calls and after a few other instructions."""
    found, last, before = {0}, "", [""] * 3
    for each in dis.get_instructions(code):
        if each.opname in ("CACHE", "PRECALL"):
            continue
        leaves = each.opname in _CALLS and set(before) == {"LOAD_CONST None"}
        if last in _AFTER or (each.opname in _CALLS and not leaves):
            found.add(each.offset)
        before = [*before[1:], f"{each.opname} {each.argval}"]
        last = "" if leaves else each.opname
    return frozenset(found)
