"""The worker process of ``torch_judge``: the same ranks make every case of a world size.

A case: train three steps, ask PyTorch for the whole state, save. Cases that differ only in what
they save share one run.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD, Adafactor, Adagrad, AdamW, NAdam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.serialization import config as serialization
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from tests.judges import ranks, torch_models
from tests.judges.device import DEVICE, DEVICE_TYPE, IS_GPU
from tests.judges.models import ties
from tests.judges.named_cuda import named_cuda
from tests.judges.torch_cases import CASES, Case
from tests.support.sample_tensors import same, sample_tensors

STEPS = 3
State = dict[str, Any]


@dataclass
class Live:
    """A rank's trained model and optimizer, which no case may change.

    ``expected`` has the whole state, with the optimizer's (True) and without.
    """

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    scheduler: Any = None
    expected: dict[bool, State] = field(default_factory=dict)


_RUNS: dict[tuple[Any, ...], Live] = {}


# Training


@dataclass(frozen=True)
class Setup:
    """What a case may ask of its training."""

    orig: bool = False  # FSDP1 use_orig_params
    policy: str = "layer"  # which modules are units: layer, nested, size, none
    strategy: str = "FULL_SHARD"
    mesh: bool = False  # FSDP1: a device mesh, which makes DTensors of its shards
    grid: str = "flat"  # FSDP2: flat, hsdp (2 x 2), tensor (2 x 2), or only tensor parallel
    columns: bool = False  # FSDP2: matrices are cut along dim 1 where that divides
    ignored: bool = False  # two of Menagerie's parameters, which every rank keeps whole
    mixed: bool = False
    recompute: bool = False  # activation checkpointing, which wraps modules, too
    groups: str = "one"  # one, decay, units, named, named_decay
    optimizer: str = "adamw"
    cuda: bool = False  # the files name the GPU of each rank as where tensors lay


def find_run(case: Case, rank: int) -> Live:
    """Return the run of a case, trained by the first case that has this run."""
    key = case.engine, case.build, Setup(**case.setup)
    if key not in _RUNS:
        _RUNS[key] = train(case, rank)
    return replace(_RUNS[key], case=case)


def train(case: Case, rank: int) -> Live:
    """Train three steps, so that no state is zero; every rank begins with the same weights."""
    setup = Setup(**case.setup)
    torch.manual_seed(7)
    plain = build(case).to(DEVICE)
    if setup.recompute:
        apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, LlamaDecoderLayer))
    model = ENGINES[case.engine](plain, setup, case.world)
    optimizer = make_optimizer(model, setup)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    replica = {"tensor": rank // 2, "only_tensor": 0}.get(setup.grid, rank)
    chance = torch.Generator().manual_seed(100 + replica)  # one model's tensor ranks see the same
    for _ in range(STEPS):
        tokens = torch.randint(0, torch_models.VOCABULARY, (2, 8), generator=chance).to(DEVICE)
        found = model(tokens)
        loss = found if isinstance(found, Tensor) else found.logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return Live(case, model, optimizer, rank, scheduler)


def build(case: Case) -> nn.Module:
    model: nn.Module = getattr(torch_models, case.build)()
    return model


def fsdp1(model: nn.Module, setup: Setup, world: int) -> nn.Module:
    hybrid = "HYBRID" in setup.strategy
    shape = (world // 2, 2) if hybrid else (world,)
    where: State = {}
    if setup.mesh:
        where["device_mesh"] = init_device_mesh(DEVICE_TYPE, shape)
    elif hybrid:
        mesh = init_device_mesh(DEVICE_TYPE, shape)
        where["process_group"] = (mesh.get_group(1), mesh.get_group(0))
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[setup.strategy],
        auto_wrap_policy=POLICIES[setup.policy],
        mixed_precision=bf16 if setup.mixed else None,
        use_orig_params=setup.orig,
        ignored_states=_ignore(model, world) if setup.ignored else None,
        device_id=torch.device(DEVICE),
        **where,
    )


def _ignore(model: nn.Module, world: int) -> list[nn.Parameter]:
    """Return the parameters that FSDP leaves to the program, which averages their gradients."""
    ignored = [model.odd, model.llama.lm_head.weight]
    for parameter in ignored:
        parameter.register_post_accumulate_grad_hook(partial(ranks.average_gradient, world))
    return ignored


def fsdp2(model: nn.Module, setup: Setup, world: int) -> nn.Module:
    match setup.grid:
        case "flat":
            mesh = init_device_mesh(DEVICE_TYPE, (world,))
        case "hsdp":
            mesh = init_device_mesh(
                DEVICE_TYPE, (world // 2, 2), mesh_dim_names=("replica", "shard")
            )
        case "tensor":
            grid = init_device_mesh(DEVICE_TYPE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
            cut_tensors(model, grid["tp"])
            mesh = grid["dp"]
        case "only_tensor":
            cut_tensors(model, init_device_mesh(DEVICE_TYPE, (world,), mesh_dim_names=("tp",)))
            return model
    columns = partial(_by_columns, mesh.size())
    chosen: State = {"shard_placement_fn": columns} if setup.columns else {}
    units = () if setup.policy == "none" else UNITS[setup.policy]
    for module in reversed(list(model.modules())):
        if isinstance(module, units):
            fully_shard(module, mesh=mesh, **chosen)
    ignored = set(_ignore(model, world)) if setup.ignored else None
    return fully_shard(model, mesh=mesh, ignored_params=ignored, **chosen)


def _by_columns(world: int, parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % world == 0 else None


def cut_tensors(model: nn.Module, mesh: Any) -> None:
    """Cut linear layers by columns and rows, as PyTorch's tutorials do."""
    member = "llama.model.layers.*.*."
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    plan = {member + name: ColwiseParallel() for name in columns}
    plan |= {member + name: RowwiseParallel() for name in ("o_proj", "down_proj")}
    parallelize_module(model, mesh, plan)


