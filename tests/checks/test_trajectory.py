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


def test_equal_losses_are_bitwise(tmp_path):
    seen = compared(tmp_path, RUN, RUN)
    assert seen.bitwise
    assert seen.is_within(0.0)
    assert (seen.steps, seen.alone) == ((5, 6, 7), ())
    assert seen.grad_norm is None
    assert seen.parameters is None


def test_the_last_bit_is_seen(tmp_path):
    seen = compared(tmp_path, RUN, [*RUN[:2], line(7, math.nextafter(2.0, 3))])
    assert not seen.bitwise
    assert not seen.is_within(0.0)
    assert seen.is_within(1e-15)
    assert (seen.loss.at, seen.loss.max_rel) == (7, 2**-51 / math.nextafter(2.0, 3))


def test_decimals_are_no_bits(tmp_path):
    plain = [{"step": 5, "loss": 2.5}]
    seen = compared(tmp_path, plain, plain)
    assert seen.is_within(0.0)
    assert not seen.bitwise


def test_hex_is_believed_over_decimals(tmp_path):
    rounded = [{"step": 5, "loss": 2.5, "loss_hex": (2.5000001).hex()}]
    assert compared(tmp_path, rounded, [line(5, 2.5000001)]).bitwise


@pytest.mark.parametrize(
    "end",
    [line(7, 2.0, grad_norm=1.5), line(7, 2.0, grad_norm=None, grad_norm_hex="inf")],
)
def test_another_gradient_norm_denies_the_bits_alone(tmp_path, end):
    seen = compared(
        tmp_path,
        [*RUN[:2], line(7, 2.0, grad_norm=1.25, grad_norm_hex=(1.25).hex())],
        [*RUN[:2], end],
    )
    assert not seen.bitwise
    assert seen.is_within(0.0)


def test_a_norm_that_one_log_lacks_is_not_compared(tmp_path):
    seen = compared(tmp_path, [line(5, 2.5, grad_norm=1.0)], [line(5, 2.5)])
    assert seen.grad_norm is None
    assert seen.bitwise


@pytest.mark.parametrize(("other", "equal"), [("ab", True), ("cd", False), (None, None)])
def test_other_parameters_deny_the_bits(tmp_path, other, equal):
    end = [{"parameter_hash": other}] if other else []
    seen = compared(tmp_path, [*RUN, {"parameter_hash": "ab"}], [*RUN, *end])
    assert seen.parameters is equal
    assert seen.bitwise is (equal is not False)


def test_parameters_of_another_step_are_none(tmp_path):
    longer = series(tmp_path, *RUN, {"parameter_hash": "ab"})
    assert longer.between(4, 7).parameter_hash == "ab"
    assert longer.between(4, 6).parameter_hash is None
    assert [point.step for point in longer.between(5, 6).points] == [6]


def test_a_step_that_one_run_lacks_is_no_trajectory(tmp_path):
    seen = compared(tmp_path, RUN, RUN[:2])
    assert seen.alone == (7,)
    assert not seen.is_within(0.5)


def test_losses_that_are_not_finite_show_nothing(tmp_path):
    broken = [*RUN[:2], {"step": 7, "loss": None}]
    seen = compared(tmp_path, broken, broken)
    assert seen.loss.not_finite == (7,)
    assert not seen.is_within(0.5)
    assert not seen.bitwise
    assert compared(tmp_path, RUN, broken).loss.max_rel == math.inf


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
