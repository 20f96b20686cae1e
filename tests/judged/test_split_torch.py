"""Layouts written for PyTorch, loaded by real PyTorch: every form, at more and fewer ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard import formats
from reshard import model as models
from reshard.core import dtypes, keys
from reshard.core.manifest import Manifest, Origin, SourceFile, check, index_entries
from reshard.core.stamps import Save
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.dcp import writer as dcp
from reshard.formats.fsdp import flat_files, rank_files
from reshard.formats.pytorch import layouts
from reshard.formats.request import Request
from reshard.layouts.mesh import MeshGrid
from reshard.state_dict import torch_state_dict
from reshard.state_dict.torch_state_dict import StateTensor
from reshard.training import copied_files
from reshard.training.state import build_writable_state
from tests.judged.alike import assert_alike, assert_same_state
from tests.judged.expected import read_expected
from tests.judges import library_judge, server
from tests.judges import split_worker as worker
from tests.judges.ranks import run_in_turn
from tests.judges.split_worker import resumed
from tests.judges.torch_cases import CASES
from tests.support.sample_tensors import same
from tests.trainer import worlds

TWO, ONE = "menagerie_tied_frozen", "menagerie_tied"  # the models under FSDP 2 and FSDP 1
NAMED = "fsdp1 mesh named"
IGNORED = "fsdp2 ignored"  # with parameters that FSDP 2 does not shard
IGNORED1 = "fsdp1 orig ignored"
FLAT_IGNORED = "fsdp1 ignored"


def shapes(build, wrap="LlamaDecoderLayer"):
    return models.describe(f"tests.judges.torch_models:{build}", wrap)


def grid(world, *names):
    return MeshGrid((world,), names or None, "cpu")


# One file per rank for model and optimizer, as scripts save it; no target writes it.
ONE_FILE = rank_files.FileNames("rank{rank}.pt", "rank{rank}.pt", train_state="train_state.pt")


def fix_ranks(lay_out, ranks):
    """Return a form for that many ranks."""
    return lambda state: lay_out(state, ranks)


def of_ranks(world_size, **options):
    return Request(world_size=world_size, **options)


def lay_out_one_file(state, model=None):
    """Lay out one file, as a script without sharding saves it."""
    return layouts.lay_out_torch(state, Request(world_size=1, model=model)).skeleton


def split(source, out, lay_out, *, weights_only=False, **told):
    """Split as the command does: read, lay out, prove, plan, copy."""
    manifest = keys.edit(formats.read([Path(source)], **told), keys.Edits()).manifest
    check(manifest)
    state = build_writable_state(manifest, weights_only=weights_only)
    skeleton = lay_out(replace(state, save=Save("an id", 3)))
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    check(Manifest(Origin("target", ""), index_entries(skeleton.entries), files, ordered=True))
    out.mkdir(parents=True)
    manifest = manifest.with_entries(
        [*manifest.entries.values(), *copied_files.select_entries(manifest, skeleton)]
    )
    copies = Plan(manifest.entries, skeleton)
    execute(copies, manifest.files, out, MoveOptions())
    return out


FORMS = {  # of a state under FSDP 2 -> how it is laid out for n ranks, the wrapper, how it loads
    "dcp": (lambda s, n: dcp.lay_out(s, of_ranks(n)), "fsdp2", "dcp"),
    "accelerate": (lambda s, n: dcp.lay_out_accelerate(s, of_ranks(n)), "fsdp2", "accelerate"),
    "pair": (lambda s, n: rank_files.lay_out_fsdp2(s, of_ranks(n), grid(n)), "fsdp2", "pair"),
    "one": (
        lambda s, n: rank_files.lay_out_fsdp2(s, of_ranks(n), grid(n), naming=ONE_FILE),
        "fsdp2",
        "one",
    ),
    "verl": (
        lambda s, n: rank_files.lay_out_fsdp2(
            s, of_ranks(n), grid(n, "fsdp"), naming=rank_files.VERL
        ),
        "fsdp2 named",
        "verl",
    ),
    "names": (
        lambda s, n: rank_files.lay_out_fsdp2(
            s, of_ranks(n), grid(n), naming=rank_files.ACCELERATE
        ),
        "fsdp2",
        "names",
    ),
    "full": (lambda s, n: rank_files.lay_out_fsdp1_full(s, of_ranks(n)), "fsdp2", "whole"),
    "orig": (
        lambda s, n: flat_files.lay_out_fsdp1_sharded(
            s,
            shapes(TWO),
            of_ranks(n, orig_params=dtypes.FLOAT32),
            grid(n, "fsdp"),
        ),
        "fsdp1 mesh named orig",
        "verl1",
    ),
}
FLAT_FORMS = {  # of a state under FSDP 1
    "dcp": (lambda s, n: dcp.lay_out(s, of_ranks(n)), "fsdp1", "dcp"),
    "full": (lambda s, n: rank_files.lay_out_fsdp1_full(s, of_ranks(n)), "fsdp1", "full"),
    "local": (
        lambda s, n: flat_files.lay_out_fsdp1_local(s, shapes(ONE), of_ranks(n)),
        "fsdp1",
        "local",
    ),
    "verl": (
        lambda s, n: flat_files.lay_out_fsdp1_sharded(s, shapes(ONE), of_ranks(n), grid(n, "fsdp")),
        NAMED,
        "verl1",
    ),
}
AT = {  # what real ranks load, of either training
    2: (["dcp", "accelerate", "pair", "verl", "names", "full"], ["local", "verl", "full"]),
    3: (["dcp", "orig"], ["local", "dcp"]),
    # FSDP 1 without a mesh cannot load its own DCP where a rank has no row of a parameter
    4: (["dcp", "verl"], ["verl"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two ranks; return the checkpoint after three steps, and the next two losses."""
    place = tmp_path_factory.mktemp("trained")
    (place / "fsdp2").mkdir()
    (place / "fsdp1").mkdir()
    (place / "ignored").mkdir()
    (place / "ignored1").mkdir()
    (place / "flat_ignored").mkdir()
    jobs = [
        ("fsdp2", worker.save, "fsdp2", TWO, place / "fsdp2"),
        ("fsdp1", worker.save, "fsdp1", ONE, place / "fsdp1"),
        ("ignored", worker.save, IGNORED, ONE, place / "ignored"),
        ("ignored1", worker.save, IGNORED1, ONE, place / "ignored1"),
        ("flat_ignored", worker.save, FLAT_IGNORED, ONE, place / "flat_ignored"),
    ]
    losses = worlds.run(2, run_in_turn, jobs)[0]
    return place, losses


