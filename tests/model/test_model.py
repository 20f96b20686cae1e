"""Names, shapes and FSDP1 units, against what real FSDP1 makes of the same model."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
import textwrap
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import pytest
import torch
from torch import nn

from reshard.core import dtypes
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts.flat_param import get_alignment, place_members
from reshard.model import Unit, describe, shapes_of
from tests.support.combinations import choose_combinations
from tests.support.process_groups import ranks
from tests.support.programs import run_python

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated, and says so in many ways

CPU = torch.device("cpu")
BF16 = torch.bfloat16


# Real FSDP1, one rank of a process group that moves nothing


@dataclass(frozen=True)
class Flat:
    """What FSDP1 itself says of one flat parameter."""

    prefix: str
    members: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    total: int


def flat(wrapper, prefix):
    flat_param = wrapper._handle.flat_param
    numels = flat_param._numels_with_padding
    starts = accumulate(chain([0], numels))
    padding = flat_param._is_padding_mask
    prefix = ".".join(part for part in prefix.split(".") if part != "_fsdp_wrapped_module")
    return Flat(
        prefix,
        tuple(f"{prefix}.{fqn}".lstrip(".") for fqn in flat_param._fqns),
        tuple(map(tuple, flat_param._shapes)),
        tuple(start for start, pad in zip(starts, padding, strict=False) if not pad),
        sum(numels),
    )


def flats(model):
    """Return the flat parameters of an FSDP1 model, in the order of its optimizer."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    kind = FullyShardedDataParallel
    wrappers = {m: name for name, m in model.named_modules() if isinstance(m, kind) and m._handle}
    if not next(iter(wrappers))._use_orig_params:
        by_flat = {id(m._handle.flat_param): m for m in wrappers}
        order = [by_flat[id(parameter)] for parameter in model.parameters()]
        assert order == list(wrappers)
        assert order == kind.fsdp_modules(model) or len(order) < len(kind.fsdp_modules(model))
    return [flat(m, name) for m, name in wrappers.items()]


def policy_of(root, wrap, kind="function"):
    """Return torch's own policy for our ``--wrap``; ``none`` has none."""
    from torch.distributed.fsdp import wrap as torch_wrap

    if wrap == "none":
        return None
    if wrap.startswith("size="):
        return functools.partial(
            torch_wrap.size_based_auto_wrap_policy, min_num_params=int(wrap.removeprefix("size="))
        )
    names = wrap.split(",")
    present = [base for m in root.modules() for base in type(m).__mro__]
    classes = {next(cls for cls in present if cls.__name__ == name) for name in names}
    if kind == "function":
        return functools.partial(
            torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes
        )
    return torch_wrap.ModuleWrapPolicy(classes)


def wrapped(root, wrap, kind="function", mixed=None, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    return FullyShardedDataParallel(
        root,
        auto_wrap_policy=policy_of(root, wrap, kind),
        mixed_precision=mixed and MixedPrecision(param_dtype=mixed),
        device_id=CPU,
        **options,
    )


def predicted(shapes, *, orig, dtype, mixed, count):
    found = []
    for unit in shapes.units:
        compute = dtype if mixed is None or unit.full_precision else mixed
        aligned_to = get_alignment(dtypes.parse(str(compute))) if orig else 1
        members = [(fqn, shapes.parameters[fqn]) for fqn in unit.members]
        starts, total = place_members(members, aligned_to=aligned_to, ranks=count)
        assert tuple(starts) == unit.members
        extents = tuple(shape for _, shape in members)
        found.append(Flat(unit.prefix, unit.members, extents, tuple(starts.values()), total))
    return found


# Models


def llama(*, tied):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=33,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )


def gpt2():
    from transformers import GPT2Config

    return GPT2Config(
        n_embd=6, n_layer=2, n_head=2, vocab_size=17, n_positions=5, bos_token_id=0, eos_token_id=0
    )


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 5, bias=False)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.inner = Inner()
        self.blocks = nn.ModuleList([nn.Linear(5, 3), Inner(), nn.Identity()])
        self.last = nn.Parameter(torch.ones(1, 7))


