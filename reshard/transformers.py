"""Resume the transformers Trainer from any checkpoint, without converting it.

    import reshard.transformers

    with reshard.transformers.open_checkpoint(trainer, "run/") as checkpoint:
        trainer.train(resume_from_checkpoint=checkpoint)

The block yields a directory that has the names and the sizes of the files. The Trainer's own code
loads them, and reshard computes their content in memory: under the Trainer's strategy (one process,
DDP, FSDP 1 and 2, DeepSpeed), at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from reshard import formats
from reshard.accelerate import choose_state_dict_type, find_fsdp_version
from reshard.deepspeed import refuse_setup
from reshard.errors import UnsupportedError
from reshard.live.comparison import Loaded, compare_files
from reshard.live.files import describe_program
from reshard.live.memory import iterate_engine, iterate_model, iterate_optimizer
from reshard.live.patched_loads import open_directory
from reshard.system.attributes import replace_attributes
from reshard.training.batch import Batch, LiveBatch

__all__ = ["open_checkpoint"]


@contextmanager
def open_checkpoint(
    trainer: Any, source: formats.Paths, *, workers: int | None = None, **options: Any
) -> Iterator[str]:
    """Open a checkpoint of any format for ``trainer.train(resume_from_checkpoint=...)``.

    Every rank must enter the block, and call ``train`` in it. What is derived or dropped is in the
    log of rank 0 (logger ``reshard``).

    Args:
        trainer: a ``transformers.Trainer`` that has not trained yet.
        source: the checkpoint: a path as for `reshard.open`.
        workers: threads that read for this rank.
        options: further options of `reshard.split` about the source.

    Yields:
        The path to pass as ``resume_from_checkpoint``.

    Raises:
        ReshardError: on every rank, if the source cannot be read, trusted or laid out; in
            ``train``, if a parameter or its optimizer state then differs from the source.
        UnsupportedError: the Trainer trains adapters of PEFT without DeepSpeed.
    """
    if hasattr(trainer.model, "peft_config") and not trainer.is_deepspeed_enabled:
        raise UnsupportedError(
            "trainer.model",
            "has adapters of PEFT, which reshard loads into a Trainer with DeepSpeed only",
            "pass the checkpoint itself to trainer.train: DDP and FSDP 2 load their own files of"
            " adapters at any number of ranks",
        )
    decided, config = _describe_strategy(trainer)
    target = replace(
        describe_program(trainer.model, _list_groups(trainer, config)),
        config=config,
        fsdp=find_fsdp_version(trainer.accelerator.state),
        arguments=_list_arguments(trainer.args),
        batch=_find_batch(trainer),
    )
    with open_directory(source, decided=decided, given=options, target=target, workers=workers) as (
        folder,
        live,
    ):
        (path,) = folder.glob("checkpoint-*")

        def load(checkpoint: str | None) -> None:
            # The Trainer calls this last, also where an engine has loaded weights and optimizer.
            type(trainer)._load_optimizer_and_scheduler(trainer, checkpoint)  # noqa: SLF001 - no public name
            if checkpoint == str(path):
                compare_files(_iterate_loaded(trainer), live)

        with replace_attributes(trainer, _load_optimizer_and_scheduler=load):
            yield str(path)


def _iterate_loaded(trainer: Any) -> Iterator[Loaded]:
    model = trainer.model_wrapped
    if trainer.is_deepspeed_enabled:
        yield from iterate_engine(model)
        return
    yield from iterate_model(model)
    yield from iterate_optimizer(model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))


def _list_arguments(arguments: Any) -> dict[str, int]:
    """Intervals that are ratios are left out.

    Source: transformers 5.23 ``trainer_callback.py`` (``TrainerState``; ``compute_steps``: a number
    below 1 is a part of all steps).
    """
    names = ("train_batch_size", "logging_steps", "eval_steps", "save_steps")
    given = {name: getattr(arguments, name) for name in names}
    return {name: int(value) for name, value in given.items() if value is not None and value >= 1}


def _find_batch(trainer: Any) -> LiveBatch | None:
    """Return None if Accelerate divides the batch over the ranks.

    Source: transformers 5.24 ``trainer.py`` (``get_total_train_batch_size``: ranks of tensor,
    context and sequence parallelism share their samples; ``train``: before 5.2, without a test of
    ``auto_find_batch_size``).
    """
    import transformers

    arguments = trainer.args
    if arguments.accelerator_config.split_batches:
        return None
    micro, steps = arguments.train_batch_size, arguments.gradient_accumulation_steps
    total = trainer.get_total_train_batch_size(arguments)
    ranks = total // (trainer._train_batch_size * steps)  # noqa: SLF001 - no public name
    is_old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 2)
    reads_file = is_old or arguments.auto_find_batch_size
    return LiveBatch(Batch(micro, steps, ranks), reads_file=reads_file)


def _list_groups(trainer: Any, config: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the param groups that the Trainer's optimizer has or will have; empty if unknown.

    Source: transformers 5.23 ``trainer.py`` (``create_optimizer``) and
    ``integrations/deepspeed.py`` (``deepspeed_init``: the optimizer is made anew;
    ``deepspeed_optim_sched``: one group, if the configuration has an optimizer).
    """
    from transformers import Trainer

    if trainer.optimizer is not None and config is None:
        return _get_groups(trainer.optimizer)
    named = trainer.model.named_parameters()
    names = {parameter: name for name, parameter in named if parameter.requires_grad}
    if config is not None and "optimizer" in config:
        return [{"params": list(names)}]
    if type(trainer).create_optimizer is not Trainer.create_optimizer:
        with replace_attributes(trainer, optimizer=None):
            return _get_groups(trainer.create_optimizer())
    if trainer.optimizer_cls_and_kwargs is not None:
        return []
    decaying = set(trainer.get_decay_parameter_names(trainer.model))
    rates = {True: trainer.args.weight_decay, False: 0.0}  # whether a group's parameters decay
    return [
        {
            "params": [p for p, name in names.items() if (name in decaying) is decays],
            "weight_decay": rate,
        }
        for decays, rate in rates.items()
    ]


def _get_groups(optimizer: Any) -> Sequence[Mapping[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    return groups


def _describe_strategy(trainer: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Source: transformers 5.23 ``trainer.py`` (``is_deepspeed_enabled``, ``is_fsdp_enabled``)."""
    decided: dict[str, Any] = {"to": "hf-trainer", "world_size": trainer.args.world_size}
    state = trainer.accelerator.state
    if trainer.is_deepspeed_enabled:
        plugin = state.deepspeed_plugin
        refuse_setup(plugin.deepspeed_config)
        precision = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"
        decided |= {"zero_stage": plugin.zero_stage, "dtype": precision}
        return decided, plugin.deepspeed_config
    return {**decided, "state_dict_type": choose_state_dict_type(state)}, None
