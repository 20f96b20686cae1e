"""Every check of ``verify``, and ``diff``, detects its damage; unchanged checkpoints pass.

A row is one damage done to a checkpoint that a real framework wrote, and the check that must catch
it by name. docs/proof-damages.csv lists the same rows.
"""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import reshard
from tests.judged import damage as d
from tests.judged.damage import Source
from tests.judges import library_judge, torch_judge

OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
STATE = "base_optimizer_state"

# name -> fixture, case, path below it
SOURCES = {
    "ZeRO 1": ("made", "z1_bf16", "run"),
    "ZeRO 2": ("made", "z2_bf16", "run"),
    "ZeRO 2 aligned": ("made", "z2_alignment", "run"),
    "ZeRO 2 tied": ("made", "hf_z2_tied", "run"),
    "ZeRO 2 fp16": ("made", "z2_fp16", "run"),
    "ZeRO 3": ("made", "z3_bf16", "run"),
    "HF Trainer ZeRO 2": ("made", "trainer_zero2_fp16", "run/checkpoint-3"),
    "FSDP full": ("torch_made", "fsdp1_full", "ckpt"),
    "FSDP sharded": ("torch_made", "fsdp1_sharded_shardedtensor", "ckpt"),
    "FSDP hybrid": ("torch_made", "fsdp1_sharded_hybrid_ws4", "ckpt"),
    "FSDP local": ("torch_made", "fsdp1_local_flat", "ckpt"),
    "DTensor ranks": ("torch_made", "fsdp2_ranks", "ckpt"),
    "DCP": ("torch_made", "fsdp2_dcp", "ckpt"),
    "DCP without collectives": ("torch_made", "dcp_no_collectives", "ckpt"),
    "HF storage": ("torch_made", "hf_storage_sharded", "ckpt"),
    "HF index": ("torch_made", "plain_index", "ckpt"),
    "torch.save": ("torch_made", "plain_named", "ckpt"),
    "Accelerate": ("libraries", "acc_fsdp2_sharded", "ckpt"),
    "Accelerate tied": ("libraries", "acc_fsdp2_sharded_tied_ws4", "ckpt"),
    "Accelerate DDP": ("libraries", "acc_ddp", "ckpt"),
}


@dataclass(frozen=True)
class Row:
    """One damage.

    Args:
        caught: the check of verify that must not pass.
        exit_code: of verify, when only its own checks run.
        differs: whether ``diff`` with the original must say so; it cannot read the source if None.
    """

    what: str
    source: str
    damage: d.Callable[[Source], None]
    caught: str
    differs: bool | None = True
    exit_code: int | None = None


def _one_rank_further(state):
    state["optimizer_state_dict"][STATE]["state"][0]["step"] += 1


def _another_rate(state):
    for group in state["optimizer_state_dict"][STATE]["param_groups"]:
        group["lr"] *= 2


def _without_moment(state):
    for held in state["optimizer_state_dict"][STATE]["state"].values():
        del held["exp_avg_sq"]


def _one_without_moment(state):
    optimizer = state.get("optim", state)
    fqn = next(f for f, held in optimizer["state"].items() if "exp_avg_sq" in held)
    del optimizer["state"][fqn]["exp_avg_sq"]


def _one_more_padding(state):
    paddings = state["optimizer_state_dict"]["group_paddings"]
    paddings[0] += 1


def _untied(state):
    alias, kept = next(iter(state["shared_params"].items()))
    state["module"][alias] = state["module"][kept].clone()
    state["module"][alias].view(-1)[5] += 1


def _cast_buffer(state):
    calls = state["module"]["extras.calls"]
    state["module"]["extras.calls"] = calls.float()


def _another_head(source):
    entry = next(e for e in source.manifest().of_kind("param") if e.fqn.endswith("lm_head.weight"))
    d.write(source, entry, 7, b"\x00" * entry.dtype.itemsize, seal=True)


