"""Tiny random models of every type of transformers, made from its own default configurations.

A type's default configuration is shrunk by the names of its fields: fewer layers, heads, experts
and words, narrower layers. Fields that a configuration derives from others are left to it. If a
model cannot be built from the smallest configuration, larger ones are tried in turn.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from reshard.model.build import list_classes

LARGEST = 70_000_000  # elements of a model that still counts as tiny
VOCABULARY = 128
WIDTH, HEADS, HEAD_DIM, EXPERTS, LAYERS = 64, 4, 16, 4, 2


@dataclass(frozen=True)
class Recipe:
    """How far a configuration is shrunk: which of the rules apply, and the divisor of widths."""

    name: str
    layers: bool = True
    widths: bool = True
    divisor: int = 0


RECIPES = (
    Recipe("narrow"),
    Recipe("divided by 8", widths=False, divisor=8),
    Recipe("divided by 4", widths=False, divisor=4),
    Recipe("few layers", widths=False),
    Recipe("unchanged", widths=False, layers=False),
)

_WIDTH = re.compile(
    r"^(hidden_size|d_model|n_embd|emb_dim|embed_dim|hidden_dim|embedding_size|dim|model_dim)$"
    r"|(^|_)hidden_size$|^projection_dim$|^adapter_in(put)?_(size|dim)$|_embed_dim$"
    r"|^(encoder|decoder|text|vision|audio)_(hidden|embed)_dim$"
)
_INTERMEDIATE = re.compile(
    r"intermediate_size$|ffn_dim$|^d_ff$|^n_inner$|^mlp_dim$|ffn_hidden_size$|^ffn_size$|_mlp_dim$"
)
_HEADS = re.compile(r"(num|n)_(attention_|attn_|\w+_)?heads?$|attention_heads$|^num_heads$")
_VOCABULARY = re.compile(r"vocab_size(_per_layer_input)?$|^ngram_vocab\w*$|^num_embeddings$")
_TOKEN = re.compile(r"_(token_id|token_index|token_ids)$|^(image|video|audio)_token$")
_DEPTHS = (  # fields that any recipe with fewer layers limits, and their largest value
    (
        re.compile(
            r"(^|_)(n|num)_(hidden_|encoder_|decoder_|dec_|enc_)?(layers?|blocks)$"
            r"|^(encoder|decoder)_layers$|^depth$|^layers$|_num_(hidden_)?layers$"
            r"|^num_layers_\w+$|_depth$|^num_(text|vision|global|local)\w*_layers$"
        ),
        LAYERS,
    ),
    (
        re.compile(
            r"^(num|n)_(local_|routed_)?experts$|^moe_num_experts$|^num_moe_experts$"
            r"|^moe_num_routed_experts$"
        ),
        EXPERTS,
    ),
    (
        re.compile(
            r"experts_per_tok(en)?$|^moe_k$|^moe_top_?k$|^num_selected_experts$|^top_k_experts$"
        ),
        2,
    ),
    (re.compile(r"^(n_group|num_expert_group)$"), 2),
    (re.compile(r"^topk_group$"), 1),
    (re.compile(r"^(first_k_dense_replace|moe_layer_start_index|num_dense_layers)$"), 1),
    (re.compile(r"^num_kv_shared_layers$"), 0),
)
_WIDTHS = (  # fields that the narrow recipe limits
    (re.compile(r"(key_value|kv)_heads$"), HEADS // 2),
    (_HEADS, HEADS),
    (
        re.compile(
            r"(^|_)head_dim$|^d_kv$|^dim_head$|^attention_head_size$|^(key|value)_head_size$"
            r"|^kv_channels$"
        ),
        HEAD_DIM,
    ),
    (_INTERMEDIATE, WIDTH * 3 // 2),
    (_WIDTH, WIDTH),
    (re.compile(r"_lora_rank$|^lora_rank$"), 16),
)


@dataclass(frozen=True)
class Case:
    """One model class: the type's usual one, or one that the conversion mapping names itself."""

    name: str
    model_type: str
    model_class: str = ""  # empty: the type's usual one

    @property
    def in_mapping(self) -> bool:
        """Return whether transformers converts names of this type or class."""
        return conversion_mapping.get_checkpoint_conversion_mapping(self.name) is not None


