"""Whole checkpoints that lie: each ends in one clear message, soon, and in little memory."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.hostile import case, damage, recipes, seeds, targets
from reshard import cli, formats
from reshard.errors import CorruptError, UsageError
from tests.support.programs import LIMIT_S, run_python

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = Path(tempfile.gettempdir(), f".hostile-{os.getpid()}")
ODD = "a\x1b[31m.\u202ex\nverified: yes"


def run(*words, **options):
    return run_python(*words, cwd=ROOT, errors="backslashreplace", **options)


# ------------------------------------------------------------------------------- seeded mutations


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches memory by /proc")
@pytest.mark.slow
def test_some_hundred_damaged_checkpoints_are_read_or_refused(tmp_path):
    words = ["--cases", "250", "--seed", "3", "--workers", "1", "--scratch", tmp_path]
    done = run("-m", "benchmarks.hostile", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "250 cases of" in done.stdout


def test_a_case_is_a_function_of_its_number():
    chosen = seeds.kept()

    def made(index):
        chance = Random(f"1:{index}")
        found = damage.damaged(chance, chance.choice(chosen))
        return found.seed.name, found.names, found.altered, found.log

    assert made(11) == made(11)
    assert made(11) != made(12)


def test_a_recipe_is_a_damaged_checkpoint(tmp_path):
    chance = Random(1)
    seed = next(seed for seed in seeds.kept() if seed.name == targets.TARGETS[6].checkpoint)
    recipe = recipes.made(chance, steps=2)
    for _ in range(20):
        recipe = recipes.varied(chance, recipes.crossed(chance, recipe, recipes.made(chance)))
    cooked = [recipes.cooked(recipe, seed, seed.files)[1] for _ in range(2)]
    assert cooked[0].log == cooked[1].log
    assert cooked[0].altered == cooked[1].altered
    assert cooked[0].log
    assert not recipes.cooked(b"", seed, seed.files)[1].log


def test_every_format_is_fuzzed():
    """The kept checkpoints of the table are there, and the table has all formats with one."""
    held = {seed.name: seed for seed in seeds.kept()}
    kept = [held[t.checkpoint] for t in targets.TARGETS if t.checkpoint in held]
    named = [
        t.checkpoint
        for t in targets.TARGETS
        if t.checkpoint.startswith(("tests", "exampl", "plugins"))
    ]
    assert set(named) == {seed.name for seed in kept}
    fuzzed = {formats.read(seed.place / seed.given).origin.format for seed in kept}
    every = {
        formats.read(seed.place / seed.given).origin.format
        for seed in held.values()
        if ":" not in seed.name
    }
    assert fuzzed == every


def _raises():
    raise KeyError("of a reader")


MISTAKES = {
    "an error of Python's": (_raises, "KeyError"),
    "a system error": (lambda: Path("nowhere").read_bytes(), "FileNotFoundError"),
    "a program": (lambda: os.posix_spawn("/bin/true", ["true"], {}) and None, "posix_spawn"),
    "memory": (lambda: bytearray(600 << 20) and None, "took "),
    "an escape sequence": (lambda: sys.stdout.write("\x1b[2J") and None, "prints"),
    "a file elsewhere": (lambda: ELSEWHERE.write_text("x") and None, "open"),
    "a search without end": (lambda: re.match("(a+)+$", "a" * 60 + "b"), "_TooLong"),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches memory by /proc")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_judge_notices(monkeypatch, tmp_path, mistake):
    act, noticed = MISTAKES[mistake]
    monkeypatch.setattr(case, "CPU_SECONDS", 1.0)
    monkeypatch.setattr(cli.cli, "main", lambda **_: act())
    (tmp_path / "out").mkdir()
    found = case.judged(["inspect", "x"], tmp_path / "out")
    ELSEWHERE.unlink(missing_ok=True)
    assert noticed in found.wrong


def test_the_judge_notices_what_is_left_behind(monkeypatch, tmp_path):
    (tmp_path / "out" / ".x.partial-1").mkdir(parents=True)

    def refuse(**_):
        raise CorruptError("x", "is damaged")

    monkeypatch.setattr(cli.cli, "main", refuse)
    found = case.judged(["merge", "x", "out/x.pt"], tmp_path / "out")
    assert (found.code, found.wrong) == (3, "leaves ['.x.partial-1']")


# ----------------------------------------------------------------------------- what is not a file


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "latest"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    done = run("-m", "reshard", "inspect", tmp_path / name, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "neither a directory nor a plain file" in done.stderr


@pytest.mark.parametrize("name", ["latest", "model.safetensors.index.json", ".metadata"])
def test_a_small_file_that_claims_a_terabyte_is_refused(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    if name == "latest":
        (tmp_path / "step1").mkdir()
    with pytest.raises(CorruptError, match=r"has 1099511627776 bytes"):
        formats.read(tmp_path)


# ----------------------------------------------------------------------------------- what is shown


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.safetensors"
    save_file({ODD: torch.ones(2), "b": torch.ones(1)}, path)
    return path


COMMANDS = {
    "inspect": ["inspect", "ODD", "--tensors"],
    "merge": ["merge", "ODD", "OUT", "--rename", "^a=c"],
    "excluded": ["merge", "ODD", "OUT", "--exclude", "a"],
    "refused": ["merge", "ODD", "OUT", "--rename", "^.*=b"],
    "diff": ["diff", "ODD", "OTHER"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_is_shown_names_and_obeys_none(odd, tmp_path, command):
    save_file({ODD: torch.zeros(2), "b": torch.ones(1)}, tmp_path / "other.safetensors")
    places = {
        "ODD": odd,
        "OTHER": tmp_path / "other.safetensors",
        "OUT": tmp_path / "o.safetensors",
    }
    done = run("-m", "reshard", *(places.get(word, word) for word in COMMANDS[command]))
    said = done.stdout + done.stderr
    assert r"\x1b[31m.\u202ex\nverified: yes" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


def test_json_has_names_as_they_are(odd):
    done = run("-m", "reshard", "inspect", odd, "--tensors", "--json")
    assert ODD in [tensor["fqn"] for tensor in json.loads(done.stdout)["tensors"]]


def test_a_file_name_that_is_no_text_is_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\x1b[2J.pt"
    Path(os.fsdecode(path)).write_bytes(b"nothing")
    done = run("-m", "reshard", "inspect", os.fsdecode(path))
    assert done.returncode == 2
    assert r"\udcff\x1b[2J.pt: not a recognized checkpoint" in done.stderr


def test_a_long_text_in_many_places_is_not_written_out(tmp_path):
    text = "x" * 1_000_000
    held = {"model": {"w": torch.ones(2)}, "scheduler": {f"k{n}": text for n in range(10_000)}}
    torch.save(held, tmp_path / "x.pt")
    scheduler = formats.read(tmp_path / "x.pt").train.scheduler
    assert scheduler["k0"] == text
    assert scheduler["k9999"] == {"str": 1_000_000}


def test_a_message_is_never_longer_than_a_page():
    error = CorruptError("x" * 10**6, "y" * 10**6, "z" * 10**6)
    assert len(str(error)) < 10_000
    assert "more characters" in str(error)


def test_the_request_is_at_fault_where_a_device_is_given():
    with pytest.raises(UsageError):
        formats.read("/dev/zero")
