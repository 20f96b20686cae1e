"""Logs of runs and what they show of each other: nothing is claimed that they do not hold."""

from __future__ import annotations

import json
import math

import pytest

from reshard.checks import trajectory
from reshard.errors import CorruptError, IncompleteError


def series(tmp_path, *lines, name="log"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trajectory.read(path)


def line(step, loss, **more):
    return {"step": step, "loss": loss, "loss_hex": float(loss).hex(), **more}


def compared(tmp_path, one, two):
    return trajectory.compare(
        series(tmp_path, *one, name="one"), series(tmp_path, *two, name="two")
    )


RUN = [line(5, 2.5), line(6, 2.25), line(7, 2.0)]


LAST_BIT = math.nextafter(2.0, 3)
ROUNDED = [{"step": 5, "loss": 2.5, "loss_hex": (2.5000001).hex()}]
NORM = line(7, 2.0, grad_norm=1.25, grad_norm_hex=(1.25).hex())
INFINITE = line(7, 2.0, grad_norm=None, grad_norm_hex="inf")
HASHED = [*RUN, {"parameter_hash": "ab"}]
BROKEN = [*RUN[:2], {"step": 7, "loss": None}]


@pytest.mark.parametrize(
    ("one", "two", "bitwise", "equal"),
    [
        (RUN, RUN, True, True),
        (RUN, [*RUN[:2], line(7, LAST_BIT)], False, False),
        ([{"step": 5, "loss": 2.5}], [{"step": 5, "loss": 2.5}], False, True),  # no bits
        (ROUNDED, [line(5, 2.5000001)], True, True),  # hex is believed
        ([*RUN[:2], NORM], [*RUN[:2], line(7, 2.0, grad_norm=1.5)], False, True),
        ([*RUN[:2], NORM], [*RUN[:2], INFINITE], False, True),
        ([*RUN[:2], NORM], RUN, True, True),  # one log has no norm
        (HASHED, HASHED, True, True),
        (HASHED, [*RUN, {"parameter_hash": "cd"}], False, True),
        (HASHED, RUN, True, True),
        (RUN, RUN[:2], False, False),  # a step that one run lacks
        (BROKEN, BROKEN, False, False),
        (RUN, BROKEN, False, False),
    ],
)
def test_what_two_logs_show_of_each_other(tmp_path, one, two, bitwise, equal):
    seen = compared(tmp_path, one, two)
    assert (seen.bitwise, seen.is_within(0.0)) == (bitwise, equal)


def test_distances_and_steps_are_told(tmp_path):
    near = compared(tmp_path, RUN, [*RUN[:2], line(7, LAST_BIT)])
    assert (near.loss.at, near.loss.max_rel) == (7, 2**-51 / LAST_BIT)
    assert near.is_within(1e-15)
    assert (near.steps, near.alone, near.grad_norm, near.parameters) == ((5, 6, 7), (), None, None)
    assert compared(tmp_path, RUN, RUN[:2]).alone == (7,)
    assert not compared(tmp_path, RUN, RUN[:2]).is_within(0.5)
    assert compared(tmp_path, BROKEN, BROKEN).loss.not_finite == (7,)
    assert not compared(tmp_path, BROKEN, BROKEN).is_within(0.5)
    assert compared(tmp_path, RUN, BROKEN).loss.max_rel == math.inf
    assert compared(tmp_path, HASHED, HASHED).parameters is True


def test_parameters_of_another_step_are_none(tmp_path):
    longer = series(tmp_path, *HASHED)
    assert longer.between(4, 7).parameter_hash == "ab"
    assert longer.between(4, 6).parameter_hash is None
    assert [point.step for point in longer.between(5, 6).points] == [6]


def test_no_common_step_is_an_error(tmp_path):
    with pytest.raises(
        IncompleteError, match="no step is in both logs: the unbroken run logged steps 5 to 7"
    ):
        compared(tmp_path, RUN, [line(1, 2.5)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 5, "loss": 2.5', "line 1: is not JSON"),
        ("[1]", "line 1: is not a JSON object"),
        ('{"step": "5", "loss": 2.5}', "expected a whole number"),
        ('{"step": true, "loss": 2.5}', "expected a whole number"),
        ('{"step": 5, "loss": "2.5"}', "expected a number"),
        ('{"step": 5, "loss": 2.5, "loss_hex": "2,5"}', "not a hex float"),
        ('{"step": 5, "loss": 2.5, "loss_hex": "0x1p9999"}', "not a hex float"),
        (f'{{"step": 5, "loss": 1{"0" * 400}}}', "loss is too large for a float"),
        (f'{{"step": 5, "loss": 1{"0" * 5000}}}', "line 1: is not JSON"),
        ("[" * 100_000, "line 1: is not JSON"),
        ('{"step": 5, "loss": 2.5}\n{"step": 5, "loss": 2.5}', "let only one rank write the log"),
    ],
)
def test_a_damaged_log_is_refused(tmp_path, text, message):
    (tmp_path / "log").write_text(text)
    with pytest.raises(CorruptError, match=message):
        trajectory.read(tmp_path / "log")
    trajectory.count_steps(tmp_path / "log")  # a program that runs may have written anything


def test_no_log_and_no_step_are_errors(tmp_path):
    with pytest.raises(IncompleteError, match="wrote no log"):
        trajectory.read(tmp_path / "log")
    (tmp_path / "log").write_text('{"parameter_hash": "ab"}\n\n')
    with pytest.raises(IncompleteError, match="has no line with step and loss"):
        trajectory.read(tmp_path / "log")
