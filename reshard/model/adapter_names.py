"""The names of an adapter's tensors: in the trained model, and in PEFT's own file.

In the model they contain the adapter's name, ``q_proj.lora_A.default.weight``; in the file they do
not. Source of both forms: PEFT 0.21 ``utils/save_and_load.py`` (get_peft_model_state_dict),
``tuners/tuners_utils.py`` (BaseTuner, BasePromptEncoder) and ``tuners/*/model.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from reshard.units import abridge, counted

ROOT = "base_model.model."  # prefix of the adapted model in a PeftModel
VERL = "lora_adapter"  # the folder of verl's copy of the adapter that its files of ranks have
DEFAULT = "default"  # PEFT's name for an adapter without one
SAVED_MODULE = "modules_to_save"
TOKENS = "trainable_tokens_delta"
MAGNITUDE = "lora_magnitude_vector"
IN, OUT = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")
START_AT_ZERO = ("lora_B", "lora_embedding_A")  # LoraLayer.reset_lora_parameters
LORA = "LORA"
ADALORA = "ADALORA"
SINGULAR = "lora_E"  # AdaLoRA's singular values
TRAINED_TOKENS = "TRAINABLE_TOKENS"
PROMPTS = "prompt_encoder"
METHODS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    LORA: (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"), (MAGNITUDE,)),
    ADALORA: (("lora_A", "lora_B", SINGULAR),),
    "BOFT": (("boft_R", "boft_s"),),
    "C3A": (("c3a_kernel",),),
    "FOURIERFT": (("fourierft_spectrum",),),
    "HRA": (("hra_u",),),
    "IA3": (("ia3_l",),),
    "LOHA": (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), ("hada_t1", "hada_t2")),
    "LOKR": (
        ("lokr_w1",),
        ("lokr_w1_a", "lokr_w1_b"),
        ("lokr_w2",),
        ("lokr_w2_a", "lokr_w2_b"),
        ("lokr_t2",),
    ),
    "MISS": (("miss_block",),),
    "OFT": (("oft_R",),),
    "PREFIX_TUNING": ((PROMPTS,),),
    "PROMPT_TUNING": ((PROMPTS,),),
    "ROAD": (("road_theta", "road_alpha"),),
    TRAINED_TOKENS: (),  # rows of embeddings alone, as those beside LoRA
    "VERA": (("vera_lambda_b", "vera_lambda_d"),),
}
"""peft_type -> names of the tensors of an adapted layer, in the layer's order. A layer has all
tensors of a group or none.
"""
SHARED = ("vera_A", "vera_B")  # buffers of all layers, which PEFT saves once
TRAINED = tuple(
    dict.fromkeys(role for method in METHODS.values() for group in method for role in group)
)
NOT_OF_PEFT = "have the names of LitGPT and loralib, which PEFT does not load"
MERGE_LORALIB = "merge the adapter with the library that trained it first (litgpt merge_lora DIR)"
SAVE_UNSAVED = (
    "save again with FSDP 2 (fsdp_version 2) or PEFT 0.20: PEFT 0.21 saves no weights of adapted"
    " layers under FSDP 1"
)
_ROLES = frozenset((*TRAINED, *SHARED, SAVED_MODULE, TOKENS))
_LEAVES = ("weight", "bias")
_PROMPTS_SAVED_AS = "prompt_embeddings"  # PEFT 0.21 ``BasePromptEncoder._get_adapter_state_dict``
_SHARED_LAYER = "base_model"
EMBEDDINGS = ("embed_tokens", "lm_head")  # utils/constants.py


class AdapterPart(NamedTuple):
    """A tensor of an adapter.

    Args:
        layer: the module that is adapted, or saved with the adapter.
        role: a name in `METHODS` or `SHARED`, ``modules_to_save`` or ``trainable_tokens_delta``.
        adapter: name of the adapter; empty in PEFT's file.
        saved_as: name of the tensor in PEFT's file.
    """

    fqn: str
    layer: str
    role: str
    adapter: str
    saved_as: str


def parse_part(fqn: str) -> AdapterPart | None:
    """Parse the name of an adapter's tensor; None if it is not a name that PEFT gives.

    >>> parse_part("h.q_proj.lora_A.default.weight").saved_as
    'base_model.model.h.q_proj.lora_A.weight'
    >>> parse_part("base_model.model.head.modules_to_save.default.weight").saved_as
    'base_model.model.head.weight'
    >>> parse_part("prompt_encoder.default.embedding.weight").saved_as
    'prompt_embeddings'
    """
    path = add_root(fqn).split(".")
    if path[-1] == _PROMPTS_SAVED_AS:
        return AdapterPart(fqn, "", PROMPTS, "", _PROMPTS_SAVED_AS)
    if path[-4:-3] == [PROMPTS] and path[-2:] == ["embedding", "weight"]:
        return AdapterPart(fqn, "", PROMPTS, path[-3], _PROMPTS_SAVED_AS)
    for at in reversed(range(1, len(path))):
        role = path[at]
        if role not in _ROLES or role == PROMPTS:
            continue
        layer, rest = ".".join(path[:at]), path[at + 1 :]
        if role == SAVED_MODULE and len(rest) > 1:
            return AdapterPart(fqn, layer, role, rest[0], ".".join([layer, *rest[1:]]))
        if role != SAVED_MODULE:
            leaf = rest.pop() if rest and rest[-1] in _LEAVES else ""
            if len(rest) > 1:
                return None
            # PEFT's files use the older name of a magnitude, from before it became a module.
            tail = [leaf] if leaf and role != MAGNITUDE else []
            if role in SHARED:
                layer = _SHARED_LAYER
            saved_as = ".".join([layer, role, *tail])
            return AdapterPart(fqn, layer, role, rest[0] if rest else "", saved_as)
    return None


def find_parts(fqns: Iterable[str]) -> list[AdapterPart]:
    """Return the tensors that belong to adapters."""
    return [part for fqn in fqns if (part := parse_part(fqn))]


def find_saved_names(fqns: Iterable[str]) -> dict[str, str]:
    """Return name in the model -> name in PEFT's file, if all weights are those of one adapter.

    >>> find_saved_names(["base_model.model.q.lora_A.default.weight"]).popitem()[1]
    'base_model.model.q.lora_A.weight'
    >>> find_saved_names(["base_model.model.q.lora_A.default.weight", "base_model.model.q.weight"])
    {}
    """
    fqns = list(fqns)
    parts = find_parts(fqns)
    is_adapter = len(parts) == len(fqns) and len({part.adapter for part in parts}) == 1
    return {part.fqn: part.saved_as for part in parts} if is_adapter else {}


def name_in_model(saved: str, adapter: str, modules: Sequence[str] = ()) -> str:
    """Return the name in the model of a tensor of PEFT's file.

    Args:
        modules: ``modules_to_save`` of the adapter's configuration. PEFT compares them with the end
            of a module's name (``utils/other.py``, ``_set_trainable``).

    >>> name_in_model("base_model.model.q.lora_A.weight", "default")
    'base_model.model.q.lora_A.default.weight'
    >>> name_in_model("base_model.model.head.weight", "polite", ["head"])
    'base_model.model.head.modules_to_save.polite.weight'
    """
    part = parse_part(saved)
    if part is None:
        path = saved.split(".")
        layers = (".".join(path[:at]) for at in range(1, len(path)))
        layer = next((layer for layer in layers if layer.endswith(tuple(modules))), None)
        if layer is None or ".base_layer." in saved:
            return saved
        return f"{layer}.{SAVED_MODULE}.{adapter}{saved.removeprefix(layer)}"
    if part.adapter or part.role == SAVED_MODULE:
        return saved
    if part.role == PROMPTS:
        return f"{PROMPTS}.{adapter}.embedding.weight"
    head = f"{part.layer}.{part.role}"
    # Since PEFT 0.10, a magnitude is a module.
    tail = ".weight" if part.role == MAGNITUDE else part.saved_as.removeprefix(head)
    return f"{head}.{adapter}{tail}"


def rename_from_diffusers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of diffusers' file of LoRA weights with their names in the model.

    The component of the pipeline (``unet``) stays in the names if there are several. Source:
    diffusers 0.42 ``loaders/lora_base.py`` (``pack_weights``), ``utils/state_dict_utils.py``.

    >>> rename_from_diffusers({"unet.to_q.lora.down.weight": 0})
    {'to_q.lora_A.default.weight': 0}
    """
    components = {name.partition(".")[0] for name in saved}
    prefix = f"{components.pop()}." if len(components) == 1 else ""
    roles = {".lora.down.": ".lora_A.", ".lora.up.": ".lora_B."}
    renamed = {}
    for name, value in saved.items():
        own = name.removeprefix(prefix)
        for role, of_peft in roles.items():
            own = own.replace(role, of_peft)
        renamed[strip_root(name_in_model(own, DEFAULT))] = value
    return renamed


