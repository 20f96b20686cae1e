"""What a split writes: the source's state, with what it lacks and the user has asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.commands.naming import Naming
from reshard.commands.split.options import SplitOptions
from reshard.containers.json_files import read_json_object
from reshard.dtypes import DType
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats import deepspeed, huggingface, megatron
from reshard.formats.huggingface.reader import described, in_order
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.layout.mesh import MeshGrid
from reshard.location import directory_of
from reshard.manifest import Manifest, Skeleton
from reshard.model import ModelHint, ModelShapes, describe_config
from reshard.model_parallel.sizes import Sizes
from reshard.paths import as_path
from reshard.stamps import Save
from reshard.training import fresh_adam, param_groups
from reshard.training.companion_files import is_model_config
from reshard.training.state import Training, build_training, refuse_without_optimizer

_ID = 32  # characters of a save's id


def is_weights(manifest: Manifest) -> bool:
    """Whether it is of a format that has weights alone, which says nothing of the model."""
    return manifest.origin.format in (huggingface.NAME, "safetensors")


def told(manifest: Manifest, options: SplitOptions) -> tuple[Manifest, ModelShapes | None]:
    """The model that the user named; for files of weights alone, the one of the config beside.

    Such files have no order, and one name of a tied weight: with a model their manifest has both.

    Raises:
        IncompleteError: an optimizer is to be made, and nothing says which model it is of.
        UsageError: the model is another one.
    """
    if options.to == megatron.NAME:  # whose tables know the model, and its order
        return manifest, None
    shapes = ModelHint(options.model, options.wrap).shapes() if options.model else None
    if not is_weights(manifest):
        return manifest, shapes
    if shapes is not None:
        return described(manifest, shapes), shapes
    config = directory_of(manifest.origin.path) / "config.json"
    problem = ""
    if config.is_file() and is_model_config(config):
        try:
            shapes = ModelHint(str(config), options.wrap).shapes()
            return described(manifest, shapes), shapes
        except (UsageError, UnsupportedError) as error:
            problem = f"{config} does not help: {error.problem}"
    if options.init_optimizer == "zeros":
        raise IncompleteError(
            manifest.origin.path,
            problem or "does not say which tensors are parameters, and in which order",
            "say which model it is: --model config.json|DIR|module:factory",
        )
    warnings = (*manifest.warnings, *filter(None, [problem]))
    return replace(manifest, warnings=warnings), None


def model_config(options: SplitOptions) -> Mapping[str, Any] | None:
    """Return the transformers config that ``--model`` names; None where it names code."""
    path = as_path(options.model) if options.model else None
    if path is not None and path.is_dir():
        path /= "config.json"
    return read_json_object(path) if path is not None and path.is_file() else None


def ordered(
    named: Naming, shapes: ModelShapes | None, target: str, options: SplitOptions
) -> Naming:
    """Return a state that has Hugging Face's names now in that model's order, if one is needed.

    Args:
        shapes: of the model that the user named; None: the one of the config that the source's own
            arguments make.
    """
    manifest, config = named.manifest, named.config
    needed = target == deepspeed.NAME and not options.without_optimizer
    if config is None or manifest.ordered or not needed:
        return named
    model = shapes or describe_config(config, manifest.origin.path)
    return replace(named, manifest=in_order(manifest, model))


def made_state(
    manifest: Manifest, request: Request, options: SplitOptions
) -> tuple[Training, list[str]]:
    """What is to be written, with what the user has made anew, and what to say of that."""
    made, said = build_training(manifest, weights_only=options.without_optimizer), list[str]()
    given = param_groups.read(options.param_groups) if options.param_groups else None
    fresh = options.init_optimizer == "zeros"
    if fresh and given is None and not made.groups:
        given = param_groups.ONE
    if not fresh and not options.without_optimizer:
        refuse_without_optimizer(made)
    if given:
        made, notes = param_groups.regroup(made, given)
        said += notes
    if fresh:
        made, notes = fresh_adam.start_adam(made, request.master)
        said += notes
    return made, said


def save_of(state: Training, request: Request, target: Target) -> Save:
    """Return what the files to come are stamped with.

    The id is a digest of the source and of what is written, so that the same command writes the
    same bytes: names, sizes and stored checksums of the source's files, the tensors and the layout.
    """
    manifest, digest = state.manifest, hashlib.sha256()

    def count(*values: object) -> None:
        digest.update(repr(values).encode())

    count(manifest.origin.format, manifest.train.step, target.name, *_layout(request))
    for path, file in sorted(manifest.files.items()):
        count(as_path(path).name, file.nbytes)
        for record in file.records:
            digest.update(b"%d %d " % (record.nbytes, record.crc32 or 0))
    for entry in manifest.entries.values():
        count(entry.kind, entry.fqn, entry.dtype.name, entry.shape)
    for group in state.groups:
        count(sorted(group.hyper, key=str), len(group.members))
    known = manifest.train.step is not None or manifest.train.optimizer_step
    return Save(digest.hexdigest()[:_ID], state.step() if known else None)


def _layout(request: Request) -> Iterator[object]:
    """Return the layout options of a request as plain values."""
    for name in Request.__dataclass_fields__:
        value = getattr(request, name)
        if isinstance(value, (bool, int, str, Sizes, DType, MeshGrid, type(None))):
            yield name, str(value)


def stored(skeleton: Skeleton, state: Training) -> Skeleton:
    """The skeleton without what is made of zeros: no window fills that, and no source has it."""
    made = state.zero_slots
    if not made:
        return skeleton
    return replace(skeleton, entries=tuple(e for e in skeleton.entries if e.key not in made))
