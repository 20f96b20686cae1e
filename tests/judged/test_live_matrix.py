"""Live loads of every library, at other numbers of ranks and into optimizers of another order."""

from __future__ import annotations

import itertools

import pytest

from tests.judged.resumed import Resumed, assert_goes_on
from tests.judges import deepspeed_judge, server
from tests.judges.deepspeed_cases import Case, ds_config
from tests.support.combinations import choose_combinations

pytestmark = pytest.mark.slow

JUDGE = deepspeed_judge.JUDGE
SIZES = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
LOADS = choose_combinations(itertools.product(STAGES, SIZES, SIZES))


def describe_job(stage, ranks, **told):
    """Return what `Judge.run` needs for a run, or for one that loads."""
    return ranks, {"case": Case(f"z{stage}_fp32", ranks, ds_config(stage, "fp32")), **told}


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    """Return (stage, number of ranks) -> the directory of a run; two ranks are judged cases."""
    place = tmp_path_factory.mktemp("saved")
    others = {(stage, n): f"{stage}-{n}" for stage in STAGES for n in SIZES if n != 2}
    found = JUDGE.run(place, {name: describe_job(*run) for run, name in others.items()})
    assert all(isinstance(seen, dict) for seen in found.values()), found
    cases = {(stage, 2): made / f"z{stage}_fp32" for stage in STAGES}
    return cases | {run: place / name for run, name in others.items()}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    told = {"steps": 2, "how": {"live": True}}
    jobs = {
        f"{stage}-{n}-{m}": describe_job(stage, m, load=saved[stage, n] / "run", **told)
        for stage, n, m in LOADS
    }
    return JUDGE.run(tmp_path_factory.mktemp("loaded"), jobs)


@pytest.mark.parametrize(("stage", "n", "m"), LOADS)
def test_the_state_has_the_same_bits_and_training_goes_on(stage, n, m, saved, loaded):
    source = saved[stage, n]
    run = Resumed(source.name, f"z{stage}_fp32", m, stage)
    assert_goes_on(run, loaded[f"{stage}-{n}-{m}"], source.parent)


# Orders of the parameters in the live optimizer

ORDER_JUDGE = server.Judge("tests.judges.order_worker", "orders", {}, like=server.DEEPSPEED)
MODEL_ORDER = [[0, 1, 2, 3, 4, 5, 6, 7]]  # weights and biases in turn
BY_DECAY = [[0, 1, 4, 5], [2, 3, 6, 7]]  # every other layer
ORDERS = {  # the param groups of the program that loads; those that saved have the model's order
    "reversed": [[7, 6, 5, 4, 3, 2, 1, 0]],
    "shuffled": [[6, 1, 4, 7, 0, 3, 2, 5]],  # with the shapes of the model's order
    "regrouped": [[6, 7, 3], [4, 0, 1, 5, 2]],
    "exchanged": [[6, 3, 2, 7], [5, 0, 1, 4]],  # of groups in which only the decay differs
}
ENGINES = {
    f"z{stage}": (2 if stage else 1, {"how": "deepspeed", "stage": stage}) for stage in STAGES
}
NUMBERED = ("accelerate", "hf", "torch")  # whose files number the parameters
SAVERS = ENGINES | {
    "round_robin": (2, {**ENGINES["z2"][1], "zero": {"round_robin_gradients": True}}),
    "dcp": (2, {"how": "dcp"}),
    "accelerate": (1, {"how": "accelerate"}),
    "hf": (1, {"how": "hf"}),
    "torch": (1, {"how": "torch"}),
}
LOADERS = {name: how for name, how in SAVERS.items() if name != "torch"} | {
    "hf_z2": (2, {"how": "hf", "stage": 2}),
    "lightning": (1, {"how": "lightning"}),
    "lightning_z1": (2, {"how": "lightning", "stage": 1}),
    "lightning_z3": (2, {"how": "lightning", "stage": 3}),
}
ORDERED = choose_combinations(
    combination
    for combination in itertools.product(SAVERS, LOADERS, ORDERS)
    # Nothing names what an optimizer numbers in several groups of the same shapes, except a live
    # optimizer, which the readers of DeepSpeed and DCP do not see.
    if not (combination[0] in NUMBERED and combination[1:] == ("dcp", "exchanged"))
    and (combination[0], combination[2]) != ("z0", "exchanged")
)


@pytest.fixture(scope="module")
def saved_in_order(tmp_path_factory):
    """Return the directory of the saves with one group and with two, and the next losses."""
    place = tmp_path_factory.mktemp("saved")
    jobs = {
        f"{name}{'_decays' * decays}": (
            ranks,
            {**how, "order": BY_DECAY if decays else MODEL_ORDER, "decays": decays},
        )
        for name, (ranks, how) in SAVERS.items()
        for decays in (False, True)
    }
    found = ORDER_JUDGE.run(place, jobs)
    assert all(isinstance(losses, list) for losses in found.values()), found
    for decays in ("", "_decays"):
        for name in SAVERS.keys() - {"hf"}:
            assert found[name + decays] == pytest.approx(found[f"torch{decays}"], rel=1e-6), name
    return place, found


@pytest.fixture(scope="module")
def loaded_in_order(saved_in_order, tmp_path_factory):
    jobs = {}
    for saver, loader, order in ORDERED:
        (ranks, how), decays = LOADERS[loader], order == "exchanged"
        source = saved_in_order[0] / f"{saver}{'_decays' * decays}" / "saved"
        told = {"order": ORDERS[order], "decays": decays, "load": str(source)}
        told["is_numbered"] = saver in NUMBERED
        jobs[f"{saver}-{loader}-{order}"] = ranks, {**how, **told}
    return ORDER_JUDGE.run(tmp_path_factory.mktemp("loaded"), jobs)


@pytest.mark.parametrize(("saver", "loader", "order"), ORDERED)
def test_the_order_of_the_live_optimizer_decides(
    saver, loader, order, saved_in_order, loaded_in_order
):
    wanted = saved_in_order[1]["torch_decays" if order == "exchanged" else "torch"]
    assert loaded_in_order[f"{saver}-{loader}-{order}"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_order_of_a_tensor_parallel_optimizer_decides(is_reversed, tmp_path):
    """Nothing compares the parts of parameters in memory: only the losses show their order."""
    how = {"how": "tensor parallel"}
    saved = ORDER_JUDGE.run(tmp_path / "saved", {"run": (1, {**how, "is_reversed": False})})
    told = {**how, "is_reversed": is_reversed, "load": str(tmp_path / "saved" / "run" / "saved")}
    found = ORDER_JUDGE.run(tmp_path / "loaded", {"run": (2, told)})
    assert isinstance(found["run"], list), found["run"]
    assert found["run"] == pytest.approx(saved["run"], rel=1e-5)
