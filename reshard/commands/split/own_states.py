"""What ranks of Megatron saved beside tensors: kept, or left out, and never in silence."""

from __future__ import annotations

from dataclasses import replace

from reshard.commands.split import rng
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.rng import Chosen
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.megatron import own
from reshard.formats.megatron.own import Own
from reshard.formats.megatron.write import Wanted
from reshard.formats.megatron.write import carried as carry
from reshard.formats.megatron.write.carried import Carried
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.manifest import Manifest


def chosen(
    manifest: Manifest, request: Request, target: Target, options: SplitOptions
) -> tuple[Request, list[Chosen]]:
    """The request with what is kept, and what to say of it.

    Raises:
        UsageError: what is to be kept cannot be.
    """
    held, wanted = own.of(manifest), request.megatron
    if wanted is None:
        why = f"--to {target.name} has no place for them"
        return request, [_dropped(held, why), rng.chosen(manifest, request, target, options)]
    carried, extra = _extra(held, manifest, wanted, options)
    states, random = _random(held, manifest, wanted, options)
    carried = replace(carried, rng=states)
    return replace(request, megatron=replace(wanted, carried=carried)), [extra, random]


def _dropped(held: Own, why: str) -> Chosen:
    count = len(held.names())
    text = f"own states of {count} modules (_extra_state): {why}"
    return Chosen(how="dropped", text=text) if count else Chosen()


def _extra(
    held: Own, manifest: Manifest, wanted: Wanted, options: SplitOptions
) -> tuple[Carried, Chosen]:
    without = carry.blank(held, manifest, wanted.impl)
    if options.extra_state == "drop":
        return without, _dropped(held, "--extra-state drop")
    why = carry.extra_obstacle(held, manifest, wanted.sizes, wanted.form, wanted.impl)
    if why and options.extra_state == "keep":
        raise UsageError(
            "--extra-state keep",
            f"modules' own states cannot be kept: {why}",
            "leave them out: --extra-state drop",
        )
    if why:
        return without, _dropped(held, why)
    extra, entries = carry.states(held, wanted.form)
    made = Carried(form=held.form, extra=extra, entries=entries)
    count, text = len(held.names()), ""
    if (held.form, wanted.form) == ("torch", "torch_dist") and len(held.extra) > 1:
        text = ", those of the first tensor-parallel rank, as Megatron saves them"
    text = f"own states of {count} modules (_extra_state){text}"
    return made, Chosen(how="kept", text=text) if count else Chosen()


def _random(
    held: Own, manifest: Manifest, wanted: Wanted, options: SplitOptions
) -> tuple[dict[own.Place, object], Chosen]:
    if options.rng == "derive":
        raise UnsupportedError(
            "--rng derive",
            "makes nothing that Megatron does not make itself: without states it seeds every rank"
            " by --seed and the rank's place",
            "leave it out, and load with --no-load-rng",
        )
    if options.rng == "drop" or wanted.weights_only:
        why = "--rng drop" if options.rng == "drop" else "--weights-only"
        return {}, Chosen(how="dropped", text=f"random states ({why})") if held.rng else Chosen()
    why = carry.rng_obstacle(held, manifest, wanted.sizes, wanted.data, wanted.form)
    if why and options.rng == "keep":
        raise UsageError(
            "--rng keep",
            f"random states cannot be kept: {why}",
            "leave them out with --rng drop: Megatron seeds every rank anew",
        )
    if why:
        text = f"random states: {why}"
        return {}, Chosen(how="dropped", text=text) if held.rng else Chosen()
    try:
        states = carry.random_states(held, manifest.origin.path)
    except UnsupportedError as error:
        if options.rng == "keep":
            raise
        return {}, Chosen(how="dropped", text=f"random states: {error.where} {error.problem}")
    return dict(states), Chosen(how="kept", text=f"random states of {len(states)} ranks")
