"""The number of ranks of each form of model parallelism, and the layers of pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import prod

from reshard.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of model parallelism: ranks that have different parts of a model.

    Args:
        tensor: number of ranks that share each layer.
        pipeline: number of pipeline stages.
        expert: number of ranks that share the experts of a layer, and see different data.
        expert_tensor: number of ranks that share each expert; None: as many as share a layer.
        virtual: number of model chunks of each pipeline rank (interleaved schedule).
        context: number of ranks that have the same part of a model, and share each sequence.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual: int = 1
    context: int = 1

    @property
    def model(self) -> int:
        """Number of ranks that see the same data."""
        return self.tensor * self.pipeline * self.context

    @property
    def is_one(self) -> bool:
        """Whether every rank has the whole model."""
        return self.model == self.expert == 1

    def __str__(self) -> str:
        named = (
            ("tp", self.tensor),
            ("pp", self.pipeline),
            ("ep", self.expert),
            ("vpp", self.virtual),
            ("cp", self.context),
        )
        return " ".join(f"{name}={size}" for name, size in named if size > 1)


ONE = Sizes()


def parse_mesh(mesh: Mapping[str, int]) -> Sizes:
    """Return the sizes in a source's mesh (`manifest.Origin.mesh`)."""
    return Sizes(
        tensor=mesh.get("tp", 1),
        pipeline=mesh.get("pp", 1),
        expert=mesh.get("ep", 1),
        expert_tensor=mesh.get("etp"),
        context=mesh.get("cp", 1),
    )


def choose_world_size(
    sizes: Sizes,
    world: int | None,
    data: int | None,
    before: int,
    kept: Mapping[str, int] | None = None,
) -> int:
    """Return the number of ranks: the given number, else the source's.

    Args:
        kept: option -> size, for the ``sizes`` that are the source's, and not the user's.
        world, data: the number of all ranks, and of ranks that see different data; None if the
            user does not choose it.
        before: number of ranks of the source. A single one says nothing about the new run, which
            then has as many ranks as one copy of the model takes.

    Raises:
        UsageError: the numbers contradict each other.
    """
    if data is not None and world not in (None, data * sizes.model):
        raise UsageError(
            f"--world-size {world}",
            f"is not --dp {data} x {sizes.model} model-parallel ranks",
            f"leave it out: the output then has {data * sizes.model} ranks",
        )
    default = before if before > 1 else sizes.model * sizes.expert
    ranks = data * sizes.model if data is not None else world or default
    if ranks % sizes.model:
        raise UsageError(
            f"{ranks} ranks",
            f"are not a multiple of {sizes.model}, the number of ranks of one copy of the model"
            f" ({sizes})",
            f"pass {_advise_size_of_one(sizes, ranks, kept or {})}--world-size"
            f" {-(-ranks // sizes.model) * sizes.model}",
        )
    holders, rest = divmod(ranks, sizes.pipeline * (sizes.expert_tensor or sizes.tensor))
    if rest:
        raise UsageError(
            f"--etp {sizes.expert_tensor}",
            f"does not divide the {ranks // sizes.pipeline} ranks of a stage",
            "pass another --etp or --dp",
        )
    if holders % sizes.expert:
        what = "data-parallel ranks" if holders == ranks // sizes.model else "ranks of a stage"
        raise UsageError(
            f"--ep {sizes.expert}",
            f"does not divide the {holders} {what}",
            "experts are shared by data-parallel ranks: pass another --ep or --dp",
        )
    return ranks


def _advise_size_of_one(sizes: Sizes, ranks: int, kept: Mapping[str, int]) -> str:
    for flags in [*combinations(kept, 1), tuple(kept)]:
        if ranks % (sizes.model // prod(kept[flag] for flag in flags)) == 0:
            return f"{' '.join(f'{flag} 1' for flag in flags)} as well, or "
    return ""


def list_chunks(sizes: Sizes) -> list[tuple[int, int]]:
    """Return each (pipeline rank, its chunk) in the order in which layers pass through them."""
    return [(stage, chunk) for chunk in range(sizes.virtual) for stage in range(sizes.pipeline)]


def assign_layers(sizes: Sizes, count: int, counts: Sequence[int] | None) -> list[range]:
    """Return the layers of each of `list_chunks`, by their numbers in the whole model.

    Args:
        counts: number of layers of each; None: the same for all.

    Raises:
        UsageError: ``counts`` do not add up, or ``count`` cannot be shared evenly.
    """
    chunks = sizes.pipeline * sizes.virtual
    if counts is None:
        if count % chunks:
            raise UsageError(
                f"pipeline parallel size {sizes.pipeline}"
                + (f" with {sizes.virtual} chunks each" if sizes.virtual > 1 else ""),
                f"does not divide the model's {count} layers",
                "state the number of layers of each stage: --stage-layers N,N,...",
            )
        counts = [count // chunks] * chunks
    if len(counts) != chunks or sum(counts) != count or min(counts) < 0:
        raise UsageError(
            f"--stage-layers {','.join(map(str, counts))}",
            f"does not share {count} layers among {chunks} stages",
        )
    ends = list(accumulate(counts))
    return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]


def parse_stage_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the number of layers of each pipeline stage, as ``--stage-layers`` states it.

    Raises:
        UsageError: the text is not a list of numbers.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--stage-layers {text}", "is not a list of numbers", "e.g. 3,4,4,3")
    return tuple(map(int, parts))
