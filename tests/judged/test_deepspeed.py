"""Checkpoints that real DeepSpeed wrote, against what the live engine held when it wrote them."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.errors import UnsupportedError
from tests.judged.expected import read_expected
from tests.judges.deepspeed_cases import CASES

REFUSED = ("moe_refused",)
MERGED = [name for name, case in CASES.items() if case.kind not in REFUSED and not case.nvme]
NVME = [name for name, case in CASES.items() if case.nvme]
HUGGING_FACE = [name for name in MERGED if CASES[name].model.startswith("llama")]
UNIVERSAL = [name for name in MERGED if CASES[name].universal]


def find_checkpoint(case, made):
    """Return the directory that a user would pass: for the HF Trainer, checkpoint-N below run."""
    (pointer,) = (made / case / "run").rglob("latest")
    return pointer.parent


@pytest.fixture(scope="module")
def expected(case, made):
    return read_expected(made / case)


@pytest.fixture(scope="module")
def checkpoint(case, made):
    """Open a case once for all tests of it."""
    with reshard.open(find_checkpoint(case, made)) as opened:
        yield opened


def assert_equal(got, want, name):
    assert got.shape == want.shape, name
    assert torch.equal(got.to(want.dtype), want), name


def assert_weights(merged, expected, *, without=()):
    """Assert that every weight is there once, bitwise, and neither aliases nor other tensors."""
    tied = expected["tied"]
    wanted = {**expected["params"], **expected["frozen"], **expected["buffers"]}
    wanted = {name: value for name, value in wanted.items() if name not in {*tied, *without}}
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_equal(merged[name], value, name)
    for name, value in expected["buffers"].items():
        assert merged[name].dtype == value.dtype, name


def assert_slots(checkpoint, expected):
    for slot, tensors in expected["slots"].items():
        held = checkpoint.optimizer(slot)
        for name, value in tensors.items():
            assert_equal(held[name][...], value, f"{slot} of {name}")


def list_unsaved(case, expected):
    """Return what DeepSpeed leaves out: frozen and empty parameters under exclude_frozen."""
    if not CASES[case].exclude_frozen:
        return set()
    empty = {n for n, v in expected["params"].items() if v.numel() == 0}
    return set(expected["frozen"]) | (empty if "z3" in case else set())


@pytest.mark.parametrize("case", MERGED, scope="module")
def test_fp32_merge_is_what_deepspeed_reports(case, made, expected, tmp_path):
    report = reshard.merge(find_checkpoint(case, made), tmp_path / "x.safetensors", dtype="fp32")
    merged = load_file(tmp_path / "x.safetensors")
    assert_weights(merged, expected, without=list_unsaved(case, expected))
    assert report.verified
    assert report.dropped_aliases == expected["tied"]


@pytest.mark.parametrize(
    "case", [name for name in MERGED if CASES[name].exclude_frozen], scope="module"
)
def test_the_base_model_supplies_weights_that_deepspeed_left_out(case, made, expected, tmp_path):
    trained = {name: value.float() + 1 for name, value in expected["params"].items()}
    aliases = {alias: trained[kept].clone() for alias, kept in expected["tied"].items()}
    save_file({**trained, **expected["frozen"], **aliases}, tmp_path / "base.safetensors")
    report = reshard.merge(
        find_checkpoint(case, made),
        tmp_path / "x.safetensors",
        dtype="fp32",
        fill_missing_from=tmp_path / "base.safetensors",
    )
    assert set(report.filled) == list_unsaved(case, expected)
    assert_weights(load_file(tmp_path / "x.safetensors"), expected)


@pytest.mark.parametrize(("stage", "is_needed"), [(2, True), (3, False)])
def test_a_split_says_that_deepspeed_requires_left_out_weights(stage, is_needed, made, tmp_path):
    run = find_checkpoint(f"z{stage}_exclude_frozen", made)
    notes = reshard.split(run, tmp_path / "run", world_size=1).notes
    assert any("load_module_strict=False" in note for note in notes) == is_needed


@pytest.mark.parametrize("case", MERGED, scope="module")
def test_default_merge_is_the_live_module(case, made, expected, tmp_path):
    reshard.merge(find_checkpoint(case, made), tmp_path / "x.safetensors")
    merged = load_file(tmp_path / "x.safetensors")
    for name in merged.keys() & expected["live"].keys():
        assert merged[name].dtype == expected["live"][name].dtype, name
        assert torch.equal(merged[name], expected["live"][name]), name


@pytest.mark.parametrize("case", MERGED, scope="module")
def test_optimizer_slots_are_what_deepspeed_reports(case, checkpoint, expected):
    assert set(expected["slots"]) == set(CASES[case].slots)
    assert_slots(checkpoint, expected)


@pytest.mark.parametrize("case", MERGED, scope="module")
def test_train_state_is_the_engines(case, checkpoint, expected):
    state, told, tied = checkpoint.manifest.train, expected["train"], expected["tied"]
    assert state.step == told["step"]
    assert state.skipped_steps == told["skipped"]
    assert state.samples == told["samples"]
    assert state.scheduler == told["scheduler"]
    for key, value in told["client_state"].items():
        assert state.client[key] == value
    if state.scaler is not None:
        assert state.scaler["cur_scale"] == told["loss_scale"]
    assert len(state.param_groups) == len(told["param_groups"])
    for group, wanted in zip(state.param_groups, told["param_groups"], strict=True):
        assert set(group.fqns) == {tied.get(name, name) for name in wanted["fqns"]}
        if group.hyper:  # elastic_checkpoint stores none
            assert group.hyper["lr"] == wanted["lr"]
            assert group.hyper["weight_decay"] == wanted["weight_decay"]


@pytest.mark.parametrize("case", MERGED, scope="module")
def test_optimizer_steps_by_name(case, checkpoint, expected):
    steps = checkpoint.manifest.train.optimizer_step
    for name, step in expected["optimizer_steps"].items():
        if name in steps:
            assert steps[name] == step, name


@pytest.mark.parametrize("case", HUGGING_FACE, scope="module")
@pytest.mark.parametrize("max_shard_bytes", [50_000, 10**9])
def test_transformers_computes_the_same_logits(case, max_shard_bytes, made, expected, tmp_path):
    from transformers import AutoModelForCausalLM

    source = find_checkpoint(case, made)
    reshard.merge(source, tmp_path / "m", dtype="fp32", max_shard_bytes=max_shard_bytes)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model.eval()(expected["input_ids"]).logits
    assert torch.equal(logits, expected["logits"])


@pytest.mark.parametrize("case", UNIVERSAL, scope="module")
def test_universal_directory_holds_the_same_state(case, made, expected, tmp_path):
    universal = made / case / "universal"
    reshard.merge(universal, tmp_path / "x.safetensors", dtype="fp32")
    merged = load_file(tmp_path / "x.safetensors")
    assert_weights(merged, expected)
    with reshard.open(universal) as checkpoint:
        assert_slots(checkpoint, expected)
        assert checkpoint.manifest.train.step == expected["train"]["step"]


@pytest.mark.parametrize("case", [n for n, c in CASES.items() if c.kind in REFUSED])
def test_experts_without_enough_metadata_are_refused_by_name(case, made, tmp_path):
    with pytest.raises(reshard.errors.UnsupportedError, match="shared by 1 or 2 or 4 ranks"):
        reshard.merge(made / case / "run", tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", NVME)
def test_offload_to_disk(case, made, tmp_path, request):
    if not request.config.getoption("--nvme"):
        pytest.skip("needs DeepSpeed's aio op (libaio-dev, minutes of compiling): give --nvme")
    expected = read_expected(made / case)
    reshard.merge(find_checkpoint(case, made), tmp_path / "x.safetensors", dtype="fp32")
    assert_weights(load_file(tmp_path / "x.safetensors"), expected)
    with reshard.open(find_checkpoint(case, made)) as checkpoint:
        assert_slots(checkpoint, expected)


@pytest.mark.parametrize("case", ["z2_bf16_ws4", "z3_subgroups_groups"])
def test_same_bytes_for_any_number_of_workers_and_memory(case, made, tmp_path):
    outputs = []
    for workers, memory in ((1, 256 << 20), (2, 1 << 20), (5, 700 << 10)):
        path = tmp_path / f"{workers}.safetensors"
        reshard.merge(made / case / "run", path, workers=workers, max_memory_bytes=memory)
        outputs.append(path.read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


def test_sources_are_not_changed(made, copied, tmp_path):
    run = copied("z3_bf16")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*.pt")}
    for path in before:
        path.chmod(0o444)
    reshard.merge(run, tmp_path / "x.safetensors")
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*.pt")}
    assert before == after


@pytest.mark.parametrize("level", ["run", "tag", "file"])
def test_any_level_of_directory_is_accepted(level, made, tmp_path):
    run = made / "z2_bf16" / "run"
    tag = run / (run / "latest").read_text().strip()
    source = {"run": run, "tag": tag, "file": tag / "mp_rank_00_model_states.pt"}[level]
    report = reshard.merge(source, tmp_path / "x.safetensors")
    assert report.from_master > 0


def test_single_file_names_its_aliases_as_safetensors_does(made, tmp_path):
    reshard.merge(made / "hf_z3_tied" / "run", tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}


def test_round_robin_order_differs_from_the_slice_mappings(made):
    """DeepSpeed's own mapping is wrong there; ours is compared with the engine above."""
    case = "z2_round_robin"
    run = made / case / "run"
    state = torch.load(next(run.rglob("*rank_0_mp_rank_00_optim_states.pt")), weights_only=False)[
        "optimizer_state_dict"
    ]
    mapped = list(state["param_slice_mappings"][0])
    with reshard.open(run) as checkpoint:
        order = [fqn for group in checkpoint.manifest.train.param_groups for fqn in group.fqns]
    assert order[: len(mapped)] != mapped


