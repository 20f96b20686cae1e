"""The published form of a transformers model: what ``save_pretrained`` writes.

transformers 5 holds some models under other names and shapes in memory than in files: stacked
experts, joined projections, other prefixes. Its own conversion runs here on tensors without values
(`tracing`), so a new model family needs no code here.

Source: transformers 5.24 ``modeling_utils.py`` (``save_pretrained``,
``remove_tied_weights_from_state_dict``), ``core_model_loading.py`` (``revert_weight_conversion``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reshard.core.box import Index
from reshard.core.manifest import Manifest
from reshard.core.renames import rename_some
from reshard.errors import ReshardError, UnsupportedError, UsageError
from reshard.model.build import build, build_configured
from reshard.model.conversion import FormConversion, drop_empty_pieces
from reshard.model.tracing import Traced, read_trace, start_trace
from reshard.system.attributes import replace_attributes
from reshard.units import abridge

if TYPE_CHECKING:
    from torch import nn

Form = Literal["memory", "published"]

FORMS: tuple[Form, ...] = ("memory", "published")
_MTP = "mtp"


class Published(NamedTuple):
    """The published form of a model.

    Args:
        conversion: from the form in memory to the published form, aliases of tied weights included.
        aliases: names in memory that files leave out -> the name under which the value is written.
        unsaved: names in memory of values that no file holds.
        spellings: further names of published tensors in files -> the name that is written.
        mtp_names: matches the published names of layers of multi-token prediction (MTP), which
            the class of the model ignores, and ``MtpModel`` reads; None if the model has none.
        ignored: matches names in files of former releases, which ``from_pretrained`` leaves out;
            None if there are none.
    """

    conversion: FormConversion
    aliases: Mapping[str, str]
    unsaved: frozenset[str]
    spellings: Mapping[str, str]
    mtp_names: re.Pattern[str] | None = None
    ignored: re.Pattern[str] | None = None

    def recognize_form(self, manifest: Manifest) -> Form:
        """Return the form that weights have: the one in memory, or the published one.

        If the names fit both forms, weights from a model's files are taken as published, and those
        of a training state as in memory.

        Raises:
            UsageError: the weights belong to another model.
        """
        conversion = self.conversion
        stored = manifest.weight_shapes.keys() - self.unsaved
        foreign = stored - conversion.after.keys() - self.spellings.keys()
        unknown = {
            "memory": stored - conversion.before.keys(),
            "published": foreign.difference(self._list_mtp(foreign), self.list_ignored(foreign)),
        }
        fitting: list[Form] = [form for form in FORMS if not unknown[form]]
        if not fitting:
            names = min(unknown.values(), key=len)
            raise UsageError(
                conversion.model,
                f"is another model: it does not have {abridge(sorted(names), 1)}",
                "pass the config of this model: --hf-dir DIR (merge) or --model DIR",
            )
        prefers_published = manifest.origin.weights_only and not conversion.changes_nothing
        return fitting[-1] if prefers_published else fitting[0]

    def _list_mtp(self, fqns: Iterable[str]) -> list[str]:
        return self._list_matches(self.mtp_names, fqns)

    def list_ignored(self, fqns: Iterable[str]) -> list[str]:
        """Return those names that ``from_pretrained`` leaves out."""
        return self._list_matches(self.ignored, fqns)

    def _list_matches(self, pattern: re.Pattern[str] | None, fqns: Iterable[str]) -> list[str]:
        if pattern is None:
            return []
        known = self.conversion.after.keys() | self.spellings.keys()
        return [fqn for fqn in fqns if fqn not in known and pattern.search(fqn)]

    def knows(self, manifest: Manifest) -> bool:
        """Return whether all weights have names of this model, in one of its forms."""
        try:
            self.recognize_form(manifest)
        except UsageError:
            return False
        return True

    def fits(self, manifest: Manifest) -> bool:
        """Return whether weights are in the published form, and the model has all in memory."""
        try:
            is_published = self.recognize_form(manifest) == "published"
            return is_published and not self._list_mtp(manifest.weight_shapes)
        except UsageError:
            return False

    @property
    def written(self) -> dict[str, Index]:
        """The shapes of the tensors that ``save_pretrained`` writes, in its order."""
        left_out = {name for alias in self.aliases for name in self.conversion.names[alias]}
        return {
            name: traced.shape
            for name, traced in self.conversion.after.items()
            if name not in left_out
        }

    def list_aliases(self) -> dict[str, str]:
        """Return the names in files of the aliases that are left out -> the name that is written.

        An alias that is several tensors in files has no counterpart there.
        """
        names = self.conversion.names
        return {
            names[alias][0]: names[to][0]
            for alias, to in self.aliases.items()
            if len(names[alias]) == len(names[to]) == 1
        }

    def restore_memory_form(self, manifest: Manifest) -> Manifest:
        """Return a published training state under the names and shapes in memory.

        Raises:
            UnsupportedError: the state has layers that the model does not have in memory.
        """
        stored = dict.fromkeys(entry.fqn for entry in manifest.entries.values())
        beside = self._list_mtp(manifest.weight_shapes)
        if beside:
            raise UnsupportedError(
                self.conversion.model,
                "does not have layers of multi-token prediction in memory, but the source has"
                f" {abridge(beside, 1)}",
                "keep the published names with --names hf, or the source's with --names source",
            )
        if ignored := {*self.list_ignored(stored)}:
            kept = [entry for entry in manifest.entries.values() if entry.fqn not in ignored]
            note = f"left out, as from_pretrained of {self.conversion.model} does: "
            warnings = (*manifest.warnings, note + abridge(sorted(ignored)))
            manifest = replace(manifest.with_entries(kept), warnings=warnings)
        usual = {name: self.spellings[name] for name in stored if name in self.spellings}
        manifest = rename_some(manifest, usual) if usual else manifest
        return self.conversion.invert().apply(manifest)


def describe_published(model: str | Mapping[str, Any]) -> Published | None:
    """Return the published form of a transformers model.

    The result is None for the content of a config whose type transformers does not know: such a
    config is made from a table of names, and these are the published ones.

    Args:
        model: the path of a config or of its directory, or the content of a config.
    """
    from transformers import CONFIG_MAPPING

    if not isinstance(model, str) and model.get("model_type") not in CONFIG_MAPPING:
        return None
    root = build(model) if isinstance(model, str) else build_configured(model, "the model")
    return trace_published(root, type(root).__name__)


def trace_published(root: nn.Module, source: str) -> Published | None:
    """Return the published form of a model; None if the module is not a transformers model.

    Args:
        root: the model, on the meta device.
    """
    transformers = sys.modules.get("transformers")  # a model of transformers has imported it
    if transformers is None or not isinstance(root, transformers.PreTrainedModel):
        return None
    state = dict(root.state_dict())
    unsaved = frozenset(name for name in getattr(root, "_keys_to_ignore_on_save", None) or ())
    for name in unsaved:
        state.pop(name, None)
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in state.items()}
    aliases = _find_dropped_aliases(root, state)
    after = _revert(root, state, shapes, source)
    conversion = FormConversion(source, shapes, after)
    conversion.prove()
    spellings = _find_spellings(root, state, conversion)
    return Published(
        conversion, aliases, unsaved, spellings, _match_mtp(root), _match_ignored(root)
    )


def _match_mtp(root: Any) -> re.Pattern[str] | None:
    # Layers of multi-token prediction are numbered after the other layers, or ``mtp`` is before
    # their names (transformers 5.23 ``modeling_layers.py``, ``MtpModel``).
    # Of a text encoder and a decoder (MusicGen), the decoder predicts tokens.
    text = getattr(root.config, "get_text_config", lambda **_: root.config)(decoder=True)
    first, count = (getattr(text, name, None) for name in ("num_hidden_layers", "num_mtp_layers"))
    ignored = getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [f"^{_MTP}"] if any(_MTP in pattern for pattern in ignored) else []
    if isinstance(first, int) and isinstance(count, int):
        patterns += [rf"(^|\.)layers\.{number}\." for number in range(first, first + count)]
    return re.compile("|".join(patterns)) if patterns else None


def _match_ignored(root: Any) -> re.Pattern[str] | None:
    # Source: transformers 5.24 ``modeling_utils.py`` (``_adjust_missing_and_unexpected_keys``).
    patterns = [*(getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ())]
    buffers = [name for name, _ in root.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _revert(
    root: Any, state: Mapping[str, Any], shapes: Mapping[str, Index], source: str
) -> dict[str, Traced]:
    """Return the published tensors of a state dict, as ``save_pretrained`` would convert it."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 writes the names in memory
        return {fqn: read_trace(start_trace(fqn, tensor)) for fqn, tensor in state.items()}
    traced = {fqn: start_trace(fqn, tensor) for fqn, tensor in state.items()}
    try:
        converted = revert_weight_conversion(root, traced)
        return {
            name: drop_empty_pieces(read_trace(tensor), shapes)
            for name, tensor in converted.items()
        }
    except ReshardError as error:
        raise UnsupportedError(
            source,
            f"transformers converts this model ({root.config.model_type}) with an operation that"
            f" reshard does not support: {error}",
            "keep the names in memory with --names module",
        ) from error


