"""Live PyTorch training that saves, and resumes from reshard's output for other ranks.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import reshard.dcp
from tests.judges import dcp_reader_worker as reader
from tests.judges import torch_models
from tests.judges.ranks import average_gradient, mean_over_ranks
from tests.support.sample_tensors import same

STEPS = 3
ROWS = 12  # of the global batch: divides by every number of ranks here
WHOLE = StateDictOptions(full_state_dict=True)
EXPECTED = "expected.pt"
OWN = "trust"  # of a parameter's state


# Models


def live(ranks, kind, build, seed=7):
    """Return a model in one of torch's wrappers, and its optimizer with two groups.

    ``kind`` is the wrapper, then in any order: ``mesh`` for FSDP 1 on a device mesh, ``named`` for
    one whose axis has a name, ``orig`` for use_orig_params, ``ignored`` for parameters that FSDP
    leaves plain, an optimizer other than AdamW.
    """
    wrapper, *said = kind.split()
    torch.manual_seed(seed)
    model = getattr(torch_models, build)()
    names = ("fsdp",) if "named" in said else None
    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=names)
    ignored = {model.odd, model.small} if "ignored" in said else None
    for parameter in ignored or ():
        parameter.register_post_accumulate_grad_hook(partial(average_gradient, ranks.world))
    if wrapper == "fsdp2":
        for layer in model.llama.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh, ignored_params=ignored)
    if wrapper == "fsdp1":
        model = Fsdp1(
            model,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            device_id=torch.device("cpu"),
            device_mesh=mesh if "mesh" in said else None,
            use_orig_params="orig" in said,
            ignored_states=ignored,
        )
    make = next((OPTIMIZERS[word] for word in said if word in OPTIMIZERS), torch.optim.AdamW)
    return model, make(grouped(model, units=wrapper == "fsdp1" and "orig" not in said), lr=1e-2)


OPTIMIZERS = {"nadam": torch.optim.NAdam, "asgd": partial(torch.optim.ASGD, t0=1.0)}


def grouped(model, *, units):
    if units:
        first, *others = model.parameters()  # a unit's flat parameter
        return [{"params": [first], "weight_decay": 0.3}, {"params": others}]
    named = dict(model.named_parameters())
    small = [n for n in named if "norm" in n or n.endswith(("small", "frozen"))]
    return [
        {"params": [p for n, p in named.items() if n not in small], "weight_decay": 0.1},
        {"params": [named[n] for n in small], "betas": (0.8, 0.95)},
    ]


def share_of(batch, ranks):
    """Return the rows of this rank."""
    size = len(batch) // ranks.world
    return batch[ranks.rank * size : (ranks.rank + 1) * size]


def train(ranks, model, optimizer, first, steps=STEPS, share=share_of):
    """Return losses of the next steps, the mean of the ranks', exactly."""
    losses = []
    for step in range(first, first + steps):
        chance = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, torch_models.VOCABULARY, (ROWS, 8), generator=chance)
        loss = model(share(tokens, ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss, ranks.world).hex())
    return losses


def state_of(model, optimizer):
    """Return everything, whole, as torch itself gathers it."""
    return {
        "model": dict(get_model_state_dict(model, options=WHOLE)),
        "optim": get_optimizer_state_dict(model, optimizer, options=WHOLE),
    }


def differing(found, wanted):
    """Return names of values that are not equal bit for bit."""
    wrong = [n for n, t in wanted["model"].items() if not same(found["model"][n], t)]
    wrong += [n for n in found["model"] if n not in wanted["model"]]
    states, expected = found["optim"]["state"], wanted["optim"]["state"]
    wrong += list(states.keys() ^ expected.keys())
    for fqn in states.keys() & expected.keys():
        for slot, value in expected[fqn].items():
            if not alike(states[fqn].get(slot), value):
                wrong.append(f"{slot} of {fqn}")
    if groups(found) != groups(wanted):
        wrong.append(f"{groups(found)} is not {groups(wanted)}")
    return wrong


def groups(state):
    """Return groups without names and without what torch changes (order, betas as a list)."""
    return [
        {**group, "params": sorted(group["params"]), "betas": tuple(group.get("betas", ()))}
        | {"param_names": None}
        for group in state["optim"]["param_groups"]
    ]


# Saving


