"""``--ckpt-format torch``: a ``model_optim_rng.pt`` a model-parallel rank.

Source: Megatron-LM core_v0.16.1 ``training/checkpointing.py`` (``get_checkpoint_name``,
``generate_state_dict``), ``core/optimizer/optimizer.py`` (``state_dict`` of each optimizer),
``core/optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.containers import skeletons, torch_writer
from reshard.containers.pickles.script_values import NAMESPACE
from reshard.containers.pickles.values import Call
from reshard.containers.torch_writer import Storage, StorageBlock, StorageView
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import Skeleton
from reshard.errors import UnsupportedError
from reshard.formats.megatron import directory as directories
from reshard.formats.megatron import names, parameter_order
from reshard.formats.megatron.optimizers.buckets import concatenate
from reshard.formats.megatron.rank_states import RNG
from reshard.formats.megatron.write import chain, flat
from reshard.formats.megatron.write.groups import MegatronGroup
from reshard.formats.megatron.write.ranks import LocalWeight, WriterRank, list_ranks
from reshard.formats.megatron.write.resolved import Resolved

CHECKPOINT_VERSION = 3.0
_STATEFUL = re.compile(
    r"linear_(?:qkv|proj|fc1|fc2|q_proj|(?:q|kv)_(?:down|up)_proj)$"
    r"|\.(?:in|out|fc1_latent|fc2_latent)_proj$|^output_layer$"
)
_INPUT = re.compile(r"\.(?:linear_qkv|linear_kv_up_proj)$")  # of attention, whose core follows


def lay_out_files(choice: Resolved, directory: str) -> Iterator[Skeleton]:
    """Yield the files of every rank, below the iteration's directory."""
    sizes = choice.wanted.sizes
    for rank in list_ranks(sizes):
        content = _LegacyRank(choice, rank)
        position = directories.GridPosition(pp=rank.stage, ep=rank.expert, tp=rank.tensor)
        folder = f"{directory}/{position.name_folder(pp=sizes.pipeline, ep=sizes.expert)}"
        roots = {"model_optim_rng.pt": content.build_root()}
        if choice.wanted.distributed and not choice.wanted.weights_only:
            roots["distrib_optim.pt"] = content.build_distributed()
        for name, root in roots.items():
            stamp = choice.state.stamp(name, content.number, choice.world)
            yield torch_writer.lay_out_object(f"{folder}/{name}", root, stamp=stamp)


def lay_out_tracker(choice: Resolved) -> Skeleton:
    """Return the layout of ``latest_checkpointed_iteration.txt``."""
    name = "release" if choice.wanted.weights_only else str(choice.state.step)
    return skeletons.lay_out_bytes(directories.TRACKER, name.encode())


def name_directory(choice: Resolved) -> str:
    """Return the iteration's directory; ``release`` for weights alone."""
    return "release" if choice.wanted.weights_only else f"iter_{choice.state.step:07d}"


