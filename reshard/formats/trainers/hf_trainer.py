"""Lay out a run directory of the transformers Trainer: a ``checkpoint-N`` that it resumes from.

    unsharded        one process or DDP: ``model.safetensors``, ``optimizer.pt`` by index
    sharded, full    FSDP: Accelerate's files
    DeepSpeed        its native directory, ``latest`` and ``global_stepN/``

Beside each: ``scheduler.pt``, without which the Trainer silently skips the optimizer; random
states; ``trainer_state.json``.

Source: transformers 5.23 ``trainer.py`` (``_load_optimizer_and_scheduler``, ``_load_rng_state``,
``_init_training_state``), ``trainer_callback.py`` (``TrainerState``), ``trainer_utils.py``
(``compare_trainer_and_checkpoint_args``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reshard.containers import safetensors_shards as writer
from reshard.containers import skeletons, torch_writer
from reshard.containers.json_files import format_json
from reshard.containers.pickles import script_values
from reshard.core.manifest import Skeleton
from reshard.errors import UnsupportedError
from reshard.formats.request import Request
from reshard.formats.trainers import hf_param_groups
from reshard.model.adapter_names import find_saved_names
from reshard.state_dict import torch_state_dict
from reshard.state_dict.own_values import find_scheduler
from reshard.state_dict.slots import lay_out_optimizer
from reshard.training import rng, schedules, trainer_run
from reshard.training.batch import BATCH, find_config_batch
from reshard.training.companion_files import BATCH_BEFORE
from reshard.training.state import WritableState

_SHARD_BYTES = 5 * 10**9  # of model.safetensors, the default of merge
_EVERY = 500  # steps: the default of TrainingArguments for logging, evaluation and saving
_CHECKPOINT = re.compile(r"checkpoint-\d+")  # ``PREFIX_CHECKPOINT_DIR`` of trainer_utils.py


def name_directory(state: WritableState) -> str:
    """Return the directory's name, ``checkpoint-N``."""
    return f"checkpoint-{state.step}"


def is_checkpoint(name: str) -> bool:
    """Return whether a directory's name is one that the Trainer gives to a checkpoint."""
    return _CHECKPOINT.fullmatch(name) is not None


def lay_out_run(state: WritableState, checkpoint: Skeleton, request: Request) -> Skeleton:
    """Lay out the run directory around one form of weights and optimizer."""
    beside = () if request.weights_only else lay_out_extras(state, request)
    parts = [checkpoint, *beside]
    return skeletons.move_into(skeletons.join(parts), name_directory(state))


def lay_out_unsharded(state: WritableState, request: Request) -> Skeleton:
    """Lay out weights in safetensors, and ``torch.optim``'s state with names for its numbers.

    Raises:
        UnsupportedError: the weights are those of an adapter, which the Trainer loads from PEFT's
            own files.
    """
    if find_saved_names(weight.fqn for weight in state.weights):
        raise UnsupportedError(
            state.manifest.origin.path,
            "contains an adapter alone, which the Trainer loads from PEFT's own files without FSDP"
            " and DeepSpeed",
            "pass --state-dict-type sharded or full for FSDP 2, or --zero-stage for DeepSpeed. If"
            " DDP saved it, pass the checkpoint itself to trainer.train: it fits any number of"
            " ranks",
        )
    weights = writer.lay_out(
        torch_state_dict.choose_whole_weights(state, request.dtype),
        max_shard_bytes=_SHARD_BYTES,
        texts={},
        metadata=writer.METADATA,
    )
    if request.weights_only:
        return weights
    optimizer = lay_out_optimizer(state, "optimizer.pt", request.world_size, request.model)
    return skeletons.join([weights, optimizer])


def lay_out_extras(state: WritableState, request: Request) -> Iterator[Skeleton]:
    """Yield the Trainer's files beside weights and optimizer."""
    ranks = request.world_size
    scheduler = _get_scheduler(state)
    if not (request.separate_masters and schedules.is_deepspeeds(scheduler)):
        yield torch_writer.lay_out_object("scheduler.pt", build_scheduler(state))
    for rank, kept in enumerate(state.rng):
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        states, stamp = rng.build_file(kept, rng.HF_TRAINER), state.stamp(name, rank, ranks)
        yield torch_writer.lay_out_object(name, states, stamp=stamp)
    before = state.manifest.train.opaque.get(BATCH_BEFORE)
    if before:
        yield skeletons.lay_out_bytes(BATCH_BEFORE, format_json(before))
    if _needs_trainer_state(state):
        text = format_json(_build_trainer_state(state, request))
        yield skeletons.lay_out_bytes("trainer_state.json", text)


