"""Runs as libraries lay them out: which checkpoint is meant; of another nothing is taken."""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import reshard
from reshard.core.location import Location
from reshard.errors import (
    CorruptError,
    IncompleteError,
    ReshardError,
    UnrecognisedError,
    UnsupportedError,
)
from reshard.formats import refused_paths, registry, run_directory

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
STEPS = (2, 4)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def adam(weights, step=4.0, lr=0.1):
    """Return an optimizer's state of these weights, by name: its moments are 10 and 20 more."""
    state = {
        name: {"step": torch.tensor(step), "exp_avg": weight + 10, "exp_avg_sq": weight + 20}
        for name, weight in weights.items()
    }
    return {"state": state, "param_groups": [{"lr": lr, "params": [*weights]}]}


def flatten(optimizer):
    """Return its state as programs flatten it, by keys that torch does not choose."""
    groups, state = optimizer["param_groups"], optimizer["state"]
    flat = {f"state.{fqn}.{slot}": v for fqn, held in state.items() for slot, v in held.items()}
    return flat | {f"param_groups.{fqn}.lr": group["lr"] for group in groups for fqn in state}


def assert_holds(source, weights, **train):
    """Assert that the weights, their moments and the training state are read; return warnings."""
    with reshard.open(source) as checkpoint:
        assert checkpoint.keys() == weights.keys()
        moments = checkpoint.optimizer("exp_avg")
        for name, weight in weights.items():
            assert torch.equal(checkpoint[name][...], weight)
            assert torch.equal(moments[name][...], weight + 10)
        held = checkpoint.manifest.train
        assert {name: getattr(held, name) for name in train} == train
        return " ".join(checkpoint.manifest.warnings)


def step_adam(model, *, named=False):
    """Return a real AdamW after one step."""
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


def save_weights(path, **weights):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights or {"weight": torch.ones(2)}, path)


def state(step):
    """Return a model of the step and its optimizer, as Composer nests them."""
    weights = {"weight": torch.full((2, 3), float(step))}
    return {
        "state": {
            "model": weights,
            "optimizers": {"AdamW": adam(weights, float(step), step / 100)},
        },
        "schedulers": {"LambdaLR": {"last_epoch": step}},
        "step": step,
    }


def assert_is_of(step, source, **options):
    with reshard.open(source, **options) as checkpoint:
        assert torch.equal(checkpoint["weight"][...], torch.full((2, 3), float(step)))
        assert checkpoint.optimizer("exp_avg")["weight"][0, 0] == step + 10
        train = checkpoint.manifest.train
        assert train.optimizer_step == {"weight": step}
        assert train.step == step
        assert train.param_groups[0].hyper["lr"] == step / 100
        return checkpoint.manifest.warnings


@pytest.mark.parametrize(
    ("names", "inside"),
    [
        (("ep0-ba2", "ep0-ba4"), "."),  # Composer
        (("ba2", "ba4"), "."),  # llm-foundry's HuggingFaceCheckpointer
        (("dist_epoch_2", "dist_epoch_4"), "."),  # torchtune
        (("epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"), "."),  # Lightning
        (("m--val_loss=1.0-step=2-last", "m--val_loss=0.5-step=4"), "weights"),  # NeMo 2
        (("step-00000002", "step-00000004"), "lit_model.pth"),  # litgpt
        (("epoch_0_step_2", "epoch_1_step_4"), "."),  # NeMo Automodel
        (("step2-unsharded", "step4-unsharded"), "."),  # OLMo
        (("epoch_0_train_step_2", "epoch_1_train_step_4"), "."),  # TorchTNT
        (("step_2", "step_4"), "trainer"),  # prime-rl
    ],
)
def test_the_last_of_a_run_is_taken_or_the_one_that_is_named(names, inside, tmp_path):
    for name, step in zip(names, STEPS, strict=True):
        dcp.save(state(step), checkpoint_id=tmp_path / name / inside)
    (tmp_path / "latest-rank0.pt.symlink").write_text(names[-1])  # what Composer uploads
    assert_is_of(4, tmp_path)
    assert_is_of(2, tmp_path, tag="2")
    assert_is_of(2, tmp_path, tag=names[0])
    assert_is_of(2, tmp_path / names[0])


@pytest.mark.parametrize("suffix", ["lora", "adapter", "adapter_v2"])
def test_an_adapter_of_litgpt_is_read_if_it_was_not_merged(tmp_path, suffix):
    """LitGPT writes the merged model beside the last one, under the name of a whole model."""
    names = [f"transformer.h.0.attn.qkv.lora_{part}" for part in "AB"]
    for name in ("step-000002", "final"):
        (tmp_path / name).mkdir()
        torch.save(
            {"model": {name: torch.ones(2, 2) for name in names}},
            tmp_path / name / f"lit_model.pth.{suffix}",
        )
    torch.save({"model": {"merged": torch.ones(3)}}, tmp_path / "final" / "lit_model.pth")
    with reshard.open(tmp_path / "step-000002") as checkpoint:
        assert checkpoint.keys() == set(names)
    with reshard.open(tmp_path / "final") as checkpoint:
        assert checkpoint.keys() == {"merged"}
    report = reshard.merge(tmp_path / "step-000002", tmp_path / "out")
    assert any("litgpt merge_lora DIR" in text for text in report.warnings)
    with pytest.raises(UnsupportedError, match="which PEFT does not load"):
        reshard.merge(tmp_path / "step-000002", tmp_path / "adapter", adapter="default")


