"""What a target is asked for: the user's choices, and the source's own where there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.dtypes import FLOAT32, DType
from reshard.formats.target_options import FsdpVersion, StateDictType
from reshard.model_parallel.sizes import ONE, Sizes

if TYPE_CHECKING:  # each is of some targets only
    from reshard.formats.deepspeed.write.grid import Wanted as GridWanted
    from reshard.formats.megatron.write.choice import Wanted
    from reshard.layout.mesh import MeshGrid
    from reshard.layout.tensor_parallel import Plan
    from reshard.model import ModelShapes
    from reshard.model_parallel.described import Described
    from reshard.training.trainer_run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, with nothing left open but what a target decides."""

    world_size: int
    file: str = "checkpoint.pt"  # the name of the output where that is one file
    parallel: Sizes = ONE
    zero_stage: int = 2
    dtype: DType | None = None  # of the module's parameters; None: as trained
    weights_only: bool = False
    state_dict_type: StateDictType = "sharded"
    rank_files: bool = False  # a file a rank where the form is DCP by default
    fsdp_version: FsdpVersion = 2  # of verl's files
    orig_params: DType | None = None  # FSDP 1: use_orig_params with a forward pass in this dtype
    run: Run | None = None  # of our trainer, which the source is a checkpoint of
    deepspeed: bool = False  # whether DeepSpeed's directory is written, by itself or in another
    model: ModelShapes | None = None
    device: str = "cuda"  # of the mesh that DTensors are saved on, which must be the model's
    grid: MeshGrid | None = None  # that mesh, of world_size ranks; None: one axis
    tensor: Plan | None = None  # what a tensor-parallel axis of it does
    deepspeed_grid: GridWanted | None = None  # DeepSpeed's model-parallel ranks; None: one
    megatron: Wanted | None = None  # of its directory
    described: Described | None = None  # the model, as tables of parameters need it

    @property
    def data_parallel(self) -> int:
        """How many ranks see different data."""
        tensor = self.grid.size("tensor") if self.grid else 1
        return self.world_size // (tensor * self.parallel.model)

    @property
    def master(self) -> DType:
        """Of the weights that an optimizer updates, where it begins anew."""
        return FLOAT32 if self.deepspeed or self.dtype is None else self.dtype

    @property
    def form(self) -> str:
        """What the target's name leaves open, in words."""
        if self.megatron:
            return " ".join(filter(None, (self.megatron.form, str(self.megatron.sizes))))
        if not self.deepspeed:
            return self.state_dict_type
        return " ".join(filter(None, (f"stage {self.zero_stage}", str(self.parallel))))
