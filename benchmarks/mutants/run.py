"""Find small wrong changes of the modules that compute byte positions that no test detects.

    python benchmarks/mutants/run.py            # or some modules: core.box system.checksum

Every mutant (changes.py) is tried in a forked process. The code of the changed function replaces
that of the imported one, and the tests that call the function run until one fails. A mutant is
killed by a failed test or by running out of time. The program prints the survivors, except those in
equivalent.txt, which states for each why it is equivalent to the source. Exit status 1: there are
other survivors, or a line of equivalent.txt is no survivor any more.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import os
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from changes import Mutant, mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODULES = """core.box core.manifest engine.planning.copies engine.planning.extents
    engine.planning.planner layouts.partition layouts.runs system.checksum""".split()
TESTS = """core/test_box core/test_manifest engine/test_plan layouts/test_mesh
    layouts/test_partition layouts/test_runs commands/test_split_sizes system/test_checksum
    tensors/test_tensors""".split()
CPU_S, WALL_S, MEMORY = 20, 120, 4 << 30  # of a mutant: beyond them it is stuck
PROFILE = "mutants"
Place = tuple[str, int]  # file and first line of a function
EVERY: Place = ("", 0)


class Session:
    """A pytest plugin that tries mutants where pytest would run the tests."""

    def __init__(self, modules: list[str], workers: int) -> None:
        self.modules = modules
        self.workers = workers
        self.survivors: dict[str, list[Mutant]] = {}
        self.tried: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Use the same examples for every mutant, and stop at the first failure."""
        import hypothesis

        hypothesis.settings.register_profile(
            PROFILE,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each test once to see what it calls, then the mutants."""
        calls = _calls(session.items)
        for name in self.modules:
            module = importlib.import_module(f"reshard.{name}")
            found = list(mutants(Path(str(module.__file__)).read_text()))
            self.tried[name] = len(found)
            self.survivors[name] = self._alive(module, found, calls)
            print(f"{name}: {len(self.survivors[name])} of {len(found)} live", file=sys.stderr)
        return True

    def _alive(
        self, module: ModuleType, found: list[Mutant], calls: dict[Place, list[pytest.Item]]
    ) -> list[Mutant]:
        alive = []
        running: dict[int, Mutant] = {}
        for mutant in itertools.chain(found, [None] * self.workers):
            if running and (mutant is None or len(running) == self.workers):
                pid, status = os.wait()
                tried = running.pop(pid)
                if status == 0:
                    alive.append(tried)
                    print(f"lives: {module.__name__}.{tried}", file=sys.stderr)
            if mutant is not None:
                items = calls[_place(module, mutant)] or calls[EVERY]
                pid = os.fork()
                if not pid:
                    os._exit(_noticed(module, mutant, items))
                running[pid] = mutant
        return sorted(alive, key=lambda mutant: mutant.line)


def _calls(items: list[pytest.Item]) -> dict[Place, list[pytest.Item]]:
    """Return the tests that call a function, the quickest first; all of them under EVERY."""
    calls: dict[Place, list[tuple[float, int]]] = defaultdict(list)
    for number, item in enumerate(items):
        seen: set[CodeType] = set()

        def note(frame: Any, event: str, _: object, seen: set[CodeType] = seen) -> None:
            if event == "call":
                seen.add(frame.f_code)

        began = time.perf_counter()
        threading.setprofile(note)
        sys.setprofile(note)
        reports = runtestprotocol(item, log=False, nextitem=None)
        sys.setprofile(None)
        threading.setprofile(None)
        if any(report.failed for report in reports):
            why = "\n".join(report.longreprtext for report in reports)
            pytest.exit(f"{item.nodeid} fails on the source as it is:\n{why}", 2)
        took = time.perf_counter() - began
        for place in {EVERY, *((code.co_filename, code.co_firstlineno) for code in seen)}:
            calls[place].append((took, number))
    found = {place: [items[n] for _, n in sorted(which)] for place, which in calls.items()}
    return defaultdict(list, found)


def _noticed(module: ModuleType, mutant: Mutant, items: list[pytest.Item]) -> int:
    """Return 1 if a test fails on the mutant, else 0; call it in a forked process."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = threading.Timer(WALL_S, os._exit, (1,))
    watch.daemon = True
    watch.start()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        _put(module, mutant)
        for item in items:
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=None)):
                return 1
    except BaseException:  # noqa: BLE001 a mutant may end pytest itself
        return 1
    return 0


def _put(module: ModuleType, mutant: Mutant) -> None:
    """Make the mutant the module that is imported from now on."""
    code = compile(mutant.tree, str(module.__file__), "exec")
    *classes, name = mutant.name.split(".")
    function = _function(module, mutant)
    if function is None:
        changed = next(n for n in mutant.tree.body if getattr(n, "lineno", 0) == mutant.line)
        constant = compile(ast.Expression(changed.value), "", "eval")
        setattr(module, name, eval(constant, vars(module)))
        return
    for inner in classes:
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == inner)
    line = function.__code__.co_firstlineno
    function.__code__ = next(
        c for c in code.co_consts if isinstance(c, CodeType) and c.co_firstlineno == line
    )
    for value in vars(module).values():  # what was computed before
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _function(module: ModuleType, mutant: Mutant) -> FunctionType | None:
    """Return the function of which the mutant is one; None if it changes a constant."""
    found: Any = module
    for name in mutant.name.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__wrapped__", getattr(found, "__func__", found))
    return found if isinstance(found, FunctionType) else None


def _place(module: ModuleType, mutant: Mutant) -> Place:
    function = _function(module, mutant)
    return (str(module.__file__), function.__code__.co_firstlineno) if function else EVERY


def equivalents() -> dict[str, str]:
    """Return mutants that are equivalent to the source, as they are printed, with the reason."""
    table = {}
    for line in (HERE / "equivalent.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            mutant, _, reason = line.rpartition(" | ")
            table[mutant] = reason
    return table


def main() -> int:
    """Try the mutants and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    session = Session(args.modules, args.workers)
    tests = [str(ROOT / "tests" / f"{name}.py") for name in TESTS]
    sources = [str(ROOT / "reshard" / f"{name.replace('.', '/')}.py") for name in MODULES]
    sys.path.insert(0, str(ROOT))  # this tree, whatever is installed
    options = ["-q", "-s", "-p", "no:cacheprovider", f"--hypothesis-profile={PROFILE}"]
    options += ["--rootdir", str(ROOT)]
    ended = pytest.main([*options, *tests, *sources], plugins=[session])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 2
    listed = equivalents()
    met: set[str] = set()
    fresh = 0
    for name in args.modules:
        alive = session.survivors[name]
        new = [mutant for mutant in alive if f"{name}.{mutant}" not in listed]
        met |= {f"{name}.{mutant}" for mutant in alive}
        tried = session.tried[name]
        print(
            f"{name}: {tried} mutants, {tried - len(alive)} killed,"
            f" {len(alive) - len(new)} equivalent, {len(new)} alive"
        )
        for mutant in new:
            print(f"  line {mutant.line}: {name}.{mutant}")
        fresh += len(new)
    asked = tuple(f"{name}." for name in args.modules)
    stale = [key for key in listed if key.startswith(asked) and key not in met]
    for key in stale:
        print(f"no survivor, though listed: {key}")
    return 1 if fresh or stale else 0


if __name__ == "__main__":
    sys.exit(main())
