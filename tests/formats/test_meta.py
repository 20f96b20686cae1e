"""Llama as Meta publishes it: its own code's files and logits, and transformers' loader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import reshard
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError

SAMPLE = Path(__file__).parents[1] / "data" / "meta" / "llama_mp2"


@pytest.fixture
def sample(tmp_path):
    """Return a writable copy."""
    return Path(shutil.copytree(SAMPLE, tmp_path / "meta"))


def held(directory):
    """Return every file's tensors, as torch loads them."""
    return [torch.load(path) for path in sorted(directory.glob("consolidated.*.pth"))]


def test_the_ranks_files_are_merged_as_meta_s_own_code_has_the_model(tmp_path):
    reshard.merge(SAMPLE, tmp_path / "m.safetensors")
    found, wanted = load_file(tmp_path / "m.safetensors"), torch.load(SAMPLE / "expected.pt")
    assert found.keys() == wanted["model"].keys()
    assert all(torch.equal(found[key], value) for key, value in wanted["model"].items())
    assert not {"params.json"} & reshard.inspect(SAMPLE).manifest.unread_files.keys()


def test_a_directory_loads_in_transformers_with_meta_s_logits(tmp_path):
    reshard.merge(SAMPLE, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    said = torch.load(SAMPLE / "logits.pt")
    with torch.no_grad():
        torch.testing.assert_close(
            model(said["tokens"]).logits, said["logits"], rtol=1e-4, atol=1e-5
        )


def test_a_model_goes_back_to_meta_s_files(tmp_path):
    reshard.merge(SAMPLE, tmp_path / "hf")
    reshard.split(tmp_path / "hf", tmp_path / "meta", to="meta", tp=2, weights_only=True)
    for found, wanted in zip(held(tmp_path / "meta"), held(SAMPLE), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    width = int(params["ffn_dim_multiplier"] * int(2 * (4 * params["dim"]) / 3))
    assert width == held(SAMPLE)[0]["layers.0.feed_forward.w1.weight"].shape[0] * 2
    given = json.loads((SAMPLE / "params.json").read_text())
    same = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps")
    assert {key: params[key] for key in same} == {key: given[key] for key in same}


def test_another_number_of_ranks_and_a_tied_head(tmp_path):
    reshard.split(SAMPLE, tmp_path / "one", tp=1, weights_only=True)
    assert len(held(tmp_path / "one")) == 1
    assert reshard.diff(tmp_path / "one", SAMPLE).equal == 30
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    reshard.split(tmp_path / "hf", tmp_path / "tied", to="meta", tp=2, weights_only=True)
    ranks = held(tmp_path / "tied")
    whole = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(torch.cat([rank["output.weight"] for rank in ranks]), whole)
    assert torch.equal(torch.cat([rank["tok_embeddings.weight"] for rank in ranks], 1), whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_embedding_is_gathered_along_the_dim_that_it_is_cut_along(sample, tmp_path, dim):
    """Llama 3 cuts it by words."""
    whole = torch.load(SAMPLE / "expected.pt")["model"]["tok_embeddings.weight"]
    for rank, path in enumerate(sorted(sample.glob("consolidated.*.pth"))):
        state = torch.load(path)
        state["tok_embeddings.weight"] = whole.chunk(2, dim)[rank].contiguous()
        state["rope.freqs"] = torch.arange(4.0)
        torch.save(state, path)
    reshard.merge(sample, tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["tok_embeddings.weight"], whole)
    report = reshard.merge(sample, tmp_path / "hf")
    assert any("rope.freqs" in text for text in report.changes)


def test_what_is_no_whole_model_is_refused(sample, tmp_path):
    params = sample / "params.json"
    given = json.loads(params.read_text())
    params.write_text(json.dumps({**given, "vocab_size": 65}))
    with pytest.raises(CorruptError, match="has vocab_size 65"):
        reshard.merge(sample, tmp_path / "a")
    params.write_text(json.dumps({**given, "use_scaled_rope": True}))
    with pytest.raises(UnsupportedError, match=r"Llama 3.1 has 8, Llama 3.2 has 32"):
        reshard.merge(sample, tmp_path / "a", names="hf")
    params.write_text(json.dumps({**given, "n_kv_heads": 1}))
    with pytest.raises(UnsupportedError, match="1 key and value heads over 2 ranks"):
        reshard.merge(sample, tmp_path / "a")
    params.write_text(json.dumps(given))
    (sample / "consolidated.00.pth").rename(sample / "consolidated.02.pth")
    with pytest.raises(IncompleteError, match="no file for rank 0"):
        reshard.merge(sample, tmp_path / "a")


def test_what_meta_s_files_cannot_say_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--tp 3"):
        reshard.split(SAMPLE, tmp_path / "a", tp=3, weights_only=True)


def test_meta_has_no_optimizer_to_ask_for(tmp_path):
    report = reshard.split(SAMPLE, tmp_path / "a", tp=1)
    assert report.warnings[-1].startswith("weights only (--init-optimizer none): the source has no")
