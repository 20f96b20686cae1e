"""The published form of models, against what ``save_pretrained`` of the same model writes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import reshard
from reshard import formats
from reshard.core.box import whole
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import Entry, ParamGroup, TrainState, check
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.model import library
from reshard.model.build import build_configured
from reshard.model.conversion import FormConversion
from reshard.model.published import trace_published
from reshard.model.tracing import read_trace, start_trace
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "tie_word_embeddings": True,
}
MODELS = {
    "LlamaForCausalLM": ("llama", TEXT),
    "MixtralForCausalLM": ("mixtral", TEXT | {"num_local_experts": 3}),
    "GptOssForCausalLM": (
        "gpt_oss",
        {
            **TEXT,
            "num_local_experts": 3,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default"},
        },
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        TEXT | QWEN,
    ),
    "ViTForImageClassification": ("vit", VISION),
    "T5ForConditionalGeneration": (
        "t5",
        {"d_model": 16, "d_ff": 12, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 40},
    ),
    "LlavaForConditionalGeneration": (
        "llava",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 8},
            "image_token_index": 5,
        },
    ),
}


def make_model(name):
    model_type, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    config.architectures = [name]
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


def read_all(manifest, kind="param"):
    with SourceFiles() as pool:
        return {
            entry.fqn: (entry.shape, bytes(read_block(pool, entry, whole(entry.shape))))
            for entry in manifest.of_kind(kind)
        }


def save(model, path, **options):
    model.save_pretrained(path, **options)
    return formats.read(path / "model.safetensors")


def merge_as_saved(model, tmp_path, **changes):
    """Merge a state dict with the config that ``save_pretrained`` writes; compare all weights.

    Args:
        changes: other values of the config; None removes a key.
    """
    model.save_pretrained(tmp_path / "want")
    config = json.loads((tmp_path / "want" / "config.json").read_text()) | changes
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    given = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "run" / "config.json").write_text(json.dumps(given))
    report = reshard.merge(tmp_path / "run", tmp_path / "got")
    got, want = (load_file(tmp_path / at / "model.safetensors") for at in ("got", "want"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    return report


def trace(model):
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    return trace_published(build_configured(config, "config.json"), "config.json")


@pytest.mark.parametrize("name", MODELS)
def test_weights_move_between_memory_and_the_published_form(name, tmp_path):
    model = make_model(name)
    published = trace(model)
    memory = save(model, tmp_path / "memory", save_original_format=False)
    files = save(model, tmp_path / "files")
    converted = published.conversion.apply(memory)
    check(converted)
    assert read_all(converted) == read_all(files)
    back = published.conversion.invert().apply(files)
    check(back)
    assert read_all(back) == read_all(memory)
    assert {name for name in model.state_dict() if name not in published.aliases} == {
        entry.fqn for entry in memory.entries.values()
    }


def test_layers_of_multi_token_prediction_are_parts_of_the_published_form(tmp_path):
    """Ignored by transformers, whose models do not have them in memory."""
    sizes = TEXT | {"head_dim": 8, "moe_intermediate_size": 12, "n_routed_experts": 2}
    config = transformers.AutoConfig.for_model(
        "glm4_moe", **sizes, num_experts_per_tok=1, first_k_dense_replace=1
    )
    transformers.Glm4MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    last = {k.replace(".1.", ".2.", 1): v.clone() for k, v in weights.items() if ".layers.1." in k}
    extra = {"model.layers.2.eh_proj.weight": torch.ones(16, 32)}
    save_file(weights | last | extra, path, {"format": "pt"})
    report = reshard.merge(tmp_path / "model", tmp_path / "out")
    assert report.warnings == []
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*weights, *last, *extra}
    with pytest.raises(UnsupportedError, match="layers of multi-token prediction in memory"):
        reshard.merge(tmp_path / "model", tmp_path / "again", names="module")
    foreign = {"model.layers.3.eh_proj.weight": torch.ones(16, 32)}
    save_file(weights | foreign, path, {"format": "pt"})
    report = reshard.merge(tmp_path / "model", tmp_path / "other")
    assert any("does not have model.layers.3.eh_proj.weight" in text for text in report.warnings)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """Return the weights of a Mixtral in memory, with a momentum and a training state."""
    model = make_model("MixtralForCausalLM")
    manifest = save(model, tmp_path_factory.mktemp("mixtral"), save_original_format=False)
    slots = [replace(entry, kind="exp_avg") for entry in manifest.entries.values()]
    names = [entry.fqn for entry in slots]
    train = TrainState(
        optimizer_step=dict.fromkeys(names, 2.0),
        param_groups=(ParamGroup({"lr": 1}, tuple(names)),),
    )
    manifest = replace(manifest.with_entries([*manifest.entries.values(), *slots]), train=train)
    return manifest, trace(model).conversion


def test_the_optimizer_moves_with_the_weights(mixtral):
    manifest, conversion = mixtral
    converted = conversion.apply(manifest)
    assert read_all(converted, "exp_avg") == read_all(converted)
    names = {entry.fqn for entry in converted.of_kind("param")}
    assert set(converted.train.param_groups[0].fqns) == names
    assert converted.train.optimizer_step == dict.fromkeys(names, 2.0)
    back = conversion.invert().apply(converted)
    assert read_all(back, "exp_avg") == read_all(manifest)
    assert back.train.optimizer_step == manifest.train.optimizer_step


def test_parts_of_one_tensor_that_differ_are_refused(mixtral):
    manifest, conversion = mixtral
    published = conversion.apply(manifest)
    expert = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    stopped = replace(published, frozen=frozenset({expert}))
    with pytest.raises(UsageError, match="differ in their frozen"):
        conversion.invert().apply(stopped)
    lost = [entry for key, entry in published.entries.items() if key != ("exp_avg", expert)]
    with pytest.raises(IncompleteError, match="exp_avg"):
        conversion.invert().apply(published.with_entries(lost))


def test_a_slot_of_another_shape_is_refused_by_name(mixtral):
    manifest, conversion = mixtral
    fqn = "model.layers.0.mlp.experts.down_proj"
    row = Entry(fqn, "exp_avg_sq_row", FLOAT32, (), ())
    with pytest.raises(UnsupportedError, match="exp_avg_sq_row has shape"):
        conversion.apply(manifest.with_entries([*manifest.entries.values(), row]))
    plain = replace(row, fqn="model.norm.weight")
    kept = conversion.apply(manifest.with_entries([*manifest.entries.values(), plain]))
    assert kept.entries["exp_avg_sq_row", "model.norm.weight"].shape == ()


OPERATIONS = {
    "interleave": lambda t: t.reshape(2, 6, 4).transpose(0, 1).reshape(12, 4).contiguous(),
    "rope": lambda t: t.view(2, 3, 2, 4).transpose(1, 2).reshape(12, 4),
    "chunks": lambda t: torch.cat(torch.chunk(t, 3)[::-1]),
    "split": lambda t: torch.cat([*torch.split(t, [5, 7])][::-1], dim=0),
    "stack": lambda t: torch.stack(torch.unbind(t, dim=1), dim=0).squeeze(),
    "flatten": lambda t: t.flatten()[5:29].unflatten(0, (4, 6)).T,
    "steps": lambda t: torch.cat([t[::2], t[1::2]]),
    "select": lambda t: t[3].unsqueeze(-1).movedim(0, 1),
    "columns": lambda t: t[:, [0, 3, -2]].flatten(0, 1),
    "rows": lambda t: t.index_select(0, torch.tensor([4, 5, 6, 1, 0, 0])),
    "mask": lambda t: t[torch.arange(12) % 3 > 0],
    "no rows": lambda t: torch.cat([t[[]], t]),
    "padding": lambda t: torch.cat([t, t.new_zeros(3, 4)]).T.reshape(5, 12)[1:],
}


@pytest.fixture
def tensor(tmp_path):
    save_file({"t": torch.arange(48.0).reshape(12, 4)}, tmp_path / "model.safetensors")
    return torch.arange(48.0).reshape(12, 4)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_movement_of_elements_is_followed(operation, tensor, tmp_path):
    traced = read_trace(operation(start_trace("t", tensor)))
    conversion = FormConversion("model", {"t": (12, 4)}, {"t": traced})
    moved = conversion.apply(formats.read(tmp_path / "model.safetensors"))
    expected = operation(tensor).contiguous()
    assert read_all(moved)["t"] == (tuple(expected.shape), expected.numpy().tobytes())


def test_padding_is_left_out_on_the_way_back(tensor, tmp_path):
    memory, start = formats.read(tmp_path / "model.safetensors"), start_trace("t", tensor)
    padded = read_trace(torch.cat([start, start.new_zeros(3, 4)]))
    conversion = FormConversion("model", {"t": (12, 4)}, {"p": padded})
    conversion.prove()
    published = conversion.apply(memory)
    check(published)
    assert read_all(conversion.invert().apply(published)) == read_all(memory)
    lost = FormConversion("model", {"t": (12, 4)}, {"p": read_trace(start[1:])})
    with pytest.raises(UnsupportedError, match="loses or repeats elements"):
        lost.prove()


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (lambda t: t[[0, 1], [1, 2]], None),  # two dims
        (lambda t: t[torch.tensor([[0, 1]])], None),  # a matrix of numbers
        (lambda t: t + 1, r"aten\.add"),
    ],
)
def test_other_operations_are_refused(operation, said):
    with pytest.raises(UnsupportedError, match=said):
        operation(start_trace("t", torch.zeros(3, 4)))


@pytest.mark.parametrize(
    ("name", "config", "asked"),
    [
        ("BloomForCausalLM", {"model_type": "bloom", "n_layer": 1}, True),
        ("ElectraForCausalLM", {"model_type": "electra", "num_hidden_layers": 1}, True),
        ("OPTForCausalLM", {"model_type": "opt", "num_hidden_layers": 1}, True),
        ("GPT2LMHeadModel", {"model_type": "gpt2", "n_layer": 1}, False),
    ],
)
def test_a_head_that_save_pretrained_leaves_out_is_left_out(name, config, asked, tmp_path):
    """A state dict has it twice; transformers is asked where the embedding's name is unusual."""
    small = {"hidden_size": 16, "vocab_size": 40, "num_attention_heads": 2, "n_head": 2}
    small |= {"word_embed_proj_dim": 16, "embedding_size": 16, "ffn_dim": 16}
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config, **small))
    assert merge_as_saved(model, tmp_path).warnings == []
    content = json.loads((tmp_path / "want" / "config.json").read_text())
    assert library.may_be_tied(content, model.state_dict()) == asked


