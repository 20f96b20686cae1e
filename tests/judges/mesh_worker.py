"""Live FSDP 2 with tensor parallelism and replicas: save, and resume from reshard's output.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values. A mesh is written
as ``--mesh`` has it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.judges import deepspeed_models, split_worker, torch_models
from tests.judges.ranks import mean_over_ranks
from tests.judges.split_worker import (
    EXPECTED,
    LOADS,
    STEPS,
    differing,
    rank_files,
    state_of,
)
from tests.support.sample_tensors import same

TENSOR = "tp"


class Replicated(ParallelStyle):
    """A module whose parameters are DTensors that nothing cuts, as ``distribute_module`` has it."""

    def _apply(self, module, mesh):
        made = lambda _module, args, mesh: tuple(  # noqa: E731
            DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in args
        )
        plain = lambda _module, output, _mesh: output.to_local()  # noqa: E731
        return distribute_module(module, mesh, input_fn=made, output_fn=plain)


# The same plan: torch's own styles of `torch_models.Mlp`, and what a user writes for reshard.
STYLES = {
    "embed": lambda: ColwiseParallel(output_layouts=Replicate()),
    "blocks.*.norm": Replicated,
    "blocks.*.inner.up": ColwiseParallel,
    "blocks.*.inner.down": RowwiseParallel,
    "blocks.*.out": lambda: RowwiseParallel(input_layouts=Replicate()),
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
PLAN = {
    "embed": "colwise",
    "blocks.*.norm": "replicate",
    "blocks.*.inner.up": "colwise",
    "blocks.*.inner.down": "rowwise",
    "blocks.*.out": "rowwise",
    "head": "colwise",
}


def make_mesh(text):
    axes = dict(axis.split("=") for axis in text.split(","))
    return init_device_mesh("cpu", tuple(map(int, axes.values())), mesh_dim_names=tuple(axes))


def shard(model, mesh, units, **options):
    """Apply ``fully_shard`` over all axes that tensor parallelism has left."""
    names = tuple(name for name in mesh.mesh_dim_names if name != TENSOR)
    if names:
        at = mesh[names if len(names) > 1 else names[0]]
        for unit in units:
            fully_shard(unit, mesh=at)
        fully_shard(model, mesh=at, **options)
    return model


def live(mesh, seed):
    """Return a sharded model and its optimizer with two groups."""
    torch.manual_seed(seed)
    model = torch_models.mlp()
    if TENSOR in mesh.mesh_dim_names:
        parallelize_module(model, mesh[TENSOR], {at: made() for at, made in STYLES.items()})
    shard(model, mesh, model.blocks)
    named = dict(model.named_parameters())
    small = [n for n in named if n.endswith(("bias", "gain")) or ".norm." in n]
    groups = [
        {"params": [p for n, p in named.items() if n not in small], "weight_decay": 0.1},
        {"params": [named[n] for n in small], "betas": (0.8, 0.95)},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def save_uneven(ranks, place, rows):
    """Save a matrix that FSDP and tensor parallelism cut along one dim: in DCP, a file per rank."""
    mesh = make_mesh("dp=3,tp=2")
    model = nn.Linear(2, len(rows), bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.tensor(rows), mesh[TENSOR], [Shard(0)]))
    state = shard(model, mesh, []).state_dict()
    dcp.save({"model": state}, checkpoint_id=place / "dcp")
    (place / "ranks").mkdir(exist_ok=True)
    torch.save(state, place / "ranks" / f"model_rank{ranks.rank}.pt")


def save_on_some(ranks, place, members, rows):
    """Save a matrix that lies on some ranks of the program alone, a file per rank."""
    mesh = DeviceMesh("cpu", members)
    if ranks.rank in members:
        shards = distribute_tensor(torch.tensor(rows), mesh, [Shard(0)])
        torch.save({"weight": shards}, place / f"model_rank{ranks.rank}.pt")


def share_of(mesh, batch, ranks):
    """Return the rows of this rank's model; the ranks of one tensor-parallel group get the same."""
    width = mesh[TENSOR].size() if TENSOR in mesh.mesh_dim_names else 1
    size = len(batch) // (ranks.world // width)
    return batch[ranks.rank // width * size :][:size]


def train(ranks, mesh, model, optimizer, first, steps):
    share = partial(share_of, mesh)
    return split_worker.train(ranks, model, optimizer, first, steps, share)


def save(ranks, text, place, steps):
    """Train; save a file per rank, in DCP, and the expected state; train on for further steps."""
    mesh = make_mesh(text)
    model, optimizer = live(mesh, 7)
    train(ranks, mesh, model, optimizer, 0, STEPS)
    rank_files(ranks, place, model.state_dict(), optimizer.state_dict())
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=place / "dcp")
    if not steps:
        return []
    expected = state_of(model, optimizer)
    if ranks.rank == 0:
        torch.save(expected, place / EXPECTED)
    return train(ranks, mesh, model, optimizer, STEPS, steps)


