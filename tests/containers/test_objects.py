"""Enums, dtypes and namespaces of a pickle are written again as they were, never imported."""

from __future__ import annotations

import argparse
import pickle
import signal
from fractions import Fraction

import pytest
import torch

import reshard
from reshard.containers.pickles import script_values, unpickle
from reshard.containers.pickles.pickler import Pickler
from reshard.containers.pickles.values import UnsharedItems, UnsharedObject
from reshard.errors import UnsafeError
from reshard.formats.deepspeed.write.spec import adapt_args
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.state_dict.own_values import keep_own_values
from reshard.state_dict.plain_values import to_plain


def again(value: object) -> object:
    """Write a value that was kept, and return what Python reads."""
    pickler = Pickler("test")
    pickler.write(value)
    return pickle.loads(pickler.finish())


def read(value: object) -> object:
    return unpickle.loads(pickle.dumps(value, protocol=2), where="test").value


NAMESPACE = argparse.Namespace(
    params_dtype=torch.bfloat16,
    backend=signal.SIGINT,  # an enum
    several=[signal.SIGTERM, 3],
    rotary_base=26914.93,
    odd=Fraction(1, 3),  # of a class that no framework saves
)


def test_a_namespace_keeps_its_enums_and_dtypes():
    root = {"args": read(NAMESPACE), "plain": {"a": 1}, 3: read(signal.SIGINT)}
    held = keep_own_values(root, root)
    assert held.keys() == {"args", "3"}
    found = again(held["args"])
    wanted = vars(NAMESPACE).copy()
    del wanted["odd"]
    assert vars(found) == wanted
    assert script_values.list_left_out("args", to_plain(root["args"]), held["args"]) == ["args.odd"]


def test_a_signal_that_python_3_10_saved_is_kept():
    """Megatron-LM saves ``exit_signal``; before Python 3.11 a pickle names the member itself."""
    data = b"\x80\x02cargparse\nNamespace\n)\x81}X\x0b\x00\x00\x00exit_signalcsignal\nSIGTERM\nsb."
    assert pickle.loads(data) == argparse.Namespace(exit_signal=signal.SIGTERM)
    held = keep_own_values({"args": unpickle.loads(data, where="test").value}, ["args"])
    assert again(held["args"]) == argparse.Namespace(exit_signal=signal.SIGTERM)


@pytest.mark.parametrize("name", ["signal", "raise_signal", "SIGTERM.__class__", "SIG"])
def test_other_names_of_the_module_signal_are_refused(name):
    text = bytes([len(name)]) + name.encode()
    with pytest.raises(UnsafeError, match=f"signal.{name}"):
        unpickle.loads(b"\x80\x04\x8c\x06signal\x8c" + text + b"\x93.", where="test")


def test_a_value_that_holds_itself_ends():
    held: list[object] = [signal.SIGINT]
    held.append(held)
    assert script_values.can_be_written(read(held))


def test_megatron_deepspeed_s_arguments_say_the_new_grid():
    args = argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        world_size=4,
        rank=1,
        consumed_train_samples=24,
        params_dtype=torch.float16,
    )
    held = keep_own_values({"args": read(args)}, ["args"])
    found = again(adapt_args(held, Sizes(tensor=2, pipeline=2), 3, 3)["args"])
    assert vars(found) == vars(args) | {
        "pipeline_model_parallel_size": 2,
        "world_size": 12,
        "rank": 7,
    }


def test_of_two_schedulers_the_outermost_is_the_runs(tmp_path):
    own = {"scheduler": {"last_epoch": 77}, "sizes": {4: 2}}
    run = {"last_epoch": 3, "milestones": {5: 1}}
    state = {"model": {"w": torch.ones(3)}, "own": own, "scheduler": run}
    for order in (state, dict(reversed(state.items()))):
        torch.save(order, tmp_path / "run.pt")
        with reshard.open(tmp_path / "run.pt") as checkpoint:
            train = checkpoint.manifest.train
        assert train.scheduler == run
        assert train.client == {"own.scheduler": own["scheduler"], "own.sizes": own["sizes"]}


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2000, 2001])  # batches of 1000
def test_values_that_are_made_in_turn_have_the_bytes_of_python(count):
    def make(number):
        return UnsharedObject("argparse.Namespace", {"number": number, "again": number})

    held = {
        "list": UnsharedItems(list, count, map(make, range(count))),
        "dict": UnsharedItems(dict, count, ((number, make(number)) for number in range(count))),
        "without": UnsharedObject("argparse.Namespace"),
    }
    pickler = Pickler("test")
    pickler.write(held)
    made = [argparse.Namespace(number=n, again=n) for n in (*range(count), *range(count))]
    wanted = {
        "list": made[:count],
        "dict": dict(enumerate(made[count:])),
        "without": argparse.Namespace(),
    }
    assert pickler.finish() == pickle.dumps(wanted, protocol=2)
