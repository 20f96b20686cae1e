"""Read every part that PyTorch-native training left in a directory as one manifest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.core.location import Location, list_missing_ranks
from reshard.core.manifest import Manifest, Origin, TrainState
from reshard.errors import (
    FETCH_MISSING,
    CorruptError,
    IncompleteError,
    UnrecognisedError,
    UsageError,
)
from reshard.formats import adjacent_files, huggingface, run_directory
from reshard.formats.base import ReadHints
from reshard.formats.dcp import directory as dcp
from reshard.formats.dcp import hf_shards, reader
from reshard.formats.huggingface import reader as of_huggingface
from reshard.formats.pytorch import directory, provenance, torch_checkpointing, torchtune
from reshard.formats.pytorch.directory import (
    find_dcp_parts,
    is_optimizer_folder,
)
from reshard.formats.pytorch.lost_files import naming_lost_files
from reshard.formats.pytorch.rank_parts import join_by_rules
from reshard.formats.pytorch.ranks import (
    OpenedRanks,
    find_lost_files,
    group_by_family,
    refuse_copies,
    stands_for_ranks,
)
from reshard.formats.pytorch.stages import (
    Collected,
    count_ranks,
    divide_stages,
    find_stages,
    join_stages,
)
from reshard.model import ModelHint
from reshard.model.adapter_names import ROOT, VERL, name_in_model, rename_from_diffusers
from reshard.state_dict import assemble, sections
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.tree import ParsedTree
from reshard.system.files import MAX_POINTER, read_small_file
from reshard.training import copied_files, sentence_modules, trainer_run
from reshard.training.trainer_run import TrainerRun
from reshard.units import abridge

_WEIGHTS = re.compile(r"(adapter_)?model(_\d+)?\.safetensors")
_ADAPTER_CONFIG = "adapter_config.json"
_EXTRA_STATE = "extra_state"  # VeOmni 0.1.12 ``checkpoint/dcp_checkpointer.py``
_OF_STEP = re.compile(r"(?:model|optim(?:izer)?)_(\d{5,})")
_LATEST = re.compile(r"(.*[-_])?(latest|last|final)")
_POINTER = "last_checkpoint"  # of detectron2 and MMEngine, with the name or path of a file

_COPY = "{} is not read: it is assumed to be the same model as {}"


def read(location: Location, hints: ReadHints) -> Manifest:
    """Read every part of a checkpoint as one manifest, or one file by itself.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: files contradict each other.
        UnrecognisedError: the parts have no weights, or several models.
        UsageError: hints have ``wrap``, and there is no model.
    """
    key, wrap = hints.key, hints.wrap
    # One rank's file stands for all of them; any other file is read by itself.
    saved: list[Collected]
    folders: dict[int, Location] = {}
    trainer: dict[str, Any] = {}
    if location.chosen and not stands_for_ranks(location):
        saved = [(OpenedRanks.open({0: location.path}, alone=True).join(location), [])]
    else:
        chosen, location = location.chosen, directory.add_folders(location.folder)
        folders = {} if chosen else directory.find_stage_folders(location)
        if folders:
            saved = _read_stage_folders(location, folders, key)
        else:
            saved, key = _read_stages(location, key, chosen, hints.alike)
        trainer = adjacent_files.read_trainer_state(location)
    for tree, _ in saved:
        join_by_rules(tree, hints.rules)
    first = saved[0][0]
    place = next(iter(folders.values()), location)
    run_of_trainer = trainer_run.read(trainer, f"{location}/{adjacent_files.TRAINER_STATE}")
    root = first.root if isinstance(first.root, dict) else {}
    version = root.get("pytorch-lightning_version")
    framework = provenance.detect_framework(place, first, run_of_trainer)
    versions = {"lightning": str(version)} if isinstance(version, str) else {}
    origin = Origin(
        format=framework,
        path=str(location),
        detail=provenance.describe_files(place),
        versions=versions,
        facts=provenance.describe_framework(framework, versions),
    )
    by_blocks = adjacent_files.is_verl_with_fsdp_1(location)
    model_hint = ModelHint(hints.model, wrap, by_blocks=by_blocks) if hints.model else None
    own_wrap = run_of_trainer.wrap if run_of_trainer and run_of_trainer.is_flat else None
    nearby = adjacent_files.find_model(
        _find_hooked_model(location, root, key) or location, wrap or own_wrap
    )
    if hints.live is not None and not (wrap or own_wrap):
        nearby = ModelHint("the live model", known=hints.live)
    if wrap and not (model_hint or nearby):
        raise UsageError(f"--wrap {wrap}", "has no effect without --model")
    with naming_lost_files(location):
        if len(saved) > 1:
            manifest = join_stages(saved, origin, key, model_hint, world=count_ranks(saved))
        else:
            manifest = assemble.build_manifest(
                first, origin, key=key, model_hint=model_hint, nearby=nearby, warnings=saved[0][1]
            )
    lost = find_lost_files(location) if manifest.unnamed and manifest.unnamed.misfit else ""
    if lost and manifest.unnamed:
        raise IncompleteError(location, f"{lost}: {manifest.unnamed.reason}", FETCH_MISSING)
    train = _complete_train_state(manifest, location, trainer, run_of_trainer)
    if location.chosen:
        return replace(manifest, train=train)
    train = replace(train, rng_files=adjacent_files.list_random_files(location))
    notes = [
        *adjacent_files.describe_recipe(location),
        *directory.describe_stage(location),
        *_describe_missing_optimizer(manifest),
        *torchtune.compare_epochs(manifest),
    ]
    manifest = replace(manifest, train=train, warnings=(*manifest.warnings, *notes))
    torchtune.refuse_numbers(manifest, root)
    manifest = torchtune.name_optimizer(manifest)
    manifest = adjacent_files.add_kept_files(manifest, location)
    models = sum(kind == assemble.ANOTHER for kind in manifest.unread.values()) + 1
    number = sections.parse_number(tuple((key or "").split(".")))
    return adjacent_files.choose_scheduler(manifest, number, models)


def _describe_missing_optimizer(manifest: Manifest) -> list[str]:
    # Source: Accelerate 1.15 ``accelerator.py`` (``save_state``), transformers 5.24 ``trainer.py``
    # (``_save_checkpoint``): both save both of them, or none.
    is_read = manifest.has_optimizer or manifest.unnamed_optimizers or manifest.unnamed
    if is_read or manifest.train.param_groups or not manifest.train.scheduler:
        return []
    if manifest.origin.format not in ("accelerate", "hf-trainer"):
        return []
    return ["a scheduler was saved, but the file of its optimizer is missing"]


def _complete_train_state(
    manifest: Manifest, location: Location, trainer: dict[str, Any], own_run: TrainerRun | None
) -> TrainState:
    # Lightning counts the updates of all optimizers of a module together (2.6.6
    # ``loops/progress.py``, ``training_epoch_loop.py``).
    train = replace(manifest.train, sums_optimizers=manifest.origin.format == "lightning")
    if trainer:
        step = trainer.get("global_step")
        train = replace(
            train,
            step=step if type(step) is int else train.step,
            trainer_state=trainer,
            opaque={**train.opaque, **adjacent_files.read_batch_before(location)},
        )
    if own_run:
        train = own_run.set_counters(train)
    # The name of a directory is the weakest evidence of a step, so it comes last.
    if train.step is None:
        batches = provenance.read_batches(train)
        step = provenance.parse_step(location) if batches is None else batches
        train = replace(train, step=step)
    return train


def _read_stage_folders(
    location: Location, folders: Mapping[int, Location], key: str | None
) -> list[Collected]:
    """Read the folders of pipeline stages; files beside the folders are read with the first."""
    missing = list_missing_ranks(folders, range(max(folders) + 1))
    if missing:
        present = " and ".join(folder.name for folder in folders.values())
        raise IncompleteError(
            location,
            f"contains the pipeline stages {present}, but not stage {', '.join(map(str, missing))}",
            FETCH_MISSING,
        )
    saved = [stage for folder in folders.values() for stage in _read_stages(folder, key, None)[0]]
    for stem, files in group_by_family(directory.find_torch_files(location)).items():
        _add_part(saved[0][0], stem, OpenedRanks.open(files).join(location))
    return saved


def _read_stages(
    location: Location,
    key: str | None,
    chosen: str | None,
    alike: Mapping[str, str] | None = None,
) -> tuple[list[Collected], str | None]:
    """Read what each pipeline stage saved, like `_collect_parts`; one tree without a pipeline.

    The key comes back without the name of a file whose tree became the whole.
    """
    parts_of_model = (
        item
        for item in directory.find_torch_files(location).items()
        if not copied_files.is_accelerates_own(item[0])
    )
    grouped = group_by_family(dict(parts_of_model))
    alone = len(grouped) == 1
    families = {
        stem: OpenedRanks.open(files, alone=alone, alike=alike) for stem, files in grouped.items()
    }
    refuse_copies(families)
    keyed = f"{key or ''}."
    by_key = next((stem for stem in families if keyed.startswith(f"{stem}.")), None)
    given = (stem for stem, files in grouped.items() if chosen in {p.name for p in files.values()})
    families, warnings = _select_checkpoint(
        families, by_key or next(given, None) or _find_newest(location, families)
    )
    stages = find_stages(families.values(), key)
    if not stages:
        collected = _collect_parts(location, families, warnings)
        if key and by_key and by_key not in collected[0].root:
            key = key[len(by_key) + 1 :] or None
        return divide_stages(*collected) if key is None else [collected], key
    by_stage = [
        {stem: files for stem, family in families.items() if (files := family.select(ranks)).files}
        for ranks in stages
    ]
    first = _collect_parts(location, by_stage[0], warnings)
    return [first, *((_read_stage_alone(location, files), []) for files in by_stage[1:])], key


def _select_step(
    families: dict[str, OpenedRanks],
) -> tuple[dict[str, OpenedRanks], list[str]]:
    found = {stem: _OF_STEP.fullmatch(stem) for stem in families}
    steps = {stem: int(match[1]) for stem, match in found.items() if match}
    last = max(steps.values(), default=None)
    is_run = len(steps) == len(families) and len(set(steps.values())) > 1
    others = [stem for stem in families if steps[stem] != last] if is_run else []
    return _leave_out(families, others, "files of other steps")


def _select_checkpoint(
    families: dict[str, OpenedRanks], chosen: str | None
) -> tuple[dict[str, OpenedRanks], list[str]]:
    """Return the selected checkpoint without complete other ones beside it, else the last step."""
    if chosen is None:
        return _select_step(families)
    others = [
        stem
        for stem, files in families.items()
        if stem != chosen and not directory.RANDOM.match(stem) and _is_checkpoint(files)
    ]
    return _leave_out(families, others, "other checkpoints of this directory")


def _leave_out(
    families: dict[str, OpenedRanks], others: list[str], kind: str
) -> tuple[dict[str, OpenedRanks], list[str]]:
    kept = {stem: files for stem, files in families.items() if stem not in others}
    return kept, [f"{kind} were not read: {abridge(others)}"] if others else []


def _find_newest(location: Location, families: Mapping[str, OpenedRanks]) -> str | None:
    # The newest is the one that ``last_checkpoint`` names, else the one that is called the latest
    # (Composer's ``latest-rank0.pt``, open_clip's ``epoch_latest.pt``), else the one of the highest
    # number (``ep1-ba20-rank0.pt``). The best one is older than the latest, or a copy of it.
    if len(families) < 2:
        return None
    pointer = location.files.get(_POINTER)
    if pointer is not None:
        named = read_small_file(pointer, MAX_POINTER).decode(errors="replace").strip()
        stem = PurePath(named).stem
        if stem in families and _is_checkpoint(families[stem]):
            return stem
    names = {stem: stem.removesuffix(".pth") for stem in families}  # of last.pth.tar
    latest = [stem for stem, name in names.items() if _LATEST.fullmatch(name)]
    others = [stem for stem in names if stem not in latest and not (latest and "best" in stem)]
    numbers = {stem: run_directory.parse_number(names[stem]) for stem in others}
    if len(latest) > 1 or None in numbers.values():
        return None
    if not all(map(_is_checkpoint, families.values())):
        return None
    return latest[0] if latest else max(numbers, key=lambda stem: numbers[stem] or 0)


def _is_checkpoint(family: OpenedRanks) -> bool:
    for root in family.trees.values():
        with contextlib.suppress(UnrecognisedError, UsageError):  # no model, or several
            parts = sections.find(root, "")
            return bool(parts.optimizers) or parts.step is not None
    return False


def _read_stage_alone(location: Location, families: Mapping[str, OpenedRanks]) -> ParsedTree:
    """Read a later stage's files; files beside them are the first stage's."""
    stage = ParsedTree({}, str(location), {})
    for stem, files in families.items():
        _add_part(stage, None if len(families) == 1 else stem, files.join(location))
    return stage


def _collect_parts(
    location: Location, families: dict[str, OpenedRanks], warnings: list[str]
) -> Collected:
    whole = ParsedTree({}, str(location), {})
    if dcp.detect(location):
        _add_part(whole, None, reader.read(location))
    if any(map(dcp.is_hf_shard, location.files)):
        _add_part(whole, None, hf_shards.read(location))
    parts, adapted = find_dcp_parts(location), location
    for name, folder in parts.items():
        # NeMo Automodel 0.7 saves ``model`` as shards for Hugging Face, and ``optim`` as items.
        if dcp.ADAPTER in folder.files:
            adapter = _read_safetensors(folder, folder.files[dcp.ADAPTER])
            # Automodel's optimizer has the names of the model, to which PEFT adds a prefix.
            adapter.root = {fqn.removeprefix(ROOT): leaf for fqn, leaf in adapter.root.items()}
            _add_part(whole, copied_files.ADAPTER, adapter)
            adapted = folder
            continue
        with _naming_weights(parts, name):
            part = reader.read(folder) if dcp.detect(folder) else hf_shards.read(folder)
        _add_part(whole, name, part)
    if _EXTRA_STATE in location.folders and dcp.detect(location):
        _add_extra_state(whole, location.folders[_EXTRA_STATE])
    _add_items(whole, location)
    weights = _find_safetensors(location, whole.files)
    # torch_xla's shards state which parameters the optimizer's are; the Trainer also saves a copy.
    saved = families.get("pytorch_model")
    by_rank = saved is not None and len(saved.files) > 1
    # Two copies of a model would need a --key to choose between them, so only one is read.
    if "model" in weights and saved is not None and not by_rank:
        del families["pytorch_model"]
        warnings.append(_COPY.format("pytorch_model.bin", "the safetensors beside it"))
    for stem, files in families.items():
        alone = len(families) == 1 and not whole.root and not weights
        _add_part(whole, None if alone else stem, files.join(location))
    sharded = any(name.startswith("pytorch_model_fsdp") for name in (*families, *location.folders))
    for stem, path in weights.items():
        if (sharded or by_rank) and stem in ("model", copied_files.ADAPTER):
            copied = "the ranks' pytorch_model.bin" if by_rank else "pytorch_model_fsdp*"
            warnings.append(_COPY.format(path.name, copied))
        else:
            _add_part(whole, stem, _read_safetensors(location, path))
    whole.saved_modules = _read_saved_modules(adapted)
    whole.modules = sentence_modules.list_files(location.directories[0])
    _add_adapters(whole, location, warnings)
    _add_hooked_models(whole, location)
    read = {*map(str, weights.values()), *whole.files}
    return whole, [*warnings, *_describe_others(location, read)]


@contextlib.contextmanager
def _naming_weights(parts: Mapping[str, Location], name: str) -> Iterator[None]:
    try:
        yield
    except (IncompleteError, CorruptError) as error:
        weights = [folder for part, folder in parts.items() if not is_optimizer_folder(part)]
        if is_optimizer_folder(name) and len(weights) == 1:
            error.remedy += f"; or read only the weights: --from torch {weights[0]}"
        raise


def _add_extra_state(whole: ParsedTree, folder: Location) -> None:
    """Add the scheduler, counters and random states that VeOmni saves beside DCP's files."""
    for stem, files in group_by_family(directory.find_torch_files(folder)).items():
        _add_part(whole, stem, OpenedRanks.open(files).join(folder))


