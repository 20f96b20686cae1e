"""`merge --fill-missing-from`: what a checkpoint lacks comes from a model, and only that."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.core import keys
from reshard.errors import ExistsError, IncompleteError, UnsupportedError, UsageError

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
    assert report.to_dict()["filled"] == ["model.c.weight"]
    assert any(line.split() == ["filled", "model.c.weight"] for line in report.lines())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_base_that_has_nothing_more_is_told_of(source, tmp_path):
    base = directory(tmp_path / "base", TRAINED)
    report = reshard.merge(source, tmp_path / "out", fill_missing_from=base)
    assert not report.filled
    assert any("the checkpoint has all weights of that model" in text for text in report.warnings)


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
        ({"other.weight": torch.ones(2)}, "no tensor name is in both"),
        ({**BASE, "model.b.weight": torch.ones(4)}, "another model: 'model.b.weight'"),
    ],
)
def test_another_model_is_refused(source, tmp_path, tensors, words):
    base = directory(tmp_path / "base", tensors)
    with pytest.raises(UsageError, match=words):
        reshard.merge(source, tmp_path / "out.safetensors", fill_missing_from=base)
    assert not (tmp_path / "out.safetensors").exists()


def test_codes_outside_of_safetensors_are_no_weights_of_a_base(source, tmp_path):
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    tensors = {**BASE, "model.d.weight": codes, "model.d.weight_scale_inv": torch.ones(1, 1)}
    torch.save(tensors, tmp_path / "base.bin")
    with pytest.raises(UnsupportedError, match=r"'model.d.weight' \(float8_e4m3fn\).*safetensors"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=tmp_path / "base.bin")


def test_a_base_is_never_written_to(source, tmp_path):
    base = directory(tmp_path / "base", BASE)
    with pytest.raises(ExistsError, match="is inside the source"):
        reshard.merge(source, base, fill_missing_from=base, overwrite=True)


def test_what_is_left_out_on_purpose_is_not_brought_back(source, tmp_path):
    edits = keys.Edits(exclude=["c"])
    with pytest.raises(UsageError, match="--exclude"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=tmp_path, edits=edits)


def hollow_source(place, hollow, **more):
    """Write a model that ZeRO 3 saved without gathering these weights."""
    place.mkdir()
    state = {k: torch.ones(0, dtype=v.dtype) if k in hollow else v for k, v in TRAINED.items()}
    save_file({**state, **more}, place / "model.safetensors")
    return place / "model.safetensors"


@pytest.mark.parametrize("hollow", [["model.b.weight"], ["model.b.weight", "model.c.weight"]])
def test_placeholders_of_zero_3_are_filled(tmp_path, hollow):
    """Also where they are more than half of the weights."""
    source = hollow_source(tmp_path / "source", hollow, **{n: torch.ones(0) for n in hollow})
    base = directory(tmp_path / "base", BASE)
    report = reshard.merge(source, tmp_path / "out", fill_missing_from=base)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == BASE.keys()
    assert torch.equal(merged["model.a.weight"], TRAINED["model.a.weight"])
    for name in ("model.b.weight", "model.c.weight"):
        assert merged[name].dtype == BASE[name].dtype
        assert torch.equal(merged[name], BASE[name])
    assert report.filled == ["model.b.weight", "model.c.weight"]
    assert any("if these weights were trained" in text for text in report.warnings)


def test_a_tied_heads_placeholder_goes_with_its_embedding(tmp_path):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    source = hollow_source(tmp_path / "source", [], **{name: torch.ones(0) for name in names})
    embedding = {names[0]: torch.arange(8.0).view(4, 2)}
    tied = directory(tmp_path / "tied", {**TRAINED, **embedding}, tie_word_embeddings=True)
    report = reshard.merge(source, tmp_path / "out", fill_missing_from=tied)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == {*TRAINED, names[0]}
    assert torch.equal(merged[names[0]], embedding[names[0]])
    assert report.dropped_aliases == {names[1]: names[0]}
    untied = directory(tmp_path / "untied", {**TRAINED, **embedding}, tie_word_embeddings=False)
    with pytest.raises(IncompleteError, match="lm_head"):
        reshard.merge(source, tmp_path / "other", fill_missing_from=untied)


def test_placeholders_that_the_base_lacks_are_still_refused(tmp_path):
    source = hollow_source(tmp_path / "source", [], **{"x.weight": torch.ones(0)})
    base = directory(tmp_path / "base", BASE)
    with pytest.raises(IncompleteError, match=r"x\.weight"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=base)


def test_placeholders_beside_the_ranks_files_are_not_filled(tmp_path):
    """The trained weights are there: the base's would be other numbers."""
    source = hollow_source(tmp_path / "source", ["model.b.weight"])
    ranks = tmp_path / "source" / "global_step3"
    ranks.mkdir()
    (ranks / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    base = directory(tmp_path / "base", BASE)
    with pytest.raises(IncompleteError, match="global_step3"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=base)


def test_a_source_of_nothing_but_placeholders_is_no_model_to_fill(tmp_path):
    source = hollow_source(tmp_path / "source", list(TRAINED))
    base = directory(tmp_path / "base", BASE)
    with pytest.raises(UsageError, match="only placeholders"):
        reshard.merge(source, tmp_path / "out", fill_missing_from=base)