def find_trained_names(saved: Iterable[str], trained: Iterable[str]) -> dict[str, str]:
    """Return name in PEFT's file -> name in the model, for weights that an optimizer trains.

    HF Trainer saves an adapter's weights under FSDP 2 without the adapter's name, and the optimizer
    with it. Source: Accelerate 1.15 ``utils/fsdp_utils.py`` (``adapter_only``). The result is empty
    unless every weight that is missing among the saved names has a saved name of its own.

    >>> find_trained_names(["base_model.model.q.lora_A.weight"], ["q.lora_A.default.weight"])
    {'base_model.model.q.lora_A.weight': 'q.lora_A.default.weight'}
    """
    saved = set(saved)
    parts = [parse_part(fqn) for fqn in trained if fqn not in saved]
    names = {part.saved_as: part.fqn for part in parts if part and part.adapter}
    is_complete = len(names) == len(parts) and names.keys() <= saved
    return names if is_complete else {}


def find_unsaved(trained: Iterable[str], saved: Collection[str]) -> list[str]:
    """Return the weights of adapters that an optimizer trains and that were not saved.

    >>> find_unsaved(["q.lora_A.default.weight"], ["base_model.model.q.lora_A.weight"])
    []
    >>> find_unsaved(["q.lora_A.default.weight"], ["embed_tokens.weight"])
    ['q.lora_A.default.weight']
    """
    known = {add_root(fqn) for fqn in saved}
    parts = find_parts(fqn for fqn in trained if add_root(fqn) not in known)
    return [part.fqn for part in parts if part.role in TRAINED and part.saved_as not in known]


