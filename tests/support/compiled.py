"""The compiled modules, built from the sources at hand."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_module(temporary: pytest.TempPathFactory, name: str) -> ModuleType:
    """Import a compiled module, after building all of them once for all workers of a test run.

    The module is built from its present source, because the installed one can be older. The test is
    skipped without the C compiler that Python's own extensions are built with.

    Raises:
        CalledProcessError: setuptools failed.
        StopIteration: the module was not compiled.
    """
    if not shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]):
        pytest.skip("this machine has no C compiler, so numpy computes")
    directory = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # every worker has its own directory in that of the run
    library = directory / "compiled"
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    places = ["--build-lib", library, "--build-temp", directory / "objects"]
    with (directory / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            subprocess.run([*command, *places], cwd=ROOT, check=True, capture_output=True)
    path = next(library.rglob(f"{name.rpartition('.')[2]}*.so"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
