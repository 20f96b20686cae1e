"""`merge --fill-missing-from`: what a checkpoint lacks comes from a model, and only that."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard import keys
from reshard.errors import ExistsError, UsageError

TRAINED = {"model.a.weight": torch.arange(6.0).view(2, 3), "model.b.weight": torch.ones(3)}
BASE = {
    **{name: torch.zeros_like(value) for name, value in TRAINED.items()},
    "model.c.weight": torch.full((4,), 7.0, dtype=torch.bfloat16),
}


@pytest.fixture
def source(tmp_path):
    state = {f"module.{name}": value for name, value in TRAINED.items()}
    torch.save({"model": state, "step": 3}, tmp_path / "source.pt")
    return tmp_path / "source.pt"


def directory(place, tensors, **config):
    place.mkdir()
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return place


def test_only_what_is_missing_comes_from_the_base(source, tmp_path):
    base = directory(tmp_path / "base", BASE)
    report = reshard.merge(source, tmp_path / "out", fill_missing_from=base)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {**BASE, **TRAINED}
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert merged[name].dtype == value.dtype
        assert torch.equal(merged[name], value), name
    assert report.filled == ["model.c.weight"]
    assert report.to_json()["filled"] == ["model.c.weight"]
    assert any(line.split() == ["filled", "model.c.weight"] for line in report.lines())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_base_that_has_nothing_more_is_told_of(source, tmp_path):
    base = directory(tmp_path / "base", TRAINED)
    report = reshard.merge(source, tmp_path / "out", fill_missing_from=base)
    assert not report.filled
    assert any("lacks none of that model's weights" in text for text in report.warnings)


def test_a_tied_head_of_the_base_is_no_missing_weight(tmp_path):
    embedding = torch.arange(8.0).view(4, 2)
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "trained.safetensors")
    old = {"model.embed_tokens.weight": embedding - 1, "lm_head.weight": embedding - 1}
    base = directory(tmp_path / "base", old, tie_word_embeddings=True)
    with pytest.raises(reshard.ReshardError, match=r"lm_head\.weight"):
        reshard.merge(tmp_path / "trained.safetensors", tmp_path / "out", fill_missing_from=base)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"other.weight": torch.ones(2)}, "no name of the checkpoint's"),
        ({**BASE, "model.b.weight": torch.ones(4)}, "another model: 'model.b.weight'"),
    ],
)
def test_another_model_is_refused(source, tmp_path, tensors, words):
    base = directory(tmp_path / "base", tensors)
    with pytest.raises(UsageError, match=words):
        reshard.merge(source, tmp_path / "out.safetensors", fill_missing_from=base)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_base_is_never_written_to(source, tmp_path):
    base = directory(tmp_path / "base", BASE)
    with pytest.raises(ExistsError, match="is inside the source"):
        reshard.merge(source, base, fill_missing_from=base, overwrite=True)


def test_what_is_left_out_on_purpose_is_not_brought_back(source, tmp_path):
    edits = keys.Edits(exclude=["c"])
    with pytest.raises(UsageError, match="--exclude"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=tmp_path, edits=edits)
