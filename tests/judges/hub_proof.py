"""The proof for one model type: train, merge, compare with ``save_pretrained``, and back.

A step that finds a difference raises `DifferenceError`, and the next step runs all the same. The
process that calls `prove` has imported the frameworks; ranks are forks of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import reshard
from tests.hub_page import AS_TRANSFORMERS
from tests.judges import hub_models

RANKS, STEPS = 2, 2
SAME = "ok"
SEED, OTHER_SEED = 7, 8
RANK_SECONDS = 90
MOMENTS = ("exp_avg", "exp_avg_sq")
EXPECTED = "expected.pt"  # what the ranks trained, as the framework itself gathers it
TRAINED = "trained"  # a file that says that all ranks came to their end
FRAMEWORKS = {"fsdp2": "FSDP 2", "zero3": "ZeRO-3"}


@dataclass
class Found:
    """What the steps found: the model that was built, then the result of each step."""

    case: str
    model_class: str = ""
    recipe: str = ""
    elements: int = 0
    loss: str = ""
    steps: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class DifferenceError(Exception):
    """A step found something that differs."""


def prove(case: hub_models.Case, place: Path, frameworks: Iterable[str]) -> Found:
    """Run all steps for one case in `place`, where checkpoints of an earlier run may be."""
    found = Found(case.name)
    with _timed(found, "build", place):
        model, recipe = hub_models.build(case, SEED)
        found.model_class, found.recipe = type(model).__name__, recipe
        found.elements = sum(p.numel() for p in model.parameters())
    if found.steps["build"] != SAME:
        return found
    inputs = hub_models.find_inputs(model)
    found.loss = "forward" if isinstance(inputs, dict) else "parameters"
    if isinstance(inputs, str):
        found.steps["inputs"] = inputs
    for name in frameworks:
        train = {"fsdp2": _train_fsdp2, "zero3": _train_zero3}[name]
        run = place / name
        with _timed(found, f"{name} train", place):
            _run_ranks(train, model, inputs, run)
        if found.steps[f"{name} train"] != SAME:
            continue
        with _timed(found, f"{name} merge", place):
            _merge(model, run)
        if (run / "merged").is_dir():
            with _timed(found, f"{name} load", place):
                _load_merged(model, run, inputs)
    with _timed(found, "back", place):
        _convert_back(case, model, place / "back")
    return found


@contextlib.contextmanager
def _timed(found: Found, step: str, place: Path) -> Iterator[None]:
    """Record the seconds of a step, and its result without the names of directories in `place`."""
    begun = time.monotonic()
    try:
        yield
        found.steps[step] = SAME
    except DifferenceError as error:
        found.steps[step] = str(error)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - the result tells it
        traceback.print_exc()
        found.steps[step] = f"{type(error).__name__}: {error}".replace(f"{place}/", "")
    found.seconds[step] = round(time.monotonic() - begun, 2)


def _run_ranks(train: Callable[..., None], model: nn.Module, inputs: Any, run: Path) -> None:
    """Fork the ranks, each with its copy of the model, and wait for all of them.

    Raises:
        DifferenceError: a rank failed, or took too long.
    """
    if (run / TRAINED).exists():
        return  # kept by an earlier run
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _become_rank(train, model, inputs, run, rank)
        pids.append(pid)
    failed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(failed):
        reasons = [p.read_text() for p in sorted(run.glob("error.*"))]
        raise DifferenceError(reasons[0] if reasons else f"ranks ended with {failed}")
    (run / TRAINED).touch()


def _become_rank(
    train: Callable[..., None], model: nn.Module, inputs: Any, run: Path, rank: int
) -> None:
    """Train as one rank; never returns."""
    code = 0
    signal.alarm(RANK_SECONDS)
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
        }
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{run / '.rendezvous'}", rank=rank, world_size=RANKS
        )
        train(model, inputs, run)
        torch.distributed.barrier()
    except BaseException as error:  # noqa: BLE001 - the exit code carries the failure
        traceback.print_exc()
        (run / f"error.{rank}").write_text(f"{type(error).__name__}: {error}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean square of the model's first float output, or of its parameters."""
    outputs = model(**inputs)
    values = [each for each in hub_models.iterate_tensors(outputs) if each.requires_grad]
    return values[0].float().square().mean()


def _replace_forward(model: nn.Module) -> None:
    """Let the model return the sum of the squares of all parameters, each taken by its own module.

    Modules are called, so that what FSDP and DeepSpeed hang on their calls runs. The model needs
    no inputs then, and every parameter gets a gradient.
    """
    owners = [
        m
        for m in model.modules()
        if m is not model and any(True for _ in m.parameters(recurse=False))
    ]

    def sum_own(module: nn.Module) -> Tensor:
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        return sum((p.float().square().sum() for p in own), torch.zeros(()))

    for owner in owners:
        owner.forward = lambda *_, owner=owner: sum_own(owner)
    model.forward = lambda **_: [sum((o() for o in owners), sum_own(model))]


