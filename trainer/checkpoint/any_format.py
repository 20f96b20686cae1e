"""Read a checkpoint of any format that ``reshard`` reads, at any number of ranks.

``reshard split`` would write a copy of it in this run's layout. Here each rank reads its own part
of that copy while ``reshard`` computes the bytes, and nothing is written. ``reshard`` is imported
only for that: files of the same layout and the same ranks are read without it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.checkpoint import directory, state
from trainer.checkpoint.deepspeed import make_basic_config
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.model import build_model
from trainer.core.model_config import load_model_config
from trainer.core.optimizer import make_hyperparameters, make_param_groups
from trainer.settings import Settings

if TYPE_CHECKING:
    from reshard.commands.split.options import SplitOptions
    from reshard.engine.move.on_demand import OnDemandFiles
    from reshard.errors import ReshardError
    from reshard.live.files import LiveFiles


@dataclass(frozen=True)
class Converted:
    """A checkpoint in this run's layout, which is on no disk.

    Attributes:
        folder: a directory with the names of the files, for the run's own reader.
        progress: fields of `Progress` that the source records; empty if it records no step.
        dropped: the parts of the source that this run does not use, for the user.
    """

    folder: Path
    progress: dict[str, int]
    dropped: tuple[str, ...]


@contextmanager
def open_converted(
    checkpoint: Path, settings: Settings, unread: LayoutError
) -> Iterator[Converted]:
    """Open a checkpoint of any format in the layout that this run reads; every rank must call it.

    If it is not recognized, the error is ``unread``, of the run's own reader.

    Raises:
        CheckpointError: on every rank; the checkpoint is not recognized, damaged, or does not fit.
    """
    from reshard.errors import ReshardError, UnrecognisedError
    from reshard.formats.request import LiveTarget
    from reshard.live.files import create_names, open_live_files
    from reshard.live.patched_loads import patch_loads
    from reshard.model import shapes_of

    try:
        with ExitStack() as opened:
            model = build_model(settings, meta=True)
            options = opened.enter_context(_make_options(checkpoint, settings, model))
            config = _make_config(settings) if settings.layout == "DeepSpeed" else None
            target = LiveTarget(shapes=shapes_of(model), config=config)
            live = opened.enter_context(open_live_files(checkpoint, options, target))
            folder = opened.enter_context(create_names(live.files))
            opened.enter_context(patch_loads(live.files, folder, _load))
            written = directory.find_checkpoint(folder, None)
            yield Converted(
                written, _read_progress(live, settings), tuple(live.planned.report.dropped)
            )
    except UnrecognisedError as error:
        raise CheckpointError(unread.problem, unread.remedy) from error
    except ReshardError as error:
        raise _make_error(error) from error


_models: list[nn.Module] = []
"""The model of the run, without values, while its source is open."""


def get_model() -> nn.Module:
    """Return the model: ``reshard`` calls it as a user's function that builds the model."""
    return _models[-1]


@contextmanager
def _make_options(checkpoint: Path, settings: Settings, model: nn.Module) -> Iterator[SplitOptions]:
    """Return the options of ``reshard split`` for this run, which are valid in the block.

    The run has its own param groups and hyper-parameters, and the names of its model in memory,
    whatever those of the source were.
    """
    from reshard.commands.split.options import SplitOptions
    from reshard.training import trainer_run

    document = state.read(checkpoint)
    wrap = None
    is_flat = (settings.strategy, settings.state_dict_type) == ("fsdp", "local")
    if is_flat and (checkpoint / "pytorch_model_fsdp_rank0.bin").exists():
        # Of flat parameters that `reshard split` wrote for this run, only the run knows the units.
        wrap = trainer_run.TrainerRun({"settings": dataclasses.asdict(settings)}).wrap
    chosen: dict[str, Any] = {"world_size": settings.nproc}
    if settings.layout == "FSDP":
        chosen |= {"to": "fsdp", "state_dict_type": "sharded", "dtype": "fp32"}
    else:
        # In ddp every rank reads all, which stage 1 with one rank has in one file.
        chosen |= {"world_size": settings.nproc if settings.zero_stage else 1}
        chosen |= {"to": "deepspeed", "zero_stage": settings.zero_stage or 1}
        chosen |= {"dtype": settings.precision}
    _models.append(model)
    try:
        with TemporaryDirectory(prefix="trainer-") as folder:
            groups, config = Path(folder, "groups.json"), Path(folder, "config.json")
            groups.write_text(json.dumps(_list_param_groups(settings, model)))
            if settings.freeze:  # which a configuration does not state
                chosen |= {"model": f"{__name__}:get_model"}
            elif document is None or wrap:  # ours have a configuration, and the same names
                load_model_config(settings).to_json_file(config, use_diff=False)
                chosen |= {"model": str(config), "names": "module", "wrap": wrap}
            yield SplitOptions(param_groups=groups, **chosen)
    finally:
        _models.pop()


def _make_config(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's configuration of the ranks that the checkpoint is offered to."""
    if settings.zero_stage:
        return make_basic_config(settings)
    one = dataclasses.replace(settings, strategy="zero1", accumulation=settings.microbatches)
    return make_basic_config(one)


def _list_param_groups(settings: Settings, model: nn.Module) -> list[dict[str, Any]]:
    """Return this run's param groups as ``reshard split --param-groups`` reads them."""
    return [
        {
            "fqns": list(group.names),
            **make_hyperparameters(settings, group.weight_decay, settings.lr),
        }
        for group in make_param_groups(model, settings)
    ]


def _load(files: OnDemandFiles, name: str, map_location: Any) -> Any:
    """Load a file of ``torch.save``; its reader has allowed the classes that it may have.

    Raises:
        CheckpointError: the source is damaged.
    """
    from reshard.errors import ReshardError

    try:
        # torch.load hides the errors of the file that it reads, so they are raised after it.
        file = files.open(name, checks=False)
        loaded = torch.load(file, map_location=map_location, weights_only=True)
        files.check()
    except ReshardError as error:
        raise _make_error(error, one_rank=True) from error
    return loaded


def _make_error(error: ReshardError, *, one_rank: bool = False) -> CheckpointError:
    remedy = error.remedy
    if "--" in remedy:  # the trainer does not have these options
        remedy = f"resume from the output of reshard split, with its options: {remedy}"
    return CheckpointError(f"{error.where}: {error.problem}", remedy, one_rank=one_rank)


def _read_progress(live: LiveFiles, settings: Settings) -> dict[str, int]:
    """Return the counters of the source; samples that it does not count are derived."""
    step, skipped, samples = (
        live.planned.counters[n] for n in ("step", "skipped_steps", "samples")
    )
    if step is None:
        return {}
    skipped = skipped or 0
    samples = step * settings.global_batch if samples is None else samples
    return {"step": step, "skipped": skipped, "updates": step - skipped, "samples": samples}
