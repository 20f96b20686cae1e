"""What a split writes: the source's state, with what it lacks and the user has asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reshard.commands.naming import Naming
from reshard.commands.split.options import SplitOptions
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats import deepspeed, fresh_adam, groups, huggingface, megatron
from reshard.formats.huggingface.companions import is_model_config
from reshard.formats.huggingface.reader import described, in_order
from reshard.formats.json_files import json_object
from reshard.formats.place import directory
from reshard.formats.targets.request import Request
from reshard.formats.training import Training, refuse_without_optimizer, training
from reshard.manifest import Manifest, Skeleton
from reshard.model import ModelShapes, Told, describe_config
from reshard.paths import as_path


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
    shapes = Told(options.model, options.wrap).shapes() if options.model else None
    if not is_weights(manifest):
        return manifest, shapes
    if shapes is not None:
        return described(manifest, shapes), shapes
    config = directory(manifest.origin.path) / "config.json"
    problem = ""
    if config.is_file() and is_model_config(config):
        try:
            shapes = Told(str(config), options.wrap).shapes()
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
    return json_object(path) if path is not None and path.is_file() else None


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
    made, said = training(manifest, weights_only=options.without_optimizer), list[str]()
    given = groups.read(options.param_groups) if options.param_groups else None
    fresh = options.init_optimizer == "zeros"
    if fresh and given is None and not made.groups:
        given = groups.ONE
    if not fresh and not options.without_optimizer:
        refuse_without_optimizer(made)
    if given:
        made, notes = groups.regrouped(made, given)
        said += notes
    if fresh:
        made, notes = fresh_adam.begun(made, request.master)
        said += notes
    return made, said


def stored(skeleton: Skeleton, state: Training) -> Skeleton:
    """The skeleton without what is made of zeros: no window fills that, and no source has it."""
    made = state.made
    if not made:
        return skeleton
    return replace(skeleton, entries=tuple(e for e in skeleton.entries if e.key not in made))
