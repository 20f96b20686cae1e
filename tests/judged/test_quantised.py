"""Quantised models of transformers: the values that its own dequantisation gives, bit by bit.

Codes and scales are transformers' own (`Fp8Quantize`), or random ones in the layout that it reads.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    Mxfp4Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import reshard
from reshard.errors import UnsupportedError
from reshard.filesystem import CheckpointFileSystem
from tests.judges import begin_worker as worker
from tests.judges.ranks import run_in_turn
from tests.quantised.models import (
    FP8,
    MXFP4,
    list_differing,
    mxfp4_experts,
    read_tensors,
    write_model,
)
from tests.trainer import worlds

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 211,  # of the batches of `begin_worker`
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "deepseek_v3": DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(
        **SMALL,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
}
KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "norm.weight")


def saved(place, name):
    """Save the published form of a bf16 model with random weights, and its config."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).bfloat16()
    model.save_pretrained(place)
    return load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text())


def fp8_model(place, name, **settings):
    """Save a model with codes and scales that transformers computes, in two files."""
    settings = {**FP8, "weight_block_size": [16, 32], **settings}
    config = SimpleNamespace(**({"scale_fmt": "float"} | settings))
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    state, config = saved(place / "plain", name)
    tensors = {}
    for fqn, value in state.items():
        is_kept = value.ndim < 2 or fqn.endswith(KEPT)
        tensors |= {fqn: value} if is_kept else quantise._quantize_one(fqn, value)
    assert any(fqn.endswith("_scale_inv") for fqn in tensors)
    write_model(place / "codes", tensors, settings, files=2)
    (place / "codes" / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings})
    )
    return place / "codes"


def gpt_oss(place):
    """Return GPT-OSS with random experts in MXFP4."""
    tensors, config = saved(place / "plain", "gpt_oss")
    for fqn in [fqn for fqn in tensors if fqn.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(fqn).shape
        blocks, scales = mxfp4_experts(experts, rows, columns // 32, seed=len(tensors))
        tensors |= {f"{fqn}_blocks": blocks, f"{fqn}_scales": scales}
    write_model(place / "codes", tensors, MXFP4, files=2)
    (place / "codes" / "config.json").write_text(
        json.dumps(config | {"quantization_config": MXFP4})
    )
    return place / "codes"


def state_of(place, **options):
    return AutoModelForCausalLM.from_pretrained(place, **options).state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"scale_fmt": "ue8m0"}),
        ("qwen3", {"weight_block_size": None}),
        ("deepseek_v3", {}),
        ("gpt_oss", None),
    ],
)
def test_transformers_loads_the_same_values_from_both(tmp_path, name, settings, dtype):
    source = gpt_oss(tmp_path) if settings is None else fp8_model(tmp_path, name, **settings)
    reshard.merge(source, tmp_path / "out", dtype=str(dtype).removeprefix("torch."))
    how = Mxfp4Config if settings is None else FineGrainedFP8Config
    want = state_of(source, dtype=dtype, quantization_config=how(dequantize=True))
    got = state_of(tmp_path / "out")
    assert got.keys() == want.keys()
    # transformers leaves weights that are not quantised in the dtype in which they are stored, and
    # the fused experts of fp8 models in bf16.
    assert any(want[fqn].dtype == dtype for fqn in want if "_proj" in fqn)
    assert [fqn for fqn in want if not torch.equal(got[fqn].to(want[fqn].dtype), want[fqn])] == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"scale_fmt": "ue8m0"}),
        ("deepseek_v3", {}),
        ("gpt_oss", None),
    ],
)
def test_values_of_a_release_are_written_as_its_bytes(tmp_path, name, settings):
    """Through a model of transformers: what it saves is quantised like what it has loaded."""
    source = gpt_oss(tmp_path) if settings is None else fp8_model(tmp_path, name, **settings)
    how = Mxfp4Config if settings is None else FineGrainedFP8Config
    want = read_tensors(source)
    for dtype in (torch.bfloat16, torch.float32):
        place = tmp_path / str(dtype)
        place.mkdir()
        if settings is None or dtype == torch.bfloat16:
            options = {"dtype": dtype, "quantization_config": how(dequantize=True)}
            model = AutoModelForCausalLM.from_pretrained(source, **options)
            model.config.quantization_config = None
            save_file(  # under the names in memory, as a training framework saves them
                {n: t.contiguous().clone() for n, t in model.state_dict().items()},
                place / "model.safetensors",
            )
        else:  # transformers keeps fused experts in bf16
            reshard.merge(source, place / "model.safetensors", dtype="fp32")
        reshard.merge(place / "model.safetensors", place / "codes", quantise_like=source)
        assert list_differing(read_tensors(place / "codes"), want) == []
        assert json.loads((place / "codes/config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_trained_weights_are_quantised_as_transformers_does(tmp_path, scale_fmt):
    """With scales that are powers of two bit by bit; others differ in the last bits.

    transformers computes ``1 / (448 / amax)``; DeepSeek, and reshard, ``amax / 448``.
    """
    source = fp8_model(tmp_path, "deepseek_v3", scale_fmt=scale_fmt)
    torch.manual_seed(5)
    trained = AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"])
    with torch.no_grad():
        for value in trained.parameters():
            value.normal_(std=0.05)
    trained.save_pretrained(tmp_path / "trained")
    reshard.merge(tmp_path / "trained", tmp_path / "out", quantise_like=source)
    got, state = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "trained")
    settings = {**FP8, "weight_block_size": [16, 32], "scale_fmt": scale_fmt}
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=SimpleNamespace(**settings)))
    names = [fqn for fqn in state if f"{fqn}_scale_inv" in got]
    assert len(names) == 26
    want = {n: t for fqn in names for n, t in quantise._quantize_one(fqn, state[fqn]).items()}
    different = list_differing({fqn: got[fqn] for fqn in want}, want)
    if scale_fmt == "ue8m0":
        assert different == []
    for fqn in different:
        is_scale = fqn.endswith("_scale_inv")
        near = 2**-22 if is_scale else 0.13  # the next code, where the quotient is near the middle
        torch.testing.assert_close(got[fqn].float(), want[fqn].float(), rtol=near, atol=0)
        assert is_scale or (got[fqn].float() != want[fqn].float()).float().mean() < 0.01
    live = state_of(tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True))
    reshard.merge(tmp_path / "out", tmp_path / "values", dtype="bf16")
    values = state_of(tmp_path / "values")
    assert [n for n, t in live.items() if not torch.equal(values[n].to(t.dtype), t)] == []
    tokens = torch.arange(24).reshape(2, 12) * 7
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    with torch.no_grad():
        logits = [m.eval().float()(tokens).logits for m in (model, trained)]
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[1].norm()


BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
WHOLE = {
    "qwen3": Qwen3Config(**(SMALL | BLOCKS), tie_word_embeddings=False),
    "tied": Qwen3Config(**(SMALL | BLOCKS), tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **(SMALL | BLOCKS), moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": DeepseekV3Config(
        **(SMALL | BLOCKS | {"num_key_value_heads": 4, "head_dim": 64}),
        moe_intermediate_size=128,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_rope_head_dim=64,  # 192 rows are no whole blocks: transformers would make 2 of 96
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=1,
    ),
    "mamba": MambaConfig(vocab_size=211, hidden_size=256, num_hidden_layers=2),
}
ODD = {"deepseek_v3": ["kv_a_proj_with_mqa"], "mamba": ["x_proj", "dt_proj"]}


def in_blocks(values):
    """Return codes and scales of blocks of 128 x 128: the definition of DeepSeek V3, in torch."""
    rows, columns = (size // 128 for size in values.shape)
    blocks = values.float().reshape(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    scales[scales == 0] = 1
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(values.shape), scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WHOLE)
def test_linear_layers_become_fp8_as_transformers_chooses_them(tmp_path, monkeypatch, name, dtype):
    """Without a release: the modules are those that transformers quantises when it loads."""
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(WHOLE[name]).to(dtype)
    with torch.no_grad():
        next(m for m in model.modules() if type(m) is torch.nn.Linear).weight[:128, :128] = 0
    model.save_pretrained(tmp_path / "plain")
    reshard.merge(tmp_path / "plain", tmp_path / "codes", quantise="fp8-block")
    state, got = read_tensors(tmp_path / "plain"), read_tensors(tmp_path / "codes")
    chosen = [fqn for fqn in state if f"{fqn}_scale_inv" in got]
    want = dict(state)
    for fqn in chosen:
        want[fqn], want[f"{fqn}_scale_inv"] = in_blocks(state[fqn])
    assert list_differing(got, want) == []

    # What transformers has in place of linear layers, on CPU, where it cannot compute with it.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    load = partial(AutoModelForCausalLM.from_pretrained, output_loading_info=True, dtype=dtype)
    codes, told = load(tmp_path / "codes")
    assert not any(told.values()), told
    listed = ["lm_head", *ODD[name]] if name in ODD else None
    how = FineGrainedFP8Config(modules_to_not_convert=listed)
    own, _ = load(tmp_path / "plain", quantization_config=how)
    kinds = [{n: t.dtype for n, t in each.state_dict().items()} for each in (codes, own)]
    assert kinds[0] == kinds[1]
    assert torch.float8_e4m3fn in kinds[0].values()

    live, told = load(tmp_path / "codes", quantization_config=FineGrainedFP8Config(dequantize=True))
    assert not any(told.values()), told
    reshard.merge(tmp_path / "codes", tmp_path / "values", dtype=str(dtype).removeprefix("torch."))
    values, live = state_of(tmp_path / "values"), live.state_dict()
    assert values.keys() == live.keys()
    assert [n for n, t in live.items() if not torch.equal(values[n].to(t.dtype), t)] == []
    reshard.merge(tmp_path / "codes", tmp_path / "again", quantise="fp8-block", dtype="fp32")
    again = read_tensors(tmp_path / "again")
    parts = [*chosen, *(f"{fqn}_scale_inv" for fqn in chosen)]
    assert list_differing({n: again[n] for n in parts}, {n: want[n] for n in parts}) == []
    reshard.split(tmp_path / "plain", tmp_path / "dcp", to="dcp", world_size=2)  # names in memory
    reshard.merge(
        tmp_path / "dcp", tmp_path / "run", hf_dir=tmp_path / "plain", quantise="fp8-block"
    )
    assert list_differing(read_tensors(tmp_path / "run"), want) == []


def test_fsdp_2_starts_from_codes_as_from_dequantised_weights(tmp_path):
    """Losses of two ranks over three steps, bit by bit: a DCP of an fp8 model, and a fresh run."""
    source = fp8_model(tmp_path, "llama")
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps(worker.GROUPS))
    reshard.split(source, tmp_path / "dcp", to="dcp", init_optimizer="zeros", param_groups=groups)
    plain = tmp_path / "plain"  # its weights become those of transformers
    values = {fqn: t.float() for fqn, t in state_of(source, dtype=torch.float32).items()}
    del values["lm_head.weight"]  # tied
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    jobs = [
        ("fresh", worker.fresh, plain, 3),
        ("dcp", worker.from_dcp, plain, tmp_path / "dcp", 3),
    ]
    for found in worlds.run(2, run_in_turn, jobs):
        assert isinstance(found["fresh"], list), found["fresh"]
        assert found["dcp"] == found["fresh"]


