"""The files that verl saves beside torch_dist directories, for a model that Megatron-core trains.

    actor/ckpt_contents.json        step, number of ranks, which parts were saved; written last
    actor/transformer_config.json   the plain fields of Megatron-core's TransformerConfig
    actor/model/dist_ckpt/          weights
    actor/model/huggingface/        config and tokenizer; the weights too, if a bridge saved them
    actor/optimizer/dist_ckpt/      optimizer and scheduler
    actor/extra/dist_ckpt/          random states

Older versions save all of them in ``actor/dist_ckpt``; verl's own migration links that directory to
the three new places, so each part may contain the keys of the others.

Source: verl 0.9.1 ``utils/checkpoint/megatron_checkpoint_manager.py`` (``save_checkpoint``,
``_write_checkpoint_manifest``), ``utils/megatron_utils.py`` (``get_megatron_ddp_config``),
``scripts/migrate_megatron_checkpoint_layout.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.containers.torch_objects import TorchFile
from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.core.schema import COUNT, expect, fields, mapping, maybe
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats.dcp import reader as dcp
from reshard.formats.huggingface import reader as huggingface
from reshard.formats.megatron import directory
from reshard.formats.megatron.optimizers import dist_flat
from reshard.formats.megatron.run_config import RENAMED
from reshard.layouts.model_parallel.names import rename_from_hf
from reshard.model import library
from reshard.naming.config import describe_config
from reshard.naming.options import NameOptions
from reshard.state_dict.tree import ParsedTree

_CONTENTS = "ckpt_contents.json"
_CONFIG = "transformer_config.json"
_STATED = fields(
    global_step=maybe(COUNT),
    world_size=maybe(COUNT),
    contents=maybe(mapping()),
    backend=maybe(mapping()),
)
_HF_FOLDER = "huggingface"
_RNG = "rng_state/"
_COMMON = "common_state/"


def find_root(location: Location) -> Location:
    """Return the directory that has verl's own files, from it or from its ``dist_ckpt``."""
    return location.get_parent() if location.name == directory.DIST_FOLDER else location


def read_parts(parts: Mapping[str, Location]) -> dict[str, ParsedTree]:
    """Read the keys of each part from its own directory, as verl loads them."""
    trees = {name: dcp.read_flat(folder) for name, folder in parts.items()}
    return {
        name: replace(tree, root={k: v for k, v in tree.root.items() if _belongs(k, name)})
        for name, tree in trees.items()
    }


def _belongs(key: str, part: str) -> bool:
    if key.startswith(_COMMON):
        return True
    if key.startswith(_RNG):
        return part == "extra"
    return part == ("optimizer" if dist_flat.CHAIN.fullmatch(key) else "model")


def join_parts(trees: Sequence[ParsedTree], beside: Sequence[TorchFile]) -> ParsedTree:
    """Return the keys of all parts as one tree, with the files that were read beside them."""
    files = {path: file for tree in trees for path, file in tree.files.items()}
    return replace(
        trees[0],
        root={key: value for tree in trees for key, value in tree.root.items()},
        files=files | {file.path: file.source() for file in beside},
        globals=set[str]().union(*(t.globals for t in trees), *(file.globals for file in beside)),
        notes=[note for tree in trees for note in tree.notes],
    )


def read_stated(location: Location, parts: Collection[str]) -> dict[str, Any]:
    """Return the step that verl states, as ``common.pt`` of Megatron-LM would have it.

    Args:
        parts: the parts that are there; empty for a directory of an older version.

    Raises:
        IncompleteError: a part that verl saved is missing.
        UnsupportedError: the weights are an adapter's.
        CorruptError: the file is damaged.
    """
    stated = _read_contents(location)
    if (stated.get("backend") or {}).get("peft"):
        raise UnsupportedError(
            location,
            f"has only the weights of an adapter, according to {_CONTENTS}; reshard does not read"
            " adapters of Megatron",
            "pass the directory of the model's own weights",
        )
    saved = {
        str(entry["path"]).partition("/")[0]
        for entry in (stated.get("contents") or {}).values()
        if isinstance(entry, dict) and str(entry.get("path")).endswith(directory.DIST_FOLDER)
    }
    for part in directory.VERL_PARTS:
        if parts and part in saved and part not in parts:
            raise IncompleteError(
                location,
                f"{part}/{directory.DIST_FOLDER} is missing or incomplete; {_CONTENTS} lists it",
                "copy it here from the run's storage",
            )
    step = stated.get("global_step")
    return {} if step is None else {"iteration": step}


def read_exported(location: Location) -> Manifest | None:
    """Return the weights that a bridge saved as a Hugging Face model, under Megatron's names.

    Returns:
        None if verl did not save the location.

    Raises:
        IncompleteError: there is no such model, or the location is one part of a checkpoint.
        UsageError, UnsupportedError: its config is not of a model that reshard knows.
    """
    root = location
    if (
        location.name == directory.DIST_FOLDER
        and location.get_parent().name in directory.VERL_PARTS
    ):
        root = location.get_parent().get_parent()
    parts = directory.list_parts(root)
    if parts and root is not location:
        raise IncompleteError(location, "contains no weights", f"pass {root}, which has all parts")
    model = root.folders["model"].folders.get(_HF_FOLDER) if "model" in root.folders else None
    if not parts or model is None:
        return None
    if not library.is_installed():
        raise IncompleteError(
            location,
            f"contains an optimizer, whose weights are in {model} under the names of Hugging Face,"
            " and transformers, which states what that model is, is not installed",
            f"install transformers, or pass {model} for the weights alone",
        )
    manifest = huggingface.read(model)
    family, traits = describe_config(manifest, NameOptions(), None)
    return rename_from_hf(manifest, family.table, traits.make_architecture()).manifest


def read_grid(location: Location, *, is_tied: bool) -> dict[str, Any]:
    """Return the arguments by which ranks divide a model and its optimizer; empty if unknown.

    They do not describe the model completely: the activation and the positions are not among them.
    """
    path = location.files.get(_CONFIG)
    if path is None:
        return {}
    config = {RENAMED.get(name, name): value for name, value in read_json_object(path).items()}
    world = _read_contents(location).get("world_size")
    return config | {
        "world_size": world,
        "untie_embeddings_and_output_weights": not is_tied,
        "overlap_grad_reduce": False,  # verl's default: one bucket takes a whole buffer
    }


def _read_contents(location: Location) -> dict[str, Any]:
    path = location.files.get(_CONTENTS)
    if path is None:
        return {}
    stated = read_json_object(path)
    expect(path, stated, _STATED, _CONTENTS)
    return stated