class Net(nn.Module):
    """Nested units, a module without parameters, shared parameters, attention and batch norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(7, 13))
        self.outer = nn.ModuleDict({"a": Outer(), "b": Outer()})
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(9)
        self.twin = nn.Linear(5, 3)
        self.twin.weight = self.outer["a"].blocks[0].weight  # across Outer units
        self.outer["b"].blocks[1].scale = self.outer["b"].inner.scale  # inside Outer
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("same_count", self.count)


def build(case):
    import transformers

    if isinstance(case, type):
        return case()
    if isinstance(case, str):
        return transformers.LlamaForCausalLM(llama(tied=case == "tied"))
    return transformers.AutoModelForCausalLM.from_config(case())


CASES = [
    *(("tied", wrap) for wrap in ("LlamaDecoderLayer", "none", "size=1000")),
    *(("untied", wrap) for wrap in ("LlamaMLP,LlamaDecoderLayer", "size=300", "size=1")),
    *((gpt2, wrap) for wrap in ("GPT2Block", "size=200", "none")),
    *((Net, wrap) for wrap in ("Outer,Inner", "Inner", "Outer", "Linear", "ModuleList", "none")),
    *((Net, wrap) for wrap in ("size=40", "size=60", "size=100", "size=290", "size=100000")),
]
SETTINGS = {  # how the parameters are stored, MixedPrecision.param_dtype, ranks, the policy's form
    "fp32": (torch.float32, None, 2, "function"),
    "bf16": (BF16, None, 3, "class"),
    "mixed": (torch.float32, BF16, 4, "function"),
    "mixed-class": (torch.float32, BF16, 1, "class"),
}


@pytest.mark.parametrize(
    ("case", "orig", "setting"),
    choose_combinations(itertools.product(CASES, [False, True], SETTINGS)),
    ids=lambda value: (
        "-".join(getattr(of, "__name__", of) for of in value)
        if isinstance(value, tuple)
        else str(value)
    ),
)
def test_units_and_places_are_those_of_fsdp1(case, orig, setting):
    case, wrap = case
    dtype, mixed, count, kind = SETTINGS[setting]
    with torch.device("meta"):
        shapes = shapes_of(build(case), wrap, mixed_precision=mixed is not None)
    if orig and shared_across(shapes, shapes_of(build(case))):
        return  # no forward of that succeeds
    with ranks(count):
        model = wrapped(build(case).to(dtype), wrap, kind, mixed, use_orig_params=orig)
        assert flats(model) == predicted(shapes, orig=orig, dtype=dtype, mixed=mixed, count=count)


def shared_across(shapes, bare):
    return sum(len(unit.members) for unit in shapes.units) > len(bare.parameters)


# Random trees


class Leaf(nn.Module):
    pass


class Branch(nn.Module):
    pass


def tree(seed, *, modules_shared=False):
    """Return a module tree with parameters anywhere, some of them (or of the modules) shared."""
    luck = random.Random(seed)
    parameters, modules = [], []

    def grow(depth):
        if modules_shared and modules and luck.random() < 0.15:
            return luck.choice(modules)
        if depth == 0 or luck.random() < 0.2:
            made = luck.choice([Leaf, Leaf, lambda: nn.MultiheadAttention(4, 1)])()
        else:
            children = [grow(depth - 1) for _ in range(luck.randint(0, 3))]
            made = luck.choice([Branch, lambda: nn.ModuleList(children), nn.BatchNorm1d])
            made = made(luck.randint(1, 9)) if made is nn.BatchNorm1d else made()
            if isinstance(made, Branch):
                for index, child in enumerate(children):
                    made.add_module(f"c{index}", child)
        for index in range(luck.randint(0, 3) if isinstance(made, (Leaf, Branch)) else 0):
            if not parameters or luck.random() < 0.85:
                shape = [luck.randint(1, 6) for _ in range(luck.randint(1, 3))]
                parameters.append(nn.Parameter(torch.ones(shape)))
            name = f"p{index}"
            made.register_parameter(name, parameters[-1] if luck.random() < 0.8 else None)
            if luck.random() < 0.1:
                made.register_parameter(name, luck.choice(parameters))
        modules.append(made)
        return made

    root = Branch()
    root.first = nn.Parameter(torch.ones(3))
    for index in range(3):
        root.add_module(f"m{index}", grow(3))
    return root


@pytest.mark.parametrize("modules_shared", [False, True])
def test_random_trees_are_divided_as_fsdp1_divides_them(modules_shared):
    compared = several = 0
    for seed in range(60):
        luck = random.Random(-seed)
        root = tree(seed, modules_shared=modules_shared)
        classes = {type(m).__name__ for m in root.modules()} & {"Leaf", "Branch", "ModuleList"}
        wrap = luck.choice([",".join(luck.sample(sorted(classes), 1)), ",".join(sorted(classes))])
        wrap = luck.choice([wrap, f"size={luck.randint(1, 150)}"])
        mixed, orig, count = luck.choice([None, BF16]), luck.random() < 0.5, luck.randint(2, 4)
        try:
            shapes = shapes_of(root, wrap, mixed_precision=mixed is not None)
        except UnsupportedError:
            assert modules_shared
            assert wrap.startswith("size=")
            continue
        if orig and shared_across(shapes, shapes_of(root)):
            continue
        compared += 1
        several += len(shapes.units) > 2
        settings = {"orig": orig, "dtype": torch.float32, "mixed": mixed, "count": count}
        with ranks(count, rank=count - 1):
            kind = "class" if modules_shared else luck.choice(["class", "function"])
            model = wrapped(root, wrap, kind, mixed, use_orig_params=orig)
            assert flats(model) == predicted(shapes, **settings), (seed, wrap)
    assert compared > 40
    assert several > 20


# What FSDP1 does with a parameter of two units


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


def test_what_two_units_share_is_two_parameters():
    """It trains as two, and with ``use_orig_params`` no forward succeeds."""
    shapes = shapes_of(Tied(), "Linear")
    assert shapes.units == (
        Unit("", ("embed.weight",)),
        Unit("layer", ("layer.weight", "layer.bias")),
        Unit("head", ("head.weight",)),
    )
    assert list(shapes.parameters) == ["embed.weight", "layer.weight", "layer.bias", "head.weight"]
    assert shapes.tied == {}
    assert (
        shapes_of(Tied()).tied == shapes_of(Tied(), "none").tied == {"head.weight": "embed.weight"}
    )


def test_a_frozen_parameter_beside_a_trained_one_is_a_member_too():
    """With ``use_orig_params``: without it FSDP 1 refuses them."""
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    units = shapes_of(model, "none").units
    with ranks(2):
        [found] = flats(wrapped(model, "none", use_orig_params=True))
    assert found.members == units[0].members


def test_what_fsdp1_flattens_otherwise_is_refused():
    with pytest.raises(UnsupportedError, match="in memory order"):
        shapes_of(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), "none")
    scalar = nn.Module()
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    assert shapes_of(scalar).parameters == {"temperature": ()}
    with pytest.raises(UsageError, match="is a scalar, which FSDP 1 does not support"):
        shapes_of(scalar, "none")
    with ranks(2), pytest.raises(ValueError, match="doesn't support scalar"):
        wrapped(scalar, "none")


# Names and shapes


def test_shared_names_and_unsaved_buffers():
    shapes = shapes_of(Net())
    assert shapes.units == ()
    assert list(shapes.parameters) == [name for name, _ in Net().named_parameters()]
    assert shapes.tied == {
        "outer.b.blocks.1.scale": "outer.b.inner.scale",
        "twin.weight": "outer.a.blocks.0.weight",
        "same_count": "count",
    }
    names = {*shapes.parameters, *shapes.buffers, *shapes.tied}
    assert names == set(Net().state_dict())
    assert shapes.buffers["count"] == ()
    assert "outer.a.inner.scratch" not in names


def write_config(path, config):
    path.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else config.to_json_string(use_diff=False)
    (path / "config.json").write_text(text)
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_config(tmp_path, tied):
    place = write_config(tmp_path, llama(tied=tied))
    shapes = describe(str(place / "config.json"), "LlamaDecoderLayer")
    assert shapes.source.endswith("config.json (LlamaForCausalLM)")
    expected = build("tied" if tied else "untied")
    assert shapes.parameters == {n: tuple(p.shape) for n, p in expected.named_parameters()}
    assert list(shapes.parameters) == [name for name, _ in expected.named_parameters()]
    assert shapes.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert shapes.buffers == {}  # inv_freq is not saved
    assert [u.prefix for u in shapes.units] == ["", "model.layers.0", "model.layers.1"]
    assert shapes == describe(str(place / "config.json"), " LlamaDecoderLayer ")
    assert describe(str(place)).units == ()


@pytest.mark.parametrize("architectures", [None, ["NoSuchModel"], ["AutoConfig"], ["pipeline"]])
def test_a_config_without_a_known_class_is_a_causal_language_model(tmp_path, architectures):
    config = gpt2()
    config.architectures = architectures
    assert describe(str(write_config(tmp_path, config))).source.endswith("(GPT2LMHeadModel)")


def test_and_where_there_is_none_the_bare_model(tmp_path):
    from transformers import CLIPVisionConfig

    config = CLIPVisionConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert describe(str(write_config(tmp_path, config))).source.endswith("(CLIPVisionModel)")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot read it"),
        ("[]", "cannot read it"),
        ("{}", "cannot read it"),
        # transformers names the check in the first line, and what is wrong in the second
        (
            '{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 4}',
            r"hidden size \(33\)",
        ),
        ('{"model_type": "nope"}', "model type `nope`"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json"),
        ('{"model_type": "llama", "hidden_size": -4}', "config.json"),
        (json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "evil.C"}}), "custom code"),
    ],
)
def test_a_config_that_is_none(tmp_path, text, problem):
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(UsageError, match=problem):
        describe(str(write_config(tmp_path, text)))


FACTORIES = """
import torch
from torch import nn
import helper_beside_it

