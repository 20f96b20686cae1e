"""``--to nanotron`` from other frameworks writes what nanotron saves of the same state.

By hand, nanotron at 2411b02 has loaded what is written of a Megatron run at TP 2 x PP 2, at one
rank and with ZeRO-1, has saved the same tensors again, and its own converter to Hugging Face has
made a model of it with Megatron's logits.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import reshard
from plugins.nanotron.tests.judged.samples import KEPT, SLOTS, list_files, load_file
from reshard.errors import UnsupportedError
from tests.judges.megatron_cases import STEPS
from tests.judges.megatron_data import SAMPLES
from tests.support.same_objects import is_same

pytestmark = pytest.mark.slow

NAMES = {
    "model.token_position_embeddings.pp_block.token_embedding.weight": "model.embed_tokens.weight",
    "model.final_layer_norm.pp_block.weight": "model.norm.weight",
    "model.lm_head.pp_block.weight": "lm_head.weight",
}
FUSED = {
    "attn.qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
    "attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
    "input_layernorm": ["input_layernorm"],
    "post_attention_layernorm": ["post_attention_layernorm"],
}


def list_parts(name):
    """Return the names of transformers' tensors that nanotron joins into one of its tensors."""
    if name in NAMES:
        return [NAMES[name]]
    layer, inside = name.removeprefix("model.decoder.").split(".pp_block.")
    module, leaf = inside.rsplit(".", 1)
    return [f"model.layers.{layer}.{part}.{leaf}" for part in FUSED[module]]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the state of nanotron's own run as transformers' Llama and its AdamW have it."""
    place, run = tmp_path_factory.mktemp("published"), KEPT / "llama_tp2pp3" / "ckpt"
    said = json.loads((run / "3" / "model_config.json").read_text())
    config = LlamaConfig(**{k: v for k, v in said.items() if hasattr(LlamaConfig(), k)})
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.009, foreach=False)
    shapes = {name: value.shape for name, value in model.named_parameters()}
    held = dict(model.named_parameters())
    with reshard.open(run) as checkpoint, torch.no_grad():
        for name in checkpoint:
            parts = list_parts(name)
            rows = [shapes[part][0] for part in parts]
            for part, value in zip(parts, checkpoint[name][...].split(rows), strict=True):
                held[part].copy_(value)
                optimizer.state[held[part]]["step"] = torch.tensor(float(STEPS))
            for slot in SLOTS:
                whole = checkpoint.optimizer(slot)[name][...]
                for part, value in zip(parts, whole.split(rows), strict=True):
                    optimizer.state[held[part]][slot] = value.clone()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    torch.save(state, place / "state.pt")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(place)
    return place


def states_of(path):
    """Return parameter -> its state in an optimizer's file."""
    held = load_file(path)
    return {name: held["state"][number] for number, name in held["names"].items()}


@pytest.mark.parametrize("case", ["llama_pp2", "llama_tp2pp3"])
def test_every_file_is_what_nanotron_saved(case, published, tmp_path):
    grid = {"llama_pp2": {"tp": 1, "pp": 2}, "llama_tp2pp3": {"tp": 2, "pp": 3}}[case]
    out = tmp_path / "out"
    reshard.split(published / "state.pt", out, to="nanotron", model=published, dp=1, **grid)
    theirs, ours = list_files(KEPT / case / "ckpt"), list_files(out)
    assert ours.keys() - {"config.json"} == theirs.keys()  # transformers' goes along
    for name, path in theirs.items():
        mine = ours[name]
        if path.suffix == ".safetensors":
            one, two = load_file(mine), load_file(path)
            assert torch.equal(one["data"], two["data"]), name
            assert replace_numpy(one["said"]) == replace_numpy(two["said"]), name
        elif name.startswith("3/optimizer/optimizer_pp"):
            assert is_same(states_of(mine), states_of(path)), name
        elif "optimizer_config" in name:
            assert is_same(load_file(mine), load_file(path))
    written, wanted = (json.loads(run["3/model_config.json"].read_text()) for run in (ours, theirs))
    assert written == {key: wanted[key] for key in written}


