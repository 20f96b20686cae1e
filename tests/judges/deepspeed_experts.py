"""Runs with expert parallelism: train, save, and gather the experts from their ranks.

Every rank tells what it holds under the names that a rank with all experts would use; what several
hold must be equal, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups as topology

from tests.judges import deepspeed_models as models
from tests.judges import deepspeed_state
from tests.judges import deepspeed_train as train
from tests.judges.ranks import gather_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from tests.judges.deepspeed_cases import Case


def make_moe(case: Case, out: Path) -> None:
    """Train, save ``out/run``, write ``out/expected.pt``."""
    run = start(case, out)
    losses = [train.train_step(run, step) for step in range(case.steps - 1)]
    before, hypers = deepspeed_state.snapshot_once(run.engine, case.slots), run.hypers()
    losses.append(train.train_step(run, case.steps - 1))
    now = deepspeed_state.snapshot(run.engine, case.slots)
    deepspeed_state.check_last_step(before, now, run.fqns(), hypers)
    train.save(run, out / "run")
    expected = gathered(run, train.describe(run, now)) | {"losses": losses}
    further = [train.train_step(run, case.steps + extra) for extra in range(train.NEXT_STEPS)]
    later = deepspeed_state.snapshot_once(run.engine, ())
    expected["next"] = {"losses": further, "params": joined(run, later.params)}
    train.write_expected(expected, out)


def load(case: Case, run_dir: Path, steps: int, out: Path, **how: Any) -> None:
    """Resume ``run_dir`` from other initial weights, and train on; as `deepspeed_train.load`."""
    run = start(case, out, seed=80)
    found = train.resumed(run, run_dir, steps, **how)
    found["loaded"] = gathered(run, found["loaded"])
    found["params"] = joined(run, found["params"])
    train.write_expected(found, out)


def start(case: Case, out: Path, seed: int = 7) -> train.Run:
    """Make the engine; the optimizer's groups are split by DeepSpeed, as its guide says."""
    torch.manual_seed(
        seed + dist.get_rank()
    )  # DeepSpeed makes what ranks share alike, nothing else
    model = models.MoeToy(case.experts)
    named = [
        {"name": f"group{number}", **group}
        for number, group in enumerate(models.param_groups(model, case.groups))
    ]
    split = split_params_into_different_moe_groups_for_optimizer(named)
    members = [list(group["params"]) for group in split]
    config = train.resolved_config(case, dist.get_world_size(), out)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=split, config=config)
    return train.Run(case, engine, members)


def gathered(run: train.Run, expected: dict[str, Any]) -> dict[str, Any]:
    """Join the states of all ranks."""
    sections = ("params", "frozen", "buffers", "live")
    whole = {key: joined(run, expected[key]) for key in sections}
    slots = {slot: joined(run, held) for slot, held in expected["slots"].items()}
    calls = global_names(run.engine.module)
    listed = expected["train"]["param_groups"]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [[calls.get(n, n) for n in group["fqns"]] for group in listed])
    for number, group in enumerate(listed):
        group["fqns"] = list(dict.fromkeys(n for held in ranks for n in held[number]))
    return expected | whole | {"slots": slots}


def joined(run: train.Run, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks on rank 0, under the whole model's names."""
    calls = global_names(run.engine.module)
    return _same(gather_states({calls.get(name, name): t for name, t in tensors.items()}))


def global_names(model: nn.Module) -> dict[str, str]:
    """Return this rank's names of its experts -> their names on a rank with all experts."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        first = topology._get_expert_parallel_rank(module.expert_group_name)
        first *= module.num_local_experts
        for number, expert in enumerate(module.deepspeed_moe.experts.deepspeed_experts):
            prefix = f"{name}.deepspeed_moe.experts.deepspeed_experts"
            for key in expert.state_dict():
                found[f"{prefix}.{number}.{key}"] = f"{prefix}.{first + number}.{key}"
    return found


def _same(ranks: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank.items():
            if not torch.equal(found.setdefault(name, value), value):
                raise AssertionError(f"{name} differs between ranks")
    return found


def make_refused(case: Case, out: Path) -> None:
    """Train and save; record no state, because reshard refuses the checkpoint."""
    run = start(case, out)
    losses = [train.train_step(run, step) for step in range(case.steps)]
    train.save(run, out / "run")
    train.write_expected({"losses": losses, "refused": case.kind}, out)
