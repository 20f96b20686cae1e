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


def save(_ranks, place):
    """Return what it then trains, and weights and moments at the save."""
    checkpointer, model, optimizer, scheduler = _make()
    _train(model, optimizer, scheduler, 0)
    checkpointer.save_model(model, str(place))
    checkpointer.save_optimizer(optimizer, model, str(place), scheduler)
    checkpointer.save_on_global_ranks(_Rng(), "rng", str(place))
    if dist.get_rank() == 0:
        torch.save({"step": STEPS, "epoch": 0}, place / "step_scheduler.pt")
    weights = {name: each.full_tensor().tolist() for name, each in model.state_dict().items()}
    slots = zip(model.named_parameters(), optimizer.state.values(), strict=True)
    moments = {name: state["exp_avg"].full_tensor().tolist() for (name, _), state in slots}
    return [*_train(model, optimizer, scheduler, STEPS), weights, moments]


def resume(_ranks, place):
    """Return what it trains after the load."""
    checkpointer, model, optimizer, scheduler = _make()
    checkpointer.load_model(model, str(place / "model"))
    checkpointer.load_optimizer(optimizer, model, str(place), scheduler)
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


def _make():
    programs.enter(PROGRAM)
    from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, CheckpointingConfig

    torch.manual_seed(dist.get_rank())  # each rank's own weights, if nothing is loaded
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SIZES, **heads))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = CheckpointingConfig(save_consolidated=False)
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
