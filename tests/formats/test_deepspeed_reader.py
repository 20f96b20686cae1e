"""DeepSpeed's native files: tied names, and optimizers that store their parameters by index."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from reshard import formats
from reshard.containers import torch_reader
from reshard.errors import IncompleteError, StaleError, UnsupportedError
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


@pytest.mark.parametrize("name", ["expp_rank_0_mp", "zero_pp_rank_0_mp"])
def test_a_run_without_any_file_of_its_experts_is_incomplete(name, tmp_path):
    module = {"x.deepspeed_moe.gate.wg.weight": torch.ones(2, 2)}
    run = save(tmp_path, module=module, num_experts=[2])
    save(tmp_path, f"{name}_rank_00_optim_states.pt", optimizer=None)
    with pytest.raises(IncompleteError, match="no file of an expert"):
        formats.read(run)


def test_experts_of_more_tensor_ranks_than_there_are_belong_to_another_run(tmp_path):
    """They show no tensor-parallel ranks that share an expert."""
    name = "x.deepspeed_moe.experts.deepspeed_experts.0.weight"
    run = save(tmp_path, module={"x.deepspeed_moe.gate.wg.weight": torch.ones(2, 2)})
    for rank in (0, 1):
        save(tmp_path, f"mp_rank_0{rank}_model_states.pt", module={}, mp_world_size=2)
    for rank in (0, 5):
        name_of_file = f"layer_0_expert_0_mp_rank_0{rank}_model_states.pt"
        save(tmp_path, name_of_file, **{name: torch.ones(2)})
    save(tmp_path, "expp_rank_0_mp_rank_00_optim_states.pt", optimizer=None)
    with pytest.raises(StaleError, match=r"mp_rank_05.*more tensor-parallel ranks than the 2"):
        formats.read(run)


@pytest.mark.parametrize("told", [{"mp_world_size": 2}, {"num_experts": [1]}])
def test_the_weights_of_one_file_are_not_advised_if_others_have_a_part(told, tmp_path):
    name = "x.deepspeed_moe.experts.deepspeed_experts.0.weight"
    shapes = [{"x.w": torch.Size([2]), name: torch.Size([2])}]
    root = {"module": {"x.w": torch.ones(2)}, "param_shapes": shapes, "dp_world_size": 2, **told}
    run = save(tmp_path, **root)
    if "num_experts" in told:
        save(tmp_path, "layer_0_expert_0_mp_rank_00_model_states.pt", **{name: torch.ones(2)})
    else:
        save(tmp_path, "mp_rank_01_model_states.pt", **root)
    with pytest.raises(IncompleteError, match=r"no \*_optim_states") as raised:
        formats.read(run)
    assert "--from torch" not in str(raised.value)


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
