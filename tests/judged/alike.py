"""Assertions that two state dicts, or two checkpoints, are equal."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import reshard
from tests.support.sample_tensors import same


def assert_alike(ours, theirs):
    """Assert that two objects have the same storages, views and values as ``torch.load`` gives."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert set(ours) == set(theirs)
        for key in ours:
            assert_alike(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_alike(*pair)
    elif hasattr(ours, "to_local"):
        assert ours._spec == theirs._spec
        assert hash(ours._spec) == hash(ours._spec)
        for name in ("shard_order", "use_strided_shard_as_shard_order"):
            assert getattr(ours._spec, name) == getattr(theirs._spec, name)
        assert ours.requires_grad == theirs.requires_grad
        assert_same_mesh(ours.device_mesh, theirs.device_mesh)
        assert same(ours.to_local(), theirs.to_local())
    elif isinstance(ours, torch.Tensor):
        assert same(ours, theirs)
    else:
        assert ours == theirs


def assert_same_mesh(ours, theirs):
    """Assert that all fields are equal; torch's own equality leaves out groups, ranks and roots."""
    assert ours == theirs
    held, other = ({**mesh.__getstate__(), "_hash": None} for mesh in (ours, theirs))
    other.setdefault("_preserve_rank_order", False)  # torch before 2.15 does not have it
    assert held.keys() == other.keys()
    for key, value in held.items():
        if isinstance(value, DeviceMesh):
            assert_same_mesh(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def assert_same_state(found, wanted):
    """Compare weights in their master's precision, slots, steps and groups bit by bit."""
    assert set(found) == set(wanted)
    for name in wanted:
        assert same(found[name][...], wanted[name][...]), name
    known = {"param", "buffer", "master"}
    slots = {entry.kind for entry in wanted.manifest.entries.values()} - known
    assert {entry.kind for entry in found.manifest.entries.values()} - known == slots
    for slot in slots:
        held, other = found.optimizer(slot), wanted.optimizer(slot)
        assert held.keys() == other.keys(), slot
        for name, value in other.items():
            assert same(held[name][...], value[...]), f"{slot} of {name}"
    train, other = found.manifest.train, wanted.manifest.train
    assert dict(train.optimizer_step) == dict(other.optimizer_step)
    assert [set(g.fqns) for g in train.param_groups] == [set(g.fqns) for g in other.param_groups]
    for group, wanted_group in zip(train.param_groups, other.param_groups, strict=True):
        assert {k: group.hyper.get(k) for k in wanted_group.hyper} == dict(wanted_group.hyper)
    assert train.step == other.step
    assert train.scheduler == other.scheduler


def assert_resumed_state(seen, expected, step):
    """Compare step, parameters and optimizer of a real Trainer bit by bit."""
    assert isinstance(seen, dict), seen
    assert seen["step"] == expected["step"] == step
    for fqn, value in expected["params"].items():
        assert same(seen["params"][fqn], value), fqn
    assert seen["optimizer"].keys() == expected["optimizer"].keys()
    for fqn, slots in expected["optimizer"].items():
        for slot, value in slots.items():
            assert same(seen["optimizer"][fqn][slot], value), f"{slot} of {fqn}"


def list_tensors(place):
    """Return every weight and every moment of an Adam, by kind and name."""
    with reshard.open(place) as checkpoint:
        found = {("weight", name): checkpoint[name][...] for name in checkpoint}
        for slot in ("exp_avg", "exp_avg_sq"):
            found |= {(slot, n): t[...] for n, t in checkpoint.optimizer(slot).items()}
    return found


def assert_same_tensors(got, wanted):
    """Assert that two dicts have the same tensors."""
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key
