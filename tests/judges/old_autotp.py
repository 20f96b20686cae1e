"""Train a model that an older DeepSpeed's AutoTP cuts, and save it; or load it and train on.

Each job is a function of (ranks, ...) for `worlds.run_in_turn`, in a process that called
`old_deepspeed.enter`. Rank 0 writes ``expected.pt`` in the place: what the layers gather, logits,
and losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

WORDS, STEPS, LATER = 32, 3, 2


def save(_ranks, place, kind, tp, stage):
    """Train and save."""
    engine = _build(kind, tp, stage)
    _train(engine, 0, STEPS)
    engine.save_checkpoint(place)
    _go_on(engine, place)


def resume(_ranks, place, kind, tp, stage, loaded):
    """Load."""
    engine = _build(kind, tp, stage)
    engine.load_checkpoint(loaded)
    _go_on(engine, place)


def _build(kind, tp, stage):
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    dtype = torch.bfloat16 if stage == 2 else torch.float32
    config = AutoConfig.for_model(
        kind,
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = deepspeed.tp_model_init(AutoModelForCausalLM.from_config(config), tp, dtype)
    settings = {
        "train_micro_batch_size_per_gpu": 4 * tp // dist.get_world_size(),
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    parameters = model.parameters()
    return deepspeed.initialize(model=model, model_parameters=parameters, config=settings)[0]


def _go_on(engine, place):
    expected = {"params": _gather(engine), "tokens": torch.arange(12)[None]}
    engine.eval()
    with torch.no_grad():
        expected["logits"] = engine(input_ids=expected["tokens"]).logits.float()
    engine.train()
    expected["later"] = _train(engine, STEPS, LATER)
    if dist.get_rank() == 0:
        place.mkdir(exist_ok=True)
        torch.save(expected, place / "expected.pt")
        engine.module.config.save_pretrained(place)


def _train(engine, first, steps):
    from deepspeed.utils import groups

    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(WORDS, (4, 12), generator=generator)
        own = tokens.chunk(groups.get_data_parallel_world_size())[groups.get_data_parallel_rank()]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        with torch.no_grad():  # torch 2.13 refuses what 0.18.9 gathers into parts of a buffer
            engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


@torch.no_grad()
def _gather(engine):
    from deepspeed.module_inject.layers import TensorParallel_Layer

    whole = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for name, layer in engine.module.named_modules():
        if isinstance(layer, TensorParallel_Layer):
            names = [f"{name}.{own}" for own, _ in layer.named_parameters(recurse=False)]
            held = [torch.nn.Parameter(whole[own]) for own in names]
            layer.gather_params(held)
            whole |= {own: param.data.clone() for own, param in zip(names, held, strict=True)}
    return whole
