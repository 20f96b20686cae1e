"""Random models through random layouts and numbers of ranks: the training state stays the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=5), min_size=1, max_size=3)
LAYOUTS = (
    *({"to": "deepspeed", "zero_stage": stage} for stage in range(4)),
    *({"to": name} for name in ("ds-universal", "dcp", "torch")),
    *({"to": name, "device": "cpu"} for name in ("fsdp2", "accelerate")),
    {"to": "accelerate", "state_dict_type": "full"},
    {"to": "accelerate", "rank_files": True},
    {"to": "hf-trainer", "state_dict_type": "sharded"},
)
WAYS = st.lists(
    st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 12)), min_size=1, max_size=4
)  # often more ranks than a parameter has elements
LOST = ("^rng$", "^scheduler$", "^trainer_state", "^step$")  # what some have no place for


class Net(torch.nn.Module):
    """Parameters of given shapes, and nothing that computes."""

    def __init__(self, groups):
        super().__init__()
        shapes = [shape for group in groups for shape in group]
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(shape)))


def saved(groups, seed, path):
    """Save a model with torch after two real steps."""
    torch.manual_seed(seed)
    net = Net(groups)
    members, at = list(net.parameters()), 0
    listed = []
    for number, group in enumerate(groups):
        listed.append({"params": members[at : at + len(group)], "weight_decay": 0.1 * number})
        at += len(group)
    optimizer = torch.optim.AdamW(listed, lr=0.01)
    for _ in range(2):
        for parameter in members:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    names = [name for name, _ in net.named_parameters()]
    state = optimizer.state_dict()
    at = 0
    for group in state["param_groups"]:
        group["param_names"] = names[at : at + len(group["params"])]
        at += len(group["params"])
    torch.save({"model": net.state_dict(), "optimizer": state, "step": 2}, path)


@settings(max_examples=25)
@given(GROUPS, WAYS, st.integers(0, 99))
def test_random_models_survive_random_layouts(groups, ways, seed):
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "source")
        source.mkdir()
        saved(groups, seed, source / "checkpoint.pt")
        at = source
        for number, (layout, world) in enumerate(ways):
            out = Path(place, str(number))
            report = reshard.split(at, out, world_size=world, **layout)
            assert report.optimizer_tensors_in == report.optimizer_tensors_out
            at = out
        found = reshard.diff(source, at, ignore=LOST)
        assert found.same, (list(found.lines()), ways)
