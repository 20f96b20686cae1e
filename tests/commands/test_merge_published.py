"""`merge` of transformers models writes what ``save_pretrained`` of the same model writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard import naming
from reshard.core.keys import Edits
from reshard.errors import UsageError
from reshard.layouts.model_parallel.traits import Traits
from reshard.naming import tables
from tests.model.test_published import MODELS, make_model
from tests.support.programs import run_python

BERT = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
}


MEGATRON = Path(__file__).parents[1] / "data" / "megatron" / "llama_tp2pp2" / "ckpt"
KEPT = "the output has the names of the source"


def test_one_file_of_a_megatron_run_says_that_it_keeps_the_names(tmp_path):
    def merge(**options):
        report = reshard.merge(MEGATRON, tmp_path / "a.safetensors", overwrite=True, **options)
        return [text for text in report.warnings if text.startswith(KEPT)]

    (text,) = merge()
    assert "which transformers does not load; pass --names hf for those of Hugging Face" in text
    assert "decoder.final_layernorm.weight" in load_file(tmp_path / "a.safetensors")
    assert not merge(names="hf")
    assert "model.norm.weight" in load_file(tmp_path / "a.safetensors")
    assert not merge(names="source")


def test_one_file_of_an_unknown_model_says_why_it_keeps_the_names():
    traits = Traits(source="args", unsupported=("square positions",))
    own = naming.ModelNames(may_differ=lambda _: True, describe=lambda _: traits)
    text = tables.suggest_hf_names(own, traits, naming.NameOptions())
    assert text.startswith(f"{KEPT}: it matches no model family of reshard; the nearest is ")
    assert "square positions" in text


@pytest.fixture(scope="module", params=[*MODELS, "BertForMaskedLM"])
def run(request, tmp_path_factory):
    """Write a checkpoint of a model as it is in memory, without ties, and its published form."""
    MODELS.setdefault("BertForMaskedLM", ("bert", BERT))
    place = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    model.save_pretrained(place / "published")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (place / "run").mkdir()
    torch.save(state, place / "run" / "pytorch_model.bin")
    config = (place / "published" / "config.json").read_text()
    (place / "run" / "config.json").write_text(config)
    return place, state


@pytest.mark.parametrize("form", ["run", "published"])
def test_a_directory_is_what_save_pretrained_writes(run, form, tmp_path):
    place, _ = run
    reshard.merge(place / form, tmp_path / "out")
    wanted = place / "published" / "model.safetensors"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == wanted.read_bytes()


def test_one_file_has_the_same_tensors(run, tmp_path):
    place, _ = run
    reshard.merge(place / "run", tmp_path / "model.safetensors")
    assert_equal(
        load_file(tmp_path / "model.safetensors"),
        load_file(place / "published" / "model.safetensors"),
    )


def test_names_in_memory_are_kept_or_restored(run, tmp_path):
    place, state = run
    reshard.merge(place / "run", tmp_path / "kept.safetensors", names="module", tied="keep")
    assert_equal(load_file(tmp_path / "kept.safetensors"), state)
    reshard.merge(place / "run", tmp_path / "kept.pt")
    kept = torch.load(tmp_path / "kept.pt")
    assert kept.keys() <= state.keys()
    reshard.merge(place / "published", tmp_path / "back.safetensors", names="module")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() <= state.keys()
    assert_equal(back, {name: state[name] for name in back})


def test_published_files_of_torch_are_read_as_those_of_safetensors(run, tmp_path):
    place, _ = run
    (tmp_path / "bin").mkdir()
    published = load_file(place / "published" / "model.safetensors")
    torch.save(published, tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(place / "published" / "config.json", tmp_path / "bin")
    written = []
    for name, source in (("one", place / "published"), ("other", tmp_path / "bin")):
        out = tmp_path / f"{name}.pt"
        reshard.split(source, out, to="torch", init_optimizer="none")
        written.append(torch.load(out)["model"])
    assert list(written[0]) == list(written[1])  # the order of the model
    assert_equal(*written)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture
def mixtral(tmp_path):
    model = make_model("MixtralForCausalLM")
    (tmp_path / "run").mkdir()
    model.config.save_pretrained(tmp_path / "run")
    return tmp_path / "run", dict(model.state_dict())


def test_weights_of_another_model_keep_their_names(mixtral, tmp_path):
    run, state = mixtral
    torch.save({f"policy.{name}": value for name, value in state.items()}, run / "model.bin")
    report = reshard.merge(run, tmp_path / "out")
    assert any("is another model" in text for text in report.warnings)
    assert "from_pretrained" not in report.load_line
    assert "policy.model.norm.weight" in load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(UsageError, match="is another model"):
        reshard.merge(run, tmp_path / "hf", names="hf")


def test_renames_apply_to_the_published_names(mixtral, tmp_path):
    run, state = mixtral
    torch.save(state, run / "model.bin")
    edits = Edits(rename=[("block_sparse_moe", "moe")])
    report = reshard.merge(run, tmp_path / "out", edits=edits)
    assert any("save_pretrained of MixtralForCausalLM" in text for text in report.changes)
    assert "model.layers.0.moe.experts.2.w1.weight" in load_file(
        tmp_path / "out" / "model.safetensors"
    )


def test_slots_of_another_shape_do_not_decide_about_the_weights(mixtral, tmp_path):
    # as Adafactor has them
    run, state = mixtral
    slots = {fqn: {"step": 1.0, "exp_avg_sq_row": torch.zeros(2)} for fqn in state}
    optimizer = {"state": slots, "param_groups": [{"lr": 0.1, "params": [*state]}]}
    torch.save({"model": state, "optimizer": optimizer}, run / "model.pt")
    reshard.merge(run / "model.pt", tmp_path / "out")
    expert = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    assert expert in load_file(tmp_path / "out" / "model.safetensors")


def test_a_model_that_is_never_converted_needs_no_transformers(tmp_path):
    from safetensors.torch import save_file

    source = tmp_path / "model"
    source.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(3)}, source / "model.safetensors")
    probe = (
        "import sys, reshard\n"
        f"reshard.merge({str(source)!r}, {str(tmp_path / 'out')!r})\n"
        "print('transformers' in sys.modules)\n"
    )
    done = run_python("-c", probe, check=True)
    assert done.stdout == "False\n"


def test_an_embedding_with_more_rows_than_words_keeps_the_size_of_the_vocabulary(tmp_path):
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    text = {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "cross_attention_layers": [],
        "vocab_size": 40,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 28,
        "vision_output_dim": 16,
        "intermediate_layers_indices": [0],
    }
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=vision, text_config=text))
    assert model.get_input_embeddings().weight.shape[0] == 48
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "run")
    torch.save(dict(model.state_dict()), tmp_path / "run" / "model.bin")
    reshard.merge(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 40


def test_a_new_optimizer_has_the_first_name_of_a_tied_weight(tmp_path):
    from torch.distributed.checkpoint import FileSystemReader
    from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3ForMaskedLM

    model = JinaEmbeddingsV3ForMaskedLM(JinaEmbeddingsV3Config(**BERT, pad_token_id=0))
    first = "lm_head.decoder.weight"  # registered before the embedding, which files have
    assert model.get_parameter(first) is model.get_input_embeddings().weight
    assert first in dict(model.named_parameters())
    model.save_pretrained(tmp_path / "published")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps([{"lr": 0.1}]))
    reshard.split(
        tmp_path / "published",
        tmp_path / "dcp",
        to="dcp",
        init_optimizer="zeros",
        param_groups=groups,
    )
    stored = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name for name in trained if f"optim.state.{name}.exp_avg" in stored} == trained
