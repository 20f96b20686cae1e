"""Train with torch's pipeline, data and tensor parallelism, and save in every form.

Each job is a function of (ranks, ...) for `worlds.run` and returns plain values. A mesh is
``(pp, dp, tp)``; every stage has layers under the names that the whole model gives them.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3
LAYERS = 4
WIDTH, INNER, VOCABULARY = 6, 12, 10
RANKS = ("numbered", "apart", "named", "bare_numbers", "rank_folders")  # a file of each rank
FORMS = (*RANKS, "dcp", "dcp_by_group", "dcp_of_stages", "stage_folders")
WHOLE = StateDictOptions(full_state_dict=True)
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, held):
        return held + self.down(torch.relu(self.up(self.norm(held))))


class Stage(nn.Module):
    """The layers of one stage, with the embedding on the first and the head on the last."""

    def __init__(self, stage, stages):
        super().__init__()
        chance = torch.Generator().manual_seed(11)
        whole = {str(number): Block() for number in range(LAYERS)}
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        each = LAYERS // stages
        held = range(stage * each, (stage + 1) * each)
        self.layers = nn.ModuleDict({str(number): whole[str(number)] for number in held})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == stages - 1 else None
        for parameter in self.parameters():
            parameter.data.normal_(generator=chance)

    def forward(self, held):
        if self.embed is not None:
            held = self.embed(held)
        for layer in self.layers.values():
            held = layer(held)
        return held if self.head is None else self.head(held)


def live(mesh, *, groups):
    """Build a stage and its optimizer; the second of two groups has shapes of its own."""
    torch.manual_seed(7)
    model = Stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    if mesh["tp"].size() > 1:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    every = dict(model.named_parameters())
    plain = [name for name in every if name.endswith("up.bias")] if groups == 2 else []
    parts = [{"params": [p for n, p in every.items() if n not in plain], "weight_decay": 0.1}]
    if plain:
        parts.append({"params": [every[n] for n in plain], "weight_decay": 0.0})
    return model, torch.optim.AdamW(parts, lr=1e-2)


def train(mesh, model, optimizer):
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    cut = PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(cut, 2, loss_fn=lambda out, _wanted: out.square().mean())
    for step in range(STEPS):
        chance = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))
        tokens = torch.randint(0, VOCABULARY, (4, 5), generator=chance)
        inputs = (tokens,) if stage == 0 else ()
        wanted = {"target": tokens} if stage == stages - 1 else {}
        schedule.step(*inputs, **wanted)
        optimizer.step()
        optimizer.zero_grad()


def read_state(ranks, mesh, model, optimizer):
    """Return whole tensors of all stages, as torch gathers each stage's."""
    weights = get_model_state_dict(model, options=WHOLE)
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    first = mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0
    told = [None] * ranks.world
    dist.all_gather_object(
        told, (weights, state["state"], state["param_groups"]) if first else None
    )
    stages = [each for each in told if each]
    return {
        "weights": {fqn: held for weights, _, _ in stages for fqn, held in weights.items()},
        "state": {fqn: held for _, state, _ in stages for fqn, held in state.items()},
        "groups": [
            [fqn for _, _, groups in stages for fqn in groups[number]["params"]]
            for number in range(len(stages[0][2]))
        ],
    }


def save(ranks, sizes, place, groups):
    """Train, then save in every form, with the expected state beside."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    model, optimizer = live(mesh, groups=groups)
    train(mesh, model, optimizer)
    told = read_state(ranks, mesh, model, optimizer)
    for form in FORMS:
        (place / form).mkdir(exist_ok=True)
    dist.barrier()
    rank = ranks.rank
    raw = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    torch.save(raw, place / "numbered" / f"state_rank_{rank}.pt")
    torch.save(raw, place / "bare_numbers" / f"{rank}.pt")
    (place / "rank_folders" / f"rank_{rank}").mkdir()
    torch.save(raw, place / "rank_folders" / f"rank_{rank}" / "checkpoint.pt")
    torch.save(model.state_dict(), place / "apart" / f"model_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), place / "apart" / f"optim_rank_{rank}.pt")
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    torch.save({"model": weights, "optimizer": state}, place / "named" / f"state_rank_{rank}.pt")
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place / "dcp_by_group")
    flat = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    dcp.save({"model": weights, "optimizer": flat}, checkpoint_id=place / "dcp")
    stage = mesh.get_local_rank("pp")
    keyed = {f"model_{stage}": model.state_dict(), f"optim_{stage}": optimizer.state_dict()}
    dcp.save(keyed, checkpoint_id=place / "dcp_of_stages")
    size = ranks.world // sizes[0]
    of_stages = [dist.new_group(range(n, n + size)) for n in range(0, ranks.world, size)]
    own = place / "stage_folders" / f"pp{stage}"
    dcp.save(raw, checkpoint_id=own, process_group=of_stages[stage])
    if rank == 0:
        torch.save(told, place / "expected.pt")