class Block(nn.Sequential):
    pass

def make():
    assert torch.ones(1).is_meta
    return nn.Sequential(Block(nn.Linear(2, 3)), nn.Linear(3, 1))

def number():
    return 7

def broken():
    raise RuntimeError("no data here")
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "make_it.py").write_text(textwrap.dedent(FACTORIES))
    (tmp_path / "helper_beside_it.py").write_text("")
    (tmp_path / "not_python.py").write_text("def (")
    monkeypatch.chdir(tmp_path)


def test_a_factory_of_the_user(code):
    before = list(sys.path)
    shapes = describe("make_it:make", "Block")
    assert shapes.source == "make_it:make (Sequential)"
    assert shapes.parameters == {
        "0.0.weight": (3, 2),
        "0.0.bias": (3,),
        "1.weight": (1, 3),
        "1.bias": (1,),
    }
    assert shapes.units == (Unit("", ("1.weight", "1.bias")), Unit("0", ("0.0.weight", "0.0.bias")))
    assert sys.path == before


DRAWN = """
import sys
import torch
from torch import nn

def make():
    model = nn.TransformerEncoderLayer(8, 2)
    model.words = nn.Embedding(4, 8)
    nn.init.normal_(tensor=model.words.weight)
    nn.init.trunc_normal_(model.words.weight)
    model.here = nn.Parameter(torch.zeros(3, device="cpu").uniform_(1, 2))
    return model

if __name__ == "__main__":
    from reshard.model.build import build
    model = build("drawn:make")
    assert model.words.weight.is_meta
    assert model.here.min() >= 1
    print("torch._dynamo" in sys.modules)
"""


