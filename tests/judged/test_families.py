"""Families of models between Hugging Face and Megatron, proved by `reshard.testing.megatron`."""

from __future__ import annotations

import pytest

from reshard.testing.megatron import proof as families

pytestmark = pytest.mark.slow

PROVED = (
    families.HYBRID["nemotron_h"],
    "deepseek_v3",
    "glm4_moe",
    "qwen2",
    "phi3",
    "smollm3",
    "ernie4_5",
    "gpt_oss",
)


@pytest.fixture(scope="module")
def proofs(tmp_path_factory):
    """The proof of every family, by its name."""
    dense, sparse = (families.Ranks(tp=2, pp=2),), families.SPARSE[-2:]
    found = families.prove(PROVED, tmp_path_factory.mktemp("families"), dense, sparse)
    return {proof.name: proof for proof in found}


@pytest.mark.parametrize("name", PROVED)
def test_a_family_goes_to_megatron_and_back(proofs, name):
    assert proofs[name].problems == []
    assert proofs[name].refused == {}
    assert proofs[name].verdict == families.PROVED