TOLD = {"model": f"tests.judges.torch_models:{ONE}", "wrap": "LlamaDecoderLayer"}


@pytest.fixture(scope="module")
def deepspeed(made):
    """Return a DeepSpeed checkpoint with its config.json, its step, and DeepSpeed's next losses."""
    (pointer,) = (made / "hf_z1_fp32_tied" / "run").rglob("latest")
    expected = read_expected(made / "hf_z1_fp32_tied")
    return pointer.parent, expected["train"]["step"], expected["next"]["losses"]


@pytest.fixture(scope="module")
def loaded(trained, deepspeed, tmp_path_factory):
    """Return (number of ranks, form) -> what real PyTorch found when it loaded that."""
    place, _ = trained
    out = tmp_path_factory.mktemp("split")
    found = {}
    for world, (forms, flat) in AT.items():
        two, one = place / "fsdp2", place / "fsdp1"
        jobs = [("torch", resumed, "fsdp2", TWO, "dcp", two / "dcp", two)] if world > 2 else []
        for name in forms:
            lay_out, kind, load = FORMS[name]
            made = split(two / "ranks", out / f"{world}-{name}", fix_ranks(lay_out, world))
            jobs.append((name, resumed, kind, TWO, load, made, two))
        for name in flat:
            lay_out, kind, load = FLAT_FORMS[name]
            made = out / f"{world}-flat-{name}"
            split(one / "ranks", made, fix_ranks(lay_out, world), **TOLD)
            jobs.append((f"flat {name}", resumed, kind, ONE, load, made, one))
        if world == 3:
            state, step, _ = deepspeed
            made = split(state, out / "deepspeed", fix_ranks(FORMS["dcp"][0], 4))
            jobs.append(("deepspeed", worker.from_deepspeed, made, state, step, 2))
        if world < 4:
            plain, told = place / "ignored", {"model": shapes(ONE)} if world == 3 else {}
            lay_out = lambda s, n=world, told=told: rank_files.lay_out_fsdp2(  # noqa: E731
                s, of_ranks(n, **told), grid(n)
            )
            for source in ("ranks", "dcp"):
                made = split(plain / source, out / f"{world}-ignored-{source}", lay_out)
                jobs.append((f"ignored {source}", resumed, IGNORED, ONE, "pair", made, plain))
            local = place / "ignored1"
            made = split(local / "ranks", out / f"{world}-ignored1", lay_out, **TOLD)
            jobs.append(("ignored flat", resumed, IGNORED, ONE, "pair", made, local))
            flat_ignored, made = place / "flat_ignored", out / f"{world}-local-ignored"
            split(flat_ignored / "ranks", made, fix_ranks(FLAT_FORMS["local"][0], world), **TOLD)
            jobs.append(("local ignored", resumed, FLAT_IGNORED, ONE, "local", made, flat_ignored))
        for rank in worlds.run(world, run_in_turn, jobs):
            for name, result in rank.items():
                found.setdefault((world, name), []).append(result)
    made = split(place / "fsdp2" / "ranks", out / "plain", lay_out_one_file)
    jobs = [
        ("plain", resumed, "plain", TWO, "plain", made, place / "fsdp2"),
        ("converted", worker.as_one_file, out / "3-dcp", place / "fsdp2"),
    ]
    (alone,) = worlds.run(1, run_in_turn, jobs)
    return found | {(1, name): [result] for name, result in alone.items()}


