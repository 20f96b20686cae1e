"""``args``: the Namespace that Megatron keeps in every file, and compares when it loads.

Source: Megatron-LM core_v0.16.1 ``training/checkpointing.py`` (``check_checkpoint_args``,
``load_args_from_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from reshard.core.dtypes import BFLOAT16, FLOAT16, DType
from reshard.formats.megatron.arguments import BAR, PATTERN, split_pattern
from reshard.layouts.model_parallel.sizes import Sizes
from reshard.state_dict.plain_values import is_plain

PRECISION_AWARE = "use_precision_aware_optimizer"
REMAINDERS = "store_param_remainders"
REDUCES_IN_FP32 = "accumulate_allreduce_grads_in_fp32"


def adapt(
    args: Mapping[str, Any], sizes: Sizes, data: int, *, layers: int, padded: int | None
) -> dict[str, Any]:
    """Return the source's args for the new grid.

    Args:
        padded: rows of the vocabulary with its padding.
    """
    adapted = {name: value for name, value in args.items() if is_plain(value)}
    world = sizes.model * data
    adapted.update(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        transformer_pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        num_layers_per_virtual_pipeline_stage=(
            layers // (sizes.pipeline * sizes.virtual) if sizes.virtual > 1 else None
        ),
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor or sizes.tensor,
        data_parallel_size=data,
        world_size=world,
        num_layers=layers,
    )
    if padded is not None:
        adapted["padded_vocab_size"] = padded
    # check_checkpoint_args compares this argument too, and takes a missing one for True.
    adapted.setdefault("add_position_embedding", True)
    if adapted.get("use_tp_pp_dp_mapping"):
        adapted["use_tp_pp_dp_mapping"] = False  # written ranks are numbered in the default order
    if adapted.get(PRECISION_AWARE):
        adapted[REMAINDERS] = False  # the masters are written whole
    return adapted


def describe_stages(
    counts: tuple[int, ...] | None, sizes: Sizes, mtp: int, mtp_at: int | None
) -> dict[str, Any]:
    """Return the args that state the layers of each stage.

    Args:
        counts: layers of the first chunk of each stage, then of the second chunks; None: the same
            in each.
        mtp: number of layers of multi-token prediction.
        mtp_at: the position of their stage in ``counts``; None: the last one.
    """
    ends = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    ends += [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    stated: dict[str, Any] = dict.fromkeys((*ends, "pipeline_model_parallel_layout"))
    # The written counts do not include the embedding or the loss.
    for part in ("embedding", "loss"):
        stated[f"account_for_{part}_in_pipeline_split"] = False
    if counts is None:
        return stated
    last = len(counts) - 1
    mtp_at = last if mtp_at is None or not mtp else mtp_at
    if len(set(counts)) == 1 and mtp_at == last:
        return stated
    if sizes.virtual > 1 or len(set(counts[1:-1])) > 1 or mtp_at != last:
        # Megatron compares the number of "m" with mtp_num_layers (core/transformer/
        # pipeline_parallel_layer_layout.py, ``validate_layer_layout``).
        layers = ["t" * count + "m" * mtp * (at == mtp_at) for at, count in enumerate(counts)]
        stated["num_layers_per_virtual_pipeline_stage"] = None
        return {**stated, "pipeline_model_parallel_layout": f"E{'|'.join(layers)}L"}
    first, last = counts[0], counts[-1]
    return {**stated, **dict(zip(ends, (first, last, first, last), strict=True))}


def divide_pattern(
    args: Mapping[str, Any], counts: tuple[int, ...] | None, sizes: Sizes
) -> dict[str, Any]:
    """Return the args that state the layers of each stage of a hybrid model.

    Bars in its pattern do, and Megatron accepts no other argument beside them
    (core_v0.19.2 ``models/hybrid/hybrid_layer_allocation.py``).

    Args:
        counts: see `describe_stages`.
    """
    main, predicting = split_pattern(args.get(PATTERN))
    letters = main.replace(BAR, "")
    if not letters:
        return {}
    chunks = sizes.pipeline * sizes.virtual
    ends = [0, *accumulate(counts or [len(letters) // chunks] * chunks)]
    bars = BAR.join(letters[start:stop] for start, stop in pairwise(ends))
    unused = {"num_layers_per_virtual_pipeline_stage": None}
    return {**describe_stages(None, sizes, 0, None), **unused, PATTERN: bars + predicting}


def reduces_in_fp32(args: Mapping[str, Any], precision: DType) -> bool:
    """Return whether gradients of 16-bit parameters are accumulated and reduced in fp32.

    The source's args decide if they are of a run of the same precision, else Megatron's default:
    ``training/arguments.py`` (``validate_args``) turns it on for bf16, unless
    ``--grad-reduce-in-bf16`` is given, and leaves it off for fp16.
    """
    stated = args.get(REDUCES_IN_FP32)
    own = (args.get("bf16") is True, args.get("fp16") is True)
    if isinstance(stated, bool) and own == (precision == BFLOAT16, precision == FLOAT16):
        return stated
    return precision == BFLOAT16 and args.get("grad_reduce_in_bf16") is not True


def list_missing(args: Mapping[str, Any]) -> list[str]:
    """Return the args that Megatron compares on every load and that are missing."""
    return [
        name
        for name in ("num_layers", "hidden_size", "num_attention_heads")
        if args.get(name) is None
    ]
