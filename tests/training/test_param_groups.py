"""Param groups that follow those of a live optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import Entry, Manifest, Origin, ParamGroup, TrainState, index_entries
from reshard.errors import UsageError
from reshard.training.param_groups import follow_live
from reshard.training.state import build_writable_state

ADAM = {"lr": 0.1, "betas": (0.9, 0.999)}


def make_state(*names, **shapes):
    """Return a state whose only group has these parameters."""
    entries = [make_entry(fqn, "param", shape) for fqn, shape in shapes.items()]
    entries += [make_entry(fqn, "exp_avg", shapes[fqn]) for fqn in names if 0 not in shapes[fqn]]
    train = TrainState(param_groups=(ParamGroup(ADAM, names),))
    return build_writable_state(
        Manifest(Origin("deepspeed", "run"), index_entries(entries), {}, train, ordered=True)
    )


def make_entry(fqn, kind, shape):
    chunk = contiguous("f", 0, FLOAT32, whole(shape))
    return Entry(fqn, kind, FLOAT32, shape, (chunk,) if 0 not in shape else ())


def follow(state, *names):
    state, _ = follow_live(state, (ParamGroup({"lr": 0.5}, names),))
    assert state.is_live
    (group,) = state.groups
    assert group.hyper == ADAM
    return group.fqns


@pytest.mark.parametrize("stored", [("a", "b"), ("a", "empty", "b")])
@pytest.mark.parametrize("live", [("b", "empty", "a"), ("b", "a")])
def test_the_live_optimizer_decides_about_parameters_without_elements(stored, live):
    """At stage 0 a group has them, at stages 1 to 3 it does not."""
    state = make_state(*stored, a=(2, 3), empty=(0, 5), b=(4,))
    assert follow(state, *live) == list(live)


def test_other_parameters_without_a_group_are_refused():
    state = make_state("a", a=(2, 3), b=(4,))
    with pytest.raises(UsageError, match="names 'b', which the source does not train"):
        follow(state, "a", "b")
    state = make_state("a", "b", a=(2, 3), b=(4,))
    with pytest.raises(UsageError, match="has no group for 'b'") as refused:
        follow(state, "a")
    assert "tie_word_embeddings" in refused.value.remedy
    state = replace(state, manifest=replace(state.manifest, tied={"head": "b"}))
    with pytest.raises(UsageError, match=r"several places .* for 'b', .* 'head' is tied to"):
        follow(state, "a", "b", "head")


def test_a_live_group_that_joins_different_groups_is_refused_with_what_the_run_can_do():
    """As DeepSpeed's, which makes one group if its configuration names the optimizer."""
    state = make_state("a", "b", a=(2, 3), b=(4,))
    (group,) = state.groups
    parts = [replace(group, members=(member,)) for member in group.members]
    parts[1] = replace(parts[1], hyper={**ADAM, "weight_decay": 0.0})
    state = replace(state, groups=tuple(parts))
    with pytest.raises(UsageError, match="does not state weight_decay") as refused:
        follow_live(state, (ParamGroup({}, ("a", "b")),))
    assert "leave optimizer and scheduler out" in refused.value.remedy
    joined, notes = follow_live(state, (ParamGroup({"lr": 0.5, "weight_decay": 0.3}, ("a", "b")),))
    assert joined.groups[0].hyper == {**ADAM, "weight_decay": 0.3}
    assert notes[1:] == ["group 0 keeps its own weight_decay: the source has several values"]


def test_a_live_group_of_parameters_without_elements_has_a_value_in_the_scheduler():
    state = make_state("a", a=(2, 3), empty=(0, 5))
    scheduler = {"base_lrs": [0.1], "_last_lr": [0.05], "last_epoch": 3}
    train = replace(state.manifest.train, scheduler=scheduler)
    state = replace(state, manifest=replace(state.manifest, train=train))
    live = (ParamGroup({}, ("a",)), ParamGroup({"lr": 0.5}, ("empty",)))
    regrouped, _ = follow_live(state, live)
    assert regrouped.manifest.train.scheduler == {
        "base_lrs": [0.1, 0.1],
        "_last_lr": [0.05, 0.05],
        "last_epoch": 3,
    }