def ddp(model: nn.Module, _setup: Setup, _world: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def plain(model: nn.Module, _setup: Setup, _world: int) -> nn.Module:
    return model


def channels_last(model: nn.Module, _setup: Setup, _world: int) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


UNITS: dict[str, tuple[type[nn.Module], ...]] = {
    "layer": (LlamaDecoderLayer, torch_models.Block),
    "nested": (LlamaDecoderLayer, LlamaAttention, torch_models.Block, torch_models.Inner),
}
POLICIES = {
    "layer": ModuleWrapPolicy(UNITS["layer"]),
    "nested": ModuleWrapPolicy(UNITS["nested"]),
    "size": partial(size_based_auto_wrap_policy, min_num_params=3000),
    "none": None,
}
ENGINES = {
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "plain": plain,
    "channels_last": channels_last,
}


def make_optimizer(model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    groups = GROUPS[setup.groups](model)
    return OPTIMIZERS[setup.optimizer](groups)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2),
    "fused": partial(AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(AdamW, lr=1e-2, amsgrad=True),
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "nadam": partial(NAdam, lr=1e-2),
    "adafactor": partial(Adafactor, lr=1e-2),
    "adagrad": partial(Adagrad, lr=1e-2),
}


def _decay_groups(model: nn.Module) -> list[State]:
    """Return matrices, which decay, and vectors; by name, as a shard has lost its dimensions."""
    plain = [n for n, _ in model.named_parameters() if "norm" in n or n.endswith(("small", "bias"))]
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n not in plain], "weight_decay": 0.1},
        {"params": [named[n] for n in plain], "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]


def _unit_groups(model: nn.Module) -> list[State]:
    first, *others = model.parameters()
    return [{"params": others}, {"params": [first], "weight_decay": 0.3}]


def _named_decay_groups(model: nn.Module) -> list[State]:
    """Return groups of (name, parameter), for which the optimizer keeps ``param_names``."""
    names = {id(p): n for n, p in model.named_parameters()}
    return [
        {**group, "params": [(names[id(p)], p) for p in group["params"]]}
        for group in _decay_groups(model)
    ]


GROUPS = {
    "one": lambda model: list(model.parameters()),
    "decay": _decay_groups,
    "units": _unit_groups,
    "named": lambda model: list(model.named_parameters()),
    "named_decay": _named_decay_groups,
}


# The expected state


def expect_state(live: Live) -> State:
    """Return `read_state`, which is called once for each run."""
    has_optimizer = live.case.moments is not None
    if has_optimizer not in live.expected:
        live.expected[has_optimizer] = read_state(live)
    return live.expected[has_optimizer]


def read_state(live: Live) -> State:
    """Collect what PyTorch's own full state dicts report; every rank must call it."""
    plain = build(live.case)
    tied = ties(plain)
    whole = get_model_state_dict(live.model, options=WHOLE)
    told: State = {
        "params": {n: _copied(whole.pop(n)) for n, _ in plain.named_parameters()},
        "buffers": {n: _copied(t) for n, t in whole.items() if n not in tied},
        "tied": tied,
        "frozen": [n for n, p in plain.named_parameters() if not p.requires_grad],
        "optimizer": {},
        "steps": {},
        "groups": [],
    }
    if live.case.moments:
        told |= read_optimizer_state(_gets(WHOLE, live))
    check(told)
    return told


def read_optimizer_state(state: State) -> State:
    """Return the optimizer state by fqn, as get_optimizer_state_dict reports it."""
    moments = {
        fqn: {slot: _copied(value) for slot, value in slots.items() if slot != "step"}
        for fqn, slots in state["state"].items()
    }
    return {
        "optimizer": moments,
        "steps": {n: float(s["step"]) for n, s in state["state"].items() if "step" in s},
        "groups": [
            {key: value for key, value in group.items() if key != "param_names"}
            for group in state["param_groups"]
        ],
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).cpu()


def _copy_all(state: State) -> State:
    return {name: _copied(tensor) for name, tensor in state.items()}


def check(told: State) -> None:
    """Raise if PyTorch reports moments that share memory, which happens on CPU."""
    for name, slots in told["optimizer"].items():
        if "exp_avg" in slots:
            assert (slots["exp_avg_sq"] >= 0).all(), name
            alike = torch.equal(slots["exp_avg"], slots["exp_avg_sq"])
            assert not alike or slots["exp_avg"].count_nonzero() == 0, name


# The forms of state


def weights(live: Live) -> State:
    form = live.case.weights
    if form == "gets":
        return get_model_state_dict(live.model)
    if form == "gets_full":
        return get_model_state_dict(live.model, options=WHOLE)
    if form in TYPES:
        with typed(live, form):
            return live.model.state_dict()
    return live.model.state_dict()


def moments(live: Live) -> State | None:
    return MOMENTS[live.case.moments](live) if live.case.moments else None


def _fsdp_moments(form: str, live: Live) -> State:
    with typed(live, form):
        return FullyShardedDataParallel.optim_state_dict(live.model, live.optimizer)


def _rekeyed(live: Live) -> State:
    return FullyShardedDataParallel.rekey_optim_state_dict(
        _fsdp_moments("full", live), OptimStateKeyType.PARAM_ID, build(live.case)
    )


def _gets(options: StateDictOptions, live: Live) -> State:
    return get_optimizer_state_dict(live.model, live.optimizer, options=options)


WHOLE = StateDictOptions(full_state_dict=True)
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE_FLATTENED = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
MOMENTS: dict[str, Callable[[Live], State]] = {
    "full": partial(_fsdp_moments, "full"),
    "sharded": partial(_fsdp_moments, "sharded"),
    "local": partial(_fsdp_moments, "local"),
    "rekeyed": _rekeyed,
    "gets": partial(_gets, StateDictOptions()),
    "gets_full": partial(_gets, WHOLE),
    "flattened": partial(_gets, FLATTENED),
    "flattened_full": partial(_gets, WHOLE_FLATTENED),
    "raw": lambda live: live.optimizer.state_dict(),
}
TYPES = {
    "full": StateDictType.FULL_STATE_DICT,
    "sharded": StateDictType.SHARDED_STATE_DICT,
    "local": StateDictType.LOCAL_STATE_DICT,
}


def typed(live: Live, form: str) -> Any:
    """Set a state dict type; full ones stay on the device, because CPU offload aliases on a CPU."""
    whole = form == "full"
    configs = (
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False) if whole else None,
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False) if whole else None,
    )
    return FullyShardedDataParallel.state_dict_type(live.model, TYPES[form], *configs)


