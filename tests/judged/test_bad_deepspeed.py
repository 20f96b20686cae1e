"""Contradicting files of DeepSpeed are refused by name, before anything is written.

One damage a line, done to what DeepSpeed itself wrote, as mixed runs and lost files leave it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import (
    CorruptError,
    IncompleteError,
    ReshardError,
    UnrecognisedError,
    UnsupportedError,
)
from tests.judged.conftest import KEPT
from tests.judged.damage import edit_file

STAGE_2 = "deepspeed_0.8.3/z2_apexadam"
STAGE_3 = "deepspeed_0.14.5/z3_mics_ws4"
PARALLEL = "gpt_neox/tp2pp2"
PIPELINE = "bloom/tp2pp2"
RANK_1 = "*_rank_1_mp_rank_00_optim_states.pt"
TRAINED = "extras.seven"
MODEL = "*mp_rank_00_model_states.pt"


def of_optimizer(change):
    return lambda root: change(root["optimizer_state_dict"])


def shorter(tensors):
    tensors[0] = tensors[0][:-3].clone()


def shorten_moment(slots):
    slots["exp_avg"] = slots["exp_avg"][:-3].clone()


def stepped(held):
    for slots in held["base_optimizer_state"]["state"].values():
        slots["step"] += 5


DAMAGES = {
    "a group fewer": (
        *(
            STAGE_2,
            RANK_1,
            of_optimizer(lambda held: held["single_partition_of_fp32_groups"].pop()),
        ),
        *(CorruptError, "contains 1 groups, but param_shapes lists 2"),
    ),
    "a shorter moment": (
        *(STAGE_2, RANK_1),
        of_optimizer(lambda held: shorten_moment(held["base_optimizer_state"]["state"][0])),
        *(CorruptError, r"rank_1\S+: group 0: exp_avg has"),
    ),
    "a shorter piece": (
        *(STAGE_2, RANK_1),
        of_optimizer(lambda held: shorter(held["single_partition_of_fp32_groups"])),
        *(
            CorruptError,
            r"rank_1_.* has 95 elements of the master weights .* this rank of 2 stores 98",
        ),
    ),
    "pieces that are shorter on all ranks": (
        *(STAGE_2, "*optim_states.pt"),
        of_optimizer(lambda held: shorter(held["single_partition_of_fp32_groups"])),
        *(CorruptError, "group 0"),
    ),
    "a sub-group fewer": (
        *(STAGE_3, RANK_1, of_optimizer(lambda held: held["fp32_flat_groups"].pop())),
        *(CorruptError, "contains 0 sub-groups, but param_shapes lists 1"),
    ),
    "a shorter sub-group": (
        *(STAGE_3, RANK_1, of_optimizer(lambda held: shorter(held["fp32_flat_groups"]))),
        *(
            CorruptError,
            "rank 1 stores 114 elements of master .* take 117 elements on each of 2 ranks",
        ),
    ),
    "a rank of a run with other settings": (
        *(STAGE_3, RANK_1, lambda root: root["ds_config"].update(gradient_clipping=7.0)),
        *(CorruptError, "rank_1.* gradient_clipping of ds_config is 7.0, but 1.0 in .*rank_0"),
    ),
    "no sub-groups": (
        *(STAGE_3, RANK_1, of_optimizer(lambda held: held.pop("fp32_flat_groups"))),
        *(CorruptError, "has no fp32_flat_groups, but other ranks have it"),
    ),
    "an optimizer's file of something else": (
        *(STAGE_2, RANK_1, lambda root: root.pop("optimizer_state_dict")),
        *(
            CorruptError,
            "is not a DeepSpeed optimizer states file: it does not contain 'optimizer_state",
        ),
    ),
    "a model's file of something else": (
        *(STAGE_2, MODEL, lambda root: root.pop("module")),
        *(CorruptError, "is not a DeepSpeed model states file: it does not contain 'module'"),
    ),
    "another step of a tensor-parallel rank": (
        *(PARALLEL, "mp_rank_01_model_states.pt", lambda root: root.update(global_steps=4)),
        *(
            CorruptError,
            "mp_rank_01_model_states.pt: was saved at step 4, but mp_rank_00_model_.* at step 3",
        ),
    ),
    "other updates of a tensor-parallel rank": (
        *(PARALLEL, "*_mp_rank_01_optim_states.pt", of_optimizer(stepped)),
        *(
            CorruptError,
            r"'0\.word_embeddings\.weight' was updated 8 times, but 3 times on another rank",
        ),
    ),
    "another model's tensor-parallel rank": (
        *(PARALLEL, "mp_rank_01_model_states.pt"),
        lambda root: root["param_shapes"][0].popitem(),
        *(CorruptError, r"mp_rank_01_optim.* has 5 paddings for 4 parameters"),
    ),
    "a layer's file without its tensors": (
        *(PIPELINE, "layer_03-model_00*", lambda root: root.clear()),
        *(IncompleteError, r"names '3\..*', but no layer_03-\* here contains"),
    ),
}


@pytest.mark.parametrize(
    ("case", "pattern", "change", "error", "says"), DAMAGES.values(), ids=DAMAGES
)
def test_contradicting_files_are_refused(case, pattern, change, error, says, tmp_path):
    run = Path(shutil.copytree(KEPT / case / "run", tmp_path / "run"))
    for path in sorted(run.rglob(pattern)):
        edit_file(path, change)
    with pytest.raises(error, match=says) as refusal:
        reshard.merge(run, tmp_path / "out.safetensors")
    assert str(run) in str(refusal.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_models_of_accelerate_are_chosen_by_tag(tmp_path):
    """``save_state`` has a tag for each DeepSpeed engine, and the last one is in ``latest``."""
    (tag,) = (path for path in (KEPT / STAGE_2 / "run").iterdir() if path.is_dir())
    for name in ("pytorch_model", "pytorch_model_1"):
        shutil.copytree(tag, tmp_path / "run" / name)
    (tmp_path / "run" / "latest").write_text("pytorch_model_1")
    with pytest.raises(UnrecognisedError, match="several models: pytorch_model, pytorch_model_1"):
        reshard.merge(tmp_path / "run", tmp_path / "out.safetensors")
    reshard.split(tmp_path / "run", tmp_path / "out", tag="pytorch_model_1", world_size=3)
    assert (tmp_path / "out" / "pytorch_model_1").is_dir()


def test_groups_without_flat_tensors_are_explained(tmp_path):
    """As DeepSpeed 0.19.8 saves Adagrad, whose state exists before its flat tensors do."""
    run = Path(shutil.copytree(KEPT / STAGE_3 / "run", tmp_path / "run"))

    def change(held):
        optimizer = held["optimizer_state_dict"]
        optimizer["param_groups"][0]["params"] = [1, 1]
        optimizer["state"] = {1: optimizer["state"][0]}

    for path in run.rglob("*optim_states.pt"):
        edit_file(path, of_optimizer(change))
    with pytest.raises(IncompleteError, match="before the first update"):
        reshard.split(run, tmp_path / "out", world_size=3)


def test_a_layer_that_is_not_a_dict_is_refused(tmp_path):
    run = Path(shutil.copytree(KEPT / PIPELINE / "run", tmp_path / "run"))
    path = next(run.rglob("layer_03-model_01*"))
    torch.save([torch.ones(2)], path)
    with pytest.raises(CorruptError, match=r"layer_03-model_01.* is not the state dict of a layer"):
        reshard.merge(run, tmp_path / "out.safetensors")


def test_the_layers_of_a_lost_tensor_parallel_rank_are_missed(tmp_path):
    run = Path(shutil.copytree(KEPT / PIPELINE / "run", tmp_path / "run"))
    for path in run.rglob("layer_*-model_01*"):
        path.unlink()
    with pytest.raises(IncompleteError, match=r"saved by 2 tensor-parallel ranks; .* 1"):
        reshard.merge(run, tmp_path / "out", replicas="first")


def test_frozen_weights_that_a_run_left_out_are_named(tmp_path):
    """As ``exclude_frozen_parameters`` leaves them: shapes, and no values on any rank."""
    run = Path(shutil.copytree(KEPT / STAGE_3 / "run", tmp_path / "run"))
    for path in run.rglob(MODEL.replace("00", "*")):
        edit_file(path, lambda root: root.update(frozen_param_fragments={}))
    with pytest.raises(IncompleteError, match=r"frozen\.weight"):
        reshard.merge(run, tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lambda zero: shutil.rmtree(zero / TRAINED), IncompleteError, f"no folder for '{TRAINED}'"),
        (lambda zero: (zero / TRAINED / "fp32.pt").unlink(), IncompleteError, "has no fp32.pt"),
        (
            lambda zero: torch.save({"param": [1.0]}, zero / TRAINED / "exp_avg.pt"),
            CorruptError,
            "exp_avg.pt.* does not contain the tensor 'param'",
        ),
        (
            lambda zero: (zero.parent / "mp_rank_00_model_states.pt").unlink(),
            IncompleteError,
            "model_states",
        ),
    ],
)
def test_an_incomplete_universal_directory_is_refused(damage, error, says, made, tmp_path):
    run = Path(shutil.copytree(made / "universal_z2" / "universal", tmp_path / "run"))
    damage(next(run.rglob("zero")))
    with pytest.raises(error, match=says):
        reshard.merge(run, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


OFFLOADED = "deepspeed_0.19.8/z3_nvme_sub"


def swapped(run, name):
    return next(run.rglob(f"offloaded_tensors/rank01/{name}"))


def two_groups(run):
    for path in run.rglob("*_optim_states.pt"):
        edit_file(
            path,
            of_optimizer(
                lambda held: held["optimizer_state_dict"].update(
                    param_groups=[
                        {**held["optimizer_state_dict"]["param_groups"][0], "params": [number]}
                        for number in (0, 1)
                    ]
                )
            ),
        )


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (
            lambda run: shutil.rmtree(swapped(run, "4_6.tensor.swp").parent),
            IncompleteError,
            "but the checkpoint contains 0 of their swap files",
        ),
        (
            lambda run: swapped(run, "4_6.tensor.swp").unlink(),
            IncompleteError,
            "but the checkpoint contains 1 of their swap files",
        ),
        (
            lambda run: swapped(run, "exp_avg_sq-0_3.tensor.swp").unlink(),
            ReshardError,
            "exp_avg_sq-0_3.tensor.swp",
        ),
        (
            lambda run: os.truncate(swapped(run, "exp_avg-4_6.tensor.swp"), 2048),
            CorruptError,
            "exp_avg-4_6.tensor.swp: has 2048 bytes; its sub-group takes 2112 plus padding",
        ),
        (two_groups, UnsupportedError, "the swap files cannot be told apart by size"),
    ],
)
def test_missing_swap_files_are_refused(damage, error, says, tmp_path):
    run = Path(shutil.copytree(KEPT / OFFLOADED / "run", tmp_path / "run"))
    damage(run)
    with pytest.raises(error, match=says) as refusal:
        reshard.merge(run, tmp_path / "out.safetensors")
    assert "offloaded_tensors" in str(refusal.value)
