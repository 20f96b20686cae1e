"""The proof that an optimizer's state fits its weights and is whole, in every format."""

from __future__ import annotations

import pytest
import torch

import reshard
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import (
    MASTER,
    PARAM,
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    TrainState,
    index_entries,
)
from reshard.errors import CorruptError, ReshardError
from reshard.training.completeness import find_misshapen

SHAPES = {"emb": (12, 4), "head": (4, 12), "up": (8, 4), "norm": (4,)}
ADAM = {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False}


def describe(slots, hyper=ADAM, objects=()):
    """Return a manifest of the weights, each with slots: name -> fqn -> shape."""
    listed = {PARAM: SHAPES, **slots}
    entries = [
        Entry(fqn, kind, FLOAT32, shape, ())
        for kind, shapes in listed.items()
        for fqn, shape in shapes.items()
    ]
    train = TrainState(
        param_groups=(ParamGroup(hyper, tuple(SHAPES)),),
        non_tensor_state={fqn: {"projector": {"class": "GaLoreProjector"}} for fqn in objects},
    )
    return Manifest(Origin("x", "path"), index_entries(entries), {}, train, ordered=True)


@pytest.mark.parametrize(
    "slots",
    [
        {MASTER: {"emb": (10, 4)}},
        {"exp_avg": {"emb": (10, 4)}},
        {"exp_avg": {"emb": (4, 12)}},
        {"exp_avg": {"emb": (48,)}},
        {"exp_avg": {"emb": (12, 1)}},  # a mean of squares may have a value for each row
        {"exp_avg_sq": {"emb": (10, 4)}},
        {"momentum_buffer": {"norm": (3,)}},
        {"hessian": {**SHAPES, "emb": (10, 4)}},  # the other weights have it in their shape
    ],
)
def test_a_slot_of_another_shape_is_found(slots):
    ((entry, shape),) = find_misshapen(describe(slots))
    assert (entry.kind, shape) == (next(iter(slots)), SHAPES[entry.fqn])


@pytest.mark.parametrize(
    "described",
    [
        describe({MASTER: SHAPES, "exp_avg": SHAPES}),
        describe({"exp_avg_sq": dict.fromkeys(SHAPES, ())}),  # NovoGrad
        describe({"exp_avg_sq": {"emb": (12, 1), "head": (12,)}}),
        describe({"exp_avg_sq_row": {"emb": (12,)}, "exp_avg_sq_col": {"emb": (4,)}}),
        describe({"precond_0": {"emb": (12, 12), "up": (8, 8)}, "step": {"emb": ()}}),
        describe({"state1": SHAPES, "absmax1": {"emb": (1,), "up": (1,)}}),
        describe({"exp_avg": {**SHAPES, "emb": (2, 4)}}, {**ADAM, "rank": 2}),
        describe({"exp_avg": {**SHAPES, "emb": (2, 4)}}, objects=["emb"]),
        describe({"codes": {"emb": (10, 4), "up": (3, 4)}}),
    ],
)
def test_a_slot_of_its_own_shape_is_sound(described):
    assert list(find_misshapen(described)) == []


def _merge(path, out):
    return reshard.merge(path, out / "model.safetensors")


def _convert(path, out):
    return reshard.split(path, out / "dcp", to="dcp")


def _load(path, _out):
    from reshard.dcp import StorageReader

    return StorageReader(path)


def _open(path, _out):
    return reshard.open(path)


@pytest.mark.parametrize("read", [_merge, _convert, _load, _open, lambda p, _: reshard.inspect(p)])
def test_every_command_refuses_it(read, tmp_path):
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(12, 4), "head": torch.nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    state["param_groups"][0]["param_names"] = names
    for slot in ("exp_avg", "exp_avg_sq"):
        state["state"][0][slot] = state["state"][0][slot][:-2].clone()
    named = {names[key]: slots for key, slots in state["state"].items()}
    groups = [{**state["param_groups"][0], "params": names}]
    named = {"state": named, "param_groups": groups}
    path = tmp_path / "ckpt.pt"
    torch.save({"model": model.state_dict(), "optimizer": named}, path)
    said = r"ckpt.pt: the exp_avg of 'emb.weight' has shape \[10, 4\], but the weight \[12, 4\]"
    with pytest.raises(ReshardError, match=said) as caught:
        read(path, tmp_path)
    assert isinstance(caught.value, CorruptError)
    (check,) = (check for check in reshard.verify(path).checks if check.failures)
    assert (check.name, check.exit_code) == ("slots", 3)
