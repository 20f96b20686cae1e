"""The coverage proof: what is not exactly one tensor in whole files is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from reshard.core import dtypes
from reshard.core.box import Box, find_first_overlap, row_major, whole
from reshard.core.chunks import Chunk, contiguous
from reshard.core.dtypes import BFLOAT16, UINT8
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    Record,
    SourceFile,
    TrainState,
    advise_weights_alone,
    check,
    find_most_common_dtype,
    find_source_file,
    index_entries,
    patch_literals,
)
from reshard.errors import CorruptError
from reshard.layouts.partition import run_chunks
from reshard.system import escaped
from reshard.system.derived import Derived
from tests.support.computed import Computed

F32 = dtypes.FLOAT32


def manifest(shape, chunks, *, nbytes=1 << 20):
    entry = Entry("layer.weight", "param", F32, shape, tuple(chunks))
    files = {chunk.file: SourceFile(chunk.file, nbytes) for chunk in chunks}
    return Manifest(Origin("test", "/t"), index_entries([entry]), files, ordered=True)


def rows(start, stop, *, file="a", width=4, byte_offset=0):
    box = Box((start, 0), (stop - start, width))
    return contiguous(file, byte_offset, F32, box)


@pytest.mark.parametrize("changed", [{"fqn": 7}, {"kind": ("exp_avg",)}])
def test_a_name_that_is_no_text_is_refused(changed):
    made = manifest((6, 4), [rows(0, 6)])
    entries = index_entries([replace(entry, **changed) for entry in made.entries.values()])
    with pytest.raises(CorruptError, match="is not a string"):
        check(replace(made, entries=entries))


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (7, 4)),
        Box((1, 0), (6, 4)),
        Box((-1, 0), (7, 4)),
        Box((0, 0), (6, 5)),
        Box((0,), (24,)),
        Box((0, 0, 0), (6, 4, 1)),
    ],
)
def test_out_of_bounds_box_is_refused(box):
    chunk = Chunk(box, "a", 0, row_major(box.shape, 4), F32)
    with pytest.raises(CorruptError, match="outside"):
        check(manifest((6, 4), [chunk]))


@pytest.mark.parametrize(("byte_offset", "fits"), [(0, True), (4, True), (5, False), (-1, False)])
def test_span_past_the_file_is_refused(byte_offset, fits):
    source = manifest((6, 4), [rows(0, 6, byte_offset=byte_offset)], nbytes=100)
    if fits:
        assert check(source) is None
    else:
        with pytest.raises(CorruptError, match="but the file has 100"):
            check(source)


def test_strided_span_past_the_file_is_refused():
    chunk = Chunk(whole((3, 2)), "a", 0, (8, 40), F32)  # last element at 2 * 8 + 40
    assert check(manifest((3, 2), [chunk], nbytes=60)) is None
    with pytest.raises(CorruptError, match="0 to 60"):
        check(manifest((3, 2), [chunk], nbytes=59))


@pytest.mark.parametrize(("stride", "dtype"), [(-4, F32), (-1, UINT8)])
def test_negative_stride_is_refused(stride, dtype):
    chunk = Chunk(whole((3,)), "a", 8, (stride,), dtype)
    with pytest.raises(CorruptError):
        check(manifest((3,), [chunk]))


def test_what_does_not_cover_is_said_of_the_first_file():
    with pytest.raises(CorruptError) as hole:
        check(manifest((6, 4), [rows(0, 2), rows(3, 6, file="b")]))
    with pytest.raises(CorruptError) as overlap:
        check(manifest((6, 4), [rows(0, 4), rows(3, 6, file="b")]))
    with pytest.raises(CorruptError) as twice:
        index_entries(
            2 * list(manifest((6, 4), [rows(0, 3), rows(3, 6, file="b")]).entries.values())
        )
    assert [error.value.where for error in (hole, overlap, twice)] == ["a"] * 3
    with pytest.raises(CorruptError) as nothing:
        check(manifest((6, 4), []))
    assert nothing.value.where == "/t"


def test_scalar_is_one_element_and_never_optional():
    scalar = contiguous("a", 0, F32, whole(()))
    assert check(manifest((), [scalar, replace(scalar, file="b")])) is None
    with pytest.raises(CorruptError, match="0 of 1"):
        check(manifest((), []))
    with pytest.raises(CorruptError, match="the file has 3"):
        check(manifest((), [scalar], nbytes=3))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
def test_empty_tensors_are_accepted(shape):
    chunk = contiguous("a", 64, F32, whole(shape))
    assert check(manifest(shape, [chunk, chunk], nbytes=64)) is None


def test_empty_pieces_beside_full_ones_are_accepted():
    assert check(manifest((6, 4), [rows(0, 6), rows(6, 6, file="b"), rows(0, 0)])) is None


def test_random_flat_partitions_are_accepted_and_any_dropped_piece_is_refused():
    chance = random.Random(1)
    for _ in range(300):
        shape = tuple(chance.choice((1, 2, 3, 5, 7)) for _ in range(chance.randint(1, 4)))
        numel = prod(shape)
        cuts = sorted(chance.randint(0, numel) for _ in range(chance.randint(0, 5)))
        edges = [0, *cuts, numel]
        chunks = [
            chunk
            for i, (a, b) in enumerate(pairwise(edges))
            for chunk in run_chunks(contiguous(f"rank{i}", 0, F32, whole((b - a,))), 0, shape, a, b)
        ]
        chance.shuffle(chunks)
        assert check(manifest(shape, chunks)) is None
        del chunks[chance.randrange(len(chunks))]
        with pytest.raises(CorruptError):
            check(manifest(shape, chunks))


def test_any_set_of_boxes_is_accepted_exactly_when_it_paints_every_element_once():
    chance = random.Random(2)
    accepted = 0
    for _ in range(2000):
        shape = tuple(chance.choice((1, 2, 3)) for _ in range(chance.randint(1, 3)))
        boxes = []
        for _ in range(chance.randint(1, 3)):
            origin = tuple(chance.choice((0, 0, n // 2)) for n in shape)
            extent = tuple(chance.randint(1, n - o) for n, o in zip(shape, origin, strict=True))
            boxes.append(Box(origin, extent))
        distinct = list(dict.fromkeys(boxes))
        volume = sum(box.volume for box in distinct)
        right = volume == prod(shape) and find_first_overlap(distinct, shape) is None
        chunks = [contiguous("a", 0, F32, box) for box in boxes]
        if right:
            check(manifest(shape, chunks))
            accepted += 1
            continue
        numel = prod(shape)
        told = f"contain {volume} of {numel} elements" if volume < numel else "overlap"
        with pytest.raises(CorruptError, match=told):
            check(manifest(shape, chunks))
    assert accepted > 200


def test_keyed_refuses_two_entries_of_one_kind_and_name():
    entry = Entry("w", "param", F32, (2,), (contiguous("file", 0, F32, whole((2,))),))
    with pytest.raises(CorruptError, match="'w'"):
        index_entries([entry, replace(entry, shape=(3,))])
    with pytest.raises(CorruptError, match="'w'"):
        index_entries([replace(entry, chunks=()), replace(entry, chunks=())])
    both = index_entries([entry, replace(entry, kind="master")])
    assert list(both) == [("param", "w"), ("master", "w")]


SHAPES = [([0, 0], 2), ([0, 0, 0, 3], 3), ([0, 3], 1), ([], 0)]


@pytest.mark.parametrize(("shapes", "found"), SHAPES)
def test_weights_without_elements_are_placeholders(shapes, found):
    entries = [Entry(f"w{n}", "param", F32, (size,), ()) for n, size in enumerate(shapes)]
    entries += [Entry("square", "param", F32, (0, 0), ()), Entry("b", "buffer", F32, (0,), ())]
    held = Manifest(Origin("test", "/t"), index_entries(entries), {}, ordered=True)
    assert held.placeholders == [f"w{n}" for n in range(found)]


def test_one_record_with_a_checksum_is_a_file_with_checksums():
    without, sealed = Record(0, 4, None, "a"), Record(4, 4, 0, "b")
    assert SourceFile("f", 8, (without, sealed)).has_checksums
    assert SourceFile("f", 8, (without,)).has_checksums is False
    assert SourceFile("f", 8).has_checksums is False


def test_the_file_of_computed_bytes_or_of_text_has_their_size_and_does_not_last():
    stored = SourceFile("f", 8)
    computed = Derived("f", "sums", Computed(24))
    text = escaped.make_name(escaped.EscapedText("f", 1, 7, 5))
    assert find_source_file({"f": stored}, "f") is stored
    for name, nbytes in ((computed, 24), (text, 5)):
        assert find_source_file({}, name) == SourceFile(name, nbytes, lasting=False)


def test_the_dtype_of_most_tensors():
    assert find_most_common_dtype([F32, UINT8, BFLOAT16, UINT8, UINT8, BFLOAT16]) == "bfloat16"
    assert find_most_common_dtype([F32, BFLOAT16, BFLOAT16, F32]) == "float32"
    assert find_most_common_dtype([UINT8]) == ""


@pytest.mark.parametrize(
    ("step", "skipped", "updates"), [(None, 3, None), (9, None, 9), (9, 0, 9), (9, 2, 7)]
)
def test_updates_are_the_steps_that_were_not_skipped(step, skipped, updates):
    assert TrainState(step=step, skipped_steps=skipped).updates == updates


def test_a_manifest_has_an_optimizer_if_an_entry_is_of_another_kind_than_weights():
    weights = manifest((6, 4), [rows(0, 6)])
    (weight,) = weights.entries.values()
    slots = [replace(weight, kind="exp_avg")]
    assert not weights.has_optimizer
    assert replace(weights, entries=index_entries([weight, *slots])).has_optimizer
    assert replace(weights, entries=index_entries(slots)).has_optimizer


def test_an_origin_is_described_by_its_format_and_detail():
    assert Origin("dcp", "/t").description == "dcp"
    assert Origin("deepspeed", "/t", detail="ZeRO stage 2").description == "deepspeed ZeRO stage 2"
    assert Origin("test", "/t").world == 1
    assert Origin("test", "/t", mesh={"world": 6, "dp": 3}).world == 6


def test_a_tied_name_is_kept_under_another():
    held = Manifest(Origin("test", "/t"), {}, {}, tied={"head": "embedding"}, ordered=True)
    assert held.kept_name("head") == held.kept_name("embedding") == "embedding"


def test_literals_are_patched_in_place_and_changes_between_them_stay():
    rng = random.Random(7)
    for _ in range(300):
        # bytes 0 to 39: runs that a literal, a change or nothing has, and changes in literals
        runs = sorted(rng.sample(range(41), rng.randrange(2, 9)))
        literals, changes = [], []
        for start, stop in pairwise(runs):
            kind, data = rng.randrange(3), rng.randbytes(stop - start)
            if kind == 0:
                changes.append((start, data))
            if kind == 1:
                literals.append((start, data))
                inner = sorted(rng.sample(range(stop - start + 1), min(2, stop - start)))
                changes += [(start + a, rng.randbytes(b - a)) for a, b in pairwise(inner)]
        wanted = {
            at + index: byte
            for at, data in (*literals, *changes)
            for index, byte in enumerate(data)
        }
        found = list(patch_literals(literals, changes))
        assert [at for at, _ in found] == sorted({at for at, _ in found})
        assert {at + i: byte for at, data in found for i, byte in enumerate(data)} == wanted
        assert sum(len(data) for _, data in found) == len(wanted)


def test_weights_alone_are_advised_where_the_damaged_file_has_none():
    def entry(fqn, kind, file):
        return Entry(fqn, kind, F32, (1, 4), (rows(0, 1, file=file),))

    weight, moment = entry("w", "param", "model"), entry("w", "exp_avg", "optimizer")
    second = entry("v", "param", "more")
    for beside, is_advised in (("model", False), ("optimizer", True)):
        slot = replace(moment, chunks=(rows(0, 1, file=beside),))
        made = replace(manifest((1, 4), []), entries=index_entries([weight, second, slot]))
        assert ("without the optimizer's files" in advise_weights_alone(slot, made)) is is_advised
        assert advise_weights_alone(slot, made) == "" or is_advised
        assert advise_weights_alone(weight, made) == ""
