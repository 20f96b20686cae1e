"""Lay out what Accelerate saves of DDP and of one process: whole weights, the optimizer by index.

    model.safetensors    the model's state dict, without DDP's ``module.``: Accelerate keeps
                         the model that it was given, and wraps it afterwards
    optimizer.bin        ``torch.optim``'s own state

Every size has the same two files. FSDP's forms are `fsdp.rank_files`'s and `dcp.writer`'s.

Source: Accelerate 1.15 ``accelerator.py`` (``prepare_model``, ``save_state``), ``checkpointing.py``
(``load_accelerator_state``).
"""

from __future__ import annotations

from reshard.containers import skeletons, torch_writer
from reshard.dtypes import DType
from reshard.formats.fsdp.rank_files import Wholes, accelerate_beside
from reshard.formats.huggingface import writer
from reshard.manifest import Skeleton
from reshard.model import ModelShapes
from reshard.pickles.canonical import Canonical
from reshard.state_dict import torch_state_dict
from reshard.training.state import Training

_WEIGHTS = "model.safetensors"


def unsharded(
    state: Training,
    ranks: int,
    *,
    weights_only: bool = False,
    model: ModelShapes | None = None,
    dtype: DType | None = None,
) -> Skeleton:
    """Lay out the directory for a number of ranks.

    Raises:
        IncompleteError: nothing says in which order the optimizer numbers its parameters.
    """
    tensors = [
        (weight.value, torch_state_dict.weight_dtype(weight, dtype)) for weight in state.weights
    ]
    parts = [writer.single_file(_WEIGHTS, tensors, writer.METADATA)]
    if not weights_only:
        root = Canonical().of(torch_state_dict.optimizer(state, "index", model, named=True))
        stamp = state.stamp("optimizer.bin", 0, ranks)
        made = torch_writer.lay_out_object("optimizer.bin", root, slot_of=Wholes(), stamp=stamp)
        parts.append(made)
        parts += accelerate_beside(state, ranks)
    return skeletons.joined(parts)
