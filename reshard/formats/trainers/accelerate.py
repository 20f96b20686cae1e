"""Lay out Accelerate's files of DDP and of one process: whole weights, the optimizer by index.

    model.safetensors    the model's state dict, without DDP's ``module.``: Accelerate keeps
                         the model that it was given, and wraps it afterwards
    optimizer.bin        ``torch.optim``'s own state

Every number of ranks has the same two files. `fsdp.rank_files` and `dcp.writer` lay out FSDP's
forms.

Source: Accelerate 1.15 ``accelerator.py`` (``prepare_model``, ``save_state``), ``checkpointing.py``
(``load_accelerator_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from reshard.containers import safetensors, skeletons, torch_writer
from reshard.containers import safetensors_shards as writer
from reshard.containers.json_files import read_json_object
from reshard.core.dtypes import DType
from reshard.core.manifest import Entry, Skeleton
from reshard.formats.request import Request
from reshard.model.adapter_names import rename_from_diffusers
from reshard.state_dict import torch_state_dict
from reshard.state_dict.sections import ACCUMULATED
from reshard.state_dict.slots import lay_out_optimizer
from reshard.system.paths import as_path
from reshard.training import copied_files, rng, schedules
from reshard.training.companion_files import choose_stem
from reshard.training.state import WritableState

TAG = "pytorch_model"  # DeepSpeed's folder of the first model
_WEIGHTS = "model.safetensors"
_SCHEDULER = "scheduler.bin"
_SHARD_BYTES = 10 * 10**9  # of a model of diffusers, the default of its ``save_pretrained``


def lay_out_unsharded(state: WritableState, request: Request) -> Skeleton:
    """Lay out the directory for a number of ranks."""
    tensors = torch_state_dict.choose_whole_weights(state, request.dtype)
    ranks = request.world_size
    hooked = copied_files.find_hooked_weights(state.manifest.train)
    if hooked:
        parts = [_lay_out_hooked(tensors, hooked, state.manifest.train.hook_files)]
    else:
        parts = [writer.lay_out_file(_WEIGHTS, tensors, writer.METADATA)]
    if not request.weights_only:
        parts.append(lay_out_optimizer(state, "optimizer.bin", ranks, request.model))
        parts += lay_out_accelerate_extras(state, ranks, hooked=hooked)
    return skeletons.join(parts)


def _lay_out_hooked(
    tensors: Sequence[tuple[Entry, DType]], hooked: str, files: Mapping[str, str]
) -> Skeleton:
    if hooked != copied_files.LORA:
        laid_out = writer.lay_out(
            tensors,
            max_shard_bytes=_SHARD_BYTES,
            texts={},
            metadata=writer.METADATA,
            stem=choose_stem(read_json_object(as_path(files[f"{hooked}/config.json"]))),
        )
        return skeletons.move_into(laid_out, hooked)
    saved = safetensors.read(files[hooked])
    names = rename_from_diffusers({name: name for name in saved.tensors})
    own = {names.get(entry.fqn, entry.fqn): entry.fqn for entry, _ in tensors}
    renamed = [(replace(e, fqn=names.get(e.fqn, e.fqn)), dtype) for e, dtype in tensors]
    laid_out = writer.lay_out_file(hooked, renamed, saved.metadata)
    entries = (replace(entry, fqn=own[entry.fqn]) for entry in laid_out.entries)
    return replace(laid_out, entries=tuple(entries))


def lay_out_accelerate_extras(
    state: WritableState, ranks: int, *, engine: bool = False, hooked: str = ""
) -> Iterator[Skeleton]:
    """Yield the files that Accelerate's ``load_state`` needs beside weights and optimizer.

    ``load_state`` reads its count of steps from the file of each rank's random states, and
    continues without that file if it cannot be loaded (``load_accelerator_state``).

    Args:
        engine: whether DeepSpeed trains: its engine saves the loss scaler, and a scheduler of its
            own (``Accelerator.save_state``).
        hooked: the folder of the program's hooks whose weights are written, and not copied.
    """
    beside = torch_state_dict.collect_extra_state(state.manifest.train)
    if engine:
        beside = {key: value for key, value in beside.items() if key != "scaler"}
    if schedules.is_deepspeeds(beside.get("scheduler")):
        del beside["scheduler"]
    factor = schedules.find_factor(state.manifest, ranks)
    files = dict(state.manifest.train.kept_files)
    copied = copied_files.select_hook_files(state.manifest.train, written=hooked)
    if "scheduler" in beside and (state.regrouped or _SCHEDULER not in files):
        files.pop(_SCHEDULER, None)  # its lists have the source's groups
        yield from _lay_out_schedulers(beside["scheduler"], factor)
    for name, path in files.items():
        scaled = (
            None
            if factor == 1 or not copied_files.SCHEDULER.fullmatch(name)
            else schedules.scale_file(path, factor)
        )
        if scaled is None:
            yield copied_files.lay_out(name, path)
        else:
            yield torch_writer.lay_out_object(name, scaled.state)
    yield from (copied_files.lay_out(name, path) for name, path in copied.items())
    if "scaler" in beside:
        yield torch_writer.lay_out_object("scaler.pt", beside["scaler"])
    count = state.manifest.train.opaque.get(ACCUMULATED, beside.get("step"))
    counted = {} if count is None else {"step": count}
    for rank in range(ranks):
        states = rng.build_file(state.rng[rank], rng.ACCELERATE) if state.rng else {}
        if counted or states:
            name, content = f"random_states_{rank}.pkl", {**counted, **states}
            yield torch_writer.lay_out_object(name, content, stamp=state.stamp(name, rank, ranks))


def _lay_out_schedulers(saved: Any, factor: Fraction) -> Iterator[Skeleton]:
    # Lightning saves a list of schedulers, Accelerate numbered files (1.x ``checkpointing.py``,
    # ``save_accelerator_state``): ``scheduler.bin``, then ``scheduler_1.bin``.
    for number, state in enumerate(saved if isinstance(saved, list) else [saved]):
        name = f"scheduler_{number}.bin" if number else _SCHEDULER
        scaled = schedules.scale(state, factor).state if isinstance(state, dict) else state
        yield torch_writer.lay_out_object(name, scaled)
