"""The options of an output for Megatron, resolved once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.containers.torch_writer import build_number
from reshard.core.dtypes import BFLOAT16, FLOAT16, DType
from reshard.core.manifest import Entry, find_main_dtype
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.megatron import names
from reshard.formats.megatron.arguments import Arguments, has_own_configs
from reshard.formats.megatron.inferred import infer_model
from reshard.formats.megatron.optimizers.rank_optimizer import CHAINED
from reshard.formats.megatron.translate import DIVISIBLE
from reshard.formats.megatron.write import args as arguments
from reshard.formats.megatron.write import groups, scheduler
from reshard.formats.megatron.write.groups import Groups
from reshard.formats.megatron.write.ranks import HEAD, KnownWeight, WeightLocations, find_rules
from reshard.formats.megatron.write.written_states import WrittenStates
from reshard.formats.request import Request
from reshard.formats.target_options import Adam, CkptFormat, OptimSharding, TransformerImpl
from reshard.layouts.model_parallel.architecture import Architecture, Described
from reshard.layouts.model_parallel.rules import Table
from reshard.layouts.model_parallel.sizes import ONE, Sizes
from reshard.layouts.model_parallel.vocabulary import find_row_counts
from reshard.state_dict.plain_values import is_plain
from reshard.state_dict.torch_state_dict import refuse_lost_state
from reshard.training import loss_scale, optimizers
from reshard.training.state import (
    Weight,
    WritableState,
    refuse_non_elementwise_slots,
    refuse_without_optimizer,
)
from reshard.units import round_up

_UNCUT = (".bias", ".lora_A.default.weight")  # in an expert; they rule out ETP above 1
_MOST_RANKS = 1024  # of a tensor-parallel group, in advice
_HYSTERESIS = 2  # Megatron-LM's default of --hysteresis


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTarget(Request):
    """A run of Megatron to write.

    Args:
        sizes: those of the request, with the chunks of each pipeline rank.
        stage_layers: number of layers of each stage; None: the same in each.
        mtp_at: number of the stage with layers of multi-token prediction; None: the last one.
        distributed: whether the distributed optimizer loads the state.
        adam: the Adam whose state is written; None: the source's, else ``fused``.
        impl: the implementation of the layers, which decides their names.
        keeps_names: whether the names are those of the source's files instead.
        divisible: the vocabulary is padded to a multiple of this times the tensor-parallel size.
        module_dtype: dtype of the module; None: as trained.
        rank_states: the states that ranks saved beside tensors.
    """

    sizes: Sizes = ONE
    form: CkptFormat = "torch"
    stage_layers: tuple[int, ...] | None = None
    mtp_at: int | None = None
    distributed: bool = False
    sharding: OptimSharding | None = None
    adam: Adam | None = None
    impl: TransformerImpl = "transformer_engine"
    keeps_names: bool = False
    divisible: int = 128
    module_dtype: DType | None = None
    rank_states: WrittenStates = field(default_factory=WrittenStates)

    @property
    def dialect(self) -> str:
        """The column of names in the tables."""
        return "local" if self.impl == "local" else "te"


# Keys of Megatron's own; a script may have saved other values under them.
_OWN_KEYS = re.compile(
    r"args|checkpoint_version|iteration|content_metadata|model\d*|optimizer|opt_param_scheduler"
    r"|rng_state"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The resolved options: everything that the files depend on."""

    state: WritableState
    wanted: MegatronTarget
    weights: tuple[KnownWeight, ...]
    places: WeightLocations
    groups: Groups
    args: Mapping[str, Any]
    padded: int | None
    precision: DType
    scheduler: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())
    args_lost: tuple[str, ...] = ()

    def stored(self, weight: Weight) -> tuple[Entry, DType]:
        """Return the entry that fills the module's copy of a weight, and its dtype there."""
        return self.state.stored(weight, self.wanted.module_dtype)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.wanted.data_parallel * self.wanted.sizes.model

    @property
    def client(self) -> dict[str, Any]:
        """Return the values beside Megatron's own that a pickle can hold; see `lost`."""
        train = self.state.manifest.train
        values = {
            name: train.objects.get(name, value)
            for name, value in train.client.items()
            if _OWN_KEYS.fullmatch(name) is None
        }
        return {n: v for n, v in values.items() if n in train.objects or is_plain(v)}

    @property
    def lost(self) -> list[str]:
        """Return the names of the values that no pickle can hold."""
        written = self.client
        others = [name for name in self.state.manifest.train.client if name not in written]
        return [*others, *self.args_lost]

    def make_grad_scaler(self, number: int, count: int) -> dict[str, Any] | None:
        """Return the loss scaler of an optimizer, as far as an fp16 run's source has one.

        Source: ``core/optimizer/grad_scaler.py`` (``DynamicGradScaler.state_dict``).

        Args:
            number: number of the optimizer in the chain, which has ``count`` of them.
        """
        scaler = self.state.manifest.train.scaler
        chained = self._list_chained_scalers()
        if len(chained) == count:
            scaler = chained[number]
        converted = loss_scale.convert_to_torch(scaler)
        if converted is None or self.precision != FLOAT16:
            return None
        return {
            "scale": build_number(converted["scale"], (1,)),
            "growth_tracker": int(converted["_growth_tracker"]),
            "hysteresis_tracker": int(
                scaler.get("hysteresis_tracker", self.args.get("hysteresis") or _HYSTERESIS)
            ),
        }

    def _list_chained_scalers(self) -> list[Any]:
        scaler = self.state.manifest.train.scaler
        return list(scaler.get(CHAINED, ())) if isinstance(scaler, Mapping) else []

    def describe_lost_scaler(self) -> str:
        """Return the note about a loss scaler that the output cannot have; else empty."""
        scaler = self.state.manifest.train.scaler
        if loss_scale.is_idle(scaler):
            return ""
        if self.precision != FLOAT16:
            return f"not copied: the loss scaler, which a run in {self.precision} does not have"
        if loss_scale.convert_to_torch(scaler) is None:
            return "not copied: the loss scaler, because it is not dynamic"
        count = len({(group.of_matrices, group.is_expert) for group in self.groups.groups})
        if len(self._list_chained_scalers()) in (0, count):
            return ""
        return "not copied: the loss scaler of the experts' optimizer, which the new run lacks"

    @property
    def mixed(self) -> bool:
        """Whether there are 16-bit parameters with fp32 masters."""
        return self.precision in (BFLOAT16, FLOAT16)


