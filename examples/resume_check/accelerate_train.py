"""An Accelerate script with FSDP 2 that `reshard resume-check` can run.

torchrun --nproc-per-node 2 accelerate_train.py --steps 8 --save run --save-after 4 --losses log
reshard resume-check run --world-size 1 --world-size 2 --unbroken log --control --command "torchrun
    --nproc-per-node {world_size} accelerate_train.py --resume {checkpoint} --steps {steps}
    --losses {log}"
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from common import Log, Model, arguments, samples


def main() -> None:
    """Train from the checkpoint, or from the start."""
    chosen = arguments()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if chosen.resume:
        accelerator.load_state(chosen.resume)  # accelerator.step too
    log = Log(chosen.losses)
    for _ in range(chosen.steps):
        part = samples(accelerator.step, accelerator.process_index, accelerator.num_processes)
        with accelerator.accumulate(model):  # counts accelerator.step
            loss = model(part.to(accelerator.device))
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        whole = accelerator.reduce(loss.detach().double(), "mean")
        log.step(accelerator.step, whole.item(), float(norm))
        if accelerator.step == chosen.save_after:
            accelerator.save_state(chosen.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