# The forms of files


def pair(live: Live, place: Path) -> None:
    _rank0(live, weights(live), place / "model.pt")
    _rank0(live, moments(live), place / "optim.pt")


def one(live: Live, place: Path) -> None:
    state = {"model": weights(live), "optimizer": moments(live), "epoch": 3}
    _rank0(live, state, place / "checkpoint.pt")


def rank_pair(live: Live, place: Path) -> None:
    torch.save(weights(live), place / f"model_rank{live.rank}.pt")
    if live.case.moments:
        torch.save(moments(live), place / f"optim_rank{live.rank}.pt")


def rank_one(live: Live, place: Path) -> None:
    state = {"model": weights(live), "optimizer": moments(live)}
    torch.save(state, place / f"rank{live.rank}.pt")


def full_and_ranks(live: Live, place: Path) -> None:
    _rank0(live, weights(live), place / "model.pt")
    torch.save(moments(live), place / f"optim_rank{live.rank}.pt")


def to_dcp(live: Live, place: Path) -> None:
    """Save with the options of the case: of the writer, of the planner, of ``dcp.save``."""
    knobs = dict(live.case.knobs)
    state = {"model": weights(live), "optim": moments(live)}
    if not live.case.moments:
        del state["optim"]
    state |= {key: value(live) for key, value in EXTRAS.items() if knobs.pop(key, False)}
    if knobs.pop("top_level", False):
        state = weights(live)
    if knobs.pop("app", False):
        state = {"app": App(live)}
    if knobs.pop("one_process", False):
        if live.rank == 0:
            dcp.save(state, checkpoint_id=place, no_dist=True)
        return
    how: State = {}
    if "use_collectives" in knobs:
        how["use_collectives"] = knobs.pop("use_collectives")
    if planner := knobs.pop("planner", None):
        how["planner"] = DefaultSavePlanner(**planner)
    if "format" in knobs:
        knobs["serialization_format"] = SerializationFormat[knobs.pop("format")]
    if knobs.pop("async", False):
        dcp.async_save(state, checkpoint_id=place, **how).result()
        return
    writer = FileSystemWriter(place, **knobs) if knobs else None
    dcp.save(state, checkpoint_id=place, storage_writer=writer, **how)


