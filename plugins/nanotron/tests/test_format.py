"""nanotron's checkpoints as a format of another package: found, checked by the kit, and named."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import reshard
from reshard import formats
from reshard.checks.identity import check_identity
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.errors import ReshardError, UsageError
from reshard.formats import registry
from reshard.testing import Example, check_format
from reshard_nanotron.format import FORMAT
from tests.support.programs import run_reshard

DATA = Path(__file__).parent / "data"
WRITTEN = DATA / "tp2dp2"
SOUND = sorted(DATA.glob("*/ckpt"))


def test_the_entry_point_adds_it():
    assert version("reshard-nanotron") == reshard.__version__
    assert registry.find_format("nanotron") is FORMAT
    assert "nanotron" not in registry.list_built_in_names()
    assert "nanotron" in registry.list_writers_using("tp")


def test_the_help_of_a_target_lists_its_options():
    shown = run_reshard("split", "--to", "nanotron", "--help", check=True).stdout
    assert "--tp" in shown.partition("Options of --to nanotron")[2]


def test_the_kit_accepts_it(tmp_path):
    weights = torch.load(WRITTEN / "expected.pt", weights_only=False)["model"]
    check_format(FORMAT, [Example(path=WRITTEN / "ckpt", weights=weights)], tmp_path / "kit")


def test_a_file_of_one_rank_is_not_taken_for_a_shard():
    path = next(WRITTEN.rglob("*_tp-rank-1-of-2.safetensors"))
    manifest = reshard.inspect(path).manifest
    assert manifest.origin.format == "nanotron"
    assert {name.partition("/")[0] for name in manifest.unread_files} <= {"random"}


def test_a_run_is_not_one_of_the_generic_formats(tmp_path):
    """Also with a file of another program in it."""
    run = Path(shutil.copytree(DATA / "llama_pp2" / "ckpt", tmp_path / "run"))
    torch.save({"a": torch.ones(2)}, run / "extra.pt")
    assert reshard.inspect(run).manifest.origin.format == "nanotron"


def test_a_rank_of_a_billion_in_a_name(tmp_path):
    run_dir = Path(shutil.copytree(WRITTEN, tmp_path / "run"))
    for path in run_dir.rglob("*_tp-rank-*-of-2.safetensors"):
        path.rename(path.with_name(path.name.replace("-of-2.", "-of-999999999.")))
    with pytest.raises(ReshardError, match=r"has no down_proj.weight file of rank tp 2"):
        formats.read(run_dir / "ckpt")


@pytest.mark.parametrize("source", SOUND, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("trust", ["sampled", "full"])
def test_a_sound_checkpoint_raises_no_alarm(source, trust):
    manifest = formats.read(source)
    check_identity(manifest, trust)
    assert not find_counter_conflicts(manifest)


def test_an_option_that_its_files_have_no_place_for_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no effect with --to nanotron"):
        reshard.split(WRITTEN / "ckpt", tmp_path / "out", to="nanotron", state_dict_type="full")