def save(ranks, kind, build, place):
    """Train, save in each of torch's forms and the expected state, and train on.

    Under FSDP 1 the optimizer keeps a plain number of each parameter too, which torch lets it.
    """
    model, optimizer = live(ranks, kind, build)
    train(ranks, model, optimizer, 0)
    if kind == "fsdp1":
        for held in optimizer.state.values():
            held[OWN] = 0.25
    if kind.startswith("fsdp2"):
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(state, checkpoint_id=place / "dcp")
        rank_files(ranks, place, model.state_dict(), optimizer.state_dict())
    else:
        with Fsdp1.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            rank_files(ranks, place, model.state_dict(), optimizer.state_dict())
    expected = state_of(model, optimizer)
    if ranks.rank == 0:
        torch.save(expected, place / EXPECTED)
    return train(ranks, model, optimizer, STEPS, 2)


def save_sharded_and_whole(ranks, kind, build, place):
    """Train, save as tutorials do (shards with DCP, one file), and train on."""
    model, optimizer = live(ranks, kind, build)
    train(ranks, model, optimizer, 0)
    sharded, whole = STATES[kind.split()[0]](model, optimizer)
    dcp.save(sharded, checkpoint_id=place / "dcp")
    expected = state_of(model, optimizer)
    if ranks.rank == 0:
        torch.save(whole, place / "full.pt")
        torch.save(expected, place / EXPECTED)
    return train(ranks, model, optimizer, STEPS, 2)


def states_of_fsdp1(model, optimizer):
    """Return shards and whole tensors by the methods of FSDP 1."""
    found = []
    for typed in (sharded_type, whole_type):
        with typed(model):
            optim = Fsdp1.optim_state_dict(model, optimizer)
            found.append({"model": model.state_dict(), "optim": optim})
    return found


def sharded_type(model):
    """Return a new context of sharded state dicts, as FSDP 1 changes its configuration.

    Nothing is offloaded: tensors on a CPU would share memory with the model.
    """
    return Fsdp1.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def whole_type(model):
    """Return the context of full state dicts on every rank."""
    return Fsdp1.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )


def states_of_fsdp2(model, optimizer):
    """Return shards and whole tensors by the functions that FSDP 2 has for it."""
    sharded = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    return sharded, state_of(model, optimizer)


STATES = {"fsdp1": states_of_fsdp1, "fsdp2": states_of_fsdp2}


def rank_files(ranks, place, model, optimizer):
    folder = place / "ranks"
    folder.mkdir(exist_ok=True)
    torch.save(model, folder / f"model_rank{ranks.rank}.pt")
    torch.save(optimizer, folder / f"optim_rank{ranks.rank}.pt")


# Loading


def load_dcp(_ranks, place, model, optimizer, open_reader=dcp.FileSystemReader):
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, storage_reader=open_reader(place))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


load_live = partial(load_dcp, open_reader=reshard.dcp.StorageReader)


def load_accelerate(_ranks, place, model, optimizer):
    """Load as load_fsdp_model and load_fsdp_optimizer do for SHARDED_STATE_DICT and FSDP 2."""
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=place / "pytorch_model_fsdp_0")
    set_model_state_dict(model, state["model"])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=place / "optimizer_0")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load_ranks(ranks, place, model, optimizer):
    model.load_state_dict(torch.load(place / f"model_rank{ranks.rank}.pt"))
    optimizer.load_state_dict(torch.load(place / f"optim_rank{ranks.rank}.pt"))


