"""The training state of a Megatron checkpoint beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.core.location import Location
from reshard.core.manifest import (
    PARAM,
    FrameworkFacts,
    Manifest,
    Origin,
    ParamGroup,
    TrainState,
    find_most_common_dtype,
)
from reshard.formats.megatron import grouped
from reshard.formats.megatron.arguments import Arguments
from reshard.state_dict.optimizers.states import ParsedOptimizer
from reshard.state_dict.own_values import keep_own_values
from reshard.state_dict.plain_values import to_plain

SHARDING = "distrib_optim_sharding_type"  # in ``content_metadata``
STATE_SHARDING = "param_state_sharding_type"  # the same in the state of an optimizer
_READ = frozenset(
    """
    args iteration model optimizer opt_param_scheduler lr_scheduler rng_state checkpoint_version
    content_metadata
    """.split()
)


def make_origin(location: Location, args: Arguments, detail: str, manifest: Manifest) -> Origin:
    """Return the framework that wrote the checkpoint, and its grid."""
    return Origin(
        format="megatron",
        path=str(location),
        detail=detail,
        form=detail.partition(",")[0],
        mesh=args.make_mesh(),
        precision=find_most_common_dtype(entry.dtype for entry in manifest.of_kind(PARAM)),
        facts=FrameworkFacts(describes_model=True),
    )


def make_train_state(
    root: Mapping[str, Any],
    args: Arguments,
    state: ParsedOptimizer,
    experts: range,
) -> TrainState:
    """Return the training state beside the tensors.

    Args:
        root: what a rank, or rank 0 for all ranks, saved.
        experts: the numbers of the rank's experts.
    """
    client = {
        str(key): to_plain(value)
        for key, value in root.items()
        if key not in _READ and not _is_model(key) and value is not None
    }
    opaque = {
        key: to_plain(root[key])
        for key in ("checkpoint_version", "content_metadata")
        if root.get(key) is not None
    }
    step = root.get("iteration")
    return TrainState(
        step=step if type(step) is int else None,
        skipped_steps=_count_skipped(root, args, state),
        samples=args.number("consumed_train_samples") or None,
        optimizer_step={
            name: count
            for fqn, count in state.steps.items()
            for name in grouped.name_separated(fqn, experts)
        },
        param_groups=tuple(
            ParamGroup(
                group.hyper,
                tuple(n for fqn in group.fqns for n in grouped.name_separated(fqn, experts)),
            )
            for group in state.groups
        ),
        scheduler=to_plain(root.get("opt_param_scheduler", root.get("lr_scheduler"))),
        scaler=to_plain(state.scaler),
        rng=to_plain(root.get("rng_state")),
        client=client,
        config=args.make_printable(),
        opaque=opaque,
        objects=keep_own_values(root, [name for name in ("args", *client) if name in root]),
    )


def _count_skipped(root: Mapping[str, Any], args: Arguments, state: ParsedOptimizer) -> int | None:
    # A skipped step counts as an iteration and consumes samples, but the scheduler, which counts
    # samples, does not step (Megatron-LM core_v0.16.1 ``megatron/training/training.py``,
    # train_step).
    step, batch = root.get("iteration"), args.number("global_batch_size")
    scheduler = root.get("opt_param_scheduler")
    scheduled = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
    if state.scaler is None or not batch or type(step) is not int or type(scheduled) is not int:
        return None
    # The number of samples gives that of steps only if the batch size never changed.
    is_constant = args.number("consumed_train_samples") == step * batch
    updates, rest = divmod(scheduled, batch)
    return step - updates if is_constant and not rest and 0 <= updates <= step else None


def _is_model(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("model") and key[5:].isdecimal()
