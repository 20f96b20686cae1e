"""Resume Lightning's Trainer from any checkpoint, without converting it.

    import reshard.lightning

    with reshard.lightning.open_checkpoint(trainer, "run/") as checkpoint:
        trainer.fit(model, ckpt_path=checkpoint)

The Trainer's strategy decides how the state is loaded: one process, DDP, FSDP, ModelParallel (FSDP
2, tensor parallelism) or DeepSpeed, at its number of ranks. Each rank reads only the bytes of its
own shards, and no file is written.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from reshard import formats
from reshard.checks.identity import Trust
from reshard.commands.output_options import ValueOptions
from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.live.files import describe_program
from reshard.live.source import read_for_model
from reshard.system.attributes import replace_attributes
from reshard.training import schedules
from reshard.training.state import find_clip

__all__ = ["open_checkpoint"]

_logger = logging.getLogger("reshard")
_LOOPS, _SCHEDULERS = "loops", "lr_schedulers"
_IN_TURN = "_schedulers"  # the states inside that of a torch SequentialLR or ChainedScheduler
_PREFIX = "meta."  # in the names of the values in the file beside a sharded state dict


@contextmanager
def open_checkpoint(trainer: Any, source: formats.Paths, **options: Any) -> Iterator[str]:
    """Open a checkpoint of any format for ``trainer.fit(ckpt_path=...)``.

    Every rank must enter the block and call ``fit`` (or ``validate``, ``test``, ``predict``) in it.
    What is derived or dropped is in the log of rank 0 (logger ``reshard``).

    A checkpoint of Lightning restores the loops, the callbacks, the schedulers and what the hooks
    saved. Any other checkpoint restores the weights, the optimizer, the scheduler and the step, and
    training continues at the beginning of an epoch. ``on_load_checkpoint`` receives everything but
    the tensors.

    Args:
        trainer: a ``lightning.Trainer`` that has not trained yet.
        source: the checkpoint: a path as for `reshard.open`.
        options: further options about the source, such as ``tag``, ``key``, ``model``, ``trust``.

    Yields:
        The path to pass as ``ckpt_path``.

    Raises:
        ReshardError: on every rank, in ``fit``: the source cannot be read or trusted, or belongs to
            another model, or a parameter or its optimizer state differs from it after the load.
    """
    loader = _StrategyLoader(trainer, source, options)
    with replace_attributes(
        trainer.strategy,
        load_checkpoint=loader.load_checkpoint,
        load_model_state_dict=loader.load_model_state_dict,
        load_optimizer_state_dict=loader.load_optimizer_state_dict,
    ):
        yield loader.path


class _StrategyLoader:
    """The methods of a strategy that load a checkpoint; for other checkpoints its own are called.

    Lightning calls them when the process group exists. Under FSDP, ModelParallel and DeepSpeed the
    model is then sharded and the optimizer exists. In one process and under DDP the optimizer
    exists only later, when Lightning asks for its state.

    Source: Lightning 2.6 ``trainer/trainer.py`` (``_run``), ``connectors/checkpoint_connector.py``.
    """

    def __init__(self, trainer: Any, source: formats.Paths, options: Mapping[str, Any]) -> None:
        self.path = str(formats.as_paths(source)[0])
        self._trainer = trainer
        self._source = source
        self._options = options
        self._manifest: Manifest | None = None  # of the checkpoint that is being loaded

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        strategy, fitting = self._trainer.strategy, self._trainer.state.fn.value == "fit"
        if str(checkpoint_path) != self.path:
            self._manifest = None
            return type(strategy).load_checkpoint(strategy, checkpoint_path, weights_only)
        module = self._trainer.lightning_module
        if fitting:
            _refuse_average(self._trainer)
        manifest = self._read()
        self._manifest = manifest
        checkpoint = _build_checkpoint(self._trainer, manifest)
        engine = getattr(strategy, "deepspeed_engine", None)
        if engine is not None:
            import reshard.deepspeed

            reshard.deepspeed.load_checkpoint(
                engine,
                self._source,
                load_module_strict=module.strict_loading,
                load_optimizer_states=fitting,
                load_lr_scheduler_states=False,
                **self._options,
            )
        elif strategy.restore_checkpoint_after_setup:
            self._load_model(strict=module.strict_loading)
            if fitting:
                self._load_optimizer()
        if fitting and strategy.restore_checkpoint_after_setup:
            _set_schedulers(self._trainer, checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT002 - as Lightning declares it
        """Load the weights, unless `load_checkpoint` has."""
        strategy = self._trainer.strategy
        if self._manifest is None:
            type(strategy).load_model_state_dict(strategy, checkpoint, strict=strict)
        elif not strategy.restore_checkpoint_after_setup:
            self._load_model(strict=strict)

    def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
        """Load the optimizer's state, unless `load_checkpoint` has."""
        strategy = self._trainer.strategy
        if self._manifest is None:
            type(strategy).load_optimizer_state_dict(strategy, checkpoint)
        elif not strategy.restore_checkpoint_after_setup:
            self._load_optimizer()
            _set_schedulers(self._trainer, checkpoint)

    @property
    def _trust(self) -> Trust:
        return ValueOptions(**self._options).trust

    def _read(self) -> Manifest:
        for name in self._options.keys() - ValueOptions.__dataclass_fields__.keys():
            raise UsageError(name, "is not an option of open_checkpoint", "leave it out")
        options = ValueOptions(**self._options)
        module, strategy = self._trainer.lightning_module, self._trainer.strategy
        parameters = [name for name, _ in module.named_parameters()]
        buffers = [name for name, _ in module.named_buffers()]
        live = None
        if _shows_parameters(strategy):
            optimizers = self._trainer.optimizers
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            outermost = strategy.model if _is_fsdp1(strategy) else module
            live = describe_program(outermost, groups).shapes
        return read_for_model(self._source, parameters, buffers, options, live)

    def _load_model(self, *, strict: bool) -> None:
        from reshard.live.dcp.live_objects import load_model

        assert self._manifest is not None
        load_model(self._trainer.strategy.model, self._manifest, strict=strict, trust=self._trust)

    def _load_optimizer(self) -> None:
        from reshard.live.dcp.live_objects import load_optimizer

        assert self._manifest is not None
        optimizers = self._trainer.optimizers
        if len(optimizers) != 1:
            raise UnsupportedError(
                "trainer",
                f"has {len(optimizers)} optimizers, but reshard loads the state of one",
                "load such a checkpoint with Lightning, at the number of ranks that saved it",
            )
        if self._manifest.unnamed is not None:
            # Before the optimizer existed, its param groups could not tell which numbers are whose.
            self._manifest = self._read()
        model, trust = self._trainer.strategy.model, self._trust
        for warning in load_optimizer(model, optimizers[0], self._manifest, trust):
            if self._trainer.is_global_zero:
                _logger.warning("%s", warning)