def test_first_values_are_not_drawn(tmp_path):
    (tmp_path / "drawn.py").write_text(DRAWN)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run_python("drawn.py", cwd=tmp_path, env=env)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("make_it:missing", "cannot be imported"),
        ("no_such_module_here:make", "cannot be imported"),
        ("not_python:make", "cannot be imported: SyntaxError"),
        ("make_it:number", "returned a int"),
        ("make_it:broken", "no data here"),
        ("make_it:Block.forward", "raised TypeError"),
        ("meta-llama/Llama-2-7b", "is not a file, a directory"),
        ("", "the path is empty"),
        (".", "contains no config.json"),
        ("make_it.py", "cannot read it"),
    ],
)
def test_a_model_that_is_none(code, model, problem):
    with pytest.raises(UsageError, match=problem):
        describe(model)


@pytest.mark.parametrize(
    "wrap",
    ["", ",", "A,", "size", "size=", "size=x", "size=-1", "size=0", "size=1e999", "a b", "a.B"],
)
def test_a_way_to_wrap_that_is_none(wrap):
    with pytest.raises(UsageError, match="--wrap"):
        shapes_of(Net(), wrap)


def test_a_base_class_counts_for_its_subclasses_and_sizes_have_units():
    assert shapes_of(Net(), "size=0.1K").units == shapes_of(Net(), "size=1e2").units
    assert shapes_of(Net(), "_BatchNorm").units[1].prefix == "norm"
    assert (
        shapes_of(Net(), "Linear").units
        == shapes_of(Net(), "NonDynamicallyQuantizableLinear,Linear").units
    )


def test_members_without_elements_take_no_place():
    members = [("a", (3,)), ("b", ()), ("c", (0, 4)), ("d", (2, 2))]
    assert place_members(members, aligned_to=1, ranks=3) == ({"a": 0, "b": 3, "c": 4, "d": 4}, 8)
    assert place_members(members, aligned_to=2, ranks=3) == ({"a": 0, "b": 4, "c": 6, "d": 6}, 12)
    assert place_members([], aligned_to=4, ranks=3) == ({}, 0)
