"""The published form of transformers models: real FSDP 2 and HF Trainer, in both directions."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import reshard
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
