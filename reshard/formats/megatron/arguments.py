"""``args``: the command line of the run, which every Megatron checkpoint keeps.

Source: Megatron-LM core_v0.16.1 ``megatron/training/arguments.py``; ``model_parallel_size`` is the
name of the tensor-parallel size before Megatron-LM 2.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from reshard.containers.pickles.values import Call, Global
from reshard.core import counts
from reshard.core.schema import INTEGER, expect, fields, maybe, sequence
from reshard.errors import CorruptError
from reshard.state_dict.plain_values import to_plain

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
_GLU = (
    "swiglu",
    "geglu",
    "reglu",
    "liglu",
)  # of bigscience's --glu-activation (its activations.py)
_MULTIPLIED = re.compile(r"\(([^)]+)\)\*(\d{1,9})"), re.compile(r"(.)\*(\d{1,9})")
_LAYOUT = "pipeline_model_parallel_layout"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
PATTERN = "hybrid_layer_pattern"  # a letter for each layer of a hybrid model: see `split_pattern`
_DECODER, _MTP = "t", "m"
BAR = "|"  # between the layers of two stages or chunks
_HYBRID = (PATTERN, "hybrid_override_pattern", "is_hybrid_model")
_LETTERS = {  # names of a layer, and its value of LayerType (``core/transformer/enums.py``)
    **dict.fromkeys(("decoder", "t", "4"), _DECODER),
    **dict.fromkeys(("mtp", "m", "5"), _MTP),
}
_PARALLEL = (  # their product is at most the number of ranks, times the chunks of pipeline ranks
    *("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "context_parallel_size"),
)
_COUNTS = (
    *("world_size", "data_parallel_size", "num_layers", "encoder_num_layers", "num_experts"),
    *("num_moe_experts", *_ENDS),
)
_KNOWN = fields(**dict.fromkeys((*_PARALLEL, *_COUNTS), maybe(INTEGER)))
_OWN_CONFIGS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
_BUCKET = 40_000_000  # elements: the smallest default of --ddp-bucket-size


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one run; any of them may be missing."""

    source: str
    values: Mapping[str, Any]

    def number(self, *names: str, default: int = 0) -> int:
        """Return the first of these arguments that is an integer."""
        for name in names:
            value = self.values.get(name)
            if type(value) is int:
                return value
        return default

    def flag(self, name: str) -> bool:
        """Return whether a switch was given."""
        return self.values.get(name) is True

    @property
    def tp(self) -> int:
        """Number of ranks that share each layer."""
        return max(self.number("tensor_model_parallel_size", "model_parallel_size"), 1)

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return max(self.number("pipeline_model_parallel_size"), 1)

    @property
    def vp(self) -> int:
        """Number of model chunks of a pipeline stage."""
        # Megatron ignores the setting without pipeline stages (``transformer_block.py``,
        # get_num_layers_to_build).
        return max(self.number("virtual_pipeline_model_parallel_size"), 1) if self.pp > 1 else 1

    @property
    def ep(self) -> int:
        """Number of ranks that share the experts of a layer."""
        return max(self.number("expert_model_parallel_size"), 1)

    @property
    def etp(self) -> int:
        """Number of ranks that share each expert."""
        return max(self.number("expert_tensor_parallel_size", default=self.tp), 1)

    @property
    def cp(self) -> int:
        """Number of ranks that share each sequence."""
        return max(self.number("context_parallel_size"), 1)

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return max(self.number("world_size"), self.tp * self.pp)

    @property
    def dp(self) -> int:
        """Number of copies of the dense model, without those of context parallelism."""
        declared = self.number("data_parallel_size")
        return max(declared or self.world // (self.tp * self.pp * self.cp), 1)

    @property
    def gated(self) -> bool:
        """Whether the first matrix of an MLP has two parts, gate and up."""
        return any(map(self.flag, _GATED)) or self.values.get("glu_activation") in _GLU

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.values.get("untie_embeddings_and_output_weights") is False

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 in a dense model."""
        return self.number("num_experts", "num_moe_experts")

    @property
    def te(self) -> bool:
        """Whether the layers are Transformer Engine's, whose parameters have other names."""
        return self.values.get("transformer_impl") != "local"

    @property
    def mtp(self) -> int:
        """Number of layers of multi-token prediction (MTP)."""
        return self.number("mtp_num_layers")

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage has a copy of the embedding.

        Source: ``models/common/language_module/language_module.py``
        (setup_embeddings_and_output_layer).
        """
        return self.pp > 1 and (self.tied or self.mtp > 0)

    def get_bucket_size(self, *, stage: int, chunk: int) -> int | None:
        """Return how many elements close a gradient bucket; None if one bucket takes all.

        Source: ``distributed/distributed_data_parallel.py`` (__init__) and ``training/training.py``
        (get_model).
        """
        # The reduction of other stages and chunks is not on the critical path, so Megatron does not
        # divide their buffers.
        if not self.flag("overlap_grad_reduce") or stage > 0 or chunk > 0:
            return None
        if self.flag("overlap_param_gather_with_optimizer_step"):  # turns bucketing off (get_model)
            return None
        return self.number("ddp_bucket_size") or max(_BUCKET, 1_000_000 * self.dp * self.cp)

    @property
    def states_experts(self) -> bool:
        """Whether a rank's experts are known to be separate modules or GroupedMLP, if it has any.

        Both have as many elements. Transformer Engine's layers have GroupedMLP if that is stated.
        """
        grouped, legacy = map(self.values.get, ("moe_grouped_gemm", "moe_use_legacy_grouped_gemm"))
        is_known = legacy is not None or grouped is False or (grouped is True and self.te)
        return not self.experts or is_known

    @property
    def states_layers(self) -> bool:
        """Whether the layers of each stage are stated, and not the same in each by default."""
        names = (_LAYOUT, *_ENDS, *_COUNTED_ENDS)
        is_stated = any(self.values.get(name) not in (None, False) for name in names)
        return is_stated or bool(self._list_segments())

    def list_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of transformer layers as ``layers[chunk][stage]``.

        Sources: ``transformer/transformer_block.py`` (get_num_layers_to_build),
        ``transformer/pipeline_parallel_layer_layout.py``.

        Raises:
            CorruptError: the stages do not divide the layers.
        """
        layout, segments = self._list_stated_layers(), self._list_segments()
        if layout:
            return self._arrange_in_rows([stage.count(_DECODER) for stage in layout])
        if segments:
            return self._arrange_in_rows(list(map(len, segments)))
        ends = [self.values.get(name) for name in _ENDS]
        # With these flags the embedding and the loss count as a layer of the first and last chunk.
        embedding, loss = (int(self.flag(name)) for name in _COUNTED_ENDS)
        total = self.number("num_layers", "encoder_num_layers") + embedding + loss
        free = self.pp - sum(end is not None for end in ends)
        rest = total - sum(end for end in ends if end is not None)
        stages = [rest // free if free else 0] * self.pp
        stages[0] = stages[0] if ends[0] is None else ends[0]
        stages[-1] = stages[-1] if ends[1] is None else ends[1]
        if sum(stages) != total or any(stage % self.vp for stage in stages):
            raise CorruptError(
                self.source,
                f"states {total} layers over {self.pp} pipeline stages of {self.vp} chunks, which"
                " does not divide evenly",
            )
        # The first chunks of all stages precede the second ones, as a micro batch passes through
        # them.
        counts = [stage // self.vp for stage in stages] * self.vp
        counts[0] -= embedding
        counts[-1] -= loss
        return self._arrange_in_rows(counts)

    def locate_mtp(self, chunks: int) -> int | None:
        """Return the number of the chunk with layers of multi-token prediction, or None.

        Source: ``transformer/multi_token_prediction.py`` (``mtp_on_this_rank``).

        Args:
            chunks: number of chunks of all stages, in the order in which layers pass through them.
        """
        if not self.mtp:
            return None
        stages = enumerate(self._list_stated_layers())
        return next((at for at, stage in stages if _MTP in stage), chunks - 1)

    def _list_stated_layers(self) -> list[str]:
        layout = self.values.get(_LAYOUT)
        if isinstance(layout, Call):
            layout = layout.get("input_data")
        elif isinstance(layout, Mapping):  # what `to_plain` makes of a call
            layout = layout.get("state", {}).get("input_data")
        return _parse_layout(self.source, layout) if layout else []

    def _list_segments(self) -> list[str]:
        segments = split_pattern(self.values.get(PATTERN))[0].split(BAR)
        return segments if len(segments) > 1 and self.pp > 1 else []

    def _arrange_in_rows(self, counts: list[int]) -> tuple[tuple[int, ...], ...]:
        if len(counts) % self.pp:
            raise CorruptError(
                self.source, f"has a pipeline layout of {len(counts)} stages for {self.pp} ranks"
            )
        return tuple(tuple(counts[at : at + self.pp]) for at in range(0, len(counts), self.pp))

    def get_expert_tensor_rank(self, tp: int, ep: int) -> int:
        """Return the expert-tensor rank of the experts of ``ep`` on a rank of ``tp``.

        Dense layers are assigned to ranks as tp-cp-dp, experts as etp-ep-edp
        (``core/parallel_state.py``, initialize_model_parallel); the answer is that of the first
        rank that is both.
        """
        ranks = range(lcm(self.tp, self.etp * self.ep))
        return next(
            (r % self.etp for r in ranks if (r % self.tp, r // self.etp % self.ep) == (tp, ep)), 0
        )

    def locate_rank(self, rank: int) -> tuple[int, int, int]:
        """Return the (tensor, pipeline, expert) ranks of a global rank.

        Source: ``core/parallel_state.py`` (initialize_model_parallel).
        """
        # Data-parallel ranks vary before the stage does, or, with this flag, after it.
        last = self.flag("use_tp_pp_dp_mapping")
        stage = self.tp * self.cp if last else max(self.world // self.pp, 1)
        return rank % self.tp, rank // stage % self.pp, rank // self.etp % self.ep

    def make_mesh(self) -> dict[str, int]:
        """Return the grid as the origin of a manifest states it."""
        mesh = {"world": self.world, "tp": self.tp, "pp": self.pp, "dp": self.dp}
        rare = {"vpp": self.vp, "cp": self.cp, "ep": self.ep}
        mesh |= {axis: size for axis, size in rare.items() if size > 1}
        if self.experts and self.etp != self.tp:
            mesh["etp"] = self.etp
        return mesh

    def make_printable(self) -> dict[str, Any]:
        """Return all arguments as values that print and serialize as JSON."""
        values: dict[str, Any] = to_plain(dict(self.values))
        return values


def has_own_configs(args: Mapping[str, Any]) -> bool:
    """Return whether each layer has its own configuration: other heads and widths, or no attention.

    Source: ``core/transformer/heterogeneous/heterogeneous_config.py``.
    """
    return any(args.get(name) for name in _OWN_CONFIGS)


def split_pattern(pattern: Any) -> tuple[str, str]:
    """Return the letters of a hybrid model's layers, and those of its multi-token prediction.

    Bars divide the layers of the chunks; without bars each stage has as many. The second part keeps
    its slashes, one before each layer of multi-token prediction.

    Source: core_v0.19.2 ``core/models/hybrid/hybrid_layer_allocation.py``.

    >>> split_pattern("M-|M*-/*-/*-")
    ('M-|M*-', '/*-/*-')
    """
    main, slash, rest = pattern.partition("/") if isinstance(pattern, str) else ("", "", "")
    return main, slash + rest


def is_hybrid(args: Mapping[str, Any]) -> bool:
    """Return whether a run has Megatron's hybrid model, with layers of several kinds."""
    return any(args.get(name) for name in _HYBRID)


def numbers_layers(args: Mapping[str, Any]) -> bool:
    """Return whether torch_dist numbers the layers, also if they are alike, instead of stacking.

    Source: ``core/transformer/transformer_block.py``, ``core/models/hybrid/hybrid_block.py``
    (``sharded_state_dict``).
    """
    patterns = (args.get(name) for name in ("moe_layer_freq", "linear_attention_freq"))
    return (
        has_own_configs(args)
        or is_hybrid(args)
        or args.get("hetereogenous_dist_checkpoint") is True  # sic: Megatron's spelling
        or any(isinstance(freq, list) or (type(freq) is int and freq > 1) for freq in patterns)
    )


def parse(value: Any, source: str) -> Arguments:
    """Return the arguments that an ``argparse.Namespace`` or a dict holds.

    Raises:
        CorruptError: impossible sizes of a grid or of a model.
    """
    state = value.state if isinstance(value, Call) else value
    args = Arguments(source, state if isinstance(state, dict) else {})
    # Readers loop over these numbers, so a damaged one is refused before it is used.
    expect(source, args.values, _KNOWN, "args")
    for name in (*_PARALLEL, *_COUNTS):
        if args.number(name) > 0:
            counts.check_count(source, name, args.number(name))
    ranks = prod(max(args.number(name), 1) for name in _PARALLEL)
    if ranks > counts.MOST:
        raise CorruptError(source, f"states {ranks} ranks for one model, which is out of range")
    return args


def _parse_layout(source: str, layout: Any) -> list[str]:
    # A layout is text like ``Et|(tt|)*3tL``, or lists of names.
    if isinstance(layout, str):
        text = layout.replace(",", "")
        # A short text can stand for a huge layout, so the size is checked before each expansion.
        for pattern in _MULTIPLIED:
            if sum(len(m[1]) * int(m[2]) for m in pattern.finditer(text)) > counts.MOST:
                raise CorruptError(
                    source, f"has a pipeline layout of too many layers: {layout[:60]!r}"
                )
            text = pattern.sub(lambda m: m[1] * int(m[2]), text)
        return text.split(BAR)
    expect(source, layout, sequence(sequence()), "args.pipeline_model_parallel_layout")
    return ["".join(map(_find_letter, stage)) for stage in layout]


def _find_letter(layer: Any) -> str:
    name = layer.name if isinstance(layer, Global) else layer
    if isinstance(layer, Call):
        name = layer.args[0] if layer.args else ""
    elif isinstance(layer, Mapping):  # what `to_plain` makes of a call
        name = next(iter(layer.get("args", ())), "")
    return _LETTERS.get(str(name).lower(), "-") if isinstance(name, (str, int)) else "-"
