"""Plans of tensor parallelism: patterns, styles, and what contradicts itself."""

from __future__ import annotations

import json

import pytest

from reshard import model as models
from reshard.errors import UnsupportedError, UsageError
from reshard.layouts import tensor_parallel
from reshard.layouts.partition import Cut
from reshard.layouts.tensor_parallel import TensorPlan, find_cuts

LAYER = {
    "layers.0.up.weight": (6, 4),
    "layers.0.up.bias": (6,),
    "layers.0.down.weight": (4, 6),
    "layers.0.down.bias": (4,),
    "layers.0.norm.weight": (4,),
}


def cut(styles, shapes, **told):
    plan = TensorPlan("plan", styles, **told)
    return find_cuts(plan, [((name,), shape) for name, shape in shapes.items()])


def test_a_linear_is_cut_as_torch_cuts_it():
    styles = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    assert cut(styles, LAYER) == {
        "layers.0.up.weight": Cut(0),
        "layers.0.up.bias": Cut(0),
        "layers.0.down.weight": Cut(1),
        "layers.0.down.bias": None,
    }


def test_an_embedding_is_cut_across():
    held = {"tok.weight": (10, 4)}
    for style, dim in {"colwise": 1, "rowwise": 0, 1: 1}.items():
        assert cut({"tok": style}, held, embeddings=frozenset(held)) == {"tok.weight": Cut(dim)}
    assert cut({"tok": "colwise"}, held, embeddings=frozenset()) == {"tok.weight": Cut(0)}


def test_a_parameter_that_is_named_itself_goes_before_its_module():
    styles = {"layers.0.up": "colwise", "*.*.up.bias": "replicate"}
    assert cut(styles, LAYER) == {"layers.0.up.weight": Cut(0), "layers.0.up.bias": None}


def test_wildcards_are_of_one_part():
    assert cut({"layers.?.up": 1}, {"layers.0.up.weight": (6, 4)}) != {}
    with pytest.raises(UsageError, match=r"'layers.\*' matches no parameter"):
        cut({"layers.*": "colwise"}, LAYER, from_user=True)
    with pytest.raises(UsageError, match=r"'layers.\*.UP' matches no parameter"):
        cut({"layers.*.UP": "colwise"}, LAYER)


def test_the_names_of_one_tensor_are_cut_alike():
    tied = [(("embed.weight", "head.weight"), (10, 4))]
    known = frozenset({"embed.weight"})
    good = TensorPlan("plan", {"embed": "rowwise", "head": "colwise"}, known)
    assert find_cuts(good, tied) == {"embed.weight": Cut(0)}
    for styles in ({"embed": "colwise", "head": "colwise"}, {"head": "colwise"}):
        with pytest.raises(UsageError, match="are one tensor, but have different cuts"):
            find_cuts(TensorPlan("plan", styles, known), tied)


@pytest.mark.parametrize(
    ("styles", "error", "text"),
    [
        ({"layers.*.up": "colwise", "*.0.up": "rowwise"}, UsageError, "has several styles"),
        ({"layers.0.norm": "rowwise"}, UsageError, "the style rowwise of a Linear"),
        ({"layers.0.up": 1}, UsageError, "cuts dim 1 of 'layers.0.up.bias'"),
        ({"layers.0.up": "packed_colwise"}, UnsupportedError, "several blocks"),
        ({"layers.0.up": "unheard_of"}, UnsupportedError, "unheard_of"),
    ],
)
def test_what_does_not_fit_is_refused(styles, error, text):
    with pytest.raises(error, match=text):
        cut(styles, LAYER)


def test_what_may_be_an_embedding_is_not_guessed():
    for name in ("embed_tokens", "tok_embeddings", "wte"):
        with pytest.raises(UsageError, match="may be an Embedding"):
            cut({name: "colwise"}, {f"{name}.weight": (10, 4)})
        assert cut({name: 0}, {f"{name}.weight": (10, 4)}) == {f"{name}.weight": Cut(0)}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "3", '{"a": "sideways"}', '{"a": -1}', '{"a": true}', '{"a": null}']
)
def test_a_file_that_is_no_plan_is_refused(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json"):
        tensor_parallel.read(path)


def test_a_file_is_the_users_word(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layers.*.up": "colwise", "layers.*.down": 1}))
    plan = tensor_parallel.read(path)
    assert (plan.styles, plan.from_user) == ({"layers.*.up": "colwise", "layers.*.down": 1}, True)


def test_a_models_plan_is_transformers_own():
    llama = models.describe("tests.judges.torch_models:menagerie_tied")
    plan = tensor_parallel.get_declared_plan(llama)
    assert plan.styles["llama.model.layers.*.self_attn.o_proj"] == "rowwise"
    assert plan.styles["llama.lm_head"] == "colwise"
    assert "llama.model.embed_tokens.weight" in plan.embeddings
    names = ("llama.model.embed_tokens.weight", "llama.lm_head.weight")
    assert find_cuts(plan, [(names, (64, 32))]) == {names[0]: Cut(0)}
    with pytest.raises(UsageError, match="has no tensor-parallel plan"):
        tensor_parallel.get_declared_plan(models.describe("tests.judges.torch_models:mlp"))


def test_every_style_of_transformers_is_known():
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    styles = {name for name in ALL_PARALLEL_STYLES if not name.startswith("packed_")}
    experts = styles - tensor_parallel._TRANSFORMERS.keys()
    assert experts <= {"ep_dispatch_experts", "grouped_gemm", "ep_router"}
    assert tensor_parallel._TRANSFORMERS.keys() <= styles
