"""Keep the global batch at another number of ranks: micro batch x accumulation x ranks.

No file sets all three. DeepSpeed and HF Trainer take them from the program's configuration and
arguments (transformers before 5.2 takes the micro batch from ``trainer_state.json``), so the notes
state what to pass. The positions in the data that each rank saved fit no other number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.containers import torch_reader
from reshard.containers.pickles.values import Call
from reshard.core.location import get_directory
from reshard.core.manifest import Manifest
from reshard.errors import CorruptError, UnsupportedError
from reshard.layouts.model_parallel.sizes import parse_mesh
from reshard.training import trainer_run
from reshard.training.companion_files import BATCH_BEFORE
from reshard.training.trainer_run import TrainerRun
from reshard.units import abridge, counted, either, find_nearest_divisors

BATCH = "train_batch_size"  # of one rank, in HF Trainer's trainer_state.json
WORLD = "world_size"
STEPS = "gradient_accumulation_steps"  # of DeepSpeed's configuration, and of the Trainer
# Other keys of DeepSpeed's configuration; the first one is that of all ranks.
_TOTAL = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_DATA_PARALLEL = "data_parallel_size"  # beside sequence_parallel_size, if DeepSpeed makes the mesh
_ARGUMENTS = "training_args.bin"
_SHARING = ("tp_size", "cp_size", "sp_size")  # of ranks that share their samples


class Batch(NamedTuple):
    """The batch of an update.

    Args:
        micro: samples of one rank in one forward pass.
        steps: forward passes of an update; None if no file states their number.
        ranks: ranks that have samples of their own.
    """

    micro: int
    steps: int | None
    ranks: int

    @property
    def total(self) -> int:
        """The samples of all ranks in an update, or in one pass if their number is unknown."""
        return self.micro * self.ranks * (self.steps or 1)


class LiveBatch(NamedTuple):
    """The batch of a running program.

    Args:
        reads_file: whether HF Trainer takes the micro batch from ``trainer_state.json`` instead.
    """

    batch: Batch
    reads_file: bool = False


class Rebalanced(NamedTuple):
    """The run with another batch of a rank, and notes about it for the user."""

    manifest: Manifest
    derived: list[str]
    warnings: list[str]


class _Stated(NamedTuple):
    """What the files of a run state about its batch.

    Args:
        sharing: ranks that share their samples.
        arguments: what HF Trainer's ``training_args.bin`` has; empty for other programs.
        warnings: files that could not be read.
    """

    batch: Batch
    sharing: int
    arguments: Mapping[str, Any]
    warnings: list[str]


def rebalance_batch(
    manifest: Manifest, world_size: int, live: LiveBatch | None = None
) -> Rebalanced:
    """Return the run with the micro batch that keeps the global batch, and notes on it.

    The accumulation stays if it can, because the Trainer takes it from its arguments alone. Our
    trainer derives the accumulation from the global batch when it resumes. For runs that do not
    state their batch, the note states the rule.

    Args:
        world_size: the new number of data-parallel ranks.
        live: the batch of the running program that loads the output.
    """
    before = manifest.origin.world // parse_mesh(manifest.origin.mesh).model
    run = trainer_run.read(manifest.train.trainer_state, manifest.origin.path)
    same = Rebalanced(manifest, [], [])
    if run is not None:
        if problem := _find_problem_of_our_trainer(run, world_size):
            return Rebalanced(manifest, [], [problem])
        has_batch = find_config_batch(manifest.train.config, before) is not None
        is_changed = before != world_size and has_batch
        return _rebalance_our_trainer(manifest, run, world_size) if is_changed else same
    stated = _find_batch(manifest, before)
    if stated is not None:
        before = stated.batch.ranks * stated.sharing
    if before == world_size and (stated is None or live is None):
        return same
    if stated is None:
        origin = manifest.origin
        is_stated = origin.world == 1 or any(axis != "world" for axis in origin.mesh)
        return Rebalanced(manifest, [_describe_rule(before, world_size, is_stated=is_stated)], [])
    if stated.arguments.get("split_batches"):
        return _describe_split_batches(manifest, stated.batch.micro, world_size)
    if live is not None:
        found = _follow_live(manifest, stated.batch, live)
    elif world_size % stated.sharing:
        found = Rebalanced(manifest, [], [_describe_sharing(stated, world_size)])
    else:
        found = _rebalance(manifest, stated, world_size // stated.sharing)
    return found._replace(warnings=[*stated.warnings, *found.warnings])


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_hf_trainers(manifest: Manifest) -> bool:
    progress = manifest.train.trainer_state
    is_ours = trainer_run.is_document(progress)
    return progress is not None and not is_ours and _is_count(progress.get(BATCH))


# What the files state


def _find_batch(manifest: Manifest, ranks: int) -> _Stated | None:
    stated = find_config_batch(manifest.train.config, ranks)
    if not _is_hf_trainers(manifest):
        return None if stated is None else _Stated(*stated, {}, [])
    arguments, warnings = _read_arguments(manifest)
    own = manifest.train.opaque.get(BATCH_BEFORE, {})
    micro = (manifest.train.trainer_state or {})[BATCH]
    if stated is not None:
        (_, steps, ranks), sharing = stated
    else:
        # Files of DDP do not always state their number of ranks.
        ranks = arguments.get("num_processes", ranks)
        sharing = arguments.get("sharing", 1)
        sharing = 1 if ranks % sharing else sharing
        ranks, steps = ranks // sharing, None
    if STEPS in arguments:
        steps = arguments[STEPS]
    elif steps is None and STEPS in own:
        steps = own[BATCH] * own[WORLD] * own[STEPS] // (micro * ranks) or None
    return _Stated(Batch(micro, steps, ranks), sharing, arguments, warnings)


def find_config_batch(config: Any, ranks: int) -> tuple[Batch, int] | None:
    """Return the batch in DeepSpeed's configuration, and how many ranks share each sequence.

    What is not stated is derived as DeepSpeed derives it (0.19.8 ``runtime/config.py``,
    ``_set_batch_related_parameters``). Sequence-parallel ranks (Ulysses) share their sequences.
    ZeRO partitions the optimizer over them too, but the global batch does not count them.

    >>> find_config_batch({_TOTAL: 8, _MICRO: 2, STEPS: 2}, 4)
    (Batch(micro=2, steps=2, ranks=2), 2)
    >>> find_config_batch({_TOTAL: 24, _MICRO: 2}, 4)
    (Batch(micro=2, steps=3, ranks=4), 1)
    """
    if not isinstance(config, dict):
        return None
    total, micro, steps = (config.get(name) for name in (_TOTAL, _MICRO, STEPS))
    if any(value is not None and not _is_count(value) for value in (total, micro, steps)):
        return None  # a user's may have "auto"
    if total is None:
        return (Batch(micro, steps or 1, ranks), 1) if micro else None
    if micro is None:
        micro, steps = total // ranks // (steps or 1), steps or 1
    steps = steps or max(total // micro // ranks, 1) if micro else None
    if not steps:
        return None
    sharing, rest = divmod(micro * steps * ranks, total)
    if rest or ranks % sharing:
        sharing = 1
    return Batch(micro, steps, ranks // sharing), sharing


def _read_arguments(manifest: Manifest) -> tuple[dict[str, Any], list[str]]:
    # Source: transformers 5.24 ``trainer.py`` (``_save``); ``training_args.py``: the attributes of
    # the pickled object. Under FSDP with sharded files, the Trainer does not save it.
    folder = get_directory(manifest.origin.path)
    if not (folder / "trainer_state.json").is_file():  # DeepSpeed's folder is in the checkpoint's
        folder = folder.parent
    path = folder / _ARGUMENTS
    if not path.is_file():
        return {}, []
    try:
        root = torch_reader.read(path).root
    except (CorruptError, UnsupportedError) as error:
        return {}, [f"{error.where} was not read: {error.problem}"]
    if not isinstance(root, Call):
        return {}, []
    split = _get_attribute(root, "accelerator_config", "split_batches")
    sizes = [_get_attribute(root, "parallelism_config", name) for name in _SHARING]
    known = {
        STEPS: root.get(STEPS),
        "num_processes": _get_attribute(root, "distributed_state", "num_processes"),
        "steps_per_generation": root.get("steps_per_generation"),
        "sharing": math.prod(size for size in sizes if _is_count(size)),
    }
    arguments: dict[str, Any] = {name: n for name, n in known.items() if _is_count(n)}
    arguments["split_batches"] = split is True
    arguments["auto_find_batch_size"] = root.get("auto_find_batch_size") is True
    return arguments, []


def _get_attribute(arguments: Call, name: str, attribute: str) -> Any:
    part = arguments.get(name)
    return part.get(attribute) if isinstance(part, Call) else None


# The batch at another number of ranks


def choose_batch(batch: Batch, ranks: int) -> Batch | None:
    """Return the batch with the same total on other ranks; None if there is none.

    >>> choose_batch(Batch(3, 1, 2), 1), choose_batch(Batch(1, 3, 2), 3)
    (Batch(micro=6, steps=1, ranks=1), Batch(micro=1, steps=2, ranks=3))
    >>> choose_batch(Batch(1, 3, 2), 4)
    """
    micro, rest = divmod(batch.micro * batch.ranks, ranks)
    if not rest:
        return Batch(micro, batch.steps, ranks)
    return _choose_smaller(batch, ranks)


def _choose_smaller(batch: Batch, ranks: int) -> Batch | None:
    if batch.steps is None:
        return None
    micro = find_micro_batch(batch.micro, batch.total, ranks)
    return None if micro is None else Batch(micro, batch.total // (micro * ranks), ranks)


def find_micro_batch(most: int, total: int, ranks: int) -> int | None:
    """Return the largest batch of a rank, up to ``most``, of which whole steps make the total."""
    return next((n for n in range(most, 0, -1) if total % (n * ranks) == 0), None)


def _rebalance(manifest: Manifest, stated: _Stated, ranks: int) -> Rebalanced:
    batch, is_trainers = stated.batch, _is_hf_trainers(manifest)
    own = manifest.train.opaque.get(BATCH_BEFORE)
    if own is None:
        own = {WORLD: batch.ranks, BATCH: batch.micro}
        own |= {} if batch.steps is None else {STEPS: batch.steps}
    chosen = _choose_own(own, batch, ranks)
    chosen = chosen or (choose_batch if is_trainers else _choose_smaller)(batch, ranks)
    warnings = []
    if chosen is None and batch.steps is None:
        return Rebalanced(_record_own(manifest, own), [], [_describe_rule(batch.ranks, ranks)])
    if chosen is None:
        # No micro batch divides the global batch: come as close to it as the accumulation can.
        steps = max(1, round(batch.total / (batch.micro * ranks)))
        chosen = Batch(batch.micro, steps, ranks)
        warnings = [_describe_nearest(batch, chosen, is_trainers=is_trainers)]
    elif is_trainers:
        is_read = chosen.steps == batch.steps and stated.arguments.get("auto_find_batch_size")
        warnings = [] if is_read else [_describe_arguments(stated, chosen)]
    # At the run's own number of ranks, the record is no longer needed.
    manifest = _record_own(manifest, None if own[WORLD] == ranks else own)
    manifest = _with_progress(_with_config(manifest, chosen), chosen.micro)
    changes = _describe_changes(batch, chosen, is_trainers=is_trainers)
    if changes and is_trainers:
        kept = ", which the Trainer reads (auto_find_batch_size)" if not warnings else ""
        changes = f"trainer_state.json: {changes}{kept}"
    elif changes and not warnings:
        changes += (
            f" keeps the global batch of {batch.total}, if the configuration of the new run has it"
        )
    return Rebalanced(manifest, [changes] if changes else [], warnings)


def _describe_changes(batch: Batch, chosen: Batch, *, is_trainers: bool) -> str:
    names = (BATCH,) if is_trainers else (_MICRO, STEPS)
    pairs = zip(names, batch, chosen, strict=False)
    return ", ".join(f"{name} {old} -> {now}" for name, old, now in pairs if old != now)


def _choose_own(own: Mapping[str, int], batch: Batch, ranks: int) -> Batch | None:
    if own[WORLD] == ranks and batch.steps is None and own[BATCH] == batch.micro:
        return Batch(batch.micro, None, ranks)  # it was kept, because no other one fitted
    steps, rest = divmod(batch.total, own[BATCH] * ranks)
    if own[WORLD] != ranks or rest or (batch.steps is None and steps != 1):
        return None
    return Batch(own[BATCH], batch.steps and steps, ranks)


def _describe_arguments(stated: _Stated, chosen: Batch) -> str:
    batch, unit = stated.batch, "" if stated.batch.steps else f" x {STEPS}"
    reached = batch._replace(ranks=chosen.ranks).total
    text = (
        f"to keep the global batch of {batch.total}{unit}, pass {_name_arguments(chosen)} to the"
        f" Trainer; with the arguments of the source it is {reached}{unit} (transformers 5.2 and"
        f" later takes {BATCH} from trainer_state.json only with auto_find_batch_size, and TRL's"
        " GRPO needs the arguments in any version)"
    )
    generation = stated.arguments.get("steps_per_generation")
    if generation and chosen.steps != batch.steps:
        samples = generation * batch.micro * batch.ranks
        passes, rest = divmod(samples, chosen.micro * chosen.ranks)
        if not rest:
            text += f". If you set steps_per_generation, set it to {passes}"
    smaller = _choose_smaller(batch, chosen.ranks)
    if smaller is not None and smaller.micro < chosen.micro:
        text += (
            f". If {chosen.micro} samples of a rank do not fit into memory, pass {smaller.micro}"
            f" and {smaller.steps}, and set {BATCH} to {smaller.micro} in trainer_state.json"
        )
    return text


def _name_arguments(batch: Batch) -> str:
    steps = f"the {STEPS} of the source" if batch.steps is None else f"{STEPS} {batch.steps}"
    return f"per_device_train_batch_size {batch.micro} and {steps}"


def _follow_live(manifest: Manifest, batch: Batch, running: LiveBatch) -> Rebalanced:
    live, is_trainers = running.batch, _is_hf_trainers(manifest)
    if batch.steps is None:
        micro, wrong = live.micro, live.total % batch.total != 0
        text = (
            f"no file states the {STEPS} of the run: its global batch was {batch.total} x {STEPS},"
            f" and that of the Trainer is {live.total}"
        )
        # With the same samples in a pass, the Trainer is assumed to accumulate as before.
        is_told = live.micro * live.ranks != batch.micro * batch.ranks
    else:
        micro, rest = divmod(batch.total, live.ranks * (live.steps or 1))
        micro = live.micro if rest else micro
        if running.reads_file and is_trainers:
            live = live._replace(micro=micro)
        text = _describe_live(batch, live, is_trainers=is_trainers)
        is_told = wrong = live.total != batch.total
    notes = [text] if is_told else []
    manifest = _with_progress(manifest, micro)
    return Rebalanced(manifest, [] if wrong else notes, notes if wrong else [])


def _describe_live(batch: Batch, live: Batch, *, is_trainers: bool) -> str:
    chosen = choose_batch(batch, live.ranks)
    text = f"the global batch of the run was {batch.total}, and is {live.total} in this program"
    if chosen is None:
        return f"{text}; {describe_misfit(batch.total, 1, live.ranks)}"
    if is_trainers:
        return f"{text}: pass {_name_arguments(chosen)} to keep it"
    return f"{text}: set {_MICRO} {chosen.micro} and {STEPS} {chosen.steps} to keep it"


def _describe_nearest(batch: Batch, chosen: Batch, *, is_trainers: bool) -> str:
    misfit = describe_misfit(batch.total, 1 if is_trainers else batch.micro, chosen.ranks)
    if is_trainers:
        return f"{misfit}; with {_name_arguments(chosen)} it is {chosen.total}"
    return f"{misfit}; the configuration written has a global batch of {chosen.total}"


def describe_misfit(total: int, micro: int, ranks: int) -> str:
    """Describe why a global batch does not fit, and which batches and numbers of ranks do.

    >>> describe_misfit(12, 1, 5)  # doctest: +ELLIPSIS
    'a global batch of 12 is not divisible by 5 ranks x micro batch 1; use 10 or 15, or 2, 3, ...'
    >>> describe_misfit(7, 2, 2)
    'a global batch of 7 is not divisible by 2 ranks x micro batch 2; use 4 or 8'
    """
    unit = micro * ranks
    below = total // unit * unit
    ways = either([batch for batch in (below, below + unit) if batch])
    if total % micro == 0:
        sizes = find_nearest_divisors(total // micro, ranks)
        ways += f", or {either(sizes)} {'rank' if sizes == [1] else 'ranks'}"
    factors = f"{counted(ranks, 'rank')} x micro batch {micro}"
    return f"a global batch of {total} is not divisible by {factors}; use {ways}"


def _describe_rule(before: int, ranks: int, *, is_stated: bool = True) -> str:
    # Without a stated mesh, tensor-parallel ranks count as data-parallel ones.
    if not is_stated:
        return (
            f"the number of ranks changes from {before} to {ranks}; to keep the global batch, keep"
            " data-parallel ranks x micro batch x accumulation steps (all ranks are data-parallel,"
            " unless the run has tensor, pipeline or context parallelism)"
        )
    changed = f"the data-parallel size changes from {before} to {ranks}"
    if before % ranks == 0:
        times = f"multiply the accumulation steps by {before // ranks}"
        return f"{changed}; to keep the global batch, {times}"
    factors = f"({counted(ranks, 'rank')} x micro batch)"
    return (
        f"{changed}; to keep the global batch, set the accumulation steps to global batch /"
        f" {factors}. If that is not an integer, change the micro batch or the global batch"
    )


def _describe_sharing(stated: _Stated, world_size: int) -> str:
    size = stated.sharing
    return (
        f"{size} ranks of the run share each sequence (a global batch of {stated.batch.total} on"
        f" {counted(stated.batch.ranks * size, 'rank')}), and {counted(world_size, 'rank')} cannot"
        f" be divided by {size}; set the batch and the sequence parallelism"
    )


def _describe_split_batches(manifest: Manifest, total: int, ranks: int) -> Rebalanced:
    """Return the run as it is: Accelerate's ``split_batches`` divides each batch over the ranks."""
    if total % ranks == 0:
        return Rebalanced(manifest, [], [])
    misfit = describe_misfit(total, 1, ranks)
    return Rebalanced(manifest, [], [f"{misfit} (accelerator_config: split_batches)"])


