r"""Checkpoints of nanotron's own models, built and cut into pipeline stages as its trainer does.

    RESHARD_NANOTRON=nanotron/src python -m \
        plugins.nanotron.tests.judged.judge_pipeline OUT [case[=RUN] ...]

``OUT/<case>/ckpt`` is a run; with RUN it is what nanotron saves once it has loaded that one. Cases
of one model made the same updates, so that each is what another one is on other ranks.
``OUT/models/stages.json`` has the stage of every block of models of many sizes, as ``build_model``
gave them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from zlib import crc32

import torch
import torch.distributed as dist

from plugins.nanotron.tests.judged import judge
from plugins.nanotron.tests.judged.judge import STEPS, OnCpu

_SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
_SMALL |= {"intermediate_size": 6, "num_key_value_heads": 2, "max_position_embeddings": 8}
MODELS = {
    "qwen": ("Qwen2", {**_SMALL, "vocab_size": 20, "tie_word_embeddings": True}),
    "llama": ("Llama", {**_SMALL, "vocab_size": 24}),
}


@dataclass(frozen=True)
class Case:
    """A model on a grid."""

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: bool = False
    fp32: bool = False
    one_each: bool = True  # param groups
    begun: str = ""  # a run to load

    def start(self, parallel):
        """Return one rank's run."""
        return _Run(self, parallel)


CASES = {
    "qwen_tp2": Case("qwen", tp=2, zero=True, fp32=True),
    "qwen_pp3dp2": Case("qwen", pp=3, dp=2, zero=True, fp32=True),
    "llama_pp2": Case("llama", pp=2, one_each=False),
    "llama_tp2pp3": Case("llama", tp=2, pp=3, one_each=False),
}


def config_of(name, said):
    """Return a configuration of nanotron."""
    return getattr(importlib.import_module("nanotron.config.models_config"), f"{name}Config")(
        **said, _attn_implementation="sdpa"
    )


def class_of(config):
    """Return the model's own class."""
    return importlib.import_module("nanotron.trainer").CONFIG_TO_MODEL_CLASS[type(config).__name__]


def built(config, parallel, arguments, dtype=torch.float32):
    """Return the model with its blocks on stages, as the trainer builds it."""
    base = importlib.import_module("nanotron.models.base")
    states = importlib.import_module("nanotron.random")
    state = states.RandomStates({"tp_synced": states.get_current_random_state()})
    with OnCpu():
        return base.build_model(
            lambda: class_of(config)(
                config=config,
                parallel_context=parallel,
                parallel_config=arguments,
                random_states=state,
            ),
            parallel,
            dtype,
            device=torch.device("cpu"),
        )


class _Run:
    """One rank: model, optimizer and scheduler are built by what nanotron's trainer calls."""

    def __init__(self, case, parallel):
        self.case, self.parallel = case, parallel
        self.ranks = parallel.get_local_ranks(dist.get_rank())
        config = importlib.import_module("nanotron.config")
        helpers = importlib.import_module("nanotron.helpers")
        trainer = importlib.import_module("nanotron.trainer")
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # its layers ask for it under TP
        arguments = config.ParallelismArgs(dp=case.dp, pp=case.pp, tp=case.tp)
        self.config = config_of(*MODELS[case.model])
        self.dtype = torch.bfloat16 if case.fp32 else torch.float32
        self.model = built(self.config, parallel, arguments, self.dtype)
        with OnCpu():
            trainer.mark_tied_parameters(self.model, parallel, arguments)
        self._begin()
        self.named = dict(self.model.get_named_params_with_correct_tied())
        schedule = config.LRSchedulerArgs(0.01, 2, "linear", "cosine", min_decay_lr=0.001)
        with OnCpu():
            self.optimizer, self.accumulator = (
                self._trainers(schedule) if case.one_each else self._scripts()
            )
            self.scheduler = helpers.lr_scheduler_builder(self.optimizer, schedule, 10)

    def _trainers(self, schedule):
        """Return the optimizer of nanotron's trainer, with one group for each parameter."""
        config = importlib.import_module("nanotron.config")
        scaling = importlib.import_module("nanotron.scaling.parametrization")
        helpers = importlib.import_module("nanotron.helpers")
        adam = config.AdamWOptimizerArgs(1e-8, 0.9, 0.95, False)
        without_decay = [".*token_embedding.*", ".*norm.*"]
        case = self.case
        settings = config.OptimizerArgs(
            adam, int(case.zero), 0.1, None, case.fp32, schedule, without_decay
        )
        method = scaling.ParametrizationMethod.STANDARD
        return helpers.init_optimizer_and_grad_accumulator(
            method, self.model, settings, self.parallel
        )

    def _scripts(self):
        """Return the optimizer of a script, with one group of all parameters."""
        optim = importlib.import_module("nanotron.optim")
        return optim.NamedOptimizer(
            named_params_or_groups=self.named.items(),
            optimizer_builder=lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=False),
        ), None

    @torch.no_grad()
    def _begin(self):
        """Set the same weights on any grid."""
        for name, parameter in self.model.get_named_params_with_correct_tied():
            parameter.copy_(self._local(name, parameter, -1))

    def _local(self, name, parameter, step):
        """Return this rank's part of a whole tensor, which its name and the step determine."""
        cut = parameter.get_sharded_info() if parameter.is_sharded else None
        shape = cut.unsharded_shape if cut else parameter.shape
        made = torch.Generator().manual_seed(crc32(f"{name} {step}".encode()))
        whole = torch.randn(*shape, generator=made)
        if cut is None:
            return whole
        part = torch.empty(parameter.shape)
        for pair in cut.local_global_slices_pairs:
            part[pair.local_slices] = whole[pair.global_slices]
        return part

    def train(self):
        """Update the base optimizer by gradients of which every rank takes its part."""
        if self.case.begun:
            self._load(Path(self.case.begun) / str(STEPS))
            return
        base, names = self.optimizer.get_base_optimizer(), self.optimizer.id_to_name
        for step in range(STEPS):
            for parameter in (p for group in base.param_groups for p in group["params"]):
                name = names[id(parameter)]
                part = self._local(name, self.named[name], step)
                if self.case.zero:
                    offsets = self.optimizer.param_name_to_dp_rank_offsets[name]
                    part = part.view(-1)[slice(*offsets[self.ranks["dp"]])]
                parameter.grad = part.to(self.dtype).to(parameter.dtype)
            base.step()
            self.scheduler.step()
        if self.accumulator is not None:
            self.accumulator.step()
        if self.case.zero:
            judge.gather(self.optimizer, self.parallel, self.named)

    def _load(self, root):
        """Load as the trainer does."""
        serialize = importlib.import_module("nanotron.serialize")
        where = {"parallel_context": self.parallel, "root_folder": root}
        with OnCpu():
            shards = serialize.load_weights(model=self.model, **where)
            serialize.load_optimizer(
                optimizer=self.optimizer,
                map_location="cpu",
                param_shard_metadata=shards,
                model=self.model,
                **where,
            )
            serialize.load_lr_scheduler(self.scheduler, self.case.zero, **where)
            serialize.load_meta(self.parallel, root)

    def save(self, out):
        """Save as the trainer's ``save_checkpoint`` does."""
        parts = (self.model, self.optimizer, self.scheduler)
        root = judge.save(out / "ckpt", self.parallel, *parts, zero=self.case.zero)
        if dist.get_rank() == 0:
            with (root / "model_config.json").open("w") as file:
                file.write(json.dumps(dataclasses.asdict(self.config)))