def test_pytorch_loads_every_bit_of_every_form(loaded):
    assert len(loaded) == sum(len(a) + len(b) for a, b in AT.values()) + 13
    for name, ranks in loaded.items():
        for result in ranks:
            assert result.get("at") is None, (name, result["at"])
            assert result["differing"] == [], name


def test_training_continues_bitwise(loaded, trained):
    _, losses = trained
    for name in AT[2][0]:
        assert loaded[2, name][0]["losses"] == losses["fsdp2"], name
    for name in AT[2][1]:
        assert loaded[2, f"flat {name}"][0]["losses"] == losses["fsdp1"], name
    for source in ("ranks", "dcp"):
        assert loaded[2, f"ignored {source}"][0]["losses"] == losses["ignored"], source
    assert loaded[2, "local ignored"][0]["losses"] == losses["flat_ignored"]


@pytest.mark.parametrize("world", [3, 4])
def test_other_sizes_continue_as_from_pytorchs_own_checkpoint(loaded, trained, world):
    _, losses = trained
    for name in AT[world][0]:
        if name != "orig":  # another engine, which gathers in another order
            assert loaded[world, name][0]["losses"] == loaded[world, "torch"][0]["losses"], name
    for name, result in loaded.items():
        if name[1] == "deepspeed":
            continue
        runs = {"flat": "fsdp1", "ignored": "ignored", "local": "flat_ignored"}
        wanted = losses[runs.get(name[1].split()[0], "fsdp2")]
        found = [float.fromhex(loss) for loss in result[0].get("losses", wanted)]
        assert found == pytest.approx(list(map(float.fromhex, wanted)), rel=1e-6), name


def test_fsdp2_continues_where_deepspeed_stopped(loaded, deepspeed):
    """Three ranks from a ZeRO checkpoint of two; the losses that DeepSpeed itself had next."""
    found = [
        float.fromhex(x) if isinstance(x, str) else x for x in loaded[3, "deepspeed"][0]["losses"]
    ]
    assert found == pytest.approx(deepspeed[2][: len(found)], rel=2e-6)