def resumed(ranks, text, form, place, source):
    """Load into a model with other values, compare with the expected state, train on."""
    mesh = make_mesh(text)
    model, optimizer = live(mesh, 99)
    LOADS[form](ranks, Path(place), model, optimizer)
    wrong = differing(state_of(model, optimizer), torch.load(source / EXPECTED))
    wrong += misplaced(ranks, place, form, model, optimizer)
    return {"differing": wrong, "losses": train(ranks, mesh, model, optimizer, STEPS, 2)}


def misplaced(ranks, place, form, model, optimizer):
    """Return names of values that differ between a rank's file and its live model or optimizer."""
    if form != "pair":
        return []
    read = torch.load(place / f"model_rank{ranks.rank}.pt")
    held = model.state_dict()
    wrong = [f"{name} in the file" for name in read if place_of(read[name]) != place_of(held[name])]
    for parameter, slots in optimizer.state.items():
        wrong += [
            f"{slot} of {tuple(parameter.shape)}"
            for slot in ("exp_avg", "exp_avg_sq")
            if place_of(slots[slot]) != place_of(parameter)
        ]
    return wrong


def place_of(tensor):
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tensor.placements, tensor.to_local().shape


def from_deepspeed(ranks, text, place, expected):
    """Continue DeepSpeed's menagerie from ZeRO-3, its Llama cut by transformers' own plan."""
    mesh = make_mesh(text)
    torch.manual_seed(99)
    model = deepspeed_models.menagerie_tied().float()  # as DeepSpeed has it, buffers too
    by_transformers(model.llama, mesh)
    scalar = model.extras.scalar  # fully_shard refuses a scalar
    shard(model, mesh, model.llama.model.layers, ignored_params={scalar})
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    optimizer = torch.optim.AdamW(trained, lr=0.5, weight_decay=0.7, eps=0.1)
    LOADS["pair"](ranks, place, model, optimizer)
    wrong = misplaced(ranks, place, "pair", model, optimizer)
    wrong += untrue(model, optimizer, expected)
    losses, first = [], expected["train"]["step"]
    for step in range(first, first + len(expected["next"]["losses"])):
        loss = model(share_of(mesh, deepspeed_models.global_batch(step, 0, 1), ranks))
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(scalar.grad)
        scalar.grad /= ranks.world
        clip([p.grad for p in trained if p.grad is not None])
        optimizer.step()
        losses.append(mean_over_ranks(loss, ranks.world))
    return {"differing": wrong, "losses": losses}


def by_transformers(model, mesh):
    """Shard as ``from_pretrained(distributed_config=...)`` does."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    plan = model._expand_parallel_plan(model.tp_plan)
    apply_tensor_parallelism(model, mesh[TENSOR], plan)
    model.tie_weights()


def packed(ranks, seed):
    """Return a mixture of experts whose gate and up are one tensor, cut by transformers' plan."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=2,
    )
    torch.manual_seed(seed)
    model = MixtralForCausalLM(config).float()
    by_transformers(model, make_mesh(f"tp={ranks.world}"))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train_packed(model, optimizer, first, steps):
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(whole(loss)))
    return losses


