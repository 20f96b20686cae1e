"""Read a mixture of experts in a run with tensor-parallel ranks, or with pipeline stages.

The files of a pipeline stage with experts are those of a run without a pipeline: its modules are in
the model states and not in a file for each layer, and its layers with experts count from 0.
With ``enable_expert_tensor_parallelism``, tensor-parallel ranks share each expert: the files of
each of them are those of a run with experts. Without it, every rank has its experts whole, and
expert-parallel groups span tensor-parallel ranks: rank ``data * tensor + t`` of all ranks has the
experts of expert-parallel rank ``(data * tensor + t) % ep``, and the ranks that share them divide
their optimizer state. The first of those ranks writes the experts' files, under its own ``t``.
Source: DeepSpeed 0.19.8 ``moe/layer.py`` (``_create_process_groups``), ``utils/groups.py``
(``_create_expert_and_data_parallel``, ``_create_expert_data_and_model_parallel``),
``runtime/engine.py`` (``_save_moe_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import tag_directory
from reshard.formats.deepspeed.directory import RankFiles, TagFiles
from reshard.formats.deepspeed.experts import optimizers, reader
from reshard.formats.deepspeed.experts.files import (
    Expert,
    count_experts,
    insert_experts,
    open_experts,
)
from reshard.formats.deepspeed.experts.layout import (
    EXPERT_TENSOR,
    list_expert_data_ranks,
    parse_expert_name,
)
from reshard.formats.deepspeed.states import ModelStates
from reshard.layouts.model_parallel import combine


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The state of a run with experts.

    Args:
        ranks: what each tensor-parallel rank has a part of, or each stage.
        experts: the experts, if ranks have them whole.
        module: the names of the module with all experts, in order.
        counts: the experts of each layer.
        sizes: the expert-parallel ranks that share each layer.
    """

    ranks: Sequence[Manifest]
    experts: Manifest | None = None
    module: Iterable[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    def finish(self, joined: Manifest) -> Manifest:
        """Return the joined state with what is known of the experts alone."""
        if self.experts is None:
            size = max(rank.origin.mesh["ep"] for rank in self.ranks)
            shares = joined.origin.mesh["tp"]
        else:
            joined = reader.sort_by_module(joined, self.module, self.counts, self.sizes)
            size, shares = max(self.sizes.values()), 1
        mesh = {**joined.origin.mesh, "ep": size, EXPERT_TENSOR: shares}
        return replace(joined, origin=replace(joined.origin, mesh=mesh))


def read(files: TagFiles, firsts: Sequence[ModelStates], tensor: int) -> TensorRanks:
    """Read what the tensor-parallel ranks hold, or the stages of a pipeline.

    Args:
        firsts: the model states of each model-parallel rank.
        tensor: number of tensor-parallel ranks.

    Raises:
        IncompleteError: an expert's or a rank's file is missing.
        CorruptError: the files contradict each other.
        UnsupportedError: experts of a pipeline with tensor-parallel ranks, or with a stage without
            experts; ranks in another order than that of Megatron; whole experts of DeepSpeed before
            0.19.
    """
    has_stages = len(firsts) > tensor
    with_experts = set().union(*files.experts.values())
    lacks_experts = not with_experts.issuperset(range(len(firsts)))
    if files.layers or (has_stages and (tensor > 1 or lacks_experts)):
        raise UnsupportedError(
            files.location,
            "contains experts of a pipeline-parallel run, which reshard reads only if every stage"
            " has some, and no tensor-parallel ranks",
        )
    known = files.ranks.keys()
    if has_stages or any(len(known & ranks.keys()) > 1 for ranks in files.experts.values()):
        parts = [reader.read(files.select(number), first) for number, first in enumerate(firsts)]
        return TensorRanks(parts)
    return _read_whole_experts(optimizers.leave_out_repeated(files), firsts)


def _read_whole_experts(files: TagFiles, firsts: Sequence[ModelStates]) -> TensorRanks:
    first = firsts[0]
    reader.refuse(files, first)
    experts = open_experts(files, first)
    counts = count_experts(experts)
    if files.expert_optim:
        found, sizes = optimizers.read(files, firsts, experts)
        _check_order(experts, firsts, sizes)
        ranks = [
            combine.join_stages(
                [_select(part, _is_beside_experts) for at, part in found if at == n]
            )
            for n in range(len(firsts))
        ]
        whole = combine.join_stages([_select(part, _is_of_expert) for _, part in found])
    else:
        if "param_shapes" not in first.root:
            raise UnsupportedError(
                files.location,
                "contains experts of a tensor-parallel run of DeepSpeed before 0.19, which does not"
                " list the parameters of such a run",
            )
        with_all, sizes = reader.with_all_experts(first, experts)
        _check_order(experts, firsts, sizes)
        ranks = [
            tag_directory.read(files.ranks[number], _select_lists(own, _is_beside_experts))
            for number, own in enumerate(firsts)
        ]
        whole = tag_directory.read(
            _join_ranks(files), _select_all_ranks(with_all, firsts), [e.file for e in experts]
        )
    return TensorRanks(ranks, whole, insert_experts(first, experts), counts, sizes)


def _is_of_expert(fqn: str) -> bool:
    return parse_expert_name(fqn) is not None


def _is_beside_experts(fqn: str) -> bool:
    return parse_expert_name(fqn) is None


def _check_order(
    experts: Sequence[Expert],
    firsts: Sequence[ModelStates],
    sizes: Mapping[str, int],
) -> None:
    tensor = len(firsts)
    world = firsts[0].data_ranks * tensor
    counts = count_experts(experts)
    for expert in experts:
        size = sizes[expert.layer]
        sharing = list_expert_data_ranks(world, size, firsts[0].config)
        writer = sharing[expert.number * size // counts[expert.layer]][0]
        name = f"expert_{expert.number}_mp_rank_{writer % tensor:02d}_model_states.pt"
        if not expert.file.path.endswith(name):
            raise UnsupportedError(
                expert.file.path,
                f"was written by another rank than {writer} of {world}: reshard reads experts only"
                " of runs whose ranks have consecutive numbers in each tensor-parallel group",
            )


def _select(part: Manifest, keep: Callable[[str], bool]) -> Manifest:
    return part.with_entries(entry for entry in part.entries.values() if keep(entry.fqn))


def _select_lists(states: ModelStates, keep: Callable[[str], bool]) -> ModelStates:
    # A param group has either only experts or none.
    kept = [keep(next(iter(group), "")) for group in states.shapes]
    groups = [group if own else {} for group, own in zip(states.shapes, kept, strict=True)]
    sizes = states.expert_ranks or (1,) * len(kept)
    lists: dict[str, Any] = {
        name: {key: value for key, value in section.items() if keep(key)}
        for name in ("module", "frozen_param_shapes", "shared_params")
        if isinstance(section := states.root.get(name), dict)
    }
    lists["param_shapes"] = groups
    lists["buffer_names"] = [name for name in sorted(states.buffers) if keep(name)]
    return replace(
        states,
        root=states.root | lists,
        expert_ranks=tuple(size if own else 0 for size, own in zip(sizes, kept, strict=True)),
    )


def _select_all_ranks(states: ModelStates, firsts: Sequence[ModelStates]) -> ModelStates:
    own = _select_lists(states, _is_of_expert)
    return replace(own, root=own.root | {"dp_world_size": states.data_ranks * len(firsts)})


def _join_ranks(files: TagFiles) -> RankFiles:
    """Return the files of all ranks, numbered as those of a run without tensor-parallel ranks."""
    optim = {
        data * len(files.ranks) + number: path
        for number, rank in files.ranks.items()
        for data, path in rank.optim.items()
    }
    return RankFiles(files.location, files.ranks[0].model, dict(sorted(optim.items())))