class App:
    """An application's state, as the tutorial on DCP has it (``Stateful``)."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def state_dict(self) -> State:
        return {"model": weights(self.live), "optim": moments(self.live)}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def _objects(live: Live) -> State:
    return {
        "scheduler": live.scheduler.state_dict(),
        "numpy": np.float32(1.5),
        "array": np.arange(5),
        "random": torch.get_rng_state(),
        "tuple": (1, "two", None),
        "path": Path("here"),
        "nothing": None,
        "empty": {},
        "list": [1, [2, 3]],
    }


EXTRAS: dict[str, Callable[[Live], Any]] = {
    "objects": _objects,
    "lr_scheduler": lambda live: live.scheduler.state_dict(),
    "epoch": lambda _live: 3,
}


def aligned_dcp(live: Live, place: Path) -> None:
    with alignment(4096):
        to_dcp(live, place)


@contextlib.contextmanager
def alignment(nbytes: int) -> Iterator[None]:
    usual = serialization.save.storage_alignment
    serialization.save.storage_alignment = nbytes
    yield
    serialization.save.storage_alignment = usual


def two_dcp(live: Live, place: Path) -> None:
    dcp.save(weights(live), checkpoint_id=place / "model")
    dcp.save(moments(live), checkpoint_id=place / "optim")


def hugging_face(live: Live, place: Path) -> None:
    writer = HuggingFaceStorageWriter(str(place), **live.case.knobs)
    dcp.save(weights(live), storage_writer=writer)


def hugging_face_later(live: Live, place: Path) -> None:
    """Save shards, and let one process consolidate them after training, beside the shards."""
    hugging_face(live, place / "sharded")
    dist.barrier()
    if live.rank == 0:
        files = {key: 1 + i % 2 for i, key in enumerate(weights(live))}
        consolidate_safetensors_files(str(place / "sharded"), str(place), files)


def tagged(live: Live, place: Path) -> None:
    """Save in the form of the ImageNet example, or under Lightning's names for it."""
    state = {
        "epoch": 3,
        "arch": "tiny",
        "state_dict": live.model.state_dict(),
        "best_acc1": torch.tensor(0.5),
        "optimizer": live.optimizer.state_dict(),
        "scheduler": live.scheduler.state_dict(),
    }
    _rank0(live, state, place / "checkpoint.pth.tar")


def model_state_dict(live: Live, place: Path) -> None:
    """Save under the names of PyTorch's own tutorial."""
    state = {
        "epoch": 3,
        "model_state_dict": live.model.state_dict(),
        "optimizer_state_dict": live.optimizer.state_dict(),
        "loss": 0.25,
    }
    _rank0(live, state, place / "checkpoint.tar")


def legacy(live: Live, place: Path) -> None:
    state = {"model": live.model.state_dict(), "optimizer": live.optimizer.state_dict()}
    torch.save(state, place / "checkpoint.pt", _use_new_zipfile_serialization=False)


def aligned(live: Live, place: Path) -> None:
    with alignment(4096):
        one(live, place)


def compiled_ranks(live: Live, place: Path) -> None:
    rank_pair(replace(live, model=torch.compile(live.model)), place)


def compiled(live: Live, place: Path) -> None:
    model = torch.compile(live.model)
    state = {"model": model.state_dict(), "optimizer": live.optimizer.state_dict()}
    torch.save(state, place / "checkpoint.pt")


def compiled_layers(live: Live, place: Path) -> None:
    model = copy.deepcopy(live.model)
    layers = model.llama.model.layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer)
    one(replace(live, model=model), place)


