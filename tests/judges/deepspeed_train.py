"""The work of one rank: train a model with real DeepSpeed, save it, and record its state.

Runs in a process that was forked for one case only, so a case may leave DeepSpeed's global state
(patched constructors, expert groups, pipeline grids) in any condition it likes.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch._dynamo  # before zero.Init: an import inside its patched constructors breaks
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_map_only

import reshard.deepspeed
from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_state
from tests.judges.device import DEVICE, IS_GPU
from tests.judges.models import Enclosing, named, ties

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from tests.judges.deepspeed_cases import Case

NEXT_STEPS = 2


@dataclass
class Run:
    """A live engine with what the judge must remember about its making."""

    case: Case
    engine: Any
    groups: list[list[nn.Parameter]]

    def hypers(self) -> list[dict[str, Any]]:
        """Return hyperparameters of each user group, as the optimizer holds them now."""
        groups = self.engine.optimizer.param_groups
        return [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in groups]

    def fqns(self) -> list[list[str]]:
        """Return names of each user group."""
        return deepspeed_state.group_fqns(self.engine, self.groups)


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from its shared-memory collectives, before the ranks are forked.

    They need a compiler, and they spin, which is slow with few cores. DeepSpeed finds out which ops
    can be built when it is first asked, by running a compiler: here that happens once.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def start_rank() -> None:
    """Let DeepSpeed find the process group, and the CPU pass for a float16 device.

    DeepSpeed asks ``is_fp16_supported`` before it would train in float16, and CPUs usually deny;
    torch computes it all the same, and the files are those of a GPU run.
    """
    if not IS_GPU:
        type(get_accelerator()).is_fp16_supported = lambda _self: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def build_model(case: Case, config: dict[str, Any], seed: int = 7) -> nn.Module:
    """Return the case's model, the same on every rank."""
    torch.manual_seed(seed)
    context = deepspeed.zero.Init(config_dict_or_path=config) if case.zero_init else nullcontext()
    family, _, variant = case.model.partition("_")
    with context:
        if family == "llama":
            return models.llama(tied=variant == "tied")
        shape = (1,) if variant in ("vector", "checkpointed", "headed") else ()
        hidden = 256 if variant == "wide" else 64
        model = models.Menagerie(tied=variant == "tied", scalar_shape=shape, hidden=hidden)
        if variant == "headed":
            return models.Headed(model)
    if variant == "enclosed":
        return Enclosing(model)
    if variant == "repeated":
        return models.repeated(model)
    return models.checkpointed(model) if variant == "checkpointed" else model


def resolved_config(case: Case, world: int, scratch: Path) -> dict[str, Any]:
    """Return the case's config with the batch of the fixed global batch, and a swap folder."""
    config = copy.deepcopy(case.config)
    if config.get("optimizer", {}) is None:
        del config["optimizer"]
    config["train_micro_batch_size_per_gpu"] = models.GLOBAL_BATCH // world
    if case.nvme:
        config["aio"] = {"block_size": 4096, "queue_depth": 4}
        for key in ("offload_optimizer", "offload_param"):
            if key in config["zero_optimization"]:
                config["zero_optimization"][key]["nvme_path"] = str(scratch / ".swap")
    return config


def load_aio(*, compile_it: bool) -> str | None:
    """Make DeepSpeed's disk op ready, once, before the ranks would all do it at the same time.

    Compiling it takes minutes of CPU, so that happens only when asked for. Returns why the op is
    not there, if it is not.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    builders = [PinMemoryBuilder(), AsyncIOBuilder()]
    if not compile_it and not all(_compiled(builder.name) for builder in builders):
        return (
            "DeepSpeed's aio op is not compiled here yet, and that takes minutes; name the case "
            "explicitly to have it done (needs libaio-dev, ninja and a C++ compiler)"
        )
    try:
        for builder in builders:
            builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - a compiler's failure has no type of its own
        return f"DeepSpeed's aio op needs libaio-dev, ninja and a compiler: {error!r}"
    return None


def _compiled(op: str) -> bool:
    """Return whether torch has the op in its cache of extensions."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(op, verbose=False), f"{op}.so").exists()


