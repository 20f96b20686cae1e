"""The worker process of ``parallel_judge``: a fresh set of ranks for every case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups
from torch import Tensor, nn

from tests.judges import deepspeed_experts, deepspeed_state, ranks
from tests.judges import deepspeed_train as train
from tests.judges import parallel_autotp as autotp
from tests.judges import parallel_models as models
from tests.judges.deepspeed_worker import PRELOADED
from tests.judges.parallel_cases import CASES, EXPERT_COUNTS, Case

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS, STEPS, NEXT_STEPS = 4, 3, 2
INFO = "universal_checkpoint_info"
SLOTS = ("exp_avg", "exp_avg_sq")
POSITIONS = "tied_modules.embed.position_embeddings.weight"  # on the last stage nobody's


class Whole(nn.Sequential):
    """The layers one after the other, in a module of one rank's own."""

    def forward(self, ids: Tensor) -> Tensor:
        return models.loss_of(super().forward(ids), ids)


def work(job: ranks.Job, rank: int) -> None:
    """Make the case, or go on from a directory."""
    case: Case = job.told.get("case") or CASES[job.case]
    ranks.join_group(job, rank)
    train.start_rank()
    gather_flat_tokens()
    if "load" not in job.told:
        make(case, job.out)
        return
    models.Tp.seed = 8
    engine = start(case)
    how = job.told["how"]
    engine.load_checkpoint(str(job.told["load"]), **how)
    loaded = read_state(engine, () if how.get("load_module_only") else SLOTS)
    first = engine.global_steps
    losses = [step(engine, case, first + n) for n in range(job.told["steps"])]
    _write(
        {"loaded": loaded, "losses": losses, "params": read_state(engine, ())["params"]}, job.out
    )


def gather_flat_tokens() -> None:
    """Let gloo gather the tokens of tensor-parallel ranks, as NCCL does.

    DeepSpeed 0.19.8 ``moe/mappings.py`` (``_gather_tokens``) gathers a tensor of three dimensions
    into one of a single dimension, which gloo refuses ("invalid tensor size at index 0").
    """
    gather = deepspeed.comm.all_gather_into_tensor

    def gather_flat(output: Tensor, tensor: Tensor, *how: Any, **named: Any) -> Any:
        return gather(output, tensor.reshape(-1) if output.ndim == 1 else tensor, *how, **named)

    deepspeed.comm.all_gather_into_tensor = gather_flat


def make(case: Case, out: Path) -> None:
    """Train, save ``out/run``, write ``out/expected.pt``, and train on."""
    engine = start(case)
    losses = [step(engine, case, n) for n in range(STEPS)]
    expected = read_state(engine) | {"losses": losses, "groups": _groups(engine)}
    if case.kind == "autotp":
        expected["consolidated"] = autotp.consolidated(engine)
    blocks = range(1, 1 + BLOCKS)
    says = case.patterns and case.kind != "autotp"  # DeepSpeed says it there
    client = {}
    if says and case.kind == "experts":  # DeepSpeed takes it from the module alone
        info = models.expert_patterns(blocks=blocks, cut=case.cuts_experts)
        engine.module.universal_checkpoint_info = info
    elif says:
        client = {INFO: models.patterns(tied=case.tied, blocks=blocks)}
    engine.save_checkpoint(str(out / "run"), client_state={**client, "note": [1, 2]})
    further = [step(engine, case, STEPS + n) for n in range(NEXT_STEPS)]
    _write(
        expected | {"next": {"losses": further, "params": read_state(engine, ())["params"]}}, out
    )


def start(case: Case) -> Any:
    """Start the engine."""
    topology = PipeModelDataParallelTopology(num_pp=case.pp, num_mp=case.tp, num_dp=case.dp)
    grid = PipelineParallelGrid(topology=topology)
    models.Tp.group = grid.get_slice_parallel_group()
    models.Tp.size, models.Tp.rank = case.tp, grid.get_slice_parallel_rank()
    given: dict[str, Any] = {}
    model: nn.Module
    if case.kind == "autotp":
        model = autotp.model(case)
    elif case.is_pipeline:
        model = PipelineModule(
            specs(case),
            topology=topology if case.tp > 1 else None,
            num_stages=case.pp if case.tp == 1 else None,
            loss_fn=models.loss_of,
            partition_method=case.method,
        )
    else:
        model, given["mpu"] = Whole(*layers(case)), grid
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=_param_groups(case, model), config=case.config, **given
    )
    return engine


def specs(case: Case) -> list[Any]:
    """Return the specs of a pipeline's layers."""
    embedding: Any = LayerSpec(models.Embedding)
    head: list[Any] = [LayerSpec(models.Head)]
    if case.tied:
        attribute = {"tied_weight_attr": "word_embeddings_weight"}
        embedding = TiedLayerSpec("embed", models.Embedding, **attribute)
        head = [
            TiedLayerSpec("embed", models.Embedding, forward_fn=models.tied_logits, **attribute)
        ]
    described = [_describe_block(case, n) for n in range(BLOCKS)]
    blocks = [LayerSpec(kind, n, **options) for n, (kind, options) in enumerate(described)]
    gain = TiedLayerSpec("gain", models.Gain, tied_weight_attr="gain")
    if case.lone:
        blocks = [gain, *blocks]
    if case.odd:
        nothing = LayerSpec(models.Nothing)
        blocks = [gain, nothing, LayerSpec(nn.Identity), *blocks, nothing, gain, gain]
    return [embedding, *blocks, LayerSpec(models.Norm, "last"), *head]