def test_a_run_becomes_the_model_of_transformers(published, tmp_path):
    run, wanted = KEPT / "llama_tp2pp3" / "ckpt", torch.load(published / "state.pt")
    reshard.merge(run, tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert is_same(dict(model.state_dict()), dict(wanted["model"]))
    reshard.split(run, tmp_path / "state.pt", to="torch")
    with reshard.open(tmp_path / "state.pt") as checkpoint:
        for slot in SLOTS:
            held = checkpoint.optimizer(slot)
            for number, fqn in enumerate(wanted["model"]):
                assert torch.equal(held[fqn][...], wanted["optimizer"]["state"][number][slot])


def test_a_model_that_transformers_lacks_keeps_its_names(tmp_path):
    shutil.copytree(KEPT / "qwen_tp2" / "ckpt", tmp_path / "run")
    (path,) = (tmp_path / "run").rglob("model_config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "no_rope_layer": 2}))
    report = reshard.merge(tmp_path / "run", tmp_path / "model")
    assert any("layers without rotary positions" in text for text in report.changes)
    report = reshard.split(tmp_path / "run", tmp_path / "dcp", to="dcp")
    assert any("layers without rotary positions" in text for text in report.derived)
    with pytest.raises(UnsupportedError, match="no_rope_layer"):
        reshard.merge(tmp_path / "run", tmp_path / "again", names="hf")


def test_a_rate_in_a_tensor_becomes_a_number(published, tmp_path):
    state = torch.load(published / "state.pt")
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = torch.tensor(0.25)
    torch.save(state, tmp_path / "state.pt")
    # It is copied into the run, which is nanotron's also with a file of HF Trainer in it.
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    out = tmp_path / "out"
    reshard.split(tmp_path / "state.pt", out, to="nanotron", model=published, tp=1, pp=1, dp=1)
    assert (out / "trainer_state.json").is_file()
    with reshard.open(out) as written:
        assert {group.hyper["lr"] for group in written.manifest.train.param_groups} == {0.25}


def replace_numpy(said):
    """Return a header in which plain numbers replace those of numpy."""
    return [[key, value.replace("np.int64(", "").replace("),", ",")] for key, value in said]


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_megatron_run_is_the_same_state(megatron_case, form, tmp_path):
    source, out = megatron_case("llama_tp2pp2") / form, tmp_path / "out"
    reshard.split(source, out, to="nanotron", tp=2, pp=2, dp=2, zero_stage=1)
    reshard.split(source, tmp_path / "named", to="dcp")
    with reshard.open(out) as ours, reshard.open(tmp_path / "named") as named:
        assert len([*ours]) == 27  # 4 layers
        for name in ours:
            parts = list_parts(name)
            assert torch.equal(ours[name][...], torch.cat([named[part][...] for part in parts]))
            for slot in SLOTS:
                wanted = torch.cat([named.optimizer(slot)[part][...] for part in parts])
                assert torch.equal(ours.optimizer(slot)[name][...], wanted), (slot, name)
        train = ours.manifest.train
        assert (train.step, train.samples) == (STEPS, STEPS * SAMPLES)
        assert train.scheduler["last_epoch"] == STEPS
        assert set(train.optimizer_step.values()) == {STEPS}
        decays = {group.fqns[0]: group.hyper["weight_decay"] for group in train.param_groups}
        assert {name for name, decay in decays.items() if not decay} == {
            name for name in decays if "norm" in name
        }


def test_a_model_that_nanotron_lacks_is_refused(megatron_case, tmp_path):
    source = megatron_case("qwen3_moe_tp2ep2") / "torch"
    with pytest.raises(
        UnsupportedError, match="is a qwen3_moe model, but nanotron is supported for llama"
    ):
        reshard.split(source, tmp_path / "out", to="nanotron", tp=1, pp=1, dp=1)