def start(
    case: Case,
    world: int,
    scratch: Path,
    seed: int = 7,
    *,
    universal: Path | None = None,
    weights: Path | None = None,
) -> Run:
    """Make the engine.

    ``universal`` is the universal checkpoint that it will load, ``weights`` a Hugging Face
    directory whose weights the model begins with.
    """
    config = resolved_config(case, world, scratch)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    with scalars_broadcast():
        model = build_model(case, config, seed)
    if universal:
        give_untrained(model, universal)
    if weights is not None:
        model.load_state_dict(type(model).from_pretrained(weights).state_dict())  # type: ignore[attr-defined]
    groups = models.param_groups(model, case.groups)
    members = [list(group["params"]) for group in groups]
    optimizer: torch.optim.Optimizer | None = None
    if case.client_optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.01)
    elif case.client_optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    elif case.client_optimizer == "counted":
        optimizer = Counted(groups, lr=1e-3)
    mpu = None
    if case.sequence > 1:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

        mpu.initialize_sequence_parallel(case.sequence)
    with scalars_broadcast():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=groups, config=config, mpu=mpu
        )
    return Run(case, engine, members)


class Counted(torch.optim.AdamW):
    """It counts its updates in Python, as DeepSpeed's own Adams do, which need a compiler."""

    def step(self, closure: Any = None) -> Any:
        """Make one update."""
        for state in self.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(state["step"]))
        loss = super().step(closure)
        for state in self.state.values():
            state["step"] = int(state["step"])
        return loss