@pytest.mark.parametrize("case", ["z0_fp32", "z0_bf16"])
def test_state_that_is_not_per_element_is_reported_without_zero_too(case, copied):
    """As ``LAMB`` and factored optimizers have it; with ZeRO it was told of."""
    run = copied(case)
    (path,) = run.rglob("mp_rank_00_model_states.pt")
    held = torch.load(path, weights_only=False)
    optimizer = held["optimizer"]
    for state in optimizer.get("optimizer_state_dict", optimizer)["state"].values():
        state["scaling"], state["row"] = 0.5, torch.ones(())
    torch.save(held, path)
    with reshard.open(run) as checkpoint:
        manifest = checkpoint.manifest
    assert "optimizer state 'scaling' is not per element and is left out" in manifest.warnings
    assert any(manifest.of_kind("row"))  # a tensor of one element is read as it is


def keep_as_bitsandbytes(optimizer, state, rank):
    """Keep the moments in a dict as bitsandbytes 0.50 does, with scales, but without a table."""
    state["__bnb_optimizer_quant_state__"] = {
        "state1": state.pop("exp_avg").to(torch.uint8),
        "state2": state.pop("exp_avg_sq").to(torch.uint8),
        "absmax1": torch.ones(3),
    }


def keep_as_prodigy(optimizer, state, rank):
    """Keep what Prodigy (prodigyopt 1.1.2) adds to an Adam with ``slice_p=2``, in slots alone."""
    state["p0"], state["s"] = state["exp_avg"][::2].clone(), state["exp_avg"][::2].clone()