@pytest.mark.skipif(
    not hasattr(dcp, "HuggingFaceStorageWriter"),
    reason="this torch has no writer of safetensors; torch 2.7 has",
)
def test_nemo_automodel_saves_the_model_for_hugging_face_and_the_optimizer_as_items(tmp_path):
    """Automodel has names and writers of its own, and flattens the optimizer inside ``optim``."""
    weights, place = {"weight": torch.arange(6.0).view(2, 3)}, tmp_path / "run" / "epoch_0_step_4"
    writer = dcp.HuggingFaceStorageWriter(str(place / "model"), save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    saved = {"optim": flatten(adam(weights)), "sched": {"last_epoch": 4}}
    dcp.save(saved, checkpoint_id=place / "optim")
    (place / "rng").mkdir()
    torch.save({"torch_rng_state": torch.get_rng_state()}, place / "rng" / "rng_dp_rank_0.pt")
    said = assert_holds(tmp_path / "run", weights, step=4, scheduler={"last_epoch": 4})
    assert "rng_dp_rank_0.pt: not read" in said
    (place / "model" / ".hf_metadata").mkdir()
    (place / "model" / ".hf_metadata" / "config.json").write_text('{"model_type": "own"}')
    reshard.merge(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "own"


@pytest.mark.parametrize("form", ["NeMo RL", "Automodel"])
def test_nemo_saves_the_adapter_alone_beside_its_optimizer(tmp_path, form):
    """The adapter's file has PEFT's names, the optimizer those of the model."""
    place = tmp_path / "run" / ("step_4/policy" if form == "NeMo RL" else "epoch_0_step_4")
    model, optim = ("weights/model", "optimizer/optim") if form == "NeMo RL" else ("model", "optim")
    lora = {f"q.lora_{m}.weight": torch.randn(s) for m, s in (("A", (2, 6)), ("B", (6, 2)))}
    (place / model).mkdir(parents=True)
    peft = {f"base_model.model.{fqn}": value for fqn, value in lora.items()}
    save_file(peft, place / model / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
    (place / model / "adapter_config.json").write_text(json.dumps(settings))
    dcp.save({"optim": flatten(adam(lora))}, checkpoint_id=place / optim)
    for level in (tmp_path / "run", place.parent, place):
        assert_holds(level, lora)
    reshard.merge(tmp_path / "run", tmp_path / "adapter", adapter="default")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == peft.keys()
    assert all(torch.equal(written[name], value) for name, value in peft.items())
    for ranks in (2, 3):
        reshard.split(tmp_path / "run", tmp_path / f"{ranks}", to="dcp", world_size=ranks)
        assert reshard.diff(tmp_path / "run", tmp_path / f"{ranks}").unequal == []


def test_veomni_saves_the_scheduler_in_files_of_ranks_below_dcp(tmp_path):
    """VeOmni has keys and names of its own: `split` keeps them, and copies files of ranks."""
    weights, run = {"weight": torch.arange(12.0).view(6, 2)}, tmp_path / "run"
    dcp.save({"model": weights, "optimizer": adam(weights)}, checkpoint_id=run)
    (run / "extra_state").mkdir()
    for rank in range(2):
        extra = {"global_step": 4, "lr_scheduler": {"last_epoch": 4}, "train_dataloader": {}}
        extra["torch_rng_state"] = torch.full((3,), rank, dtype=torch.uint8)
        torch.save(extra, run / "extra_state" / f"extra_state_rank_{rank}.pt")
    report = reshard.split(run, tmp_path / "out", world_size=3)
    assert any("belong to one rank each" in note for note in report.notes)
    for place in (run, tmp_path / "out"):
        assert_holds(place, weights, step=4, scheduler={"last_epoch": 4})
    keys = [dcp.FileSystemReader(at).read_metadata().planner_data for at in (run, tmp_path / "out")]
    assert keys[0] == keys[1]
    for file in (run / "extra_state").iterdir():
        assert (tmp_path / "out" / "extra_state" / file.name).read_bytes() == file.read_bytes()


def test_positions_in_the_data_that_fit_no_other_number_of_ranks_are_named(tmp_path):
    """Save what torchtitan 0.3 saves of its data loader: a pickle of each rank, and a count."""
    positions = {f"dp_rank_{rank}": pickle.dumps({"index": rank}) for rank in range(2)}
    dcp.save(
        {**state(4), "dataloader": {**positions, "world_size": 2}}, checkpoint_id=tmp_path / "a"
    )
    report = reshard.split(tmp_path / "a", tmp_path / "b", world_size=4)
    (warning,) = (text for text in report.warnings if "loader" in text)
    assert warning.startswith("dataloader has a state for each of 2 ranks (dp_rank_0, dp_rank_1)")
    report = reshard.split(tmp_path / "a", tmp_path / "c", world_size=1, to="dcp")
    assert not any("loader" in text for text in report.warnings)


@pytest.mark.parametrize("inner", [("", ""), ("model", "optim")])
def test_nemo_rl_saves_weights_and_optimizer_beside_each_other(tmp_path, inner):
    """Read two directories of DCP in ``policy``, which has a data loader beside it.

    NeMo Automodel saves each of them into a folder of its own.
    """
    weights, run = {"weight": torch.arange(6.0).view(2, 3)}, tmp_path / "run"
    policy = run / "step_4" / "policy"
    dcp.save({"model": weights}, checkpoint_id=policy / "weights" / inner[0])
    saved = {"optim": adam(weights), "sched": {"last_epoch": 4}}
    dcp.save({"optim": saved}, checkpoint_id=policy / "optimizer" / inner[1])
    torch.save({"epoch": 0}, run / "step_4" / "train_dataloader.pt")
    for place in (run, run / "step_4", policy):
        said = assert_holds(place, weights, scheduler={"last_epoch": 4})
        assert "train_dataloader.pt: not read" in said
    reshard.split(run, tmp_path / "out", world_size=2)
    read = {"model": {"weight": torch.zeros(2, 3)}}
    dcp.load(read, checkpoint_id=tmp_path / "out" / "weights" / inner[0])
    assert torch.equal(read["model"]["weight"], weights["weight"])
    shutil.copytree(policy, policy.with_name("value"))  # of PPO
    with pytest.raises(UnrecognisedError, match=r"contains several checkpoints: .*policy, .*value"):
        reshard.open(run)


def test_llama_factory_resumes_from_a_split_of_its_two_directories(tmp_path):
    """LLaMA-Factory's v1 loads the keys of both, the scheduler, and the step of metadata.json.

    Source: LLaMA-Factory 0.9.5 ``v1/core/utils/checkpoint.py``, ``distributed/fsdp2.py``.
    """
    weights, run = {"weight": torch.arange(12.0).view(6, 2)}, tmp_path / "checkpoint-4"
    dcp.save(weights, checkpoint_id=run / "model")
    dcp.save(adam(weights), checkpoint_id=run / "optimizer")
    torch.save({"last_epoch": 4}, run / "scheduler.pt")
    (run / "metadata.json").write_text('{"global_step": 4}')
    (run / "CHECKPOINT_COMPLETE").touch()
    (run / "rng_state").mkdir()
    torch.save({"torch": torch.get_rng_state()}, run / "rng_state" / "rank_0.pt")
    report = reshard.split(run, tmp_path / "out", world_size=3)
    assert any("rng_state/rank_0.pt: not read" in each for each in report.warnings)
    for name in ("model", "optimizer"):
        before, after = (
            dcp.FileSystemReader(at / name).read_metadata() for at in (run, tmp_path / "out")
        )
        assert after.planner_data == before.planner_data
        assert len(list((tmp_path / "out" / name).glob("*.distcp"))) == 3
    for name in ("scheduler.pt", "metadata.json", "CHECKPOINT_COMPLETE"):
        assert (tmp_path / "out" / name).read_bytes() == (run / name).read_bytes()
    assert reshard.diff(run, tmp_path / "out").equal


def test_weights_and_their_optimizer_can_be_in_two_directories(tmp_path):
    """LLaMA-Factory's v1 saves one process so, beside the config.json that names the numbers."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    optimizer = step_adam(model)
    save_weights(tmp_path / "model" / "model.safetensors", **model.state_dict())
    (tmp_path / "optimizer").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer" / "state_dict.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    both = [tmp_path / "model", tmp_path / "optimizer"]
    for source in (both, both[::-1], tmp_path):
        with reshard.open(source) as checkpoint:
            held = checkpoint.optimizer("exp_avg")
            for name, value in model.named_parameters():
                assert torch.equal(held[name][...], optimizer.state[value]["exp_avg"])
    assert reshard.inspect(tmp_path).manifest.train.scheduler == {"last_epoch": 1}


def test_one_file_of_all_stages_is_of_one_rank(tmp_path):
    """Count one data-parallel rank, so that no note changes the accumulation steps."""
    saved = {}
    for stage in range(2):
        model = {f"layers.{stage}.weight": torch.ones(2, 2)}
        saved |= {f"model_{stage}": model, f"optim_{stage}": adam(model)}
    (tmp_path / "run").mkdir()
    torch.save(saved, tmp_path / "run" / "checkpoint.pt")
    report = reshard.split(tmp_path / "run", tmp_path / "out", to="torch")
    assert not [note for note in report.derived if "data-parallel" in note]


def test_an_optimizer_of_each_parameter_has_its_name(tmp_path):
    """Torchtune's DistributedCheckpointer saves optimizers that update in the backward pass so."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = {
        name: step_adam(nn.ParameterList([each])).state_dict()
        for name, each in model.named_parameters()
    }
    dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=tmp_path)
    with reshard.open(tmp_path) as checkpoint:
        held = checkpoint.optimizer("exp_avg")
        assert held.keys() == saved.keys()
        for name, state in saved.items():
            assert torch.equal(held[name][...], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("folder", ["", "/work/run/"])
@pytest.mark.parametrize("names", [("model_0000099", "model_0000199"), ("best_epoch_1", "epoch_2")])
def test_the_file_that_last_checkpoint_names_is_taken(tmp_path, names, folder):
    """detectron2 writes the name of a file, and MMEngine the path where it was saved."""
    model = nn.Linear(2, 2)
    saved = {"model": model.state_dict(), "optimizer": step_adam(model).state_dict()}
    for step, name in enumerate(names):
        torch.save({**saved, "iteration": step}, tmp_path / f"{name}.pth")
    for step, name in enumerate(names):
        (tmp_path / "last_checkpoint").write_text(f"{folder}{name}.pth")
        manifest = reshard.inspect(tmp_path).manifest
        assert manifest.train.step == step
        left = f"other checkpoints of this directory were not read: {names[1 - step]}"
        assert left in manifest.warnings


@pytest.mark.parametrize(
    ("latest", "others"),
    [
        ("epoch_latest.pt", ["epoch_3.pt", "epoch_4.pt"]),  # open_clip
        ("last.pth.tar", ["checkpoint-5.pth.tar", "model_best.pth.tar"]),  # timm
        ("checkpoint_last.pt", ["checkpoint3.pt", "checkpoint_best.pt"]),  # fairseq
        ("checkpoint_final.pth", ["checkpoint_best.pth"]),  # nnU-Net
    ],
)
def test_of_several_files_the_latest_is_taken(tmp_path, latest, others):
    for number, name in enumerate([*others, latest]):
        torch.save({"model": {"w": torch.full((2,), number)}, "step": number}, tmp_path / name)
    manifest = reshard.inspect(tmp_path).manifest
    assert manifest.train.step == len(others)
    (warning,) = manifest.warnings
    assert warning.startswith("other checkpoints of this directory were not read: ")
    for step, name in enumerate(others):
        for tag in (name, name.partition(".")[0]):
            assert reshard.inspect(tmp_path, tag=tag).manifest.train.step == step
    with pytest.raises(UnrecognisedError, match="there is no checkpoint 'other'"):
        reshard.inspect(tmp_path, tag="other")


def test_nanochat_saves_all_steps_in_one_directory(tmp_path):
    """Names of the model and of the optimizers of ranks have the step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (900, 1000):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), tmp_path / f"model_{step:06d}.pt")
        for rank in range(2):
            place = tmp_path / f"optim_{step:06d}_rank{rank}.pt"
            torch.save(optimizer.state_dict(), place)
    with reshard.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["weight"][...], model.weight)
        assert set(checkpoint.manifest.train.optimizer_step.values()) == {2}
        left = "files of other steps were not read: model_000900, optim_000900"
        assert left in checkpoint.manifest.warnings
    assert reshard.inspect(tmp_path, tag="model_000900").manifest.entries


@pytest.mark.parametrize(
    ("folder", "pointer"),
    [("actor", "latest_checkpointed_iteration.txt"), ("policy", "latest_ckpt_global_step.txt")],
    ids=["verl", "SkyRL 0.3"],
)
def test_files_beside_the_actor_or_policy_are_reported(folder, pointer, tmp_path):
    """Both have verl's files of ranks in a folder, and loose files of their trainer beside it."""
    for step in (3, 12):
        place = tmp_path / f"global_step_{step}"
        actor = DATA / "verl" / "verl_sample" / "ckpt" / "global_step_3" / "actor"
        shutil.copytree(actor, place / folder)
        torch.save({"_num_yielded": torch.ones(3)}, place / "data.pt")
        torch.save({"global_step": step}, place / "trainer_state.pt")
    (tmp_path / pointer).write_text("3")
    for place in (tmp_path, tmp_path / "global_step_3", tmp_path / "global_step_3" / folder):
        manifest = reshard.inspect(place).manifest
        assert (manifest.origin.format, manifest.train.step) == ("verl", 3)
        said = " ".join(manifest.warnings)
        assert re.search(r"data\.pt.*: not read", said)
        assert "trainer_state.pt" in said


def test_a_model_beside_the_checkpoints_of_its_run_is_not_the_whole_run(tmp_path):
    """HF Trainer saves the final model in the directory that has ``checkpoint-N``."""
    for place in (tmp_path, tmp_path / "checkpoint-4"):
        save_weights(place / "model.safetensors")
    assert not reshard.inspect(tmp_path / "checkpoint-4").manifest.warnings
    (warning,) = reshard.inspect(tmp_path).manifest.warnings
    assert "checkpoint-4 is a checkpoint of the run, and was not read" in warning
    with pytest.raises(IncompleteError, match=r"pass .*checkpoint-4, which is a checkpoint of the"):
        reshard.split(tmp_path, tmp_path / "out", to="deepspeed", world_size=2)


def test_files_beside_or_below_dcp_are_reported(tmp_path):
    """XTuner's ``v1`` saves some without a suffix, in the folder above the tensors."""
    run = tmp_path / "20261127" / "checkpoints" / "ckpt-step-2"
    dcp.save(state(2), checkpoint_id=run / "weights")
    torch.save({"last_epoch": 2}, run / "lr_scheduler")
    (run / "train_state.json").write_text('{"cur_step": 2}')
    (run / "weights" / "dataloader").mkdir()
    torch.save({"x": 1}, run / "weights" / "dataloader" / "rank_0.pt")
    save_weights(run / "weights" / "hf_model" / "model.safetensors")  # LLaMA-Factory's
    for place in (tmp_path, run, run / "weights"):
        said = " ".join(reshard.inspect(place).manifest.warnings)
        files = "dataloader/rank_0.pt, hf_model/model.safetensors, lr_scheduler, train_state.json"
        assert f"{files}: not read, and not part of the output" in said


def test_torchtune_names_a_whole_model_like_a_shard(tmp_path):
    """FullModelTorchTuneCheckpointer of 0.6.1: no index; one recipe state for all epochs."""
    weights = {"norm.weight": torch.arange(6.0).view(2, 3)}
    both = [tmp_path / "epoch_0", tmp_path / "recipe_state"]
    for place in both:
        place.mkdir()
    torch.save(weights, both[0] / "model-00001-of-00001.bin")
    torch.save({"optimizer": adam(weights), "seed": 1}, both[1] / "recipe_state.pt")
    (warning,) = reshard.inspect(tmp_path).manifest.warnings
    assert "recipe_state.pt contains the optimizer" in warning
    assert not assert_holds(both, weights)
    # Its Hugging Face checkpointer has other names of the weights, and the same of the optimizer.
    torch.save({"model.norm.weight": torch.ones(2, 3)}, both[0] / "model-00001-of-00001.bin")
    assert "have other names: model.norm.weight" in reshard.inspect(both).manifest.warnings[0]
    with pytest.raises(IncompleteError, match=r"of 'norm.weight', but no weights of these names"):
        reshard.split(both, tmp_path / "out", to="dcp")
    shard = tmp_path / "epoch_0" / "model-00001-of-00002.bin"
    (tmp_path / "epoch_0" / "model-00001-of-00001.bin").rename(shard)
    with pytest.raises(IncompleteError, match="shard 1 of 2"):
        reshard.inspect(tmp_path / "epoch_0")


@pytest.mark.parametrize(
    ("name", "size"),
    [("attn.q_proj.weight", 8), ("attn.q_proj.lora_b.weight", 8), ("attn.q_proj.weight", None)],
)
def test_torchtunes_optimizer_beside_published_weights(name, size, tmp_path):
    """Its rows of query and key lie in pairs for the rotation, those of the weights in halves."""
    halves = torch.randn(8, 6)  # two heads of four rows
    pairs = halves.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6)
    places = [tmp_path / "epoch_0", tmp_path / "recipe_state"]
    for place in places:
        place.mkdir()
    fqn = "model.layers.0.self_attn.q_proj.weight"
    file = "model-00001-of-00001.safetensors"
    save_file({fqn: torch.ones(8, 6)}, places[0] / file)
    index = json.dumps({"weight_map": {fqn: file}})
    (places[0] / "model.safetensors.index.json").write_text(index)
    config = {"model_type": "llama", "hidden_size": size, "num_attention_heads": 2}
    (places[0] / "config.json").write_text(json.dumps(config))
    own = f"layers.0.{name}"
    optimizer = adam({own: pairs})
    torch.save({"optimizer": optimizer, "epochs_run": 1}, places[1] / "recipe_state.pt")
    with reshard.open(places) as checkpoint:
        train, (warning,) = checkpoint.manifest.train, checkpoint.manifest.warnings
        if "lora" in name or size is None:
            assert "that are not among the weights: layers.0" in warning
            return
        assert "torchtune's names and order of rows" in warning
        assert torch.equal(checkpoint.optimizer("exp_avg")[fqn][...], halves + 10)
        assert torch.equal(checkpoint.optimizer("exp_avg_sq")[fqn][...], halves + 20)
        assert (train.optimizer_step, train.param_groups[0].fqns) == ({fqn: 4.0}, (fqn,))
        assert not checkpoint.manifest.frozen
    torch.save({"optimizer": optimizer, "epochs_run": 2}, places[1] / "recipe_state.pt")
    assert "recipe_state.pt is of the end of epoch_1" in " ".join(
        reshard.inspect(places).manifest.warnings
    )


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "tok_embeddings.weight"])
def test_torchtunes_optimizer_by_index_beside_published_weights(name, tmp_path):
    """The rows of the optimizer are those of the model in memory, whatever its shapes fit."""
    places = [tmp_path / "epoch_0", tmp_path / "recipe_state"]
    for place in places:
        place.mkdir()
    torch.save({name: torch.ones(8, 6)}, places[0] / "model-00001-of-00001.bin")
    optimizer = adam({0: torch.ones(8, 6)})
    torch.save({"optimizer": optimizer, "epochs_run": 1}, places[1] / "recipe_state.pt")
    if name == "tok_embeddings.weight":
        with reshard.open(places) as checkpoint:
            assert checkpoint.optimizer("exp_avg").keys() == {name}
        return
    with pytest.raises(UnsupportedError, match="torchtune's optimizer by index"):
        reshard.inspect(places)
    assert reshard.inspect(places[0]).manifest.weight_shapes == {name: (8, 6)}