def _train_fsdp2(model: nn.Module, inputs: Any, run: Path) -> None:
    """Train under FSDP 2 and save a DCP checkpoint of weights and Adam."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    if not isinstance(inputs, dict):
        _replace_forward(model)
    scalars = {value for value in model.parameters() if not value.dim()}  # fully_shard refuses them
    fully_shard(model, ignored_params=scalars)
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if bool(p.dim()) is sharded]}
        for sharded in (True, False)
    ]
    # one kernel for all parameters of a group: torch looks up how to shard each shape only once
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, fused=True)
    for _ in range(STEPS):
        _loss(model, inputs if isinstance(inputs, dict) else {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=run / "ckpt")
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if torch.distributed.get_rank() == 0:
        torch.save(whole, run / EXPECTED)


def _train_zero3(model: nn.Module, inputs: Any, run: Path) -> None:
    """Train under DeepSpeed ZeRO stage 3 and save its checkpoint."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if not isinstance(inputs, dict):
        _replace_forward(model)
    model.train()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        config=config,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
    )
    for _ in range(STEPS):
        engine.backward(_loss(engine, inputs if isinstance(inputs, dict) else {}))
        engine.step()
    engine.save_checkpoint(str(run / "ckpt"))
    whole = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value] if hasattr(value, "ds_id") else []):
            whole[name] = value.detach().clone()
    if torch.distributed.get_rank() == 0:
        torch.save(whole, run / EXPECTED)


def _merge(model: Any, run: Path) -> None:
    """Merge what the ranks saved, and compare with what transformers saves of the same weights.

    Raises:
        DifferenceError: a name, a dtype, a shape or a byte differs.
    """
    for name in ("oracle", "merged"):
        shutil.rmtree(run / name, ignore_errors=True)
    model.load_state_dict(torch.load(run / EXPECTED, weights_only=False))
    model.save_pretrained(run / "oracle")
    model.config.save_pretrained(run / "ckpt")
    reshard.merge(run / "ckpt", run / "merged")
    _compare(_read(run / "merged"), _read(run / "oracle"))


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face directory."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Compare names, dtypes, shapes and bytes.

    Raises:
        DifferenceError: they differ.
    """
    problems = []
    if extra := ours.keys() - theirs.keys():
        problems.append(f"only ours: {_some(extra)}")
    if lacking := theirs.keys() - ours.keys():
        problems.append(f"only transformers': {_some(lacking)}")
    shared = ours.keys() & theirs.keys()
    for what, differ in (
        ("dtype", lambda a, b: a.dtype != b.dtype),
        ("shape", lambda a, b: a.shape != b.shape),
        ("values", lambda a, b: a.dtype == b.dtype and a.shape == b.shape and not _same_bits(a, b)),
    ):
        if other := [name for name in shared if differ(ours[name], theirs[name])]:
            problems.append(f"other {what}: {_some(other)}")
    if problems:
        raise DifferenceError("; ".join(problems))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    def flat(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return torch.equal(flat(a), flat(b))


def _load(kind: Any, path: Path) -> tuple[Any, str]:
    """Load a directory with transformers; return the model and what it says about the keys."""
    model, info = kind.from_pretrained(path, output_loading_info=True)
    said = [f"{k}: {_some(map(str, v))}" for k, v in info.items() if v]
    return model, "; ".join(said)


def _load_merged(model: Any, run: Path, inputs: Any) -> None:
    """Load what was merged; compare the weights in memory and the outputs.

    Raises:
        DifferenceError: keys are missing or unexpected, or something is unequal.
    """
    if ours := _describe_load(model, run / "merged", inputs):
        theirs = _describe_load(model, run / "oracle", inputs)
        raise DifferenceError(f"{AS_TRANSFORMERS}: {theirs}" if ours == theirs else ours)


def _describe_load(model: Any, path: Path, inputs: Any) -> str:
    """Return what is wrong with a directory when transformers loads it."""
    try:
        loaded, said = _load(type(model), path)
    except Exception as error:  # noqa: BLE001 - transformers may not load its own directory either
        return f"{type(error).__name__}: {error}".replace(str(path), "")
    problems = [said] if said else []
    for value in (*loaded.parameters(), *model.parameters()):
        value.data = value.data.clone()  # kernels may add in another order at another alignment
    try:
        _compare(dict(loaded.state_dict()), dict(model.state_dict()))
    except DifferenceError as error:
        problems.append(f"in memory: {error}")
    if isinstance(inputs, dict):
        outputs = [list(hub_models.run_forward(each, inputs)) for each in (loaded, model)]
        if not all(_same_bits(a, b) for a, b in zip(*outputs, strict=True)):
            problems.append("outputs differ")
    return "; ".join(problems)


def _convert_back(case: hub_models.Case, model: Any, run: Path) -> None:
    """Convert what transformers saves to DCP with a new Adam, and load it into a live model.

    Raises:
        DifferenceError: a weight differs, or a moment is not zero.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    shutil.rmtree(run, ignore_errors=True)
    model.save_pretrained(run / "oracle")
    groups = run / "groups.json"
    groups.write_text(json.dumps([{"lr": 1e-2, "weight_decay": 0.01}]))
    reshard.split(
        run / "oracle", run / "dcp", to="dcp", init_optimizer="zeros", param_groups=groups
    )
    live, _ = hub_models.build(case, OTHER_SEED)
    weights, states = get_state_dict(live, torch.optim.AdamW(live.parameters(), lr=1e-2))
    moments = [values[slot] for values in states["state"].values() for slot in MOMENTS]
    for moment in moments:
        moment.fill_(1)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=run / "dcp", no_dist=True)
    _compare(dict(live.state_dict()), dict(model.state_dict()))
    if not moments or any(moment.any() for moment in moments):
        raise DifferenceError("a moment of the new optimizer is not zero")