def resolve(state: WritableState, wanted: MegatronTarget, described: Described) -> Resolved:
    """Resolve everything that the files depend on.

    Raises:
        IncompleteError: the source lacks what Megatron needs to continue training.
        UnsupportedError: Megatron cannot store a state of the source.
        UsageError: a grid that does not divide the model, or a weight that no rule names.
    """
    if not wanted.weights_only:
        refuse_without_optimizer(state)
        refuse_lost_state(state)
    tied_names = state.manifest.tied.items()
    second = sorted(alias for alias, kept in tied_names if names.SECOND_NAMES.get(alias) == kept)
    if second:
        raise UnsupportedError(
            state.manifest.origin.path,
            f"has parameters with two names ({', '.join(second)}), as T5 has: reshard reads a T5"
            " model of Megatron, but does not write one",
            "write another target with Megatron's names: --to dcp --names source",
        )
    table, architecture, args = described.table, described.architecture, described.args
    _check_heads(args, wanted.sizes.tensor)
    constants = {"layers": architecture.layers} if architecture.layers else {}
    shapes = {weight.fqn: weight.value.shape for weight in state.weights}
    gated = infer_model(Arguments(state.manifest.origin.path, args), shapes).gated
    padded, notes = _choose_padding(state, wanted, table, constants, architecture)
    te = wanted.dialect == "te"
    weights = find_rules(
        state,
        table,
        constants,
        gated=gated,
        te=te,
        padded=padded,
        args=args,
        keeps_names=wanted.keeps_names,
    )
    experts = frozenset(known.weight.fqn for known in weights if known.expert is not None)
    if any(known.expert is not None and known.found.name.endswith(_UNCUT) for known in weights):
        # Experts with biases are built only with one rank for each (core_v0.16.1
        # ``transformer_config.py``: "Bias in Moe is only supported when ETP==1"), and those with
        # LoRA of ms-swift (mcore-bridge 1.6.5 ``tuners/lora.py``).
        wanted = replace(wanted, sizes=replace(wanted.sizes, expert_tensor=1))
    given = wanted.sizes.expert_tensor
    if given is not None and wanted.form == "torch" and given > wanted.sizes.tensor:
        raise UsageError(
            f"--etp {given}",
            f"is more than --tp {wanted.sizes.tensor}: Megatron then saves several ranks to"
            " one file of --ckpt-format torch, over each other",
            "write --ckpt-format torch_dist",
        )
    if wanted.sharding is not None and not (wanted.form == "torch_dist" and wanted.distributed):
        raise UsageError(
            f"--optim-sharding {wanted.sharding}",
            "is a form of the distributed optimizer in torch_dist",
            "add --ckpt-format torch_dist --distributed-optimizer, or leave it out",
        )
    if wanted.sizes.expert > 1 and not experts:
        raise UsageError(f"expert parallel size {wanted.sizes.expert}", "the model has no experts")
    tied = _is_tied(state, architecture)
    places = WeightLocations(
        weights,
        wanted.sizes,
        dialect=wanted.dialect,
        tied=tied,
        counts=wanted.stage_layers,
        args=Arguments(state.manifest.origin.path, args),
        grouped=_groups_experts(weights, wanted, args),
        mtp_at=wanted.mtp_at,
    )
    missing = arguments.list_missing({"num_layers": places.layers, **args})
    if missing:
        raise IncompleteError(
            state.manifest.origin.path,
            f"does not state {', '.join(missing)}, which Megatron compares when it loads",
        )
    # A few tensors may be fp32 in a run of 16 bits, so the most common dtype is the run's.
    precision = wanted.module_dtype or find_main_dtype(
        (weight.dtype, weight.value.numel) for weight in state.weights if weight.is_float
    )
    is_since_017 = state.manifest.train.opaque.get(names.MTP_SINCE_017)
    param_groups = groups.make_groups(
        state, experts if wanted.sizes.expert > 1 else frozenset(), wanted.adam
    )
    _check_slots(state, wanted, param_groups.groups)
    if places.mtp and wanted.form == "torch" and not is_since_017:
        notes.append(
            "layers of multi-token prediction have the names of core 0.16 and earlier; later"
            " versions load them with --ckpt-format torch_dist"
        )
    has_convolution = any(names.is_convolution(known.found.name) for known in weights)
    is_since_019 = args.get(names.CONVOLUTION_SINCE_019)
    if has_convolution and wanted.form == "torch" and not is_since_019:
        notes.append(
            "Mamba layers have the names of core 0.18 and earlier; later versions load them with"
            " --ckpt-format torch_dist"
        )
    schedule, schedule_notes = ({}, []) if wanted.weights_only else scheduler.make_scheduler(state)
    adapted = _adapt_args(args, state, wanted, places, precision, padded=padded, tied=tied)
    return Resolved(
        state,
        wanted,
        tuple(weights),
        places,
        param_groups,
        adapted,
        padded,
        precision,
        schedule,
        (*notes, *param_groups.notes, *schedule_notes),
        tuple(f"args.{name}" for name in args if name not in adapted),
    )


