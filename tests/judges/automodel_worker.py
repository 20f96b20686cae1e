"""NeMo Automodel's own Checkpointer: train and save, load and train on.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from tests.judges import programs

PROGRAM = "nemo-automodel"
STEPS, VOCAB = 3, 40
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
FOLDERS = {"Automodel": ("", ""), "NeMo RL": ("weights", "optimizer")}


def save(_ranks, place, program, lora):
    """Return what it then trains, and weights and moments at the save."""
    checkpointer, model, optimizer, scheduler = _make(lora)
    _train(model, optimizer, scheduler, 0)
    weights_at, optimizer_at = (str(place / folder) for folder in FOLDERS[program])
    checkpointer.save_model(model, weights_at, peft_config=_lora() if lora else None)
    checkpointer.save_optimizer(optimizer, model, optimizer_at, scheduler)
    if program == "Automodel":
        checkpointer.save_on_global_ranks(_Rng(), "rng", str(place))
        if dist.get_rank() == 0:
            torch.save({"step": STEPS, "epoch": 0}, place / "step_scheduler.pt")
    trained = dict(model.named_parameters())
    trained = {name: each for name, each in trained.items() if each.requires_grad}
    kept = trained if lora else model.state_dict()
    weights = {name: each.full_tensor().tolist() for name, each in kept.items()}
    slots = zip(trained, optimizer.state.values(), strict=True)
    moments = {name: state["exp_avg"].full_tensor().tolist() for name, state in slots}
    return [*_train(model, optimizer, scheduler, STEPS), weights, moments]


def resume(_ranks, place, program, lora):
    """Return what it trains after the load."""
    checkpointer, model, optimizer, scheduler = _make(lora)
    weights_at, optimizer_at = (place / folder for folder in FOLDERS[program])
    checkpointer.load_model(model, str(weights_at / "model"))
    checkpointer.load_optimizer(optimizer, model, str(optimizer_at), scheduler)
    rng = _Rng()
    if (place / f"rng/rng_global_rank_{dist.get_rank()}.pt").exists():
        checkpointer.load_on_global_ranks(rng, "rng", str(place))
        assert rng.loaded == {"seed": dist.get_rank()}
    return _train(model, optimizer, scheduler, STEPS)


class _Rng:
    loaded = None

    def state_dict(self):
        return {"seed": dist.get_rank()}

    def load_state_dict(self, state):
        self.loaded = state


def _lora():
    from nemo_automodel.components._peft.lora import PeftConfig

    return PeftConfig(target_modules=["*q_proj", "*down_proj"], dim=2, alpha=4)


def _make(lora):
    programs.enter(PROGRAM)
    from nemo_automodel.components._peft.lora import apply_lora_to_linear_modules
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig

    # Each rank's own weights, if nothing is loaded; below adapters the same base.
    torch.manual_seed(9 if lora else dist.get_rank())
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZES, **heads))
    if lora:
        torch.manual_seed(dist.get_rank())
        assert apply_lora_to_linear_modules(model, _lora()) == 2 * SIZES["num_hidden_layers"]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    config = CheckpointingConfig(save_consolidated=False, is_peft=lora)
    checkpointer = Checkpointer(config, dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    return checkpointer, model, optimizer, get_linear_schedule_with_warmup(optimizer, 2, 9)


def _train(model, optimizer, scheduler, first):
    losses = []
    for step in range(first, first + STEPS):
        tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, scheduler.get_last_lr()]