class NotBuiltError(Exception):
    """No recipe gives a model of the case."""


_HEADS_OF_MODELS = (  # the usual class of a type is the first of these that it has
    "ForCausalLM",
    "ForConditionalGeneration",
    "LMHeadModel",
    "ForMaskedLM",
    "ForImageTextToText",
    "ForPreTraining",
    "ForImageClassification",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForInstanceSegmentation",
    "ForUniversalSegmentation",
    "ForDepthEstimation",
    "ForCTC",
    "ForAudioClassification",
    "ForPrediction",
    "Model",
)


def list_cases() -> dict[str, Case]:
    """Return every model type of transformers, and every class that its mapping names."""
    cases = {each: Case(each, each) for each in CONFIG_MAPPING}
    homes: dict[str, str] = {}
    for model_type in CONFIG_MAPPING:
        for kind in find_classes(model_type):
            homes.setdefault(kind.__name__, model_type)
    for name in conversion_mapping._build_checkpoint_conversion_mapping():  # no public list
        if name not in cases and name in homes:
            cases[name] = Case(name, homes[name], name)
    return cases


def find_classes(model_type: str) -> list[type[PreTrainedModel]]:
    """Return the model classes that take the configuration of a type.

    A type without a module of models has the classes of another type.
    """
    kind = CONFIG_MAPPING[model_type]
    try:
        module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return [getattr(transformers, name) for name in list_classes(model_type)]
    return [
        each
        for each in vars(module).values()
        if inspect.isclass(each)
        and issubclass(each, PreTrainedModel)
        and each.__module__ == module.__name__
        and getattr(each, "config_class", None) is kind
        and "PreTrainedModel" not in each.__name__
    ]


def _choose_class(case: Case) -> type[PreTrainedModel]:
    """Return the class of a case.

    Raises:
        NotBuiltError: the type has no model of its own.
    """
    kinds = find_classes(case.model_type)
    if case.model_class:
        return next(each for each in kinds if each.__name__ == case.model_class)
    for head in _HEADS_OF_MODELS:
        for each in kinds:
            if each.__name__.endswith(head):
                return each
    if not kinds:
        raise NotBuiltError("transformers has a configuration of this type, but no model class")
    return kinds[-1]


def build(case: Case, seed: int) -> tuple[PreTrainedModel, str]:
    """Return a random model of the smallest recipe that works, and the name of the recipe.

    Raises:
        NotBuiltError: none works; the message says why the smallest does not.
    """
    kind = _choose_class(case)
    reasons = []
    for recipe in RECIPES:
        try:
            configuration = CONFIG_MAPPING[case.model_type]
            told = SETTINGS.get(case.model_type, {})
            config = shrink(configuration, configuration(**told), recipe, told)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(config).parameters())
            if size > LARGEST:
                reasons.append(f"{size:,} elements")
                continue
            torch.manual_seed(seed)
            model = kind(config)
        except Exception as error:  # noqa: BLE001 - a larger recipe may work
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        _randomize(model, seed)
        return model.eval(), recipe.name
    raise NotBuiltError(reasons[0])


def _randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter values of its own: many are initialized with zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator) * 0.02
            value.data.add_(noise.to(value.dtype))


