"""A compiled module, built from the sources at hand."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def find_compiler() -> str | None:
    """Return the C compiler that Python's own extensions are built with, if it is installed."""
    return shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])


def build_module(directory: Path, name: str) -> ModuleType:
    """Build the compiled modules into a directory and import one of them from there.

    Raises:
        CalledProcessError: setuptools failed.
        StopIteration: the module was not compiled.
    """
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    places = ["--build-lib", directory / "lib", "--build-temp", directory / "temp"]
    subprocess.run([*command, *places], cwd=ROOT, check=True, capture_output=True)
    path = next((directory / "lib").rglob(f"{name.rpartition('.')[2]}*.so"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