def _overlapping(header):
    about = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    fqn = next(f for f, held in about.items() if any(held["saved_offsets"]))
    about[fqn]["saved_offsets"] = [n - 1 if n else n for n in about[fqn]["saved_offsets"]]
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(about)


def _unknown_shard(index):
    fqn = next(iter(index["weight_map"]))
    index["weight_map"]["nowhere.weight"] = index["weight_map"][fqn]


def _renamed(state):
    name = next(n for n in state["module"] if n.endswith("q_proj.weight"))
    for held in (state["module"], *state["param_shapes"]):
        if name in held:
            items = [
                (k.replace("q_proj", "Q_proj") if k == name else k, v) for k, v in held.items()
            ]
            held.clear()
            held.update(items)


DAMAGES = [
    Row(
        "one bit of a master, its CRC kept", "ZeRO 2", d.flip("master", seal=False), "crc", True, 3
    ),
    Row("one bit of a moment in DCP, its CRC kept", "DCP", d.flip("exp_avg", seal=False), "crc"),
    Row("one bit of a flat parameter", "FSDP local", d.flip("param", seal=False), "crc"),
    Row("one bit of an Accelerate weight", "Accelerate", d.flip("param", seal=False), "crc"),
    Row(
        "one bit of a master that 16 bits show, with its CRC",
        "ZeRO 2",
        d.flip("master", seal=True, byte=2),
        "masters",
    ),
    Row(
        "one bit of a master that 16 bits do not show",
        "ZeRO 2",
        d.flip("master", seal=True),
        "against",
    ),
    Row("one bit of a 16-bit copy, with its CRC", "ZeRO 1", d.flip("param", seal=True), "masters"),
    Row("one bit of a 16-bit copy in fp16", "ZeRO 2 fp16", d.flip("param", seal=True), "masters"),
    Row("one bit of a moment, with its CRC", "ZeRO 3", d.flip("exp_avg", seal=True), "against"),
    Row("one bit of a shard, with its CRC", "FSDP sharded", d.flip("param", seal=True), "against"),
    Row("one bit of safetensors", "Accelerate DDP", d.flip("param", seal=True), "against"),
    Row(
        "one replica of a block",
        "FSDP hybrid",
        d.flip("param", seal=True, replica=1),
        "replicas",
        differs=False,  # the first is read
    ),
    Row(
        "two ranks' files swapped",
        "ZeRO 3",
        d.swap_files(OPTIM.format(0), OPTIM.format(1)),
        "ranks",
    ),
    Row(
        "two ranks' states swapped and saved again",
        "ZeRO 2",
        d.swap_contents(OPTIM.format(0), OPTIM.format(1)),
        "masters",
    ),
    Row(
        "two ranks' states swapped at stage 3",
        "ZeRO 3",
        d.swap_contents(OPTIM.format(0), OPTIM.format(1)),
        "against",
    ),
    Row("two weights of one shape swapped", "ZeRO 2", d.swap_tensors("param"), "masters"),
    Row(
        "two weights swapped in a full state dict", "FSDP full", d.swap_tensors("param"), "against"
    ),
    Row("two moments swapped", "FSDP full", d.swap_tensors("exp_avg"), "against"),
    Row(
        "a moment dropped on one rank",
        "ZeRO 2",
        d.edit(OPTIM.format(1), _without_moment),
        "agreement",
        None,
        3,
    ),
    Row(
        "a moment of one parameter dropped",
        "DCP",
        d.save_again_by_dcp(_one_without_moment),
        "slots",
        exit_code=1,
    ),
    Row(
        "a moment dropped in one file",
        "FSDP full",
        d.edit("optim.pt", _one_without_moment),
        "slots",
    ),
    Row(
        "values one element late",
        "ZeRO 2 aligned",
        d.edit("*_optim_states.pt", d.shift_by_one),
        "padding",
    ),
    Row(
        "padding declared one too long",
        "ZeRO 2 aligned",
        d.edit("*_optim_states.pt", _one_more_padding),
        "ranks",
        differs=False,
    ),
    Row(
        "a rank's file of a larger run",
        "ZeRO 2",
        d.copy_file(OPTIM.format(1), OPTIM.format(2)),
        "stale",
        None,
        3,
    ),
    Row(
        "a rank's file of a larger run in DCP",
        "DCP",
        d.copy_file("__1_0.distcp", "__2_0.distcp"),
        "stale",
        False,
        3,
    ),
    Row(
        "random states of a larger run",
        "HF Trainer ZeRO 2",
        d.copy_file("rng_state_1.pth", "rng_state_2.pth"),
        "stale",
        differs=False,
    ),
    Row("a rank's file missing", "ZeRO 3", d.remove(OPTIM.format(1)), "complete", None, 1),
    Row("a rank's DTensors missing", "DTensor ranks", d.remove("model_rank1.pt"), "complete", None),
    Row(
        "a data file missing",
        "Accelerate",
        d.remove("pytorch_model_fsdp_0/__1_0.distcp"),
        "complete",
        None,
    ),
    Row(
        "metadata of a rank missing",
        "DCP without collectives",
        d.remove("__1.metadata"),
        "complete",
        None,
    ),
    Row("a file cut short", "ZeRO 2", d.truncate(OPTIM.format(0)), "headers", None, 3),
    Row("a DCP file cut short", "DCP", d.truncate("__1_0.distcp"), "index", None, 3),
    Row(
        "another step on one rank",
        "ZeRO 2",
        d.edit(OPTIM.format(1), _one_rank_further),
        "agreement",
        None,
        3,
    ),
    Row(
        "another step of one rank's DTensors",
        "DTensor ranks",
        d.edit("optim_rank1.pt", lambda s: s["state"][0]["step"].add_(1)),
        "agreement",
        None,
    ),
    Row(
        "another step of the run than of its optimizer",
        "ZeRO 2",
        d.edit(MODEL, lambda state: state.update(global_steps=7)),
        "steps",
    ),
    Row(
        "another version on one rank",
        "ZeRO 2",
        d.edit(OPTIM.format(1), lambda state: state.update(ds_version="0.9.0")),
        "agreement",
        None,
    ),
    Row(
        "another learning rate on one rank",
        "ZeRO 2",
        d.edit(OPTIM.format(1), _another_rate),
        "agreement",
        None,
    ),
    Row("another learning rate", "ZeRO 2", d.edit("*_optim_states.pt", _another_rate), "against"),
    Row("a transposed shard", "DTensor ranks", d.transpose, "against"),
    Row("tied weights apart", "ZeRO 2 tied", d.edit(MODEL, _untied), "tied", differs=False),
    Row("tied weights apart in DCP", "Accelerate tied", _another_head, "tied"),
    Row("an integer buffer cast", "ZeRO 2", d.edit(MODEL, _cast_buffer), "against"),
    Row("a NaN", "Accelerate", d.put("param", float("nan")), "finite"),
    Row("an infinity in a moment", "DCP", d.put("exp_avg", float("inf")), "finite"),
    Row("a negative second moment", "DCP", d.put("exp_avg_sq", -1e-9), "moments"),
    Row("a weight of zeros", "FSDP full", d.clear("param"), "zeros"),
    Row("moments of zeros", "DCP", d.clear("exp_avg_sq"), "zeros"),
    Row(
        "blocks that overlap",
        "HF storage",
        d.edit_header("shard-00002-*.safetensors", _overlapping),
        "coverage",
        None,
        3,
    ),
    Row(
        "an index that lists too much",
        "HF index",
        d.edit_json("*.index.json", _unknown_shard),
        "index",
        None,
    ),
    Row("a pickle that runs code", "torch.save", d.edit("*.pt", d.attack), "safe", None, 5),
    Row("a weight under another name", "ZeRO 2", d.edit(MODEL, _renamed), "model"),
]
MODELS = {"ZeRO 2": "tests.judges.deepspeed_models:menagerie"}
NAMES = [f"{row.source}: {row.what}" for row in DAMAGES]


