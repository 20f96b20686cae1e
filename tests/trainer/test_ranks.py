"""Which device a rank takes, on machines with GPUs and without."""

from __future__ import annotations

import pytest
import torch

from tests.support.programs import run_python
from trainer.checkpoint import fsdp
from trainer.core.errors import SettingsError
from trainer.core.ranks import Ranks
from trainer.process_group import join_process_group


@pytest.fixture
def gpus(monkeypatch):
    """Let torch report so many GPUs, and record which one became the current."""

    def have(count, place):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setenv("LOCAL_RANK", str(place))
        return chosen

    monkeypatch.setattr(torch.distributed, "init_process_group", _stop)
    return have


class _JoinedError(Exception):
    """Reached the process group, whose backend is the first argument."""


def _stop(backend, **_settings):
    raise _JoinedError(backend)


def _join(device):
    with join_process_group(device, 1, 1):
        raise AssertionError("no group to join here")


@pytest.mark.parametrize(
    ("device", "count", "backend"),
    [("auto", 0, "gloo"), ("cpu", 2, "gloo"), ("auto", 2, "nccl"), ("cuda", 2, "nccl")],
)
def test_each_rank_of_a_machine_takes_its_own_gpu(gpus, device, count, backend):
    chosen = gpus(count, 1)
    with pytest.raises(_JoinedError, match=backend):
        _join(device)
    assert chosen == ([torch.device("cuda", 1)] if backend == "nccl" else [])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused_by_the_rank_without_one(gpus, device):
    gpus(2, 2)
    with pytest.raises(
        SettingsError, match=r"found 2\n  -> use --nproc 2 or --device cpu"
    ) as raised:
        _join(device)
    assert raised.value.one_rank


def test_no_gpu_is_told(gpus):
    gpus(0, 0)
    with pytest.raises(SettingsError, match="torch finds no GPU"):
        _join("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_full_state_dict_is_offloaded_by_the_device_of_the_run(monkeypatch, device):
    """Not by what the machine has: FSDP 1 on a CPU died of it (SIGSEGV, torch 2.13)."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        fsdp, "get_model_state_dict", lambda _model, options: seen.append(options.cpu_offload)
    )
    fsdp._get_model_state(torch.nn.Linear(2, 2), "full", Ranks(0, 2, torch.device(device)))
    assert seen == [device == "cuda"]


LEAVES = """
import faulthandler
faulthandler.dump_traceback_later(300, exit=True)
import torch
import torch.distributed as dist
from trainer.process_group import join_process_group
for _ in range(30):
    with join_process_group("cpu", 60, 1):
        group = dist.new_group(backend="gloo")
        dist.broadcast(torch.ones(3), 0)
        dist.broadcast(torch.ones(3), 0, group=group)
    del group
    assert not dist.is_initialized()
"""


def test_a_rank_leaves_while_threads_of_gloo_still_free_tensors():
    """With torch 2.6 it waited for these threads, and they for it, in one of a few rounds."""
    done = run_python("-c", LEAVES)
    assert done.returncode == 0, done.stderr