def _find_dropped_aliases(root: Any, state: Mapping[str, Any]) -> dict[str, str]:
    # transformers finds shared tensors by their storage, which a tensor on the meta device lacks,
    # so it decides on small tensors that are shared in the same way.
    import torch
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    shared: dict[int, torch.Tensor] = {}
    groups: dict[int, list[str]] = {}
    small: dict[str, torch.Tensor] = {}
    for name in state:
        key = id(root.get_parameter_or_buffer(name))
        small[name] = shared.setdefault(key, torch.empty(1, device="cpu"))
        groups.setdefault(key, []).append(name)
    written = remove_tied_weights_from_state_dict(small, root)
    aliases: dict[str, str] = {}
    for names in groups.values():
        kept = [name for name in names if name in written]
        aliases |= {name: kept[0] for name in names if name not in written}
    return aliases


def _find_spellings(
    root: Any, state: Mapping[str, Any], conversion: FormConversion
) -> dict[str, str]:
    # A model that was loaded from files with another prefix saves that prefix again. Files of a
    # model without its head lack the prefix of the base model. Former releases had other names of
    # some layers, which transformers lists as "legacy".
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        return {}
    after = conversion.after
    prefix = f"{root.base_model_prefix}."
    without = {name.removeprefix(prefix): name for name in after if name.startswith(prefix)}
    spellings = {other: name for other, name in without.items() if other not in after}
    usual = get_model_conversion_mapping(root, add_legacy=False)
    legacy = get_model_conversion_mapping(root)[len(usual) :]
    former = [[*usual, transform] for transform in legacy if _may_rename(transform, after)]
    if any(isinstance(transform, PrefixChange) for transform in usual):
        former.append(usual)
    names = {traced.pieces: name for name, traced in after.items()}
    for transforms in former:
        # The attribute of a model that was loaded with these conversions.
        with replace_attributes(root, _weight_conversions=transforms):
            others = _revert(root, state, conversion.before, conversion.model)
        for other, traced in others.items():
            name = names.get(traced.pieces)
            if name is not None and other != name and other not in after:
                spellings[other] = name
    return spellings


def _may_rename(transform: Any, names: Iterable[str]) -> bool:
    return any(text in name for text in transform.target_patterns for name in names)