def _shows_parameters(strategy: Any) -> bool:
    """Return whether live parameters are whole: not cut by DeepSpeed, not flat as FSDP 1's."""
    if _is_fsdp1(strategy):
        return bool(strategy.kwargs["use_orig_params"])
    return not hasattr(strategy, "deepspeed_engine")


def _is_fsdp1(strategy: Any) -> bool:
    return hasattr(strategy, "sharding_strategy")


def _refuse_average(trainer: Any) -> None:
    """Refuse the callback that takes its average from the checkpoint's tensors.

    Source: Lightning 2.6 ``callbacks/weight_averaging.py`` (``on_load_checkpoint``).
    """
    for callback in trainer.callbacks:
        if any(kind.__name__ == "WeightAveraging" for kind in type(callback).__mro__):
            raise UnsupportedError(
                "trainer",
                f"has the callback {type(callback).__name__}, whose average reshard does not load",
                "load its checkpoint with Lightning, or leave out the callback",
            )


def _build_checkpoint(trainer: Any, manifest: Manifest) -> dict[str, Any]:
    """Source: Lightning 2.6 ``checkpoint_connector.py`` (``dump_checkpoint``)."""
    from reshard.live.safe_load import load_extra_state

    extra = {key.removeprefix(_PREFIX): value for key, value in load_extra_state(manifest).items()}
    step, scheduler, scaler = (extra.pop(key, None) for key in ("step", "scheduler", "scaler"))
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": _find_version(trainer),
        "global_step": step or 0,
        "state_dict": {},
        "optimizer_states": [],  # Lightning asks only whether the key is there
    }
    if _LOOPS in extra:
        checkpoint |= extra
    else:
        checkpoint |= {"epoch": 0, _LOOPS: _count_in_loops(trainer, step or 0)}
        _warn_about_new_loops(trainer, manifest, extra)
    plugin = trainer.precision_plugin
    if scaler is not None and plugin.state_dict():
        checkpoint[type(plugin).__qualname__] = scaler
    if _SCHEDULERS not in checkpoint:
        processes = schedules.count_steps_per_update(manifest.train, manifest.origin.world) or 1
        checkpoint[_SCHEDULERS] = [
            schedules.scale(state, Fraction(1, processes)).state if processes > 1 else state
            for state in (scheduler if isinstance(scheduler, list) else [scheduler])
            if isinstance(state, dict) and "last_epoch" in state
        ]
    return checkpoint