def compute_as_prodigy(optimizer, state, rank):
    """Keep the sums that Prodigy computes of a rank's own partition."""
    optimizer["param_groups"][0] |= {
        "d0": 1e-6,
        "d_numerator": 0.5 + rank,
        "d_denom": 0.25 + rank,
        "k": 3,
    }


def keep_norms(optimizer, state, rank):
    """Keep the norm of a rank's own part, as NovoGrad of pytorch_optimizer 4.1 does."""
    state["grads_ema"] = torch.tensor(0.5 + rank)


def keep_a_counter(optimizer, state, rank):
    """Keep a counter beside the states of the parameters, as madgrad 1.3 does."""
    optimizer["state"]["k"] = torch.tensor([3])


KEPT = [
    *((case, keep_norms) for case in ("z1_bf16", "z2_fp32", "z3_bf16")),
    *((case, keep_a_counter) for case in ("z0_fp32", "z0_bf16", "z1_bf16", "z3_bf16")),
    *((case, keep_as_bitsandbytes) for case in ("z1_bf16", "z2_fp32", "z3_bf16")),
    *((case, keep_as_prodigy) for case in ("z1_bf16", "z2_fp32", "z3_bf16")),
    *((case, compute_as_prodigy) for case in ("z1_bf16", "z2_fp32", "z3_bf16")),
]
NAMED = {
    keep_as_bitsandbytes: "__bnb_optimizer_quant_state__/absmax1",
    keep_as_prodigy: "p0",
    compute_as_prodigy: "d_numerator",
    keep_norms: "grads_ema",
    keep_a_counter: "k",
}


@pytest.mark.parametrize(("case", "keep"), KEPT)
def test_it_merges_but_does_not_split_what_is_not_per_element(case, keep, copied, tmp_path):
    run = copied(case)
    zero = sorted(run.rglob("*_optim_states.pt"))
    for rank, path in enumerate(zero or run.rglob("mp_rank_00_model_states.pt")):
        held = torch.load(path, weights_only=False)
        root = held["optimizer_state_dict" if zero else "optimizer"]
        inner = root.get("base_optimizer_state", root.get("optimizer_state_dict", root))
        for state in [*inner["state"].values()]:
            keep(inner, state, rank)
        torch.save(held, path)
    report = reshard.merge(run, tmp_path / "x.safetensors")
    assert any(re.search(rf"\b{NAMED[keep]}\b", text) for text in report.warnings)
    with pytest.raises(UnsupportedError, match=f"stores '{NAMED[keep]}'"):
        split(run, tmp_path / "out", SplitOptions(world_size=3))
    split(run, tmp_path / "out", SplitOptions(world_size=3, weights_only=True))
