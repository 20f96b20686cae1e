"""A DeepSpeed script that `reshard resume-check` can run.

torchrun --nproc-per-node 2 deepspeed_train.py --steps 8 --save run --save-after 4 --losses log
reshard resume-check run --world-size 1 --world-size 2 --unbroken log --control --command "torchrun
    --nproc-per-node {world_size} deepspeed_train.py --resume {checkpoint} --steps {steps}
    --losses {log} --zero-stage {zero_stage}"
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, Log, Model, arguments, samples


def main() -> None:
    """Train from the checkpoint, or from the start."""
    chosen = arguments()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": chosen.zero_stage},
        # torch_adam: DeepSpeed's own Adam has to be compiled
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    if chosen.resume and engine.load_checkpoint(chosen.resume)[0] is None:
        raise SystemExit(f"{chosen.resume} holds no checkpoint")
    log = Log(chosen.losses)
    for _ in range(chosen.steps):
        loss = engine(samples(engine.global_steps, rank, world).to(engine.device))
        engine.backward(loss)
        engine.step()
        whole = loss.detach().double()
        dist.all_reduce(whole)
        log.step(engine.global_steps, whole.item() / world, float(engine.get_global_grad_norm()))
        if engine.global_steps == chosen.save_after:
            engine.save_checkpoint(chosen.save)


if __name__ == "__main__":
    main()
