"""Nanotron's checkpoints as one format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.errors import UsageError
from reshard.formats.base import Format, ReadHints, Source, Writer
from reshard.naming.options import ModelNames, NameOptions, Naming
from reshard_nanotron.directory import METADATA, NAME, TABLE, detect, is_run

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.base import StateConversion
    from reshard.formats.request import Request
    from reshard.layouts.model_parallel.families import Family
    from reshard.layouts.model_parallel.traits import Traits
    from reshard.training.state import WritableState


def _read(location: Location, _hints: ReadHints) -> Manifest:
    from reshard_nanotron import reader

    return reader.read(location)


def _describe_model(manifest: Manifest) -> Traits | None:
    from reshard_nanotron import model

    return model.find_traits(manifest)


def _get_family(traits: Traits) -> Family:
    from reshard.layouts.model_parallel import families

    return families.load_renamed_family("qwen2" if traits.qkv_bias else "llama", TABLE)


class Nanotron(Writer):
    """Nanotron's directory."""

    name = NAME
    options = ("tp", "pp", "ep", "dp", "zero_stage")
    starts_optimizer = False
    keeps_grid_of = (NAME,)
    has_fixed_names = True

    def choose_stage(self, given: int | None, source: int | None) -> int:
        """Return the given stage, else the source's: nanotron has the stages 0 and 1."""
        return given if given is not None else min(source or 0, 1)

    def rename(self, conversion: StateConversion, names: NameOptions) -> Naming:
        """Return the state under nanotron's names; those of another source's model are derived."""
        from reshard_nanotron import new_run

        if conversion.manifest.origin.format == NAME:
            return super().rename(conversion, names)
        return new_run.rename(conversion, names)

    def keeps_value(self, name: str, _request: Request) -> bool:
        """Return True for the counters, which ``checkpoint_metadata.json`` and its folder have."""
        return name in (METADATA, "step", "global_samples")

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out the directory.

        Raises:
            UsageError: nanotron has no such ZeRO stage.
        """
        from reshard.containers.skeletons import LaidOut
        from reshard_nanotron import new_run, writer
        from reshard_nanotron.target import TargetRun

        if request.zero_stage > 1:
            raise UsageError(
                f"--zero-stage {request.zero_stage}",
                "is not a ZeRO stage of nanotron, which supports 0 and 1",
                "pass 0 or 1",
            )
        wanted = TargetRun(
            sizes=request.parallel,
            data=request.data_parallel,
            zero=request.zero_stage == 1,
            dtype=request.dtype,
            weights_only=request.weights_only,
        )
        notes: tuple[str, ...] = ()
        if request.described is not None:
            state = new_run.add_layout(state, request.described, request.parallel.pipeline)
            notes = tuple(new_run.describe(request.described))
        return LaidOut(
            writer.lay_out(state, wanted), (*writer.describe_omissions(state, wanted), *notes)
        )


FORMAT = Format(
    name=NAME,
    detect=detect,
    claims=is_run,
    read=_read,
    ignored_hints=("key", "wrap"),
    sources={
        NAME: Source(
            writer=NAME,
            names=ModelNames(
                describe=_describe_model, table=TABLE, family=_get_family, of_own_models=True
            ),
        )
    },
    writers=(Nanotron(),),
)