def test_a_data_loader_of_torch_is_no_unknown_class(tmp_path):
    """LitGPT saves its data loader whole unless that has a state dict."""
    loader = torch.utils.data.DataLoader([1, 2])
    path = tmp_path / "lit_model.pth"
    torch.save({"model": {"weight": torch.ones(2)}, "train_dataloader": loader}, path)
    assert not reshard.inspect(path).manifest.unknown_globals


def test_files_of_several_checkpoints_in_one_directory(tmp_path):
    for step in STEPS:
        torch.save(state(step), tmp_path / f"ep0-ba{step}-rank0.pt")
    (note,) = assert_is_of(4, tmp_path)
    assert note == "other checkpoints of this directory were not read: ep0-ba2"
    for step, other in ((2, 4), (4, 2)):
        (note,) = assert_is_of(step, tmp_path / f"ep0-ba{step}-rank0.pt")
        assert note == f"other checkpoints of this directory were not read: ep0-ba{other}"
        assert_is_of(step, tmp_path, key=f"ep0-ba{step}.state.model")
        assert_is_of(step, tmp_path, tag=str(step))
    (tmp_path / "ep0-ba4-rank0.pt").rename(tmp_path / "best-rank0.pt")  # before or after the other?
    with pytest.raises(UnrecognisedError, match=r"--key best\.state\.model"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("other", [7, [], torch.zeros(2)])
def test_files_of_ranks_that_have_nothing_in_common(tmp_path, other):
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "model_rank_0.pt")
    torch.save(other, tmp_path / "model_rank_1.pt")
    with pytest.raises(CorruptError, match=r"rank_1\.pt: has other contents"):
        reshard.inspect(tmp_path)


