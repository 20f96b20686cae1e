"""Merges of SentenceTransformers, in the layout of sentence-transformers 6.2."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import IncompleteError

# ``save_pretrained`` of Transformer, Pooling and Dense; Pooling has no weights.
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
]
EMBEDDING = "embeddings.word_embeddings.weight"


@pytest.fixture
def saved(tmp_path):
    """Return a directory with the configuration of a SentenceTransformer, without weights."""
    path = tmp_path / "saved"
    (path / "2_Dense").mkdir(parents=True)
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 8}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modules.json").write_text(json.dumps(MODULES))
    return path


def test_weights_of_other_modules_are_reported(saved, tmp_path):
    """Check that the head, which lies in a folder of its own, is not lost without a word."""
    save_file({EMBEDDING: torch.ones(8, 4)}, saved / "model.safetensors")
    save_file({"linear.weight": torch.ones(2, 4)}, saved / "2_Dense/model.safetensors")
    report = reshard.merge(saved, tmp_path / "out")
    assert sum("2_Dense" in text for text in report.warnings) == 1
    assert sum("SentenceTransformer(" in text for text in report.warnings) == 1
    assert "BertModel" in report.load_line


@pytest.mark.parametrize("is_listed", [True, False])
def test_moments_of_another_module_are_not_given_to_a_weight_of_its_shape(
    saved, tmp_path, is_listed
):
    """Check an optimizer of as many parameters as the weights: one is frozen, one is the head's."""
    if not is_listed:
        (saved / "modules.json").unlink()
    trained = {EMBEDDING: torch.ones(8, 4), "pooler.dense.weight": torch.ones(4, 4)}
    save_file(trained, saved / "model.safetensors")
    save_file({"linear.weight": torch.ones(4, 4)}, saved / "2_Dense/model.safetensors")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(n, 4)) for n in (8, 4)])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), saved / "optimizer.pt")
    (saved / "trainer_state.json").write_text('{"global_step": 1}')
    with reshard.open(saved) as checkpoint:
        assert not checkpoint.manifest.has_optimizer
    with pytest.raises(IncompleteError, match=r"of other modules, .*2_Dense"):
        reshard.split(saved, tmp_path / "out", to="torch")


def test_names_of_the_whole_model_are_not_said_to_load_into_its_first_module(saved, tmp_path):
    """Check the weights of an engine: from_pretrained would draw all of them anew."""
    weights = {f"0.model.{EMBEDDING}": torch.ones(8, 4), "2.linear.weight": torch.ones(2, 4)}
    torch.save(weights, saved / "pytorch_model.bin")
    report = reshard.merge(saved, tmp_path / "out")
    assert report.load_line.startswith("reshard.open(")
    assert any("load them into the SentenceTransformer" in text for text in report.warnings)


@pytest.mark.parametrize("text", ["{}", "[1]", "not JSON", '[{"name": 0}]'])
def test_a_list_of_another_program_is_passed_over(text, saved, tmp_path):
    """Check that a file with the same name and another content changes nothing."""
    (saved / "modules.json").write_text(text)
    save_file({EMBEDDING: torch.ones(8, 4)}, saved / "model.safetensors")
    report = reshard.merge(saved, tmp_path / "out")
    assert not any("SentenceTransformer" in line for line in report.warnings)
