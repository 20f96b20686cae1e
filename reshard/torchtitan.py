"""Start torchtitan from any checkpoint, without converting it.

    import reshard.torchtitan

    checkpoint = reshard.torchtitan.CheckpointManager.Config(
        enable=True, initial_load_path="/path/of/run", initial_load_model_only=False
    )

The checkpoint manager is torchtitan's own, except that ``initial_load_path`` may have any format
and number of ranks. Each rank reads only the bytes of its own shards, and no file is written.

Source: torchtitan 0.3 ``components/checkpointer/dcp.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain, product
from typing import Any

from reshard import formats
from reshard.core.keys import remove_wrappers
from reshard.core.manifest import Entry, Key, SourceFile
from reshard.errors import UnsupportedError
from reshard.live.comparison import compare_read
from reshard.live.files import raise_on_all_ranks
from reshard.live.memory import iterate_model, iterate_optimizer, iterate_state_dict
from reshard.live.source import read_for_model
from reshard.units import abridge, counted

__all__ = ["CheckpointManager"]

CheckpointManager: Any  # a subclass of torchtitan's, defined when it is first used
_logger = logging.getLogger("reshard")
_COUNTS_STEPS = ("step", "last_epoch")


def __getattr__(name: str) -> Any:
    """Return the checkpoint manager; torchtitan is imported only now."""
    if name == "CheckpointManager":
        return _define_manager()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _define_manager() -> Any:
    from dataclasses import dataclass

    from torchtitan.components.checkpointer import dcp

    class CheckpointManager(dcp.CheckpointManager):  # type: ignore[misc] # it has no types
        """torchtitan's checkpoint manager, which can start from any checkpoint."""

        @dataclass(kw_only=True, slots=True)
        class Config(dcp.CheckpointManager.Config):  # type: ignore[misc]
            """The settings of torchtitan's checkpoint manager."""

        def dcp_load(
            self,
            state_dict: dict[str, Any],
            checkpoint_id: str,
            from_hf: bool,
            from_quantized: bool,
        ) -> None:
            """Load ``initial_load_path`` with reshard, and torchtitan's own saves as always."""
            if checkpoint_id != self.initial_load_path:
                super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
                return
            tensors = self.sd_adapter.to_hf(state_dict) if from_hf else state_dict
            read, sources = load_states(tensors, checkpoint_id)
            loaded = self.sd_adapter.from_hf(tensors) if from_hf else tensors
            model = self.states[dcp.MODEL]
            _check_adapted(model.model, state_dict.keys() - loaded.keys())
            model.load_state_dict(loaded)
            if not from_hf:  # else the adapter has changed names and tensors
                compare_read(chain(*map(iterate_model, model.model)), read, sources)

    return CheckpointManager


def load_states(
    states: dict[str, Any], source: formats.Paths
) -> tuple[dict[Key, Entry], Mapping[str, SourceFile]]:
    """Fill torchtitan's states from a checkpoint: tensors through DCP, counters by their names.

    The tensors and the state of the live optimizers are then compared with the checkpoint.

    The data loader keeps its own state: torchtitan restores it only at the same number of
    data-parallel ranks.

    Args:
        states: parameters by fqn, and the objects ``optimizer``, ``lr_scheduler``, ``train_state``
            and ``dataloader``, if they are to be loaded.

    Returns:
        The entry of the source for each parameter, and the files of the source.

    Raises:
        ReshardError: on every rank; the source cannot be read or trusted, or belongs to another
            model, or a value differs from it after the load.
    """
    from reshard.live.dcp.live_objects import fill_model_state, fill_optimizer_state
    from reshard.live.safe_load import load_extra_state

    objects = {name: value for name, value in states.items() if hasattr(value, "load_state_dict")}
    tensors = {name: value for name, value in states.items() if name not in objects}
    manifest = read_for_model(source, tensors)
    read = fill_model_state(tensors, manifest)
    compare_read(iterate_state_dict(tensors), read, manifest.files)
    optimizers = objects.pop("optimizer", None)
    if optimizers is not None:
        moments = optimizers.state_dict()
        slots = fill_optimizer_state(moments, manifest)
        optimizers.load_state_dict(moments)
        pairs = product(optimizers.model_parts, optimizers.optimizers)
        live_slots = chain(*(iterate_optimizer(*pair) for pair in pairs))
        compare_read(live_slots, slots, manifest.files)
    extra = load_extra_state(manifest) if objects else {}
    for name, live in objects.items():
        _load_counters(name, live, extra)
    return read, manifest.files


def _check_adapted(parts: Iterable[Any], left_out: Iterable[str]) -> None:
    # Without this, torchtitan 0.3 leaves the experts of its GPT-OSS random: its adapter has other
    # names for them than its model.
    buffers = {remove_wrappers(name) for part in parts for name, _ in part.named_buffers()}
    kept = sorted(buffers.intersection(left_out))
    if kept:
        _logger.warning("%s: not loaded: torchtitan's adapter leaves it out", abridge(kept))
    lost = sorted(set(left_out) - buffers)
    raise_on_all_ranks(
        UnsupportedError(
            "torchtitan's state dict adapter",
            f"leaves out {counted(len(lost), 'parameter')} of the model, which would keep the"
            f" values of its initialisation: {abridge(lost)}",
            "give each a Hugging Face name in the adapter, or load a checkpoint that has"
            " torchtitan's names, with initial_load_in_hf=False",
        )
        if lost
        else None
    )


def _load_counters(name: str, live: Any, extra: Mapping[str, Any]) -> None:
    """Fill the state of an object that has no tensors; values that the source lacks stay."""
    state: dict[str, Any] = live.state_dict()
    scheduler = extra.get("scheduler")
    found = {key: extra[key] for key in state if key in extra}
    if isinstance(scheduler, Mapping):
        found |= {key: scheduler[key] for key in state if key in scheduler}
    found |= {key: extra["step"] for key in state if key in _COUNTS_STEPS and "step" in extra}
    lacking = [key for key in state if key not in found]
    if found:
        live.load_state_dict({**state, **found})
    if lacking or not state:
        _logger.warning("%s: not restored: %s", name, ", ".join(lacking) or "everything")