@pytest.mark.parametrize("encoder", ["vit", "wav2vec2"])  # only the first one's names are converted
def test_a_part_ties_its_weights_although_the_config_of_the_whole_denies_it(encoder, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16}
    decoder = {"vocab_size": 20, "is_decoder": True, "add_cross_attention": True}
    if encoder == "vit":
        whole = transformers.VisionEncoderDecoderModel
        parts = {"encoder": sizes | {"image_size": 8, "patch_size": 4}}
    else:
        whole = transformers.SpeechEncoderDecoderModel
        parts = {"encoder": sizes | {"conv_dim": (4,), "conv_kernel": (4,), "conv_stride": (2,)}}
    parts["decoder"] = sizes | decoder
    kinds = {"encoder": encoder, "decoder": "bert"}
    model = whole(
        whole.config_class(**{at: {"model_type": kinds[at], **parts[at]} for at in kinds})
    )
    merge_as_saved(model, tmp_path)


def test_a_model_with_a_text_encoder_and_a_decoder_is_merged(tmp_path):
    """Their configs are both configs of text, between which transformers does not choose."""
    tokens = {"vocab_size": 20, "pad_token_id": 1, "bos_token_id": 2}
    parts = {
        "text_encoder": {"model_type": "t5", "d_model": 16, "d_ff": 16, "num_layers": 1, **tokens},
        "audio_encoder": {"model_type": "encodec", "num_filters": 2, "codebook_size": 16},
        "decoder": {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, **tokens},
    }
    config = transformers.AutoConfig.for_model("musicgen", **parts)
    merge_as_saved(transformers.MusicgenForConditionalGeneration(config), tmp_path)


