"""A Megatron run goes on in other engines, with transformers' model of the config derived here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import reshard
from tests.judged.expected import read_expected
from tests.judges.megatron_cases import STEPS
from tests.judges.megatron_data import SAMPLES
from tests.judges.server import DEEPSPEED, Judge
from tests.support.combinations import choose_combinations

pytestmark = pytest.mark.slow

EXACT = 1e-5  # in float32 engines differ in the order of sums
LLAMA, SHARDED, EXPERTS = "llama_tp2pp2", "llama_fp32_distopt_pp2dp2", "qwen3_moe_tp2ep2"


@dataclass(frozen=True)
class Route:
    """A form of a case, to an engine.

    Attributes:
        to: of `reshard.split`; empty: the engine reads the run itself.
    """

    case: str
    form: str
    engine: str
    to: str = ""
    ranks: int = 2
    options: dict = field(default_factory=dict, hash=False)

    @property
    def kind(self):
        """Return the settings of which any two occur together in a route."""
        return self.case, self.form, self.to or self.engine

    def __str__(self):
        more = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.case, self.form, self.engine, self.to, *more]).replace(" ", "_")


ROUTES = [
    Route(LLAMA, "torch", "deepspeed", "deepspeed", options={"zero_stage": 2}),
    Route(LLAMA, "torch_dist", "deepspeed", "deepspeed", options={"zero_stage": 3}),
    Route(LLAMA, "torch", "deepspeed", "ds-universal", options={"zero_stage": 1}),
    Route(LLAMA, "torch", "deepspeed", "deepspeed", options={"zero_stage": 1, "tp": 2}),
    Route(
        LLAMA, "torch_dist", "deepspeed", "deepspeed", ranks=4, options={"zero_stage": 2, "tp": 2}
    ),
    Route(LLAMA, "torch", "live deepspeed", options={"zero_stage": 2}),
    Route(LLAMA, "torch", "dcp", "dcp"),
    Route(LLAMA, "torch", "fsdp2", "fsdp2", options={"device": "cpu"}),
    Route(LLAMA, "torch_dist", "accelerate", "accelerate"),
    Route(LLAMA, "torch", "hf-trainer", "hf-trainer"),
    Route(SHARDED, "torch", "torch", "torch", ranks=1),
    Route(SHARDED, "torch_dist", "dcp", "dcp"),
    Route(SHARDED, "torch_dist_fully_reshardable", "live dcp"),
    Route(EXPERTS, "torch", "deepspeed", "deepspeed", options={"zero_stage": 2}),
    Route(EXPERTS, "torch_dist", "deepspeed", "deepspeed", options={"zero_stage": 3}),
    Route(EXPERTS, "torch_dist", "live dcp"),
    Route(EXPERTS, "torch_dist", "fsdp2", "fsdp2", options={"device": "cpu"}),
    Route(EXPERTS, "torch_dist", "hf-trainer", "hf-trainer"),
]
CHOSEN = choose_combinations(route.kind for route in ROUTES)
ROUTES = [route for route in ROUTES if route.kind in CHOSEN]


@pytest.fixture(scope="module")
def went_on(megatron_case, tmp_path_factory):
    """Return route -> what its engine loaded and how it continued, or why it failed."""
    out, jobs = tmp_path_factory.mktemp("engines"), {}
    for route in ROUTES:
        source = megatron_case(route.case)
        made = out / f"{route}.made"
        place, config = convert(route, source / route.form, made)
        told = {
            "engine": route.engine,
            "place": str(place),
            "config": str(config),
            "vocabulary": read_expected(source)["vocabulary"],
            "stage": route.options.get("zero_stage"),
            "universal": route.to == "ds-universal",
            "run": str(out / f"{route}.run"),
            **({"tp": route.options["tp"]} if "tp" in route.options else {}),
        }
        jobs[str(route)] = (route.ranks, told)
    judge = Judge("tests.judges.engine_worker", "an engine", {}, like=DEEPSPEED)
    return judge.run(out / "runs", jobs)


def convert(route, source, made):
    """Return the checkpoint that the engine loads, and the directory of the model's config."""
    if not route.to:
        reshard.merge(source, made)
        return source, made
    if route.to == "torch":
        made.mkdir()
        reshard.split(source, made / "checkpoint.pt", to="torch")
        reshard.merge(source, made / "model")
        return made / "checkpoint.pt", made / "model"
    reshard.split(source, made, to=route.to, world_size=route.ranks, **route.options)
    config = next(made.rglob("config.json")).parent
    return (config if route.to == "hf-trainer" else made), config


def sorted_values(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_engine_holds_megatron_s_weights_and_moments(megatron_case, went_on, route):
    """Sorted values are equal bit by bit; logits and the next losses show that each is in place."""
    expected, found = read_expected(megatron_case(route.case)), went_on[str(route)]
    assert isinstance(found, dict), found
    held, (params, slots) = found["held"], (expected["params"], expected["optimizer"])
    assert torch.equal(sorted_values(held["params"].values()), sorted_values(params.values()))
    for slot in ("exp_avg", "exp_avg_sq"):
        mine = sorted_values(each[slot] for each in held["optimizer"].values())
        assert torch.equal(mine, sorted_values(each[slot] for each in slots.values())), slot
    assert set(held["steps"].values()) == {STEPS}
    assert (found["logits"] - expected["logits"]).abs().max() < EXACT


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_engine_continues_like_megatron(megatron_case, went_on, route):
    expected, found = read_expected(megatron_case(route.case)), went_on[str(route)]
    assert isinstance(found, dict), found
    assert found["losses"] == pytest.approx(expected["later"], abs=EXACT)
    assert expected["later"][0] != pytest.approx(expected["later"][1], abs=100 * EXACT)
    assert found.get("step", STEPS) == STEPS
    assert found.get("scheduler", STEPS) == STEPS
    assert found.get("samples", STEPS * SAMPLES) == STEPS * SAMPLES