@pytest.mark.parametrize(
    ("case", "lay_out"),
    [
        ("acc_fsdp2_sharded", FORMS["accelerate"][0]),
        (
            "acc_fsdp1_full",
            lambda s, n: rank_files.lay_out_fsdp1_full(s, of_ranks(n), accelerate=True),
        ),
    ],
)
def test_accelerate_loads_what_it_would_have_saved(libraries, tmp_path, case, lay_out):
    place = libraries / case
    made = split(place / "ckpt", tmp_path / "out", fix_ranks(lay_out, 3))
    jobs = [("load", worker.accelerate_loads, made, library_judge.CASES[case], place)]
    for (found,) in map(dict.values, worlds.run(3, run_in_turn, jobs)):
        assert found.get("at") is None, found["at"]
        assert found == {"differing": [], "step": 3}


@pytest.mark.parametrize("to", ["fsdp", "fsdp2"])
def test_no_parameter_of_no_shard_is_taken_for_an_ignored_one(torch_made, tmp_path, to):
    """Check a source whose ranks all have every flat parameter as a whole."""
    source = torch_made / "fsdp1_local_flat_no_shard" / "ckpt"
    told = {"model": "tests.judges.torch_models:menagerie", "wrap": "LlamaDecoderLayer"}
    form = {"state_dict_type": "local"} if to == "fsdp" else {}
    report = reshard.split(source, tmp_path / "out", to=to, world_size=3, **form, **told)
    assert not any("plain tensors" in note for note in report.notes)


# Buffers in ZeRO 3, which stores parameters in shards, and buffers whole

MENAGERIE = "tests.judges.torch_models:menagerie"
NONE = {"init_optimizer": "none"}
ZERO_3 = {  # name -> source and options; DCP's blocks state what each tensor is, or a model does
    "sharded": ("fsdp2_dcp", {}),
    "frozen": ("fsdp2_dcp_tied_frozen", {}),
    "twin": ("fsdp2_dcp_raw_twin", {}),
    "model": ("dcp_one_process", {"model": MENAGERIE}),
    "weights": ("fsdp2_dcp", NONE),
    "weights model": ("dcp_one_process", {"model": MENAGERIE, **NONE}),
}


@pytest.fixture(scope="module")
def stage_3(torch_made, tmp_path_factory):
    """Return name -> what a real engine holds after it loaded that output."""
    place, jobs = tmp_path_factory.mktemp("stage3"), {}
    alone = {"load_module_only": True, "load_optimizer_states": False}
    for name, (case, options) in ZERO_3.items():
        made = place / f"{name}.run"
        target = {"to": "deepspeed", "zero_stage": 3, "world_size": 2}
        if name == "frozen":
            target["param_groups"] = place / "groups.json"
            target["param_groups"].write_text('[{"fqns": ["frozen"], "frozen": true}, {}]')
        reshard.split(torch_made / case / "ckpt", made, **target, **options)
        arguments = alone if "init_optimizer" in options else {}
        told = {"how": "stage 3", "load": str(made), "build": CASES[case].build}
        jobs[name] = (2, told | {"arguments": arguments})
    judge = server.Judge("tests.judges.order_worker", "stage 3", {}, like=server.DEEPSPEED)
    return judge.run(place / "runs", jobs)


@pytest.mark.parametrize("name", ZERO_3)
def test_deepspeed_loads_the_buffers_of_pytorch_at_stage_3(name, stage_3, torch_made):
    found, expected = stage_3[name], read_expected(torch_made / ZERO_3[name][0])
    assert isinstance(found, dict), found
    for part in ("params", "buffers"):
        for fqn, value in expected[part].items():
            assert same(found[part][fqn], value), fqn
    assert bool(found["slots"]) == ("weights" not in name)
    for slot, tensors in found["slots"].items():
        for fqn, value in tensors.items():
            assert same(value, expected["optimizer"][fqn][slot]), (slot, fqn)