def _add_items(whole: ParsedTree, location: Location) -> None:
    for name, part in torch_checkpointing.read_items(location).items():
        _add_part(whole, name, part)


def _add_part(whole: ParsedTree, name: str | None, part: ParsedTree) -> None:
    added = (
        part.root if name is None and isinstance(part.root, dict) else {name or "state": part.root}
    )
    twice = whole.root.keys() & added.keys()
    if twice:
        raise UnrecognisedError(
            whole.where,
            f"contains two parts called {min(map(str, twice))!r}, and no file states which one to"
            " read",
            "pass the path of one of them, or move the other away",
        )
    whole.root.update(added)
    whole.files.update(part.files)
    whole.globals |= part.globals
    whole.world = max(whole.world, part.world)
    prefix = () if name is None else (name,)
    whole.differing |= {(*prefix, *path): found for path, found in part.differing.items()}
    whole.notes += part.notes
    whole.proved = whole.proved and part.proved
    whole.ordered = whole.ordered and part.ordered
    whole.plain_is_buffer = whole.plain_is_buffer and part.plain_is_buffer


def _add_adapters(whole: ParsedTree, location: Location, warnings: list[str]) -> None:
    # PEFT saves each adapter into a folder of its name. Source: PEFT 0.21 ``peft_model.py``
    # (``save_pretrained``).
    has_weights = _has_model(whole)
    joined = ParsedTree({}, whole.where, {}, plain_is_buffer=False, ordered=False)
    for name, folder in location.folders.items():
        path = folder.files.get(f"{copied_files.ADAPTER}.safetensors")
        if path is None or _ADAPTER_CONFIG not in folder.files:
            continue
        if has_weights:
            is_copy = f"{name} is assumed to be a copy of the adapter, and is not read"
            another = f"{name} is another adapter, which was not read"
            warnings.append(is_copy if name == VERL else another)
            continue
        tree = _read_safetensors(folder, path)
        modules = _read_saved_modules(folder)
        tree.root = {name_in_model(fqn, name, modules): leaf for fqn, leaf in tree.root.items()}
        _add_part(joined, None, tree)
    if joined.root:
        _add_part(whole, copied_files.ADAPTER, joined)