def explain_separate(fqns: Sequence[str], source: str, output: str) -> list[str]:
    """Return the note that adapters are written separately, not added to the weights.

    Args:
        source, output: the paths for the commands that add or write an adapter.

    >>> explain_separate(["base_model.model.q.lora_A.weight"], "run", "out")[0].partition(";")[0]
    'this is an adapter alone, 1 adapter tensor without the model that it adapts'
    """
    parts = find_parts(fqns)
    own = [part for part in parts if part.role in TRAINED]
    if not own:
        return []
    if is_of_loralib(own):
        count = counted(len(own), "LoRA tensor")
        return [f"{count} ({abridge([part.fqn for part in own])}) {NOT_OF_PEFT}: {MERGE_LORALIB}"]
    adapters = list(dict.fromkeys(part.adapter or DEFAULT for part in parts))
    kind = "LoRA tensor" if find_methods(own) == [LORA] else "adapter tensor"
    if len(parts) == len(fqns):
        command = f"reshard merge {source} {output}"
        text = (
            f"this is an adapter alone, {counted(len(own), kind)} without the model that it adapts;"
            f" for the whole model: {command} --merge-lora BASE; for PeftModel.from_pretrained:"
            f" {command} --adapter {adapters[0]}"
        )
        return [text]
    text = (
        f"{counted(len(own), kind)} ({abridge([part.fqn for part in own])}) written under"
        " PEFT's names, not added to the adapted weights. Pass --merge-lora BASE to add an adapter"
        f" to its base model, or --adapter {' or '.join(adapters)} to write one for"
        " PeftModel.from_pretrained"
    )
    return [text]


def is_of_loralib(parts: Sequence[AdapterPart]) -> bool:
    """Return whether the tensors are LoRA's, but parameters of the layer as in loralib and LitGPT.

    PEFT's are weights of modules; AdaLoRA's are parameters, too, but have singular values.

    >>> is_of_loralib(find_parts(["h.attn.lora_A", "h.attn.lora_B"]))
    True
    >>> is_of_loralib(find_parts(["h.attn.lora_A.weight", "h.attn.lora_B.weight"]))
    False
    """
    matrices = [part for part in parts if part.role in METHODS[LORA][0]]
    are_parameters = all(matrix.fqn.endswith(f".{matrix.role}") for matrix in matrices)
    return bool(matrices) and are_parameters and find_methods(parts) == [LORA]


