"""The names that transformers writes, and those that its models have in memory.

transformers 5 holds some models in memory under other names and shapes than ``save_pretrained``
writes (`reshard.model.published`). A checkpoint of a training run has the names in memory; a model
on the Hub has the published ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.containers.json_files import read_json_object
from reshard.core.box import Index
from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.model import library
from reshard.model.adapter_names import find_parts, find_saved_names
from reshard.naming.options import Names
from reshard.system import optional
from reshard.training.companion_files import find_config, is_embedding
from reshard.units import abridge

if TYPE_CHECKING:
    from reshard.model.published import Published

_OF_TORCH = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")  # of transformers before 5
_NOT_INSTALLED = (
    "transformers is not installed, so the weights keep the names of the source. Mixtures of"
    " experts and most vision models have other names on the Hub: for these, run"
    f" {library.INSTALL} and convert again"
)


def may_be_published(manifest: Manifest) -> bool:
    """Return whether the files are of the kinds in which models are published."""
    names = (path.rpartition("/")[-1] for path in manifest.files)
    return manifest.origin.weights_only or (
        not manifest.has_optimizer and all(map(_OF_TORCH.fullmatch, names))
    )


class ModelConfig(NamedTuple):
    """A transformers config: its content, and its path or that of its directory, if it has one."""

    content: Mapping[str, Any]
    path: Path | None = None

    def trace(self, manifest: Manifest) -> Published | None:
        """Return the published form of the model that a manifest has the weights of.

        A config that does not name its class is that of the first class with these names.
        """
        from reshard.model.published import describe_published

        published = describe_published(str(self.path) if self.path else self.content)
        if published is None or self.content.get("architectures") or published.knows(manifest):
            return published
        others = (other for other in self._trace_classes() if other.knows(manifest))
        return next(others, published)

    def _trace_classes(self) -> Iterator[Published]:
        from reshard.model.build import list_classes
        from reshard.model.published import describe_published

        for name in list_classes(str(self.content.get("model_type"))):
            try:
                published = describe_published({**self.content, "architectures": [name]})
            except (UsageError, UnsupportedError):  # a class that needs more than the config states
                continue
            if published is not None:
                yield published


@dataclass(frozen=True, slots=True)
class ChosenForm:
    """A training state in the form to write.

    Args:
        aliases: names that transformers leaves out of files -> the name that is written.
        shapes: shapes that transformers gives the tensors in files; empty if nothing states them.
        warnings: why the names may not be those that the user expects.
        is_other_model: whether the config is known to be that of another model.
    """

    manifest: Manifest
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Index] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    is_other_model: bool = False


def choose_form(manifest: Manifest, config: ModelConfig | None, names: Names | None) -> ChosenForm:
    """Return a training state under the names that ``--names`` chooses.

    Args:
        manifest: the state, under names without wrapper prefixes.
        config: the model's config; None if nothing states the model.
        names: the user's choice; None: the published names, if the model is known.

    Raises:
        UsageError: the model cannot be built, or the weights are not its own, and the user asked
            for its names.
        UnsupportedError: the model's conversion is not a movement of whole elements.
    """
    if names == "source" or (config is None and names is None):
        return ChosenForm(manifest)
    if config is None:
        raise UsageError(
            f"--names {names}",
            "needs the model's config, but there is none beside the checkpoint",
            "pass a directory that contains the model's config.json: --hf-dir DIR (merge) or"
            " --model DIR",
        )
    if not library.is_installed():
        if names is None:  # a config without a file is of weights that a table has renamed
            return ChosenForm(manifest, warnings=(_NOT_INSTALLED,) if config.path else ())
        raise optional.build_error("transformers", f"--names {names}", library.INSTALL)
    if names is None and not _may_differ(manifest, config.content):
        return ChosenForm(manifest)
    try:
        published = config.trace(manifest)
        return ChosenForm(manifest) if published is None else _convert(manifest, published, names)
    except (UsageError, UnsupportedError) as error:
        if names is not None:
            raise
        note = f"the output has the names of the source: {error.where}: {error.problem}"
        return ChosenForm(manifest, warnings=(note,), is_other_model=isinstance(error, UsageError))


def restore_memory_form(manifest: Manifest, *, may_be_former: bool = False) -> Manifest | None:
    """Return a published model as a live model has it in memory, by the config beside its files.

    Args:
        may_be_former: whether to compare also the names of a model that transformers does not
            convert: they may be those of a former release of transformers, or lack tied names.

    Returns:
        None if the files are of another kind, or nothing states the model.
    """
    if not may_be_published(manifest):
        return None
    path = find_config(manifest)
    content = read_json_object(path) if path else None
    if path is None or content is None:
        return None
    if not (may_be_former or library.may_be_converted(content)):
        return None
    try:
        published = ModelConfig(content, path.parent).trace(manifest)
        if published is not None and published.fits(manifest):
            restored = published.restore_memory_form(manifest)
        elif published is not None and may_be_former and published.knows(manifest):
            restored = manifest  # both forms have the same names
        else:
            return None
    except (UsageError, UnsupportedError):  # other weights, or a model that transformers lacks
        return None
    stored = restored.weight_shapes
    shared = {alias: kept for alias, kept in published.aliases.items() if alias not in stored}
    return replace(restored, tied={**shared, **restored.tied})


def _may_differ(manifest: Manifest, config: Mapping[str, Any]) -> bool:
    """Return whether names have to be compared with the model's, which takes seconds to build."""
    names = manifest.weight_shapes.keys() | manifest.tied.keys()
    if library.may_be_converted(config) or library.may_be_tied(config, names):
        return True
    # Without the embedding of tokens, the names may be those of another program.
    has_tokens = any(map(is_embedding, names))
    if has_tokens and library.may_lack_weights(config, names):
        return True
    if has_tokens and not find_parts(names):
        return library.may_be_inside(config, names)
    return "vocab_size" in config and not has_tokens and not find_saved_names(names)


