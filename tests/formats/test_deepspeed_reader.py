"""DeepSpeed's native files: tied names, and optimizers that store their parameters by index."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from reshard import formats
from reshard.containers import torch_reader
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats.deepspeed.states import ModelStates


def save(folder, name="mp_rank_00_model_states.pt", **root):
    tag = folder / "run" / "global_step1"
    tag.mkdir(parents=True, exist_ok=True)
    (folder / "run" / "latest").write_text("global_step1")
    torch.save(root, tag / name)
    return folder / "run"


@pytest.mark.parametrize("trained", ["a", "b", "c"])
def test_all_names_of_one_view_are_aliases_of_the_trained_one(trained, tmp_path):
    weight = torch.ones(4)
    module = OrderedDict.fromkeys("abc", weight)
    run = save(tmp_path, module=module, param_shapes=[{trained: torch.Size([4])}])
    file = torch_reader.read(run / "global_step1" / "mp_rank_00_model_states.pt")
    assert ModelStates(file, file.root).find_aliases() == {
        name: trained for name in "abc" if name != trained
    }


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_names_that_are_fewer_or_more_than_the_members_are_not_used(names, tmp_path):
    """The states of later groups would belong to other parameters."""
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}
    groups = [
        {"lr": 0.1, "params": [0, 1], "param_names": names},
        {"lr": 0.2, "params": [2, 3], "param_names": ["d", "e"]},
    ]
    run = save(
        tmp_path,
        module={name: torch.ones(2, 2) for name in "abcde"},
        optimizer={"state": dict.fromkeys(range(4), state), "param_groups": groups},
        ds_config={"zero_optimization": {"stage": 0}},
    )
    manifest = formats.read(run)
    assert {kind for kind, _ in manifest.entries} == {"param"}
    assert "stage 0 stores its optimizer by index" in manifest.warnings[0]


def test_experts_of_more_ranks_than_there_are_are_refused(tmp_path):
    """The list of a billion expert-parallel ranks would fill the memory."""
    name = "x.deepspeed_moe.experts.deepspeed_experts.0.weight"
    run = save(tmp_path, module={"x.deepspeed_moe.gate.wg.weight": torch.ones(2, 2)})
    save(tmp_path, "layer_0_expert_0_mp_rank_00_model_states.pt", **{name: torch.ones(2)})
    group = {"moe": True, "name": "ep_size_999999999", "params": [0]}
    optimizer = {"base_optimizer_state": {"state": {}, "param_groups": [group]}}
    file = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    save(tmp_path, file, optimizer_state_dict={**optimizer, "param_slice_mappings": [{}]})
    with pytest.raises(IncompleteError, match=r"999999999 expert-parallel ranks, but .* of 1 rank"):
        formats.read(run)


def test_a_run_without_any_file_of_its_experts_is_incomplete(tmp_path):
    run = save(tmp_path, module={"x.deepspeed_moe.gate.wg.weight": torch.ones(2, 2)})
    save(tmp_path, "expp_rank_0_mp_rank_00_optim_states.pt", optimizer=None)
    with pytest.raises(IncompleteError, match="but no experts"):
        formats.read(run)


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ("tests/data/deepspeed_0.8.3/z2_apexadam/run", "single_partition_of_fp32_groups"),
        ("examples/llama-zero3-4ranks", "fp32_flat_groups"),
    ],
)
def test_a_flat_tensor_with_gaps_is_refused(run, key, tmp_path):
    """Its parameters would be read from elements that follow one another in the file."""
    copy = shutil.copytree(Path(__file__).parents[2] / run, tmp_path / "run")
    path = min(copy.glob("*/*optim_states.pt"))
    states = torch.load(path, weights_only=False)
    flat = states["optimizer_state_dict"][key]
    flat[0] = torch.stack([flat[0], flat[0]], 1)[:, 0]
    torch.save(states, path)
    with pytest.raises(UnsupportedError, match=f"{path.name}: stores a flat tensor with gaps"):
        formats.read([copy])
