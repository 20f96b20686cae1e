"""What a training script calls: its files carry a stamp, and its frameworks load them again."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

import reshard
from reshard.containers import torch_reader
from reshard.core.stamps import KEY, Stamp
from reshard.errors import UsageError
from tests.trainer import worlds

STEP = 7


def test_a_dict_has_its_stamp_under_a_key():
    state = {"model": {"w": torch.ones(2)}, "epoch": 3}
    made = reshard.stamp(state, step=STEP, save_id="an id", rank=1, world_size=2, file="r1.pt")
    assert KEY not in state
    assert made == {**state, KEY: Stamp("an id", 1, 2, STEP, "r1.pt").as_dict()}


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_a_modules_state_dict_is_loaded_strictly(tmp_path, kind):
    model = torch.nn.BatchNorm1d(3)
    state = model.state_dict() if kind is OrderedDict else dict(model.state_dict())
    torch.save(reshard.stamp(state, step=STEP), tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    model.load_state_dict(loaded, strict=True)
    assert getattr(loaded, "_metadata", None) == getattr(state, "_metadata", None)
    file = torch_reader.read(tmp_path / "model.pt")
    assert (file.stamp.rank, file.stamp.world_size, file.stamp.step) == (0, 1, STEP)
    assert list(file.root) == list(state)


def test_one_step_is_one_save():
    first, again, other = (reshard.stamp({}, step=n).reshard_stamp for n in (1, 1, 2))
    assert first["save_id"] == again["save_id"] != other["save_id"]


def test_without_a_step_a_save_id_is_needed():
    with pytest.raises(UsageError, match="step=N, or save_id=TEXT"):
        reshard.stamp({})


def test_an_engine_is_wrapped_once():
    saved = []
    engine = SimpleNamespace(
        global_steps=STEP,
        checkpoint_engine=SimpleNamespace(save=lambda state, path: saved.append((state, path))),
    )
    reshard.stamp_engine(engine)
    reshard.stamp_engine(engine)
    engine.checkpoint_engine.save(state_dict={"optimizer_state_dict": 1}, path="a/b_optim.pt")
    ((state, path),) = saved
    assert path == "a/b_optim.pt"
    assert state[KEY]["file"] == "b_optim.pt"
    assert state[KEY]["step"] == STEP


# Real FSDP, on ranks


def fsdp_files(ranks, directory):
    """Save rank files of FSDP 2 with stamps, and load them again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for name, state in {"model": model.state_dict(), "optim": optimizer.state_dict()}.items():
        path = f"{directory}/{name}_rank{ranks.rank}.pt"
        torch.save(reshard.stamp(state, step=STEP), path)
        held = torch.load(path, weights_only=False)
        (model if name == "model" else optimizer).load_state_dict(held)
    ranks.all_reduce_max(0)  # the store ends with rank 0
    if ranks.rank == 0:  # no rank waits for another
        torch.save(reshard.stamp({"w": torch.ones(1), "n": 1}, step=STEP), f"{directory}/whole.pt")
    return ranks.rank


def test_rank_files_of_real_fsdp(tmp_path):
    worlds.run(2, fsdp_files, str(tmp_path))
    found = {path.name: torch_reader.read(path).stamp for path in tmp_path.glob("*.pt")}
    assert len(found) == 5
    assert {stamp.save_id for stamp in found.values()} == {found["whole.pt"].save_id}
    for name, stamp in found.items():
        assert (stamp.world_size, stamp.step) == (2, STEP)
        assert name == "whole.pt" or name.endswith(f"rank{stamp.rank}.pt")
    (tmp_path / "whole.pt").unlink()
    with reshard.open(tmp_path) as checkpoint:
        assert sorted(checkpoint) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert not checkpoint.manifest.train.client
        assert not checkpoint.manifest.train.opaque
