"""A format is one object: it can be removed, added by another package, and checked by the kit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.core.manifest import FrameworkFacts
from reshard.errors import ReshardError, UsageError
from reshard.formats import registry
from reshard.formats.base import Source
from reshard.testing import Example, check_format
from tests.support import forked

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
LLAMA = ROOT / "examples" / "llama-zero3-4ranks"
REMOVABLE = ("deepspeed", "megatron", "meta", "colossalai")
FORMATS = {each.name: each for each in registry.list_built_in_formats()}


@pytest.fixture(scope="module")
def python():
    """Return the command that stands for ``python``, with torch imported but not reshard."""
    with forked.serving(["torch.distributed.checkpoint.state_dict", "safetensors.torch"]) as path:
        yield forked.build_command(path, 0)


@pytest.mark.parametrize("name", REMOVABLE)
def test_without_one_format_s_folder_the_rest_works(name, python, tmp_path):
    """Every other module is imported, and a checkpoint of another format is merged and split."""
    # The bytecode is copied too, if there is any: to compile all modules takes seconds.
    shutil.copytree(ROOT / "reshard", tmp_path / "reshard")
    shutil.rmtree(tmp_path / "reshard" / "formats" / name)
    source = DATA / "colossalai" / "plain" / "ckpt" if name == "deepspeed" else LLAMA
    program = tmp_path / "program.py"  # its directory is the first to import from
    program.write_text(
        "import pkgutil, importlib, reshard\n"
        "names = [m.name for m in pkgutil.walk_packages(reshard.__path__, 'reshard.')]\n"
        "for name in names:\n"
        "    '__main__' in name or importlib.import_module(name)\n"
        "from reshard.formats import registry\n"
        f"assert {name!r} not in registry.list_names()\n"
        f"reshard.merge({str(source)!r}, 'out.safetensors')\n"
        f"reshard.split({str(source)!r}, 'out', to='dcp', world_size=2)\n"
        "print(reshard.__file__)\n"
    )
    command = [*python, str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


# The format of another package that docs/extending.md shows: one safetensors file for each tensor

GUIDE = (ROOT / "docs" / "extending.md").read_text()
SOURCE = GUIDE.split("```python\n", 2)[1].split("```", 1)[0]
THEIRS: dict[str, Any] = {}
exec(SOURCE, THEIRS)
LISTED = THEIRS["FORMAT"]


@pytest.fixture
def listed(tmp_path):
    place, weights = tmp_path / "ckpt", {"a": torch.randn(3, 2), "b": torch.arange(4.0)}
    place.mkdir()
    for name, tensor in weights.items():
        save_file({"value": tensor}, place / f"{name}.safetensors")
    (place / "listed.json").write_text(json.dumps(dict.fromkeys(weights, 1)))
    return place, weights


def test_an_entry_point_adds_a_format(listed, tmp_path):
    """Under a name of its own, as an installed package declares it."""
    place, weights = listed
    package = tmp_path / "site" / "their_formats.py"
    package.parent.mkdir()
    package.write_text(SOURCE)
    info = package.parent / "their_formats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_formats\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[reshard.formats]\nlisted = their_formats:FORMAT\n")
    command = [sys.executable, "-m", "reshard", "merge", str(place), "out.safetensors"]
    done = subprocess.run(
        [*command, "--from", "listed"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{package.parent}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "out.safetensors")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)


def test_an_unknown_format_is_refused_with_the_names_of_all(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError, match="must be one of colossalai, deepspeed"):
        reshard.inspect(tmp_path / "x", source_format="nope")


def test_the_kit_accepts_a_format_of_another_package(listed, tmp_path):
    place, weights = listed
    check_format(LISTED, [Example(path=place, weights=weights)], tmp_path / "kit")
    with registry.add_format(LISTED):
        assert reshard.inspect(place).warnings == []


@pytest.mark.parametrize("is_stated", [False, True])
def test_commands_follow_the_facts_that_a_format_states(listed, is_stated, tmp_path):
    """As they do for the formats of this package, whose names they do not compare."""
    place, weights = listed
    for name in weights:
        (place / f"{name}.safetensors").rename(place / f"module.{name}.safetensors")
    (place / "listed.json").write_text(json.dumps({f"module.{name}": 1 for name in weights}))
    facts = FrameworkFacts(wraps_ddp=not is_stated, describes_model=is_stated)

    def read(location, hints):
        manifest = LISTED.read(location, hints)
        return replace(manifest, origin=replace(manifest.origin, facts=facts))

    sources = {"listed": Source(is_whole=is_stated)}
    with registry.add_format(replace(LISTED, read=read, sources=sources)):
        reshard.merge(place, tmp_path / "m.safetensors")
        prefix = "module." if is_stated else ""
        assert load_file(tmp_path / "m.safetensors").keys() == {f"{prefix}{n}" for n in weights}
        with pytest.raises(UsageError) as refusal:
            reshard.split(place, tmp_path / "out")
        assert ("its program loads these files" in str(refusal.value)) is is_stated
        needed = "has no learning rate" if is_stated else r"2 tensors \(.*are parameters or buffers"
        with pytest.raises(ReshardError, match=needed):
            reshard.split(place, tmp_path / "out", to="deepspeed", init_optimizer="zeros")


def test_the_kit_finds_wrong_values(listed, tmp_path):
    place, weights = listed
    wrong = {**weights, "b": weights["b"] + 1}
    with pytest.raises(AssertionError, match="merge: b has other values"):
        check_format(LISTED, [Example(path=place, weights=wrong)], tmp_path / "kit")


def test_the_kit_finds_a_reader_that_trips_over_damage(listed, tmp_path):
    def read_carelessly(location, hints):
        json.loads((location.path / "listed.json").read_text())
        return LISTED.read(location, hints)

    careless = replace(LISTED, name="careless", read=read_carelessly)
    place, weights = listed
    with pytest.raises(
        AssertionError, match=r"listed\.json cut off at 0 bytes: the reader did not check a value"
    ):
        check_format(careless, [Example(path=place, weights=weights)], tmp_path / "kit")


def load(path):
    return torch.load(DATA / path, weights_only=False)


def example_of(name, tmp_path):
    """Return a checkpoint that the real framework wrote, with the framework's own values."""
    if name == "deepspeed":
        expected = load("deepspeed_0.8.3/z2_apexadam/expected.pt")
        weights = expected["live"] | expected["params"]
        weights = {name: value.float() for name, value in weights.items()} | expected["buffers"]
        weights = {name: weights[name] for name in weights.keys() - expected["tied"].keys()}
        return Example(
            path=DATA / "deepspeed_0.8.3" / "z2_apexadam" / "run",
            weights=weights,
            slots=expected["slots"],
            world_sizes=(3,),
            merge_options={"dtype": "fp32"},
        )
    if name == "meta":
        return Example(
            path=DATA / "meta/llama_mp2",
            weights=load("meta/llama_mp2/expected.pt")["model"],
            merge_options={"names": "source"},
        )
    if name == "torch":
        expected = load("olmo_core/expected.pt")
        slots = ("exp_avg", "exp_avg_sq")
        return Example(
            path=DATA / "olmo_core/ckpt",
            weights=expected["model"],
            slots={s: {n: state[s] for n, state in expected["state"].items()} for s in slots},
            world_sizes=(2,),
        )
    weights = {"a.weight": torch.randn(4, 3), "b": torch.arange(5, dtype=torch.bfloat16)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return Example(path=tmp_path / "model.safetensors", weights=weights)


@pytest.mark.parametrize("name", ["deepspeed", "meta", "torch", "huggingface"])
def test_our_formats_pass_the_kit(name, tmp_path):
    check_format(FORMATS[name], [example_of(name, tmp_path)], tmp_path / "kit")


def test_an_option_that_a_reader_does_not_use_is_reported():
    warnings = reshard.inspect(LLAMA, wrap="none").warnings
    assert [text for text in warnings if "ignored" in text] == [
        "--wrap was ignored: it does not apply to deepspeed checkpoints"
    ]


def test_a_key_is_refused_where_it_would_name_other_weights():
    with pytest.raises(UsageError, match="does not apply to deepspeed"):
        reshard.inspect(LLAMA, key="ema.model")
