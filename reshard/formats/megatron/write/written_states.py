"""The states that ranks saved beside tensors, on the new grid: extra states and random states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.containers import torch_writer
from reshard.core.manifest import Entry, Manifest
from reshard.errors import UnsupportedError
from reshard.formats.megatron import names, rank_states
from reshard.formats.megatron.rank_states import RankKey, RankStates
from reshard.formats.megatron.write.ranks import LocalWeight
from reshard.layouts.model_parallel.sizes import Sizes, parse_mesh
from reshard.state_dict.tree import as_global
from reshard.system.files import SourceFiles
from reshard.training import rng
from reshard.training.rng import RankRng

KIND = "_extra_state"  # of their entries

_TRACKERS = "rng_tracker_states"


@dataclass(frozen=True, slots=True)
class WrittenStates:
    """The states that are written.

    Args:
        extra: extra states as in `rank_states.RankStates`; a tensor becomes a slot of an entry.
        entries: the entries of these tensors.
        rng: random states by the rank's position in the grid.
    """

    form: str = ""
    extra: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    rng: Mapping[RankKey, Any] = field(default_factory=dict)

    def select_for_chunk(
        self, tensor: int, expert: int, chunk: Sequence[LocalWeight], experts: int
    ) -> Iterator[tuple[str, Any]]:
        """Yield the states of the modules in a rank's model chunk, under their names there.

        Args:
            experts: number of experts of the whole model that come before the rank's.
        """
        # States from torch_dist, and empty ones, are the same for every rank.
        rank = (tensor, expert) if (tensor, expert) in self.extra else (0, 0)
        layers = {local.known.layer: names.find_layer(local.name) for local in chunk}
        modules = {local.name.rpartition(".")[0] for local in chunk}
        # The core of attention has a state and no parameter; its attention has others.
        parents = {module.rpartition(".")[0] for module in modules} - {""}
        local_modules = {
            local.known.weight.fqn.rpartition(".")[0]: local.name.rpartition(".")[0]
            for local in chunk
            if local.known.expert is not None
        }
        patterns = {local.known.found.pattern for local in chunk if local.known.expert is not None}
        for key, value in self.extra.get(rank, {}).items():
            name = key if self.form == "torch" else rank_states.name_in_model(key)
            layer = names.find_layer(name)
            module, _, last = name.rpartition(".")
            if module in local_modules:
                yield f"{local_modules[module]}.{last}", value
            elif any(pattern.match(f"{module}.weight", {}) for pattern in patterns):
                continue  # the state of another rank's expert
            elif layer is None:
                if module in modules or module.rpartition(".")[0] in parents:
                    yield name, value
            elif (here := layers.get(layer)) is not None:
                yield names.shift_numbers(name, layers=here - layer, experts=-experts), value

    def select_for_dist(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the states under torch_dist's keys."""
        states = self.extra.get((0, 0), {})
        return dict(states if self.form == "torch_dist" else rank_states.spell_keys(states, keys))


def find_extra_obstacle(
    states: RankStates, manifest: Manifest, sizes: Sizes, form: str, impl: str
) -> str:
    """Return the reason why modules' extra states cannot be kept; empty if they can."""
    source_impl = _get_impl(manifest)
    # The pipeline size may differ: a state goes with its layer, whichever stage has that.
    loses = (
        states.form == form == "torch"
        and _get_source_sizes(manifest)[1:] != _get_target_sizes(sizes)[1:]
    )
    obstacles = (
        (not states.form, "the source is not a Megatron checkpoint"),
        (states.is_strange, "one is neither a tensor nor a byte stream"),
        (source_impl != impl, f"those of {source_impl}'s modules are not those of {impl}'s"),
        (
            states.of_experts and states.form != form,
            "torch and torch_dist store those of experts differently",
        ),
        (
            loses,
            "each belongs to one tensor- and expert-parallel rank, and the grid changes",
        ),
    )
    return next((reason for applies, reason in obstacles if applies), "")


def make_blank(states: RankStates, manifest: Manifest, impl: str) -> WrittenStates:
    """Return empty states of the modules that the source's files list."""
    if _get_impl(manifest) != impl:
        return WrittenStates()
    blank = states.make_blank()
    return WrittenStates(form=blank.form, extra=blank.extra)


