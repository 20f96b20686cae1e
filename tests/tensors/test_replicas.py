"""Copies that ranks keep of a tensor and that have drifted apart; torch says what their mean is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.errors import DifferentError

SAMPLE = Path(__file__).parents[1] / "data" / "meta" / "llama_mp2"
DRIFTED = "layers.0.attention_norm.weight"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def drifted(request, tmp_path):
    """Meta's two ranks, of which the second has another norm; and the norms of both."""
    place = tmp_path / "drifted"
    shutil.copytree(SAMPLE, place)
    norms = []
    for rank in range(2):
        file = place / f"consolidated.{rank:02d}.pth"
        held = {name: t.to(request.param) for name, t in torch.load(file).items()}
        held[DRIFTED] += rank * torch.linspace(-0.1, 0.3, len(held[DRIFTED])).to(request.param)
        norms.append(held[DRIFTED])
        torch.save(held, file)
    return place, norms


def test_copies_that_differ_are_refused_with_the_ways_out(drifted, tmp_path):
    with pytest.raises(DifferentError, match=r"--replicas first.*--replicas mean") as error:
        reshard.merge(drifted[0], tmp_path / "out.safetensors")
    assert DRIFTED in str(error.value)


def test_the_first_copy_or_the_mean_is_written_when_asked_for(drifted, tmp_path):
    place, norms = drifted
    wanted = {
        "first": norms[0],
        "mean": ((norms[0].double() + norms[1].double()) / 2).to(norms[0].dtype),
    }
    for policy, norm in wanted.items():
        out = tmp_path / f"{policy}.safetensors"
        report = reshard.merge(place, out, replicas=policy)
        found = load_file(out)
        assert torch.equal(found[DRIFTED], norm)
        assert any(DRIFTED in note for note in report.warnings)
    first, mean = (load_file(tmp_path / f"{policy}.safetensors") for policy in wanted)
    assert all(torch.equal(first[name], mean[name]) for name in first if name != DRIFTED)


def test_equal_copies_have_no_mean_to_tell_of(tmp_path):
    report = reshard.merge(SAMPLE, tmp_path / "out.safetensors", replicas="mean")
    assert not any("mean" in note for note in report.warnings)
