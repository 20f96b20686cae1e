"""Checkpoints of nanotron's own savers on CPU, each with the expected whole tensors.

    RESHARD_NANOTRON=nanotron/src python -m plugins.nanotron.tests.judged.judge OUT [case ...]

A case is ``OUT/<case>/ckpt/3/`` with ``latest.txt`` above it, and ``expected.pt``: ``weights``,
``exp_avg``, ``exp_avg_sq`` and ``masters`` by name, from one AdamW over whole tensors in fp32. What
nanotron imports beside (datasets, flash_attn ...) need not be there: none of it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.judges.library_stubs import stand_in
from tests.support.ports import find_free_port

STEPS = 3
_ABSENT = ("datasets", "datatrove", "dion", "flash_attn", "grouped_gemm", "triton", "wandb")
_LR, _DECAY = 1e-2, 0.1


@dataclass(frozen=True)
class Case:
    """A grid and an optimizer."""

    tp: int
    pp: int
    dp: int
    zero: bool = False
    fp32: bool = False  # bf16 weights with fp32 masters
    groups: bool = False

    def start(self, parallel):
        """Return one rank's run."""
        return _Run(self, parallel)


CASES = {
    "zero_tp2pp2dp2": Case(2, 2, 2, zero=True),
    "zero_fp32_tp2dp3_groups": Case(2, 1, 3, zero=True, fp32=True, groups=True),
    "fp32_tp2pp2": Case(2, 2, 1, fp32=True),
    "zero_tp1pp2dp3": Case(1, 2, 3, zero=True),
}
# name -> (shape, dim that tensor parallelism cuts, parts that are cut one by one, stages of 2)
PARAMETERS = {
    "model.embed.pp_block.weight": ((12, 6), 0, None, (0, 1)),
    "model.decoder.0.pp_block.norm.weight": ((6,), None, None, (0,)),
    "model.decoder.0.pp_block.qkv.weight": ((20, 6), 0, (12, 4, 4), (0,)),
    "model.decoder.0.pp_block.qkv.bias": ((20,), 0, (12, 4, 4), (0,)),
    "model.decoder.10.pp_block.gate_up.weight": ((20, 6), 0, (10, 10), (1,)),
    "model.decoder.10.pp_block.down.weight": ((6, 10), 1, None, (1,)),
    "model.decoder.10.pp_block.norm.weight": ((6,), None, None, (1,)),
    "model.tiny.weight": ((1,), None, None, (1,)),
}


class OnCpu(TorchFunctionMode):
    """``device="cuda"`` means the CPU."""

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def initial(name):
    """Return a parameter of the whole model."""
    made = torch.Generator().manual_seed(list(PARAMETERS).index(name))
    return torch.randn(PARAMETERS[name][0], generator=made)


def gradient(name, step):
    """Return the whole gradient of a parameter in one step."""
    made = torch.Generator().manual_seed(1000 * (step + 1) + list(PARAMETERS).index(name))
    return torch.randn(PARAMETERS[name][0], generator=made)


def settings(case):
    """Return names of each param group, with its settings."""
    small = [name for name in PARAMETERS if len(PARAMETERS[name][0]) == 1]
    large = [name for name in PARAMETERS if name not in small]
    if not case.groups:
        return [([*PARAMETERS], {"weight_decay": _DECAY})]
    return [(large, {"weight_decay": _DECAY}), (small, {"weight_decay": 0.0})]


def train_whole(case):
    """Return the state of one process with whole tensors."""
    dtype = torch.bfloat16 if case.fp32 else torch.float32
    whole = {n: nn.Parameter(initial(n).to(dtype).float()) for n in PARAMETERS}
    groups = [{"params": [whole[n] for n in names], **s} for names, s in settings(case)]
    optimizer = torch.optim.AdamW(groups, lr=_LR, foreach=False)
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = gradient(name, step).to(dtype).float()
        optimizer.step()
    state = {n: optimizer.state[p] for n, p in whole.items()}
    masters = {n: p.detach() for n, p in whole.items()}
    return {
        "weights": {n: p.to(dtype) for n, p in masters.items()},
        "masters": masters if case.fp32 else {},
        **{slot: {n: s[slot] for n, s in state.items()} for slot in ("exp_avg", "exp_avg_sq")},
    }


