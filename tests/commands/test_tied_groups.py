"""Param groups of tied weights that the source has frozen."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import reshard
from reshard.errors import UsageError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(params=[True, False], ids=["shared", "copied"])
def source(request, tmp_path):
    """Save a model whose tied embedding is frozen, with one storage or two."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(6, 4)
    model.model.norm = nn.LayerNorm(4)
    model.lm_head = nn.Linear(4, 6, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.weight.requires_grad = False
    optimizer = torch.optim.AdamW(model.model.norm.parameters())
    model.model.norm(torch.ones(4)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    if not request.param:
        state = {name: value.clone() for name, value in state.items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


@pytest.fixture
def split(source, tmp_path):
    def run(*groups):
        (tmp_path / "groups.json").write_text(json.dumps(groups))
        return reshard.split(
            source, tmp_path / "out", to="dcp", param_groups=tmp_path / "groups.json"
        )

    return run


@pytest.mark.parametrize("key", ["match", "fqns"])
def test_tied_weights_are_thawed_as_one_parameter(key, split, tmp_path):
    report = split({key: [EMBEDDING, HEAD], "frozen": False}, {})
    with reshard.open(tmp_path / "out") as checkpoint:
        thawed, rest = (group.fqns for group in checkpoint.manifest.train.param_groups)
        assert {*checkpoint.optimizer("exp_avg")} == {*thawed, *rest}
        assert torch.equal(checkpoint[HEAD][...], checkpoint[EMBEDDING][...])
    assert "weights     3 and 1 tied name" in report.lines()  # len(reshard.open(source)) is 4
    assert "tied_names" not in report.to_dict()
    assert thawed == (EMBEDDING,)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "head"}], f"'{HEAD}' is tied to '{EMBEDDING}': match this name"),
        ([{"match": "embed"}, {"fqns": [HEAD]}], f"the weight that '{HEAD}' is tied to"),
    ],
)
def test_the_other_name_is_named_where_groups_are_refused(groups, message, split):
    with pytest.raises(UsageError) as caught:
        split(*({**group, "frozen": False} for group in groups), {})
    assert message in str(caught.value)
