"""Runs of real ranks for test_fsdp.

One process has imported torch and forks 4, then 2 ranks, then one; each goes through all its cases
and rank 0 writes its results to ``OUT/<ranks>.json``, case by case. An unexpected exception is
a finding, too.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import pickle
import shutil
import time
import traceback
import warnings
from itertools import chain, product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from tests.support.combinations import choose_combinations
from trainer.checkpoint import files, fsdp, saving, state
from trainer.checkpoint.contents import write_all
from trainer.core import model, optimizer
from trainer.core.data import Corpus, derive_seed
from trainer.core.errors import TrainerError
from trainer.core.fsdp1 import FsdpEngine
from trainer.core.fsdp2 import Fsdp2Engine
from trainer.core.loop import Progress
from trainer.core.model_config import load_model_config
from trainer.core.ranks import Ranks
from trainer.resolve import resolve

ENGINES = {"fsdp": FsdpEngine, "fsdp2": Fsdp2Engine}
FORMS = {
    "full": {"state_dict_type": "full"},
    "dcp": {"state_dict_type": "sharded", "sharded_files": "dcp"},
    "rank": {"state_dict_type": "sharded", "sharded_files": "rank"},
    "local": {"state_dict_type": "local"},  # the last: FSDP 1 shards without a mesh for it
}
FROZEN = ("embed", r"layers\.0\..*norm")
PRECISIONS = ("fp32", "bf16", "fp16")
CHOSEN = choose_combinations(
    product(ENGINES, PRECISIONS, FORMS),
    needed=list(product(ENGINES, PRECISIONS[:1], FORMS)),  # of which other cases take files
)
# Trained to the end, and from forms of checkpoint: name -> strategy, settings and forms.
RESUMED = {
    f"{strategy}-{precision}": (
        *(strategy, {"precision": precision}),
        *(form for form in FORMS if (strategy, precision, form) in CHOSEN),
    )
    for strategy, precision in product(ENGINES, PRECISIONS)
}
# The same, a step before and a step after, in all forms or those named.
VARIANTS = {
    "fsdp-flat": ("fsdp", {"fsdp_use_orig_params": False, "param_groups": "single"}),
    "fsdp-no-shard": ("fsdp", {"fsdp_sharding_strategy": "NO_SHARD"}),
    "fsdp-tied": ("fsdp", {"tie_embeddings": True}),
    "fsdp2-tied": ("fsdp2", {"tie_embeddings": True}),
    "fsdp-frozen": ("fsdp", {"freeze": FROZEN}),
    "fsdp2-frozen": ("fsdp2", {"freeze": FROZEN}),
    "fsdp-dropout": ("fsdp", {"model": "tiny-gpt2", "dropout": 0.1}, "dcp"),
    "fsdp2-dropout": ("fsdp2", {"model": "tiny-gpt2", "dropout": 0.1}, "dcp"),
    "fsdp-grads": ("fsdp", {"precision": "bf16", "grad_dtype": "bf16"}, "dcp"),
    "fsdp2-grads": ("fsdp2", {"precision": "bf16", "grad_dtype": "bf16"}, "dcp"),
}
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
READ_BACK = ("fsdp-fp32", "fsdp-flat", "fsdp-tied", "fsdp2-fp32", "fsdp2-tied")
# Must train exactly as the strategy does without them.
SAME_BITS = {
    "grad op": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    "recomputed": {"activation_checkpointing": True},
    "recomputed dropout": {
        "activation_checkpointing": True,
        "model": "tiny-gpt2",
        "dropout": 0.1,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    },
}
REFUSED = {
    "flat groups": ("fsdp", {"fsdp_use_orig_params": False}),
    "flat frozen": (
        "fsdp",
        {"fsdp_use_orig_params": False, "param_groups": "single", "freeze": FROZEN},
    ),
    "offload": ("fsdp", {"fsdp_offload_params": True}),
    "hybrid local": (
        "fsdp",
        {"fsdp_sharding_strategy": "HYBRID_SHARD", "state_dict_type": "local"},
    ),
    "hybrid size": ("fsdp2", {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_hybrid_size": 1}),
    "no shard": ("fsdp2", {"fsdp_sharding_strategy": "NO_SHARD"}),
    "use orig": ("fsdp2", {"fsdp_use_orig_params": False}),
    "untied": (
        "fsdp",
        {
            "tie_embeddings": True,
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 10_000,
        },
    ),
    "no layers": ("fsdp", {"fsdp_transformer_layer_cls_to_wrap": ("GPT2Block",)}),
}


class Cases:
    """One rank's way through the cases."""

    def __init__(self, ranks, out):
        self.ranks = ranks
        self.out = out
        self.results = {}
        self.seconds = {}

    def run(self, name, case, *arguments):
        begin = time.monotonic()
        try:
            results = case(*arguments)
        except Exception:  # noqa: BLE001
            results = {"crashed": traceback.format_exc()}
        self.results[name] = results
        self.seconds[name] = time.monotonic() - begin
        if self.ranks.is_first:
            file = self.out / f"{self.ranks.world}.json"
            file.write_text(json.dumps({**self.results, "seconds": self.seconds}, indent=1))

    def engine(self, strategy, **chosen):
        chosen = {"precision": "fp32", "seq_len": 16, "global_batch": 4, "micro_batch": 1, **chosen}
        settings = resolve({"strategy": strategy, **chosen}, self.ranks.world)
        return ENGINES[strategy](settings, self.ranks)

    def place(self, name):
        place = self.out / f"{self.ranks.world}-{name}"
        if self.ranks.is_first:
            place.mkdir()
        dist.barrier()
        return place

    def save(self, name, engine):
        """Write a checkpoint without a tokenizer; return its directory."""
        place = self.place(name)
        write_all(place, fsdp.collect(engine, {}), engine.ranks)
        if self.ranks.is_first:
            document = state.make_document(engine.settings, Progress(), engine.scaler, "")
            files.write_json(place / "trainer_state.json", document)
            load_model_config(engine.settings).save_pretrained(place)
        dist.barrier()
        return place

    def train(self, engine, first, end):
        """Return (mean loss, norm, skipped) of each step, in the order of the loop."""
        settings, corpus = engine.settings, Corpus(None, engine.settings.seq_len, 0)
        steps = []
        for step in range(first, end):
            losses = []
            for turn in range(settings.accumulation):
                number = turn * self.ranks.world + self.ranks.rank
                start = step * settings.global_batch + number * settings.micro_batch
                torch.manual_seed(derive_seed(settings.seed, start))
                tokens = corpus.get_samples(start, settings.micro_batch)
                last = turn == settings.accumulation - 1
                losses.append(
                    engine.run_microbatch(tokens, active_ranks=self.ranks.world, last=last).item()
                )
            update = engine.step(1e-3)
            assert (
                self.ranks.all_gather_objects(update.grad_norm)
                == [update.grad_norm] * self.ranks.world
            )
            mean = (
                math.fsum(chain.from_iterable(self.ranks.all_gather_objects(losses)))
                / settings.microbatches
            )
            steps.append((mean, update.grad_norm, update.skipped))
        return steps

    # Resuming

    def resumed(self, name, strategy, chosen, forms, *, half=2, whole=3):
        """Save a checkpoint of each form on the way, and resume from each to the same end."""
        engine = self.engine(strategy, **chosen)
        unbroken = self.train(engine, 0, half)
        self.keep(name, engine)
        held, scaler = (weights(engine), moments(engine)), dataclasses.replace(engine.scaler)
        for form in forms:
            saved = engine
            if form == "local" and strategy == "fsdp":
                saved = self.engine(strategy, **chosen, **FORMS[form])
                self.train(saved, 0, half)
            saved.settings = dataclasses.replace(saved.settings, **FORMS[form])
            self.save(f"{name}-{form}", saved)
        unbroken += self.train(engine, half, whole)
        results = {"unbroken": unbroken, "half": half, "forms": {}}
        for form in forms:
            place = self.out / f"{self.ranks.world}-{name}-{form}"
            fresh = self.engine(strategy, **chosen, **FORMS[form])
            resume(place, fresh)
            fresh.scaler = dataclasses.replace(scaler)
            names = {path.name for path in place.iterdir() if path.suffix != ".json"}
            record = {"files": sorted(names)}
            record["loaded"] = same(weights(fresh), held[0])
            record["moments"] = same(moments(fresh), held[1])
            record["steps"] = self.train(fresh, half, whole)
            record["weights"] = same(weights(fresh), weights(engine))
            results["forms"][form] = record
        return results

    def soon(self, name, strategy, chosen, forms=tuple(FORMS)):
        """Like `resumed`, with one step before the break and one after it."""
        return self.resumed(name, strategy, chosen, forms, half=1, whole=2)

    def saved(self, strategy):
        """Save checkpoints for fewer ranks, and train on with this number of ranks."""
        engine = self.engine(strategy)
        self.train(engine, 0, 2)
        self.keep(strategy, engine)
        for form in ("full", "dcp", "rank"):
            engine.settings = dataclasses.replace(engine.settings, **FORMS[form])
            self.save(f"{strategy}-{form}", engine)
        return self.train(engine, 2, 4)

    def keep(self, name, engine):
        kept = {"weights": weights(engine), "moments": moments(engine)}
        if self.ranks.is_first:
            torch.save(kept, self.out / f"{self.ranks.world}-{name}.pt")
        dist.barrier()

    def moved(self, strategy, origin, form):
        """Resume from a checkpoint that 4 ranks of ``origin`` saved."""
        fresh = self.engine(strategy, **FORMS[form])
        resume(self.out / f"4-{origin}-{form}", fresh)
        kept = torch.load(self.out / f"4-{origin}.pt")
        return {
            "loaded": same(weights(fresh), kept["weights"]),
            "moments": same(moments(fresh), kept["moments"]),
            "steps": self.train(fresh, 2, 4),
        }

    def unmoved(self, strategy, directory, chosen):
        """Return each rank's error for a checkpoint, or "nothing"."""
        fresh = self.engine(strategy, **chosen)
        return self.ranks.all_gather_objects(catch_error(lambda: resume(directory, fresh)))

    def damaged(self, directory, name, damage):
        place = self.place(f"damaged-{len(self.results)}")
        if self.ranks.is_first:
            shutil.copytree(directory, place, dirs_exist_ok=True)
            path = place / name
            if damage == "missing":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        dist.barrier()
        return self.unmoved(directory.name.split("-")[1], place, {})

    def hole(self, directory):
        """Load metadata that lacks a chunk, which torch accepts without a message."""
        place = self.place("hole")
        if self.ranks.is_first:
            shutil.copytree(directory, place, dirs_exist_ok=True)
            path = place / "pytorch_model_fsdp_0" / ".metadata"
            metadata = pickle.loads(path.read_bytes())
            metadata.state_dict_metadata["model.lm_head.weight"].chunks.pop()
            path.write_bytes(pickle.dumps(metadata))
        dist.barrier()
        return self.unmoved("fsdp2", place, {})

    def object(self):
        """Load a checkpoint whose learning rate is an object with code."""
        engine = self.engine("fsdp2")
        engine.optimizer.param_groups[0]["lr"] = Hostile(self.out / "ran")
        place = self.save("object", engine)
        messages = self.unmoved("fsdp2", place, {})
        return [*messages, *(["3 it ran"] if (self.out / "ran").exists() else [])]

    # The files, read by torch alone

    def read_back(self, name):
        """Return which forms hold exactly the weights and moments that the engine had."""
        kept = torch.load(self.out / f"2-{name}.pt")
        return {
            form: {
                "model": same(
                    self.read_model(self.out / f"2-{name}-{form}", form, kept), kept["weights"]
                ),
                "optimizer": same(
                    self.read_moments(self.out / f"2-{name}-{form}", form, kept), kept["moments"]
                ),
            }
            for form in FORMS
        }

    def read_model(self, place, form, kept):
        if form == "full":
            state = torch.load(place / "pytorch_model_fsdp.bin")
        elif form == "dcp":
            state = self.read_dcp(place / "pytorch_model_fsdp_0")["model"]
        else:
            name = (
                "pytorch_model_fsdp_0_rank{}.bin"
                if form == "rank"
                else "pytorch_model_fsdp_rank{}.bin"
            )
            state = self.joined(read_rank(place, name, self.ranks.rank))
        whole = kept["weights"]
        for key in [key for key in state if key.endswith("_flat_param")]:
            prefix = key.removesuffix("_flat_param")
            state.update(unflattened(state.pop(key), prefix, whole))
        # A tied weight has both its names; local pieces by name lack their shape.
        return {key: state[key].reshape(tensor.shape) for key, tensor in whole.items()}

    def read_moments(self, place, form, kept):
        if form == "full":
            state = torch.load(place / "optimizer.bin")
        elif form == "dcp":
            state = self.read_dcp(place / "optimizer_0")["optimizer"]
        else:
            state = read_rank(place, "optimizer_0_rank{}.bin", self.ranks.rank)
        shapes = {key: tensor.shape for key, tensor in kept["weights"].items()}
        if form != "local":
            flat = {
                f"{fqn}/{key}": t for fqn, each in state["state"].items() for key, t in each.items()
            }
            return self.joined(flat) if form == "rank" else flat
        return self.read_raw(state, shapes)

    def read_raw(self, state, shapes):
        """Index keys follow the groups: matrices, then vectors; or the units of flat parameters."""
        names = [name for name, shape in shapes.items() if len(shape) > 1]
        names += [name for name, shape in shapes.items() if len(shape) == 1]
        moments = {}
        for key in ("exp_avg", "exp_avg_sq"):
            pieces = {number: each[key] for number, each in state["state"].items()}
            joined = self.joined(pieces, flat=True)
            if len(joined) == len(names):
                for number, name in enumerate(names):
                    moments[f"{name}/{key}"] = joined[number].reshape(shapes[name])
            else:
                blank = {name: torch.empty(shape) for name, shape in shapes.items()}
                for number, prefix in enumerate(("", "model.layers.0.", "model.layers.1.")):
                    whole = unflattened(joined[number], prefix, blank)
                    moments.update({f"{name}/{key}": tensor for name, tensor in whole.items()})
        steps = {each["step"].item() for each in state["state"].values()}
        assert len(steps) == 1
        moments.update({f"{name}/step": torch.tensor(*steps) for name in names})
        return moments

    def read_dcp(self, directory):
        file = directory.parent / f"{directory.name}-{self.ranks.rank}.pt"
        dcp_to_torch_save(directory, file)
        return torch.load(file)

    def joined(self, state, *, flat=False):
        """Join the ranks' pieces of each tensor; every rank has all of what is not cut."""
        cut = {}
        for key, value in state.items():
            if isinstance(value, torch.distributed.tensor.DTensor):
                cut[key] = (value.to_local(), value.placements[-1].is_shard())
            elif hasattr(value, "local_shards"):
                cut[key] = (value.local_shards()[0].tensor, True)
            else:
                cut[key] = (value, value.ndim == 1 and flat)
        everyone = self.ranks.all_gather_objects(
            {key: (t.clone(), sharded) for key, (t, sharded) in cut.items()}
        )
        keys = dict.fromkeys(key for each in everyone for key in each)
        local_views = any(key.endswith("_flat_param") for key in keys if isinstance(key, str))
        whole = {}
        for key in keys:
            pieces = [each[key] for each in everyone if key in each]
            together = any(sharded for _, sharded in pieces) or local_views
            whole[key] = torch.cat([t for t, _ in pieces]) if together else pieces[0][0]
        return whole

    # Against no FSDP at all

    def reference(self, chosen):
        """Return the largest distance from one process with torch's own AdamW."""
        engine = self.engine("fsdp", **chosen)
        steps = self.train(engine, 0, 6)
        trained = weights(engine)
        plain = model.build_model(engine.settings)
        shapes = [(name, tuple(p.shape)) for name, p in optimizer.list_trainable(plain)]
        groups = optimizer.make_param_groups(shapes, engine.settings)
        adamw = torch.optim.AdamW(
            [
                {
                    "params": [plain.get_parameter(n) for n in g.names],
                    "weight_decay": g.weight_decay,
                }
                for g in groups
            ],
            lr=1e-3,
        )
        corpus, losses, norms = Corpus(None, 16, 0), [], []
        for step in range(6):
            tokens = corpus.get_samples(step * 4, 4)
            loss = plain(input_ids=tokens, labels=tokens).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
            adamw.step()
            adamw.zero_grad()
            losses.append(loss.item())
        return {
            "steps": steps[:3],
            "loss": max(abs(a[0] - b) for a, b in zip(steps, losses, strict=True)),
            "norm": max(abs(a[1] - b) for a, b in zip(steps, norms, strict=True)),
            "weights": max(
                (trained[name] - p).abs().max().item() for name, p in plain.named_parameters()
            ),
        }

    # The settings in torch's own objects

    def knobs(self, **chosen):
        engine = self.engine("fsdp", **chosen)
        units = FullyShardedDataParallel.fsdp_modules(engine.model)
        root = units[0]
        precision = root.mixed_precision
        return {
            "strategy": sorted({unit.sharding_strategy.name for unit in units}),
            "orig": root._use_orig_params,
            "dtypes": [str(precision.param_dtype), str(precision.reduce_dtype)],
            "units": [type(unit.module).__name__ for unit in units],
            "ranks": root.process_group.size(),
            "mesh": root._device_mesh and list(root._device_mesh.mesh.shape),
            "groups": [
                (len(g["params"]), g["weight_decay"]) for g in engine.optimizer.param_groups
            ],
        }

    def size_policy(self):
        """Return the modules that torch wraps by itself."""
        settings = resolve({"strategy": "fsdp", "precision": "fp32"}, 2)
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
        wrapped = FullyShardedDataParallel(
            model.build_model(settings), auto_wrap_policy=policy, device_id=self.ranks.device
        )
        units = FullyShardedDataParallel.fsdp_modules(wrapped)
        return [type(unit.module).__name__ for unit in units]

    def knobs2(self, **chosen):
        engine = self.engine("fsdp2", **chosen)
        self.train(engine, 0, 1)
        units = [m for m in engine.model.modules() if hasattr(m, "_get_fsdp_state")]
        states = [unit._get_fsdp_state() for unit in units]
        groups = [state._fsdp_param_group for state in states]
        policy = states[0]._mp_policy
        return {
            "reshard": [group.post_forward_mesh_info is not None for group in groups],
            "offload": type(groups[0].offload_policy).__name__,
            "dtypes": [str(policy.param_dtype), str(policy.reduce_dtype)],
            "units": [type(unit).__name__ for unit in units],
            "mesh": list(next(engine.model.parameters()).device_mesh.mesh.shape),
            "groups": [
                (len(g["params"]), g["weight_decay"]) for g in engine.optimizer.param_groups
            ],
        }

    def same_bits(self, strategy, chosen):
        model_settings = ("model", "dropout", "tie_embeddings")
        plain = {key: chosen[key] for key in model_settings if key in chosen}
        steps, trained, buffers = self.train_plain(strategy, tuple(plain.items()))
        changed = self.engine(strategy, **chosen)
        same_buffers = same(dict(changed.model.named_buffers()), buffers)
        return {
            "steps": self.train(changed, 0, 2) == steps,
            "weights": same(weights(changed), trained),
            "buffers": self.ranks.all_gather_objects(same_buffers),
        }

    @functools.cache  # noqa: B019 - the cases live as long as their process
    def train_plain(self, strategy, chosen):
        """Return two steps with these settings, and the weights and buffers after them."""
        engine = self.engine(strategy, **dict(chosen))
        steps = self.train(engine, 0, 2)
        return steps, weights(engine), dict(engine.model.named_buffers())

    def synchronised(self, strategy):
        """Rank 1 starts from another seed; is it overruled?"""
        plain = dict(model.build_model(resolve({"strategy": "fsdp"}, 2)).named_parameters())
        return [same(weights(self.engine(strategy, seed=self.ranks.rank)), plain)]

    def refused(self):
        return {
            name: catch_error(
                lambda strategy=strategy, chosen=chosen: self.engine(strategy, **chosen)
            )
            for name, (strategy, chosen) in REFUSED.items()
        }

    def before_the_first_step(self, strategy):
        """Check that an empty checkpoint does not count torch's dummy step."""
        first = self.engine(strategy)
        place = self.save(f"{strategy}-start", first)
        fresh = self.engine(strategy)
        resume(place, fresh)
        return [self.train(engine, 0, 2) for engine in (first, fresh)]


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.parameters()}