def _local(whole, dim, chunks, rank, size):
    """Return a rank's part of a tensor: its piece of each fused part of the cut dim."""
    if dim is None:
        return whole.clone()
    parts = whole.split(list(chunks or (whole.shape[dim],)), dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim).contiguous()


def _save(rank, case, out, port):
    with stand_in(_ABSENT):
        for name in _ABSENT:  # transformers and nanotron ask them how old they are
            sys.modules[name] = importlib.import_module(name)
            vars(sys.modules[name]).setdefault("__version__", "2.7.0")
        _save_on(rank, case, out, port)


def _save_on(rank, case, out, port):
    """Run one rank, from start to end."""
    world = case.tp * case.pp * case.dp
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    context = importlib.import_module("nanotron.parallel.context")
    context.ParallelContext.set_device = lambda _self: None
    run = case.start(context.ParallelContext(case.tp, case.pp, case.dp))
    run.train()
    run.save(out)
    dist.barrier()
    dist.destroy_process_group()


class _Run:
    """A rank's part of the model, its optimizer and scheduler, all nanotron's own."""

    def __init__(self, case, parallel):
        self.case, self.parallel = case, parallel
        self.ranks = parallel.get_local_ranks(dist.get_rank())
        self.dtype = torch.bfloat16 if case.fp32 else torch.float32
        self.model = nn.Module()
        for name, (_, _, _, stages) in PARAMETERS.items():
            if case.pp == 1 or self.ranks["pp"] in stages:
                self._add(name)
        self._tie()
        self.held = dict(self.model.named_parameters())
        self.optimizer = self._optimizer()
        self.base = self.optimizer.get_base_optimizer()
        lambdas = [lambda _step: 1.0] * len(self.base.param_groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.base, lambdas)

    def _add(self, name):
        """Register a parameter under its dotted name, marked as cut or not."""
        _, dim, chunks, _ = PARAMETERS[name]
        parameters = importlib.import_module("nanotron.parallel.parameters")
        sharded = importlib.import_module("nanotron.parallel.sharded_parameters")
        local = _local(initial(name), dim, chunks, self.ranks["tp"], self.case.tp)
        parameter = parameters.NanotronParameter(local.to(self.dtype))
        if dim is not None:
            config = sharded.SplitConfig(split_dim=dim, contiguous_chunks=chunks)
            parameter = sharded.create_sharded_parameter_from_config(
                parameter, self.parallel.tp_pg, config
            )
        *modules, leaf = name.split(".")
        module = self.model
        for part in modules:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, parameter)

    def _tie(self):
        """Tie parameters that several stages have, or that tensor parallelism does not cut."""
        tied = importlib.import_module("nanotron.parallel.tied_parameters")
        case, at = self.case, self.ranks
        for name, (_, dim, _, stages) in PARAMETERS.items():
            on = [pp for pp in range(case.pp) if case.pp == 1 or pp in stages]
            tps = [at["tp"]] if dim is not None else range(case.tp)
            if len(on) * len(tps) > 1 and at["pp"] in on:
                group = self._group(at["dp"], on, tps)
                tied.tie_parameters(self.model, [(name, group)], self.parallel, dist.ReduceOp.SUM)
        some = [[*range(case.pp)], *([pp] for pp in range(case.pp))]
        cuts = [[*range(case.tp)], *([tp] for tp in range(case.tp))]
        for dp, on, tps in product(range(case.dp), some, cuts):
            group = self._group(dp, on, tps)
            if group not in self.parallel.world_ranks_to_pg:
                self.parallel.world_ranks_to_pg[group] = dist.new_group(list(group))

    def _group(self, dp, stages, tps):
        at = {"ep_rank": 0, "dp_rank": dp, "cp_rank": 0}
        ranks = (
            self.parallel.get_global_rank(**at, pp_rank=pp, tp_rank=tp)
            for pp, tp in product(stages, tps)
        )
        return tuple(sorted(ranks))

    def _optimizer(self):
        optim = importlib.import_module("nanotron.optim")
        zero = importlib.import_module("nanotron.optim.zero")
        accumulator = importlib.import_module("nanotron.optim.gradient_accumulator")

        def adam(groups):
            return torch.optim.AdamW(groups, lr=_LR, foreach=False)

        def named(groups):
            return optim.NamedOptimizer(named_params_or_groups=groups, optimizer_builder=adam)

        def accumulating(groups):
            return optim.OptimizerFromGradientAccumulator(
                gradient_accumulator_builder=lambda params: accumulator.FP32GradientAccumulator(
                    named_parameters=params, grad_buckets_named_params=list(self.held.items())
                ),
                named_params_or_groups=groups,
                optimizer_builder=named,
            )

        built = accumulating if self.case.fp32 else named
        groups = [
            {"named_params": [(n, self.held[n]) for n in names if n in self.held], **chosen}
            for names, chosen in settings(self.case)
        ]
        with OnCpu():
            if self.case.zero:
                return zero.ZeroDistributedOptimizer(groups, built, self.parallel.dp_pg)
            return built(groups)

    def train(self):
        """Train on fixed gradients, of which every rank takes its part."""
        named = self.optimizer.id_to_name
        params = [p for group in self.base.param_groups for p in group["params"]]
        for step in range(STEPS):
            for parameter in params:
                name = named[id(parameter)]
                _, dim, chunks, _ = PARAMETERS[name]
                whole = gradient(name, step).to(self.dtype)
                part = _local(whole, dim, chunks, self.ranks["tp"], self.case.tp)
                if self.case.zero:
                    start, stop = self._offsets(name)[self.ranks["dp"]]
                    part = part.view(-1)[start:stop]
                if self.case.zero and not self.case.fp32:  # it keeps a slice of this one
                    parameter.orig_data.grad = torch.zeros_like(parameter.orig_data)
                parameter.grad = part.to(parameter.dtype)
            self.base.step()
            self.scheduler.step()
        if self.case.fp32:
            above = self.optimizer.optimizer if self.case.zero else self.optimizer
            above.gradient_accumulator.step()
        if self.case.zero:
            gather(self.optimizer, self.parallel, self.held)

    def _offsets(self, name):
        return self.optimizer.param_name_to_dp_rank_offsets[name]

    def save(self, out):
        """Save as the trainer's ``save_checkpoint`` does, and the expected state beside it."""
        parts = (self.model, self.optimizer, self.scheduler)
        save(out / "ckpt", self.parallel, *parts, zero=self.case.zero)
        if dist.get_rank() == 0:
            torch.save(train_whole(self.case), out / "expected.pt")