def gather_packed(model, optimizer):
    """Return the weights and the slots by name, as ``full_tensor`` gathers them."""
    named = {name: whole(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            named[f"{name}/{slot}"] = whole(optimizer.state[parameter][slot])
    return named


def save_packed(ranks, place):
    model, optimizer = packed(ranks, 7)
    train_packed(model, optimizer, 0, 2)
    rank_files(ranks, place, model.state_dict(), optimizer.state_dict())
    named = gather_packed(model, optimizer)
    if ranks.rank == 0:
        torch.save(named, place / EXPECTED)
    cuts = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return cuts, train_packed(model, optimizer, 2, 2)


def resume_packed(ranks, place, expected):
    model, optimizer = packed(ranks, 99)
    LOADS["pair"](ranks, place, model, optimizer)
    found, wanted = gather_packed(model, optimizer), torch.load(expected / EXPECTED)
    wrong = [name for name, value in wanted.items() if not same(found[name], value)]
    return wrong, train_packed(model, optimizer, 2, 2)


SLICE_RULES = """
parameters:
  model.embed_tokens.weight: column
  model.norm.weight: replicated
  lm_head.weight: column
  "model.layers.{i}.self_attn.q_proj.weight": column
  "model.layers.{i}.self_attn.k_proj.weight": column
  "model.layers.{i}.self_attn.v_proj.weight": column
  "model.layers.{i}.self_attn.o_proj.weight": row
  "model.layers.{i}.input_layernorm.weight": replicated
  "model.layers.{i}.post_attention_layernorm.weight": replicated
  "model.layers.{i}.mlp.gate.weight": replicated
"""


def save_slices(ranks, place):
    """Save the parts of a rank as plain tensors, and the whole ones as torch gathers them."""
    state = packed(ranks, 7)[0].state_dict()
    state = {name: t for name, t in state.items() if ".experts." not in name}
    parts = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
    (place / "slices").mkdir(exist_ok=True)
    name = f"model-rank-{ranks.rank}-part-0.safetensors"  # vLLM's ``ShardedStateLoader``
    save_file({n: t.contiguous() for n, t in parts.items()}, place / "slices" / name)
    gathered = {n: whole(t) for n, t in state.items()}
    if ranks.rank == 0:
        torch.save(gathered, place / EXPECTED)
    return {n: tuple(t.shape) for n, t in parts.items()}


def save_local_parts(ranks, place):
    """Save experts that each rank has for itself, and an average as parts; train on.

    Return the losses after the save, and the whole weights and moments.
    """
    model, optimizer, _ = local_parts(ranks, 0)
    train_local_parts(ranks, model, optimizer, 2)
    weights, slots = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    average = {n: (t.to_local() if isinstance(t, DTensor) else t) / 2 for n, t in weights.items()}
    state = {"model": weights, "ema": average, "optim": slots}
    torch.save(state, place / f"state_rank{ranks.rank}.pt")

    def join(tensor):
        if isinstance(tensor, DTensor):
            return tensor.full_tensor().tolist()
        parts = [torch.empty_like(tensor) for _ in range(ranks.world)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts).tolist()

    moments = {n: join(each["exp_avg"]) for n, each in slots["state"].items()}
    weights = {n: join(t) for n, t in weights.items()}
    return train_local_parts(ranks, model, optimizer, 3), weights, moments


def local_parts(ranks, seed):
    torch.manual_seed(seed)
    model, mesh = nn.Linear(5, 7), make_mesh(f"dp={ranks.world}")
    experts = nn.Parameter(torch.randn(6 // ranks.world, 2, 7) + ranks.rank)
    model.experts = experts
    fully_shard(model, mesh=mesh, ignored_params={experts})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), mesh


def train_local_parts(ranks, model, optimizer, steps):
    """Return the losses over the experts of all ranks, which any number of them computes."""
    losses = []
    for _ in range(steps):
        hidden = model(torch.ones(3, 5))
        hidden.register_hook(lambda gradient: gradient * ranks.world)  # FSDP takes the mean
        loss = (hidden @ model.experts.mT).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss, ranks.world) * ranks.world)
    return losses


def resume_local_parts(ranks, path):
    """Return the losses after DCP loaded the whole experts into the ranks' parts."""
    model, optimizer, mesh = local_parts(ranks, 99)

    def cut(tensor):
        is_part = not isinstance(tensor, DTensor) and tensor.dim()
        return DTensor.from_local(tensor, mesh, [Shard(0)]) if is_part else tensor

    slots = get_optimizer_state_dict(model, optimizer)
    states = {n: {k: cut(t) for k, t in each.items()} for n, each in slots["state"].items()}
    weights = {n: cut(t) for n, t in model.state_dict().items()}
    dcp.load({"model": weights, "optim": {**slots, "state": states}}, checkpoint_id=path)
    return train_local_parts(ranks, model, optimizer, 3)


def save_automodel(ranks, place, rows):
    """Save a cut matrix and its moments with the writers and names of NeMo Automodel."""
    mesh = make_mesh(f"dp={ranks.world}")
    weight = distribute_tensor(torch.tensor(rows), mesh, [Shard(0)])
    writer = dcp.HuggingFaceStorageWriter(str(place / "model"), save_distributed=True)
    dcp.save({"weight": weight}, storage_writer=writer)
    slots = {"step": torch.tensor(4.0), "exp_avg": weight + 10, "exp_avg_sq": weight + 20}
    state = {f"state.weight.{slot}": value for slot, value in slots.items()}
    dcp.save({"optim": {**state, "param_groups.weight.lr": 0.1}}, checkpoint_id=place / "optim")


def untrue(model, optimizer, expected):
    """Return names of values that differ from those of DeepSpeed's live engine."""
    told = {**expected["params"], **expected["frozen"], **expected["buffers"]}
    live_ones = model.state_dict(keep_vars=True)
    names = {id(p): name for name, p in model.named_parameters()}
    wrong = [n for n, value in told.items() if not same(whole(live_ones[n]), value)]
    states = {names[id(p)]: slots for p, slots in optimizer.state.items()}
    return wrong + [
        f"{slot} of {name}"
        for slot, values in expected["slots"].items()
        for name, value in values.items()
        if value.numel() and not same(whole(states[name][slot]), value)
    ]


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(gradients):
    """Clip gradients to norm 1 over several meshes, which ``clip_grad_norm_`` does not join."""
    norm = torch.stack([whole(g).double().square().sum() for g in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_(float(torch.clamp(1.0 / (norm + 1e-6), max=1.0)))


def specs_of(ranks, text, config):
    """Return how transformers and ``fully_shard`` cut a config's model, by name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mesh = make_mesh(text)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    by_transformers(model, mesh)
    shard(model, mesh, [m for m in model.modules() if isinstance(m, LlamaDecoderLayer)])
    return {n: repr(place_of(t)) for n, t in model.state_dict().items()}