def parameters(live: Live, place: Path) -> None:
    """Save parameters as they are, with requires_grad."""
    state = live.model.state_dict(keep_vars=True)
    torch.save({"model": state, "optimizer": live.optimizer.state_dict()}, place / "checkpoint.pt")


def module(live: Live, place: Path) -> None:
    torch.save(live.model, place / "model.pt")


def index(live: Live, place: Path) -> None:
    save_torch_state_dict(
        live.model.state_dict(), place, max_shard_size="20KB", safe_serialization=False
    )


def several(live: Live, place: Path) -> State:
    """Save two models and their optimizers in one file, under the names that the case gives."""
    first, second, first_optimizer, second_optimizer = live.case.knobs["keys"]
    other = find_run(replace(live.case, build="mlp"), live.rank)
    state = {
        first: live.model.state_dict(),
        second: other.model.state_dict(),
        first_optimizer: live.optimizer.state_dict(),
        second_optimizer: other.optimizer.state_dict(),
        "step": STEPS,
    }
    torch.save(state, place / "checkpoint.pt")
    return {"keys": {second: _copy_all(other.model.state_dict())}}


def averaged(live: Live, place: Path) -> State:
    average = AveragedModel(live.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        for parameter in live.model.parameters():
            parameter.mul_(2)
    average.update_parameters(live.model)
    with torch.no_grad():
        for parameter in live.model.parameters():
            parameter.div_(2)
    state = {
        "model": live.model.state_dict(),
        "ema": average.module.state_dict(),
        "optimizer": live.optimizer.state_dict(),
    }
    torch.save(state, place / "checkpoint.pt")
    return {"keys": {"ema": _copy_all(average.module.state_dict())}}


def odd_tensors(live: Live, place: Path) -> State:
    """Save every form of a tensor, sharded or not, with DCP, whose reader tells what to expect."""
    forms = sample_tensors()
    forms["channels_last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    forms["float8"] = torch.randn(6, 4).to(torch.float8_e4m3fn)
    state = {"model": forms, "lists": {"h": [torch.arange(4), 5], "deep": [[torch.ones(2)]]}}
    dcp.save(state, checkpoint_id=place)
    dist.barrier()
    if live.rank:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(place, file.name)
        read = torch.load(file.name, weights_only=False)
    assert read["model"].keys() == forms.keys()
    assert all(same(tensor, read["model"][key]) for key, tensor in forms.items())
    return {"params": {key: _copied(t) for key, t in read["model"].items()}, "buffers": {}}


def colliding(_live: Live, place: Path) -> State:
    state = {"model": {"a.b": torch.ones(3), "a": {"b": torch.zeros(3)}}}
    dcp.save(state, checkpoint_id=place)
    return {}


def _rank0(live: Live, state: State | None, path: Path) -> None:
    if live.rank == 0 and state is not None:
        torch.save(state, path)


FILES = {
    "pair": pair,
    "one": one,
    "rank_pair": rank_pair,
    "rank_one": rank_one,
    "full_and_ranks": full_and_ranks,
    "dcp": to_dcp,
    "aligned_dcp": aligned_dcp,
    "two_dcp": two_dcp,
    "hugging_face": hugging_face,
    "hugging_face_later": hugging_face_later,
    "tagged": tagged,
    "model_state_dict": model_state_dict,
    "legacy": legacy,
    "aligned": aligned,
    "compiled": compiled,
    "compiled_ranks": compiled_ranks,
    "compiled_layers": compiled_layers,
    "parameters": parameters,
    "module": module,
    "index": index,
    "several": several,
    "averaged": averaged,
    "odd_tensors": odd_tensors,
    "colliding": colliding,
}


# Processes


def work(job: ranks.Job, rank: int) -> None:
    """Train, ask PyTorch for the whole state, save; in the process group of all cases."""
    case, ckpt = CASES[job.case], job.out / "ckpt"
    ckpt.mkdir(exist_ok=True)
    if not dist.is_initialized():
        ranks.join_group(job, rank)
    live = find_run(case, rank)
    told = expect_state(live)
    renamed = Setup(**case.setup).cuda and not IS_GPU
    with named_cuda(rank) if renamed else contextlib.nullcontext():
        told = told | (FILES[case.files](live, ckpt) or {})
    if rank == 0:
        torch.save(told, job.out / "expected.pt")
    dist.barrier()


def silence(_jobs: list[ranks.Job]) -> dict[str, str]:
    """Ignore PyTorch's own warnings; return no missing case, as every case can be made."""
    warnings.simplefilter("ignore")
    return {}


if __name__ == "__main__":
    ranks.serve(work, silence, keep_ranks=True)