def _find_version(trainer: Any) -> str:
    kind = next(kind for kind in type(trainer).__mro__ if "lightning" in kind.__module__)
    return str(sys.modules[kind.__module__.partition(".")[0]].__version__)


def _count_in_loops(trainer: Any, step: int) -> dict[str, Any]:
    # Source: Lightning 2.6 ``loops/training_epoch_loop.py`` (global_step), ``loops/progress.py``.
    names = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    loops = {name: copy.deepcopy(getattr(trainer, name).state_dict()) for name in names}
    fit = loops["fit_loop"]
    automatic = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    manual = fit["epoch_loop.manual_optimization.optim_step_progress"]
    for counter in (automatic["step"], manual):
        counter["total"] = {"ready": step, "completed": step}
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return loops


def _warn_about_new_loops(trainer: Any, manifest: Manifest, extra: Mapping[str, Any]) -> None:
    if not trainer.is_global_zero:
        return
    clip = find_clip(manifest.train)
    if clip and trainer.gradient_clip_val != clip:
        _logger.warning("the source clips gradients to a norm of %g: set gradient_clip_val", clip)
    _logger.warning(
        "the checkpoint has no state of Lightning's loops: training continues at its step, and at"
        " the beginning of an epoch"
    )
    if extra:
        _logger.warning("not loaded: %s", ", ".join(sorted(extra)))


def _set_schedulers(trainer: Any, checkpoint: dict[str, Any]) -> None:
    configs, stored, step = (
        trainer.lr_scheduler_configs,
        checkpoint[_SCHEDULERS],
        checkpoint["global_step"],
    )
    states = [dict(config.scheduler.state_dict()) for config in configs]
    if [_IN_TURN in state for state in stored] == [_IN_TURN in state for state in states]:
        return
    checkpoint[_SCHEDULERS] = states
    told = []
    for config, state in zip(configs, states, strict=True):
        how = "starts at its beginning"
        if config.interval == "step" and "last_epoch" in state and _IN_TURN not in state:
            steps = step // config.frequency
            rates = [group["lr"] for group in config.scheduler.optimizer.param_groups]
            state |= {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
            how = f"is set to step {step}, and keeps the lengths that the program states"
        told.append(f"; its {type(config.scheduler).__name__} {how}")
    if trainer.is_global_zero:
        _logger.warning(
            "the states of %d schedulers in the checkpoint do not fit the trainer, which has %d%s",
            *(len(stored), len(configs), "".join(told)),
        )