@contextmanager
def scalars_broadcast() -> Iterator[None]:
    """Let DeepSpeed broadcast 0-d parameters when it takes over a model.

    DeepSpeed 0.19.8 broadcasts ``p.data.view(torch.uint8)``, and torch raises "self.dim() cannot be
    0 to view Float as Byte", in every stage, with zero.Init or without. Earlier versions broadcast
    ``p.data``, so checkpoints with 0-d parameters are in the field, and this is their one obstacle.
    """
    view = torch.Tensor.view

    def view_of_any_rank(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        if tensor.ndim == 0 and shape == (torch.uint8,):
            tensor = view(tensor, 1)
        return view(tensor, *shape)

    torch.Tensor.view = view_of_any_rank  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.view = view  # type: ignore[method-assign]


def train_step(run: Run, step: int) -> float:
    """Make one optimizer step with all micro steps; return the mean loss over ranks."""
    engine, accumulation = run.engine, run.engine.gradient_accumulation_steps()
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(accumulation):
        batch = models.global_batch(step, micro, accumulation)
        share = models.rank_share(batch, dist.get_rank(), dist.get_world_size())
        loss = _loss(engine, share.to(DEVICE))
        total += loss.detach().double().cpu() / accumulation
        engine.backward(loss * 1e9 if step == run.case.overflow_at else loss)
        engine.step()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _loss(engine: Any, share: torch.Tensor) -> Any:
    if models.is_llama(engine.module):
        return engine(input_ids=share, labels=share).loss.float()
    return engine(share)


def make(case: Case, out: Path) -> None:
    """Train, save ``out/run``, write ``out/expected.pt``; train on, for the resume tests."""
    run = start(case, dist.get_world_size(), out)
    losses = [train_step(run, step) for step in range(case.steps - 1)]
    before, hypers = deepspeed_state.snapshot_once(run.engine, case.slots), run.hypers()
    losses.append(train_step(run, case.steps - 1))
    now = deepspeed_state.snapshot(run.engine, case.slots)
    deepspeed_state.check_last_step(before, now, run.fqns(), hypers)
    save(run, out / "run")
    expected = describe(run, now) | {"losses": losses}
    further = [train_step(run, case.steps + extra) for extra in range(NEXT_STEPS)]
    later = deepspeed_state.snapshot_once(run.engine, ())
    expected["next"] = {"losses": further, "params": later.params}
    write_expected(expected, out)
    if case.universal and dist.get_rank() == 0:
        convert_universal(out / "run", out / "universal")


def convert_universal(run: Path, target: Path) -> None:
    """Run DeepSpeed's own ds_to_universal in this process; with one worker it forks nothing."""
    from deepspeed.checkpoint.ds_to_universal import main

    tag = (run / "latest").read_text().strip()
    main(
        Namespace(
            input_folder=str(run / tag),
            output_folder=str(target / tag),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def clear_frozen(model: nn.Module) -> None:
    """Set frozen parameters to zero, which begin with the same values under every seed."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    with torch.no_grad(), deepspeed.zero.GatheredParameters(frozen, modifier_rank=0):
        for parameter in frozen:
            parameter.zero_()


def give_untrained(model: nn.Module, run_dir: Path) -> None:
    """Copy the frozen parameters and buffers of a universal checkpoint into a model.

    DeepSpeed restores neither of them from such a checkpoint.
    """
    tag = (run_dir / "latest_universal").read_text()
    held = torch.load(run_dir / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    trained = {name for name, p in named(model, every=True) if p.requires_grad}
    model.load_state_dict({n: t for n, t in held.items() if n not in trained}, strict=False)


def begin(case: Case, weights: Path, steps: int, out: Path) -> None:
    """Train a fresh engine from a model's weights."""
    run = start(case, dist.get_world_size(), out, seed=8, weights=weights)
    loaded = describe(run, deepspeed_state.snapshot(run.engine, ()))
    losses = [train_step(run, step) for step in range(steps)]
    params = deepspeed_state.snapshot_once(run.engine, ()).params
    write_expected({"loaded": loaded, "losses": losses, "params": params}, out)


def load(
    case: Case, run_dir: Path, steps: int, out: Path, *, universal: bool = False, **how: Any
) -> None:
    """Resume ``run_dir`` with real DeepSpeed from other initial weights, and train on.

    ``how`` are arguments of ``load_checkpoint``; without the optimizer's states no slot is told.
    """
    directory = run_dir if universal else None
    run = start(case, dist.get_world_size(), out, seed=8, universal=directory)
    write_expected(resumed(run, run_dir, steps, universal=universal, **how), out)


def resumed(
    run: Run, run_dir: Path, steps: int, *, universal: bool = False, **how: Any
) -> dict[str, Any]:
    """Return the state of an engine after it has loaded, and how it continues."""
    case = run.case
    if how.pop("live", False):
        clear_frozen(run.engine.module)
        path, client_state = reshard.deepspeed.load_checkpoint(run.engine, run_dir, **how)
    else:
        path, client_state = run.engine.load_checkpoint(str(run_dir), **how)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {run_dir}")
    if universal:
        end_sharing(run.engine.basic_optimizer)
    # DeepSpeed returns all of its own keys that it does not consume together with the client's.
    kept = {key: client_state[key] for key in case.client_state}
    without = how.get("load_module_only") or not how.get("load_optimizer_states", True)
    slots = () if without else case.slots
    loaded = describe(run, deepspeed_state.snapshot(run.engine, slots), kept)
    first = run.engine.global_steps
    losses = [train_step(run, first + step) for step in range(steps)]
    params = deepspeed_state.snapshot_once(run.engine, ()).params
    return {"loaded": loaded, "losses": losses, "params": params}


def end_sharing(optimizer: torch.optim.Optimizer) -> None:
    """Give every flat tensor a counter of its own.

    Stage 3 puts the same tensor into the state of every flat tensor, so torch would increase it
    once for each of them.
    """
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def save(run: Run, directory: Path) -> None:
    """Save as a user would, with transformers' config beside it where the model has one."""
    run.engine.save_checkpoint(
        str(directory),
        client_state=copy.deepcopy(run.case.client_state),
        exclude_frozen_parameters=run.case.exclude_frozen,
    )
    if dist.get_rank() == 0 and models.is_llama(run.engine.module):
        run.engine.module.config.save_pretrained(directory)


def describe(
    run: Run, now: deepspeed_state.Snapshot, client_state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return everything a reader of the checkpoint should find, from the live engine."""
    engine, module = run.engine, run.engine.module
    groups = [h | {"fqns": n} for h, n in zip(run.hypers(), run.fqns(), strict=True)]
    scheduler = engine.lr_scheduler
    expected: dict[str, Any] = {
        "params": now.params | deepspeed_state.empty_params(module),
        "slots": now.slots,
        "optimizer_steps": now.steps,
        "frozen": deepspeed_state.frozen_params(module),
        "buffers": deepspeed_state.persistent_buffers(module),
        "live": deepspeed_state.live_params(module),
        "tied": ties(module),
        "never_stepped": [n for n in now.params if n == models.NEVER_STEPPED],
        "train": {
            "step": engine.global_steps,
            "skipped": engine.skipped_steps,
            "samples": engine.global_samples,
            "lr": engine.get_lr(),
            "param_groups": groups,
            "loss_scale": getattr(engine.optimizer, "loss_scale", None),
            "scheduler": scheduler.state_dict() if scheduler is not None else None,
            "client_state": run.case.client_state if client_state is None else client_state,
        },
    }
    if models.is_llama(module):
        tied = bool(module.config.tie_word_embeddings)
        expected |= models.llama_logits(expected["params"], tied=tied)
    return expected


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


def write_expected(expected: dict[str, Any], out: Path) -> None:
    """Save the gathered state on rank 0; every rank must call it."""
    if dist.get_rank() == 0:
        torch.save(tree_map_only(torch.Tensor, _to_cpu, expected), out / "expected.pt")
    dist.barrier()