# Our trainer


def _find_problem_of_our_trainer(run: TrainerRun, ranks: int) -> str:
    # With its canonical reduction, some ranks may have no micro batch in the last round of a step.
    if run.settings.get("reduction") == "canonical":
        ranks = 1
    total, micro = (int(run.settings[name]) for name in ("global_batch", "micro_batch"))
    return describe_misfit(total, micro, ranks) if micro and total % (micro * ranks) else ""


def _rebalance_our_trainer(manifest: Manifest, run: TrainerRun, world_size: int) -> Rebalanced:
    total, micro = (run.settings[name] for name in ("global_batch", "micro_batch"))
    config = manifest.train.config
    before, steps = config.get(STEPS, 1), -(-total // (max(1, micro) * world_size))
    changed = {**config, _MICRO: micro, STEPS: steps, _TOTAL: total}
    note = f"{STEPS} {before} -> {steps}: the global batch stays {total}"
    train = replace(manifest.train, config=changed)
    return Rebalanced(replace(manifest, train=train), [note] if steps != before else [], [])


# Changes of the files


def _record_own(manifest: Manifest, own: Any) -> Manifest:
    # Only HF Trainer's directory has a place for the record.
    opaque = {key: value for key, value in manifest.train.opaque.items() if key != BATCH_BEFORE}
    if own and _is_hf_trainers(manifest):
        opaque[BATCH_BEFORE] = own
    return replace(manifest, train=replace(manifest.train, opaque=opaque))


def _with_config(manifest: Manifest, batch: Batch) -> Manifest:
    config = manifest.train.config
    if find_config_batch(config, batch.ranks) is None:
        return manifest
    changed = {**config, _MICRO: batch.micro, STEPS: batch.steps, _TOTAL: batch.total}
    if _DATA_PARALLEL in config:
        changed[_DATA_PARALLEL] = batch.ranks
    return replace(manifest, train=replace(manifest.train, config=changed))


def _with_progress(manifest: Manifest, micro: int) -> Manifest:
    train = manifest.train
    if not _is_hf_trainers(manifest):
        return manifest
    changed = {**(train.trainer_state or {}), BATCH: micro}
    return replace(manifest, train=replace(train, trainer_state=changed))


# torchtitan 0.3 ``components/dataloader.py`` (``ParallelAwareDataloader.state_dict``): a key
# ``dp_rank_N`` for each data-parallel rank.
_OF_RANK = re.compile(r"(?:dp_?)?rank[-_]?\d+")


def describe_positions(manifest: Manifest, ranks: int) -> Iterator[str]:
    """Yield a warning for each value of the run that has a part for each of its own ranks.

    Args:
        ranks: number of ranks of the output; nothing is yielded if the source has as many.
    """
    if manifest.origin.world == ranks:
        return
    for name, value in manifest.train.client.items():
        parts = [str(key) for key in value] if isinstance(value, Mapping) else []
        parts = [key for key in parts if _OF_RANK.fullmatch(key)]
        if parts:
            yield (
                f"{name} has a state for each of {counted(len(parts), 'rank')} ({abridge(parts)}),"
                f" which fit no other number: a run of {counted(ranks, 'rank')} has to start its"
                " data loader anew (torchtitan: exclude_from_loading), and repeats or skips samples"
            )
