"""0-d values of an optimizer (NAdam's, ASGD's) under real FSDP 1: one for a flat parameter."""

from __future__ import annotations

import shutil

import pytest

import reshard
from reshard.errors import DifferentError, UnsupportedError
from tests.judged.alike import assert_same_state
from tests.judged.damage import edit_file
from tests.judged.test_split_torch import FLAT_FORMS, FORMS, NAMED, ONE, TOLD, TWO, fix_ranks, split
from tests.judges import split_worker as worker
from tests.judges.ranks import run_in_turn
from tests.trainer import worlds

pytestmark = pytest.mark.slow

SCALARS = {"nadam": ("mu_product",), "asgd": ("eta", "mu")}
MODELS = {"fsdp1": ONE, "fsdp2": TWO}
KINDS = {"local": "fsdp1", "verl": NAMED, "orig": "fsdp1 mesh named orig"}
AT = {2: ("local", "verl", "orig"), 3: ("local", "orig")}
LOCAL = {"to": "fsdp", "state_dict_type": "local"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train either optimizer under FSDP 1 and 2; return the losses of the next two steps."""
    place = tmp_path_factory.mktemp("scalars")
    jobs = []
    for optimizer in SCALARS:
        for wrapper, build in MODELS.items():
            run = place / f"{wrapper} {optimizer}"
            run.mkdir()
            jobs.append((run.name, worker.save, run.name, build, run))
    return place, worlds.run(2, run_in_turn, jobs)[0]


@pytest.fixture(scope="module")
def loaded(trained, tmp_path_factory):
    """Return (optimizer, form, number of ranks) -> what real FSDP 1 found when it loaded that."""
    place, out = trained[0], tmp_path_factory.mktemp("written")
    found = {}
    for world, forms in AT.items():
        jobs = []
        for optimizer in SCALARS:
            for form in forms:
                made = out / f"{optimizer}-{form}-{world}"
                source = place / f"{_choose_wrapper(form)} {optimizer}"
                lay_out, _, load = (FLAT_FORMS | {"orig": FORMS["orig"]})[form]
                told = TOLD if form != "orig" else {}
                split(source / "ranks", made, fix_ranks(lay_out, world), **told)
                kind, build = f"{KINDS[form]} {optimizer}", MODELS[_choose_wrapper(form)]
                jobs.append((made.name, worker.resumed, kind, build, load, made, source))
        for name, result in worlds.run(world, run_in_turn, jobs)[0].items():
            found[tuple(name.split("-"))] = result
    return out, found


def _choose_wrapper(form):
    """Return the run that a form is written from."""
    return "fsdp2" if form == "orig" else "fsdp1"


@pytest.mark.parametrize("optimizer", SCALARS)
def test_fsdp1_continues_bitwise(trained, loaded, optimizer):
    for world, forms in AT.items():
        for form in forms:
            result = loaded[1][optimizer, form, str(world)]
            losses = trained[1][f"{_choose_wrapper(form)} {optimizer}"]
            assert result.get("at") is None, (form, result["at"])
            assert result["differing"] == [], form
            if world == 2 and form != "orig":  # another engine, which gathers in another order
                assert result["losses"] == losses, form
            found = [float.fromhex(loss) for loss in result["losses"]]
            assert found == pytest.approx(list(map(float.fromhex, losses)), rel=1e-6), form


@pytest.mark.parametrize("form", ["local", "verl", "orig"])
@pytest.mark.parametrize("optimizer", SCALARS)
def test_what_is_written_is_read_as_its_source(trained, loaded, optimizer, form):
    told = TOLD if form != "orig" else {**TOLD, "model": f"tests.judges.torch_models:{TWO}"}
    source = trained[0] / f"{_choose_wrapper(form)} {optimizer}" / "ranks"
    made = loaded[0] / f"{optimizer}-{form}-2"
    with reshard.open(made, **told) as found, reshard.open(source, **told) as wanted:
        for slot in SCALARS[optimizer]:
            assert found.optimizer(slot).keys() == wanted.manifest.train.optimizer_step.keys()
        assert_same_state(found, wanted)


def test_a_value_that_differs_between_members_is_refused(trained, tmp_path):
    """Whole files keep one for each parameter, a flat parameter does not."""
    source = trained[0] / "fsdp1 nadam" / "ranks"
    reshard.split(source, tmp_path / "full", to="fsdp", state_dict_type="full", **TOLD)
    reshard.split(tmp_path / "full", tmp_path / "flat", world_size=2, **LOCAL, **TOLD)
    (optimizer,) = (tmp_path / "full").glob("optimizer*.bin")

    def change(root):
        name = next(fqn for fqn in root["state"] if "layers.0" in fqn)
        root["state"][name]["mu_product"] *= 2

    edit_file(optimizer, change)
    with pytest.raises(UnsupportedError, match=r"mu_product is 0\.\d+ for .*: a flat parameter"):
        reshard.split(tmp_path / "full", tmp_path / "out", world_size=2, **LOCAL, **TOLD)


def test_a_value_that_differs_between_ranks_is_refused(trained, tmp_path):
    run = shutil.copytree(trained[0] / "fsdp1 nadam" / "ranks", tmp_path / "run")
    edit_file(run / "optim_rank1.pt", lambda root: root["state"][0]["mu_product"].mul_(2))
    with pytest.raises(DifferentError, match=r"mu_product of .*: differs between"):
        reshard.split(run, tmp_path / "out", world_size=2, **LOCAL, **TOLD)