def _groups_experts(
    weights: Sequence[KnownWeight], wanted: MegatronTarget, args: Mapping[str, Any]
) -> bool:
    # The reader names the experts of GroupedMLP, whose tensors hold them all, as separate modules.
    if wanted.keeps_names and not args.get("moe_use_legacy_grouped_gemm"):
        return any(known.expert is not None and known.dialect == "te" for known in weights)
    return wanted.impl != "local" and bool(args.get("moe_grouped_gemm"))


def _check_heads(args: Mapping[str, Any], ranks: int) -> None:
    # Several ranks may share a group of query heads if none of them has a part of another. Source:
    # core_v0.16.1 ``core/transformer/transformer_config.py`` (``__post_init__``),
    # ``core/ssm/mamba_mixer.py``.
    problem = _describe_uncut(args, ranks)
    if problem and not has_own_configs(args):
        near = range(1, min(2 * ranks, _MOST_RANKS))
        fitting = [str(size) for size in near if not _describe_uncut(args, size)]
        advice = f"pass --tp {'|'.join(fitting[-4:])}"
        raise UsageError(f"tensor-parallel size {ranks}", problem, advice)


def _describe_uncut(args: Mapping[str, Any], ranks: int) -> str:
    """Return which heads cannot be shared by so many ranks; empty: all of them can."""
    counted = ["num_attention_heads"]
    if args.get("experimental_attention_variant") == "gated_delta_net":
        counted += ["linear_num_key_heads", "linear_num_value_heads"]
    if args.get("is_hybrid_model") or args.get("hybrid_override_pattern"):
        counted += ["mamba_num_heads", "mamba_num_groups"]
    for name in counted:
        heads = args.get(name)
        if type(heads) is int and heads % ranks:
            return f"does not divide {name}, which is {heads}"
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    if type(groups) is int and groups > 0 and groups % ranks and ranks % groups:
        return f"neither divides num_query_groups, which is {groups}, nor is a multiple of it"
    return ""