def add_scheduler(state: WritableState) -> WritableState:
    """Return the state with a scheduler for the engine, from which the Trainer always loads one."""
    if _get_scheduler(state) is not None:
        return state
    train = state.manifest.train
    scheduler = schedules.add_deepspeeds_counter(build_scheduler(state))
    others = {key: value for key, value in train.objects.items() if key != script_values.SCHEDULER}
    train = replace(train, scheduler=scheduler, objects=others)
    return replace(state, manifest=replace(state.manifest, train=train))


def build_scheduler(state: WritableState) -> Any:
    """Return the source's scheduler if it is torch's; else a ``LambdaLR`` at the same step."""
    scheduler = _get_scheduler(state)
    if schedules.is_torchs(scheduler):
        return scheduler
    rates = [group.hyper.get("lr") for group in state.groups]
    return schedules.build_state(state.scheduler_step, rates)


def _get_scheduler(state: WritableState) -> Any:
    return find_scheduler(state.manifest.train)


def _build_trainer_state(state: WritableState, request: Request) -> dict[str, Any]:
    return {
        "epoch": 0,
        "global_step": state.step,
        **_find_arguments(state, request),
        "log_history": [],
        # The Trainer saves the state of its control only over an earlier one.
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},
    }


def _find_arguments(state: WritableState, request: Request) -> dict[str, int]:
    return {
        BATCH: _find_micro_batch(state, request),
        "logging_steps": _EVERY,
        "eval_steps": _EVERY,
        "save_steps": _EVERY,
        **request.live.arguments,
    }


def _needs_trainer_state(state: WritableState) -> bool:
    account = state.manifest.train.trainer_state
    return account is None or trainer_run.is_document(account)


def _find_micro_batch(state: WritableState, request: Request) -> int:
    run = trainer_run.read(state.manifest.train.trainer_state, state.manifest.origin.path)
    if run is not None:
        return int(run.settings["micro_batch"])
    stated = find_config_batch(state.manifest.train.config, request.data_parallel)
    return 1 if stated is None else stated[0].micro


def describe_derived(state: WritableState, request: Request) -> Iterator[str]:
    """Yield notes about what is derived beside weights and optimizer."""
    if request.weights_only:
        return
    scheduler, deepspeed = _get_scheduler(state), request.separate_masters
    if deepspeed and hf_param_groups.may_differ_in_deepspeed(state):
        yield (
            f"the optimizer has {len(state.groups)} param groups, and DeepSpeed makes one if its"
            " configuration names the optimizer: leave optimizer and scheduler out of the"
            " configuration of the new run, or write one group with --param-groups"
        )
    is_new = hf_param_groups.has_new_optimizer(state)
    if is_new:
        yield (
            "the schedule of the new run sets the learning rate after the first update: for a run"
            " that begins with a warmup, pass its first learning rate (0) with --param-groups"
        )
    if deepspeed and is_new and len(state.groups) == 1:
        yield (
            "the optimizer has one param group, as DeepSpeed makes it: name the optimizer in the"
            " configuration of the new run; without it, the Trainer makes two"
        )
    if not deepspeed and len(state.groups) != hf_param_groups.COUNT:
        yield (
            f"the Trainer's own optimizer has {hf_param_groups.COUNT} param groups (with weight"
            f" decay and without), the output has {len(state.groups)}: --param-groups divides them"
        )
    if schedules.is_torchs(scheduler):
        counted = scheduler["last_epoch"]
        if counted != state.scheduler_step:
            yield f"the scheduler has counted {counted} steps at step {state.step}"
    elif not (deepspeed and schedules.is_deepspeeds(scheduler)):
        yield (
            f"{'the scheduler' if deepspeed else 'scheduler.pt'} is created: a LambdaLR at step"
            f" {state.scheduler_step} (the Trainer loads no optimizer without one)"
        )
    if _needs_trainer_state(state):
        arguments = (f"{name} {value}" for name, value in _find_arguments(state, request).items())
        yield (
            f"trainer_state.json is created: step {state.step}, {', '.join(arguments)}; the Trainer"
            " takes the intervals from it, not from its arguments (before transformers 5.2, also"
            " the batch)"
        )