def find_inputs(model: Any) -> dict[str, Any] | str:
    """Return inputs with which the model runs, or the reason why it does not."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    try:
        inputs[model.main_input_name] = _make_input(model, model.main_input_name, generator)
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            inputs["decoder_input_ids"] = _make_input(model, "input_ids", generator)
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False  # a cache wants an attention layer of each kind
        outputs = model.train()(**inputs)  # some models take other inputs in evaluation
        if not any(each.requires_grad for each in iterate_tensors(outputs)):
            return "its output has no gradient"
        model.eval()(**inputs)
    except Exception as error:  # noqa: BLE001 - any reason will do
        return f"{type(error).__name__}: {error}"
    finally:
        model.eval()
    return inputs


def _make_input(model: Any, name: str, generator: torch.Generator) -> Tensor:
    if name == "input_ids":
        return torch.randint(3, VOCABULARY // 2, (1, 12), generator=generator)
    config = model.config
    parts = [config, *(getattr(config, sub, None) for sub in config.sub_configs)]
    if name == "pixel_values":
        owner = next(each for each in parts if getattr(each, "image_size", None))
        size = owner.image_size
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(owner, "num_channels", 3)
        return torch.randn((1, channels, height, width), generator=generator)
    if name == "input_features":
        owner = next(each for each in parts if getattr(each, "num_mel_bins", None))
        return torch.randn((1, owner.num_mel_bins, 128), generator=generator)
    if name == "input_values":
        return torch.randn((1, 8000), generator=generator)
    raise ValueError(f"no inputs named {name} are made here")


def run_forward(model: nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the outputs of the model in evaluation."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield from iterate_tensors(model.eval()(**inputs))


def iterate_tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the floating point tensors of a model's outputs, in order."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from iterate_tensors(each)
    elif isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from iterate_tensors(each)


def _read(config: Any, name: str) -> Any:
    """Return a field of a configuration; None where it varies with the layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - AmbiguousGlobalPerLayerAttributeError of transformers 5
        return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _find_small(name: str, value: int, recipe: Recipe) -> int:
    """Return the small value of a field of a configuration; most fields keep theirs."""
    limits = [(_VOCABULARY, VOCABULARY)]
    limits += _DEPTHS if recipe.layers else ()
    limits += _WIDTHS if recipe.widths else ()
    for pattern, largest in limits:
        if pattern.search(name):
            return min(value, largest)
    divided = any(pattern.search(name) for pattern in (_WIDTH, _INTERMEDIATE, _HEADS))
    if recipe.divisor and divided and value % recipe.divisor == 0:
        return value // recipe.divisor
    return value


_DENSE_THEN_EXPERTS = ["dense", "sparse"] * 20
_SAPIENS = {"upsample_out_channels": [16, 16], "conv_out_channels": [16]}
_DOTS3_VISION = {
    "per_layer_config": {1: {"num_local_experts": EXPERTS}},
    "mlp_layer_types": ["dense"] * 41 + ["sparse"],
}
_RESNET = {  # the default backbone is one of timm
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    }
}
SETTINGS: dict[str, dict[str, Any]] = {  # what a type's models need, and its defaults lack
    "autoformer": {"prediction_length": 4},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "conditional_detr": _RESNET,
    "csm": {"codec_config": {"model_type": "mimi", "upsample_groups": WIDTH}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": _DENSE_THEN_EXPERTS[:12]}},
    "deepseek_ocr2_text": {"mlp_layer_types": _DENSE_THEN_EXPERTS[:12]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dab-detr": _RESNET,
    "detr": _RESNET,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dinov3_vit": {"num_register_tokens": 2},
    "dots3_note": {"vision_config": _DOTS3_VISION},
    "dots3_note_vision_encoder": _DOTS3_VISION,
    "emu3": {
        "vocabulary_map": {"<|extra_200|>": 4, "<image>": 5},
        "vq_config": {"base_channels": 32, "num_res_blocks": 1},
    },
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "florence2": {
        "vision_config": {
            "model_type": "florence_vision",
            "embed_dim": [16, 32, 64, 128],
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4],
        }
    },
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], 1]]},
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "hunyuan_vl": {"text_config": {"head_dim": HEAD_DIM}},
    "hunyuan_vl_text": {"head_dim": HEAD_DIM},
    "informer": {"prediction_length": 4},
    "janus": {"vq_config": {"model_type": "janus_vqgan", "base_channels": 32, "num_res_blocks": 1}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": HEAD_DIM},
    "mobilebert": {"embedding_size": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "nemotron": {"num_key_value_heads": 2},
    "table-transformer": _RESNET,
    "time_series_transformer": {"prediction_length": 4},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": {"num_filters": 4},
        "semantic_tokenizer_encoder_config": {"num_filters": 4},
    },
    "perceiver": {"d_latents": WIDTH, "num_latents": 16, "num_self_attends_per_block": LAYERS},
    "qwen2_5_omni": {"token2wav_config": {"bigvgan_config": {"upsample_initial_channel": 192}}},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "sapiens2": {"head_config": _SAPIENS},
}


