"""fp32 masters that a program keeps in lists beside the optimizer of 16-bit parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.core.manifest import MASTER

GROUPS = ((0, 2), (1, 3))


@pytest.fixture
def made():
    """Return the state of a model in bfloat16 after an update, and its masters by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    listed = list(masters.values())
    optimizer = torch.optim.AdamW([{"params": [listed[i] for i in group]} for group in GROUPS])
    for master in listed:
        master.grad = torch.randn_like(master)
    optimizer.step()
    weights = {name: master.bfloat16() for name, master in masters.items()}
    return {"model": weights, "optimizer": optimizer.state_dict()}, masters


def nest(made, name, inner, *, by_group=True):
    """Return the state with the list of masters beside the optimizer."""
    state, masters = made
    listed = list(masters.values())
    by_groups = [[listed[i] for i in group] for group in GROUPS]
    lists = by_groups if by_group else [master for group in by_groups for master in group]
    return {**state, "optimizer": {inner: state["optimizer"], name: lists}, "iteration": 1}


@pytest.mark.parametrize(
    ("name", "inner", "by_group"),
    [
        ("fp32_from_fp16_params", "optimizer", True),  # Megatron-LM
        ("fp32_from_fp16", "optimizer_state_dict", True),  # apex
        ("fp32_params", "optimizer_state_dict", False),  # SpecForge
    ],
)
def test_they_are_the_masters_of_the_parameters(made, tmp_path, name, inner, by_group):
    masters = made[1]
    torch.save(nest(made, name, inner, by_group=by_group), tmp_path / "x.pt")
    report = reshard.merge(tmp_path / "x.pt", tmp_path / "merged", dtype="fp32")
    assert report.from_master == len(masters)
    report = reshard.split(tmp_path / "x.pt", tmp_path / "out", to="dcp", world_size=2)
    assert not report.warnings
    for path in (tmp_path / "merged", tmp_path / "out"):
        with reshard.open(path) as checkpoint:
            for fqn, master in masters.items():
                assert torch.equal(checkpoint[fqn][...], master)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_keeps_their_keys_and_the_weights_in_16_bits(made, tmp_path):
    """As Megatron-LM loads its ``torch_dcp`` again."""
    state = nest(made, "fp32_from_fp16_params", "optimizer")
    dcp.save(state, checkpoint_id=tmp_path / "source")
    reshard.split(tmp_path / "source", tmp_path / "out", world_size=3)
    metadata = [dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("source", "out")]
    kinds = [
        {
            key: hasattr(each, "properties") and (each.properties.dtype, each.size)
            for key, each in read.state_dict_metadata.items()
        }
        for read in metadata
    ]
    assert kinds[0] == kinds[1]
    with reshard.open(tmp_path / "out") as checkpoint:
        entries = [each for each in checkpoint.manifest.entries.values() if each.kind == MASTER]
        assert len(entries) == len(made[1])
        assert all(torch.equal(checkpoint[fqn][...], master) for fqn, master in made[1].items())


def test_a_list_without_some_masters_is_left_out(made, tmp_path):
    state = nest(made, "fp32_from_fp16_params", "optimizer")
    state["optimizer"]["fp32_from_fp16_params"][0].pop()
    torch.save(state, tmp_path / "x.pt")
    report = reshard.merge(tmp_path / "x.pt", tmp_path / "merged", dtype="fp32")
    assert report.from_master == 0
    assert any("fp32_from_fp16_params" in text for text in report.warnings)
