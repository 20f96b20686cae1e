"""The sizes of transformers' decoder models, from their config, by a formula for each family.

Names and shapes are those of transformers 5.23 (``models/*/modeling_*.py``); tests compare each
family with its model on the meta device. What a block saves for backward was counted with
``torch.autograd.graph.saved_tensors_hooks`` on these modules, with memory-efficient attention
where the family supports it; tests count it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reshard.sizing.model import BlockSizes, ModelSizes, Parameter, Saved

Config = Mapping[str, Any]


class UnknownSizesError(Exception):
    """The config is of no known family, or lacks a size that its family needs."""


@dataclass(frozen=True, slots=True)
class _DecoderFamily:
    """How the models of one family differ from Llama.

    Args:
        block_class: class of the blocks in transformers.
        tied: the default of ``tie_word_embeddings``.
        qkv_bias, out_bias, mlp_bias: whether the linear layers have biases; None: as
            ``attention_bias`` or ``mlp_bias`` of the config states.
        head_norm: norms of queries and keys: "" none, "head" one head wide, "all" all heads wide.
        norms: names of the norms of a block, each of the width of the residual stream.
        wide_norms: norms multiply by their weight in float32 and so save no 16-bit copy.
        fused: queries, keys and values are one matrix; gate and up are one.
        score: bytes that attention saves per head and pair of tokens; 0: memory-efficient.
        repeats_keys: attention saves keys and values once per query head.
    """

    block_class: str
    tied: bool = False
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norm: str = ""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    wide_norms: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    score: int = 0
    repeats_keys: bool = False


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_DECODERS = {
    "llama": _DecoderFamily("LlamaDecoderLayer"),
    "mistral": _DecoderFamily("MistralDecoderLayer", **_NO_BIAS),
    "mixtral": _DecoderFamily("MixtralDecoderLayer", **_NO_BIAS),
    "qwen2": _DecoderFamily("Qwen2DecoderLayer", qkv_bias=True, out_bias=False, mlp_bias=False),
    "qwen2_moe": _DecoderFamily(
        "Qwen2MoeDecoderLayer", qkv_bias=True, out_bias=False, mlp_bias=False
    ),
    "qwen3": _DecoderFamily("Qwen3DecoderLayer", mlp_bias=False, head_norm="head"),
    "qwen3_moe": _DecoderFamily("Qwen3MoeDecoderLayer", mlp_bias=False, head_norm="head"),
    "deepseek_v2": _DecoderFamily("DeepseekV2DecoderLayer", out_bias=None),
    "deepseek_v3": _DecoderFamily("DeepseekV3DecoderLayer", out_bias=None),
    "gemma": _DecoderFamily("GemmaDecoderLayer", tied=True, mlp_bias=False, wide_norms=True),
    "gemma2": _DecoderFamily(
        "Gemma2DecoderLayer",
        tied=True,
        mlp_bias=False,
        norms=_FOUR_NORMS,
        wide_norms=True,
        score=8,  # softmax in float32, its cast, and the input of the soft cap
        repeats_keys=True,
    ),
    "gemma3_text": _DecoderFamily(
        "Gemma3DecoderLayer",
        tied=True,
        mlp_bias=False,
        head_norm="head",
        norms=_FOUR_NORMS,
        wide_norms=True,
    ),
    "gpt_oss": _DecoderFamily("GptOssDecoderLayer", wide_norms=True, score=2, repeats_keys=True),
    "phi3": _DecoderFamily("Phi3DecoderLayer", fused_qkv=True, fused_gate=True, **_NO_BIAS),
    "olmo2": _DecoderFamily(
        "Olmo2DecoderLayer",
        mlp_bias=False,
        head_norm="all",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        wide_norms=True,
    ),
}


def count_config(config: Config, source: str) -> ModelSizes:
    """Return the sizes of the model of a transformers config.

    Raises:
        UnknownSizesError: no formula applies.
    """
    kind = str(config.get("model_type", ""))
    if "quantization_config" in config and kind not in ("deepseek_v3", "gpt_oss"):
        raise UnknownSizesError(f"{kind} with quantised weights")
    if kind not in FORMULAS:
        raise UnknownSizesError(kind)
    try:
        return FORMULAS[kind](config, source)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnknownSizesError(f"{kind}: {error}") from error


def count_llama_block(hidden: int, intermediate: int) -> Saved:
    """Return what a Llama block with full attention saves."""
    parts = (_save_norm(hidden, wide=False) + Saved(hidden),) * 2
    attention = Saved(narrow_cut=4 * hidden, wide_cut=hidden // 128)
    return parts[0] + parts[1] + attention + Saved(narrow_cut=4 * intermediate)


def _save_norm(width: int, *, wide: bool) -> Saved:
    """Return what an RMS norm saves: its input in float32, and the normalized values."""
    return Saved(wide=2 * width + 1) if wide else Saved(narrow=width, wide=width + 1)


def _mark_cut(saved: Saved) -> Saved:
    return Saved(narrow_cut=saved.narrow, wide_cut=saved.wide)


def _count_decoder(config: Config, source: str, family: _DecoderFamily) -> ModelSizes:
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    embedding = Parameter("model.embed_tokens.weight", (vocab, hidden))
    head = Parameter("lm_head.weight", (vocab, hidden))
    norm = Parameter("model.norm.weight", (hidden,), is_cut=False)
    layers = int(config["num_hidden_layers"])
    attend = _describe_latent_attention if "kv_lora_rank" in config else _describe_attention
    attention = list(attend(config, family))
    blocks, kinds = [], dict[bool, tuple[tuple[Parameter, ...], Saved]]()
    for number in range(layers):
        sparse = _is_sparse(config, number)
        if sparse not in kinds:
            mlp = (
                _describe_experts(config, family)
                if sparse
                else _describe_feed_forward(config, family)
            )
            kinds[sparse] = _join([*attention, *mlp, *_describe_norms(config, family)])
        blocks.append(BlockSizes(f"model.layers.{number}", *kinds[sparse]))
    tied = config.get("tie_word_embeddings", family.tied)
    final = _save_norm(hidden, wide=family.wide_norms) + Saved(narrow=hidden)
    return ModelSizes(
        source,
        f"formula of {config['model_type']}",
        (embedding,),
        tuple(blocks),
        (norm,) if tied else (norm, head),
        final,
        hidden,
        vocab,
        positions=config.get("max_position_embeddings"),
        block_class=family.block_class,
    )


_ModelPart = tuple[tuple[Parameter, ...], Saved]


def _join(parts: list[_ModelPart]) -> _ModelPart:
    saved = Saved()
    for _, further in parts:
        saved = saved + further
    return tuple(tensor for tensors, _ in parts for tensor in tensors), saved


def _describe_norms(config: Config, family: _DecoderFamily) -> Iterator[_ModelPart]:
    hidden = int(config["hidden_size"])
    for name in family.norms:
        tensor = Parameter(f"{name}.weight", (hidden,), is_cut=False)
        yield (tensor,), _save_norm(hidden, wide=family.wide_norms)


def _list_linear(name: str, rows: int, columns: int, *, bias: bool) -> tuple[Parameter, ...]:
    weight = Parameter(f"{name}.weight", (rows, columns))
    return (weight, Parameter(f"{name}.bias", (rows,), is_cut=False)) if bias else (weight,)


def _read_heads(config: Config) -> tuple[int, int, int]:
    heads = int(config["num_attention_heads"])
    groups = int(config.get("num_key_value_heads") or heads)
    size = config.get("head_dim") or int(config["hidden_size"]) // heads
    return heads, groups, int(size)


def _describe_attention(config: Config, family: _DecoderFamily) -> Iterator[_ModelPart]:
    hidden = int(config["hidden_size"])
    heads, groups, size = _read_heads(config)
    queries, keys = heads * size, groups * size
    default = bool(config.get("attention_bias", config.get("model_type") == "gpt_oss"))
    bias = default if family.qkv_bias is None else family.qkv_bias
    out_bias = default if family.out_bias is None else family.out_bias
    if family.fused_qkv:
        yield _list_linear("self_attn.qkv_proj", queries + 2 * keys, hidden, bias=bias), Saved()
    else:
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield _list_linear(f"self_attn.{name}", rows, hidden, bias=bias), Saved()
    yield _list_linear("self_attn.o_proj", hidden, queries, bias=out_bias), Saved()
    if config.get("model_type") == "gpt_oss":
        yield (Parameter("self_attn.sinks", (heads,), is_cut=False),), Saved()
    for name, own, width in (("q_norm", size, queries), ("k_norm", size, keys)):
        if family.head_norm:
            length = own if family.head_norm == "head" else width
            tensor = Parameter(f"self_attn.{name}.weight", (length,), is_cut=False)
            yield (tensor,), _mark_cut(_save_norm(width, wide=family.wide_norms))
    stored = queries if family.repeats_keys else keys
    values = queries + 2 * keys if family.fused_qkv else stored  # a view keeps the fused output
    score, grouped = family.score * heads, heads if heads > groups and not family.score else 0
    yield (), Saved(hidden, 0, 2 * queries + stored + values, heads, score, grouped)


def _describe_latent_attention(config: Config, _family: _DecoderFamily) -> Iterator[_ModelPart]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope, nope = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    value, narrow = int(config["v_head_dim"]), int(config["kv_lora_rank"])
    queries, bias = heads * (rope + nope), bool(config.get("attention_bias", False))
    rank = config["q_lora_rank"]
    if rank is None:
        yield _list_linear("self_attn.q_proj", queries, hidden, bias=False), Saved()
    else:
        yield _list_linear("self_attn.q_a_proj", rank, hidden, bias=bias), Saved()
        norm = Parameter("self_attn.q_a_layernorm.weight", (rank,), is_cut=False)
        yield (norm,), _save_norm(rank, wide=False) + Saved(rank)
        yield _list_linear("self_attn.q_b_proj", queries, rank, bias=False), Saved()
    down = "self_attn.kv_a_proj_with_mqa"
    yield _list_linear(down, narrow + rope, hidden, bias=bias), Saved()
    norm = Parameter("self_attn.kv_a_layernorm.weight", (narrow,), is_cut=False)
    yield (norm,), _save_norm(narrow, wide=False) + Saved(narrow)
    yield _list_linear("self_attn.kv_b_proj", heads * (nope + value), narrow, bias=False), Saved()
    yield _list_linear("self_attn.o_proj", hidden, heads * value, bias=bias), Saved()
    # Queries, keys, the output of kv_b_proj (values are a view of it), the attention's output and
    # its contiguous copy.
    yield (), Saved(hidden, 0, 2 * queries + heads * (nope + value) + 2 * heads * value, heads)


def _is_sparse(config: Config, number: int) -> bool:
    kind = config["model_type"]
    if kind in ("mixtral", "gpt_oss"):
        return True
    if kind in ("deepseek_v2", "deepseek_v3"):
        return number >= int(config["first_k_dense_replace"])
    if kind in ("qwen2_moe", "qwen3_moe"):
        step = int(config.get("decoder_sparse_step", 1))
        only_dense = config.get("mlp_only_layers") or ()
        return number not in only_dense and _count_experts(config) > 0 and (number + 1) % step == 0
    return False


def _count_experts(config: Config) -> int:
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if name in config:
            return int(config[name])
    raise KeyError("number of experts")


def _describe_feed_forward(config: Config, family: _DecoderFamily) -> Iterator[_ModelPart]:
    hidden = int(config["hidden_size"])
    has_bias = bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias
    yield _describe_gated_mlp(
        "mlp", hidden, int(config["intermediate_size"]), family, bias=has_bias
    )
    yield (), Saved(hidden)


def _describe_gated_mlp(
    name: str, hidden: int, inner: int, family: _DecoderFamily, *, bias: bool = False
) -> _ModelPart:
    """Return a gated MLP; it saves gate, activated gate, up and their product."""
    down = _list_linear(f"{name}.down_proj", hidden, inner, bias=bias)
    if family.fused_gate:
        up = _list_linear(f"{name}.gate_up_proj", 2 * inner, hidden, bias=bias)
    else:
        up = _list_linear(f"{name}.gate_proj", inner, hidden, bias=bias)
        up += _list_linear(f"{name}.up_proj", inner, hidden, bias=bias)
    return (*up, *down), Saved(narrow_cut=4 * inner)


def _describe_experts(config: Config, family: _DecoderFamily) -> Iterator[_ModelPart]:
    kind, hidden = config["model_type"], int(config["hidden_size"])
    experts, chosen = _count_experts(config), int(config["num_experts_per_tok"])
    inner = int(config.get("moe_intermediate_size", 0) or config["intermediate_size"])
    router = "mlp.router" if kind == "gpt_oss" else "mlp.gate"
    gates = [Parameter(f"{router}.weight", (experts, hidden), is_cut=False)]
    up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if kind == "gpt_oss":
        gates.append(Parameter(f"{router}.bias", (experts,), is_cut=False))
        up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)
        yield _list_expert_biases(experts, inner, hidden), Saved()
    wide = hidden + 2 * experts if kind == "deepseek_v3" else experts  # it routes in float32
    yield tuple(gates), Saved(hidden, wide)
    mixed = (
        Parameter("mlp.experts.gate_up_proj", up, is_expert=True),
        Parameter("mlp.experts.down_proj", down, is_expert=True),
    )
    # Gate and up, the activated gate, their product; gpt_oss also keeps what it clamps.
    per_expert = 7 if kind == "gpt_oss" else 4
    # The gathered input and the output that is weighted, for each chosen expert.
    yield mixed, Saved(2 * hidden * chosen + 14 * chosen, 0, per_expert * inner * chosen)
    yield from _describe_shared_experts(config, family)


def _list_expert_biases(experts: int, inner: int, hidden: int) -> tuple[Parameter, ...]:
    return (
        Parameter("mlp.experts.gate_up_proj_bias", (experts, 2 * inner), is_expert=True),
        Parameter("mlp.experts.down_proj_bias", (experts, hidden), is_expert=True),
    )


def _describe_shared_experts(config: Config, family: _DecoderFamily) -> Iterator[_ModelPart]:
    hidden = int(config["hidden_size"])
    if config["model_type"] == "qwen2_moe":
        inner = int(config["shared_expert_intermediate_size"])
        yield _describe_gated_mlp("mlp.shared_expert", hidden, inner, family)
        gate = Parameter("mlp.shared_expert_gate.weight", (1, hidden), is_cut=False)
        yield (gate,), Saved(hidden)
    elif config.get("n_shared_experts"):
        inner = int(config["moe_intermediate_size"]) * int(config["n_shared_experts"])
        yield _describe_gated_mlp("mlp.shared_experts", hidden, inner, family)


def _list_biased(name: str, shape: tuple[int, int], outputs: int) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape), Parameter(f"{name}.bias", (outputs,), is_cut=False)


def _list_layer_norm(name: str, hidden: int) -> tuple[Parameter, Parameter]:
    parts = ("weight", "bias")
    weight, bias = (Parameter(f"{name}.{part}", (hidden,), is_cut=False) for part in parts)
    return weight, bias


def _count_gpt2(config: Config, source: str) -> ModelSizes:
    hidden, vocab = int(config["n_embd"]), int(config["vocab_size"])
    positions, inner = int(config["n_positions"]), int(config.get("n_inner") or 4 * hidden)
    tensors = (
        *_list_layer_norm("ln_1", hidden),
        *_list_biased("attn.c_attn", (hidden, 3 * hidden), 3 * hidden),
        *_list_biased("attn.c_proj", (hidden, hidden), hidden),
        *_list_layer_norm("ln_2", hidden),
        *_list_biased("mlp.c_fc", (hidden, inner), inner),
        *_list_biased("mlp.c_proj", (inner, hidden), hidden),
    )
    masks = 1 if config.get("resid_pdrop", 0.1) else 0  # two masks of one byte an element
    # gelu_new is composed of five operations, each of which saves its input.
    saved = Saved((4 + masks) * hidden, 0, 4 * hidden + 5 * inner, int(config["n_head"]))
    after: tuple[Parameter, ...] = _list_layer_norm("transformer.ln_f", hidden)
    if not config.get("tie_word_embeddings", True):
        after = (*after, Parameter("lm_head.weight", (vocab, hidden)))
    return ModelSizes(
        source,
        "formula of gpt2",
        (
            Parameter("transformer.wte.weight", (vocab, hidden)),
            Parameter("transformer.wpe.weight", (positions, hidden), is_cut=False),
        ),
        tuple(
            BlockSizes(f"transformer.h.{n}", tensors, saved) for n in range(int(config["n_layer"]))
        ),
        after,
        Saved(2 * hidden),
        hidden,
        vocab,
        positions=positions,
        block_class="GPT2Block",
    )


def _count_neox(config: Config, source: str) -> ModelSizes:
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    inner, layers = int(config["intermediate_size"]), int(config["num_hidden_layers"])
    has_bias = bool(config.get("attention_bias", True))

    def add(name: str, rows: int, columns: int) -> tuple[Parameter, ...]:
        return _list_linear(name, rows, columns, bias=has_bias)

    tensors = (
        *_list_layer_norm("input_layernorm", hidden),
        *_list_layer_norm("post_attention_layernorm", hidden),
        *add("attention.query_key_value", 3 * hidden, hidden),
        *add("attention.dense", hidden, hidden),
        *_list_biased("mlp.dense_h_to_4h", (inner, hidden), inner),
        *_list_biased("mlp.dense_4h_to_h", (hidden, inner), hidden),
    )
    saved = Saved(4 * hidden, 0, 6 * hidden + 2 * inner, int(config["num_attention_heads"]))
    after = _list_layer_norm("gpt_neox.final_layer_norm", hidden)
    head = Parameter("lm_head.weight", (vocab, hidden))
    tied = config.get("tie_word_embeddings", False)
    return ModelSizes(
        source,
        "formula of gpt_neox",
        (Parameter("gpt_neox.embed_in.weight", (vocab, hidden)),),
        tuple(BlockSizes(f"gpt_neox.layers.{number}", tensors, saved) for number in range(layers)),
        after if tied else (*after, head),
        Saved(2 * hidden),
        hidden,
        vocab,
        positions=config.get("max_position_embeddings"),
        block_class="GPTNeoXLayer",
    )


FORMULAS: Mapping[str, Callable[[Config, str], ModelSizes]] = {
    "gpt2": _count_gpt2,
    "gpt_neox": _count_neox,
    **{kind: partial(_count_decoder, family=family) for kind, family in _DECODERS.items()},
}
"""``model_type`` -> the function that counts the model of a config."""