@pytest.mark.parametrize("count", [0, 2, 9])
def test_accelerates_count_of_micro_batches_is_no_step(tmp_path, count):
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    model = torch.nn.Linear(3, 2)
    optimizer = step_adam(model)
    optimizer.step()
    save_file(model.state_dict(), ckpt / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), ckpt / "optimizer.bin")
    torch.save({"step": count}, ckpt / "random_states_0.pkl")
    with reshard.open(ckpt) as checkpoint:
        assert checkpoint.manifest.train.step == 2
    (check,) = (each for each in reshard.verify(ckpt).checks if each.name == "steps")
    assert check.status == "passed"
    reshard.split(ckpt, tmp_path / "out", to="accelerate", world_size=2)
    for rank in range(2):
        states = torch.load(tmp_path / "out" / f"random_states_{rank}.pkl")
        assert states["step"] == count


def test_indexes_of_other_names(tmp_path):
    for number, name in enumerate("ab", 1):
        with pytest.raises(ReshardError):  # nothing there, then a half
            reshard.open(tmp_path)
        save_file({name: torch.ones(2)}, tmp_path / f"diffusion-0000{number}-of-00002.safetensors")
    index = {name: f"diffusion-0000{n}-of-00002.safetensors" for n, name in enumerate("ab", 1)}
    (tmp_path / "diffusion.safetensors.index.fp16.json").write_text(
        json.dumps({"weight_map": index})
    )
    with reshard.open(tmp_path) as checkpoint:
        assert set(checkpoint) == {"a", "b"}


