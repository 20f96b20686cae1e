"""Box arithmetic against a painted array."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod

import numpy as np
import pytest

from reshard.core.box import (
    Box,
    as_index,
    contiguous_cuts,
    find_first_overlap,
    flat_span,
    intersect,
    row_major,
    run_boxes,
    whole,
)


def painted(shape):
    return np.arange(prod(shape)).reshape(shape)


def slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.origin, box.shape, strict=True))


def elements(box, shape):
    return painted(shape)[slices(box)].reshape(-1).tolist()


def random_shape(chance, most=4, least=0):
    return tuple(
        chance.choice((0, 1, 1, 2, 3, 4, 5, 7)) for _ in range(chance.randint(least, most))
    )


def random_box(chance, shape):
    origin = tuple(chance.randint(0, n) for n in shape)
    return Box(origin, tuple(chance.randint(0, n - o) for n, o in zip(shape, origin, strict=True)))


def test_run_boxes_are_disjoint_ordered_and_hold_the_run():
    chance = random.Random(1)
    for _ in range(3000):
        shape = random_shape(chance)
        start, stop = sorted(chance.randint(0, prod(shape)) for _ in range(2))
        boxes = run_boxes(shape, start, stop)
        assert [i for box in boxes for i in elements(box, shape)] == list(range(start, stop))
        assert all(box.fits(shape) and box.volume for box in boxes)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_run_boxes_of_a_whole_tensor_are_one_box():
    chance = random.Random(2)
    for _ in range(300):
        shape = random_shape(chance)
        expected = [whole(shape)] if prod(shape) else []
        assert run_boxes(shape, 0, prod(shape)) == expected


def test_run_boxes_handle_tensors_too_large_to_paint():
    shape = (1 << 40, 3, 1 << 20)
    start, stop = 12345678901234567, 98765432109876543210
    boxes = run_boxes(shape, start, stop)
    assert sum(box.volume for box in boxes) == stop - start
    spans = [flat_span(box, shape) for box in boxes]
    assert [a for a, _ in spans] == [start, *(b for _, b in spans[:-1])]
    assert spans[-1][1] == stop


def test_intersect_is_the_set_of_common_elements():
    chance = random.Random(3)
    for _ in range(3000):
        shape = random_shape(chance)
        a, b = random_box(chance, shape), random_box(chance, shape)
        common = intersect(a, b)
        expected = sorted(set(elements(a, shape)) & set(elements(b, shape)))
        assert (elements(common, shape) if common else []) == expected
        assert common == intersect(b, a)
        if a.volume:
            assert intersect(a, a) == a


def test_within_of_an_intersection_finds_the_same_elements():
    chance = random.Random(4)
    for _ in range(2000):
        shape = random_shape(chance, least=1)
        outer, other = random_box(chance, shape), random_box(chance, shape)
        common = intersect(outer, other)
        if common is None:
            continue
        seen = painted(shape)[slices(outer)][slices(common.within(outer))]
        assert seen.reshape(-1).tolist() == elements(common, shape)
        assert outer.within(outer).origin == (0,) * len(shape)


def test_flat_span_is_the_tightest_run():
    chance = random.Random(5)
    for _ in range(3000):
        shape = random_shape(chance)
        box = random_box(chance, shape)
        start, stop = flat_span(box, shape)
        held = elements(box, shape)
        assert stop - start == (held[-1] - held[0] + 1 if held else 0)
        if held:
            assert (start, stop) == (held[0], held[-1] + 1)


def test_contiguous_cuts_are_runs_in_order_within_the_limit():
    chance = random.Random(6)
    for _ in range(2000):
        shape, limit = random_shape(chance), chance.choice((1, 2, 3, 5, 8, 13, 40, 10**9))
        seen = []
        for box in contiguous_cuts(shape, limit):
            held = elements(box, shape)
            assert 0 < len(held) <= limit
            assert flat_span(box, shape) == (held[0], held[0] + len(held))
            seen += held
        assert seen == list(range(prod(shape)))


@pytest.mark.parametrize("disjoint", [True, False])
def test_first_overlap_agrees_with_brute_force(disjoint):
    chance = random.Random(7)
    found = 0
    for _ in range(2500):
        shape = random_shape(chance, most=3, least=1)
        boxes = [random_box(chance, shape) for _ in range(chance.randint(0, 6))]
        if disjoint:  # keep those that meet none of the boxes before them
            kept = []
            for box in boxes:
                if not any(intersect(box, other) for other in kept):
                    kept.append(box)
            boxes = kept
        pair = find_first_overlap(boxes, shape)
        brute = any(intersect(a, b) for a, b in combinations(boxes, 2))
        assert (pair is not None) == brute
        if pair:
            assert pair[0] < pair[1]
            assert intersect(boxes[pair[0]], boxes[pair[1]])
            found += 1
    assert (found == 0) == disjoint


def test_first_overlap_of_two_scalars_is_found():
    assert find_first_overlap([Box((), ()), Box((), ())], ()) == (0, 1)
    assert find_first_overlap([Box((), ())], ()) is None


def test_first_overlap_is_quick_on_a_large_grid():
    edge = 64
    boxes = [Box((3 * i, 5 * j), (3, 5)) for i in range(edge) for j in range(edge)]
    shape = (3 * edge, 5 * edge)
    assert find_first_overlap(boxes, shape) is None
    moved = [*boxes[:-1], Box((3 * edge - 4, 5 * edge - 5), (3, 5))]
    pair = find_first_overlap(moved, shape)
    assert pair is not None
    assert intersect(moved[pair[0]], moved[pair[1]])


def test_row_major_strides_are_numpys():
    chance = random.Random(8)
    for _ in range(500):
        shape = random_shape(chance)
        strides = row_major(shape, 8)
        if prod(shape):
            assert strides == np.empty(shape, "u8").strides
        assert len(strides) == len(shape)
        assert all(step > 0 for step in strides)


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((0,), (4,)), (3,)),
        (Box((-1,), (2,)), (3,)),
        (Box((1,), (-1,)), (3,)),
        (Box((4,), (0,)), (3,)),
        (Box((0, 0), (1, 1)), (3,)),
        (Box((), ()), (3,)),
    ],
)
def test_a_box_that_leaves_its_tensor_does_not_fit(box, shape):
    assert not box.fits(shape)


LARGEST = 2**63 - 1  # torch counts elements in 64 bits


@pytest.mark.parametrize(
    "index", [(), (0,), (3, 0, 5), (1,) * 64, (LARGEST,), (1 << 31, (1 << 32) - 1)]
)
def test_a_shape_that_torch_can_have_is_an_index(index):
    assert as_index(list(index)) == index
    assert as_index(index, len(index)) == index


@pytest.mark.parametrize(
    "numbers",
    [
        [-1],
        [2, -3],
        [True],
        [2.0],
        ["2", 3],
        [1] * 65,
        [LARGEST + 1],
        [0, LARGEST + 1],
        [1 << 31, 1 << 32],
    ],
)
def test_numbers_that_no_shape_has_are_refused(numbers):
    with pytest.raises(ValueError, match="is not a shape or index of a tensor"):
        as_index(numbers)


def test_another_number_of_dims_is_refused():
    with pytest.raises(ValueError, match="is not a shape"):
        as_index([1, 2], 3)


def test_the_message_shows_integers_and_the_types_of_other_values():
    with pytest.raises(ValueError, match=r"^\[2, 'str', 'float'\] is not"):
        as_index([2, "a" * 99, 0.5])
    with pytest.raises(ValueError, match=r"^.{60} is not"):  # a file can state a million dims
        as_index([7] * 1000)
