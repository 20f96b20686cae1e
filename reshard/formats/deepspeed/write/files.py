"""Lay out the files of each rank by name, and of a run with experts.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name``, ``_save_moe_checkpoint``,
``_load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.torch_writer import build_whole_tensor
from reshard.core.dtypes import BFLOAT16, DType
from reshard.core.manifest import Skeleton
from reshard.formats.deepspeed.write import model_states, stage3, stage12
from reshard.formats.deepspeed.write.experts import Mixture, refuse_stage
from reshard.formats.deepspeed.write.grid import DeepSpeedTarget, ModelRank
from reshard.formats.deepspeed.write.pickled_objects import WRITTEN_AS
from reshard.formats.deepspeed.write.spec import OutputSpec, resolve_spec
from reshard.formats.deepspeed.write.stage0 import make_optimizer
from reshard.training.state import WritableState


def lay_out_rank(spec: OutputSpec, rank: ModelRank | None = None) -> tuple[Skeleton, Skeleton]:
    """Lay out the model states and the optimizer states of a model-parallel rank.

    Args:
        rank: None if it is the only one.
    """
    module = skeletons.join([*_lay_out_model_states(spec), *_lay_out_layers(spec, rank)])
    optimizer = skeletons.join(_lay_out_optimizer_states(spec))
    return (rank.lift(module), rank.lift(optimizer)) if rank else (module, optimizer)


def lay_out_experts(
    mixture: Mixture, target: DeepSpeedTarget, trained: DType
) -> tuple[OutputSpec, Skeleton, Skeleton]:
    """Lay out what one model-parallel rank of a run with experts writes.

    Args:
        trained: the precision of the run.

    Returns:
        The spec of all experts; the model states with the experts' files; the optimizer states.
    """
    refuse_stage(mixture, target)

    def resolve(state: WritableState) -> OutputSpec:
        return replace(
            resolve_spec(state, target, trained=trained),
            experts=tuple(mixture.counts.values()),
            mp_rank=mixture.mp_rank,
            spans_tensor_ranks=mixture.tensor > 1,
        )

    whole, first = resolve(mixture.state), mixture.select_rank(0)
    own = skeletons.join(_lay_out_model_states(resolve(first.state)))
    models = skeletons.join([first.lift(own), *_lay_out_expert_files(mixture, whole)])
    optimizers: list[Skeleton] = []
    if whole.stage:
        for part, ranks in mixture.list_parts():
            files = _lay_out_optimizer_states(resolve(part.state), ranks)
            optimizers.append(part.lift(skeletons.join(files)))
    else:
        for file, part in mixture.list_optimizers():
            name = f"{whole.tag}/{file}"
            root = {
                "optimizer": None if target.weights_only else make_optimizer(resolve(part.state))
            }
            stamp = whole.stamp(name)
            optimizers.append(part.lift(torch_writer.lay_out_object(name, root, stamp=stamp)))
    return whole, models, skeletons.join(optimizers)


def _lay_out_expert_files(mixture: Mixture, spec: OutputSpec) -> Iterator[Skeleton]:
    weights = {weight.fqn: weight for weight in mixture.state.weights}
    for name, kept_names in mixture.list_files():
        slots = {fqn: build_whole_tensor(*spec.stored(weights[fqn])) for fqn in kept_names.values()}
        tensors = {fqn: slots[kept] for fqn, kept in kept_names.items()}
        yield torch_writer.lay_out_object(f"{spec.tag}/{name}", tensors)


def _lay_out_model_states(spec: OutputSpec) -> Iterator[Skeleton]:
    name = f"mp_rank_{spec.mp_rank:02d}_model_states.pt"
    if spec.stage < 3:
        yield _lay_out_stamped(spec, f"{spec.tag}/{name}", model_states.make_shared_file(spec))
        return
    names = [f"{spec.tag}/zero_pp_rank_{rank}_{name}" for rank in range(spec.world_size)]
    yield _lay_out_stamped(spec, names[0], model_states.make_rank_file(spec, 0))
    if spec.frozen:  # each rank's file has another piece of them, so that no template fits
        for rank, name in enumerate(names[1:], 1):
            yield _lay_out_stamped(spec, name, model_states.make_rank_file(spec, rank), rank)
    elif names[1:]:
        template = torch_writer.Template(names[1], model_states.make_rank_file(spec, 1))
        for rank, name in enumerate(names[1:], 1):
            yield template.lay_out(name, spec.stamp(name, rank))


def _lay_out_stamped(spec: OutputSpec, name: str, root: Any, rank: int = 0) -> Skeleton:
    return torch_writer.lay_out_object(name, root, stamp=spec.stamp(name, rank))


def _lay_out_layers(spec: OutputSpec, rank: ModelRank | None) -> Iterator[Skeleton]:
    for layer in rank.layers if rank else ():
        name = f"{spec.tag}/layer_{layer.number:02d}{rank.suffix if rank else ''}-model_states.pt"
        yield _lay_out_stamped(spec, name, model_states.make_layer_file(spec, layer))


def _lay_out_optimizer_states(
    spec: OutputSpec, ranks: Iterable[int] | None = None
) -> Iterator[Skeleton]:
    # DeepSpeed expects the prefix ``bf16_`` by the precision of the run, at every stage.
    if spec.stage == 0:
        return
    prefix = f"{spec.tag}/{'bf16_' if spec.precision == BFLOAT16 else ''}zero_pp_rank"
    names = [
        f"{prefix}_{rank}_mp_rank_{spec.mp_rank:02d}_optim_states.pt"
        for rank in range(spec.world_size)
    ]

    def build_root(states: dict[str, Any]) -> dict[str, Any]:
        return {
            "optimizer_state_dict": states,
            "ds_config": spec.config,
            "ds_version": WRITTEN_AS,
        }

    if spec.stage == 3:
        template = torch_writer.Template(names[0], build_root(stage3.make_first_rank(spec)))
        first = template.lay_out(names[0], spec.stamp(names[0]))
        others = (
            template.lay_out(name, spec.stamp(name, rank), hollow=True)
            for rank, name in enumerate(names[1:], 1)
        )
        yield skeletons.lay_out_ranks(first, others, repeated=spec.state.scalars)
        return
    own = range(spec.world_size) if ranks is None else ranks
    for rank, states in stage12.make_rank_states(spec, own):
        yield _lay_out_stamped(spec, names[rank], build_root(states), rank)