def _add_hooked_models(whole: ParsedTree, location: Location) -> None:
    if _has_model(whole):
        return
    for name, folder in copied_files.find_hooked_models(location).items():
        if huggingface.detect(folder):
            _add_part(whole, name, _read_safetensors(folder))
    lora = location.files.get(copied_files.LORA)
    if lora is not None:
        adapter = _read_safetensors(location, lora)
        adapter.root = rename_from_diffusers(adapter.root)
        _add_part(whole, copied_files.ADAPTER, adapter)


def _find_hooked_model(
    location: Location, root: Mapping[str, Any], key: str | None
) -> Location | None:
    hooked = copied_files.find_hooked_models(location)
    read = [key] if key else sections.list_trained(hooked.keys() & root.keys())
    return hooked.get(read[0]) if len(read) == 1 else None


def _has_model(whole: ParsedTree) -> bool:
    with contextlib.suppress(UnrecognisedError, UsageError):  # no model, or several
        return bool(sections.find(whole.root, "").model)
    return False


def _read_saved_modules(location: Location) -> tuple[str, ...]:
    path = location.files.get(_ADAPTER_CONFIG)
    listed = read_json_object(path).get("modules_to_save") if path else None
    return tuple(filter(None, map(str, listed))) if isinstance(listed, list) else ()