@torch.no_grad()
def gather(optimizer, parallel, held):
    """Gather as ``_all_gather_params`` of ZeRO-1 does, which gloo cannot."""
    group = parallel.dp_pg
    for name, parameter in held.items():
        flat = parameter.data.view(-1)
        for dp, (start, stop) in optimizer.param_name_to_dp_rank_offsets[name].items():
            piece = flat[start:stop].clone()
            dist.broadcast(piece, dist.get_global_rank(group, dp), group=group)
            flat[start:stop] = piece


def save(run, parallel, model, optimizer, scheduler, *, zero):
    """Save a step's directory with nanotron's savers."""
    serialize = importlib.import_module("nanotron.serialize")
    metadata = importlib.import_module("nanotron.serialize.metadata")
    random = importlib.import_module("nanotron.serialize.random")
    states = importlib.import_module("nanotron.random")
    root = run / str(STEPS)
    root.mkdir(parents=True, exist_ok=True)
    where = {"parallel_context": parallel, "root_folder": root}
    serialize.save_weights(model=model, **where)
    serialize.save_optimizer(optimizer=optimizer, **where)
    serialize.save_lr_scheduler(scheduler, zero, **where)
    stage = metadata.DataStageMetadata("stable", 0, 8 * STEPS, 4, {"data": 32 * STEPS})
    about = metadata.TrainingMetadata(8 * STEPS, STEPS, 32 * STEPS, 0, [stage])
    serialize.save_meta(training_metadata=about, **where)
    kept = states.RandomStates({"tp_synced": states.get_current_random_state()})
    random.save_random_states(kept, **where)
    if dist.get_rank() == 0:
        (run / "latest.txt").write_text(str(STEPS))
    return root


def make(out, cases):
    """Run each case in processes of its own."""
    sys.path.insert(0, os.environ["RESHARD_NANOTRON"])
    for name, case in cases.items():
        port = find_free_port()
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        torch.multiprocessing.spawn(
            _save, (case, Path(out) / name, port), nprocs=case.tp * case.pp * case.dp
        )


def main():
    """Make the cases that are named, or all."""
    out, *names = sys.argv[1:]
    make(Path(out), {name: CASES[name] for name in names or CASES})


if __name__ == "__main__":
    main()
