"""Lay out a Megatron checkpoint for a grid of tensor, pipeline and expert parallel ranks.

resolved    the options of the output, resolved once
ranks       the part of every weight that each rank has
groups      param groups as Megatron makes them
scheduler   the state of Megatron's schedules of learning rate and weight decay
args        the Namespace in every file
written_states
            extra states and random states of ranks, on the new grid
chain       the states of one optimizer, or of a chain of several
launch      the command line that starts Megatron-LM with the model
flat        the buffers of a distributed optimizer, and its form dp_reshardable
legacy      a folder for each rank (``--ckpt-format torch``)
dist        one DCP directory for all grids (``--ckpt-format torch_dist``)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reshard.containers import skeletons
from reshard.containers.skeletons import LaidOut
from reshard.formats.megatron.directory import NAME
from reshard.formats.megatron.write.args import PRECISION_AWARE
from reshard.formats.megatron.write.resolved import MegatronTarget, Resolved, resolve
from reshard.layouts.model_parallel.architecture import Described
from reshard.layouts.model_parallel.families import BUILDER, DIFFERS
from reshard.training.state import WritableState, describe_lost_setup, describe_lost_state

__all__ = ["MegatronTarget", "lay_out"]


def lay_out(state: WritableState, wanted: MegatronTarget, described: Described) -> LaidOut:
    """Return the layout of the run directory."""
    from reshard.formats.megatron.write import dist, launch, legacy

    choice = resolve(state, wanted, described)
    inside = legacy.name_directory(choice)
    if wanted.form == "torch_dist":
        laid_out = dist.lay_out_files(choice, inside, choice.world)
    else:
        laid_out = legacy.lay_out_files(choice, inside)
    skeleton, notes = (
        skeletons.join([legacy.lay_out_tracker(choice), *laid_out]),
        [*_write_notes(choice)],
    )
    has_random = wanted.form == "torch_dist" or wanted.weights_only or bool(wanted.rank_states.rng)
    if _has_own_arguments(choice) or described.args.get(BUILDER):
        line = " ".join(["--load {path}", *([] if has_random else ["--no-load-rng"])])
        return LaidOut(skeleton, tuple(notes), load_line=line)
    args = {**choice.args, "ckpt_format": wanted.form}
    line = launch.make_line(args, loads_random_states=has_random)
    notes += launch.describe_gaps(args, described.args)
    return LaidOut(skeleton, tuple(notes), load_line=line)


def _has_own_arguments(choice: Resolved) -> bool:
    manifest = choice.state.manifest
    config = manifest.train.config
    return manifest.origin.format == NAME and isinstance(config, dict) and "hidden_size" in config


def _write_notes(choice: Resolved) -> list[str]:
    notes = [*choice.notes, *_describe_builder(choice.args), *_describe_ignored_args(choice.args)]
    if choice.wanted.weights_only:
        return [*notes, "only the weights, as a release: Megatron loads nothing else of a release"]
    notes += [f"not copied: {name}" for name in choice.lost]
    notes += describe_lost_state(choice.state)
    notes += filter(None, [choice.describe_lost_scaler()])
    train = choice.state.manifest.train
    if choice.state.manifest.origin.format != NAME:
        notes += describe_lost_setup(choice.state)
        if train.samples is None and train.step:
            notes.append(
                "the source does not count samples: Megatron begins with the first sample of its"
                " data, unless your program skips those that were seen"
            )
    elif not _has_own_arguments(choice):  # SkyRL 0.3 and AReaL 1.0.4, for example
        notes.append(
            "the source has no arguments of Megatron-LM, whose layout and keys the output has"
            " (iter_N, opt_param_scheduler): the program that saved it may look for others"
        )
    notes += _describe_core(choice)
    notes += _describe_remainders(choice)
    notes += _describe_torch_adam(choice)
    if choice.wanted.form == "torch" and not choice.wanted.rank_states.rng:
        notes.append("no random states: Megatron loads it with --no-load-rng")
    return notes


def _describe_core(choice: Resolved) -> Iterator[str]:
    # Source: 0.13.1, 0.14.0, 0.15.3 and 0.16.1 ``core/optimizer/distrib_optimizer.py``
    # (``sharded_state_dict``), ``core/dist_checkpointing/mapping.py``.
    from reshard.formats.megatron.write import dist, flat

    if choice.wanted.sharding == flat.FORM and not choice.wanted.weights_only:
        size = choice.args.get("ddp_bucket_size") or "its default"
        overlaps = choice.args.get("overlap_grad_reduce") is True
        buckets = f"with --overlap-grad-reduce and --ddp-bucket-size {size}"
        yield (
            f"the distributed optimizer is in {flat.FORM}: Megatron loads it on this grid of"
            " --tp, --pp, --vpp and --ep, at any number of data-parallel ranks,"
            f" {buckets if overlaps else 'without --overlap-grad-reduce'}"
        )
    if choice.wanted.form == "torch_dist" and dist.writes_ranges(choice):
        yield (
            f"the distributed optimizer is in {dist.RANGES}, as in the source, which Megatron-core"
            " up to 0.15 loads; for 0.16 write --ckpt-format torch, which every version loads on"
            " the grid that it is written for"
        )


def _describe_remainders(choice: Resolved) -> Iterator[str]:
    # Source: Megatron-LM core_v0.16.1 ``core/optimizer/optimizer_config.py`` (OptimizerConfig).
    if choice.args.get(PRECISION_AWARE):
        yield (
            "the precision-aware optimizer has whole fp32 masters: load it with"
            " store_param_remainders off (--no-store-param-remainders), or Transformer Engine"
            " refuses them"
        )


def _describe_torch_adam(choice: Resolved) -> Iterator[str]:
    # Source: Megatron-LM core_v0.19.2 ``core/optimizer/distrib_optimizer.py`` (``state_dict`` needs
    # the step before it loads one), ``core/optimizer/optimizer.py`` (``sharded_state_dict`` does
    # not save a step of 0). 0.16.1 has the same lines.
    adams = [group for group in choice.groups.groups if group.of_adam]
    if not adams or any("step" in group.hyper for group in adams):
        return
    if choice.wanted.distributed:
        yield (
            "Megatron loads no distributed optimizer with torch's Adam, not even its own: install"
            " apex or Transformer Engine and write --adam fused, or write"
            " --no-distributed-optimizer"
        )
    elif choice.wanted.form == "torch_dist" and not any(m.step for m in choice.state.members):
        yield (
            "Megatron cannot load what it saves in torch_dist with torch's Adam before the first"
            " update: train at least one step before the first save, or write --adam fused"
        )


def _describe_builder(args: Mapping[str, Any]) -> Iterator[str]:
    builder = args.get(BUILDER)
    if builder:
        yield (
            f"Megatron-core alone does not build this model: the names are those of {builder},"
            " whose provider builds it"
        )
    if args.get(DIFFERS):
        yield f"{builder} {args[DIFFERS]}: the two models compute different results"


def _describe_ignored_args(args: Mapping[str, Any]) -> Iterator[str]:
    # Source: Megatron-LM core_v0.16.1 ``gpt_builders.py`` (``gpt_builder``).
    factor = args.get("rope_scaling_factor")
    if args.get("use_rope_scaling") and factor not in (None, 8, 8.0):
        yield (
            f"rope_scaling_factor is {factor}, and gpt_builder of Megatron-LM 0.16.1 builds the"
            " model with 8: pass rope_scaling_factor to GPTModel, or training differs"
        )
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if interpolation not in (None, 1, 1.0):
        yield (
            f"rotary_seq_len_interpolation_factor is {interpolation}, and gpt_builder of"
            " Megatron-LM 0.16.1 does not pass it: pass seq_len_interpolation_factor to GPTModel,"
            " or training differs"
        )