def _find_safetensors(location: Location, read: Container[str]) -> dict[str, Path]:
    weights = {
        Path(name).stem: path
        for name, path in location.files.items()
        if _WEIGHTS.fullmatch(name) and str(path) not in read
    }
    index = huggingface.find_index(location)
    if "model" not in weights and index:
        weights["model"] = location.files[index]
    return weights


def _describe_others(location: Location, read: Container[str]) -> list[str]:
    """Return a warning if there are weights beside the model's, as LLaMA-Factory's value head."""
    others = [
        name
        for name, path in location.files.items()
        if path.suffix == ".safetensors"
        and str(path) not in read
        and not huggingface.is_shard(name)
        and not dcp.is_hf_shard(name)
    ]
    return [of_huggingface.OTHERS.format(abridge(sorted(others)))] if others else []


def _read_safetensors(location: Location, path: Path | None = None) -> ParsedTree:
    if path is not None:
        others = (folder for folder in location.directories if folder != path.parent)
        location = Location([path.parent, *others], path.name)
    manifest = of_huggingface.read(location)
    state = {
        e.fqn: GlobalTensor(e.dtype, e.shape, tuple(e.chunks)) for e in manifest.entries.values()
    }
    return ParsedTree(
        state, str(location), dict(manifest.files), plain_is_buffer=False, ordered=False
    )
