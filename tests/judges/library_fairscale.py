"""Checkpoints of fairscale's FullyShardedDataParallel and OSS, saved as its users save them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.judges import library_models as models
from tests.judges import library_state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.judges.library_cases import Case

STEPS = 3
Slots = dict[str, dict[str, Any]]


class _Stream:
    """fairscale waits on streams without asking whether there are any."""

    def wait_stream(self, _other: Any) -> None:
        """Do nothing: no stream runs beside the computation."""

    def synchronize(self) -> None:
        """Do nothing: no stream runs beside the computation."""


def _pass_for_cuda() -> None:
    one = _Stream()
    torch.cuda.is_available = lambda: True
    torch.cuda.Stream = lambda *_a, **_k: one
    torch.cuda.current_stream = lambda *_: one
    torch.cuda.stream = lambda *_: nullcontext()
    torch.cuda.synchronize = lambda *_: None
    Tensor.record_stream = lambda *_: None
    scatter = dist._reduce_scatter_base  # NCCL's takes a matrix, gloo's does not
    dist._reduce_scatter_base = lambda output, rows, **kw: scatter(output, rows.flatten(), **kw)


def make(case: Case, ckpt: Path) -> library_state.State:
    """Save ``shard_R.pt`` of each rank, or one file of the consolidated state."""
    if case.how["kind"] == "oss":
        return _oss(case, ckpt)
    _pass_for_cuda()
    model = _sharded(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer)
    found = _tell(case, model, optimizer)
    if case.how["kind"] == "local":
        shard = {
            "model": model.local_state_dict(),
            "shard_metadata": model.local_metadata_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(shard, ckpt / f"shard_{dist.get_rank()}.pt")
    else:
        whole = {
            "model": model.state_dict(),
            "optimizer": model.gather_full_optim_state_dict(optimizer),
        }
        if dist.get_rank() == 0:
            torch.save(whole, ckpt / "checkpoint.pt")
    return found


def _sharded(case: Case) -> FullyShardedDataParallel:
    """Shard a model as two units in the root, which has the batch norm and the last layer."""
    chosen = {
        "flatten_parameters": case.how["flat"],
        "compute_device": torch.device("cpu"),
        "mixed_precision": False,
    }
    model = models.build(case.factory)
    for index in (0, 3) if case.how.get("nested", True) else ():
        model[index] = FullyShardedDataParallel(model[index], **chosen)
    return FullyShardedDataParallel(model, **chosen)


def _train(model: nn.Module, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _tell(case: Case, model: FullyShardedDataParallel, optimizer: Any) -> library_state.State:
    """Consolidate the weights, and in the same way each slot, with fairscale's own function."""
    held = {value.data_ptr(): key for key, value in model.local_state_dict().items()}
    state = {held[p.data_ptr()]: slots for p, slots in optimizer.state.items()}
    mine = {
        "weights": {k: v.detach().clone() for k, v in model.local_state_dict().items()},
        "metadata": model.local_metadata_dict(),
        "state": state,
    }
    ranks: list[Any] = [None] * case.world
    dist.all_gather_object(ranks, mine)
    metadata = [rank["metadata"] for rank in ranks]

    def whole(shards: list[dict[str, Tensor]], *, buffers: bool) -> dict[str, Tensor]:
        found = FullyShardedDataParallel.consolidate_shard_weights(shards, metadata, buffers)
        return {name: value.detach().clone() for name, value in found.items()}

    every = whole([rank["weights"] for rank in ranks], buffers=True)
    fresh = models.build(case.factory)
    slots: Slots = {name: {} for name, _ in fresh.named_parameters()}
    for slot in ("exp_avg", "exp_avg_sq"):
        shards = [{key: held[slot] for key, held in rank["state"].items()} for rank in ranks]
        for name, value in whole(shards, buffers=False).items():
            slots[name] |= {slot: value, "step": STEPS}
    return _by_name(fresh, every, slots, optimizer, list(slots))


def _by_name(
    fresh: nn.Module, every: dict[str, Tensor], slots: Slots, optimizer: Any, names: list[str]
) -> library_state.State:
    known = library_state.facts(fresh)
    (group,) = optimizer.param_groups
    return {
        "params": {name: every[name] for name, _ in fresh.named_parameters()},
        "buffers": {name: every[name] for name in known["saved_buffers"]},
        "tied": known["tied"],
        "frozen": known["frozen"],
        **library_state.by_slots(slots),
        "groups": [{**{k: v for k, v in group.items() if k != "params"}, "params": names}],
        "scheduler": None,
        "step": None,
    }


def _oss(case: Case, ckpt: Path) -> library_state.State:
    """Save the model, and the optimizer's shards as rank 0 consolidates them."""
    model = models.build(case.factory)
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-2)
    _train(DistributedDataParallel(model), optimizer)
    optimizer.consolidate_state_dict(recipient_rank=0)
    if dist.get_rank() == 0:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(whole, ckpt / "checkpoint.pt")
    names = {id(p): name for name, p in model.named_parameters()}
    ranks: list[Any] = [None] * case.world
    dist.all_gather_object(
        ranks, {names[id(p)]: slots for p, slots in optimizer.optim.state.items()}
    )
    slots: Slots = {name: held for rank in ranks for name, held in rank.items()}
    every = {name: library_state.whole(value) for name, value in model.state_dict().items()}
    return _by_name(models.build(case.factory), every, slots, optimizer, list(names.values()))