@pytest.mark.parametrize("to", [{"zero_stage": 3}, {"zero_stage": 3, **NONE}])
def test_stage_3_asks_what_no_file_states(torch_made, tmp_path, to):
    """A frozen parameter and a buffer of one process look alike; a weight or bias is known."""
    source = torch_made / "plain_ddp" / "ckpt"
    with pytest.raises(IncompleteError) as caught:
        reshard.split(source, tmp_path / "out", to="deepspeed", world_size=2, **to)
    assert "running" in caught.value.problem
    assert "weight" not in caught.value.problem
    assert "--model" in (caught.value.remedy or "")
    assert not (tmp_path / "out").exists()
    told = {"to": "deepspeed", "world_size": 2}
    reshard.split(source, tmp_path / "model", **told, **to, model=MENAGERIE)
    reshard.split(source, tmp_path / "stage2", **told, **{**to, "zero_stage": 2})


def test_a_new_optimizer_trains_no_buffer(torch_made, tmp_path):
    groups = tmp_path / "groups.json"
    groups.write_text('[{"lr": 1e-3}]')
    source = torch_made / "fsdp1_full_model_only" / "ckpt"
    told = {"to": "deepspeed", "zero_stage": 1, "init_optimizer": "zeros", "param_groups": groups}
    with pytest.raises(IncompleteError, match="trains only parameters"):
        reshard.split(source, tmp_path / "refused", **told)
    made = tmp_path / "made"
    reshard.split(source, made, **told, model=MENAGERIE)
    (states,) = made.rglob("*model_states.pt")
    held = torch.load(states, weights_only=False)
    assert sorted(held["buffer_names"]) == ["count", "running"]
    assert "running" not in held["param_shapes"][0]


# The same state


STATES = {  # case -> of which table
    **dict.fromkeys(
        """
        fsdp2_ranks_groups fsdp2_dcp_tied_frozen fsdp2_dcp_bf16 fsdp2_dcp_amsgrad
        fsdp2_dcp_raw_named fsdp2_ranks_unused fsdp2_ranks_2d_ws4 fsdp1_local_flat_ws4
        fsdp1_local_orig_frozen_ws4 fsdp1_local_flat_frozen_unit fsdp1_full_orig_frozen_ws4
        plain_nadam plain_adafactor plain_sgd plain_channels_last plain_tied dcp_odd_tensors
        dcp_objects
        """.split(),
        "torch",
    ),
    **dict.fromkeys(
        """
        z3_bf16 z2_groups_decay hf_z3_tied z1_full z2_amsgrad z1_sgd z3_subgroups_groups
        trainer_zero2_fp16 universal_z3
        """.split(),
        "deepspeed",
    ),
}


@pytest.fixture
def source(request, case):
    """Return the path of a case, and the options that a user passes for it."""
    if STATES[case] == "deepspeed":
        return request.getfixturevalue("made") / case / "run", {}
    row = CASES[case]
    told = {"model": row.model, "wrap": row.wrap, "key": row.key}
    place = request.getfixturevalue("torch_made") / case / "ckpt" / row.source
    return place, {word: value for word, value in told.items() if value is not None}


def has_optimizer(place, told):
    with reshard.open(place, **told) as checkpoint:
        return bool(checkpoint.manifest.train.param_groups)


def test_a_scripts_own_objects_are_copied(torch_made, tmp_path):
    """Beside a scheduler, arrays and the state of a generator, none of which is a model."""
    source = torch_made / "dcp_objects" / "ckpt"
    report = reshard.split(source, tmp_path / "out", to="dcp", world_size=2)
    assert not any(note.startswith("not copied: ") for note in report.notes)
    before, after = (reshard.open(place) for place in (source, tmp_path / "out"))
    with before, after:
        kept = before.manifest.train.client
        assert {f"objects.{name}" for name in ("path", "list", "numpy", "random")} <= kept.keys()
        assert after.manifest.train.client == kept


@pytest.mark.parametrize("case", STATES)
def test_a_dcp_directory_reads_back_as_its_source(case, source, tmp_path):
    place, told = source
    only = not has_optimizer(place, told)
    made = split(
        place,
        tmp_path / "out",
        lambda s: dcp.lay_out(s, of_ranks(5, weights_only=only)),
        weights_only=only,
        **told,
    )
    with reshard.open(made) as found, reshard.open(place, **told) as wanted:
        assert_same_state(found, wanted)


