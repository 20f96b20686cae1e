"""Refuse the checkpoints of libraries that reshard does not read itself, by their files' names.

Sources: fairseq2 0.8.1 ``checkpoint/manager.py``; OLMo 0.6.0 ``checkpoint.py``; torchsnapshot 0.1.0
``snapshot.py``; Orbax 0.12 ``checkpoint/_src/metadata``; PaddleNLP 2.8
``transformers/configuration_utils.py`` and ``trainer/plugins/unified_checkpoint.py``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import NamedTuple

from reshard.containers.json_files import read_json_object
from reshard.core.location import Location
from reshard.errors import CorruptError, UnsupportedError
from reshard.formats import registry

_FAIRSEQ2 = "pp_00/tp_00/sdp_00.pt"
_SHARD = re.compile(r"sdp_\d+\.pt")
_ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt", "_METADATA")
_SNAPSHOT = ".snapshot_metadata"
_NANOTRON = "checkpoint_metadata.json"
_PADDLE = re.compile(r"master_weights(-\d+-of-\d+)?\.safetensors")
_TO_TORCH = "load it with the library, and save it with torch.save"


class _Library(NamedTuple):
    """A library, and how to know its checkpoints.

    Args:
        text: what its checkpoint is.
        saved: returns whether the library saved the files of a directory.
        format: the format that reads them, if another package adds it.
    """

    text: str
    advice: str
    saved: Callable[[Location], bool]
    format: str = ""


def _is_of_fairseq2(location: Location) -> bool:
    if len(list(filter(_SHARD.fullmatch, location.files))) > 1:
        return True  # one file of them is not the whole model either
    paths = (f"model/{_FAIRSEQ2}", _FAIRSEQ2)
    nested = (path for path in paths if path.partition("/")[0] in location.folders)
    return not location.chosen and any(map(location.find_nested, nested))


def _is_of_olmo(location: Location) -> bool:
    files = [f"{folder}/rank0.pt" for folder in ("model", "optim", "train")]
    is_local = "metadata.yaml" in location.files and not location.chosen
    return is_local and all(map(location.find_nested, files))


def _is_of_nanotron(location: Location) -> bool:
    folder = location.folders.get("model") if _NANOTRON in location.files else None
    return folder is not None and "model" in folder.folders


def _is_of_paddle(location: Location) -> bool:
    # PaddleNLP stores the weight of a linear layer transposed, under the names of transformers.
    if any(map(_PADDLE.fullmatch, location.files)):
        return True
    config = location.files.get("config.json")
    has_weights = any(name.endswith(".safetensors") for name in location.files)
    with contextlib.suppress(CorruptError):  # refused where it is needed
        return bool(config and has_weights and "paddlenlp_version" in read_json_object(config))
    return False


_LIBRARIES = (
    _Library(
        "is a checkpoint of fairseq2, whose files do not state how tensors are cut",
        "set export_hugging_face in the run, and pass step_N/hg; the weights of a run without"
        f" sharding are in model/{_FAIRSEQ2}",
        _is_of_fairseq2,
    ),
    _Library(
        "is a checkpoint of OLMo's LocalShardedCheckpointer, whose flat parameters reshard does not"
        " read",
        "make whole files of it with OLMo's scripts/unshard.py",
        _is_of_olmo,
    ),
    _Library(
        "is a snapshot of torchsnapshot, which reshard does not read",
        _TO_TORCH,
        lambda location: _SNAPSHOT in location.files,
    ),
    _Library(
        "is a checkpoint of Orbax (JAX), which reshard does not read",
        "export the model with the program that trained it, for example as safetensors",
        lambda location: any(name in location.files for name in _ORBAX),
    ),
    _Library(
        "is a checkpoint of PaddlePaddle, whose weights may be transposed, and which reshard does"
        " not read",
        "convert it to a model of transformers with PaddleNLP; --from huggingface reads its"
        " safetensors as they are stored",
        _is_of_paddle,
    ),
    _Library(
        "is a checkpoint of nanotron, which the package in plugins/nanotron reads",
        "in a clone of reshard's sources: pip install . ./plugins/nanotron",
        _is_of_nanotron,
        format="nanotron",
    ),
)


def refuse(location: Location) -> None:
    """Refuse a directory in which a library saved a checkpoint that no installed format reads.

    Raises:
        UnsupportedError: naming the library.
    """
    for library in _LIBRARIES:
        if library.saved(location) and not (
            registry.find_format(library.format) or registry.detects_extension(location)
        ):
            raise UnsupportedError(location, library.text, library.advice)
