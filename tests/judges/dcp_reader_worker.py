"""Live models of every kind of sharding, filled by `torch.distributed.checkpoint.load`.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values. ``differing`` is
what a job found not to be bitwise what `reshard.open` gives.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import reshard
import reshard.dcp
from reshard.system.files import SourceFiles
from tests.judges import deepspeed_models as models
from tests.judges.ranks import mean_over_ranks

SLOTS = ("exp_avg", "exp_avg_sq")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)


class App(dcp.stateful.Stateful):
    """The wrapper of torch's own tutorial."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optim"])


def llama(source, dtype=torch.float32, seed=99):
    """Build the model of a checkpoint's config.json, with other values."""
    config = LlamaConfig(**json.loads((Path(source) / "config.json").read_text()))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.7, eps=0.1)


def sharded(kind, ranks, model, precision=None):
    """Return the model inside one of torch's wrappers."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        wrapped = Fsdp1(
            model,
            device_mesh=mesh if kind == "fsdp1" else None,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        offload = {"offload_to_cpu": False}
        Fsdp1.set_state_dict_type(
            wrapped,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(**offload),
            ShardedOptimStateDictConfig(**offload),
        )
        return wrapped
    return model


class Counted:
    """Bytes that this process reads from checkpoint files meanwhile."""

    def __enter__(self):
        self.nbytes = 0
        self.read = read = SourceFiles.read_into

        def counting(pool, path, offset, target):
            self.nbytes += len(target)
            read(pool, path, offset, target)

        SourceFiles.read_into = counting
        return self

    def __exit__(self, *_error):
        SourceFiles.read_into = self.read


def load(state, source, **options):
    """Call `dcp.load`; return how many bytes this rank read for it, headers not counted.

    Without the comparison after the load, which reads a sample again.
    """
    reader = reshard.dcp.StorageReader(source, **{"trust": "none", **options})
    with Counted() as counted:
        dcp.load(state, storage_reader=reader)
    return counted.nbytes


def train(ranks, kind, model, optimizer, first, steps):
    """Train further steps as the judge does; return the mean losses."""
    losses = []
    for step in range(first, first + steps):
        share = models.rank_share(models.global_batch(step, 0, 1), ranks.rank, ranks.world)
        loss = model(input_ids=share, labels=share).loss
        optimizer.zero_grad()
        loss.backward()
        if kind.startswith("fsdp1"):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean_over_ranks(loss, ranks.world))
    return losses


def differing(model, optimizer, source, dtype=None):
    """Return names of live values, gathered on every rank, that differ from `reshard.open`'s."""
    weights = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    found = []
    with reshard.open(source) as checkpoint:
        for name, value in weights.items():
            # transformers leaves the alias of a tied head out and does not say of what
            alias = name == "lm_head.weight" and name not in checkpoint
            want = checkpoint["model.embed_tokens.weight" if alias else name][...]
            if not same(value, want.to(dtype) if dtype else want):
                found.append(name)
        if optimizer is not None:
            live = get_optimizer_state_dict(model, optimizer)
            found += differing_state(live["state"], checkpoint)
            found += differing_groups(live["param_groups"], checkpoint.manifest)
    return found


def differing_state(state, checkpoint):
    tied, steps = checkpoint.manifest.tied, checkpoint.manifest.train.optimizer_step
    for name, values in state.items():
        fqn = tied.get(name, name)
        for slot in SLOTS:
            if not same(whole(values[slot]), checkpoint.optimizer(slot)[fqn][...]):
                yield f"{slot} of {name}"
        if float(values["step"]) != steps[fqn]:
            yield f"step of {name}"
    if len(state) != len(steps):
        yield "not every parameter has a state"


def differing_groups(groups, manifest):
    hyper = {manifest.tied.get(name, name): group for group in groups for name in group["params"]}
    for group in manifest.train.param_groups:
        for name in group.fqns:
            wanted = {**group.hyper, "betas": tuple(group.hyper["betas"])}
            held = {key: hyper[name][key] for key in wanted}
            if held != wanted:
                yield f"group of {name}: {held}"


