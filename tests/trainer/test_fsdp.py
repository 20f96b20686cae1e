"""FSDP 1 and 2 on real ranks: resumes bit by bit, the settings in torch's objects, refusals."""

from __future__ import annotations

import functools
import itertools
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.combinations import choose_combinations
from tests.trainer import worlds

pytestmark = pytest.mark.slow

STRATEGIES = ("fsdp", "fsdp2")
COMMON = {"global_batch": 4, "micro_batch": 1, "seq_len": 16, "steps": 2, "save_every": 1}
PRECISIONS = {
    "fp32": {},
    "bf16": {"grad_dtype": "bf16"},
    "fp16": {"initial_scale_power": 17, "loss_scale_window": 1, "hysteresis": 1},
}
FORMS = {
    "full": {"state_dict_type": "full"},
    "dcp": {"state_dict_type": "sharded", "sharded_files": "dcp"},
    "rank": {"state_dict_type": "sharded", "sharded_files": "rank"},
    "local": {"state_dict_type": "local"},
}
FILES = {
    "full": ["optimizer.bin", "pytorch_model_fsdp.bin"],
    "dcp": ["optimizer_0", "pytorch_model_fsdp_0"],
    "rank": ["optimizer_0_rank{}.bin", "pytorch_model_fsdp_0_rank{}.bin"],
    "local": ["optimizer_0_rank{}.bin", "pytorch_model_fsdp_rank{}.bin"],
}
FROZEN = ("embed", r"layers\.0\..*norm")
HYBRID = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 20_000}
DROPOUT = {"model": "tiny-gpt2", "dropout": 0.1}
VARIANTS = {
    "plain": {},
    "flat": {"fsdp_use_orig_params": False, "param_groups": "single"},
    "no shard": {"fsdp_sharding_strategy": "NO_SHARD"},
    "hybrid": HYBRID,
    "tied": {"tie_embeddings": True},
    "frozen": {"freeze": FROZEN},
    "dropout": DROPOUT,
}


def is_possible(strategy, _precision, form, variant, world):
    if variant in ("flat", "no shard"):
        return strategy == "fsdp"
    return variant != "hybrid" or (world == 4 and (strategy, form) != ("fsdp", "local"))


NEEDED = [  # the saves that tests below take
    ("fsdp", "fp32", "full", "plain", 2),
    ("fsdp", "fp32", "local", "plain", 2),
    ("fsdp2", "fp32", "dcp", "plain", 2),
    ("fsdp", "fp32", "dcp", "flat", 2),
    ("fsdp", "fp32", "full", "flat", 2),
    ("fsdp", "fp32", "local", "no shard", 2),
    ("fsdp2", "fp32", "dcp", "frozen", 2),
    ("fsdp", "fp32", "dcp", "dropout", 2),
]
COMBINATIONS = itertools.product(STRATEGIES, PRECISIONS, FORMS, VARIANTS, (1, 2, 4))
RUNS = choose_combinations((c for c in COMBINATIONS if is_possible(*c)), needed=NEEDED)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


def find(place, *combination):
    return place / " ".join(map(str, combination))


@pytest.fixture(scope="module")
def unbroken(place):
    """Return what each run logged; it saved after each of its two steps."""
    jobs = {}
    for combination in RUNS:
        strategy, precision, form, variant, world = combination
        path = find(place, *combination)
        chosen = {**COMMON, **PRECISIONS[precision], **FORMS[form], **VARIANTS[variant]}
        chosen |= {"strategy": strategy, "precision": precision}
        jobs[combination] = world, {**chosen, "save": str(path), "log": f"{path}.jsonl"}
    return worlds.trained(jobs)


def test_a_resumed_run_has_the_bits_of_the_unbroken_one(unbroken, place, tmp_path):
    jobs = {}
    for number, combination in enumerate(RUNS):
        path = str(find(place, *combination))
        chosen = {"resume": path, "tag": "1", "steps": 2, "is_saved": False}
        jobs[combination] = combination[-1], {**chosen, "log": f"{tmp_path}/{number}.jsonl"}
    for combination, rest in worlds.trained(jobs).items():
        whole = unbroken[combination]
        assert (rest.losses, rest.norms) == (whole.losses[1:], whole.norms[1:]), combination
        assert (rest.scales, rest.skipped) == (whole.scales[1:], whole.skipped[1:]), combination
        assert rest.digest == whole.digest, combination
    assert len({run.digest for run in unbroken.values()}) > len(VARIANTS), "they train"


