"""The torch_dist format: one DCP directory, with keys and objects of Megatron's own.

    decoder.layers.mlp.linear_fc2.weight             (layers, out, in), or with a number per layer
    decoder.layers.mlp.experts.experts.linear_fc1... (layers, experts, out, in)
    optimizer.state.exp_avg.<key>                    a slot, in the parameter's form
    [chained_1.]optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(...).bucket_idx_0.exp_avg
                                                     a bucket of the distributed optimizer, flat
    <key>/shard_0_4                                  an object, a list of one
    common_state/shard_0_1                           what common.pt held before core 0.19

Sources: Megatron-LM core_v0.16.1 ``core/dist_checkpointing/``,
``core/optimizer/distrib_optimizer.py`` (sharded_param_state_*); core 0.19
``core/dist_checkpointing/serialization.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.pickles import trust
from reshard.containers.torch_objects import TorchFile
from reshard.core import counts
from reshard.core.chunks import Chunk
from reshard.core.location import Location
from reshard.core.manifest import (
    BUFFER,
    PARAM,
    Claim,
    Entry,
    Manifest,
    Origin,
    SourceFile,
    UnnamedOptimizer,
    index_entries,
)
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.dcp import reader as dcp
from reshard.formats.megatron import (
    arguments,
    directory,
    grid,
    inferred,
    names,
    rank_states,
    run_config,
    train,
    verl,
)
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.optimizers import dist_flat, flat_buffers, rank_optimizer
from reshard.formats.megatron.optimizers.dist_flat import CHAIN
from reshard.formats.megatron.optimizers.rank_optimizer import RankParam
from reshard.formats.megatron.stated import compare_model
from reshard.layouts.model_parallel.adapters import restore_rows
from reshard.layouts.model_parallel.moves import take_slice
from reshard.layouts.model_parallel.rules import Table
from reshard.state_dict import tree
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree

_SHARD = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")
_SLOT = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
GATE, _UP = "_w", "_v"  # ends of the keys of a gated matrix that is kept as two
_COMMON = "common_state"
_ADVICE_RESHARDABLE = (
    "save it once with --dist-ckpt-optim-fully-reshardable (verl:"
    " dist_ckpt_optim_fully_reshardable)"
)
_ADVICE_EXPORTED = "save with use_dist_checkpointing=True, or pass the Hugging Face model alone"
_DECODER = "decoder.layers."
_NEMO = "module."
_STEPS = frozenset(("iteration", "global_step"))
_RANDOM = re.compile(r"rng_state/shard_\d+\.\d+[\d.]*_(\d+)\.(\d+)(?:\.\d+)?")
_OTHER_PLACES = ("non_persistent_ckpt_type", "ckpt_convert_save")
_PREFIXED = re.compile(r"^((?:(?:chained_\d+\.)?optimizer\.state\.\w+\.)?)module\.")


def read(location: Location, table: Table) -> Manifest:
    """Return the manifest of the checkpoint in one directory.

    Raises:
        IncompleteError: a file or the weights are missing.
        CorruptError: files contradict each other.
        UnsupportedError: the optimizer is in a form that core 0.13 and older wrote, or verl saved
            weights that do not fit it.
        UsageError: verl saved weights of a model that reshard does not know.
    """
    loaded, common = _read_files(location)
    tensors, objects = _separate(_strip_prefix(loaded.root))
    stored = join_parts(tensors, table)
    of_model = {key: tensor for key, tensor in stored.items() if not CHAIN.fullmatch(key)}
    exported = None if of_model else verl.read_exported(location)
    if exported is None and not of_model:
        raise CorruptError(location, "contains no model")
    saved_args = arguments.parse(common.get("args"), str(location))
    args = saved_args if saved_args.values else _read_verl_args(location, of_model, exported)
    layer_notes: list[str] = []
    if args.values:
        fqns = {(names.parse_stacked(key) or key).replace("{}", "0", 1) for key in of_model}
        args, layer_notes = inferred.infer_layers(args, table, fqns, objects, in_dist=True)
        args = inferred.infer_gated_adapters(args, of_model)
    keys = _KeyReader(table, args)
    weights = _read_weights(keys, of_model, exported)
    # A parameter with two names is stored twice, and its states under one of these names.
    second = names.find_second_names({entry.fqn for entry in weights})
    copies = [entry for entry in weights if entry.fqn in second]
    # The optimizer's groups are filled in the order of ``named_parameters``, which DCP keys lack.
    whole = index_entries(grid.sort_entries(e for e in weights if e.fqn not in second))
    if args.values:
        args = inferred.infer_model(args, {entry.fqn: entry.shape for entry in whole.values()})
        args = inferred.infer_depth_and_tying(args, {fqn for _, fqn in whole})
        args = inferred.infer_optimizer(args, distributed=_find_sharding(common) is not None)
        has_convolution = any(map(names.is_convolution, of_model))
        args = inferred.infer_convolution(args, since_019=has_convolution and _COMMON in objects)
    slots = [replace(e, fqn=second.get(e.fqn, e.fqn)) for e in _read_slots(keys, stored)]
    named = {slot.fqn for slot in slots}
    buffers = dist_flat.FlatBuffers(stored, objects, whole, args, table, str(location), named)
    flat, unnamed = _read_buffers(location, buffers, is_exported=exported is not None)
    if exported:
        _check_shapes(location, whole, [*slots, *flat])
    # A parameter without a state that others have is frozen: no optimizer has it.
    trained = {slot.fqn for slot in (*slots, *flat)}
    frozen = [fqn for kind, fqn in whole if kind == PARAM and trained and fqn not in trained]
    params = [
        RankParam(entry.fqn, entry.shape, entry.dtype.name, 0)
        for entry in whole.values()
        if entry.kind == PARAM and (not trained or entry.fqn in trained)
    ]
    # Forms that only the same grid can load keep the groups as objects of each model-parallel
    # group.
    states = dist_flat.find_group_states(objects, common.get("optimizer"), str(location))
    state = rank_optimizer.read(states, params, args, table, str(location))
    manifest = Manifest(
        origin=Origin("megatron", str(location)),
        entries=index_entries(grid.sort_entries([*whole.values(), *slots, *flat])),
        files={
            **_add_claims(location, loaded, common, saved_args, whole),
            **(exported.files if exported else {}),
        },
        train=train.make_train_state(
            {**common, rank_states.RNG: _get_first(objects, rank_states.RNG)},
            # Arguments that were inferred alone are not those of the run.
            args if saved_args.values else saved_args,
            state,
            range(0),
        ),
        tied=second | names.find_tied_output({fqn for _, fqn in whole}, args),
        tied_copies=tuple(copies),
        frozen=frozenset(frozen),
        warnings=(
            *loaded.notes,
            *layer_notes,
            *state.notes,
            *rank_optimizer.note_frozen(frozen),
            *([f"the optimizer is left out: {unnamed.reason}"] if unnamed else []),
        ),
        unnamed_optimizers=("optimizer",) if unnamed else (),
        unnamed=unnamed,
        unknown_globals=trust.list_unknown(loaded.globals),
        ordered=True,  # see `grid.sort_entries`
    )
    manifest = rank_states.attach(manifest, rank_states.collect_from_dist(loaded.root))
    form = _describe_form(common, flat, slots)
    return replace(manifest, origin=train.make_origin(location, args, form, manifest))


def _read_verl_args(
    location: Location, of_model: Collection[str], exported: Manifest | None
) -> Arguments:
    # These arguments do not describe the model, so they are not among the arguments that the source
    # states.
    fqns = {entry.fqn for entry in exported.entries.values()} if exported else of_model
    stated = verl.read_grid(verl.find_root(location), is_tied=names.OUTPUT not in fqns)
    return arguments.parse(stated, str(location))


def _read_weights(
    keys: _KeyReader, of_model: Mapping[str, GlobalTensor], exported: Manifest | None
) -> list[Entry]:
    weights = [*keys.respell(exported.entries.values())] if exported else []
    weights += [
        replace(entry, kind=BUFFER if names.is_buffer(entry.fqn) else PARAM)
        for key, tensor in of_model.items()
        for entry in keys.read_entries(key, PARAM, tensor)
    ]
    return weights


def _read_slots(keys: _KeyReader, stored: Mapping[str, GlobalTensor]) -> list[Entry]:
    return [
        entry
        for key, tensor in stored.items()
        if (match := CHAIN.fullmatch(key)) and (slot := _SLOT.fullmatch(match[2]))
        for entry in keys.read_entries(slot[2], rank_optimizer.get_kind(slot[1]), tensor)
    ]


def _read_buffers(
    location: Location, buffers: dist_flat.FlatBuffers, *, is_exported: bool
) -> tuple[list[Entry], UnnamedOptimizer | None]:
    problem = buffers.find_problem()
    if problem:
        return [], UnnamedOptimizer(problem, advice=_ADVICE_RESHARDABLE)
    try:
        return buffers.read_entries(), None
    except CorruptError as error:
        if is_exported:
            raise UnsupportedError(
                location,
                f"has an optimizer that does not fit the Hugging Face model ({error.problem}): it"
                " is that of another model, or Megatron padded the vocabulary",
                _ADVICE_EXPORTED,
            ) from error
        if not isinstance(error, flat_buffers.SmallBufferError):
            raise
        # The weights are stored apart from the buffers, so they are complete without them.
        return [], UnnamedOptimizer(error.problem, advice=error.remedy)


def _add_claims(
    location: Location,
    loaded: ParsedTree,
    common: Mapping[str, Any],
    args: Arguments,
    whole: Mapping[tuple[str, str], Entry],
) -> dict[str, SourceFile]:
    """Return the files, with what common.pt and ``.metadata`` both state."""
    path = location.files.get(directory.COMMON)
    if path is None or str(path) not in loaded.files:
        return loaded.files
    about = location.files[directory.METADATA]
    of_common = loaded.files[str(path)]
    of_metadata, claims = [], []
    for what, value, evidence, own, own_evidence in (
        *_compare_places(loaded.directory, common.get("iteration"), args),
        *_compare_model(args, whole),
        *_compare_grids(loaded.root, args),
    ):
        of_metadata.append(Claim(what, value, evidence))
        claims.append(Claim(what, own, own_evidence))
    if not claims:
        return loaded.files
    # The first of two statements counts: .metadata is written with the tensors.
    return {
        str(about): SourceFile(str(about), about.stat().st_size, claims=tuple(of_metadata)),
        **loaded.files,
        of_common.path: replace(of_common, claims=(*of_common.claims, *claims)),
    }


_Pair = tuple[str, str, str, str, str]  # what; value and evidence of .metadata, and of common.pt
_ARGS = "its args"


def _compare_places(place: str, step: Any, args: Arguments) -> Iterator[_Pair]:
    # DCP keeps the name of the directory that it saves to. Those of other checkpoints than the
    # regular ones (--non-persistent-ckpt-type) may be elsewhere. Source: Megatron-LM core_v0.16.1
    # ``megatron/training/checkpointing.py`` (get_checkpoint_name), torch 2.13
    # ``distributed/checkpoint/filesystem.py`` (``storage_meta``).
    named, evidence = directory.parse_iteration(place), "the directory that it was saved to"
    if named is None:
        return
    if type(step) is int:
        yield "iteration", str(named), evidence, str(step), "its counter of iterations"
    saved = args.values.get("save")
    others = (args.values.get(name) for name in _OTHER_PLACES)
    if (
        isinstance(saved, str)
        and saved.startswith("/")
        and place.startswith("/")
        and not any(others)
    ):
        parent = place.rstrip("/").rpartition("/")[0]
        run = saved.rstrip("/")
        is_inside = f"{parent}/".startswith(f"{run}/")
        yield "directory of the run", run if is_inside else parent, evidence, run, _ARGS


def _compare_model(args: Arguments, whole: Mapping[tuple[str, str], Entry]) -> Iterator[_Pair]:
    for what, found, value in compare_model(args, whole):
        yield what, found, "its list of tensors", value, _ARGS


def _compare_grids(root: Mapping[str, Any], args: Arguments) -> Iterator[_Pair]:
    # Source: ``megatron/training/checkpointing.py`` (get_rng_state).
    sizes = next(filter(None, map(_RANDOM.fullmatch, root)), None)
    if sizes is not None and {"pipeline_model_parallel_size"} <= args.values.keys():
        own = f"pp {args.pp}, tp {args.tp}"
        yield "grid", f"pp {sizes[1]}, tp {sizes[2]}", "its list of random states", own, _ARGS


def _check_shapes(
    location: Location, weights: Mapping[tuple[str, str], Entry], slots: Iterable[Entry]
) -> None:
    for slot in slots:
        weight = weights.get((PARAM, slot.fqn))
        if weight is not None and weight.shape != slot.shape:
            raise UnsupportedError(
                location,
                f"has {slot.kind} of {slot.fqn!r} in the shape {list(slot.shape)}, but the Hugging"
                f" Face model has {list(weight.shape)}: only Megatron pads the vocabulary",
                _ADVICE_EXPORTED,
            )


def _strip_prefix(root: Mapping[str, Any]) -> Mapping[str, Any]:
    # NeMo 2 puts ``module.`` before parameters' keys.
    named = [k for k, v in root.items() if isinstance(v, GlobalTensor) and not CHAIN.fullmatch(k)]
    if not named or not all(key.startswith(_NEMO) for key in named):
        return root
    return {_PREFIXED.sub(r"\1", key, count=1): value for key, value in root.items()}


def _separate(root: Mapping[str, Any]) -> tuple[dict[str, GlobalTensor], dict[str, list[Any]]]:
    stored: dict[str, GlobalTensor] = {}
    objects: dict[str, list[Any]] = defaultdict(list)
    for key, value in root.items():
        match = _SHARD.fullmatch(key)
        if isinstance(value, GlobalTensor):
            stored[key] = value
        else:
            one = isinstance(value, list) and len(value) == 1
            objects[match[1] if match else key].append(value[0] if one else value)
    return stored, dict(objects)


def join_parts(stored: Mapping[str, GlobalTensor], table: Table) -> dict[str, GlobalTensor]:
    """Return tensors with the parts of a fused parameter joined, which some formats have apart."""
    return _join_segments(_join_gated(stored), table)


def _join_gated(stored: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    """Return tensors with gate and up joined, which singleton_local_shards saves separately."""
    joined: dict[str, GlobalTensor] = {}
    for key, tensor in stored.items():
        base = key[: -len(GATE)]
        gate, up = stored.get(base + GATE), stored.get(base + _UP)
        if not gate or not up or key not in (base + GATE, base + _UP):
            joined[key] = tensor
        elif key.endswith(GATE):
            joined[base] = _join_rows([gate, up])
    return joined


def _join_segments(stored: Mapping[str, GlobalTensor], table: Table) -> dict[str, GlobalTensor]:
    # Source: ``core/ssm/mamba_mixer.py`` and ``gated_delta_net.py`` (``_split_tensor_factory``).
    joined: dict[str, GlobalTensor] = {}
    for key, tensor in stored.items():
        base, _, last = key.rpartition(".")
        _, decoder, inner = base.rpartition(_DECODER)
        rule = table.find(f"{decoder}{inner}", {}) if decoder else None
        segments = rule.rule.segments if rule else {}
        if last not in segments:
            joined[key] = tensor
        elif base not in joined:
            joined[base] = _join_rows([_get_segment(stored, base, name) for name in segments])
    return joined


def _get_segment(stored: Mapping[str, GlobalTensor], base: str, name: str) -> GlobalTensor:
    tensor = stored.get(f"{base}.{name}")
    if tensor is None:
        raise IncompleteError(base, f"has no segment {name!r}, but others of its kind have it")
    return tensor


def _join_rows(parts: Sequence[GlobalTensor]) -> GlobalTensor:
    chunks: list[Chunk] = []
    rows = 0
    for part in parts:
        chunks += [replace(chunk, box=chunk.box.shift_rows(rows)) for chunk in part.chunks]
        rows += part.shape[0]
    return replace(parts[0], shape=(rows, *parts[0].shape[1:]), chunks=tuple(chunks))


def _read_files(location: Location) -> tuple[ParsedTree, dict[str, Any]]:
    parts = directory.list_parts(location)
    common = verl.read_stated(verl.find_root(location), parts)
    trees = verl.read_parts(parts) if parts else {"": dcp.read_flat(location)}
    opened: list[TorchFile] = []
    for name, folder in (parts or {"": location}).items():
        shared, files = _read_common(folder, _separate(trees[name].root)[1])
        common |= shared
        opened += files
    if common.get("args") is None and run_config.NAME in location.files:
        common["args"], files = run_config.read(location)
        opened += files
    return verl.join_parts(list(trees.values()), opened), common


def _read_common(
    location: Location, objects: Mapping[str, list[Any]]
) -> tuple[dict[str, Any], list[TorchFile]]:
    path = location.files.get(directory.COMMON)
    if path is not None:
        file = torch_reader.read(path)
        root = tree.convert_file(file)
        if not isinstance(root, dict):
            raise CorruptError(path, "is not a dict")
        return _add_sharding_type(_convert_nemo(root)), [file]
    common = _get_first(objects, _COMMON)
    if not isinstance(common, dict):
        raise IncompleteError(
            location,
            f"has neither {directory.COMMON} nor {_COMMON}, which stores the run's arguments",
            "copy it here, or read only the weights, under the keys of torch_dist, with"
            " --from torch --key ''",
        )
    return common, []


def _convert_nemo(root: dict[str, Any]) -> dict[str, Any]:
    # NeMo 2 has Lightning's list of one optimizer, and another name for the step.
    one = root.get("optimizer")
    if isinstance(one, list) and len(one) == 1:
        root = {**root, "optimizer": one[0]}
    return (
        {**root, "iteration": root["global_step"]}
        if root.keys() & _STEPS == {"global_step"}
        else root
    )


def _add_sharding_type(root: dict[str, Any]) -> dict[str, Any]:
    # The optimizer's own state states its form in every version, ``content_metadata`` since 0.13
    # (``core/optimizer/distrib_optimizer.py``, ``training/checkpointing.py``).
    states = rank_optimizer.list_states(root.get("optimizer"))
    key = train.STATE_SHARDING
    stated = [state[key] for state in states if isinstance(state, dict) and key in state]
    if root.get("content_metadata") is not None or not stated:
        return root
    return {**root, "content_metadata": {train.SHARDING: stated[0]}}


def _get_first(objects: Mapping[str, list[Any]], key: str) -> Any:
    return next(iter(objects.get(key, ())), None)


def _find_sharding(common: Mapping[str, Any]) -> Any:
    metadata = common.get("content_metadata")
    return metadata.get(train.SHARDING) if isinstance(metadata, dict) else None


def _describe_form(common: Mapping[str, Any], flat: Sequence[Entry], slots: Sequence[Entry]) -> str:
    sharding = _find_sharding(common)
    if sharding is None and flat:
        sharding = "flat"
    if sharding and (flat or slots):
        return f"torch_dist, distributed optimizer ({sharding})"
    return "torch_dist"


class _KeyReader:
    def __init__(self, table: Table, args: Arguments) -> None:
        self._table = table
        self._args = args

    def read_entries(self, key: str, kind: str, tensor: GlobalTensor) -> Iterator[Entry]:
        name = names.parse_stacked(key)
        if name is None:
            yield from self._read_experts(key, kind, tensor)
            return
        for index, one in enumerate(_unstack(tensor)):
            yield from self._read_experts(name.replace("{}", str(index), 1), kind, one)

    def respell(self, entries: Collection[Entry]) -> Iterator[Entry]:
        fqns = {entry.fqn for entry in entries}
        for entry in entries:
            name = names.spell_for_dist(self._table, entry.fqn, fqns)
            yield replace(entry, fqn=names.spell_as_saved(self._table, name, self._args))

    def _read_experts(self, name: str, kind: str, tensor: GlobalTensor) -> Iterator[Entry]:
        parsed = names.parse_dist_expert(name)
        if parsed is None:
            yield self._make_entry(name, kind, tensor)
            return
        pattern, number = parsed
        numbered = enumerate(_unstack(tensor)) if number is None else [(number, tensor)]
        for index, expert in numbered:
            yield self._make_entry(pattern.replace("{}", str(index), 1), kind, expert)

    def _make_entry(self, name: str, kind: str, tensor: GlobalTensor) -> Entry:
        fqn = names.spell_as_saved(self._table, name, self._args)
        args = self._args
        chunks = restore_rows(fqn, tensor.shape, tensor.chunks, args.tp, gated=args.gated)
        return Entry(fqn, kind, tensor.dtype, tensor.shape, tuple(chunks))


def _unstack(tensor: GlobalTensor) -> Iterator[GlobalTensor]:
    by_index: dict[int, list[Chunk]] = defaultdict(list)
    where = tensor.chunks[0].file if tensor.chunks else "a tensor of layers without elements"
    total = counts.check_count(where, "the number of stacked layers", tensor.shape[0])
    for chunk in tensor.chunks:
        if not chunk.box.fits(tensor.shape):
            raise CorruptError(chunk.file, f"{chunk.box} lies outside {tensor.shape}")
        start, count = chunk.box.origin[0], chunk.box.shape[0]
        for index in range(start, start + count):
            by_index[index] += take_slice([chunk], index)
    for index in range(total):
        yield replace(tensor, shape=tensor.shape[1:], chunks=tuple(by_index[index]))