def whole(tensor):
    """Return the full tensor; FSDP1 without a mesh has ShardedTensors, which rank 0 gathers."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if hasattr(tensor, "local_shards"):
        full = torch.empty(tensor.size(), dtype=tensor.dtype)
        tensor.gather(out=full if dist.get_rank() == 0 else None)
        dist.broadcast(full, src=0)
        return full
    return tensor


def same(value, want):
    return value.dtype == want.dtype and value.shape == want.shape and torch.equal(value, want)


# The jobs


def resumed(ranks, kind, source, form="nested", steps=0, first=0, precision=None):
    """Load a training state into live objects, compare, and train on."""
    model = sharded(kind, ranks, llama(source), precision)
    optimizer = adamw(model)
    if form == "app":
        nbytes = load({"app": App(model, optimizer)}, source)
    else:
        options = FLAT if form == "flat" else None
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }
        nbytes = load(state, source)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    found = differing(model, optimizer, source)
    losses = train(ranks, kind, model, optimizer, first, steps)
    return {"differing": found, "losses": losses, "nbytes": nbytes}


def weights_only(ranks, kind, source, form="top", dtype=torch.float32):
    """Load weights alone: at the top level, under a prefix, or with DDP's own names."""
    model = sharded(kind, ranks, llama(source, dtype))
    if form == "top":
        nbytes = load(get_model_state_dict(model), source)
    elif form == "own names":
        nbytes = load(model.state_dict(), source)
    else:
        nbytes = load({"net": get_model_state_dict(model)}, source, model="net")
    return {"differing": differing(model, None, source, dtype), "nbytes": nbytes}


def two_dims(ranks, source):
    """Load into DTensors that FSDP and tensor parallelism cut in both dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with reshard.open(source) as checkpoint:
        want = {name: checkpoint[name][...] for name in checkpoint if len(checkpoint[name].shape)}
    cuts = {n: [Shard(0), Shard(v.ndim - 1)] for n, v in want.items()}
    state = {n: distribute_tensor(torch.zeros_like(v), mesh, cuts[n]) for n, v in want.items()}
    nbytes = load({"model": state}, source)
    wrong = [name for name, value in state.items() if not same(value.full_tensor(), want[name])]
    return {"differing": wrong, "nbytes": nbytes}


def fails(ranks, source, change):
    """Load into a target that does not fit the checkpoint."""
    state = live_state(ranks, source, in_two_groups=change == "groups")
    return load(CHANGES.get(change, dict)(state), source)


@functools.cache
def live_state(ranks, source, *, in_two_groups):
    """Return the states of a model and an optimizer; no job changes them."""
    model = sharded("fsdp2", ranks, llama(source))
    optimizer = adamw(model)
    if in_two_groups:
        first, *rest = model.parameters()
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def with_weight(name, value):
    """Return the target with one more weight, or another."""
    return lambda state: state | {"model": {**state["model"], name: value}}


def with_slot(state):
    name, held = "model.norm.weight", state["optim"]["state"]
    more = {name: {**held[name], "max_exp_avg_sq": torch.zeros(32)}}
    return state | {"optim": state["optim"] | {"state": held | more}}


CHANGES = {
    "missing": with_weight("extra.weight", torch.zeros(3)),
    "shape": with_weight("model.norm.weight", torch.zeros(5)),
    "integers": with_weight("model.norm.weight", torch.zeros(32, dtype=torch.int32)),
    "slot": with_slot,
    "more": lambda _: {"optim": {"state": {"extra": {"exp_avg": torch.zeros(3)}}}},
    "prefix": lambda state: {"net": state["model"]},
    "optimizer prefix": lambda state: {"model": state["model"], "adam": state["optim"]},
    "ema": lambda state: state | {"ema": {n: v.clone() for n, v in state["model"].items()}},
    "two prefixes": lambda state: state | {"teacher": {"model": state["model"]}},
    "numbers": lambda _: {"optim": {"state": {0: {"exp_avg": torch.zeros(211, 32)}}}},
    "fresh": lambda state: state | {"optim": torch.optim.AdamW([torch.zeros(1)]).state_dict()},
}


def into(_ranks, source, name, shape, dtype, transposed=None):
    """Load one tensor as a plain one, contiguous or not."""
    target = torch.zeros(shape[::-1] if transposed else shape, dtype=dtype)
    target = target.t() if transposed else target
    load({"model": {name: target}}, source)
    return target.tolist()  # a tensor would travel as a descriptor of a rank that is gone


def partly(ranks, source):
    """Check that a partial load leaves unchanged what the checkpoint lacks."""
    state = {"model": {"model.norm.weight": torch.zeros(32), "extra": torch.ones(2)}, "epoch": 7}
    dcp.load(
        state,
        storage_reader=reshard.dcp.StorageReader(source),
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    with reshard.open(source) as checkpoint:
        held = same(state["model"]["model.norm.weight"], checkpoint["model.norm.weight"][...])
    return held, state["model"]["extra"].tolist(), state["epoch"]


def scalars(_ranks, source, **more):
    """Load steps and hyper-parameters into a target of other types than torch's optimizers use."""
    with reshard.open(source) as checkpoint:
        (group,) = checkpoint.manifest.train.param_groups
    rate = torch.tensor(0.5)
    target = {"lr": rate, "betas": (0.1, 0.2), "fused": True, "switch": False, **more}
    state = {
        "state": {"model.norm.weight": {"step": 0}},
        "param_groups": [{**target, "params": list(group.fqns)}],
    }
    load({"optim": state}, source)
    (loaded,) = state["param_groups"]
    assert loaded["lr"] is rate
    step = state["state"]["model.norm.weight"]["step"]
    return (step, float(rate), loaded["betas"], loaded["fused"], loaded["switch"])


