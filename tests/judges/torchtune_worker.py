"""torchtune's own checkpointers and loading: train and save, load and train on.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.judges import programs
from tests.judges.library_stubs import stand_in

PROGRAM = "torchtune"
MISSING = (
    *("datasets", "torchdata", "tiktoken", "sentencepiece", "kagglehub", "PIL", "blobfile"),
    *("torchvision", "omegaconf"),
)
STEPS = 3
SIZES = {"num_heads": 4, "num_kv_heads": 2}
VOCAB, WIDTH, INNER, LAYERS = 40, 16, 24, 2
PUBLISHED = {"llama3": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def save(_ranks, family, form, root):
    """Save as ``full_finetune_distributed`` does; return the losses of the steps after the save.

    Also return the whole state under Hugging Face's names, by torchtune's own conversion.
    """
    tune, training = enter()
    if dist.get_rank() == 0:
        _publish(family, root / "base")
    dist.barrier()
    published = _make_checkpointer("HF", root / "base", family, root)
    model, optimizer = _build(family, published.load_checkpoint()["model"])
    _train(model, optimizer, 0)
    first, device = dist.get_rank() == 0, torch.device("cpu")
    weights = training.gather_cpu_state_dict(model, first, device)
    slots = training.get_full_optimizer_state_dict(model, optimizer, first, device)
    found = None
    if first:
        found = [_to_hf(tune, family, weights)]
        found += [
            _to_hf(tune, family, {fqn: state[slot] for fqn, state in slots["state"].items()})
            for slot in ("exp_avg", "exp_avg_sq")
        ]
        state = {"model": weights, "optimizer": slots, "seed": 0, "epochs_run": 1}
        progress = {"total_epochs": 3, "max_steps_per_epoch": -1}
        checkpointer = published
        if form == "TorchTune":
            torch.save(weights, root / "base" / "own.pt")
            checkpointer = _make_checkpointer(form, root / "base", family, root)
        checkpointer.save_checkpoint({**state, **progress}, 0, intermediate_checkpoint=True)
    return _train(model, optimizer, STEPS), found


def resume(_ranks, family, form, path):
    """Return the losses after torchtune's own functions loaded a directory of DCP."""
    tune, training = enter()
    state = _load_state_dict_from_keys(checkpoint_id=path)
    weights, slots = state["model"], state["optim"]
    if form == "HF":
        weights = _to_tune(tune, family, weights)
        renamed = {name: _rename(tune, family, name) for name in slots["state"]}
        moved = {
            slot: _to_tune(tune, family, {n: each[slot] for n, each in slots["state"].items()})
            for slot in ("exp_avg", "exp_avg_sq")
        }
        steps = {renamed[name]: each["step"] for name, each in slots["state"].items()}
        slots = {
            "state": {
                name: {"step": step, **{slot: each[name] for slot, each in moved.items()}}
                for name, step in steps.items()
            },
            "param_groups": [
                {**group, "params": [renamed[name] for name in group["params"]]}
                for group in slots["param_groups"]
            ],
        }
    model, optimizer = _build(family, weights)
    training.load_from_full_optimizer_state_dict(model, optimizer, slots, torch.device("cpu"))
    return _train(model, optimizer, STEPS)


def resume_own(_ranks, family, form, root):
    """Return the losses after torchtune's own checkpointer loaded what it saved."""
    _, training = enter()
    (stored,) = (root / "run" / "epoch_0").glob("model-*-of-*")
    checkpointer = getattr(training, f"FullModel{form}Checkpointer")(
        checkpoint_dir=root / "base",
        checkpoint_files=[f"epoch_0/{stored.name}"],
        model_type=family.upper(),
        output_dir=root / "run",
        should_load_recipe_state=True,
    )
    state = checkpointer.load_checkpoint()
    model, optimizer = _build(family, state["model"])
    slots = state["optimizer"]
    training.load_from_full_optimizer_state_dict(model, optimizer, slots, torch.device("cpu"))
    return _train(model, optimizer, STEPS)