@pytest.mark.parametrize(
    "case", ["fsdp2_ranks_groups", "z3_bf16", "z1_full", "hf_z3_tied", "fsdp1_local_flat_ws4"]
)
@pytest.mark.parametrize("form", ["pair", "one", "verl", "names", "full"])
def test_files_of_ranks_read_back_as_their_source(case, form, source, tmp_path):
    place, told = source
    lay_out, *_ = FORMS[form]
    shapes = models.describe(told["model"]) if told else None
    if shapes and form != "full":

        def lay_out(state, ranks):
            naming = {
                "names": rank_files.ACCELERATE,
                "verl": rank_files.VERL,
                "one": ONE_FILE,
            }
            return rank_files.lay_out_fsdp2(
                state,
                of_ranks(ranks, model=shapes),
                grid(ranks),
                naming=naming.get(form, rank_files.PAIR),
            )

    made = split(place, tmp_path / "out", fix_ranks(lay_out, 3), **told)
    known = {"model": told["model"]} if told else {}
    with reshard.open(made, **known) as found, reshard.open(place, **told) as wanted:
        assert found.manifest.train.step in (None, wanted.manifest.train.step)
        assert set(found) == set(wanted)
        for name in wanted:
            assert same(found[name][...], wanted[name][...]), name
        for slot in ("exp_avg", "exp_avg_sq"):
            held, other = found.optimizer(slot), wanted.optimizer(slot)
            assert held.keys() == other.keys()
            assert all(same(held[name][...], other[name][...]) for name in other)
        steps = found.manifest.train.optimizer_step, wanted.manifest.train.optimizer_step
        assert dict(steps[0]) == dict(steps[1])


@pytest.mark.parametrize("form", ["dcp", "pair", "orig"])
def test_a_round_trip_keeps_the_bytes_of_every_tensor(trained, form, tmp_path):
    place = trained[0] / "fsdp2" / ("dcp" if form == "dcp" else "ranks")
    lay_out, *_ = FORMS[form]
    told = {"model": f"tests.judges.torch_models:{TWO}", "wrap": "LlamaDecoderLayer"}
    said = told if form == "orig" else {}
    there = split(place, tmp_path / "3", fix_ranks(lay_out, 3))
    again = split(there, tmp_path / "7", fix_ranks(lay_out, 7), **said)
    back = split(again, tmp_path / "2", fix_ranks(lay_out, 2), **said)
    direct = split(place, tmp_path / "direct", fix_ranks(lay_out, 2))
    files = sorted(path.name for path in direct.iterdir())
    assert files == sorted(path.name for path in back.iterdir())
    for name in files:
        assert (back / name).read_bytes() == (direct / name).read_bytes(), name


def test_rank_files_hold_what_pytorch_itself_put_there(trained, tmp_path):
    """The same storages, views and objects as torch's own files, at the ranks that wrote them."""
    place, _ = trained
    made = split(
        place / "fsdp2" / "ranks",
        tmp_path / "out",
        lambda s: rank_files.lay_out_fsdp2(s, of_ranks(2), grid(2)),
    )
    for name in ("model_rank0.pt", "model_rank1.pt", "optim_rank0.pt", "optim_rank1.pt"):
        ours, theirs = (torch.load(at / name) for at in (made, place / "fsdp2" / "ranks"))
        stamp = ours.reshard_stamp if name.startswith("model") else ours.pop("reshard_stamp")
        rank = int(Path(name).stem[-1])
        assert stamp == {
            "save_id": "an id",
            "rank": rank,
            "world_size": 2,
            "step": 3,
            "file": name,
        }
        assert_alike(ours, theirs)


