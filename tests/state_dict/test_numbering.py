"""Names for numbered optimizers: right, or none."""

from __future__ import annotations

import random

import pytest

from reshard.core.manifest import ParamGroup
from reshard.state_dict.optimizers.numbering import (
    AmbiguousError,
    match_live_groups,
    name_divided,
    name_groups,
    name_jointly,
)

MODEL = {"embed": (9, 4), "q": (4, 4), "o": (4, 4), "norm": (4,), "head": (9, 4)}


def named(groups, candidates=MODEL, **options):
    return name_groups(candidates, groups, **options)


def test_one_group_of_everything_is_the_models_order():
    assert named([list(MODEL.values())]) == [list(MODEL)]


def test_a_group_without_members_changes_nothing():
    assert named([[], [(9, 4), None, (4, 4), None, (9, 4)]]) == [[], list(MODEL)]


def test_members_without_state_are_named_by_their_place():
    assert named([[(9, 4), None, (4, 4), None, (9, 4)]]) == [list(MODEL)]


def test_a_group_that_fits_in_one_way_is_named():
    with_buffers = {"q": (4, 4), "mean": (4,), "norm": (4,), "count": (), "v": (2,)}
    assert named([[(4, 4), (2,)]], with_buffers) == [["q", "v"]]


def test_a_group_that_fits_in_two_ways_is_not_named():
    with pytest.raises(AmbiguousError, match="q"):
        named([[(9, 4), (4, 4), (4,), (9, 4)]])  # q or o?


def test_more_members_than_weights_are_never_named_by_shape():
    """A head in another file may have the shape of a weight that was never stepped."""
    with pytest.raises(AmbiguousError, match="6 parameters, more than the 5 of the weights"):
        named([[*MODEL.values(), None]])
    with pytest.raises(AmbiguousError, match="more than the 5"):
        named([[(9, 4), (4, 4), None, None, (9, 4), (4, 4)], [(4,)]])


def test_groups_by_shape():
    decay = [(9, 4), (4, 4), (4, 4), (9, 4)]
    assert named([decay, [(4,)]]) == [["embed", "q", "o", "head"], ["norm"]]


def test_a_shape_in_two_groups_is_not_named():
    with pytest.raises(AmbiguousError):
        named([[(9, 4), (4, 4), (4,)], [(4, 4), (9, 4)]])


@pytest.mark.parametrize(
    ("signs", "shape", "is_flat"), [([(7,)], "7", True), ([(1,), (1, 7), (1,)], "1, 7", False)]
)
def test_a_shape_that_no_parameter_has(signs, shape, is_flat):
    """Advise to save all parameters only if the state is not of a flat parameter."""
    with pytest.raises(AmbiguousError, match=rf"a parameter of shape \[{shape}\]") as caught:
        named([signs])
    assert bool(caught.value.advice) != is_flat


def test_without_an_order_only_what_looks_like_nothing_else_is_named():
    assert named([[(3,), (2, 2)]], {"b": (2, 2), "a": (3,)}, ordered=False) == [["a", "b"]]
    with pytest.raises(AmbiguousError, match="model's order"):
        named([list(MODEL.values())], ordered=False)


def test_whatever_is_named_is_right():
    """Random models, frozen members and groups: a name is the true one, or there is none."""
    chance = random.Random(7)
    right = 0
    for _ in range(2000):
        expected = [f"p{i}" for i in range(chance.randint(1, 7))]
        shapes = {fqn: (chance.randint(1, 4),) * chance.randint(1, 2) for fqn in expected}
        held = [fqn for fqn in expected if chance.random() < 0.8] or expected
        split = chance.random() < 0.4
        groups = [[f for f in held if len(shapes[f]) == n] for n in (1, 2)] if split else [held]
        signs = [[shapes[f] if chance.random() < 0.9 else None for f in group] for group in groups]
        try:
            found = named(signs, shapes)
        except AmbiguousError:
            continue
        for group, names, known in zip(groups, found, signs, strict=True):
            for fqn, name, sign in zip(group, names, known, strict=True):
                if sign is not None:
                    assert name == fqn
                    right += 1
    assert right > 1000