def test_a_head_that_only_the_model_has_is_named(tmp_path):
    model = make_model("MixtralForCausalLM")
    model.save_pretrained(tmp_path / "base")
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(state, tmp_path / "run.bin")
    report = reshard.merge(tmp_path / "run.bin", tmp_path / "out", hf_dir=tmp_path / "base")
    (warning,) = report.warnings
    assert "has 1 tensor that the checkpoint lacks" in warning
    assert "lm_head.weight" in warning


# The names of GptOss are the same in memory and in files.
@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("MixtralForCausalLM", r"layers\.1\..*\.experts"),
        ("GptOssForCausalLM", r"\.experts"),
        ("LlamaForCausalLM", r"layers\.0\."),
        ("LlamaForCausalLM", r"\.down_proj\."),
    ],
)
def test_layers_without_their_weights_are_refused(kind, lost, tmp_path):
    base, lacking = tmp_path / "base", tmp_path / "lacking"
    make_model(kind).save_pretrained(base)
    whole = load_file(base / "model.safetensors")
    lacking.mkdir()
    (lacking / "config.json").write_bytes((base / "config.json").read_bytes())
    stored = {k: v for k, v in whole.items() if not re.search(lost, k)}
    save_file(stored, lacking / "model.safetensors")
    with pytest.raises(IncompleteError, match="tensors in its layers that the checkpoint lacks"):
        reshard.merge(lacking, tmp_path / "merged")
    with pytest.raises(IncompleteError, match="tensors in its layers that no file contains"):
        reshard.split(lacking, tmp_path / "converted", to="dcp")
    reshard.merge(lacking, tmp_path / "merged", fill_missing_from=base)
    filled = load_file(tmp_path / "merged" / "model.safetensors")
    assert filled.keys() == whole.keys()
    assert all(torch.equal(filled[name], value) for name, value in whole.items())
    reshard.merge(lacking, tmp_path / "part", names="source")
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == stored.keys()


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("GPT2LMHeadModel", "gpt2"),
        ("LlamaForCausalLM", "llama"),
        ("LlamaForSequenceClassification", "llama"),
        ("OPTForCausalLM", "opt"),
        ("PhiForCausalLM", "phi"),
        ("Qwen3ForCausalLM", "qwen3"),
    ],
)
def test_a_part_that_all_layers_lack_is_found_without_building_the_model(name, model_type):
    config = transformers.AutoConfig.for_model(model_type, **TEXT, n_layer=2, pad_token_id=0)
    with torch.device("meta"):
        names = [*getattr(transformers, name)(config).state_dict()]
    content = json.loads(config.to_json_string())
    assert not library.may_lack_weights(content, names)
    assert not library.may_be_inside(content, names)
    pieces = [re.split(r"\.\d+\.", name) for name in names]
    parts = {piece[1].rpartition(".")[0] for piece in pieces if len(piece) == 2}
    assert len(parts) >= 6
    for part in parts:
        assert library.may_lack_weights(content, [n for n in names if f".{part}." not in n]), part


