"""What ``split`` and ``convert`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from reshard.commands import naming
from reshard.commands.output import OutputOptions
from reshard.commands.reading import one_of
from reshard.errors import UsageError
from reshard.formats import targets
from reshard.formats.megatron import words as megatron
from reshard.formats.targets.request import (
    FSDP_VERSIONS,
    STATE_DICT_TYPES,
    FsdpVersion,
    StateDictType,
)
from reshard.training.fresh_adam import InitOptimizer
from reshard.training.rng import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions(OutputOptions):
    """What a split can be asked for."""

    world_size: int | None = None  # None: the source's
    tp: int | None = None  # tensor, pipeline and expert parallel ranks; None: the source's
    pp: int | None = None
    ep: int | None = None
    dp: int | None = None  # ranks that see different data; None: as world_size says
    vpp: int | None = None  # model chunks of each pipeline rank; None: the source's
    stage_layers: str | None = None  # N,N,...: layers of each stage; None: as many in each
    to: str | None = None  # one of `targets.NAMES`; None: as the source
    zero_stage: int | None = None  # None: the source's, else 2
    state_dict_type: StateDictType | None = None  # None: the source's, else sharded
    rank_files: bool = False  # of FSDP: a file a rank instead of DCP
    fsdp_version: FsdpVersion = 2  # of verl's files
    use_orig_params: str | None = None  # FSDP 1: the dtype of the forward pass; None: flat
    ckpt_format: megatron.Form | None = None  # Megatron's; None: the source's, else torch
    distributed_optimizer: bool | None = None  # whether Megatron's will load it; None: as there
    adam: megatron.Adam | None = None  # whose state Megatron will load; None: the source's
    extra_state: megatron.ExtraState | None = None  # modules' own; None: kept where they can be
    transformer_impl: megatron.Impl | None = None  # whose layers; None: the source's
    make_vocab_size_divisible_by: int | None = None  # None: the source's, else 128
    vocab_size: int | None = None  # rows that are words; None: what the source says
    names: naming.Whose | None = None  # None: the source's, or those that the target needs
    family: str | None = None  # which of Hugging Face's models it is; None: as the config says
    dtype: str | None = None  # of the module's copy; None: as trained
    weights_only: bool = False
    init_optimizer: InitOptimizer | None = None  # none: as weights_only; zeros: an Adam that begins
    param_groups: Path | None = None  # a JSON file; see `param_groups`
    rng: Policy | None = None  # random states; None: kept where they can be
    device: str = "cuda"  # of the mesh in DTensor files
    mesh: str | None = None  # NAME=SIZE,... of DTensor files; None: one axis of all ranks
    tp_plan: str | Path | None = None  # how its tensor-parallel axis cuts; None: the model's plan

    def __post_init__(self) -> None:
        """Refuse a choice that there is not.

        Raises:
            UsageError: naming the choices.
        """
        OutputOptions.__post_init__(self)
        if self.zero_stage is not None:
            one_of("zero_stage", self.zero_stage, range(4))
        one_of("ckpt_format", self.ckpt_format, (None, *get_args(megatron.Form)))
        one_of("adam", self.adam, (None, *get_args(megatron.Adam)))
        one_of("extra_state", self.extra_state, (None, *get_args(megatron.ExtraState)))
        one_of("transformer_impl", self.transformer_impl, (None, *get_args(megatron.Impl)))
        for name in (*targets.PARALLEL, "vpp"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"--{name} {size}", "at least one rank is needed")
        one_of("state_dict_type", self.state_dict_type, (None, *STATE_DICT_TYPES))
        one_of("fsdp_version", self.fsdp_version, FSDP_VERSIONS)
        one_of("rng", self.rng, (None, *get_args(Policy)))
        one_of("names", self.names, (None, *get_args(naming.Whose)))
        if self.to is not None:
            one_of("to", self.to, targets.NAMES)
        one_of("init_optimizer", self.init_optimizer, (None, *get_args(InitOptimizer)))
        if self.without_optimizer:
            for name, given in (
                ("--init-optimizer zeros", self.init_optimizer == "zeros"),
                ("--param-groups", self.param_groups is not None),
            ):
                if given:
                    raise UsageError(name, "and no optimizer at all exclude each other")

    @property
    def without_optimizer(self) -> bool:
        """Whether the weights alone are written."""
        return self.weights_only or self.init_optimizer == "none"
