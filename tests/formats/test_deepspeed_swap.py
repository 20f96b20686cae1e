"""Which swap file holds which sub-group of ZeRO stage 3."""

from __future__ import annotations

from pathlib import Path

from reshard.containers.torch_objects import StoredBuffer, Tensor, TorchFile
from reshard.core.dtypes import FLOAT32
from reshard.core.location import Location
from reshard.formats.deepspeed import swap
from reshard.formats.deepspeed.states import OptimizerStates

_UNIT = 1024  # every swap file is padded to a multiple of it


def save(run, numels, ranks):
    """Save two param groups with one offloaded sub-group each; ids rise in the model's order."""
    empty = Tensor(StoredBuffer("f", "0", FLOAT32, 0), 0, (0,), (1,), FLOAT32)
    root = {
        "fp32_flat_groups": [empty, empty],
        "optimizer_state_dict": {
            "state": {},
            "param_groups": [{"params": [number]} for number in range(2)],
        },
    }
    states = []
    for rank in range(ranks):
        folder = run / "offloaded_tensors" / f"rank{rank:02d}"
        folder.mkdir(parents=True)
        for number, numel in enumerate(numels):
            nbytes = -(-(-(-numel // ranks) * 4) // _UNIT) * _UNIT
            (folder / f"{number}_{number}.tensor.swp").write_bytes(bytes(nbytes))
        states.append(OptimizerStates(TorchFile("f", 1, None, set()), root, rank, ""))
    return states


def test_swap_files_are_matched_by_size(tmp_path):
    # The two whole sub-groups differ by less than 64 KiB, but no two files have one size.
    ranks = save(tmp_path, (4000, 1000), 3)
    shapes = [{"small": (1000,)}, {"large": (4000,)}]
    (*_, filled), files = swap.fill(Location([tmp_path]), shapes, ranks)
    masters = [tensor.storage.file for tensor in filled.require_list("fp32_flat_groups")]
    assert [Path(file).name for file in masters] == ["1_1.tensor.swp", "0_0.tensor.swp"]
    assert len(files) == 6