def load_one(ranks, place, model, optimizer):
    state = torch.load(place / f"rank{ranks.rank}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def load_verl1(ranks, place, model, optimizer):
    with sharded_type(model):
        load_verl(ranks, place, model, optimizer)


def load_verl(ranks, place, model, optimizer):
    ending = f"world_size_{ranks.world}_rank_{ranks.rank}.pt"
    model.load_state_dict(torch.load(place / f"model_{ending}"))
    optimizer.load_state_dict(torch.load(place / f"optim_{ending}"))


def load_names(ranks, place, model, optimizer):
    weights = torch.load(place / f"pytorch_model_fsdp_0_rank{ranks.rank}.bin")
    set_model_state_dict(model, weights)
    moments = torch.load(place / f"optimizer_0_rank{ranks.rank}.bin")
    set_optimizer_state_dict(model, optimizer, moments)


def load_full(_ranks, place, model, optimizer):
    with whole_type(model):
        model.load_state_dict(torch.load(place / "pytorch_model_fsdp.bin"))
        moments = torch.load(place / "optimizer.bin")
        optimizer.load_state_dict(Fsdp1.optim_state_dict_to_load(model, optimizer, moments))


def load_whole(_ranks, place, model, optimizer):
    """Load whole files into a sharded model by torch's own means."""
    set_model_state_dict(model, torch.load(place / "pytorch_model_fsdp.bin"), options=WHOLE)
    moments = torch.load(place / "optimizer.bin")
    set_optimizer_state_dict(model, optimizer, moments, options=WHOLE)


def load_plain(_ranks, place, model, optimizer):
    state = torch.load(place / "checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def load_local(ranks, place, model, optimizer):
    with Fsdp1.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = torch.load(place / f"model_rank{ranks.rank}.pt", weights_only=False)
        model.load_state_dict(state)
    optimizer.load_state_dict(torch.load(place / f"optim_rank{ranks.rank}.pt"))


LOADS = {
    "dcp": load_dcp,
    "live": load_live,
    "accelerate": load_accelerate,
    "pair": load_ranks,
    "one": load_one,
    "verl": load_verl,
    "verl1": load_verl1,
    "names": load_names,
    "full": load_full,
    "whole": load_whole,
    "plain": load_plain,
    "local": load_local,
}


def resumed(ranks, kind, build, form, place, source):
    """Load into a model with other values, compare with the expected state, train on."""
    model, optimizer = live(ranks, kind, build, seed=99)
    LOADS[form](ranks, Path(place), model, optimizer)
    wrong = differing(state_of(model, optimizer), torch.load(source / EXPECTED))
    if form == "dcp":  # it loads what a fresh optimizer has
        wrong = [name for name in wrong if not name.startswith(OWN)]
    return {"differing": wrong, "losses": train(ranks, model, optimizer, STEPS, 2)}


def from_deepspeed(ranks, place, source, first, steps, kind="fsdp2", form="dcp"):
    """Load the state of a DeepSpeed checkpoint of a Llama, and train as DeepSpeed did.

    Args:
        place: what was split from the checkpoint, or the checkpoint itself for the form "live".
    """
    model = reader.sharded(kind, ranks, reader.llama(source))
    optimizer = reader.adamw(model)
    LOADS[form](ranks, place, model, optimizer)
    wrong = reader.differing(model, optimizer, source)
    return {
        "differing": wrong,
        "losses": reader.train(ranks, kind, model, optimizer, first, steps),
    }


def accelerate_loads(ranks, place, case, source):
    """Return names of what differs after Accelerate's own ``load_state``."""
    from accelerate import Accelerator

    from tests.judges import library_accelerate, library_models, library_state
    from tests.judges.library_cpu import pass_for_gpus

    os.environ |= {"LOCAL_RANK": str(ranks.rank), "ACCELERATE_USE_CPU": "true"}
    pass_for_gpus()
    accelerator = Accelerator(fsdp_plugin=library_accelerate.make_plugin(case))
    torch.manual_seed(99)
    model = library_models.build(case.factory)
    if case.how["version"] == 1:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(library_accelerate._optimizer(model, case))
    else:
        made = library_accelerate._optimizer(model, case)
        model, optimizer = accelerator.prepare(model, made)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, library_accelerate._warm)
    scheduler = accelerator.prepare(scheduler)
    counter = library_accelerate.Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(str(place))
    assert counter.seen == library_accelerate.STEPS
    wanted = torch.load(source / EXPECTED, weights_only=False)
    steps = library_accelerate.STEPS * ranks.world  # of the scheduler: one for each process
    wanted["scheduler"] |= {"last_epoch": steps, "_step_count": steps + 1}
    plain = library_models.build(case.factory)
    live = scheduler.scheduler, accelerator.step
    found = library_state.read_state(plain, model, optimizer.optimizer, *live)
    return {
        "differing": [key for key, value in found.items() if not alike(value, wanted[key])],
        "step": found["step"],
    }


def alike(found, wanted):
    if isinstance(wanted, torch.Tensor):
        return same(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == wanted


def save_llama(ranks, place, source, steps, further):
    """Train the Llama of a config.json as DeepSpeed's judge does, save with DCP, and train on."""
    model = reader.sharded("fsdp2", ranks, reader.llama(source))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    reader.train(ranks, "fsdp2", model, optimizer, 0, steps)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=place / "dcp")
    expected = state_of(model, optimizer)
    if ranks.rank == 0:
        torch.save(expected, place / EXPECTED)
    return reader.train(ranks, "fsdp2", model, optimizer, steps, further)


def as_one_file(_ranks, place, source):
    """Return what torch's own converter makes of a directory."""
    out = Path(f"{place}.pt")
    dcp_to_torch_save(place, out)
    read = torch.load(out, weights_only=False)
    wanted = torch.load(source / EXPECTED)
    return {"differing": differing(read, wanted), "rest": sorted(read.keys() - wanted.keys())}