def moments(engine):
    """Return the whole optimizer state, as torch gathers it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(engine.model, engine.optimizer, options=options)["state"]
    return {f"{fqn}/{key}": t.clone() for fqn, each in state.items() for key, t in each.items()}


def same(a, b):
    """Return whether two state dicts have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def resume(place, engine):
    return saving.resume(place, engine.settings, engine)


def catch_error(action):
    try:
        action()
    except TrainerError as error:
        return f"{error.exit_code} {error}"
    return "nothing"


def read_rank(place, name, rank):
    return torch.load(place / name.format(rank), weights_only=False)


def unflattened(flat, prefix, whole):
    """Return the parameters of a unit, cut from its flat parameter."""
    inner = ("model.layers.0.", "model.layers.1.")
    names = [
        name
        for name in whole
        if (name.startswith(prefix) if prefix else not name.startswith(inner))
    ]
    cut, start = {}, 0
    for name in names:
        cut[name] = flat[start : start + whole[name].numel()].view(whole[name].shape)
        start += whole[name].numel()
    return cut


def four(cases):
    for strategy in ENGINES:
        cases.run(strategy, cases.saved, strategy)
        name = f"{strategy}-hybrid"
        cases.run(name, cases.soon, name, strategy, HYBRID, ("dcp", "rank"))
    hybrid = {"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2", "fsdp_hybrid_size": 2}
    cases.run("knobs hybrid", lambda: cases.knobs(**hybrid))
    cases.run("knobs2 hybrid", lambda: cases.knobs2(**hybrid))
    cases.run("knobs2 one replica", lambda: cases.knobs2(**{**hybrid, "fsdp_hybrid_size": 4}))


