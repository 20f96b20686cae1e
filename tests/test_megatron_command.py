"""The command line of `tests.support.megatron`; `tests/judged/test_families.py` runs proofs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.support.megatron import __main__ as command


def test_it_says_that_megatron_core_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prove", "qwen3"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert command.main() == 6
    assert "pip install 'megatron-core" in capsys.readouterr().err


def test_help_imports_no_framework():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tests.support.megatron", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "path/to/config.json" in done.stdout
    assert " torch\n" not in done.stderr
    assert " transformers\n" not in done.stderr