def shrink(kind: type, default: Any, recipe: Recipe, told: Mapping[str, Any]) -> Any:
    """Return a configuration of class `kind` like `default`, but small.

    Args:
        kind: the class of the configuration.
        default: what it is without arguments, but for those in `told`.
        recipe: how far it is shrunk.
        told: arguments that the class needs, which are shrunk like the others.
    """
    given: dict[str, Any] = dict(told)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name, one in fields.items():
        value = _read(default, name)
        if hasattr(value, "model_type") and dataclasses.is_dataclass(value):
            given[name] = shrink(type(value), value, recipe, told.get(name, {}))
        elif one.default is None and name not in told:
            continue  # derived from other fields
        elif _is_int(value):
            small = _find_small(name, value, recipe)
            if small != value:
                given[name] = small
    kv_heads, heads = "num_key_value_heads", "num_attention_heads"
    if {kv_heads, heads} <= given.keys() and _read(default, kv_heads) == _read(default, heads):
        given[kv_heads] = given[heads]
    given |= _keep_stages(default, given)
    given |= _move_tokens(fields, default)
    given |= _cut_lists(fields, default, given)
    return kind(**given)


def _move_tokens(fields: dict[str, Any], default: Any) -> dict[str, Any]:
    """Return ids of special tokens that the small vocabulary has, in place of those it lacks."""
    moved: dict[str, Any] = {}
    last = VOCABULARY - 1
    for name in fields:
        value = _read(default, name)
        if _TOKEN.search(name) and _is_int(value) and value >= VOCABULARY:
            moved[name] = last
            last -= 1
    return moved


def _keep_stages(default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return which stages a backbone outputs; its configuration has no field for that."""
    stages = getattr(default, "_out_indices", None)
    return {"out_indices": list(stages)} if stages and "num_hidden_layers" not in given else {}


def _cut_lists(fields: dict[str, Any], default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return lists with an item a layer, or an item a pair of rotated elements, cut to fit."""
    layers = _read(default, "num_hidden_layers")
    new = given.get("num_hidden_layers", layers)
    cut: dict[str, Any] = {}
    for name, one in fields.items():
        value = _read(default, name)
        if not isinstance(value, (list, tuple)) or not _is_int(layers):
            continue
        if one.default is None and name not in given:
            continue
        if len(value) == layers != new:
            cut[name] = type(value)(value[-new:])
    head_dim = given.get("head_dim", HEAD_DIM)
    if "hidden_size" in given and isinstance(rope := _read(default, "rope_parameters"), dict):
        fitted = _fit_rope(rope, head_dim // 2)
        if fitted != rope:
            cut["rope_parameters"] = fitted
    return cut


def _fit_rope(rope: Any, pairs: int) -> Any:
    """Return rope parameters whose sections of several axes add up to the pairs of a small head."""
    if not isinstance(rope, dict):
        return rope
    fitted = {key: _fit_rope(value, pairs) for key, value in rope.items()}
    sections = rope.get("mrope_section")
    if sections and sum(sections) > pairs:
        small = [max(each * pairs // sum(sections), 1) for each in sections]
        fitted["mrope_section"] = [*small[:-1], pairs - sum(small[:-1])]
    return fitted
