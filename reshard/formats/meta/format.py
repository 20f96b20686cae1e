"""Meta's published Llama as one format."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.core.location import Location
from reshard.core.manifest import Manifest
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.base import Format, ReadHints, Source, Writer
from reshard.formats.meta.directory import EMBEDDING, NAME, OUTPUT, detect
from reshard.naming.options import ModelNames, NameOptions, Naming

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.base import StateConversion
    from reshard.formats.request import Request
    from reshard.layouts.model_parallel.families import Family
    from reshard.layouts.model_parallel.traits import Traits
    from reshard.training.state import WritableState


def _read(location: Location, hints: ReadHints) -> Manifest:
    from reshard.formats.meta import reader
    from reshard.layouts.model_parallel.rules import add_user_rules, load_table

    return reader.read(location, add_user_rules(load_table(NAME), hints.rules))


def _describe_model(manifest: Manifest) -> Traits:
    from reshard.formats.meta import reader

    return reader.find_traits(manifest)


def _get_family(_traits: Traits) -> Family:
    from reshard.layouts.model_parallel import families

    return families.load_renamed_family("llama", NAME)


class Meta(Writer):
    """A Llama as Meta's code loads it: one file per tensor-parallel rank, and params.json."""

    name = NAME
    options = ("tp",)
    weights_alone = True
    starts_optimizer = False
    has_fixed_names = True
    has_data_parallel_ranks = False
    keeps_grid_of = (NAME,)

    def rename(self, conversion: StateConversion, names: NameOptions) -> Naming:
        """Return the state under Meta's names, with the description of its model.

        Raises:
            UsageError: nothing states what the model is.
            UnsupportedError: the model is not a Llama, or params.json cannot describe it.
        """
        from reshard.formats.meta import writer
        from reshard.layouts.model_parallel import families
        from reshard.layouts.model_parallel import names as renaming
        from reshard.layouts.model_parallel.architecture import Described
        from reshard.layouts.model_parallel.rules import add_user_rules
        from reshard.naming import tables

        manifest, source = conversion.manifest, conversion.source
        table = add_user_rules(families.load_renamed_family("llama", NAME).table, names.rules)
        if manifest.origin.format == NAME:
            architecture = tables.build_architecture(_describe_model(manifest), names)
            return Naming(manifest, described=Described(table, architecture, manifest.train.config))
        manifest, traits, _ = tables.rename_to_hf_first(
            manifest, source.names, names, conversion.request.model_hint
        )
        families.choose_family(traits, "llama")
        if traits.rope_scaling is not None:
            raise UnsupportedError(
                traits.source,
                f"scales rotary positions ({traits.rope_scaling}), which params.json cannot state",
            )
        renamed = renaming.rename_from_hf(manifest, table, traits.make_architecture())
        # Meta's files have both tensors: a tied model writes its embedding under two names.
        head = {OUTPUT: EMBEDDING} if traits.tied else {}
        described = Described(
            table, tables.build_architecture(traits, names), writer.build_params(traits)
        )
        named = replace(renamed.manifest, tied={**renamed.manifest.tied, **head})
        return Naming(named, (*renamed.notes, "renamed to Meta's names"), described=described)

    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        """Lay out the files of all ranks.

        Raises:
            UsageError: the optimizer is not left out, or a size does not divide.
        """
        from reshard.containers.skeletons import LaidOut
        from reshard.formats.meta import writer

        described = request.described
        if described is None:
            raise AssertionError("`rename` describes the model")
        if not request.weights_only:
            raise UsageError(
                "--to meta", "stores only weights", "leave out the optimizer: --weights-only"
            )
        ranks = request.parallel.tensor
        skeleton = writer.lay_out(
            state, ranks=ranks, table=described.table, params=described.args, dtype=request.dtype
        )
        return LaidOut(skeleton, tuple(writer.describe_values(state, ranks=ranks)))


FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    ignored_hints=("key", "wrap"),
    sources={
        NAME: Source(
            writer=NAME,
            names=ModelNames(describe=_describe_model, table=NAME, family=_get_family),
        )
    },
    writers=(Meta(),),
)
