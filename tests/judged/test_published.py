"""The published form of transformers models: real FSDP 2 and HF Trainer, in both directions."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import reshard
from reshard.dcp import StorageReader
from reshard.errors import UsageError
from tests.judged.expected import read_expected
from tests.judges import hf_trainer, published_worker
from tests.judges.ranks import run_in_turn
from tests.model.test_published import make_model
from tests.trainer import worlds

NAMES = ["MixtralForCausalLM", "Qwen3MoeForCausalLM"]
GROUPS = [{"lr": 1e-4}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Train two steps on two ranks of FSDP 2, and save."""
    place = tmp_path_factory.mktemp("fsdp2")
    for name in NAMES:
        (place / name).mkdir()
    jobs = [(name, published_worker.train, name, place / name) for name in NAMES]
    for found in worlds.run(2, run_in_turn, jobs):
        assert not any(found.values()), found
    return place


@pytest.mark.parametrize("name", NAMES)
def test_a_merged_run_is_what_save_pretrained_writes(made, name, tmp_path):
    place = made / name
    reshard.merge(place / "run", tmp_path / "out")
    wanted = (place / "published" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == wanted


@pytest.mark.slow
def test_a_published_model_goes_into_live_ranks(made, tmp_path):
    (tmp_path / "groups.json").write_text(json.dumps(GROUPS))
    jobs = []
    for name in NAMES:
        published, dcp = made / name / "published", tmp_path / name
        groups = tmp_path / "groups.json"
        reshard.split(published, dcp, to="dcp", init_optimizer="zeros", param_groups=groups)
        with reshard.open(dcp) as checkpoint:
            expected = read_expected(made / name)["exp_avg"]
            zeros = checkpoint.optimizer("exp_avg")
            assert {fqn: tuple(zeros[fqn].shape) for fqn in zeros} == {
                fqn: tuple(slot.shape) for fqn, slot in expected.items()
            }
        for source in (published, dcp):
            job = published_worker.load, name, made / name, source
            jobs.append((f"{name} {source.name}", *job))
    for found in worlds.run(2, run_in_turn, jobs):
        assert not any(found.values()), found


def test_verify_compares_a_published_model_with_its_own_names(made, tmp_path):
    published = made / NAMES[0] / "published"
    assert reshard.verify(published, model=str(published)).passed
    state = load_file(published / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    torch.save(state, tmp_path / "model.bin")
    report = reshard.verify(tmp_path, model=str(published))
    assert [check.failures for check in report.checks if check.failures] == [
        ["missing: model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    ]


def rename_gpt2(state):
    """Return a GPT-2 as on the Hub: without the prefix of the head's class, with old buffers."""
    old = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril() for layer in range(2)}
    return {fqn.removeprefix("transformer."): value for fqn, value in state.items()} | old


def rename_llama(state):
    """Return a Llama as converted in 2023, with a buffer of each layer."""
    inside = "self_attn.rotary_emb.inv_freq"
    return state | {f"model.layers.{layer}.{inside}": torch.rand(4) for layer in range(2)}


def rename_wav2vec2(state):
    """Return a wav2vec 2.0 with torch's names of normalised weights before 2.0."""
    inside = "parametrizations.weight.original"
    news = {f"{inside}0": "weight_g", f"{inside}1": "weight_v"}
    return {
        next((fqn.replace(new, old) for new, old in news.items() if new in fqn), fqn): value
        for fqn, value in state.items()
    }


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_CONVOLUTIONS = {
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}
FORMER = {
    "GPT2LMHeadModel": (
        rename_gpt2,
        "h.0.attn.bias, h.1.attn.bias",
        {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8},
    ),
    "LlamaForCausalLM": (
        rename_llama,
        ", ".join(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)),
        _SMALL,
    ),
    "Wav2Vec2ForCTC": (rename_wav2vec2, "", {**_SMALL, **_CONVOLUTIONS}),
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", FORMER)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_of_former_releases_are_those_of_the_live_model(name, file, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind, (rename, left_out, settings) = getattr(transformers, name), FORMER[name]
    model = kind(kind.config_class(**settings))
    model.save_pretrained(tmp_path / "hub")
    stored = rename(load_file(tmp_path / "hub" / "model.safetensors"))
    (tmp_path / "hub" / "model.safetensors").unlink()
    save = save_file if file.endswith(".safetensors") else torch.save
    save(stored, tmp_path / "hub" / file)
    (tmp_path / "groups.json").write_text(json.dumps(GROUPS))
    groups = tmp_path / "groups.json"
    report = reshard.split(
        tmp_path / "hub", tmp_path / "dcp", to="dcp", init_optimizer="zeros", param_groups=groups
    )
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    wanted, loading = kind.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"]
    model.load_state_dict(found["model"], strict=False)
    for fqn, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[fqn], value), fqn
    optimized = {fqn for group in found["optim"]["param_groups"] for fqn in group["params"]}
    assert optimized == dict(wanted.named_parameters()).keys()
    noted = [text for text in report.warnings if "left out, as from_pretrained" in text]
    assert [text.endswith(left_out) for text in noted] == [True] * bool(left_out)
    assert reshard.verify(tmp_path / "hub", model=str(tmp_path / "hub")).passed
    state = {fqn: torch.zeros_like(value) for fqn, value in model.state_dict().items()}
    load({"model": state}, storage_reader=StorageReader(tmp_path / "hub"), no_dist=True)
    for fqn, value in wanted.state_dict().items():
        assert torch.equal(state[fqn], value), fqn


def prepare_trainer(name, place, steps, **settings):
    arguments = hf_trainer.arguments(
        place,
        steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=2,
        use_cpu=True,
        **settings,
    )
    torch.manual_seed(3)
    return hf_trainer.prepared(make_model(name), arguments, torch.randint(0, 40, (16, 8)))


def list_losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_continues_a_mixture_of_experts(name, tmp_path):
    """The Trainer's own checkpoint has the published names, and it resumes from those in memory."""
    unbroken = prepare_trainer(name, tmp_path / "run", 4)
    unbroken.train()
    saved = tmp_path / "run" / "checkpoint-2"
    trained = dict(unbroken.model.named_parameters())
    with reshard.open(tmp_path / "run" / "checkpoint-4") as checkpoint:
        moments = checkpoint.optimizer("exp_avg")
        for fqn, parameter in trained.items():
            kept = unbroken.optimizer.state[parameter]["exp_avg"]
            assert torch.equal(torch.as_tensor(moments[fqn][...]), kept)
    reshard.split(saved, tmp_path / "ours", to="hf-trainer")
    resumed = prepare_trainer(name, tmp_path / "again", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert list_losses(resumed) == list_losses(unbroken)
    for fqn, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, trained[fqn])


def list_names(place, kind="exp_avg"):
    with reshard.open(place) as checkpoint:
        return {entry.fqn: entry.shape for entry in checkpoint.manifest.of_kind(kind)}


def test_a_training_state_gets_the_requested_names(made, tmp_path):
    run, name = made / NAMES[0] / "run", "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    memory = list_names(run)
    report = reshard.split(run, tmp_path / "hf", to="dcp", names="hf", model=str(run))
    assert any("as save_pretrained of Mixtral" in text for text in report.derived)
    published = list_names(tmp_path / "hf")
    assert published[name] == (16, 12)
    assert published.keys() == list_names(tmp_path / "hf", "param").keys()
    back = tmp_path / "back"
    reshard.split(tmp_path / "hf", back, to="dcp", names="module", model=str(run))
    assert list_names(back) == memory
    assert reshard.diff(run, back).same
    with pytest.raises(UsageError, match="choose --names module"):
        reshard.split(run, tmp_path / "no", to="deepspeed", names="hf", model=str(run))
