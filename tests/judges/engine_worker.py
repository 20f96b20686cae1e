"""Real engines with transformers' model that resume from converted Megatron runs.

A job says which engine, where its checkpoint lies, and the config.json that came with it. Rank 0
saves what the engine held when it had loaded, and how it went on: see `_report`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.judges import library_state, ranks
from tests.judges.megatron_cases import LATER, SEQUENCE, STEPS
from tests.judges.megatron_data import EVALUATED, MICRO, SAMPLES, batch

LR, DECAY = 1e-2, 0.01  # of megatron_run
UPDATES = 10  # of the whole schedule, as megatron_run's 80 samples
CLIP = 1.0
PRELOADED = (
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.stage3",
    "reshard.dcp",
    "reshard.deepspeed",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.trainer",
)
Loss = Callable[[Tensor], Tensor]


def work(job: ranks.Job, rank: int) -> None:
    """Load and go on."""
    ranks.join_group(job, rank)
    found = ENGINES[job.told["engine"]](job.told)
    if rank == 0:
        torch.save(found, job.result)


# What all engines share


def _build(told: dict[str, Any]) -> nn.Module:
    """Build the model of the config.json that reshard wrote, with other values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(told["config"])
    torch.manual_seed(99)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def _group(model: nn.Module) -> list[dict[str, Any]]:
    """Return Megatron's two groups: only matrices decay."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]


def _decay(update: int) -> float:
    return 1 - update / UPDATES


def _rows(told: dict[str, Any], step: int) -> list[Tensor]:
    """Return this rank's micro batches of a step."""
    tp = told.get("tp", 1)  # neighbours that see the same data
    replicas = dist.get_world_size() // tp
    return list(batch(told["vocabulary"], step)[dist.get_rank() // tp :: replicas].split(MICRO))


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows).loss


def _mean(losses: list[Tensor]) -> float:
    total = torch.stack([loss.detach() for loss in losses]).mean()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


@torch.no_grad()
def _logits(told: dict[str, Any], model: nn.Module) -> Tensor:
    return model(input_ids=batch(told["vocabulary"], EVALUATED)[:, :SEQUENCE]).logits.float()


def _train(told: dict[str, Any], model: nn.Module, update: Callable[[], None]) -> list[float]:
    """Train in plain torch; ``update`` clips, steps and schedules."""
    losses = []
    for step in range(STEPS, STEPS + LATER):
        micros = [_loss(model, rows) for rows in _rows(told, step)]
        (sum(micros) / len(micros)).backward()
        update()
        losses.append(_mean(micros))
    return losses


def _updater(model: nn.Module, optimizer: Any, scheduler: Any) -> Callable[[], None]:
    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return update


def _report(held: dict[str, Any], logits: Tensor, losses: list[float], **counts: Any) -> Any:
    return {"held": held, "logits": logits, "losses": losses, **counts}


def _held(told: dict[str, Any], model: nn.Module, optimizer: Any) -> dict[str, Any]:
    expected = library_state.read_state(_build(told), model, optimizer)
    return {name: expected[name] for name in ("params", "optimizer", "steps")}


# Engines


def go_on_torch(told: dict[str, Any]) -> Any:
    """Continue in one process, from a file of torch.save."""
    model = _build(told)
    optimizer = torch.optim.AdamW(_group(model), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    state = torch.load(told["place"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    held, logits = _held(told, model, optimizer), _logits(told, model)
    losses = _train(told, model, _updater(model, optimizer, scheduler))
    return _report(held, logits, losses, step=state["step"], samples=state["global_samples"])


def go_on_dcp(told: dict[str, Any]) -> Any:
    """Continue in FSDP 2, from DCP, a file per rank, or the run through reshard's reader."""
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    model = _build(told)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(_group(model), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    if told["engine"] == "fsdp2":
        rank = dist.get_rank()
        state["model"] = torch.load(f"{told['place']}/model_rank{rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        numbered = torch.load(f"{told['place']}/optim_rank{rank}.pt", weights_only=False)
        optimizer.load_state_dict(numbered)
        state["optim"] = get_optimizer_state_dict(model, optimizer)
    elif told["engine"] == "live dcp":
        from reshard.dcp import StorageReader

        load(state, storage_reader=StorageReader(told["place"]))
    else:
        load(state, checkpoint_id=told["place"])
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    held, logits = _held(told, model, optimizer), _logits(told, model)
    scheduler.last_epoch = STEPS  # a DCP directory of weights and optimizer has no scheduler
    losses = _train(told, model, _updater(model, optimizer, scheduler))
    return _report(held, logits, losses)


def go_on_deepspeed(told: dict[str, Any]) -> Any:
    """Continue in DeepSpeed at any stage, from its directory, a universal one, or the run."""
    import deepspeed

    from tests.judges import parallel_autotp, parallel_models
    from tests.judges.deepspeed_state import snapshot

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = _build(told)
    if "tp" in told:
        model = deepspeed.tp_model_init(model, told["tp"], torch.float32)
    config = {
        # Not the whole batch: in it DeepSpeed counts tensor-parallel ranks as well.
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": len(_rows(told, STEPS)),
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": told["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": told.get("universal", False)},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config,
        model_parameters=_group(model),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _decay),
    )
    if told["engine"] == "live deepspeed":
        import reshard.deepspeed

        reshard.deepspeed.load_checkpoint(engine, told["place"])
    else:
        path, _ = engine.load_checkpoint(told["place"])
        if path is None:
            raise AssertionError("DeepSpeed found no checkpoint")
    if "tp" in told:
        parallel_models.Tp.size = told["tp"]
        parallel_models.Tp.group = deepspeed.utils.groups.get_tensor_model_parallel_group()
    found = snapshot(engine, ("exp_avg", "exp_avg_sq"))
    gather = parallel_autotp.gatherer(engine.module) if "tp" in told else lambda _, own: own
    names = list(found.params)
    held = {
        "params": {n: gather(n, found.params[n]) for n in names},
        "optimizer": {n: {s: gather(n, found.slots[s][n]) for s in found.slots} for n in names},
        "steps": found.steps,
    }
    counts = {"step": engine.global_steps, "samples": engine.global_samples}
    counts["scheduler"] = engine.lr_scheduler.last_epoch
    engine.eval()
    logits = _logits(told, engine)
    engine.train()
    losses = []
    for step in range(STEPS, STEPS + LATER):
        micros = []
        for rows in _rows(told, step):
            micros.append(_loss(engine, rows))
            engine.backward(micros[-1])
            engine.step()
        losses.append(_mean(micros))
    return _report(held, logits, losses, **counts)


def go_on_accelerate(told: dict[str, Any]) -> Any:
    """Continue in Accelerate with FSDP 2, from ``load_state``."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.judges.library_cpu import pass_for_gpus

    pass_for_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = _build(told)
    made = torch.optim.AdamW(_group(model), lr=LR)
    model, optimizer = accelerator.prepare(model, made)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    accelerator._schedulers.append(scheduler)  # stepped by the program, once an update
    accelerator.load_state(told["place"])
    held, logits = _held(told, model, optimizer.optimizer), _logits(told, model)
    counts = {"step": accelerator.step, "scheduler": scheduler.last_epoch}
    losses = _train(told, model, _updater(model, optimizer.optimizer, scheduler))
    return _report(held, logits, losses, **counts)


def go_on_trainer(told: dict[str, Any]) -> Any:
    """Continue in the HF Trainer under DDP, from ``resume_from_checkpoint``."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from tests.judges.hf_trainer import Rows

    seen: dict[str, Any] = {}
    losses: list[float] = []

    class Tell(TrainerCallback):
        def on_train_begin(self, _args: Any, state: Any, _control: Any, **live: Any) -> None:
            model = trainer.model_wrapped
            seen["held"] = _held(told, model, trainer.optimizer.optimizer)
            seen["logits"] = _logits(told, model)
            seen["step"] = state.global_step
            seen["scheduler"] = live["lr_scheduler"].last_epoch

        def on_step_end(self, _args: Any, state: Any, control: Any, **_live: Any) -> None:
            control.should_training_stop = state.global_step >= STEPS + LATER

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **_given: Any) -> Any:
            loss = model(**inputs).loss
            losses.append(_mean([loss]))
            return loss

    rows = torch.cat([batch(told["vocabulary"], step) for step in range(STEPS + LATER)])
    accumulation = SAMPLES // (MICRO * dist.get_world_size())
    args = TrainingArguments(
        output_dir=told["run"],
        max_steps=UPDATES,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=accumulation,
        learning_rate=LR,
        weight_decay=DECAY,
        lr_scheduler_type="linear",
        max_grad_norm=CLIP,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = InOrder(_build(told), args, train_dataset=Rows(rows), callbacks=[Tell()])
    trainer.train(resume_from_checkpoint=told["place"])
    of_updates = torch.tensor(losses).view(LATER, accumulation).mean(1).tolist()
    return seen | {"losses": of_updates}


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "torch": go_on_torch,
    "dcp": go_on_dcp,
    "live dcp": go_on_dcp,
    "fsdp2": go_on_dcp,
    "deepspeed": go_on_deepspeed,
    "live deepspeed": go_on_deepspeed,
    "accelerate": go_on_accelerate,
    "hf-trainer": go_on_trainer,
}


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
