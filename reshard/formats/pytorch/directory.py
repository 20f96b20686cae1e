"""Recognize the files and folders of a training checkpoint by their names.

Libraries number the files of ranks in different ways; the patterns here cover what they share.
"""

from __future__ import annotations

import re
from pathlib import Path

from reshard.containers.torch_detect import SUFFIXES, is_torch_file
from reshard.core.location import Location
from reshard.errors import CorruptError
from reshard.formats import huggingface
from reshard.formats.dcp import directory as dcp

NAME = "torch"
FILE = "checkpoint.pt"  # that `split --to torch` writes into a directory
_FOLDER = re.compile(r"(pytorch_)?(model|optim(izer)?s?)(_fsdp)?(_\d+)?")
_SCHEDULER_FOLDER = re.compile(r"(lr_)?scheduler")  # slime's and miles', beside those of DCP
# NeMo RL 0.4 ``native_checkpoint.py``; elsewhere, a folder ``weights`` is a whole checkpoint.
_WEIGHTS, _OPTIMIZER = "weights", "optimizer"
# Inside of them, NeMo RL 0.5 has folders of NeMo Automodel (``automodel/checkpoint.py``).
_INNER = {_WEIGHTS: "model", _OPTIMIZER: "optim"}
# Programs save each pipeline stage, or each rank, into a folder of its own: ``pp0``, ``rank_1``.
_STAGE_FOLDER = re.compile(r"(?:(?:pp|pipe|pipeline)(?:[-_]?(?:stage|rank))?|stage)[-_]?(\d+)")
_RANK_FOLDER = re.compile(r"(?:global[-_]?)?rank[-_]?(\d+)")
# The rank is between one of these words and the suffix.
_SUFFIX = "|".join(map(re.escape, SUFFIXES))
OF_WORLD = r"(?:[-_.]?(?:of|world_size)[-_.]?\d+)?"  # behind the number of a rank
RANK = re.compile(
    rf"^(.*?(?:rank|shard|rng_state|random_states)[-_]?)(\d+){OF_WORLD}((?:\.\w+)*(?:{_SUFFIX}))$"
)
_RANK_FIRST = re.compile(rf"^(rank[-_]?\d+{OF_WORLD})[-_.](\w+)({_SUFFIX})$")
_STRONG = re.compile(  # a directory with one of these is a training checkpoint, not only a model
    r"optim(izer)?(_\d+)?\.(bin|pt|pth)|scheduler(_\d+)?\.(bin|pt)|trainer_state\.json"
    r"|pytorch_model_fsdp(_\d+)?\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|scaler\.pt"
    r"|((optim(izer)?|train(er|ing)?)[-_])?states?(_\d+)?\.(bin|pth?)"  # of scripts
)
# LitGPT 0.5 ``finetune/{lora,adapter,adapter_v2}.py``: the trained weights alone, which
# ``merge_lora.py`` adds to the base in a ``lit_model.pth`` beside them.
_LITGPT = "lit_model.pth"
_LITGPT_ADAPTERS = tuple(f"{_LITGPT}{suffix}" for suffix in (".lora", ".adapter", ".adapter_v2"))
_HF_SHARD = re.compile(r"-\d+-of-(\d+)\.bin$")
_ARGUMENTS = "training_args"
SLICES = "metadata.pkl"
_SLICE = re.compile(r".*\d\.safetensors")
RANDOM = re.compile(r"rng_state|random_states")  # ranks save these beside whole files too


def detect(location: Location) -> bool:
    """Return whether a sharded training checkpoint has files here."""
    if location.chosen:
        return is_rank_file(location.chosen)
    return (
        dcp.detect(location)
        or any(map(dcp.is_hf_shard, location.files))
        or any(map(is_part, location.files))
        or bool(find_dcp_parts(location))
        or bool(find_stage_folders(location))
        or bool(_find_rank_folders(location))
        or _has_optimizer_apart(add_folders(location))
        or states_slices(location)
    )


def states_slices(location: Location) -> bool:
    """Return whether torch_checkpointing's metadata is beside safetensors files of ranks."""
    names = [name for name in location.files if _SLICE.fullmatch(name)]
    return SLICES in location.files and not all(map(huggingface.is_shard, names))


def add_folders(location: Location) -> Location:
    """Return a location with its folders ``model`` and ``optimizer``, if they belong together."""
    below = [location.folders.get(name) for name in ("model", _OPTIMIZER)]
    added = [folder for part in below if part is not None for folder in part.directories]
    joined = Location([*location.directories, *added])
    is_checkpoint = None not in below and not find_dcp_parts(location)
    return joined if is_checkpoint and _has_optimizer_apart(joined) else location


def _has_optimizer_apart(location: Location) -> bool:
    # LLaMA-Factory 0.9.5 (v1) keeps the weights of one process in ``model`` and their optimizer in
    # ``optimizer``.
    if len(location.directories) == 1:
        return False
    parts = [Location([directory]) for directory in location.directories]
    apart = [part for part in parts if not huggingface.detect(part)]
    return 0 < len(apart) < len(parts) and any(map(find_torch_files, apart))


def detect_loosely(location: Location) -> bool:
    """Return whether any ``torch.save`` file is here that no other format recognizes."""
    if location.chosen:
        return is_torch_file(location.path)
    return bool(find_torch_files(location))


def is_rank_file(name: str) -> bool:
    """Return whether a file's name is one rank's, or one of DCP's."""
    return dcp.is_part(name) or dcp.is_hf_shard(name) or is_of_rank(name)


