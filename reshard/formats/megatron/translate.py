"""Translate what a Megatron run saves beside tensors into the form that other frameworks load.

    param groups  only the settings of an optimizer; groups that then have equal settings become one
    scheduler     ``opt_param_scheduler`` with the counters of torch's and DeepSpeed's schedulers
    arguments     the batch and the clipping of gradients, under the names of DeepSpeed's config,
                  and the multiple of the vocabulary, by which a conversion back pads it

Sources: Megatron-LM core_v0.16.1 ``core/optimizer/__init__.py`` (``_get_param_groups``),
``core/optimizer_param_scheduler.py``, ``training/arguments.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.core.join import join_groups
from reshard.core.manifest import Manifest, ParamGroup, TrainState
from reshard.formats.megatron import rank_states
from reshard.formats.megatron.directory import NAME
from reshard.layouts.model_parallel.sizes import parse_mesh
from reshard.training import schedules

# Settings of param groups by which Megatron chooses their learning rate and weight decay, whose
# present values are in ``lr`` and ``weight_decay``. NeMo puts ``pre_`` before two of them.
_CHOICES = frozenset(
    """
    wd_mult lr_mult pre_wd_mult pre_lr_mult max_lr min_lr start_wd end_wd default_config
    is_expert_parallel is_decoupled_lr is_vision_model_parameter
    """.split()
)
DIVISIBLE = "make_vocab_size_divisible_by"
_OPAQUE = frozenset(("checkpoint_version", "content_metadata", rank_states.OPAQUE_KEY))


def translate(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """Return a training state with what is beside its tensors translated, and notes."""
    train = manifest.train
    # Without Megatron's own settings, the experts' groups join those with the same settings.
    groups = join_groups(
        [replace(group, hyper=_translate_group(group.hyper))] for group in train.param_groups
    )
    ranks = manifest.origin.world // parse_mesh(manifest.origin.mesh).model
    arguments = train.config if isinstance(train.config, Mapping) else {}
    translated = replace(
        train,
        param_groups=groups,
        scheduler=_make_scheduler(train, groups),
        config=_make_config(arguments, ranks),
        opaque={name: value for name, value in train.opaque.items() if name not in _OPAQUE},
    )
    return replace(manifest, train=translated), [*_describe(train, len(groups))]


def _translate_group(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an optimizer of torch has after a scheduler was created for it."""
    own = {name: value for name, value in hyper.items() if name not in _CHOICES}
    return own if hyper.get("max_lr") is None else {**own, "initial_lr": hyper["max_lr"]}


def _make_scheduler(train: TrainState, groups: tuple[ParamGroup, ...]) -> Any:
    saved, step = train.scheduler, train.updates
    if not isinstance(saved, Mapping) or step is None:
        return saved
    rates = [group.hyper.get("lr") for group in groups]
    return schedules.add_deepspeeds_counter({**saved, **schedules.build_state(step, rates)})


def _make_config(arguments: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    clip = arguments.get("clip_grad")
    config: dict[str, Any] = {"gradient_clipping": float(clip) if clip else 0.0}
    micro, total = (arguments.get(f"{size}_batch_size") for size in ("micro", "global"))
    if type(micro) is int and type(total) is int and micro > 0 and total % (micro * ranks) == 0:
        config["train_batch_size"] = total
        config["train_micro_batch_size_per_gpu"] = micro
        config["gradient_accumulation_steps"] = total // (micro * ranks)
    if type(arguments.get(DIVISIBLE)) is int:
        config[DIVISIBLE] = arguments[DIVISIBLE]
    return config


def _describe(train: TrainState, groups: int) -> Iterator[str]:
    if len(train.param_groups) > groups:
        yield (
            f"{len(train.param_groups)} param groups become {groups}: those that differed only in"
            f" settings of {NAME}, such as the experts', are one"
        )
    if train.samples is not None:
        yield f"{train.samples} samples were consumed in {train.step} steps"
    saved = train.scheduler
    if not isinstance(saved, Mapping) or "lr_decay_style" not in saved:
        return
    yield (
        f"scheduler: a state after {train.updates} updates, for any of torch's or DeepSpeed's that"
        f" the new run creates. Megatron's was {saved['lr_decay_style']}, from"
        f" {saved.get('max_lr')} to {saved.get('min_lr')} in {saved.get('lr_decay_steps')} samples"
        f" after {saved.get('lr_warmup_steps')} of warmup, at sample {saved.get('num_steps')}"
    )