def save_distributed(_ranks, path):
    """Return the state that torchtune's class for DCP saved, and the losses after the save."""
    _, training = enter()
    model, optimizer = _build("llama3", None)
    _train(model, optimizer, 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"seed": 0, "epochs_run": 1, "total_epochs": 3, "max_steps_per_epoch": -1}
    training.DistributedCheckpointer(path, path).save_checkpoint(state, 0)
    return _collect(model, optimizer), _train(model, optimizer, STEPS)


def resume_distributed(_ranks, path):
    """Return the same of what torchtune's recipes load in their latest directory of DCP."""
    _, training = enter()
    model, optimizer = _build("llama3", None, seed=2)
    client = training.checkpointing._checkpoint_client.CheckpointClient(_Settings(device="cpu"))
    client._dcp_checkpointer = training.DistributedCheckpointer(path, path)
    assert client.load_distributed_checkpoint(model, optimizer)["epochs_run"] == 1
    return _collect(model, optimizer), _train(model, optimizer, STEPS)


class _Settings(dict):
    __getattr__ = dict.get


def _collect(model, optimizer):
    named = dict(model.named_parameters())
    slots = ("exp_avg", "exp_avg_sq")
    parts = [named, *({n: optimizer.state[p][slot] for n, p in named.items()} for slot in slots)]
    return [{name: each.full_tensor().tolist() for name, each in part.items()} for part in parts]


def enter():
    """Import torchtune and its training part once; return them."""
    programs.enter(PROGRAM)
    with stand_in(MISSING):
        import torchtune
        import torchtune.models.convert_weights
        import torchtune.models.llama3
        import torchtune.models.qwen2._convert_weights
        import torchtune.training.checkpointing._checkpoint_client
        from torchtune import training
    return torchtune, training


def _publish(family, place):
    torch.manual_seed(0)
    config, model = PUBLISHED[family]
    settings = config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=SIZES["num_heads"],
        num_key_value_heads=SIZES["num_kv_heads"],
        max_position_embeddings=64,
    )
    model(settings).save_pretrained(place)


def _make_checkpointer(form, place, family, root):
    from torchtune.training import checkpointing

    return getattr(checkpointing, f"FullModel{form}Checkpointer")(
        checkpoint_dir=place,
        checkpoint_files=["model.safetensors" if form == "HF" else "own.pt"],
        model_type=family.upper(),
        output_dir=root / "run",
    )


def _build(family, weights, seed=1):
    import torchtune

    torch.manual_seed(seed)
    sizes = {**SIZES, "embed_dim": WIDTH, "intermediate_dim": INNER, "max_seq_len": 64}
    build = getattr(getattr(torchtune.models, family), family)
    model = build(vocab_size=VOCAB, num_layers=LAYERS, **sizes)
    weights = model.state_dict() if weights is None else weights
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    # This replaces the parameters, so the optimizer comes after it.
    torchtune.training.load_from_full_model_state_dict(
        model, weights, torch.device("cpu"), strict=True
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model, optimizer, first):
    """Train on the same batch on every rank, so that the losses are those of any number of them."""
    losses = []
    for step in range(first, first + STEPS):
        tokens = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
        logits = model(tokens)[:, :-1].reshape(-1, VOCAB)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _to_hf(tune, family, tensors):
    if family == "qwen2":
        found = tune.models.qwen2._convert_weights.qwen2_tune_to_hf(tensors, **SIZES, dim=WIDTH)
    else:
        found = tune.models.convert_weights.tune_to_hf(tensors, **SIZES, dim=WIDTH)
    return {name: each.tolist() for name, each in found.items()}


def _to_tune(tune, family, tensors):
    if family == "qwen2":
        return tune.models.qwen2._convert_weights.qwen2_hf_to_tune(tensors, **SIZES, dim=WIDTH)
    return tune.models.convert_weights.hf_to_tune(tensors, **SIZES, dim=WIDTH)


def _rename(tune, family, name):
    module = tune.models.convert_weights
    table = tune.models.qwen2._convert_weights if family == "qwen2" else module
    return module.get_mapped_key(name, table._FROM_HF)
