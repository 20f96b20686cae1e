"""``--auto``: the first strategy whose memory fits the ranks of this machine.

Bytes of model state are `memory.predict`'s; activations are those of ``reshard.sizing``, which is
imported here and nowhere else in this package: the formulas have one home, and no part of the
trainer that writes or reads a checkpoint depends on it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import SettingsError
from trainer.resolve import resolve
from trainer.settings import Settings

_MARGIN = 0.1
"""Part of a rank's memory that is left free for the framework and fragmentation."""

_MEMORY = Path("/proc/meminfo")
_LIMITS = (  # memory limits of a container: cgroup version 2, and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Picked:
    """The settings that --auto chose, and the reason."""

    values: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class _Sizes:
    """What the forecast needs of the model, for one rank and one micro batch."""

    numel: int
    largest_layer: int
    vocab: int
    saved: int
    recomputed: int


def pick(chosen: Mapping[str, Any], stated: Mapping[str, Any], nproc: int) -> Picked:
    """Return the first strategy that fits, without offload first.

    Args:
        chosen: all settings that are not defaults.
        stated: the settings that the user states, which --auto keeps.

    Raises:
        SettingsError: none fits.
    """
    base = resolve({**chosen, "strategy": stated.get("strategy", "ddp")}, nproc)
    device = _find_device(base.device)
    available = find_memory(device, nproc)
    sizes = _measure(base)
    tried: list[str] = []
    for values in _list_candidates(device, base):
        if any(stated.get(name, value) != value for name, value in values.items()):
            continue
        try:
            settings = resolve({**chosen, **values}, nproc)
        except SettingsError:  # contradicts another setting
            continue
        needed = _forecast(settings, sizes, available)
        name = _describe(settings)
        if needed <= available:
            before = f"; {', '.join(tried)}" if tried else ""
            memory = f"{_show_gb(needed)} of {_show_gb(available)} a rank"
            return Picked(values, f"{name} is the first that fits: {memory}{before}")
        tried.append(f"{name} needs {_show_gb(needed)}")
    if not tried:
        raise SettingsError(
            f"--auto chooses among ddp, zero1, zero2 and zero3, not {base.strategy}",
            "leave out --strategy or --auto",
        )
    raise SettingsError(
        f"no strategy fits {_show_gb(available)} a rank: {', '.join(tried)}",
        "use more ranks, a smaller --micro-batch (and more --accumulation) or --seq-len",
    )


def _list_candidates(device: str, base: Settings) -> Iterator[dict[str, Any]]:
    """Yield settings, the fastest first.

    ddp and ZeRO 1 and 2 move the same number of bytes, and ZeRO 3 half as many again. Recomputation
    costs a third of the computation, and offload costs more. On a CPU there is nothing to offload
    to.
    """
    strategies = ("ddp", "zero1", "zero2", "zero3")
    for checkpointing in sorted({base.activation_checkpointing, True}):
        for strategy in strategies:
            yield {"strategy": strategy, "activation_checkpointing": checkpointing}
    if device == "cuda":
        for strategy, param in (("zero2", "none"), ("zero3", "none"), ("zero3", "cpu")):
            yield {
                "strategy": strategy,
                "activation_checkpointing": True,
                "offload_optimizer": "cpu",
                "offload_param": param,
            }


def _describe(settings: Settings) -> str:
    offloaded = {
        "optimizer": settings.offload_optimizer != "none",
        "parameters": settings.offload_param != "none",
    }
    what = " and ".join(name for name, is_offloaded in offloaded.items() if is_offloaded)
    parts = [f"offload of {what}"] if what else []
    if settings.activation_checkpointing:
        parts.append("activation checkpointing")
    return f"{settings.strategy} with {' and '.join(parts)}" if parts else settings.strategy


def _measure(settings: Settings) -> _Sizes:
    """Count the parameters of the model, and the bytes that its forward pass saves."""
    from reshard.sizing.setup import Training
    from reshard.sizing.share import take_share
    from reshard.sizing.sources import count_shapes
    from trainer.config.huggingface import load_model_config
    from trainer.core.model import build_model

    model = build_model(dataclasses.replace(settings, activation_checkpointing=False), meta=True)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    config = load_model_config(settings).to_dict()
    sizes = count_shapes(shapes, settings.model, config)
    training = Training(
        precision=settings.precision,  # type: ignore[arg-type] # the same names
        seq_len=settings.seq_len,
        micro_batch=settings.micro_batch,
    )
    share = take_share(sizes, training)
    layer = max(sizes.largest_block, share.outside)
    return _Sizes(sizes.numel, layer, sizes.vocab, share.saved_bytes, share.recomputed_bytes)


def _forecast(settings: Settings, sizes: _Sizes, available: int) -> int:
    """Return the bytes of one rank: model state, activations, logits, gathered layers, margin."""
    from trainer.memory import BYTES, predict

    state = predict(settings, sizes.numel)
    size = BYTES[settings.precision]
    optimizer = 0 if settings.offload_optimizer != "none" else state.optimizer
    parameters = 0 if settings.offload_param != "none" else state.parameters
    activations = sizes.recomputed if settings.activation_checkpointing else sizes.saved
    tokens = settings.seq_len * settings.micro_batch
    logits = tokens * sizes.vocab * (size + 12)  # log-softmax and two gradients in float32
    gathered = 2 * size * sizes.largest_layer if settings.zero_stage == 3 else 0
    states = parameters + state.gradients + optimizer + state.accumulators
    return states + activations + logits + gathered + round(_MARGIN * available)


def _show_gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _find_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if _list_gpus() else "cpu"


def find_memory(device: str, nproc: int) -> int:
    """Return the bytes that one of ``nproc`` ranks of this machine may use.

    Raises:
        SettingsError: the memory is unknown, or there are fewer GPUs than ranks.
    """
    if device == "cuda":
        gpus = _list_gpus()
        if len(gpus) < nproc:
            raise SettingsError(
                f"there are {len(gpus)} GPUs for {nproc} ranks", "use a smaller --nproc"
            )
        return min(gpus[:nproc])
    limits = [_read_available(), *map(_read_limit, _LIMITS)]
    known = [each for each in limits if each]
    if not known:
        raise SettingsError(
            "the free memory of this machine is not known: there is no /proc/meminfo",
            "leave out --auto, and give --strategy",
        )
    return min(known) // nproc


def _list_gpus() -> list[int]:
    """Return the free bytes of each GPU; `nvidia-smi` uses no memory on them, as torch would."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():  # CUDA then has no device
        return []
    which = ["-i", visible] if visible else []
    query = ["nvidia-smi", *which, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program, and GPUs as CUDA names them
            query, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no GPU of NVIDIA here
        return []
    return [int(line) << 20 for line in done.stdout.split() if line.isdigit()]


def _read_available() -> int | None:
    if not _MEMORY.is_file():
        return None
    for line in _MEMORY.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _read_limit(path: Path) -> int | None:
    """Return the limit of a container; None if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None
