"""A real checkpoint of Megatron-Bridge: its configuration stands for the arguments; LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import reshard
from reshard import formats
from reshard.core.box import Box
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT32
from reshard.core.location import Location
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats.megatron import inferred, run_config
from reshard.formats.megatron.arguments import Arguments
from reshard.layouts.model_parallel.adapters import restore_rows
from reshard.layouts.model_parallel.megatron_traits import parse_args
from reshard.layouts.model_parallel.rules import load_whole_table
from reshard.state_dict.global_tensor import GlobalTensor
from tests.support.digests import compute_digests
from tests.support.directories import unpack

PACKED = Path(__file__).parents[1] / "data" / "megatron_bridge_0.3.1" / "llama_tp2.tar.xz"
STEP = "iter_0000003"


@pytest.fixture
def run(tmp_path):
    unpack(PACKED, tmp_path)
    return tmp_path / "bridge"


def edit(run, change):
    """Change the configuration."""
    path = run / STEP / run_config.NAME
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config))


def read_args(run):
    return run_config.read(Location.from_paths([run / STEP]))[0]


def test_every_tensor_has_the_bytes_that_megatron_holds(run):
    expected = json.loads((run.parent / "expected.json").read_text())
    with reshard.open(run) as checkpoint:
        manifest = checkpoint.manifest
        found = compute_digests(checkpoint)
    assert found == expected["tensors"]
    assert (manifest.train.step, manifest.train.samples) == (3, 24)
    assert manifest.origin.mesh["tp"] == 2


def test_the_model_has_hugging_face_s_names(run, tmp_path):
    reshard.merge(run, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 12,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    with reshard.open(tmp_path / "model") as model:
        assert model["model.layers.1.self_attn.k_proj.weight"].shape == (8, 16)
        assert model["model.embed_tokens.weight"].shape[0] == 30


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_another_grid_holds_the_same_and_has_arguments(run, tmp_path, form):
    out = tmp_path / "out"
    reshard.split(run, out, to="megatron", pp=2, tp=1, dp=1, ckpt_format=form)
    assert reshard.diff(run, out, kinds=["weight", "optimizer"]).same
    train = formats.read(out).train
    assert train.samples == 24
    stated = {"pipeline_model_parallel_size": 2, "swiglu": True, "consumed_train_samples": 24}
    assert {name: train.config[name] for name in stated} == stated


def test_a_run_of_another_adapter_than_lora_is_refused(run):
    edit(run, lambda config: config.update(peft={"_target_": "megatron.bridge.peft.dora.DoRA"}))
    with pytest.raises(UnsupportedError, match=r"PEFT \(DoRA\)"):
        formats.read(run)


def test_a_layout_that_is_not_stated_is_refused(run):
    layout = {"_target_": "megatron.core.PipelineParallelLayerLayout", "_call_": True}
    edit(run, lambda config: config["model"].update(pipeline_model_parallel_layout=layout))
    with pytest.raises(UnsupportedError, match="does not state the pipeline layout"):
        formats.read(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_target_": "megatron.bridge.models.olmoe.OlMoEModelProvider"}, "OlMoEModelProvider"),
        ({"activation_func": {"_target_": "torch.nn.functional.relu"}}, "the activation relu"),
    ],
)
def test_a_model_that_the_fields_do_not_describe_gets_no_names(run, tmp_path, change, message):
    edit(run, lambda config: config["model"].update(change))
    with pytest.raises(UnsupportedError, match=message):
        reshard.merge(run, tmp_path / "model", names="hf")
    reshard.split(run, tmp_path / "out", to="megatron", tp=1, dp=1)
    assert reshard.diff(run, tmp_path / "out", kinds=["weight", "optimizer"]).same


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_moe_experts": 8}, {"experts": 8}),
        ({"share_embeddings_and_output_weights": True}, {"tied": True}),
        ({"num_query_groups": 2}, {"groups": 2}),
        ({"rope_scaling": True, "rope_scaling_factor": 32.0}, {"rope_theta": 10000.0}),
        (
            {"gated_linear_unit": False, "activation_func": {"_target_": "a.squared_relu"}},
            {"activation": "relu2", "gated": False},
        ),
        (
            {"transformer_layer_spec": {"_target_": "a.gemma2_layer_spec"}},
            {"unsupported": ("layers that gemma2_layer_spec of Megatron-Bridge builds",)},
        ),
        (
            {"activation_func": {"_target_": "megatron.core.activations.fast_gelu"}},
            {"activation": "gelu_pytorch_tanh", "unsupported": ()},
        ),
    ],
)
def test_fields_of_the_model_become_traits(run, change, wanted):
    edit(run, lambda config: config["model"].update(change))
    traits = parse_args(read_args(run), "run")
    assert {name: getattr(traits, name) for name in wanted} == wanted


@pytest.mark.parametrize("kind", ["BridgeGPTModelConfig", "GPTModelConfig"])
def test_fields_of_the_layers_may_be_under_transformer(run, kind):
    """Newer versions save the model so, and its activation as a name (``as_dict``)."""
    outer = """
        vocab_size make_vocab_size_divisible_by should_pad_vocab seq_length rotary_base rope_scaling
        share_embeddings_and_output_weights position_embedding_type rotary_percent
    """.split()
    wanted = read_args(run)

    def nest(config):
        model = config["model"]
        fields = {name: model.pop(name) for name in outer if name in model}
        model.pop("transformer_layer_spec", None)
        model |= {"_target_": "megatron.core.TransformerConfig", "activation_func": "silu"}
        config["model"] = {"_target_": f"megatron.{kind}", **fields, "transformer": model}

    edit(run, nest)
    found = read_args(run)
    differing = {"transformer_impl", "_target_"}  # no file states the builder of the layers
    assert {key for key in wanted | found if wanted.get(key) != found.get(key)} - differing == set()


def test_padding_follows_the_size_that_divides_it(run):
    assert read_args(run)["padded_vocab_size"] == 32
    edit(run, lambda config: config["model"].update(should_pad_vocab=False))
    assert read_args(run)["padded_vocab_size"] == 30


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['true']", "- 1", "model: 3", "model: {num_layers: many}"],
)
def test_a_document_of_another_kind_is_refused(run, text):
    (run / STEP / run_config.NAME).write_text(text)
    with pytest.raises(CorruptError, match=run_config.NAME):
        formats.read(run)


MLP, LORA_B = "decoder.layers.0.mlp", "linear_fc1.lora_B.default.weight"


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_gate_and_up_of_ms_swift_are_put_in_order(ranks):
    rows = np.arange(16)  # of the gate, then of up
    stored = rows.reshape(2, ranks, -1).swapaxes(0, 1).ravel()
    chunk = Chunk(Box((0, 0), (16, 1)), "f", 0, (4, 4), FLOAT32)
    found = np.zeros_like(rows)
    for part in restore_rows(f"{MLP}.{LORA_B}", (16, 1), [chunk], ranks, gated=True):
        first, count = part.box.origin[0], part.box.shape[0]
        at = part.byte_offset // 4 + np.arange(count) * (part.byte_strides[0] // 4)
        found[first : first + count] = stored[at]
    assert found.tolist() == rows.tolist()


def test_matrices_that_bridge_cuts_are_whole_in_ms_swift():
    table = load_whole_table("megatron")
    cuts = {
        "linear_fc1.lora_A.default.weight": "replicated",
        "linear_fc2.lora_A.default.weight": "row",
        "linear_fc2.lora_B.default.weight": "replicated",
        "linear_fc1.adapter.linear_in.weight": "column",
        "linear_fc2.adapter.linear_out.weight": "column",
    }
    assert {name: table.require(f"{MLP}.{name}", {}).rule.cut for name in cuts} == cuts
    with pytest.raises(UnsupportedError, match="experts of a rank share an adapter"):
        table.require(f"{MLP}.experts.experts.linear_fc1.adapter.linear_in.weight", {})


def test_a_matrix_that_may_have_a_gate_is_refused():
    stored = {f"decoder.layers.mlp.{LORA_B}": GlobalTensor(FLOAT32, (2, 16, 4), ())}
    args = Arguments("common.pt", {"tensor_model_parallel_size": 2})
    with pytest.raises(UnsupportedError, match=r"(?s)no adapter of linear_fc2.*megatron export"):
        inferred.infer_gated_adapters(args, stored)
    fc2 = GlobalTensor(FLOAT32, (2, 4, 8), ())
    both = stored | {"decoder.layers.mlp.linear_fc2.lora_A.default.weight": fc2}
    assert inferred.infer_gated_adapters(args, both).gated
