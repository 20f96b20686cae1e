"""Derive from names who wrote a checkpoint, which kinds of files it has, and its step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from reshard.core.location import Location
from reshard.core.manifest import FrameworkFacts, TrainState
from reshard.formats.adjacent_files import TRAINER_STATE
from reshard.formats.dcp import directory as dcp
from reshard.formats.pytorch import directory
from reshard.formats.pytorch.directory import NAME
from reshard.state_dict import shard_metadata
from reshard.state_dict.tree import ParsedTree
from reshard.training import trainer_run
from reshard.training.trainer_run import TrainerRun

# Names that HF Trainer gives no file of a checkpoint: those of DCP, Accelerate, verl, and of this
# project's writers. `split` copies ``trainer_state.json`` beside them.
_NOT_OF_TRAINER = re.compile(
    r"\.metadata|.*\.distcp|scheduler\.bin|random_states_\d+\.pkl|checkpoint\.pt"
    r"|(model|optim|extra_state)_.*rank_?\d+\.pt"
)
_FSDP = FrameworkFacts(shards_by_fsdp=True)
# These save the module without DDP's wrapper: Lightning 2.6 ``strategies/strategy.py``
# (``lightning_module_state_dict``), Accelerate 1.15 ``accelerator.py`` (``prepare_model``),
# transformers 5.24 ``trainer.py`` (``_save``); torchtitan and verl do not use DDP.
_UNWRAPPED = replace(_FSDP, wraps_ddp=False)
_FRAMEWORKS = {
    **dict.fromkeys(("dcp", "fsdp"), _FSDP),
    **dict.fromkeys(("lightning", "accelerate", "torchtitan", "verl"), _UNWRAPPED),
    "hf-trainer": replace(_UNWRAPPED, divides_by_decay=True),
}
_STEP = re.compile(r"(?:global_|epoch_\d+_(?:train_)?)?step[-_]?(\d+)(?:-unsharded)?")


def parse_step(location: Location) -> int | None:
    """Return the step in the directory's name, or in its parent's (``global_step_3/actor``)."""
    near = (folder.name for folder in (location, location.get_parent()))
    matches = map(_STEP.fullmatch, near)
    return next((int(match[1]) for match in matches if match), None)


def read_batches(train: TrainState) -> int | None:
    """Return the number of batches in Composer's timestamp, each of which is one update.

    Source: Composer 0.32 ``core/time.py`` (``Timestamp.state_dict``).
    """
    stated = train.client.get("state.timestamp")
    counts = stated.get("Timestamp") if isinstance(stated, Mapping) else None
    batches = counts.get("batch") if isinstance(counts, Mapping) else None
    return batches if type(batches) is int else None


def detect_framework(location: Location, parsed: ParsedTree, run: TrainerRun | None) -> str:
    """Return the framework that wrote the checkpoint, as far as names tell.

    Args:
        run: the run of our trainer, if its document is there.
    """
    present = [location.chosen] if location.chosen else [*location.files, *location.folders]
    root = parsed.root if isinstance(parsed.root, dict) else {}
    parts = [] if location.chosen else directory.find_dcp_parts(location).values()
    # NeMo Automodel keeps the weights in shards for Hugging Face, beside DCP's optimizer.
    is_dcp = any(map(dcp.is_part, present)) or (bool(parts) and all(map(dcp.detect, parts)))
    stated = [node for node in (root, *root.values()) if isinstance(node, dict)]
    metadata = next(
        (node[shard_metadata.KEY] for node in stated if shard_metadata.KEY in node), None
    )
    # The order matters: a library comes before the one whose file names it also uses (HF Trainer
    # uses Accelerate's, torchtitan DCP's).
    signs = {
        trainer_run.NAME: run is not None,
        "hf-trainer": TRAINER_STATE in present and not any(map(_NOT_OF_TRAINER.fullmatch, present)),
        "verl": any(re.match(r"model_world_size_\d+_rank_\d+\.pt", name) for name in present),
        "lightning": "pytorch-lightning_version" in root or "meta.pt" in present,
        "accelerate": any(re.match("random_states_|pytorch_model_fsdp", name) for name in present),
        "torch_xla": shard_metadata.is_xla(metadata),
        "fairscale": metadata is not None,
        "torchtitan": is_dcp and "train_state" in root,
        "dcp": is_dcp,
        "fsdp": parsed.world > 1 or any(map(dcp.detect, parts)),
    }
    return next((name for name, shown in signs.items() if shown), NAME)


def describe_framework(framework: str, versions: Mapping[str, str]) -> FrameworkFacts:
    """Return what is true of every checkpoint of a framework."""
    facts = _FRAMEWORKS.get(framework, FrameworkFacts())
    is_lightning_1 = versions.get("lightning", "").startswith("1.")  # its DDP wraps the module
    return replace(facts, wraps_ddp=True) if is_lightning_1 else facts


def describe_files(location: Location) -> str:
    """Describe the kinds of files in a directory."""
    if location.chosen:
        return "state dict"
    kinds = []
    if dcp.detect(location) or any(dcp.detect(f) for f in location.folders.values()):
        kinds.append("DCP")
    if any(
        directory.is_of_rank(name) and not directory.RANDOM.match(name) for name in location.files
    ):
        kinds.append("rank files")
    return ", ".join(kinds) or "state dict"