# The stages of many models


class _Models:
    """Models that differ in what their blocks cost; none is trained."""

    tp = pp = dp = 1

    def start(self, _parallel):
        """Return this object: the models need nothing but a process group."""
        return self

    def train(self):
        """Do nothing: these models are not trained."""

    def save(self, out):
        """Save the stages that ``build_model`` chose for each model."""
        drawn = random.Random(0)
        said = [self._drawn(number, drawn) for number in range(120)]
        out.mkdir(parents=True, exist_ok=True)
        (out / "stages.json").write_text(json.dumps(said))

    def _drawn(self, number, drawn):
        """Return a model with the stage of each block."""
        name = ("Llama", "Qwen2", "Starcoder2")[number % 3]
        heads = drawn.choice((2, 4))
        said = {
            "num_hidden_layers": drawn.randint(1, 9),
            "num_attention_heads": heads,
            "hidden_size": 8 * heads,
            "intermediate_size": drawn.choice((4, 16, 64)),
            "vocab_size": drawn.choice((32, 100, 1000, 20000)),
        }
        if name == "Starcoder2" and drawn.random() < 0.5:
            del said["intermediate_size"]
        config, size = config_of(name, said), drawn.randint(1, 6)
        said |= {key: value for key, value in vars(config).items() if key.startswith("is_")}
        blocks = importlib.import_module("nanotron.parallel.pipeline_parallel.block")
        p2p = importlib.import_module("nanotron.parallel.pipeline_parallel.p2p")
        arguments = importlib.import_module("nanotron.config").ParallelismArgs(dp=1, pp=size, tp=1)
        found = {}

        def noted(block, rank):
            found[block] = block.rank = rank

        with (
            mock.patch.object(blocks.PipelineBlock, "build_and_set_rank", noted),
            mock.patch.object(p2p.P2P, "__init__", return_value=None),
        ):
            model = built(config, _of_stages(size), arguments)
        kind = blocks.PipelineBlock
        stages = {n: found[m] for n, m in model.named_modules() if isinstance(m, kind)}
        return {"config": said, "pp": size, "stages": stages}


def _of_stages(size):
    """Return a grid of so many stages, of which only the size is used."""
    stages = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    rest = dict.fromkeys(("tp_pg", "cp_pg", "ep_pg"))
    return SimpleNamespace(**rest, pp_pg=stages, world_pg=dist.group.WORLD, expert_parallel_size=1)


CASES["models"] = _Models()


def main():
    """Make the cases that are named, or all."""
    out, *names = sys.argv[1:]
    chosen = {}
    for name, _, begun in (case.partition("=") for case in names or CASES):
        chosen[name] = replace(CASES[name], begun=begun) if begun else CASES[name]
    judge.make(Path(out), chosen)


if __name__ == "__main__":
    main()
