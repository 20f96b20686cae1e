"""The files of a run with experts: a file an expert, and those of ranks that hold them.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_save_moe_checkpoint``, ``_load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.torch_writer import build_whole_tensor
from reshard.formats.deepspeed.write import files, whole
from reshard.formats.deepspeed.write.choice import Choice, choose, precision_of
from reshard.formats.deepspeed.write.experts import Mixture, refuse_stage
from reshard.manifest import Skeleton
from reshard.training.state import Training


def laid(
    mixed: Mixture, *, stage: int, weights_only: bool, **asked: Any
) -> tuple[Choice, Skeleton, Skeleton]:
    """The choice for the whole model, the model states with every expert's, the optimizer states.

    Raises:
        ReshardError: as `deepspeed.write.lay_out`.
    """
    refuse_stage(mixed, stage, weights_only=weights_only)
    stage = 0 if weights_only else stage
    trained = precision_of(mixed.state)

    def choice_of(state: Training) -> Choice:
        choice = choose(state, trained=trained, stage=stage, weights_only=weights_only, **asked)
        return replace(choice, experts=tuple(mixed.counts.values()))

    whole_model, first = choice_of(mixed.state), mixed.of_rank(0)
    own = skeletons.join(files.model_states(choice_of(first.state)))
    models = skeletons.join([first.lifted(own), *_experts(mixed, whole_model)])
    optimizers: list[Skeleton] = []
    if stage:
        for held, ranks in mixed.holders():
            laid = files.optimizer_states(choice_of(held.state), ranks)
            optimizers.append(held.lifted(skeletons.join(laid)))
    else:
        for number, held in enumerate(map(mixed.of_rank, mixed.owners())):
            name = f"{whole_model.tag}/expp_rank_{number}_mp_rank_00_optim_states.pt"
            root = {"optimizer": None if weights_only else whole.optimizer(choice_of(held.state))}
            stamp = whole_model.stamp(name)
            optimizers.append(held.lifted(torch_writer.lay_out_object(name, root, stamp=stamp)))
    return whole_model, models, skeletons.join(optimizers)


def _experts(mixed: Mixture, choice: Choice) -> Iterator[Skeleton]:
    weights = {weight.fqn: weight for weight in mixed.state.weights}
    for name, held in mixed.files():
        slots = {fqn: build_whole_tensor(*choice.stored(weights[fqn])) for fqn in held.values()}
        tensors = {fqn: slots[kept] for fqn, kept in held.items()}
        yield torch_writer.lay_out_object(f"{choice.tag}/{name}", tensors)
