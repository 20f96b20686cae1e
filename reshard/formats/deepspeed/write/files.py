"""The files of one model-parallel rank by their names, each laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.dtypes import BFLOAT16
from reshard.formats.deepspeed.write import flat, partitioned
from reshard.formats.deepspeed.write import model_states as module
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.grid import ModelRank
from reshard.formats.deepspeed.write.objects import WRITTEN_AS
from reshard.manifest import Skeleton


def model_states(choice: Choice) -> Iterator[Skeleton]:
    """``*_model_states.pt``."""
    model = f"mp_rank_{choice.mp_rank:02d}_model_states.pt"
    if choice.stage < 3:
        yield _stamped(choice, f"{choice.tag}/{model}", module.whole_file(choice))
        return
    names = [f"{choice.tag}/zero_pp_rank_{rank}_{model}" for rank in range(choice.world_size)]
    yield _stamped(choice, names[0], module.file_of(choice, 0))
    if choice.frozen:  # of which each rank has a piece of its own
        for rank, name in enumerate(names[1:], 1):
            yield _stamped(choice, name, module.file_of(choice, rank), rank)
    elif names[1:]:
        second = torch_writer.Template(names[1], module.file_of(choice, 1))
        for rank, name in enumerate(names[1:], 1):
            yield second.file(name, choice.stamp(name, rank))


def _stamped(choice: Choice, name: str, root: Any, rank: int = 0) -> Skeleton:
    """The file of a data-parallel rank."""
    return torch_writer.lay_out_object(name, root, stamp=choice.stamp(name, rank))


def layers(choice: Choice, rank: ModelRank | None) -> Iterator[Skeleton]:
    """A pipeline's ``layer_*-model_states.pt``."""
    for layer in rank.layers if rank else ():
        name = f"{choice.tag}/layer_{layer.number:02d}{rank.suffix if rank else ''}-model_states.pt"
        yield _stamped(choice, name, module.layer_file(choice, layer))


def optimizer_states(choice: Choice, ranks: Iterable[int] | None = None) -> Iterator[Skeleton]:
    """``*_optim_states.pt`` of all ranks, or at stages 1 and 2 of some.

    DeepSpeed asks for ``bf16_`` by the precision of the run, at every stage.
    """
    if choice.stage == 0:
        return
    prefix = f"{choice.tag}/{'bf16_' if choice.precision == BFLOAT16 else ''}zero_pp_rank"
    names = [
        f"{prefix}_{rank}_mp_rank_{choice.mp_rank:02d}_optim_states.pt"
        for rank in range(choice.world_size)
    ]
    if choice.stage == 3:
        states = torch_writer.Template(names[0], _optimizer(choice, partitioned.first_rank(choice)))
        first = states.file(names[0], choice.stamp(names[0]))
        others = (
            states.file(name, choice.stamp(name, rank), hollow=True)
            for rank, name in enumerate(names[1:], 1)
        )
        yield skeletons.lay_out_ranks(first, others, repeated=choice.state.scalars)
        return
    groups = flat.Flat(choice)
    for rank in range(choice.world_size) if ranks is None else ranks:
        yield _stamped(choice, names[rank], _optimizer(choice, groups.of_rank(rank)), rank)


def _optimizer(choice: Choice, states: dict[str, Any]) -> dict[str, Any]:
    return {
        "optimizer_state_dict": states,
        "ds_config": choice.config,
        "ds_version": WRITTEN_AS,
    }