def test_dcp_s_chunks_distinguish_parameters_from_buffers(torch_made, tmp_path):
    """A parameter of several rows lies on several ranks; a buffer lies whole on one."""
    source = torch_made / "fsdp2_dcp" / "ckpt"
    made = split(
        source, tmp_path / "out", lambda s: rank_files.lay_out_fsdp2(s, of_ranks(2), grid(2))
    )
    held = torch.load(made / "model_rank0.pt", weights_only=False)
    kinds = {name: type(value).__name__ for name, value in held.items()}
    assert {name for name, kind in kinds.items() if kind == "Tensor"} == {"running", "count"}
    assert set(kinds.values()) == {"Tensor", "DTensor"}


# Refusals


def refused(source, lay_out, error, *texts, **told):
    manifest = keys.edit(formats.read([Path(source)], **told), keys.Edits()).manifest
    with pytest.raises(error) as caught:
        lay_out(build_writable_state(manifest))
    for text in texts:
        assert text in str(caught.value)


def test_missing_state_is_named(torch_made, made, trained):
    place, _ = trained
    ranks = torch_made / "fsdp2_ranks_model_only_ws4" / "ckpt"
    refused(ranks, lambda s: dcp.lay_out(s, of_ranks(2)), IncompleteError, "has no optimizer state")
    elastic = made / "z1_elastic" / "run"
    refused(elastic, lambda s: dcp.lay_out(s, of_ranks(2)), IncompleteError, "hyper-parameters")
    flat = torch_made / "fsdp1_local_flat" / "ckpt"
    said = {"model": CASES["fsdp1_local_flat"].model, "wrap": CASES["fsdp1_local_flat"].wrap}
    refused(
        torch_made / "fsdp1_full/ckpt",
        lay_out_one_file,
        IncompleteError,
        "order of FSDP's",
        "--model",
    )
    told_model = formats.read([flat], **said)  # the model that explains the files orders them, too
    numbers = torch_state_dict.build_optimizer(
        build_writable_state(told_model), "index", named=True
    )["param_groups"]
    wanted = [name for name in shapes("menagerie").parameters if name in numbers[0]["param_names"]]
    assert list(numbers[0]["param_names"]) == wanted
    factored = torch_made / "plain_adafactor" / "ckpt"
    lay_out = lambda s: rank_files.lay_out_fsdp2(s, of_ranks(2, model=shapes("menagerie")), grid(2))  # noqa: E731
    refused(factored, lay_out, UnsupportedError, "has shape (7, 1)")
    decay = torch_made / "fsdp2_ranks_groups" / "ckpt"
    lay_out = lambda s: flat_files.lay_out_fsdp1_local(s, shapes("menagerie"), of_ranks(2))  # noqa: E731
    refused(decay, lay_out, UnsupportedError, "'odd' and 'small' would be in one flat parameter")
    lay_out = lambda s: flat_files.lay_out_fsdp1_local(s, shapes("menagerie", None), of_ranks(2))  # noqa: E731
    refused(decay, lay_out, UsageError, "how FSDP wraps the model")
    lay_out = lambda s: flat_files.lay_out_fsdp1_local(s, shapes(TWO), of_ranks(2))  # noqa: E731
    refused(decay, lay_out, IncompleteError, "has no 'frozen'")
    lay_out = lambda s: flat_files.lay_out_fsdp1_local(s, shapes("mlp", "Block"), of_ranks(2))  # noqa: E731
    refused(place / "fsdp2" / "ranks", lay_out, IncompleteError, "has no 'embed.weight'")
    refused(
        decay,
        lambda s: rank_files.lay_out_fsdp2(s, of_ranks(4), MeshGrid((2, 2))),
        UnsupportedError,
        "a mesh of 2x2",
    )


def test_numbers_follow_the_model_even_if_units_have_another_order(torch_made, tmp_path):
    """A flat optimizer lists the root's parameters first; ``torch.optim`` counts the model's."""
    said = {"model": CASES["fsdp1_local_flat"].model, "wrap": CASES["fsdp1_local_flat"].wrap}
    model = shapes("menagerie")
    made = split(
        torch_made / "fsdp1_local_flat" / "ckpt",
        tmp_path / "out",
        lambda s: lay_out_one_file(s, model),
        **said,
    )
    state = torch.load(made / "checkpoint.pt")
    expected = read_expected(torch_made / "fsdp1_local_flat")
    for number, fqn in enumerate(model.parameters):
        wanted = expected["optimizer"][fqn]
        assert all(same(state["optimizer"]["state"][number][k], v) for k, v in wanted.items()), fqn