def test_groups_that_muon_sorted_by_shape():
    """A sorted group may fit into the model's order, too, under other names: b, then c."""
    model = {"a": (2,), "b": (3,), "c": (2,)}
    assert named([[(3,), (2,), (2,)]], model, by_shape={0}) == [["b", "a", "c"]]
    with pytest.raises(AmbiguousError):
        named([[(3,), (2,)]], model, by_shape={0})
    model = {"a": (2, 2), "n": (2,), "b": (3, 1), "c": (2, 2), "m": (2,)}
    muon, adam = [(3, 1), (2, 2), (2, 2)], [(2,), (2,)]
    assert named([muon, adam], model, by_shape={0}) == [["b", "a", "c"], ["n", "m"]]
    with pytest.raises(AmbiguousError, match="model's order"):
        named([muon, adam], model)
    with pytest.raises(AmbiguousError, match="not sorted by shape"):
        named([muon[::-1], adam], model, by_shape={0})


TWO = {"a": (8, 4), "b": (8,), "c": (4, 8), "d": (8,)}


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([[(8, 4), (8,)], [(4, 8), (8,)]], [["a", "b"], ["c", "d"]]),
        ([[(4, 8), (8,)], [(8, 4), None]], [["c", "d"], ["a", "b"]]),
        ([[(8,), (4, 8), (8,)], [(8, 4)]], [["b", "c", "d"], ["a"]]),
        ([[(8, 4)], [(8,), (8,)]], [["a"], ["b", "d"]]),  # c is frozen
        ([[(8, 4), (8,)], [(8,), (4, 8)]], [["a", "d"], ["b", "c"]]),
        ([[(8, 4), (8,)], [(4, 8)], [(8,)]], None),  # b and d
        ([[(8, 4), (8,)], [(4, 8)]], None),  # b or d is frozen
        ([[(4, 8), (8, 4)], [(8,), (8,)]], [["c", "a"], ["b", "d"]]),  # by shape alone
    ],
)
def test_groups_of_several_optimizers_leave_one_choice_or_none(groups, names):
    if names is None:
        with pytest.raises(AmbiguousError):
            name_jointly(TWO, groups)
    else:
        assert name_jointly(TWO, groups) == names


DECAYED = (("embed", "q", "o", "head"), ("norm",))


def test_a_known_division_names_what_shapes_do_not():
    nothing = [[None] * 4, [None]]
    assert name_divided(MODEL, nothing, [DECAYED]) == [["embed", "q", "o", "head"], ["norm"]]
    assert name_divided(MODEL, [[(9, 4)], [(4,)]], [DECAYED]) is None  # embed or head?
    trained = {"head": (9, 4), "norm": (4,)}
    assert name_divided(trained, [[(9, 4)], [(4,)]], [DECAYED]) == [["head"], ["norm"]]


def test_divisions_that_both_fit_name_nothing():
    other = (("embed", "q", "norm", "head"), ("o",))
    assert name_divided(MODEL, [[None] * 4, [None]], [DECAYED, other]) is None
    shapes = [[(9, 4), (4, 4), (4, 4), (9, 4)], [(4,)]]
    assert name_divided(MODEL, shapes, [other, DECAYED]) == [["embed", "q", "o", "head"], ["norm"]]


FAST, SLOW = {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-4, "weight_decay": 0.1}
A, B = ("embed", "q"), ("o", "head")


@pytest.mark.parametrize(
    ("stored", "live", "wanted"),
    [
        ([FAST, SLOW], [(FAST, B), (SLOW, A)], [B, A]),
        ([FAST, SLOW], [(SLOW, B), (FAST, A)], [A, B]),
        # A schedule has scaled the rates of the run that saved.
        ([{"lr": 5e-4}, {"lr": 5e-5}], [(SLOW, B), (FAST, A)], [A, B]),
        (
            [{"lr": 0.0, "initial_lr": 1e-3}, {"lr": 0.0, "initial_lr": 1e-4}],
            [(SLOW, B), (FAST, A)],
            [A, B],
        ),
        ([FAST, FAST], [(FAST, A), (FAST, B)], [A, B]),
        ([FAST, FAST], [(FAST, B), (FAST, A)], []),
        ([FAST], [(FAST, B), (SLOW, A)], []),
    ],
)
def test_stored_groups_are_matched_with_those_of_the_live_optimizer(stored, live, wanted):
    groups = [ParamGroup(hyper, fqns) for hyper, fqns in live]
    found = match_live_groups(stored, [2] * len(stored), groups, MODEL)
    assert [group.fqns for group in found] == wanted