def find_dcp_parts(location: Location) -> dict[str, Location]:
    """Return the folders that DCP wrote, as items or as shards for Hugging Face.

    Beside such an optimizer, NeMo RL and NeMo Automodel save the model as PEFT's adapter alone.
    """
    parts = {
        name: folder
        for name, folder in location.folders.items()
        if _FOLDER.fullmatch(name) and _is_of_dcp(folder)
    }
    pair = {
        name: place
        for name, inner in _INNER.items()
        if (folder := location.folders.get(name))
        and (place := folder if _is_of_dcp(folder) else folder.folders.get(inner))
        and (_is_of_dcp(place) or (name == _WEIGHTS and dcp.ADAPTER in place.files))
    }
    model = location.folders.get("model")
    if model and dcp.ADAPTER in model.files and any(map(is_optimizer_folder, parts)):
        parts["model"] = model
    found = parts | pair if len(pair) == len(_INNER) else parts
    schedulers = {
        name: folder
        for name, folder in location.folders.items()
        if found and _SCHEDULER_FOLDER.fullmatch(name) and _is_of_dcp(folder)
    }
    return found | schedulers


def is_optimizer_folder(name: str) -> bool:
    """Return whether a folder that `find_dcp_parts` found has the optimizer, by its name."""
    return name.startswith("optim")


def find_stage_folders(location: Location) -> dict[int, Location]:
    """Return the folders of pipeline stages by number, in order; empty if there are not several."""
    folders = _find_numbered(location, _STAGE_FOLDER)
    # Without a stage 0, ``stage1`` and ``stage2`` are the phases of a training.
    are_phases = any(folder.name.startswith("stage") for folder in folders.values())
    are_stages = len(folders) > 1 and (0 in folders or not are_phases)
    is_saved = all(dcp.detect(folder) or find_torch_files(folder) for folder in folders.values())
    return folders if are_stages and is_saved else {}


def _find_rank_folders(location: Location) -> dict[int, Location]:
    folders = _find_numbered(location, _RANK_FOLDER)
    return folders if all(map(find_torch_files, folders.values())) else {}


def _find_numbered(location: Location, pattern: re.Pattern[str]) -> dict[int, Location]:
    numbered = {
        int(match[1]): folder
        for name, folder in location.folders.items()
        if (match := pattern.fullmatch(name))
    }
    return dict(sorted(numbered.items()))


def describe_stage(location: Location) -> list[str]:
    """Return a warning if a directory is that of one of several pipeline stages."""
    if not _STAGE_FOLDER.fullmatch(location.name) or len(location.directories) > 1:
        return []
    above = location.get_parent()
    stages = find_stage_folders(above)
    if location.name not in {stage.name for stage in stages.values()}:
        return []
    return [f"{location} is one of {len(stages)} pipeline stages: pass {above} to read all of them"]


def find_whole(location: Location) -> Location | None:
    """Return the checkpoint whose model or optimizer is the folder that the user passed.

    None is returned for other folders, and where the checkpoint has several models to choose from.
    """
    if location.chosen or len(location.directories) > 1 or not _FOLDER.fullmatch(location.name):
        return None
    folder = location.path if location.path.name else location.path.resolve()
    above = Location([folder.parent], inner=True)
    parts = find_dcp_parts(above)
    optimizers = list(filter(is_optimizer_folder, parts))
    is_pair = location.name in parts and (len(parts), len(optimizers)) == (2, 1)
    return above if is_pair else None


def _is_of_dcp(folder: Location) -> bool:
    return dcp.detect(folder) or any(map(dcp.is_hf_shard, folder.files))


def is_of_rank(name: str) -> bool:
    """Return whether a file's name has the number of a rank."""
    return match_rank(name) is not None


def match_rank(name: str) -> re.Match[str] | None:
    """Return the match of a file's name with `RANK`, also if the rank is its first word."""
    return RANK.fullmatch(_RANK_FIRST.sub(r"\2_\1\3", name))


def is_part(name: str) -> bool:
    """Return whether a file's name is that of a part of a training checkpoint."""
    return _STRONG.fullmatch(name) is not None or is_of_rank(name)


def find_torch_files(location: Location) -> dict[str, Path]:
    """Return the ``torch.save`` files, except shards of an index and the trainer's arguments.

    A file in the folder of a rank has a name with the number of that rank.

    Raises:
        CorruptError: a file has the name of a part of the checkpoint but is not one.
    """
    torch_files = {}
    indexed = huggingface.find_index(location) is not None
    for name, path in location.files.items():
        is_adapter = name in _LITGPT_ADAPTERS and _LITGPT not in location.files
        if (path.suffix not in SUFFIXES and not is_adapter) or path.stem == _ARGUMENTS:
            continue
        shard = _HF_SHARD.search(name)
        # torchtune 0.4 to 0.6 names a whole model like a shard: ``model-00001-of-00001.bin``.
        if shard and (indexed or int(shard[1]) != 1):
            continue
        if is_torch_file(path):
            torch_files[name] = path
        elif is_part(name):
            size = path.stat().st_size
            raise CorruptError(
                path,
                f"is not a torch.save file ({size} bytes)" if size else "is empty",
                "fetch it again; a node-local disk may still have it",
            )
    return torch_files | _find_files_of_ranks(location)


def _find_files_of_ranks(location: Location) -> dict[str, Path]:
    """Return the files in the folders of ranks: ``rank_1/model.pt`` as ``model_rank1.pt``."""
    folders = {n: find_torch_files(folder) for n, folder in _find_rank_folders(location).items()}
    in_all = set.intersection(*map(set, folders.values())) if folders else set[str]()
    found = {}
    for rank, files in folders.items():
        for name, path in files.items():
            stem = path.stem
            if name not in in_all:  # it has the number of the rank itself: 1.pt, model_rank1.pt
                stem = re.sub(rf"[-_.]?(rank)?[-_]?0*{rank}$", "", stem)
            found[f"{stem}_rank{rank}{path.suffix}"] = path
    return found
