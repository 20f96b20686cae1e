"""The optimizer of a DeepSpeed engine at stage 3 that keeps its state in swap files (NVMe offload).

DeepSpeed 0.19.8 itself restores one by copying the checkpoint's swap files over its own
(``runtime/engine.py``, ``load_checkpoint``), which only fits the same ranks and sub-groups. Here
each sub-group is swapped in, filled and swapped out, as ``optimizer.step`` does, so that one
sub-group is in memory at a time.

Source: DeepSpeed 0.19.8 ``runtime/zero/stage3.py`` (``_rigid_load_state_dict``, ``step``),
``runtime/swap_tensor/partitioned_optimizer_swapper.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from reshard.live.safe_load import load_safely
from reshard.system.attributes import replace_attributes
from reshard.tensors.lazy import view_bytes

_FP32 = "fp32_flat_groups"
SCALE = ("loss_scaler", "dynamic_loss_scale", "overflow")


@contextmanager
def patch_swap_loading(
    engine: Any,
    folder: Path,
    load: Callable[[str], Mapping[str, Any]],
    *,
    has_scale: bool,
    has_states: bool,
) -> Iterator[None]:
    """Let an engine fill its swap files from memory when it loads, within this block.

    Args:
        folder: the directory of names that the engine loads.
        load: path -> the content of an optimizer file, with `UnreadTensor` for its tensors.
        has_scale: whether the loss scale is loaded.
        has_states: whether optimizer state and param groups are loaded.
    """
    tag = (folder / "latest").read_text().strip()
    # DeepSpeed copies this directory over its swap files.
    name = f"rank{engine.global_rank:02d}"
    if engine.use_node_local_storage():
        name = f"rank{engine.local_rank:02d}"
    (folder / tag / "offloaded_tensors" / name).mkdir(parents=True)

    def fill() -> None:
        # DeepSpeed 0.19.8 adds the rank's part of the checkpoint under this key.
        state = load(engine._get_zero_ckpt_name(str(folder), tag))["optimizer_state_dict"]  # noqa: SLF001
        if has_scale:
            vars(optimizer).update({name: state[name] for name in SCALE if name in state})
        _fill(optimizer, state, has_states=has_states)

    optimizer = engine.optimizer
    with replace_attributes(
        optimizer,
        # DeepSpeed calls this method after the copy, and gathers its persistent parameters later.
        reset_swap_buffers=fill,
        # It would copy into masters that are swapped out; they are filled later.
        _restore_from_bit16_weights=lambda: None,
    ):
        yield


def _fill(optimizer: Any, state: Mapping[str, Any], *, has_states: bool) -> None:
    inner = optimizer.optimizer
    if has_states:
        optimizer._set_fp32_optimizer_param_groups()  # noqa: SLF001 - no public names, here and below
        inner.load_state_dict(state["optimizer_state_dict"])  # passes `UnreadTensor` on as it is
        optimizer._clear_fp32_optimizer_param_groups()  # noqa: SLF001
    optimizer.optimizer_swapper.purge_state()
    for number, (master, saved) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, state[_FP32], strict=True)
    ):
        is_swapped = optimizer._swappable_optimizer_subgroup(number)  # noqa: SLF001
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)  # noqa: SLF001
        master.data.copy_(saved.read())
        if has_states:
            _read_slots(inner.state[master], master.device)
        optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
        if is_swapped:
            optimizer._optimizer_states_and_gradient_swap_out(number)  # noqa: SLF001


def _read_slots(slots: dict[str, Any], device: Any) -> None:
    for name, value in slots.items():
        if isinstance(value, UnreadTensor):
            slots[name] = value.read().to(device)


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor in a file.

    Attributes:
        byte_offset: where its first element is in the file.
    """

    file: IO[bytes]
    byte_offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.file.seek(self.byte_offset)
        buffer = view_bytes(tensor)
        filled = 0
        while count := self.file.readinto(buffer[filled:]):  # type: ignore[attr-defined]
            filled += count
        return tensor


def load_unread(file: IO[bytes], name: str) -> Any:
    """Return the object in a file, with an `UnreadTensor` for each tensor; scalars are read."""
    # torch leaves the records of a file unread in this mode, and notes where they are.
    with FakeTensorMode():
        loaded = load_safely(file, name)
    return _replace(loaded, file)


def _replace(value: Any, file: IO[bytes]) -> Any:
    if isinstance(value, FakeTensor):
        return _make_unread(value, file)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _replace(item, file)
    elif isinstance(value, (list, tuple)):
        return type(value)([_replace(item, file) for item in value])
    return value


def _make_unread(tensor: FakeTensor, file: IO[bytes]) -> Any:
    # torch 2.6 ``torch/serialization.py``, ``load_tensor``.
    start: int = tensor.untyped_storage()._checkpoint_offset  # type: ignore[assignment]  # noqa: SLF001
    shift = tensor.storage_offset() * tensor.element_size()
    unread = UnreadTensor(file, int(start + shift), tuple(tensor.shape), tensor.dtype)
    return unread if tensor.dim() else unread.read()
