"""Arguments that the files do not state, as the folders and the shapes of the weights show them.

Programs that call Megatron-core themselves save few arguments, or none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.core.box import Index
from reshard.core.location import Location
from reshard.errors import MIXED, CorruptError, UnsupportedError
from reshard.formats.megatron import directory, names
from reshard.formats.megatron.arguments import Arguments
from reshard.formats.megatron.optimizers.frozen import sample_tensor
from reshard.formats.megatron.rank import RankFile, open_rank
from reshard.layouts.model_parallel.rules import Table
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.system.files import SourceFiles

_SIZES = tuple(f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert"))
_STATED_SIZES = (*_SIZES, "model_parallel_size")
_IMPL, _TE, _LOCAL = "transformer_impl", "transformer_engine", "local"
_UNTIED = "untie_embeddings_and_output_weights"
_EXPERT_TENSOR = "expert_tensor_parallel_size"
_STATE_OF_ATTENTION = "core_attention._extra_state"
_STATE_BEHIND = "linear_proj._extra_state"
_MATRIX = 2  # dims
_ROUTER = ".mlp.router.weight"
_LORA, _LORA_OF_FC1 = ".lora_", ".linear_fc1.lora_B.default.weight"
_MTP = re.compile(r"mtp\.layers\.(\d{1,9})\.")  # layers of multi-token prediction
# The first matrix of an MLP -> the second: of Megatron-core, of GroupedMLP, and before core.
_SECOND = (
    (re.compile(r"(.*\.linear_fc)1(\.weight\d*)"), r"\g<1>2\2"),
    (re.compile(r"(.*\.experts\.weight)1()"), r"\g<1>2"),
    (re.compile(r"(.*\.dense_)h_to_4h(\.weight)"), r"\g<1>4h_to_h\2"),
    (re.compile(r"(.*\.linear_fc)1\.lora_B(\.default\.weight)"), r"\g<1>2.lora_A\2"),
)


def infer_sizes(args: Arguments, location: Location) -> Arguments:
    """Return arguments that state the grid: those of the files, else those that folders show.

    The folders' names state the number of ranks on each axis. Of two numbers, the second is that of
    a stage or of an expert rank; only the latter has the same parameters as the first one.
    """
    if not any(name in args.values for name in _STATED_SIZES):
        args = _infer_axes(args, location)
    if _EXPERT_TENSOR in args.values or args.ep == 1:
        return args
    # Where fewer ranks share an expert than share a layer, not every pair of ranks has a folder.
    sizes = (size for size in range(args.tp, 0, -1) if args.tp % size == 0)
    possible = (replace(args, values={**args.values, _EXPERT_TENSOR: size}) for size in sizes)
    return next((sized for sized in possible if directory.fits_folders(location, sized)), args)


def _infer_axes(args: Arguments, location: Location) -> Arguments:
    folders = directory.list_rank_folders(location)
    numbers = {name: [int(part) for part in name.split("_")[2:]] for name in folders}
    axes = max(map(len, numbers.values()))
    sizes = [
        1 + max(ranks[axis] if len(ranks) > axis else 0 for ranks in numbers.values())
        for axis in range(len(_SIZES))
    ]
    if axes == len(_SIZES) - 1:
        ends = [folder for name, folder in sorted(folders.items()) if numbers[name][0] == 0]
        first, last = (_list_names(open_rank(folder)) for folder in (ends[0], ends[-1]))
        if first == last:
            sizes = [sizes[0], 1, sizes[1]]
    return replace(args, values={**args.values, **dict(zip(_SIZES, sizes, strict=True))})


def _list_names(file: RankFile) -> list[list[str]]:
    return [list(chunk.params) for chunk in file.chunks]


def infer_model(args: Arguments, shapes: Mapping[str, Index]) -> Arguments:
    """Return arguments that state what shapes of weights show: gated units, experts, MTP.

    Args:
        shapes: of the weights of ranks, or of the whole model's.

    Raises:
        CorruptError: the arguments state gated units, but the weights have none.
    """
    values = {}
    routers = [shape[0] for name, shape in shapes.items() if name.endswith(_ROUTER) and shape]
    if routers and not args.experts:
        values["num_experts"] = max(routers)
    predicting = [int(match[1]) for match in map(_MTP.match, shapes) if match]
    if predicting and not args.mtp:
        values["mtp_num_layers"] = max(predicting) + 1
    first = _find_first_matrix(shapes)
    if first is not None and args.gated is not first[1]:
        if args.gated:
            raise CorruptError(
                args.source,
                f"states gated linear units, but the shape of {first[0]!r} has no rows for gates",
                MIXED,
            )
        values["gated_linear_unit"] = True
    return replace(args, values={**args.values, **values}) if values else args


def infer_gated_adapters(args: Arguments, stored: Mapping[str, GlobalTensor]) -> Arguments:
    """Return arguments that state gated units if LoRA matrices of ms-swift show them.

    Its arguments do not, and the order of rows in torch_dist depends on it.

    Raises:
        UnsupportedError: they do not show it.
    """
    shapes = {key: tensor.shape[-_MATRIX:] for key, tensor in stored.items() if _LORA in key}
    if not shapes:
        return args
    unclear = args.tp > 1 and not args.gated and _find_first_matrix(shapes) is None
    fc1 = next((key for key in shapes if key.endswith(_LORA_OF_FC1)), None)
    if unclear and fc1:
        raise UnsupportedError(
            args.source,
            f"has {fc1!r} but no adapter of linear_fc2, and states nothing about the model: only"
            " both show whether each rank has rows of a gate",
            "let ms-swift write a PEFT adapter (megatron export --to_hf true --merge_lora false),"
            " and pass that",
        )
    return infer_model(args, shapes)


def infer_depth_and_tying(args: Arguments, fqns: Collection[str]) -> Arguments:
    """Return arguments that state the number of layers and a tied embedding, as names show them.

    Megatron-SWIFT (ms-swift 4.6) saves its own arguments, and keeps those of the model in its
    config.

    Args:
        fqns: of the whole model's parameters.
    """
    layers = 1 + max((n for n in map(names.find_layer, fqns) if n is not None), default=-1)
    if layers and not args.number("num_layers", "encoder_num_layers"):
        args = replace(args, values={**args.values, "num_layers": layers})
    is_tied = names.EMBEDDING in fqns and names.OUTPUT not in fqns
    return _add(args, _UNTIED, False) if is_tied else args


def infer_layers(
    args: Arguments, table: Table, fqns: Collection[str], states: Iterable[str], *, in_dist: bool
) -> tuple[Arguments, list[str]]:
    """Return arguments that state whose layers the model has, and a note if they stated another.

    The names of norms tell, and the extra states of modules: the attention of Transformer Engine
    has one, that of Megatron-core has none. torch_dist has Transformer Engine's names of norms also
    for layers of Megatron-core (``sharded_state_dict_keys_map``), so these come last there.

    Args:
        fqns: names of parameters.
        states: names of extra states.
        in_dist: whether these are names of torch_dist.
    """
    modules = {name.rpartition("self_attention.")[2] for name in states}
    inside, apart = names.find_norms(table, fqns)
    of_te = _STATE_OF_ATTENTION if _STATE_OF_ATTENTION in modules else None
    of_core = f"no {_STATE_OF_ATTENTION}" if _STATE_BEHIND in modules and not of_te else None
    signs = [(of_te, _TE), (apart, _LOCAL), (of_core, _LOCAL), (inside, _TE)]
    if not in_dist:
        signs.insert(0, (inside, _TE))
    sign, impl = next(((sign, impl) for sign, impl in signs if sign), (None, None))
    stated = args.values.get(_IMPL)
    if impl is None or (stated is not None and args.te is (impl == _TE)):
        return args, []
    found = replace(args, values={**args.values, _IMPL: impl})
    note = (
        f"the arguments state {_IMPL} {stated}, but the files have {sign}, as {impl} has: names and"
        " order of the parameters are those of the files"
    )
    return found, [note] if stated is not None else []


def infer_optimizer(args: Arguments, *, distributed: bool) -> Arguments:
    """Return arguments that state whether the files have a distributed optimizer."""
    return _add(args, "use_distributed_optimizer", True) if distributed else args


def infer_convolution(args: Arguments, *, since_019: bool) -> Arguments:
    """Return arguments that state where a Mamba layer has its convolution.

    Args:
        since_019: whether core 0.19 or later saved the files.
    """
    return _add(args, names.CONVOLUTION_SINCE_019, True) if since_019 else args


def infer_tied(args: Arguments, first: RankFile, last: RankFile) -> Arguments:
    """Return arguments that state a tied embedding if the last stage has a copy of its values.

    Args:
        first, last: the files of the same rank of the first and of the last pipeline stage.
    """
    if args.pp == 1 or _UNTIED in args.values:
        return args
    ends = [
        (_find_weight(first, name), _find_weight(last, copy)) for name, copy in names.COPIES.items()
    ]
    pairs = [(weight, copy) for weight, copy in ends if weight is not None and copy is not None]
    with SourceFiles() as files:
        sampled = [[sample_tensor(w.shape, w.chunks, files) for w in pair] for pair in pairs]
    is_tied = any(weight == copy for weight, copy in sampled)
    return _add(args, _UNTIED, False) if is_tied else args


def _find_weight(file: RankFile, name: str) -> GlobalTensor | None:
    return next((chunk.params[name] for chunk in file.chunks if name in chunk.params), None)


def _add(args: Arguments, name: str, value: Any) -> Arguments:
    return replace(args, values={name: value, **args.values})


def _find_first_matrix(shapes: Mapping[str, Index]) -> tuple[str, bool] | None:
    for name, shape in shapes.items():
        for first, second in _SECOND:
            match = first.fullmatch(name)
            other = shapes.get(match.expand(second)) if match else None
            if other is None or not len(shape) == len(other) == _MATRIX:
                continue
            at = int(".experts.weight" in name)  # GroupedMLP stores transposed matrices
            width, inner = shape[at], other[1 - at]
            if width in (inner, 2 * inner):
                return name, width != inner
    return None