def two(cases):
    for name, (strategy, chosen, *forms) in RESUMED.items():
        cases.run(name, cases.resumed, name, strategy, chosen, forms)
    for name, (strategy, chosen, *forms) in VARIANTS.items():
        cases.run(name, cases.soon, name, strategy, chosen, forms or tuple(FORMS))
    for name in READ_BACK:
        cases.run(f"read {name}", cases.read_back, name)
    for strategy in ENGINES:
        each_generation(cases, strategy)
    cases.run("refused", cases.refused)
    cases.run("reference", cases.reference, {})
    cases.run("reference no shard", cases.reference, {"fsdp_sharding_strategy": "NO_SHARD"})
    for name, chosen in KNOBS.items():
        cases.run(f"knobs {name}", lambda chosen=chosen: cases.knobs(**chosen))
    cases.run("torch's size policy", cases.size_policy)
    for name, chosen in KNOBS2.items():
        cases.run(f"knobs2 {name}", lambda chosen=chosen: cases.knobs2(**chosen))
    loading_errors(cases)


def each_generation(cases, strategy):
    for origin in ENGINES:
        for form in ("full", "dcp", "rank"):
            cases.run(f"{origin} to {strategy} {form}", cases.moved, strategy, origin, form)
    for name, chosen in SAME_BITS.items():
        cases.run(f"{strategy} {name}", cases.same_bits, strategy, chosen)
    cases.run(f"{strategy} sync", cases.synchronised, strategy)
    cases.run(f"{strategy} start", cases.before_the_first_step, strategy)