def find_methods(parts: Iterable[AdapterPart]) -> list[str]:
    """Return the PEFT methods that have all the roles of these tensors.

    If the tensors are complete for some of these methods, the others are left out: AdaLoRA needs
    singular values, which LoRA does not have.
    """
    roles = {part.role for part in parts} & {*TRAINED}
    fitting = [name for name in METHODS if roles <= {*chain.from_iterable(METHODS[name])}]
    complete = [
        name
        for name in fitting
        if all(roles.isdisjoint(group) or roles >= {*group} for group in METHODS[name])
    ]
    return complete or fitting


def find_unknown(fqns: Iterable[str]) -> list[str]:
    """Return the names that PEFT gives to tensors of an adapter and that are not known here.

    They begin with ``lora_``, or belong to an encoder that computes the prompts.
    """
    return [
        fqn
        for fqn in fqns
        if any(word.startswith(("lora_", PROMPTS)) for word in fqn.split("."))
        and parse_part(fqn) is None
    ]


def is_adapted(fqn: str) -> bool:
    """Return whether a tensor belongs to a model that PEFT wrapped.

    >>> is_adapted("base_model.model.norm.weight"), is_adapted("q.base_layer.weight")
    (True, True)
    """
    return f".{ROOT}" in f".{fqn}" or ".base_layer." in fqn


def add_root(fqn: str) -> str:
    """Return a name as in a PeftModel: it begins with `ROOT`, before which wrappers are removed.

    >>> add_root("model.base_model.model.norm.weight"), add_root("norm.weight")
    ('base_model.model.norm.weight', 'base_model.model.norm.weight')
    """
    at = f".{fqn}".find(f".{ROOT}")
    return fqn[at:] if at >= 0 else ROOT + fqn


def strip_root(layer: str) -> str:
    """Return a layer's name in the model that is adapted."""
    return layer.removeprefix(ROOT).removesuffix(".base_layer")


def choose_saved(
    fqns: Iterable[str], parts: Iterable[AdapterPart], name: str, config: Mapping[str, Any]
) -> dict[str, str]:
    """Return fqn -> name in PEFT's file, for every tensor that PEFT saves with an adapter.

    Args:
        fqns: names of all weights, with the aliases of tied ones.
        parts: the parts among them (`find_parts`).
        name: the adapter's name; empty if the source is PEFT's own file, which is saved whole.
    """
    by_name = {part.fqn: part for part in parts}
    if not name:
        return {fqn: by_name[fqn].saved_as if fqn in by_name else add_root(fqn) for fqn in fqns}
    is_saved = _build_base_filter(by_name.values(), config)
    chosen = {}
    for fqn in fqns:
        if fqn not in by_name and is_saved(add_root(fqn)):
            chosen[fqn] = add_root(fqn)
        elif fqn in by_name and by_name[fqn].adapter == name:
            saved_as = by_name[fqn].saved_as
            # Every layer has the shared tensors again.
            if by_name[fqn].role not in SHARED or saved_as not in chosen.values():
                chosen[fqn] = saved_as
    return chosen


def _build_base_filter(
    parts: Iterable[AdapterPart], config: Mapping[str, Any]
) -> Callable[[str], bool]:
    layers = {part.layer for part in parts if part.role in TRAINED}
    targets, bias = config.get("target_modules"), config.get("bias") or "none"
    embeds = isinstance(targets, str) or not set(EMBEDDINGS).isdisjoint(targets or ())
    if config.get("trainable_token_indices") is not None:
        embeds = False
    embeddings = [layer for layer in layers if embeds and layer.rpartition(".")[2] in EMBEDDINGS]
    prefixes = tuple(f"{embedding}.base_layer." for embedding in embeddings)

    def is_saved(fqn: str) -> bool:
        owner = fqn.removesuffix(".base_layer.bias")
        return (
            (bias == "all" and fqn.endswith(".bias"))
            or (bias.endswith("_only") and owner != fqn and owner in layers)
            or fqn.startswith(prefixes)
        )

    return is_saved
