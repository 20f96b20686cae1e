"""Known defects of engines that load checkpoints: what they lose of files that are correct.

`split`, `verify` and `resume-check` consult this table. A row is reported if the engine loads a
checkpoint of this form wrongly, or goes on from it in another way than from the source. Files
seldom state which version will load them: a row without ``fixed`` is always reported, a row with
it only if an older version is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from reshard.core.manifest import Manifest, Origin
from reshard.formats.target_options import FsdpVersion

# Formats whose files of FSDP are loaded by Accelerate's functions.
_BY_ACCELERATE = ("accelerate", "fsdp", "hf-trainer")


_UNSCALED_SINCE = (0, 18, 3)  # DeepSpeed's versions that do not scale the loss at stage 0


@dataclass(frozen=True, slots=True)
class LoadedForm:
    """The properties of a checkpoint that decide whether an engine loads it.

    Args:
        format: the name of the format, or of the target.
        has_optimizer: whether there is any optimizer state to lose.
        fsdp: version of FSDP in the program that loads it; None if that is unknown.
        source: the checkpoint whose optimizer state it has; None if it is not an output.
        zero_stage: stage of DeepSpeed's optimizer that loads it; None without DeepSpeed.
        precision: torch's name of the dtype of the module's parameters.
    """

    format: str
    names: Sequence[str]
    has_optimizer: bool
    fsdp: FsdpVersion | None = None
    source: Origin | None = None
    zero_stage: int | None = None
    precision: str = ""


def describe_form(manifest: Manifest) -> LoadedForm:
    """Return the form of a checkpoint that was read."""
    return LoadedForm(manifest.origin.format, tuple(manifest.files), manifest.has_optimizer)


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect.

    Args:
        checked: the versions in which it was seen.
        fixed: the first version known to be without it; empty if there is none.
        concerns: whether a form of checkpoint is affected.
        source: the place in the engine, or the run that showed the defect.
        fsdp: the only version of FSDP under which it occurs; None if it occurs without one.
    """

    engine: str
    checked: str
    concerns: Callable[[LoadedForm], bool]
    effect: str
    remedy: str
    source: str
    fixed: str = ""
    fsdp: FsdpVersion | None = None

    def text(self) -> str:
        """Return one line for a report."""
        return f"{self.engine} ({self.checked} checked): {self.effect}; {self.remedy}"


def describe_defects(form: LoadedForm) -> list[str]:
    """Return notes about the defects that concern a checkpoint of that form."""
    return [row.text() for row in TABLE if row.concerns(form) and _may_load(row, form)]


def _may_load(row: Defect, form: LoadedForm) -> bool:
    if row.fsdp and form.fsdp and row.fsdp != form.fsdp:
        return False
    if not row.fixed:
        return True
    from importlib import metadata  # it imports `email` and `socket`

    try:
        return _parse_version(metadata.version(row.engine)) < _parse_version(row.fixed)
    except metadata.PackageNotFoundError:
        return False


def _parse_version(version: str) -> tuple[int, ...]:
    release, _, _ = version.partition("+")
    return tuple(int(part) for part in release.split(".") if part.isdecimal())


def _list_folders(names: Iterable[str]) -> set[str]:
    return {PurePath(name).parent.name for name in names}


def _is_dcp_of_fsdp(form: LoadedForm) -> bool:
    by_accelerate = form.format in _BY_ACCELERATE and form.has_optimizer
    return by_accelerate and "optimizer_0" in _list_folders(form.names)


def _is_local(form: LoadedForm) -> bool:
    """Return whether there are flat shards of LOCAL_STATE_DICT under Accelerate's names."""
    return any(PurePath(name).name.startswith("pytorch_model_fsdp_rank") for name in form.names)


def _changes_scale_of_moments(form: LoadedForm) -> bool:
    if form.source is None or not form.has_optimizer:
        return False
    of_source = form.source.zero_stage == 0 and form.source.precision == "float16"
    version = form.source.versions.get("deepspeed", "")
    if of_source and version and _parse_version(version) < _UNSCALED_SINCE:
        return False
    return of_source != (form.zero_stage == 0 and form.precision == "float16")


TABLE = (
    Defect(
        engine="accelerate",
        checked="1.12.0, 1.15.0",
        concerns=lambda form: _is_dcp_of_fsdp(form) and not _is_local(form),
        fsdp=1,
        effect="under FSDP 1 (fsdp_version=1) load_state and the Trainer's resume restore no Adam"
        " state from a sharded directory, not even from one that they saved, and report nothing",
        remedy="resume it with FSDP 2, or write --state-dict-type full, which FSDP 1 restores",
        source="utils/fsdp_utils.py, load_fsdp_optimizer: FSDP.optim_state_dict of an optimizer"
        " that has made no step is empty, so DCP loads nothing into it; run at 2 ranks:"
        " tests/judged/test_accelerate.py",
    ),
    Defect(
        engine="accelerate",
        checked="1.12.0",
        fixed="1.15.0",
        concerns=lambda form: _is_dcp_of_fsdp(form) and not _is_local(form),
        fsdp=2,
        effect="under FSDP 2 load_state restores no Adam state from a sharded directory either",
        remedy="use accelerate 1.15 or write --state-dict-type full",
        source="run at 2 ranks",
    ),
    Defect(
        engine="accelerate",
        checked="1.15.0",
        concerns=_is_local,
        effect="load_state refuses the files of LOCAL_STATE_DICT, also those that it saved: it"
        " opens them with weights_only=True, which rejects ShardedTensor",
        remedy="write --state-dict-type full, or sharded for FSDP 2",
        source="utils/fsdp_utils.py, load_fsdp_model; tests/judged/test_accelerate.py",
    ),
    Defect(
        engine="deepspeed",
        checked="0.18.3, 0.19.8",
        concerns=_changes_scale_of_moments,
        effect="in fp16 at stage 0, engine.backward does not multiply the loss by the loss scale,"
        " by which the optimizer divides the gradients, so that moments of this stage are smaller"
        " than those of the others: the next updates differ from those of the unbroken run",
        remedy="keep the stage, or begin with a new Adam: --init-optimizer zeros",
        source="runtime/engine.py, backward: isinstance(self.optimizer, ZeROOptimizer);"
        " tests/judged/test_split_deepspeed.py",
    ),
)
