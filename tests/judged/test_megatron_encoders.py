"""BERT and T5 of Megatron-core, over two tensor-parallel ranks with a distributed optimizer."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import reshard
from reshard.errors import UnsupportedError
from tests.judges import megatron_encoders as judge
from tests.judges.megatron_cases import Grid

pytestmark = pytest.mark.skipif(not find_spec("megatron"), reason="needs Megatron-core")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the directory of both models' checkpoints."""
    out = tmp_path_factory.mktemp("encoders")
    judge.make_all(out)
    return out


def join(place):
    """Return name -> kind -> whole tensor, of what two ranks hold."""
    first, second = (torch.load(place / f"rank{rank}.pt") for rank in (0, 1))
    joined = {}
    for name, held in first.items():
        dim = held.pop("dim")
        joined[name] = {
            kind: value if dim is None else torch.cat([value, second[name][kind]], dim)
            for kind, value in held.items()
        }
    return joined


@pytest.mark.parametrize("form", judge.FORMS)
@pytest.mark.parametrize("name", judge.CASES)
def test_every_value_is_that_of_its_parameter(name, form, made):
    wanted = join(made / name)
    with reshard.open(made / name / form) as found:
        assert found.manifest.warnings == ()
        slots = {kind: found.optimizer(kind) for kind in ("master", "exp_avg")}
        assert set(slots["exp_avg"]) == set(wanted)
        for fqn, values in wanted.items():
            for kind, held in (("master", found), *slots.items()):
                assert torch.equal(torch.as_tensor(held[fqn][...]), values[kind]), (fqn, kind)
    second = {"output_layer.weight": "embedding.word_embeddings.weight"}
    if name == "t5":
        second["position_embeddings.weight"] = "embedding.position_embeddings.weight"
        second["output_layer.bias"] = "lm_head.output_layer.bias"
    assert found.manifest.tied == second


def test_megatron_loads_bert_that_was_cut_for_another_grid(made, tmp_path):
    cases = {}
    for form in judge.FORMS:
        reshard.split(made / "bert" / "torch", tmp_path / form, tp=1, ckpt_format=form)
        cases[form] = replace(
            judge.CASES["bert"], grid=Grid(), start=str(tmp_path / form), form=form
        )
    judge.load_all(tmp_path / "loaded", cases)
    wanted = join(made / "bert")
    for form in judge.FORMS:
        held = torch.load(tmp_path / "loaded" / form / "rank0.pt")
        for fqn, values in wanted.items():
            assert all(torch.equal(held[fqn][kind], values[kind]) for kind in values), fqn


def test_t5_is_written_to_other_targets_only(made, tmp_path):
    with pytest.raises(UnsupportedError, match="does not write one") as caught:
        reshard.split(made / "t5" / "torch", tmp_path / "tp1", tp=1)
    assert "--to dcp --names source" in caught.value.remedy
    reshard.split(made / "t5" / "torch", tmp_path / "dcp", to="dcp", names="source")
    with reshard.open(tmp_path / "dcp") as found:
        assert set(found.optimizer("exp_avg")) == set(join(made / "t5"))
