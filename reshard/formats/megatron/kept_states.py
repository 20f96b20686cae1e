"""Keep or drop what ranks of Megatron saved beside tensors, in a conversion to Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.megatron import rank_states
from reshard.formats.megatron.rank_states import RankStates
from reshard.formats.megatron.write import written_states
from reshard.formats.megatron.write.resolved import MegatronTarget
from reshard.formats.megatron.write.written_states import WrittenStates
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.formats.base import S, StateConversion


def name_extra_states(manifest: Manifest) -> str:
    """Return the words for a source's extra states in a report; empty if it has none."""
    count = len(rank_states.get_rank_states(manifest).list_modules())
    return f"own states of {count} modules (_extra_state)" if count else ""


def adapt(conversion: S) -> S:
    """Return the conversion with the extra states and random states to write."""
    states = rank_states.get_rank_states(conversion.manifest)
    written = _choose_extra_states(states, conversion)
    written = replace(written, rng=_choose_random_states(states, conversion))
    target = replace(MegatronTarget.of(conversion.request), rank_states=written)
    return replace(conversion, request=target)


def _choose_extra_states(states: RankStates, conversion: StateConversion) -> WrittenStates:
    manifest, notes = conversion.manifest, conversion.notes
    wanted = MegatronTarget.of(conversion.request)
    policy, what = conversion.options.extra_state, name_extra_states(manifest)
    reason = "--extra-state drop"
    if policy != "drop":
        reason = written_states.find_extra_obstacle(
            states, manifest, wanted.sizes, wanted.form, wanted.impl
        )
    if reason:
        if policy == "keep":
            raise UsageError(
                "--extra-state keep",
                f"the extra states of modules cannot be copied: {reason}",
                "leave them out: --extra-state drop",
            )
        notes.dropped += [f"{what}: {reason}"] if what else []
        # The files list every module that has a state, also with None as a dropped state.
        return written_states.make_blank(states, manifest, wanted.impl)
    extra, entries = written_states.lay_out_states(states, wanted.form)
    if what and (states.form, wanted.form) == ("torch", "torch_dist") and len(states.extra) > 1:
        what += ", those of the first tensor-parallel rank, as Megatron saves them"
    notes.kept += [what] if what else []
    return WrittenStates(form=states.form, extra=extra, entries=entries)


def _choose_random_states(
    states: RankStates, conversion: StateConversion
) -> Mapping[rank_states.RankKey, object]:
    manifest, notes = conversion.manifest, conversion.notes
    wanted, policy = MegatronTarget.of(conversion.request), conversion.request.rng
    if policy == "derive":
        raise UnsupportedError(
            "--rng derive",
            "has no effect in Megatron, which seeds every rank by --seed and its position if a"
            " checkpoint has no random states",
            "leave it out, and load with --no-load-rng",
        )
    if policy == "drop" or wanted.weights_only:
        reason = "--rng drop" if policy == "drop" else wanted.weights_option
        notes.dropped += [f"random states ({reason})"] if states.rng else []
        return {}
    reason = written_states.find_rng_obstacle(
        states, manifest, wanted.sizes, wanted.data_parallel, wanted.form
    )
    if reason:
        if policy == "keep":
            raise UsageError(
                "--rng keep",
                f"random states cannot be copied: {reason}",
                "leave them out with --rng drop: Megatron then seeds every rank",
            )
        notes.dropped += [f"random states: {reason}"] if states.rng else []
        return {}
    try:
        rebuilt = written_states.rebuild_random(states, manifest.origin.path)
    except UnsupportedError as error:
        if policy == "keep":
            raise
        notes.dropped.append(f"random states: {error.where} {error.problem}")
        return {}
    notes.kept.append(f"random states of {counted(len(rebuilt), 'rank')}")
    return dict(rebuilt)