def list_options(name):
    """Return the options that the user passes for a source beside its path."""
    fixture, case, _ = SOURCES[name]
    judge = {"torch_made": torch_judge, "libraries": library_judge}.get(fixture)
    known = judge.CASES[case] if judge else None
    said = {"model": getattr(known, "model", None), "wrap": getattr(known, "wrap", None)}
    return {word: value for word, value in said.items() if value}


@pytest.fixture
def original(request):
    """Return the unchanged checkpoint of a name."""

    def find(name) -> Path:
        fixture, case, below = SOURCES[name]
        return request.getfixturevalue(fixture) / case / below

    return find


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    """Return the directory for manifests of unchanged checkpoints, and their warnings."""
    return tmp_path_factory.mktemp("manifests"), {}


@pytest.fixture
def known(original, manifests):
    """Return the manifest of an unchanged checkpoint, and the checks that warn of it."""
    directory, warned = manifests

    def find(name) -> tuple[Path, set[str]]:
        path = directory / f"{name}.json"
        if name not in warned:
            report = reshard.verify(original(name), write_manifest=path, **list_options(name))
            assert report.passed, list(report.lines())
            warned[name] = {c.name for c in report.checks if c.status == "warned"}
        return path, warned[name]

    return find


@pytest.mark.parametrize("name", SOURCES)
def test_an_unchanged_checkpoint_passes_and_is_its_own_manifest(name, original, known):
    manifest, warned = known(name)
    report = reshard.verify(original(name), against=manifest, **list_options(name))
    assert report.exit_code == 0, list(report.lines())
    assert {check.name for check in report.checks if check.status == "warned"} == warned
    assert report.check("against").status == "passed"
    assert warned <= {"zeros"}  # of a parameter that the model never uses


