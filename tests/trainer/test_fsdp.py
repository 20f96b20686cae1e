"""FSDP 1 and 2 on real ranks: every knob, every form of checkpoint, bit by bit.

The ranks run once, in one process tree, and each test reads what they found.
"""

from __future__ import annotations

import json

import pytest

from tests.trainer import fsdp_worker, worlds
from tests.trainer.fsdp_worker import ENGINES, FORMS, READ_BACK, RESUMED, SAME_BITS, VARIANTS

pytestmark = pytest.mark.slow

LAYERS = ["LlamaDecoderLayer", "LlamaDecoderLayer"]
GROUPS = [[16, 0.01], [5, 0.0]]  # matrices are decayed, norms are not
FILES = {
    "full": ["optimizer.bin", "pytorch_model_fsdp.bin"],
    "dcp": ["optimizer_0", "pytorch_model_fsdp_0"],
    "rank": [
        "optimizer_0_rank0.bin",
        "optimizer_0_rank1.bin",
        "pytorch_model_fsdp_0_rank0.bin",
        "pytorch_model_fsdp_0_rank1.bin",
    ],
    "local": [
        "optimizer_0_rank0.bin",
        "optimizer_0_rank1.bin",
        "pytorch_model_fsdp_rank0.bin",
        "pytorch_model_fsdp_rank1.bin",
    ],
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return (ranks, case) -> what they found."""
    out = tmp_path_factory.mktemp("fsdp")
    worlds.call(fsdp_worker.main, out)
    found = {world: json.loads((out / f"{world}.json").read_text()) for world in (1, 2, 4)}

    def of(world, case):
        result = found[world][case]
        assert "crashed" not in result, result["crashed"]
        return result

    return of


def said_by_all(messages, code):
    """Return what every rank says: the same, with this exit code."""
    assert len(set(messages)) == 1, messages
    assert messages[0].startswith(f"{code} "), messages[0]
    return messages[0]


def resumes_bitwise(result, form):
    record = result["forms"][form]
    assert record["loaded"]
    assert record["moments"]
    assert record["steps"] == result["unbroken"][result["half"] :]
    assert record["weights"]


CASES = [
    (case, form)
    for case, (_, _, *forms) in {**RESUMED, **VARIANTS}.items()
    for form in forms or FORMS
]


@pytest.mark.parametrize(("case", "form"), CASES)
def test_a_resumed_run_has_the_bits_of_the_unbroken_one(runs, case, form):
    result = runs(2, case)
    resumes_bitwise(result, form)
    assert result["forms"][form]["files"] == FILES[form]


@pytest.mark.parametrize("form", ["dcp", "rank"])
@pytest.mark.parametrize("strategy", ENGINES)
def test_hybrid_resumes_bitwise(runs, strategy, form):
    resumes_bitwise(runs(4, f"{strategy}-hybrid"), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ENGINES)
def test_one_rank_resumes_bitwise(runs, strategy, form):
    resumes_bitwise(runs(1, strategy), form)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_generations_train_alike(runs, precision):
    first, second = (runs(2, f"{strategy}-{precision}")["unbroken"] for strategy in ENGINES)
    for (loss, norm, skipped), (loss2, norm2, skipped2) in zip(first, second, strict=True):
        assert loss == pytest.approx(loss2, abs=1e-6)
        assert norm == pytest.approx(norm2, rel=1e-5)
        assert skipped == skipped2


def test_fp16_skips_steps_that_overflow(runs):
    skipped = [skipped for _, _, skipped in runs(2, "fsdp-fp16")["unbroken"]]
    assert any(skipped)
    assert not all(skipped)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", READ_BACK)
def test_torch_alone_reads_the_same_bits(runs, case, form):
    assert runs(2, f"read {case}")[form] == {"model": True, "optimizer": True}


@pytest.mark.parametrize("form", ["full", "dcp", "rank"])
@pytest.mark.parametrize("strategy", ENGINES)
@pytest.mark.parametrize("origin", ENGINES)
def test_fewer_ranks_and_the_other_generation_go_on(runs, origin, strategy, form):
    result = runs(2, f"{origin} to {strategy} {form}")
    assert result["loaded"]
    assert result["moments"]
    for (loss, _, _), (before, _, _) in zip(result["steps"], runs(4, origin), strict=True):
        assert loss == pytest.approx(before, abs=2e-6)


@pytest.mark.parametrize("case", ["reference", "reference no shard"])
def test_it_is_plain_adamw(runs, case):
    distance = runs(2, case)
    assert distance["loss"] < 1e-6
    assert distance["norm"] < 1e-5
    assert distance["weights"] < 2e-6


def test_checkpoints_on_the_way_change_no_bit(runs):
    assert runs(2, "fsdp-fp32")["unbroken"] == runs(2, "reference")["steps"]


@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("strategy", ENGINES)
def test_what_saves_memory_or_time_changes_no_bit(runs, strategy, name):
    result = runs(2, f"{strategy} {name}")
    assert result == {"steps": True, "weights": True, "buffers": [True, True]}


@pytest.mark.parametrize("strategy", ENGINES)
def test_rank_0_overrules_the_weights_of_others(runs, strategy):
    assert runs(2, f"{strategy} sync") == [True]


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_checkpoint_before_the_first_update_is_right(runs, strategy):
    unbroken, resumed = runs(2, f"{strategy} start")
    assert resumed == unbroken


# The knobs reach torch


def test_fsdp_defaults(runs):
    assert runs(2, "knobs default") == {
        "strategy": ["FULL_SHARD"],
        "orig": True,
        "dtypes": ["None", "None"],
        "units": ["LlamaForCausalLM", *LAYERS],
        "ranks": 2,
        "mesh": [2],
        "groups": GROUPS,
    }


def test_fsdp_other_settings(runs):
    other = runs(2, "knobs other")
    assert other["strategy"] == ["SHARD_GRAD_OP"]
    assert other["dtypes"] == ["torch.float16", "torch.float32"]
    assert other["units"] == ["LlamaForCausalLM"]
    assert other["mesh"] is None
    none = runs(2, "knobs none")
    assert not none["orig"]
    assert none["dtypes"] == ["torch.bfloat16", "torch.bfloat16"]
    assert none["units"] == ["LlamaForCausalLM", "LlamaMLP", "LlamaMLP"]
    assert none["groups"] == [[3, 0.01]]
    assert runs(2, "knobs no shard")["strategy"] == ["NO_SHARD"]


def test_units_by_size_are_those_of_torch(runs):
    size = runs(2, "knobs size")["units"]
    assert (
        size
        == runs(2, "torch's size policy")
        == ["LlamaForCausalLM", "LlamaModel", "LlamaMLP", "LlamaMLP"]
    )


def test_hybrid_is_a_mesh_of_replicas(runs):
    first, second = runs(4, "knobs hybrid"), runs(4, "knobs2 hybrid")
    assert first["strategy"] == ["_HYBRID_SHARD_ZERO2"]
    assert first["ranks"] == 2
    assert first["mesh"] == second["mesh"] == [2, 2]
    assert second["reshard"] == [False, False, False]
    assert runs(4, "knobs2 one replica")["mesh"] == [1, 4]


def test_fsdp2_knobs(runs):
    assert runs(2, "knobs2 default") == {
        "reshard": [False, True, True],  # the root's parameters are needed at once
        "offload": "OffloadPolicy",
        "dtypes": ["None", "None"],
        "units": ["FSDPLlamaForCausalLM", "FSDPLlamaDecoderLayer", "FSDPLlamaDecoderLayer"],
        "mesh": [2],
        "groups": GROUPS,
    }
    other = runs(2, "knobs2 other")
    assert other["reshard"] == [False] * 4
    assert other["offload"] == "CPUOffloadPolicy"
    assert other["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert other["units"] == [
        "FSDPLlamaForCausalLM",
        "FSDPLlamaModel",
        "FSDPLlamaMLP",
        "FSDPLlamaMLP",
    ]


# What is refused


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("flat groups", "use --param-groups single"),
        ("flat frozen", "input_layernorm.weight cannot be frozen"),
        ("offload", "on a CPU the parameters are in host memory"),
        ("hybrid local", "no local state dict with HYBRID_SHARD"),
        ("hybrid size", "cannot form replicas of 1 rank"),
        ("no shard", "FSDP 2 does not support fsdp_sharding_strategy NO_SHARD"),
        ("use orig", "FSDP 2 does not support fsdp_use_orig_params false"),
        ("untied", "model.embed_tokens.weight and lm_head.weight are one parameter"),
        ("no layers", "no layer class GPT2Block"),
    ],
)
def test_contradicting_settings(runs, case, words):
    message = runs(2, "refused")[case]
    assert message.startswith("2 ")
    assert words in message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing 2-fsdp-fp32-local pytorch_model_fsdp_rank1.bin", "rank1.bin is missing"),
        ("missing 2-fsdp2-fp32-dcp pytorch_model_fsdp_0/__1_0.distcp", "__1_0.distcp is missing"),
        ("truncated 2-fsdp2-fp32-dcp optimizer_0/__0_0.distcp", "__0_0.distcp has "),
        ("truncated 2-fsdp2-fp32-dcp optimizer_0/.metadata", "/.metadata: "),
        ("missing 2-fsdp2-fp32-dcp pytorch_model_fsdp_0/.metadata", ".metadata is missing"),
        ("object", "optimizer_0: rank "),
        ("hole", "model.lm_head.weight has 16448 elements, and its chunks have 8256"),
        ("frozen", "Missing key in checkpoint state_dict: optimizer.state.model.embed_tokens"),
        ("model", "'transformer.wte.weight'"),
        ("model dcp", "which this run's model does not have"),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank(runs, case, words):
    assert words in said_by_all(runs(2, case), 3)


@pytest.mark.parametrize(
    "case", ["groups dcp", "groups dcp fewer", "groups full", "wrap", "strategy"]
)
def test_what_is_only_arranged_in_another_way_is_taken(runs, case):
    assert runs(2, case) == ["nothing", "nothing"]
