"""Random states of a rank's file: those of Python, numpy and torch, kept to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from reshard.containers import torch_writer
from reshard.errors import CorruptError, UnsafeError, UnsupportedError
from reshard.training import rng


def states(dialect, **devices):
    """As Accelerate and the Trainer gather them, after some draws."""
    python, numpy, cpu = random.Random(3), np.random.RandomState(4), torch.Generator()
    python.gauss(0, 1)  # keeps its second number for later
    numpy.standard_normal(3)
    torch.rand(7, generator=cpu.manual_seed(5))
    return {
        dialect.python: python.getstate(),
        dialect.numpy: numpy.get_state(),
        dialect.cpu: cpu.get_state(),
        **{dialect.device.format(name): held for name, held in devices.items()},
    }


def loaded(root, path):
    """Return what torch loads of a file that we laid out."""
    (file,) = torch_writer.lay_out_object(path.name, root).files
    content = bytearray(file.nbytes)
    for at, data in file.literals:
        content[at : at + len(data)] = data
    path.write_bytes(content)
    return torch.load(path, weights_only=False)


def same(one, two):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(two) and one.dtype == two.dtype and bool((one == two).all())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.mark.parametrize("dialect", [rng.ACCELERATE, rng.HF_TRAINER])
@pytest.mark.parametrize("several", [False, True])
def test_states_of_devices_too_are_written_as_they_were(dialect, several, tmp_path):
    device = torch.Generator().manual_seed(11).get_state()
    held = [device, device.flip(0).contiguous()] if several else device
    saved = states(dialect, cuda=held, npu=device)
    torch.save(saved, tmp_path / "random_states_0.pkl")
    (read,) = rng.read([str(tmp_path / "random_states_0.pkl")])
    again = loaded(rng.build_file(read, dialect), tmp_path / "again.pkl")
    assert again.keys() == saved.keys()
    assert all(same(again[name], value) for name, value in saved.items())
    random.Random().setstate(again[dialect.python])
    np.random.RandomState().set_state(again[dialect.numpy])
    torch.Generator().set_state(again[dialect.cpu])


class Strange:
    """What nobody knows."""


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"cpu": None}, UnsupportedError, "not a byte vector"),
        ({"cpu": torch.ones(4)}, UnsupportedError, "not a byte vector"),
        ({"cpu": torch.ones(8, dtype=torch.uint8)[::2]}, UnsupportedError, "not a byte vector"),
        ({"cpu": torch.zeros(1 << 21, dtype=torch.uint8)}, UnsupportedError, "2097152 bytes"),
        ({"python": (2, (1,), None)}, UnsupportedError, "Python's generator"),
        ({"python": (3, (1, 2, 3), None)}, UnsupportedError, "Python's generator"),
        ({"numpy": ("PCG64", 1, 2, 3, 4)}, UnsupportedError, "not MT19937"),
        ({"more": Strange()}, UnsafeError, "names .*Strange"),
    ],
)
def test_states_of_another_kind_are_refused(change, error, says, tmp_path):
    torch.save(states(rng.HF_TRAINER) | change, tmp_path / "rng_state_0.pth")
    with pytest.raises(error, match=says) as refusal:
        rng.read([str(tmp_path / "rng_state_0.pth")])
    assert "--rng drop" in str(refusal.value)


def test_a_file_without_states_is_none(tmp_path):
    torch.save({"step": 3}, tmp_path / "rng_state_0.pth")
    assert not rng.has_states(str(tmp_path / "rng_state_0.pth"))
    with pytest.raises(CorruptError, match="holds no random states"):
        rng.read([str(tmp_path / "rng_state_0.pth")])
