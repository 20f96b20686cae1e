"""Joining manifests: every field of the classes has a rule, and none drops what a part holds."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from reshard.core.dtypes import FLOAT32
from reshard.core.join import MANIFEST, TRAIN, join
from reshard.core.manifest import (
    PARAM,
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    Quantisation,
    SourceFile,
    TrainState,
    UnnamedOptimizer,
    index_entries,
)
from reshard.errors import CorruptError


def part(name: str, **train: Any) -> Manifest:
    """Return a manifest that holds one thing in every field, named after the field."""
    entry = Entry(name, PARAM, FLOAT32, (0,), ())
    state = TrainState(
        step=3,
        optimizer_step={name: 3.0},
        non_tensor_state={name: {"k": 1}},
        param_groups=(ParamGroup({"lr": 1}, (name,)),),
        rng_files=(f"{name}.rng",),
        kept_files={f"{name}.pkl": f"/{name}.pkl"},
        hook_files={f"{name}/config.json": f"/{name}/config.json"},
        opaque={"table": {name: 1}, name: 2},
    )
    return Manifest(
        Origin("test", f"/{name}"),
        index_entries([entry]),
        {f"/{name}": SourceFile(f"/{name}", 0)},
        train=replace(state, **train),
        tied={f"{name}.alias": name},
        tied_copies=(entry,),
        frozen=frozenset({name}),
        trained_dtypes={name: FLOAT32},
        placements={name: (("dp", 0),)},
        wrapped_names={name: name},
        unnamed_optimizers=(name,),
        unused_copies=(entry,),
        absent=(name,),
        warnings=(name,),
        unknown_globals=(name,),
        unread={name: "a tensor"},
        read_files=(name,),
        unread_files={f"{name}.pt": f"/{name}.pt"},
        ordered=True,
    )


def test_every_field_has_a_rule():
    assert set(MANIFEST) == {field.name for field in fields(Manifest)} - {"entries"}
    assert set(TRAIN) == {field.name for field in fields(TrainState)}


def test_what_either_part_holds_is_in_the_whole():
    whole = join([part("a"), part("b")])
    single = ("origin", "train", "ordered", "without_frozen", "keyed", "ordered_by_model")
    single += ("may_be_ddp", "quantisation", "unnamed", "checkpoint_below", "all_buffers_marked")
    for field in fields(Manifest):
        if field.name not in single:
            assert len(getattr(whole, field.name)) == 2, field.name
    assert whole.ordered
    assert not join([part("a"), replace(part("b"), ordered=False)]).ordered
    assert join([part("a"), replace(part("b"), without_frozen=True)]).without_frozen
    assert not join([part("a"), replace(part("b"), all_buffers_marked=False)]).all_buffers_marked
    by_index = [replace(part(name), keyed="index", ordered_by_model=name == "b") for name in "ab"]
    assert (join(by_index).keyed, join(by_index).ordered_by_model) == ("index", True)
    assert join([by_index[0], part("b")]).keyed is None
    stated = Quantisation("fp8", {}, "config.json")
    assert join([part("a"), replace(part("b"), quantisation=stated)]).quantisation == stated
    unnamed = UnnamedOptimizer("two fit")
    assert join([part("a"), replace(part("b"), unnamed=unnamed)]).unnamed == unnamed
    train = whole.train
    assert (train.step, train.optimizer_step) == (3, {"a": 3.0, "b": 3.0})
    assert (train.non_tensor_state.keys(), train.rng_files) == ({"a", "b"}, ("a.rng", "b.rng"))
    assert train.kept_files.keys() == {"a.pkl", "b.pkl"}
    assert train.hook_files.keys() == {"a/config.json", "b/config.json"}
    assert train.opaque == {"table": {"a": 1, "b": 1}, "a": 2, "b": 2}
    assert [group.fqns for group in train.param_groups] == [("a", "b")]


def test_parts_of_other_steps_are_refused():
    with pytest.raises(CorruptError, match="was saved at step 4, but a at step 3"):
        join([part("a"), part("b", step=4)])
    with pytest.raises(CorruptError, match="'a' was updated 4 times, but 3 times on another rank"):
        join([part("a"), part("b", optimizer_step={"a": 4.0})])


def test_no_tensor_is_in_two_parts_unless_the_caller_joined_them():
    with pytest.raises(CorruptError, match="two tensors are called 'a'"):
        join([part("a"), part("a")])
    assert len(join([part("a"), part("a")], part("a").entries.values()).entries) == 1


def test_a_reader_states_whether_its_weights_are_in_the_model_s_order():
    with pytest.raises(TypeError, match="ordered"):
        Manifest(Origin("test", ""), {}, {})  # type: ignore[call-arg]
