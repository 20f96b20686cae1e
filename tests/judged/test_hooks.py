"""`reshard.stamp_engine` in real DeepSpeed: every file has a stamp, and DeepSpeed loads them."""

from __future__ import annotations

import torch

import reshard
from reshard.containers import torch_reader
from tests.trainer import worlds

STAGES = (1, 2, 3)


def engine_of(stage):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler
    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def save_and_load(ranks, directory):
    """Save at every stage with stamps; what a new engine finds when it loads that."""
    from deepspeed.utils import safe_get_full_fp32_param

    def masters(engine):
        return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]

    found = {}
    for stage in STAGES:
        engine = engine_of(stage)
        reshard.stamp_engine(engine)
        loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().sum()
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(f"{directory}/{stage}", client_state={"epoch": 3})
        again = engine_of(stage)
        path, client = again.load_checkpoint(f"{directory}/{stage}")
        same = all(map(torch.equal, masters(engine), masters(again)))
        kept = client["epoch"], any("stamp" in key for key in client)
        found[stage] = path is not None, kept, same, again.global_steps
    return found


def test_deepspeed_loads_the_files_that_its_engine_stamped(tmp_path):
    for found in worlds.run(2, save_and_load, str(tmp_path)):
        assert found == dict.fromkeys(STAGES, (True, (3, False), True, 1))
    ids = set()
    for stage in STAGES:
        files = {path.name: torch_reader.read(path) for path in tmp_path.glob(f"{stage}/*/*.pt")}
        assert len(files) == (4 if stage == 3 else 3)
        for name, file in files.items():
            assert file.stamp.file == name
            assert (file.stamp.world_size, file.stamp.step) == (2, 1)
            assert f"pp_rank_{file.stamp.rank}_" in name or name.startswith("mp_rank_00")
            ids.add(file.stamp.save_id)
        with reshard.open(tmp_path / str(stage)) as checkpoint:
            assert checkpoint.manifest.train.client == {"epoch": 3}
    assert len(ids) == 1  # one run, one step