def unfinished(ranks, source):
    """Request a hyper-parameter that the checkpoint's groups lack."""
    return scalars(ranks, source, momentum=0.5)


class Careless(dcp.DefaultLoadPlanner):
    """Compares no shapes."""

    def create_local_plan(self):
        held = self.metadata.state_dict_metadata
        items = [_create_read_items(key, held[key], v) for key, v in self.state_dict.items()]
        return dcp.LoadPlan([item for several in items for item in several])


def careless(_ranks, source):
    state = {"model.norm.weight": torch.zeros(64)}
    reader = reshard.dcp.StorageReader(source)
    dcp.load(state, storage_reader=reader, planner=Careless())


def everything(_ranks, source):
    """Convert the checkpoint with DCP's own converter, without any target."""
    state = _load_state_dict_from_keys(storage_reader=reshard.dcp.StorageReader(source))
    held, wrong = state["optim"]["state"], []
    with reshard.open(source) as checkpoint:
        for fqn, value in state["model"].items():
            slots = {slot: checkpoint.optimizer(slot)[fqn] for slot in SLOTS}
            wrong += [(slot, fqn) for slot in SLOTS if not same(held[fqn][slot], slots[slot][...])]
            if not same(value, checkpoint[fqn][...]):
                wrong.append(fqn)
        if len(state["model"]) != len(checkpoint) - len(checkpoint.manifest.tied):
            wrong.append("not every weight is there")
    group = state["optim"]["param_groups"][0]
    step = held["model.norm.weight"]["step"]
    told = {"lr": group["lr"], "params": len(group["params"]), "step": float(step)}
    return told | {"differing": wrong, "step type": str(step.dtype)}


def menagerie(_ranks, source, order="same"):
    """Return a plain model with every odd tensor: 0-d, empty, frozen, four dtypes of buffers."""
    torch.manual_seed(99)
    model = models.Menagerie(tied=False)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    groups = models.param_groups(model, "tiny")
    if order == "backwards":
        groups.reverse()
    elif order == "mixed":
        groups[0]["params"].append(groups[1]["params"].pop(0))
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    app = App(model, optimizer)
    load({"app": app}, source)
    found = []
    with reshard.open(source) as checkpoint:
        found += [n for n, v in model.state_dict().items() if not same(v, checkpoint[n][...])]
        names = {id(p): n for n, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = names[id(param)]
                if not param.numel():
                    continue
                held = optimizer.state[param]
                found += [
                    (slot, name)
                    for slot in SLOTS
                    if not same(held[slot], checkpoint.optimizer(slot)[name][...])
                ]
    named = [
        (group["lr"], group["weight_decay"], names[id(group["params"][0])])
        for group in optimizer.param_groups
    ]
    return {"differing": found, "groups": sorted(named)}
