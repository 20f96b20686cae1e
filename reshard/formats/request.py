"""The request to a writer: the user's options, completed by the source's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import ParamGroup
from reshard.formats.target_options import FsdpVersion, RngPolicy, StateDictType
from reshard.layouts.model_parallel.sizes import ONE, Sizes

if TYPE_CHECKING:  # each belongs to some writers only
    from typing_extensions import Self

    from reshard.layouts.mesh import MeshGrid
    from reshard.layouts.model_parallel.architecture import Described
    from reshard.layouts.tensor_parallel import TensorPlan
    from reshard.model import ModelShapes
    from reshard.training.batch import LiveBatch
    from reshard.training.trainer_run import TrainerRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """What a running program states about itself, which loads an output without a file.

    Args:
        shapes: its model; None if FSDP 1 has flattened its parameters.
        config: the configuration of its engine; None: that of the source, adapted.
        groups: the param groups of its optimizer; empty: those of the source.
        fsdp: the version of FSDP that wraps the model, if one does.
        arguments: what HF Trainer would state of its arguments in ``trainer_state.json``.
        batch: its batch, if the program states it.
    """

    shapes: ModelShapes | None = None
    config: Mapping[str, Any] | None = None
    groups: tuple[ParamGroup, ...] = ()
    fsdp: FsdpVersion | None = None
    arguments: Mapping[str, int] = field(default_factory=dict)
    batch: LiveBatch | None = None


NO_PROGRAM = LiveTarget()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of an output, complete except for what its writer decides.

    A writer with options of its own has a subclass, which adds their fields.

    Args:
        file: name of the output, if it is one file; None: a directory.
        dtype: dtype of the module's parameters; None: as trained.
        weights_option: the option that asks for weights only, for messages.
        rank_files: whether there is a file per rank in a layout that is DCP by default.
        fsdp_version: FSDP version of verl's files.
        orig_params: FSDP 1: write ``use_orig_params``, for a forward pass in this dtype.
        run: the run of ``python -m trainer`` whose checkpoint the source is.
        keeps_layout: whether the user left the choice of the layout to the source.
        separate_masters: whether the optimizer updates fp32 copies of the module's parameters.
        device: device type of the mesh in DTensor files; torch loads them only into a model on that
            type of device.
        model: names and shapes of the built model; ``model_hint``: how the user named it.
        rng: whether random states are kept, derived or dropped; None: kept if that is possible.
        grid: the device mesh; None: one axis of all ranks.
        tensor: how the tensor-parallel axis of the mesh cuts parameters.
        rules: file with the user's rules of how parameters are cut.
        described: the model, for writers with tables of parameters.
        live: the program that loads the output, if it runs already.
        tag: name of DeepSpeed's tag, if the program that loads the output looks for a certain one.
        program: writer of the library that keeps files of its own beside DeepSpeed's, if the output
            is to have them.
    """

    world_size: int
    file: str | None = None
    parallel: Sizes = ONE
    zero_stage: int = 2
    dtype: DType | None = None
    weights_only: bool = False
    weights_option: str = "--weights-only"
    state_dict_type: StateDictType = "sharded"
    rank_files: bool = False
    fsdp_version: FsdpVersion = 2
    orig_params: DType | None = None
    run: TrainerRun | None = None
    keeps_layout: bool = False
    separate_masters: bool = False
    model: ModelShapes | None = None
    model_hint: str | None = None
    rng: RngPolicy | None = None
    device: str = "cuda"
    grid: MeshGrid | None = None
    tensor: TensorPlan | None = None
    rules: Path | None = None
    described: Described | None = None
    live: LiveTarget = NO_PROGRAM
    tag: str | None = None
    program: str | None = None

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return a request as one of this class; the fields that it lacks have their defaults."""
        if isinstance(request, cls):
            return request
        return cls(**{option.name: getattr(request, option.name) for option in fields(request)})

    @property
    def target(self) -> Self | None:
        """The request itself, if its writer has a class of its own."""
        return None if type(self) is Request else self

    @property
    def data_parallel(self) -> int:
        """The number of ranks that read different data."""
        tensor = self.grid.size("tensor") if self.grid else 1
        return self.world_size // (tensor * self.parallel.model)

    def describe_zero(self) -> str:
        """Return the ZeRO stage, and the grid of model-parallel ranks if there is one."""
        return " ".join(filter(None, (f"stage {self.zero_stage}", str(self.parallel))))

    @property
    def master_dtype(self) -> DType:
        """The dtype of the weights that a new optimizer updates."""
        return FLOAT32 if self.separate_masters or self.dtype is None else self.dtype