def _convert(manifest: Manifest, published: Published, names: Names | None) -> ChosenForm:
    conversion = published.conversion
    form = published.recognize_form(manifest)
    if names == "module":
        if form == "memory":
            return ChosenForm(manifest)
        back = published.restore_memory_form(manifest)
        return ChosenForm(back, (f"names as in memory of {conversion.model}",))
    if form == "published":
        # transformers loads names of former releases, too.
        is_former = not published.spellings.keys().isdisjoint(manifest.weight_shapes)
        shapes = {} if is_former else published.written
        return ChosenForm(manifest, (), published.list_aliases(), shapes)
    manifest, notes = _leave_out_unsaved(manifest, published)
    manifest = _keep_written_names(manifest, published.aliases)
    if not conversion.changes_nothing:
        before = len(manifest.weight_shapes)
        manifest = conversion.apply(manifest)
        after = len(manifest.weight_shapes)
        notes.append(
            f"names as save_pretrained of {conversion.model} writes them ({before} tensors in"
            f" memory, {after} in files); --names module keeps those in memory"
        )
    return ChosenForm(manifest, tuple(notes), published.list_aliases(), published.written)


def _leave_out_unsaved(manifest: Manifest, published: Published) -> tuple[Manifest, list[str]]:
    unsaved = [entry for entry in manifest.entries.values() if entry.fqn in published.unsaved]
    if not unsaved:
        return manifest, []
    kept = [entry for entry in manifest.entries.values() if entry.fqn not in published.unsaved]
    listed = abridge(sorted({entry.fqn for entry in unsaved}))
    note = f"left out, as save_pretrained of {published.conversion.model} does: {listed}"
    return manifest.with_entries(kept), [note]


def _keep_written_names(manifest: Manifest, aliases: Mapping[str, str]) -> Manifest:
    stored = {entry.fqn for entry in manifest.entries.values()}
    names: dict[str, str] = {}
    for alias, written in aliases.items():
        if alias in stored and written not in stored and written not in names.values():
            # The two names are exchanged, because the written one may be a tied name already.
            names |= {alias: written, written: alias}
    if not names:
        return manifest
    from reshard.core.renames import rename_some

    return rename_some(manifest, names)