@pytest.mark.parametrize("model", ["model", "adapter_model"])
def test_heads_beside_the_weights_are_named(model, tmp_path):
    """LLaMA-Factory's reward models and ms-swift's heads have a second file of weights."""
    save_file({"a": torch.ones(2)}, tmp_path / f"{model}.safetensors")
    save_file({"v_head.summary.weight": torch.ones(2)}, tmp_path / "value_head.safetensors")
    torch.save({"b": torch.ones(2)}, tmp_path / "non_lora_trainables.bin")  # LLaVA's
    torch.save({"x": 1}, tmp_path / "training_args.bin")
    for trained in (False, True):
        if trained:  # a checkpoint of HF Trainer
            (tmp_path / "non_lora_trainables.bin").unlink()
            (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        with reshard.open(tmp_path) as checkpoint:
            assert set(checkpoint) == {"a"}
            (warning,) = checkpoint.manifest.warnings
        others = (
            "value_head.safetensors"
            if trained
            else "non_lora_trainables.bin, value_head.safetensors"
        )
        assert warning == f"also contains other weights, which were not read: {others}"


@pytest.mark.parametrize(
    "name", ["trainer_state.pt", "training_state.pth", "optimizer_state.bin", "state.pt"]
)
def test_a_scripts_state_beside_safetensors_has_the_optimizer(name, tmp_path):
    model = torch.nn.Linear(2, 3)
    optimizer = step_adam(model, named=True)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "global_step": 7}, tmp_path / name)
    with reshard.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["weight"][...], model.weight)
        assert checkpoint.optimizer("exp_avg").keys() == {"weight", "bias"}
        assert checkpoint.manifest.train.step == 7
        assert not checkpoint.manifest.warnings


