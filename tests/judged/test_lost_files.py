"""Files of ranks that were lost: the error is `IncompleteError`, and names the missing file."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from reshard import formats
from reshard.errors import IncompleteError
from tests.judged.test_torch import list_options

DEEPSPEED = [
    ("z2_bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("z1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("z3_bf16_ws4", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("z3_bf16_ws4", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
]
TORCH = [
    ("fsdp2_ranks", "optim_rank1.pt"),
    ("fsdp2_ranks_ws4", "model_rank0.pt"),
    ("fsdp1_sharded_shardedtensor", "model_rank1.pt"),
    ("fsdp1_sharded_shardedtensor_one_file", "rank1.pt"),
    ("fsdp1_local_flat", "model_rank1.pt"),
    ("fsdp1_local_flat", "optim_rank1.pt"),
    ("fsdp1_local_orig", "model_rank1.pt"),
]
LIBRARIES = [
    ("verl_fsdp2", "model_world_size_4_rank_3.pt"),
    ("acc_fsdp1_sharded_ranks", "pytorch_model_fsdp_0_rank1.bin"),
    ("acc_fsdp1_sharded_ranks", "optimizer_0_rank0.bin"),
]


def refuse_without(place, name, **told):
    next(place.rglob(name)).unlink()
    with pytest.raises(IncompleteError, match=rf"(^|[\s/]){re.escape(name)} is missing") as caught:
        formats.read(place, **told)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(("case", "name"), DEEPSPEED)
def test_a_lost_file_of_deepspeed(copied, case, name):
    refuse_without(copied(case), name)


@pytest.mark.parametrize(("case", "name"), TORCH)
def test_a_lost_file_of_torch(torch_made, tmp_path, case, name):
    copy = shutil.copytree(torch_made / case / "ckpt", tmp_path / "ckpt")
    refuse_without(copy, name, **list_options(case))


@pytest.mark.parametrize(("case", "name"), LIBRARIES)
def test_a_lost_file_of_a_library(library_case, tmp_path, case, name):
    refuse_without(shutil.copytree(library_case(case) / "ckpt", tmp_path / "ckpt"), name)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_plain_tensors_of_one_rank_are_not_the_model(torch_made, tmp_path, suffix, lost):
    """As torch_checkpointing 0.1 saves them: only the optimizer states the number of ranks."""
    saved = torch_made / "fsdp2_ranks" / "ckpt"
    for rank in range(2):
        shutil.copy(saved / f"optim_rank{rank}.pt", tmp_path / f"optim_{rank}.pt")
        torch.save({"step": 3}, tmp_path / f"train_state_{rank}.pt")
        model = torch.load(saved / f"model_rank{rank}.pt", weights_only=False)
        plain = {n: getattr(t, "_local_tensor", t).detach().clone() for n, t in model.items()}
        write = save_file if suffix == ".safetensors" else torch.save
        write(plain, tmp_path / f"model_{rank}{suffix}")
    refuse_without(tmp_path, f"model_{lost}{suffix}")