def _get_impl(manifest: Manifest) -> str:
    config = manifest.train.config
    impl = config.get("transformer_impl") if isinstance(config, dict) else None
    return "local" if impl == "local" else "transformer_engine"


def _get_source_sizes(manifest: Manifest) -> tuple[int, int, int, int]:
    mesh = manifest.origin.mesh
    sizes = parse_mesh(mesh)
    return sizes.pipeline, sizes.tensor, sizes.expert, mesh.get("etp", sizes.tensor)


def _get_target_sizes(sizes: Sizes) -> tuple[int, int, int, int]:
    return sizes.pipeline, sizes.tensor, sizes.expert, sizes.expert_tensor or sizes.tensor


def lay_out_states(
    source: RankStates, form: str
) -> tuple[Mapping[tuple[int, int], Mapping[str, Any]], tuple[Entry, ...]]:
    """Return modules' own states as they are written, and the entries of their tensors.

    Args:
        form: the form of the output. If the source has the other one, experts' states are empty
            (see `find_extra_obstacle`), and their keys name no module of the output.
    """
    entries: list[Entry] = []

    def build(rank: tuple[int, int], name: str, value: Any) -> Any:
        tensor = as_global(value)
        if tensor is None:
            return value
        fqn = ".".join((*map(str, rank), name))
        entries.append(tensor.make_entry(fqn, KIND))
        return torch_writer.build_whole_tensor(entries[-1], tensor.dtype)

    extra = {
        rank: {
            name: build(rank, name, value)
            for name, value in states.items()
            if form == source.form or not rank_states.is_of_expert(name)
        }
        for rank, states in source.extra.items()
    }
    return extra, tuple(entries)


def find_rng_obstacle(
    states: RankStates, manifest: Manifest, sizes: Sizes, data: int, form: str
) -> str:
    """Return the reason why random states cannot be kept; empty if they can."""
    if not states.rng:
        return "the source has none"
    if _get_source_sizes(manifest) != _get_target_sizes(sizes):
        return "each belongs to one model-parallel rank, and the grid of ranks changes"
    if sizes.expert > 1 and states.form != form:
        return f"{states.form} and {form} store them differently with expert parallelism"
    # A list of several has a state for each data rank (--data-parallel-random-init).
    several = any(isinstance(value, list) and len(value) > 1 for value in states.rng.values())
    mesh = manifest.origin.mesh
    data, data_before = data * sizes.context, mesh.get("dp", 1) * mesh.get("cp", 1)
    if data_before != data and (several or (sizes.expert > 1 and form == "torch_dist")):
        return f"they belong to {data_before} data-parallel ranks, and the output has {data}"
    return ""


def rebuild_random(states: RankStates, path: str) -> dict[RankKey, Any]:
    """Return random states rebuilt from their numbers and bytes."""
    with SourceFiles() as pool:
        return {
            rank: [_rebuild(path, state, pool) for state in _list_states(path, value)]
            for rank, value in states.rng.items()
        }


def _list_states(path: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return value
    raise UnsupportedError(
        path, "contains random states that are not Megatron's", "leave them out: --rng drop"
    )


def _rebuild(path: str, stored: Mapping[str, Any], pool: SourceFiles) -> dict[str, Any]:
    def raw(value: Any) -> bytes:
        tensor = as_global(value)
        return rng.read_bytes(path, tensor.chunks[0] if tensor else None, pool)

    dialect, trackers = rng.MEGATRON, stored.get(_TRACKERS)
    if not isinstance(trackers, dict):
        raise UnsupportedError(
            path, f"contains random states without {_TRACKERS}", "leave them out: --rng drop"
        )
    state = RankRng(
        rng.parse_python(path, stored.get(dialect.python)),
        rng.parse_numpy(path, stored.get(dialect.numpy)),
        raw(stored.get(dialect.cpu)),
        {"cuda": raw(stored.get(dialect.device.format("cuda")))},
    )
    tensors = {str(name): rng.build_tensor(raw(value)) for name, value in trackers.items()}
    return {**rng.build_file(state, dialect), _TRACKERS: tensors}