class _LegacyRank:
    def __init__(self, choice: Resolved, rank: WriterRank) -> None:
        self._choice = choice
        self._rank = rank
        self._chunks = [
            choice.places.list_chunk_weights(rank, chunk)
            for chunk in range(choice.wanted.sizes.virtual)
        ]

    @property
    def number(self) -> int:
        """Number of the rank among all ranks: tensor-parallel ranks first, pipeline stages last."""
        per_stage = self._choice.world // self._choice.wanted.sizes.pipeline
        return self._rank.stage * per_stage + self._rank.place

    def _refuse_unknown_places(self) -> None:
        # Megatron numbers optimizer states in its own order. A module that it lacks keeps the order
        # that a run's own files have, if that fits the known order.
        manifest = self._choice.state.manifest
        unknown = manifest.train.opaque.get(parameter_order.MISPLACED)
        if manifest.origin.format != directories.NAME:
            own = (local.name for chunk in self._chunks for local in chunk)
            unknown = next((name for name in own if not parameter_order.has_place(name)), None)
        if unknown:
            raise UnsupportedError(
                manifest.origin.path,
                f"{unknown!r} is in a module whose position in Megatron's model is not known, but"
                " Megatron numbers optimizer states by position",
                "write --ckpt-format torch_dist, or only the weights: --init-optimizer none",
            )

    def build_root(self) -> dict[str, Any]:
        choice, rank = self._choice, self.number
        args = {**choice.args, "rank": rank, "local_rank": rank}
        root: dict[str, Any] = {
            "args": Call(NAMESPACE, (), args),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0 if choice.wanted.weights_only else choice.state.step,
        }
        for number, chunk in enumerate(self._chunks):
            key = "model" if len(self._chunks) == 1 else f"model{number}"
            root[key] = self._build_module(chunk)
        if not choice.wanted.weights_only:
            self._refuse_unknown_places()
            root["optimizer"] = self._build_optimizers()
            root["opt_param_scheduler"] = choice.scheduler
            root.update(choice.client)
            root.update(self._build_random())
        return root

    def _build_random(self) -> dict[str, Any]:
        rank, states = self._rank, self._choice.wanted.rank_states.rng
        position = (rank.stage, rank.tensor)
        state = states.get(position, states.get((*position, rank.expert)))
        return {} if state is None else {RNG: state}

    def _build_module(self, chunk: Sequence[LocalWeight]) -> OrderedDict[str, Any]:
        # Extra states that are kept have their values, others None. The source's files list the
        # modules that have one. If they do not, and for experts, `_STATEFUL` decides by name.
        rank, before = self._rank, self._choice.places.list_rank_experts(self._rank).start
        rank_states = self._choice.wanted.rank_states
        own = dict(rank_states.select_for_chunk(rank.tensor, rank.expert, chunk, before))
        is_listed = bool(own)
        module_state: OrderedDict[str, Any] = OrderedDict()

        def add_extra_state(module: str, *, expert: bool) -> None:
            name = f"{module}._extra_state"
            if name in own:
                module_state[name] = own.pop(name)
            elif _STATEFUL.search(module) and (expert or not is_listed):
                module_state[name] = None

        last, of_expert = "", False
        for local in chunk:
            module = local.name.rpartition(".")[0]
            if last and module != last:
                add_extra_state(last, expert=of_expert)
            module_state[local.name] = local.slot(*self._choice.stored(local.known.weight))
            last, of_expert = module, local.known.expert is not None
            if self._choice.wanted.dialect == "te" and _INPUT.search(module) and not is_listed:
                module_state[_INPUT.sub(".core_attention._extra_state", module)] = None
        add_extra_state(last, expert=of_expert)
        # What is left belongs to modules without parameters, such as the core of attention.
        module_state.update(own)
        if self._choice.state.manifest.train.opaque.get(names.MTP_SINCE_017):
            respelt = ((names.spell_mtp(n, since_017=True), v) for n, v in module_state.items())
            return OrderedDict(respelt)
        return module_state

    # The optimizer

    def _list_trained(self) -> list[LocalWeight]:
        members = self._choice.groups.members
        return [
            local for chunk in self._chunks for local in chunk if local.known.weight.fqn in members
        ]

    def _build_optimizers(self) -> Any:
        fqns = [local.known.weight.fqn for local in self._list_trained()]
        chained = chain.make_states(self._choice, self._build_optimizer, fqns)
        return chained[0] if len(chained) == 1 else chained

    def _build_optimizer(self, groups: Sequence[MegatronGroup]) -> tuple[chain.State, chain.State]:
        listed = self._list_trained()
        states: dict[int, dict[str, Any]] = {}
        param_groups = []
        masters: list[list[StorageView]] = []
        for group in groups:
            own = [local for local in listed if local.known.weight.fqn in group.fqns]
            numbers = range(len(states), len(states) + len(own))
            states.update(
                (n, self._build_state(local, group)) for n, local in zip(numbers, own, strict=True)
            )
            param_groups.append({**group.hyper, "params": list(numbers)})
            masters.append(
                [
                    local.slot(local.known.weight.value, FLOAT32)
                    for local in own
                    if self._choice.stored(local.known.weight)[1] != FLOAT32
                ]
            )
        inner = {"state": states, "param_groups": param_groups}
        return inner, {"fp32_from_fp16_params": masters}

    def _build_state(self, local: LocalWeight, group: MegatronGroup) -> dict[str, Any]:
        member = self._choice.groups.members[local.known.weight.fqn]
        counter: dict[str, Any] = {}
        if "step" not in group.hyper and member.step is not None:
            counter = {"step": torch_writer.build_number(member.step)}
        slots = {name: local.slot(entry, entry.dtype) for name, entry in member.slots.items()}
        return {**counter, **slots}

    def build_distributed(self) -> Any:
        dense, experts = (
            flat.list_buffers(self._choice, self._rank, self._chunks, experts=experts)
            for experts in (False, True)
        )
        if not experts:
            return self._build_buffers(dense) if dense else None
        # Among ranks with the same dense layers, the first saves the buffers of these layers.
        is_saved = dense and self._rank.is_first
        return [self._build_buffers(dense) if is_saved else None, self._build_buffers(experts)]

    def _build_buffers(self, buffers: Sequence[flat.Buffer]) -> dict[Any, Any]:
        # A buffer is one tensor, not a list.
        state: dict[Any, Any] = {"buckets_coalesced": True}
        numbered = {n: {buffer.key: self._build_buffer(buffer)} for n, buffer in enumerate(buffers)}
        return state | numbered

    def _build_buffer(self, buffer: flat.Buffer) -> dict[str, Any]:
        members, numel = concatenate(buffer.buckets)
        starts = {member.fqn: member.start for member in members}
        tensors: dict[str, Any] = {}
        for slot in flat.SLOTS:
            parts: list[StorageBlock] = []
            for local in buffer.weights:
                entry = flat.find_entry(self._choice, local, slot)
                if entry is not None:
                    parts += local.parts(entry, starts[local.name])
            tensors[slot] = StorageView(Storage(FLOAT32, numel, tuple(parts)), (numel,))
        return {**tensors, "numel_unpadded": numel}