def test_a_bf16_copy_is_written_on_request(made, tmp_path):
    lay_out = lambda s: dcp.lay_out(s, of_ranks(2, dtype=dtypes.BFLOAT16))  # noqa: E731
    split(made / "z3_bf16" / "run", tmp_path / "out", lay_out)
    with reshard.open(tmp_path / "out") as found, reshard.open(made / "z3_bf16" / "run") as wanted:
        for entry in wanted.manifest.of_kind("master"):
            assert same(found[entry.fqn][...], wanted[entry.fqn][...].bfloat16())
        assert all(value.dtype == "float32" for value in found.optimizer("exp_avg").values())


# Layouts


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(1, 12), st.booleans())
def test_blocks_are_those_of_pytorch(shape, shards, divided):
    """As ``torch.chunk`` cuts, every element once, and a place is named once."""
    value = StateTensor(dtypes.UINT8, shape, divided=divided)
    blocks = dcp.divide(value, shards)
    whole = torch.arange(max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()]
    whole = whole.reshape(shape)
    pieces = [whole[box.slices] for box in blocks]
    assert torch.equal(torch.cat(pieces) if shape else pieces[0], whole)
    assert len({box.origin for box in blocks}) == len(blocks)
    if divided and shape and shape[0]:
        theirs = [piece.shape for piece in torch.chunk(whole, shards)]
        assert [piece.shape for piece in pieces][: len(theirs)] == theirs
        assert len(pieces) <= len(theirs) + 1


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1, 5, 8, 14, 33]), st.sampled_from(["dcp", "pair"]))
def test_any_number_of_ranks_holds_everything(torch_made, ranks, form):
    place = torch_made / "fsdp2_ranks_unused" / "ckpt"
    lay_out, *_ = FORMS[form]
    manifest = keys.edit(formats.read([place]), keys.Edits()).manifest
    skeleton = lay_out(build_writable_state(manifest), ranks)
    files = {file.name: SourceFile(file.name, file.nbytes) for file in skeleton.files}
    check(Manifest(Origin("target", ""), index_entries(skeleton.entries), files, ordered=True))
    assert {e.key for e in skeleton.entries} == manifest.entries.keys()
    for file in skeleton.files:
        chunks = [chunk for entry in skeleton.entries for chunk in entry.chunks]
        spans = [chunk.byte_span for chunk in chunks if chunk.file == file.name]
        spans = sorted([*spans, *((at, at + len(data)) for at, data in file.literals)])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= file.nbytes
    for entry in skeleton.entries:
        for chunk in entry.chunks:
            assert chunk.byte_offset % 64 == 0


def test_lists_and_empty_dicts_are_flattened_as_pytorch_does():
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    state = {"a": {"b": [1, [2, 3]], "c": {}, "d": [], "e": [{"f": 1}, 2], "g": (1, {"h": 2})}}
    state |= {"i": [[{"j": None}]], "k": {3: {"l": "m"}}, "n": 5}
    flat, paths = flatten_state_dict(state)
    ours = dict(dcp.flatten(state))
    assert {".".join(map(str, path)): value for path, value in ours.items()} == flat
    assert {".".join(map(str, path)): path for path in ours} == paths


def test_state_that_was_not_read_unchanged_is_not_written():
    faithful = {"last_epoch": 3, "_last_lr": [0.1], "betas": (0.9, 0.99), "x": {"y": None}}
    assert torch_state_dict.is_restorable(faithful)
    assert torch_state_dict.is_restorable({"milestones": {30: 1}})
    for lost in ({"class": "A"}, [{"tensor": "uint8"}], {"bytes": 4}):
        assert not torch_state_dict.is_restorable({"x": lost})