def test_other_weights_beside_are_named(tmp_path):
    save_weights(tmp_path / "model.safetensors")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (warning,) = reshard.inspect(tmp_path).manifest.warnings
    assert "which were not read: pytorch_model.bin" in warning
    assert not reshard.inspect(tmp_path / "model.safetensors").manifest.warnings


def test_the_directory_of_a_file_is_advised_only_if_it_has_a_checkpoint(tmp_path):
    shutil.copytree(ROOT / "examples" / "llama-zero3-4ranks", tmp_path / "run")
    (tmp_path / "other").mkdir()
    for place, advice in (
        ("run", f"pass the checkpoint's directory, {tmp_path / 'run'}"),
        ("other", "pass a run directory, a checkpoint directory, or a weights"),
    ):
        (tmp_path / place / "notes.bin").write_bytes(bytes(range(200)))
        with pytest.raises(UnrecognisedError, match=re.escape(advice)):
            reshard.open(tmp_path / place / "notes.bin")


def test_the_file_that_names_a_checkpoint_of_another_program_is_not_deepspeeds(tmp_path):
    save_weights(tmp_path / "run" / "step4" / "model.safetensors", a=torch.ones(2))
    (tmp_path / "run" / "latest").write_text("step4")
    advice = re.escape(f"pass the checkpoint's directory, {tmp_path / 'run'}")
    with pytest.raises(UnrecognisedError, match=advice):
        reshard.open(tmp_path / "run" / "latest")
    with reshard.open(tmp_path / "run") as checkpoint:
        assert list(checkpoint) == ["a"]