def test_norms_that_all_layers_lack_are_named(tmp_path):
    config = transformers.AutoConfig.for_model("qwen3", **TEXT, head_dim=8)
    config.architectures = ["Qwen3ForCausalLM"]
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "run")
    stored = load_file(tmp_path / "run" / "model.safetensors")
    stored = {name: value for name, value in stored.items() if "k_norm" not in name}
    save_file(stored, tmp_path / "run" / "model.safetensors")
    (warning,) = reshard.merge(tmp_path / "run", tmp_path / "out").warnings
    assert "2 tensors that the checkpoint lacks" in warning
    assert "k_norm" in warning


def test_every_model_that_transformers_converts_is_found_in_its_source():
    mapping = pytest.importorskip("transformers.conversion_mapping")
    named = {*mapping._MODEL_TO_CONVERSION_PATTERN, *mapping._build_checkpoint_conversion_mapping()}
    assert named
    # `legacy` stands for models of every type; classes are found by their own names.
    assert [n for n in named - {"legacy"} if not library.may_be_converted({"model_type": n})] == []
    assert not library.may_be_converted({"model_type": "llama", "architectures": ["Mine"]})


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "ViTForImageClassification"])
def test_a_config_without_a_class_is_that_of_the_class_with_these_names(name, tmp_path):
    model_type, config = MODELS[name]
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **config))
    report = merge_as_saved(model, tmp_path, architectures=None)
    assert any(f"save_pretrained of {name}" in text for text in report.changes)


def test_a_class_that_transformers_does_not_export_is_found():
    name = "UnlimitedOcrVisionEncoder"
    assert not hasattr(transformers, name)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "unlimited_ocr_vision_encoder", "architectures": [name], **small}
    assert type(build_configured(config, "test")).__name__ == name