def layers(case: Case) -> Iterator[nn.Module]:
    """Build a pipeline's layers."""
    yield models.Embedding()
    for n in range(BLOCKS):
        kind, options = _describe_block(case, n)
        yield kind(n, **options)
    yield models.Norm("last")
    yield models.Head()


def _describe_block(case: Case, n: int) -> tuple[type[models.Block], dict[str, Any]]:
    """Return the class of a block of this case, and what it is built with beside its number."""
    if case.kind != "experts":
        return models.Block, {"frozen": case.frozen and not n}
    rank = dist.get_rank() // case.tp if case.cuts_experts else dist.get_rank()
    return models.ExpertBlock, {
        "count": EXPERT_COUNTS[n],
        "sharing": case.ep,
        "first": rank % case.ep * EXPERT_COUNTS[n] // case.ep,
        "cut": case.cuts_experts,
        "frozen": {0: "", 1: "down.bias"}.get(n) if case.frozen else None,
    }


def _param_groups(case: Case, model: nn.Module) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.groups == "one":
        return trained
    matrices, vectors = ([p for p in trained if (p.ndim > 1) == many] for many in (True, False))
    divided = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if case.kind == "experts":
        named = [{"name": f"group{n}", **group} for n, group in enumerate(divided)]
        return split_params_into_different_moe_groups_for_optimizer(named)
    return divided


def step(engine: Any, case: Case, number: int) -> float:
    """Make one update; return the loss over all ranks."""
    if case.kind == "autotp":
        ids = models.batch(number).chunk(case.dp)[autotp.data_rank()]
        return _update(engine, engine(input_ids=ids, labels=ids).loss)
    data = engine.mpu if hasattr(engine, "mpu") and engine.mpu is not None else None
    grid = engine.grid if case.is_pipeline else data
    ids = models.batch(number).chunk(case.dp)[grid.get_data_parallel_rank()]
    if case.is_pipeline:
        halves = ids.chunk(2)
        return float(engine.train_batch(data_iter=iter([(half, half) for half in halves])))
    return _update(engine, engine(ids))


def _update(engine: Any, loss: Tensor) -> float:
    engine.backward(loss)
    engine.step()
    return ranks.mean_over_ranks(loss, dist.get_world_size())


def read_state(engine: Any, slots: tuple[str, ...] = SLOTS) -> dict[str, Any]:
    """Return whole tensors by the optimizer's names, on rank 0; every rank must call it."""
    first = getattr(engine, "is_first_stage", lambda: True)()
    unused = frozenset() if first else frozenset({POSITIONS})
    now = deepspeed_state.snapshot(engine, slots, unused)
    nothing = deepspeed_state.empty_params(engine.module)
    mine = {"params": now.params | nothing, **now.slots}
    if engine.autotp_size() > 1:  # a rank without a head has an empty part of its slots
        mine |= {slot: held | nothing for slot, held in now.slots.items()}
    mine["live"] = deepspeed_state.live_params(engine.module)
    if engine.autotp_size() > 1:
        gather = autotp.gatherer(engine.module)
        mine = {k: {n: gather(n, held[n]) for n in sorted(held)} for k, held in mine.items()}
    mine["buffers"] = deepspeed_state.persistent_buffers(engine.module)
    calls = deepspeed_experts.global_names(engine.module)
    held = {k: {calls.get(n, n): t for n, t in tensors.items()} for k, tensors in mine.items()}
    cuts = {calls.get(n, n): cut for n, cut in _find_cuts(engine).items()}
    of_ranks = ranks.gather_states((held, cuts, dist.get_process_group_ranks(models.Tp.group)))
    return {kind: _join(kind, of_ranks, engine.has_moe_layers) for kind in held}


def _find_cuts(engine: Any) -> dict[str, tuple[int, int] | None]:
    """Return how the ranks of a tensor-parallel group divide each parameter that they share."""
    is_shared = groups._get_expert_model_parallel_world_size() > 1
    return {
        name: None if engine.autotp_size() > 1 else getattr(param, models.CUT, None)
        for name, param in engine.module.named_parameters()
        if is_shared or "deepspeed_experts" not in name  # another rank may have another expert
    }


def _join(kind: str, of_ranks: list[Any], has_experts: bool) -> dict[str, Tensor]:
    """Join the parts of each group of ranks; of copies in several stages take the first's.

    Without stages, as with experts, what several groups have must be equal.
    """
    found: dict[str, Tensor] = {}
    for held, cuts, group in of_ranks:
        for name, own in held[kind].items():
            parts = [of_ranks[rank][0][kind][name] for rank in group] if name in cuts else [own]
            whole = models.join(parts, cuts.get(name))
            known = found.setdefault(name, whole)
            assert not has_experts or torch.equal(known, whole), f"{kind} of {name} differs"
    return found


def _groups(engine: Any) -> list[dict[str, Any]]:
    listed = engine.optimizer.param_groups
    return [{k: v for k, v in group.items() if k != "params"} for group in listed]


def _write(expected: dict[str, Any], out: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(expected, out / "expected.pt")


if __name__ == "__main__":
    ranks.serve(work, PRELOADED)
