"""Copy files unchanged that only the framework that wrote them understands.

Accelerate's ``load_state`` refuses a directory without the ``custom_checkpoint_N.pkl`` of every
object that the program registers, and reads the states of samplers and stateful data loaders back
whole. A copy of such a file is a tensor of its bytes: it moves under the same memory budget as
weights, and the checksums that the file keeps are compared on the way.

Source: Accelerate 1.15 ``checkpointing.py`` (``save_accelerator_state``, ``save_custom_state``) and
``accelerator.py`` (``load_state``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reshard.containers.torch_detect import is_torch_file
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import UINT8
from reshard.core.location import Location, leads_outside
from reshard.core.manifest import Entry, Manifest, OutputFile, Skeleton, TrainState
from reshard.system.files import get_size
from reshard.system.paths import as_path

KIND = "file"  # kind of an entry whose elements are the bytes of a whole file
ITEM = "item"  # kind of an entry whose elements are the bytes of a range of a file
TENSOR = "client tensor"  # kind of an entry for a tensor in one of a script's own values
SCHEDULER = re.compile(r"scheduler(?:_\d+)?\.bin")
_OWN = re.compile(r"custom_checkpoint_\d+\.pkl|(?:sampler|dl_state_dict)(?:_\d+)?\.bin")
# Functions that a program registers with ``register_save_state_pre_hook`` save models into folders
# of their own with ``save_pretrained``: diffusers' examples ``unet/`` and ``unet_ema/``.
ADAPTER = "adapter_model"  # the part of a state that is an adapter's weights
LORA = "pytorch_lora_weights.safetensors"  # in place of all folders, from its examples with LoRA
_CONFIGS = ("config.json", "adapter_config.json")
_MODEL_FILE = re.compile(r".*\.(safetensors|bin|json)")
# ``save_accelerator_state`` writes one for each process, so they identify the directory.
_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl")


def find(location: Location) -> dict[str, str]:
    """Return the files that Accelerate reads back whole, name -> path; schedulers are among them.

    The result is empty if the directory is not Accelerate's.
    """
    return {
        name: str(path)
        for name, path, root in _list_own(location)
        if not leads_outside(path, root) and is_torch_file(path)
    }


def find_hook_files(location: Location) -> dict[str, str]:
    """Return the files of models that hooks of the program saved, name with folder -> path.

    The result is empty if the directory is not Accelerate's.
    """
    return {
        name: str(path)
        for name, path, root in _list_hooked(location)
        if not leads_outside(path, root)
    }


def list_outside(location: Location) -> list[Path]:
    """Return the files that `find` and `find_hook_files` leave out, as links out of the source."""
    listed = (*_list_own(location), *_list_hooked(location))
    return [path for _, path, root in listed if leads_outside(path, root)]


def _list_own(location: Location) -> Iterator[tuple[str, Path, Path]]:
    for name, path in location.files.items() if _is_accelerates(location) else ():
        if is_accelerates_own(name) or SCHEDULER.fullmatch(name):
            yield name, path, path.parent


def _list_hooked(location: Location) -> Iterator[tuple[str, Path, Path]]:
    if _is_accelerates(location) and LORA in location.files:
        yield LORA, location.files[LORA], location.files[LORA].parent
    for folder, inner in find_hooked_models(location).items():
        for name, path in inner.files.items():
            if _MODEL_FILE.fullmatch(name):
                yield f"{folder}/{name}", path, path.parents[1]


def find_hooked_models(location: Location) -> dict[str, Location]:
    """Return the folders in which hooks of the program saved a model, by name.

    The result is empty if the directory is not Accelerate's.
    """
    folders = location.folders.items() if _is_accelerates(location) else ()
    return {
        name: folder for name, folder in folders if any(file in folder.files for file in _CONFIGS)
    }


def select_hook_files(train: TrainState, *, written: str = "") -> dict[str, str]:
    """Return the files of hooks without the weights in a folder that is written."""
    return {
        name: path
        for name, path in train.hook_files.items()
        if not (name == written or (name.startswith(f"{written}/") and ".safetensors" in name))
    }


def find_hooked_weights(train: TrainState) -> str:
    """Return the folder of the hooks, or their file, whose weights are read; empty if none is."""
    read = train.keys.get("model", "")
    if read == ADAPTER and LORA in train.hook_files:
        return LORA
    return read if f"{read}/config.json" in train.hook_files else ""


def _is_accelerates(location: Location) -> bool:
    return any(map(_OF_ACCELERATE.fullmatch, location.files))


def is_accelerates_own(name: str) -> bool:
    """Return whether only Accelerate's directories have a file for this content."""
    return _OWN.fullmatch(name) is not None


def find_hooked_folder(manifest: Manifest) -> Path | None:
    """Return the folder of the hooks whose weights are read; None if none is."""
    path = manifest.train.hook_files.get(f"{find_hooked_weights(manifest.train)}/config.json")
    return as_path(path).parent if path else None


def select_entries(manifest: Manifest, skeleton: Skeleton) -> list[Entry]:
    """Return the entries that fill copied files, and those of tensors in a script's own values."""
    names = {entry.fqn for entry in skeleton.entries if entry.kind == KIND}
    kept = {**manifest.train.kept_files, **manifest.train.hook_files}
    files = [build_file(name, kept[name], get_size(kept[name])) for name in kept if name in names]
    names = {entry.fqn for entry in skeleton.entries if entry.kind == TENSOR}
    tensors = collect_own_tensors(manifest.train).items() if names else ()
    return [*files, *(entry for name, entry in tensors if name in names)]


def collect_own_tensors(train: TrainState) -> dict[str, Entry]:
    """Return the tensors in a script's own values by name."""
    from reshard.containers.pickles.script_values import iterate_parts

    parts = (part for value in train.objects.values() for part in iterate_parts(value))
    return {part.fqn: part for part in parts if isinstance(part, Entry)}


def lay_out(name: str, path: str) -> Skeleton:
    """Lay out a copy of a source file under the same name."""
    size = get_size(path)
    return Skeleton((OutputFile(name, size),), (build_file(name, name, size),))


def describe_lost(kept: Mapping[str, str]) -> list[str]:
    """Return a note for each file that a target cannot hold, with the consequence."""
    own = [name for name in kept if is_accelerates_own(name)]
    return [f"{name} was not copied: {_WHY[_get_stem(name)]}" for name in own]


def describe_lost_models(hook_files: Iterable[str], written: Iterable[str]) -> list[str]:
    """Return a note for each folder or file of a program's hooks that is not written."""
    kept, named = (
        dict.fromkeys("".join(name.partition("/")[:2]) for name in names)
        for names in (written, hook_files)
    )
    folders = (folder for folder in named if folder not in kept)
    return [
        f"{folder} was not copied: a function of the program saved it beside the checkpoint"
        for folder in folders
    ]


_WHY = {
    "custom_checkpoint": "only Accelerate restores it; the objects that the program registers with"
    " register_for_checkpointing start anew",
    "sampler": "only Accelerate restores it; the sampler starts its order anew",
    "dl_state_dict": "only Accelerate restores it; the data loader starts from the beginning",
}


def _get_stem(name: str) -> str:
    return re.sub(r"_\d+$", "", Path(name).stem)


def build_file(name: str, file: str, size: int) -> Entry:
    """Return the entry of a whole file, whose elements are its bytes."""
    chunk = contiguous(file, 0, UINT8, whole((size,)))
    return Entry(name, KIND, UINT8, (size,), (chunk,))