@pytest.mark.parametrize(("tag", "named"), [(None, ", but 'latest' names it"), ("step6", "")])
def test_a_checkpoint_that_does_not_exist_is_called_by_what_names_it(tag, named, tmp_path):
    (tmp_path / "step4").mkdir()
    (tmp_path / "step4" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("step6")
    problem = f"is not a DeepSpeed checkpoint directory{named}; {tmp_path} contains step4"
    with pytest.raises(UnrecognisedError, match=re.escape(problem)) as refused:
        reshard.open(tmp_path, tag=tag)
    assert refused.value.remedy == "choose one with --tag, e.g. --tag step4"


@pytest.mark.parametrize("chosen", [".", "model.gguf"])
def test_a_format_that_is_not_read_is_called_by_its_name(chosen, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(
        ReshardError, match=r"(?s)reshard does not read GGUF \(llama.cpp's\): pass the PyTorch"
    ):
        reshard.open(tmp_path / chosen)


def test_a_model_in_hugging_face_s_cache_is_found_by_its_snapshot(tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "models--a--b/blobs/0"
    blob.parent.mkdir()
    save_file({"a": torch.ones(2)}, blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0")
    for place in (tmp_path / "models--a--b", snapshot, blob):
        with reshard.open(place) as checkpoint:
            assert list(checkpoint) == ["a"]


@pytest.mark.parametrize("link", ["latest", "run-a-latest", "last-checkpoint"])
@pytest.mark.parametrize("names", [("run-a-step2", "run-a-step4"), ("step_2", "step_4")])
def test_a_symlink_chooses_the_checkpoint_of_a_run(link, names, tmp_path):
    """Trust SpecForge 0.2 and trainers like it, which set it after a complete save."""
    for name, step in zip(names, STEPS, strict=True):
        dcp.save(state(step), checkpoint_id=tmp_path / name)
    (tmp_path / link).symlink_to(names[0])
    (tmp_path / "run-a-best").symlink_to(names[1])
    assert_is_of(2, tmp_path)
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint.manifest.origin.path == str(tmp_path / names[0])
    assert_is_of(2, tmp_path / link)
    assert_is_of(4, tmp_path, tag=names[1])


@pytest.mark.parametrize("damage", [".metadata", "__0_0.distcp"])
def test_the_error_of_an_interrupted_save_names_the_other_checkpoints(damage, tmp_path):
    for step in (2, 4, 6):
        dcp.save(state(step), checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-6" / damage).write_bytes(b"")
    with pytest.raises((CorruptError, IncompleteError)) as refused:
        reshard.open(tmp_path)
    advice = "; or choose another checkpoint with --tag; there are step-4, step-2"
    assert refused.value.lines[-1].endswith(advice)
    with pytest.raises((CorruptError, IncompleteError)) as refused:
        reshard.open(tmp_path / "step-6")
    assert "--tag" not in str(refused.value)


def test_a_checkpoint_without_an_optimizer_names_the_others_of_the_run(tmp_path):
    """Programs delete the optimizers of older checkpoints, or save the last one without."""
    for step in (1, 2):
        save_run(tmp_path / "run", step)
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        with pytest.raises(IncompleteError, match=r"if that has it: checkpoint-1$"):
            reshard.split(source, tmp_path / "out", to="deepspeed")
    report = reshard.split(tmp_path / "run", tmp_path / "out", to="dcp")
    assert any("which may have it: checkpoint-1" in text for text in report.warnings)


def test_symlinked_checkpoints_are_those_of_the_run(tmp_path):
    """Follow links to another disk, and refuse the newest if its target is gone."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    for step in STEPS:
        dcp.save(state(step), checkpoint_id=disk / f"step_{step}")
    (run / "step_2").symlink_to(disk / "step_2")
    (run / "latest").symlink_to(disk / "step_4")
    assert_is_of(4, run)
    (run / "step_4").symlink_to(disk / "step_4")
    (run / "latest").unlink()
    (run / "latest").symlink_to("step_2")
    assert_is_of(2, run)
    (run / "latest").unlink()
    assert_is_of(4, run)
    shutil.rmtree(disk / "step_4")
    for link in ("step_4", "latest"):
        with pytest.raises(UnrecognisedError, match="which does not exist") as refused:
            reshard.open(run)
        lines = refused.value.lines
        assert lines[0].startswith(f"{run / link}: is a symlink to ")
        assert lines[1].endswith("choose another one with --tag; there are step_2")
        if link == "step_4":
            (run / "latest").symlink_to("step_4")
    assert_is_of(2, run, tag="step_2")


def test_a_model_beside_optimizers_of_ranks_has_their_name_without_a_number(tmp_path):
    """Read what SpecForge 0.2 saves of FSDP 1 (``training/checkpoint.py``)."""
    weights = {"a.weight": torch.rand(2, 3), "b.weight": torch.rand(4, 2)}
    draft = {name: weight.bfloat16() for name, weight in weights.items()}
    torch.save({"draft_state_dict": draft, "global_step": 3}, tmp_path / "training_state.pt")
    for rank, parts in enumerate([(slice(6), slice(1)), (slice(0), slice(1, 8))]):
        masters = [
            weight.flatten()[part] for weight, part in zip(weights.values(), parts, strict=True)
        ]
        inner = {
            "optimizer_state_dict": adam(dict(enumerate(masters)), 3.0),
            "fp32_params": masters,
        }
        torch.save({"optimizer": inner, "rng": {}}, tmp_path / f"training_state_rank{rank}.pt")
    assert_holds(tmp_path, weights, step=3)


def test_a_loose_file_above_is_not_suggested(tmp_path):
    (tmp_path / "empty").mkdir()
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.bin")
    with pytest.raises(UnrecognisedError, match="pass a run directory"):
        reshard.open(tmp_path / "empty")


@pytest.mark.parametrize("above", ["", "lightning_logs"])
def test_loose_files_deeper_below_are_suggested(tmp_path, above):
    """Lightning keeps its files three directories below that of the program."""
    place = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    place.mkdir(parents=True)
    torch.save({"state_dict": {"weight": torch.ones(2)}}, place / "epoch=0-step=2.ckpt")
    with pytest.raises(UnrecognisedError) as caught:
        reshard.inspect(tmp_path / above)
    assert caught.value.remedy == f"did you mean {place}?"


@pytest.mark.parametrize("inner", ["v0-20260101-101010", "llama/lora/sft"])
def test_the_only_run_below_a_directory_is_read(inner, tmp_path):
    """ms-swift trains in ``output/vN-DATE``, LLaMA-Factory in ``saves/MODEL/lora/sft``."""
    for step in STEPS:
        save_run(tmp_path / inner, step)
    (tmp_path / "v1-20260102-101010/images").mkdir(parents=True)  # failed before its first save
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint["weight"][0] == max(STEPS)
        assert checkpoint.manifest.warnings == (
            f"{tmp_path / inner} was read, the only run in {tmp_path}",
        )
    with reshard.open(tmp_path, tag=str(min(STEPS))) as checkpoint:
        assert checkpoint["weight"][0] == min(STEPS)
    reshard.average([tmp_path], tmp_path / "mean.safetensors", last=2)
    with reshard.open(tmp_path / "mean.safetensors") as checkpoint:
        assert checkpoint["weight"][0] == sum(STEPS) / 2


def test_of_several_runs_below_a_directory_the_user_chooses(tmp_path):
    for name in ("v9-20260101-101010", "v10-20260102-101010"):
        save_run(tmp_path / name, 4)
    (tmp_path / "v11-20260103-101010/checkpoint-4").mkdir(parents=True)  # its save was interrupted
    message = r"contains several runs: \S*v9-\S*, \S*v10-\S*, \S*v11-"
    with pytest.raises(UnrecognisedError, match=message) as e:
        reshard.open(tmp_path)
    assert e.value.remedy == f"pass one, e.g. {tmp_path / 'v10-20260102-101010'}"


def save_run(run, step):
    path = run / f"checkpoint-{step}" / "model.safetensors"
    save_weights(path, weight=torch.full([2], float(step)))


@pytest.mark.parametrize("chosen", [".", "hf_model_0001_0.pt"])
def test_shards_of_torchtune_are_not_taken_for_models(chosen, tmp_path):
    for number, name in enumerate("ab", 1):
        torch.save({name: torch.ones(2)}, tmp_path / f"hf_model_000{number}_0.pt")
    with pytest.raises(UnsupportedError, match="shards of a model that torchtune wrote"):
        reshard.open(tmp_path / chosen)


def test_an_archive_is_to_be_unpacked(tmp_path):
    with tarfile.open(tmp_path / "model.nemo", "w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"), io.BytesIO())
    with pytest.raises(UnrecognisedError, match="unpack it"):
        reshard.open(tmp_path / "model.nemo")


@pytest.mark.parametrize("top", ["", "model."])
def test_a_state_dict_that_its_program_flattened_has_an_optimizer(tmp_path, top):
    """Its keys are all there is: ``optimizer.state.<fqn>.exp_avg`` is no weight of that name."""
    weights = {"0.weight": torch.rand(2, 3), "0.bias": torch.rand(2)}
    flat = {f"{top}{fqn}": tensor for fqn, tensor in weights.items()}
    flat |= {f"optimizer.{key}": value for key, value in flatten(adam(weights, lr=0.125)).items()}
    dcp.save(flat, checkpoint_id=tmp_path / "run")
    assert_holds(tmp_path / "run", weights)
    groups = reshard.inspect(tmp_path / "run").manifest.train.param_groups
    assert [group.hyper["lr"] for group in groups] == [0.125]


@pytest.mark.parametrize("name", ["zero", "optim", "release", "huggingface"])
def test_a_run_directory_may_have_the_name_of_a_folder_of_a_checkpoint(name, tmp_path):
    run = tmp_path / name
    shutil.copytree(ROOT / "examples" / "llama-zero3-4ranks", run)
    with reshard.open(run) as checkpoint:
        assert "model.norm.weight" in checkpoint


@pytest.mark.parametrize("name", ["step", "iteration", "global_samples"])
def test_a_counter_in_a_dict_of_the_script_keeps_its_name(name, tmp_path):
    """It counts for the run too, but the script may have meant anything by it."""
    layer = torch.nn.Linear(3, 4)
    saved = {"model": layer.state_dict(), "optimizer": step_adam(layer).state_dict()}
    torch.save({**saved, "own": {name: 3, "x": 1}}, tmp_path / "s.pt")
    reshard.split(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    for path in (tmp_path / "s.pt", tmp_path / "out.pt"):
        with reshard.open(path) as checkpoint:
            client = checkpoint.manifest.train.client
            assert client[f"own.{name}"] == 3, path
            assert client["own.x"] == 1


def test_the_advice_about_a_missing_checkpoint_names_only_others(tmp_path):
    (tmp_path / "latest.txt").write_text("global_step4")
    with pytest.raises(UnrecognisedError, match="'global_step4', which does not exist") as e:
        reshard.open(tmp_path)
    assert e.value.remedy == f"copy it here again: {tmp_path} has no other checkpoint"
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step2").mkdir()
    with pytest.raises(UnrecognisedError) as e:
        run_directory.find_checkpoint(Location([tmp_path]), None, lambda _location: False)
    assert e.value.remedy == "choose another one with --tag; there are global_step2"


def test_a_format_is_not_looked_for_once_more_for_each_file(tmp_path, monkeypatch):
    calls, detects = [], registry.detects
    monkeypatch.setattr(registry, "detects", lambda *args: calls.append(args) or detects(*args))
    counts = []
    for files in (2, 20):
        for rank in range(files):
            torch.save(state(2), tmp_path / f"model_rank{rank}.pt")
        calls.clear()
        refused_paths.refuse_one_of_many(Location([tmp_path]))
        counts.append(len(calls))
    assert counts[0] == counts[1]