def test_a_conversion_has_the_names_and_values_of_the_model_in_memory(tmp_path):
    """DeepSeek's experts, a matrix each in the release, are one tensor of the model in memory."""
    source = fp8_model(tmp_path, "deepseek_v3")
    reshard.split(source, tmp_path / "dcp", to="dcp", init_optimizer="none")
    want = state_of(source)
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert checkpoint.keys() == want.keys()
        assert [n for n, t in want.items() if not torch.equal(checkpoint[n][...].to(t), t)] == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_float4_keeps_its_bits_through_every_command(tmp_path, ranks):
    """A byte of ``float4_e2m1fn_x2`` has two numbers, which safetensors counts one by one."""
    chance = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (6, 10), generator=chance, dtype=torch.uint8)
    want = {"a": codes.view(torch.float4_e2m1fn_x2), "b": torch.ones(3)}
    source, merged = tmp_path / "model.safetensors", tmp_path / "merged"
    save_file(want, source, {"format": "pt"})
    reshard.merge(source, tmp_path / "out.pt", dtype="bf16")
    assert torch.equal(torch.load(tmp_path / "out.pt")["a"].view(torch.uint8), codes)
    reshard.merge(tmp_path / "out.pt", merged)
    assert torch.equal(load_file(merged / "model.safetensors")["a"].view(torch.uint8), codes)
    for to in ("dcp", "fsdp2"):
        reshard.split(source, tmp_path / to, to=to, world_size=ranks)
        reshard.merge(tmp_path / to, tmp_path / f"{to}.safetensors")
        assert (tmp_path / f"{to}.safetensors").read_bytes() == source.read_bytes()
    loaded = {"a": torch.zeros_like(codes).view(want["a"].dtype), "b": torch.zeros(3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": loaded}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(loaded["a"].view(torch.uint8), codes)
    assert reshard.verify(source, deep=True).passed
    assert "float4_e2m1fn_x2" in str(reshard.inspect(source))
    fsspec.register_implementation("reshard", CheckpointFileSystem, clobber=True)
    files = fsspec.filesystem("reshard", fo=str(tmp_path / "dcp"))
    (tmp_path / "read").write_bytes(files.cat_file("model.safetensors"))
    assert torch.equal(load_file(tmp_path / "read")["a"].view(torch.uint8), codes)
    files.close()
    codes[5, 9] ^= 0x10  # the other number of the last byte
    save_file(want, tmp_path / "other.safetensors")
    (difference,) = reshard.diff(source, tmp_path / "other.safetensors").unequal
    assert (difference.fqn, difference.count) == ("a", 1)
    with pytest.raises(UnsupportedError, match="codes differ"):
        reshard.average([source, tmp_path / "other.safetensors"], tmp_path / "mean")
    save_file({**want, "b": torch.full((3,), 3.0)}, source)
    reshard.average([source, tmp_path / "other.safetensors"], tmp_path / "mean")
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert torch.equal(mean["a"].view(torch.uint8), codes)
    assert mean["b"].tolist() == [2] * 3