def test_each_form_has_the_files_of_its_name(unbroken, place):
    for combination in unbroken:
        form, world = combination[2], combination[-1]
        found = {path.name for path in (find(place, *combination) / "global_step1").iterdir()}
        expected = {name.format(rank) for name in FILES[form] for rank in range(world)}
        assert {name for name in found if "json" not in name} == expected, combination


def test_both_generations_train_alike_and_fp16_skips_what_overflows(unbroken):
    alike = {}
    for (_, precision, _, variant, _), run in unbroken.items():
        name = "plain" if variant in ("no shard", "hybrid") else variant
        alike.setdefault((precision, name), []).append(run)
    for (precision, _), (first, *others) in alike.items():
        for run in others:
            rel = 1e-5 if precision == "fp32" else 1e-2
            assert run.values() == pytest.approx(first.values(), rel=rel)
            assert run.skipped == first.skipped
    skipped = [run.skipped for (_, precision, *_), run in unbroken.items() if precision == "fp16"]
    assert any(map(any, skipped))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_saves_memory_changes_no_bit(strategy, tmp_path):
    saving = {"activation_checkpointing": True, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    jobs = [
        {**COMMON, **DROPOUT, **more, "precision": "fp32", "strategy": strategy, "is_saved": False}
        | {"save": f"{tmp_path}/{number}", "log": f"{tmp_path}/{number}.jsonl", "reduction": order}
        for number, (order, more) in enumerate(
            itertools.product(("fast", "canonical"), ({}, saving))
        )
    ]
    runs = worlds.train_on(2, jobs)[0]
    assert (runs[1], runs[3]) == (runs[0], runs[2])


# The settings in torch's own objects


def build(ranks, strategy, **chosen):
    from trainer.core.strategies import build_engine
    from trainer.resolve import resolve

    chosen = {"precision": "fp32", "seq_len": 16, "global_batch": 4, **chosen}
    return build_engine(resolve({"strategy": strategy, **chosen}, ranks.world), ranks)


def describe(ranks, cases):
    """Return what torch was told, for each case."""
    return [_describe(build(ranks, strategy, **chosen)) for strategy, chosen in cases]


def _describe(engine):
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    groups = [(len(g["params"]), g["weight_decay"]) for g in engine.optimizer.param_groups]
    steps = {float(state["step"]) for state in engine.optimizer.state.values()}
    common = {"groups": groups, "steps": steps}  # torch's own start counts a step of zeros
    if engine.settings.strategy == "fsdp":
        units = Fsdp.fsdp_modules(engine.model)
        policy, mesh = units[0].mixed_precision, units[0]._device_mesh
        return common | {
            "strategy": {unit.sharding_strategy.name for unit in units},
            "orig": units[0]._use_orig_params,
            "dtypes": (policy.param_dtype, policy.reduce_dtype),
            "units": [type(unit.module).__name__ for unit in units],
            "mesh": mesh and list(mesh.mesh.shape),
        }
    units = [module for module in engine.model.modules() if hasattr(module, "_get_fsdp_state")]
    engine.model._get_fsdp_state()._lazy_init()
    policy = engine.model._get_fsdp_state()._mp_policy
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return common | {
        "reshard": [group.post_forward_mesh_info is not None for group in groups],
        "offload": type(groups[0].offload_policy).__name__,
        "dtypes": (policy.param_dtype, policy.reduce_dtype),
        "units": [type(unit).__name__ for unit in units],
        "mesh": list(next(engine.model.parameters()).device_mesh.mesh.shape),
    }


LAYERS = ["LlamaForCausalLM", "LlamaDecoderLayer", "LlamaDecoderLayer"]
TORCH_BY_SIZE = ["LlamaForCausalLM", "LlamaModel", "LlamaMLP", "LlamaMLP"]
GROUPS = [(16, 0.01), (5, 0.0)]  # matrices are decayed, norms are not
HALVES = {"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2", "fsdp_hybrid_size": 2}
KNOBS = [  # ranks, strategy, settings, and what torch has of them
    (
        *(2, "fsdp", {}),
        {"strategy": {"FULL_SHARD"}, "orig": True, "dtypes": (None, None), "units": LAYERS}
        | {"mesh": [2], "groups": GROUPS, "steps": {0.0}},
    ),
    (
        *(2, "fsdp", {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "precision": "fp16"}),
        {"strategy": {"SHARD_GRAD_OP"}, "dtypes": (torch.float16, torch.float32)},
    ),
    (
        *(2, "fsdp", {"fsdp_auto_wrap_policy": "NO_WRAP", "state_dict_type": "local"}),
        {"units": LAYERS[:1], "mesh": None},
    ),
    (
        *(2, "fsdp", VARIANTS["flat"] | {"precision": "bf16", "grad_dtype": "bf16"}),
        {"orig": False, "dtypes": (torch.bfloat16, torch.bfloat16), "groups": [(3, 0.01)]},
    ),
    (
        *(2, "fsdp", {"fsdp_transformer_layer_cls_to_wrap": ("LlamaMLP",)}),
        {"units": ["LlamaForCausalLM", "LlamaMLP", "LlamaMLP"]},
    ),
    (2, "fsdp", BY_SIZE, {"units": TORCH_BY_SIZE}),
    (2, "fsdp", VARIANTS["no shard"], {"strategy": {"NO_SHARD"}}),
    (4, "fsdp", HALVES, {"strategy": {"_HYBRID_SHARD_ZERO2"}, "mesh": [2, 2]}),
    (
        *(2, "fsdp2", {}),
        {"reshard": [False, True, True], "offload": "OffloadPolicy", "dtypes": (None, None)}
        | {"units": [f"FSDP{each}" for each in LAYERS], "mesh": [2], "groups": GROUPS},
    ),
    (
        *(2, "fsdp2", {**BY_SIZE, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        {"reshard": [False] * 4, "units": [f"FSDP{each}" for each in TORCH_BY_SIZE]},
    ),
    (
        *(2, "fsdp2", {"fsdp_offload_params": True, "precision": "bf16"}),
        {"offload": "CPUOffloadPolicy", "dtypes": (torch.bfloat16, torch.float32)},
    ),
    (4, "fsdp2", HALVES, {"mesh": [2, 2], "reshard": [False] * 3}),
    (4, "fsdp2", HALVES | {"fsdp_hybrid_size": 4}, {"mesh": [1, 4]}),
]


@pytest.mark.parametrize("world", [2, 4])
def test_torch_has_the_settings(world):
    cases = [case for case in KNOBS if case[0] == world]
    found = worlds.run(world, describe, [(strategy, chosen) for _, strategy, chosen, _ in cases])
    for (*case, expected), shown in zip(cases, found[0], strict=True):
        assert {name: shown[name] for name in expected} == expected, case


def wrap_by_size(ranks):
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    from trainer.core.model import build_model
    from trainer.resolve import resolve

    model = build_model(resolve({"strategy": "fsdp", "precision": "fp32"}, ranks.world))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
    wrapped = Fsdp(model, auto_wrap_policy=policy, device_id=ranks.device)
    return [type(unit.module).__name__ for unit in Fsdp.fsdp_modules(wrapped)]


def test_units_by_size_are_those_of_torch():
    assert worlds.run(2, wrap_by_size) == [TORCH_BY_SIZE] * 2


def start_apart(ranks):
    """Return whether each strategy starts from rank 0's weights, though rank 1 has another seed."""
    from trainer.core.model import build_model

    same = []
    for strategy in STRATEGIES:
        engine = build(ranks, strategy, seed=ranks.rank)
        plain = dict(build_model(build(ranks, strategy).settings).named_parameters())
        same += [torch.equal(tensor, plain[name]) for name, tensor in engine.parameters()]
    return all(same)


def test_rank_0_overrules_the_weights_of_others():
    assert worlds.run(2, start_apart) == [True, True]


# What is refused

UNTIED = {"tie_embeddings": True, **BY_SIZE, "fsdp_min_num_params": 10_000}
REFUSED = [
    ("fsdp", {"fsdp_use_orig_params": False}, "use --param-groups single"),
    ("fsdp", VARIANTS["flat"] | {"freeze": FROZEN}, "input_layernorm.weight cannot be frozen"),
    ("fsdp", {"fsdp_offload_params": True}, "on a CPU the parameters are in host memory"),
    ("fsdp", HYBRID | FORMS["local"], "no local state dict with HYBRID_SHARD"),
    ("fsdp2", HYBRID | {"fsdp_hybrid_size": 1}, "cannot form replicas of 1 rank"),
    ("fsdp2", VARIANTS["no shard"], "FSDP 2 does not support fsdp_sharding_strategy NO_SHARD"),
    ("fsdp2", {"fsdp_use_orig_params": False}, "does not support fsdp_use_orig_params false"),
    ("fsdp", UNTIED, "model.embed_tokens.weight and lm_head.weight are one parameter"),
    ("fsdp", {"fsdp_transformer_layer_cls_to_wrap": ("GPT2Block",)}, "no layer class GPT2Block"),
]


def refuse(ranks, cases):
    from trainer.core.errors import SettingsError

    said = []
    for strategy, chosen in cases:
        with pytest.raises(SettingsError) as raised:
            build(ranks, strategy, **chosen)
        said.append(str(raised.value))
    return said


def test_contradicting_settings_are_refused_on_every_rank():
    for said in worlds.run(2, refuse, [(strategy, chosen) for strategy, chosen, _ in REFUSED]):
        for (*_, words), message in zip(REFUSED, said, strict=True):
            assert words in message


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_chunk(path):
    """Drop a chunk, which torch accepts without a message."""
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["model.lm_head.weight"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))


DCP = ("fsdp2", "fp32", "dcp", "plain", 2)
LOCAL = ("fsdp", "fp32", "local", "plain", 2)
DAMAGED = [
    (LOCAL, "pytorch_model_fsdp_rank1.bin", Path.unlink, "rank1.bin is missing"),
    (DCP, "pytorch_model_fsdp_0/__1_0.distcp", Path.unlink, "__1_0.distcp is missing"),
    (DCP, "pytorch_model_fsdp_0/.metadata", Path.unlink, ".metadata is missing"),
    (DCP, "optimizer_0/__0_0.distcp", cut, "__0_0.distcp has "),
    (DCP, "optimizer_0/.metadata", cut, "/.metadata: "),
    (DCP, "pytorch_model_fsdp_0/.metadata", drop_chunk, "16448 elements, and its chunks have 8256"),
]
MISFITS = [  # None: only arranged in another way
    (("fsdp2", "fp32", "dcp", "frozen", 2), {"freeze": ()}, "Missing key in checkpoint"),
    (NEEDED[0], {"strategy": "fsdp2", "model": "tiny-gpt2"}, "'transformer.wte.weight'"),
    (("fsdp", "fp32", "dcp", "dropout", 2), {"model": "tiny-llama"}, "this run's model does not"),
    (NEEDED[3], {"fsdp_use_orig_params": True, "param_groups": "decay"}, None),
    (NEEDED[4], {"strategy": "fsdp2", "fsdp_use_orig_params": True}, None),
    (DCP, {"param_groups": "single"}, None),
    (LOCAL, {"fsdp_auto_wrap_policy": "NO_WRAP"}, None),
    (NEEDED[5], {"fsdp_sharding_strategy": "FULL_SHARD"}, None),
]


def test_what_does_not_fit_is_an_error_on_every_rank(unbroken, place, tmp_path):
    assert unbroken
    jobs, expected = [], []
    for number, (run, name, damage, words) in enumerate(DAMAGED):
        copy = tmp_path / f"{number}"
        shutil.copytree(find(place, *run), copy)
        damage(copy / "global_step1" / name)
        jobs.append({"resume": str(copy)})
        expected.append(words)
    for run, chosen, words in MISFITS:
        jobs.append({"resume": str(find(place, *run)), **chosen})
        expected.append(words)
    common = {"tag": "1", "steps": 2, "is_saved": False}
    jobs = [{**job, **common, "log": f"{tmp_path}/{n}.jsonl"} for n, job in enumerate(jobs)]
    for each in worlds.run(2, worlds.try_to_train, jobs):
        for job, words, found in zip(jobs, expected, each, strict=True):
            if words is None:
                assert isinstance(found, worlds.Trained), (job, found)
            else:
                assert found[0] == 3, (job, found)
                assert words in found[1], job


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def save_code(ranks, place):
    """Save a checkpoint whose learning rate is an object with code."""
    from trainer.checkpoint import contents, fsdp

    engine = build(ranks, "fsdp2")
    engine.optimizer.param_groups[0]["lr"] = Hostile(place / "ran")
    contents.write_all(place, fsdp.collect(engine, {}), ranks)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    worlds.run(2, save_code, tmp_path)
    job = {**COMMON, "strategy": "fsdp2", "precision": "fp32", "resume": str(tmp_path)}
    job |= {"is_saved": False, "log": f"{tmp_path}/log"}
    for ((code, message),) in worlds.run(2, worlds.try_to_train, [job]):
        assert code == 3
        assert "optimizer_0: rank " in message
    assert not (tmp_path / "ran").exists()