@pytest.mark.parametrize("row", DAMAGES, ids=NAMES)
def test_damage_is_detected_by_the_named_check(row, original, known, tmp_path):
    manifest, warned = known(row.source)
    place = tmp_path / original(row.source).name
    shutil.copytree(original(row.source), place)
    damaged = Source(place, list_options(row.source))
    row.damage(damaged)
    model = {"model": MODELS[row.source]} if row.caught == "model" else {}
    report = reshard.verify(place, against=manifest, **(damaged.told | model))
    caught = {c.name for c in report.checks if c.status in ("failed", "warned")} - warned
    named = report.check(row.caught)
    assert named.name in caught or (named.status == "warned" and len(named.warnings) > 1), list(
        report.lines()
    )
    assert row.exit_code in (None, report.exit_code)
    if row.caught not in ("zeros", "steps"):
        assert report.exit_code
    assert not any("Traceback" in line for line in report.lines())
    if row.differs is None:
        with pytest.raises(reshard.ReshardError):
            reshard.diff(original(row.source), place, **damaged.told)
    else:
        told_both = damaged.told
        assert reshard.diff(original(row.source), place, **told_both).same is not row.differs


@pytest.mark.parametrize("name", MODELS)
def test_the_right_model_passes(name, original):
    report = reshard.verify(original(name), model=MODELS[name])
    assert report.check("model").status == "passed", list(report.lines())


def list_table_rows():
    """Return the rows of docs/proof-damages.csv."""
    diffs = {True: "different", False: "same", None: "cannot be read"}
    rows = [[row.what, row.source, row.caught, diffs[row.differs]] for row in DAMAGES]
    return [["damage", "checkpoint", "detected by", "diff"], *rows]


def test_the_table_in_the_documentation_is_current():
    path = Path(__file__).parents[2] / "docs" / "proof-damages.csv"
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == list_table_rows()