def _adapt_args(
    args: Mapping[str, Any],
    state: WritableState,
    wanted: MegatronTarget,
    places: WeightLocations,
    precision: DType,
    *,
    padded: int | None,
    tied: bool,
) -> dict[str, Any]:
    adapted = arguments.adapt(
        args, wanted.sizes, wanted.data_parallel, layers=places.layers, padded=padded
    )
    config, samples = state.manifest.train.config, state.manifest.train.samples
    if isinstance(config, Mapping) and config.get(DIVISIBLE):
        adapted[DIVISIBLE] = config[DIVISIBLE]
    if samples is not None and not wanted.weights_only:
        # Where the new run goes on in its data: the count in the arguments is 0 by default.
        adapted["consumed_train_samples"] = samples
    adapted.update(
        arguments.describe_stages(wanted.stage_layers, wanted.sizes, places.mtp, wanted.mtp_at)
    )
    adapted.update(arguments.divide_pattern(args, wanted.stage_layers, wanted.sizes))
    adapted["transformer_impl"] = wanted.impl
    if places.has_experts:
        adapted["moe_grouped_gemm"] = places.grouped  # it decides the names of experts
        adapted["moe_use_legacy_grouped_gemm"] = False
    # One layer may stand for all of them (core 0.17 and later).
    repeats = places.mtp == 1 and adapted.get("mtp_use_repeated_layer") is True
    if not repeats and (places.mtp or adapted.get("mtp_num_layers")):
        adapted["mtp_num_layers"] = places.mtp or None  # transformers saves none of them
    adapted["use_distributed_optimizer"] = wanted.distributed
    if "use_megatron_fsdp" in adapted:
        adapted["use_megatron_fsdp"] = False  # none of the written formats is its own
    adapted["untie_embeddings_and_output_weights"] = not tied
    adapted["bf16"], adapted["fp16"] = precision == BFLOAT16, precision == FLOAT16
    adapted[arguments.REDUCES_IN_FP32] = arguments.reduces_in_fp32(args, precision)
    return adapted


def _is_tied(state: WritableState, architecture: Architecture) -> bool:
    if HEAD in {weight.fqn for weight in state.weights}:
        return False
    return HEAD in state.manifest.tied or architecture.tied is not False


def _choose_padding(
    state: WritableState,
    wanted: MegatronTarget,
    table: Table,
    constants: Mapping[str, int],
    architecture: Architecture,
) -> tuple[int | None, list[str]]:
    # Source: Megatron-LM core_v0.16.1 ``training/tokenizer/tokenizer.py``
    # (``_vocab_size_with_padding``).
    heights = find_row_counts(state.manifest, table, constants)
    if not heights:
        return None, []
    if len(heights) > 1:
        raise UnsupportedError(
            state.manifest.origin.path,
            "has vocabularies with different numbers of rows:"
            f" {' and '.join(map(str, sorted(heights)))}",
        )
    (rows,) = heights
    entries = min(architecture.vocab or rows, rows)
    padded = round_up(entries, wanted.divisible * wanted.sizes.tensor)
    if padded <= rows:  # `Megatron.rename` has removed further rows
        return rows, []
    return padded, [f"{padded - rows} padding rows of zeros added to the vocabulary of {rows}"]


def _check_slots(
    state: WritableState, wanted: MegatronTarget, param_groups: Sequence[groups.MegatronGroup]
) -> None:
    # The distributed optimizer has all parameters, and has the states of Adam.
    if wanted.weights_only:
        return
    refuse_non_elementwise_slots(
        state,
        "Megatron can store only state with a value per element",
        "write only the weights with --weights-only",
    )
    if not wanted.distributed:
        return
    if any(group.of_matrices for group in param_groups):
        raise UnsupportedError(
            state.manifest.origin.path,
            "has an optimizer of the matrices beside that of all other parameters (Muon, Lion"
            " ...), but the distributed optimizer that reshard writes has all of them",
            "write --no-distributed-optimizer",
        )
    for member in state.members:
        for slot in member.slots:
            if slot not in optimizers.MOMENTS:
                raise UnsupportedError(
                    f"{member.fqn!r}",
                    f"has the state {slot!r}, but the distributed optimizer stores only"
                    " exp_avg and exp_avg_sq",
                    "write --no-distributed-optimizer",
                )