KNOBS = {
    "default": {},
    "other": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "precision": "fp16",
        "fsdp_auto_wrap_policy": "NO_WRAP",
        "state_dict_type": "local",
    },
    "none": {
        "fsdp_use_orig_params": False,
        "param_groups": "single",
        "precision": "bf16",
        "grad_dtype": "bf16",
        "fsdp_transformer_layer_cls_to_wrap": ("LlamaMLP",),
    },
    "size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20_000},
    "no shard": {"fsdp_sharding_strategy": "NO_SHARD"},
}
KNOBS2 = {
    "default": {},
    "other": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
        "precision": "bf16",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 20_000,
    },
}


def loading_errors(cases):
    out = cases.out
    for place, name, damage in (
        ("2-fsdp-fp32-local", "pytorch_model_fsdp_rank1.bin", "missing"),
        ("2-fsdp2-fp32-dcp", "pytorch_model_fsdp_0/__1_0.distcp", "missing"),
        ("2-fsdp2-fp32-dcp", "optimizer_0/__0_0.distcp", "truncated"),
        ("2-fsdp2-fp32-dcp", "optimizer_0/.metadata", "truncated"),
        ("2-fsdp2-fp32-dcp", "pytorch_model_fsdp_0/.metadata", "missing"),
    ):
        cases.run(f"{damage} {place} {name}", cases.damaged, out / place, name, damage)
    cases.run("hole", cases.hole, out / "2-fsdp2-fp32-dcp")
    cases.run("object", cases.object)
    for name, strategy, place, chosen in (
        ("groups dcp", "fsdp", "2-fsdp-flat-dcp", {}),
        ("groups dcp fewer", "fsdp2", "2-fsdp2-fp32-dcp", {"param_groups": "single"}),
        ("groups full", "fsdp2", "2-fsdp-flat-full", {}),
        ("wrap", "fsdp", "2-fsdp-fp32-local", {"fsdp_auto_wrap_policy": "NO_WRAP"}),
        ("strategy", "fsdp", "2-fsdp-no-shard-local", {}),
        ("frozen", "fsdp2", "2-fsdp2-frozen-dcp", {}),
        ("model", "fsdp2", "2-fsdp-fp32-full", {"model": "tiny-gpt2"}),
        ("model dcp", "fsdp2", "2-fsdp-dropout-dcp", {}),
    ):
        cases.run(name, cases.unmoved, strategy, out / place, chosen)


def one(cases):
    for strategy in ENGINES:
        cases.run(strategy, cases.soon, strategy, strategy, {})


def rank(number, world, out):
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    cases = Cases(Ranks(number, world, torch.device("cpu")), out)
    {4: four, 2: two, 1: one}[world](cases)
    dist.destroy_process_group()


def main(out):
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama

    assert transformers.models  # imported once, before the forks
    gc.freeze()
    for world in (4, 2, 1):
        mp.start_processes(rank, (world, out), nprocs=world, start_method="fork")
