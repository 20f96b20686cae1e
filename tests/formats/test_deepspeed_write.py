"""DeepSpeed's geometry for random models, groups and world sizes."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from math import inf, prod
from pathlib import Path

import pytest
import torch

import reshard
from reshard.commands.output import check_overlaps, check_skeleton
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    SourceFile,
    TrainState,
    check,
    index_entries,
)
from reshard.engine.planning.planner import Plan
from reshard.errors import IncompleteError, UnsafeError, UnsupportedError, UsageError
from reshard.formats.deepspeed import flat_order, write
from reshard.formats.deepspeed.write import pickled_objects, spec, universal
from reshard.formats.deepspeed.write.spec import resolve_spec
from reshard.formats.request import Request
from reshard.training.state import build_writable_state

ADAM = {"lr": 0.1, "capturable": False}
SHAPES = ((), (1,), (2,), (7,), (13,), (3, 5), (0, 5), (2, 3, 4), (31, 3), (1, 1))
CONFIGS = (
    None,
    {"zero_optimization": {"stage": 0, "round_robin_gradients": True}},
    {"zero_optimization": {"stage": 0, "parameter_alignment": True, "sub_group_size": 20.0}},
    {"zero_optimization": {"stage": 2, "round_robin_gradients": True, "sub_group_size": 0}},
)


def entry(fqn, kind, shape, dtype=FLOAT32):
    chunk = contiguous("f", 0, dtype, whole(shape))
    return Entry(fqn, kind, dtype, shape, (chunk,) if prod(shape) else ())


def manifest(groups, others=(), *, config=None, slots=("exp_avg", "exp_avg_sq"), **train):
    """Return a checkpoint of groups of (fqn, shape) pairs, each with a master and slots."""
    entries = [
        entry(fqn, kind, shape)
        for group in groups
        for fqn, shape in group
        for kind in ("master", *(slots if prod(shape) else ()))
    ]
    named = [fqn for group in groups for fqn, shape in group if prod(shape)]
    state = TrainState(
        step=4,
        samples=8,
        optimizer_step=dict.fromkeys(named, 4.0),
        param_groups=tuple(ParamGroup(ADAM, tuple(fqn for fqn, _ in group)) for group in groups),
        config=config,
    )
    origin = Origin("deepspeed", "run", mesh={"world": 3}, precision="bfloat16")
    trained = {fqn: BFLOAT16 for group in groups for fqn, _ in group}
    return Manifest(
        origin,
        index_entries([*entries, *others]),
        {"f": SourceFile("f", 1 << 20)},
        train=replace(state, **train),
        trained_dtypes=trained,
        ordered=True,
    )


def random_manifest(chance):
    names = iter(range(10**6))
    groups = [
        [(f"p{next(names)}", chance.choice(SHAPES)) for _ in range(chance.randint(1, 7))]
        for _ in range(chance.randint(1, 4))
    ]
    for group in groups:
        group.append((f"p{next(names)}", (5,)))  # DeepSpeed takes no group without an element
    others = [
        entry("frozen", "param", (7, 3), BFLOAT16),
        entry("mask", "buffer", (3,), BY_NAME["bool"]),
        entry("nothing", "param", (0, 5), BFLOAT16),
    ]
    return manifest(groups, others, config=chance.choice(CONFIGS))


def test_every_layout_covers_every_tensor_once():
    chance = random.Random(3)
    for _ in range(120):
        source = random_manifest(chance)
        check(source)
        state = build_writable_state(source)
        stage, ranks = chance.randint(0, 3), chance.choice((1, 2, 3, 5, 8, 33))
        precision = chance.choice((None, FLOAT32, BFLOAT16, FLOAT16))
        skeleton = write.lay_out(
            state, Request(world_size=ranks, zero_stage=stage, dtype=precision)
        ).skeleton
        check_skeleton(skeleton)
        check_overlaps(skeleton)
        Plan(source.entries, skeleton)
        held = {key for key in source.entries if prod(source.entries[key].shape)}
        assert {e.key for e in skeleton.entries if e.numel} == held
        count = 1 if stage < 3 else ranks
        assert len(skeleton.files) == 1 + count + (ranks if stage else 0)


def test_a_run_that_took_turns_takes_them_at_the_new_size():
    names = "abcdefg"
    turned = flat_order.to_round_robin(names, 3)
    zero = {"stage": 2, "round_robin_gradients": True}
    source = manifest([[(name, (2,)) for name in turned]], config={"zero_optimization": zero})
    turned = flat_order.to_round_robin(names, 2)
    for stage, wanted in ((2, turned), (3, list(names)), (0, list(names))):
        choice = resolve_spec(build_writable_state(source), Request(world_size=2, zero_stage=stage))
        assert [member.fqn for member in choice.flats[0]] == wanted


def test_other_frameworks_groups_are_put_into_the_models_order():
    source = manifest([[("a", (2,)), ("b", (3,)), ("c", (4,))]])
    groups = (ParamGroup(ADAM, ("c", "a", "b")),)
    source = replace(source, train=replace(source.train, param_groups=groups))
    for origin, wanted in (("deepspeed", "cab"), ("fsdp", "abc")):
        state = build_writable_state(replace(source, origin=replace(source.origin, format=origin)))
        choice = resolve_spec(state, Request(world_size=2, zero_stage=2))
        assert "".join(member.fqn for member in choice.flats[0]) == wanted


def test_sub_groups_close_when_they_are_full():
    members = [(name, (4,)) for name in "abcde"]
    sizes = (
        ("auto", ["abcde"]),
        (1e9, ["abcde"]),
        (inf, ["abcde"]),
        (3, ["ab", "cd", "e"]),
        (0, list("abcde")),
    )
    for size, wanted in sizes:
        config = {"zero_optimization": {"sub_group_size": size, 1: "a key that is no text"}}
        source = manifest([members], config=config)
        choice = resolve_spec(build_writable_state(source), Request(world_size=2, zero_stage=3))
        assert ["".join(m.fqn for m in flat) for flat in choice.flats] == wanted


def test_steps_that_differ_are_refused_where_one_counts_for_all():
    source = manifest([[("a", (2,)), ("b", (2,))]], optimizer_step={"a": 4.0, "b": 3.0})
    for stage in (1, 2, 3):
        with pytest.raises(UnsupportedError, match=r"'b' 3\.0 times"):
            write.lay_out(build_writable_state(source), Request(world_size=2, zero_stage=stage))
    write.lay_out(build_writable_state(source), Request(world_size=2, zero_stage=0))


@pytest.mark.parametrize("missing", ["slot", "step", "hyper", "absent", "factored"])
def test_what_the_optimizer_needs_is_asked_for(missing):
    source = manifest([[("a", (2,)), ("b", (2,))]])
    if missing == "slot":
        source = source.with_entries(
            e for e in source.entries.values() if e.key != ("exp_avg_sq", "b")
        )
    elif missing == "step":
        source = replace(source, train=replace(source.train, optimizer_step={}))
    elif missing == "hyper":
        groups = tuple(replace(group, hyper={}) for group in source.train.param_groups)
        source = replace(source, train=replace(source.train, param_groups=groups))
    elif missing == "absent":
        source = replace(source, absent=("c",))
    else:
        odd = entry("b", "exp_avg", (1,))
        source = source.with_entries(
            [*(e for e in source.entries.values() if e.key != odd.key), odd]
        )
    error = UnsupportedError if missing == "factored" else IncompleteError
    with pytest.raises(error):
        write.lay_out(build_writable_state(source), Request(world_size=2, zero_stage=2))


@pytest.mark.parametrize(
    "asked",
    [
        {"zero_stage": 4},
        {"world_size": 0},
        {"dtype": BY_NAME["float64"]},
    ],
)
def test_requests_that_cannot_be(asked):
    state = build_writable_state(manifest([[("a", (2,))]]))
    with pytest.raises(UsageError):
        write.lay_out(state, Request(**{"world_size": 2, **asked}))


def test_client_values_are_carried_only_as_what_they_are():
    client = {
        "epoch": 3,
        "nested": {"a": [1, (2, None)]},
        "numbers": [{"tensor": "float32", "shape": [2]}],
        "object": {"deep": {"class": "numpy.ndarray"}},
        "module": 7,
    }
    state = build_writable_state(manifest([[("a", (2,))]], client=client))
    kept, lost = spec.select_extra_state(state)
    assert kept == {"epoch": 3, "nested": {"a": [1, (2, None)]}}
    assert lost == ["numbers", "object", "module"]
    assert len(write.lay_out(state, Request(world_size=1, zero_stage=1)).notes) == 3


def test_a_scaler_begins_where_training_was_not_scaled():
    state = build_writable_state(
        manifest([[("a", (2,))]], scaler={"class": "LossScaler", "cur_scale": 1.0})
    )
    choice = resolve_spec(state, Request(world_size=1, zero_stage=2, dtype=FLOAT16))
    assert choice.scaler_is_new
    assert choice.scaler["cur_scale"] == 65536
    assert choice.scaler["dynamic"] is True
    assert (
        "65536" in write.lay_out(state, Request(world_size=1, zero_stage=2, dtype=FLOAT16)).notes[0]
    )
    assert (
        resolve_spec(state, Request(world_size=1, zero_stage=2)).scaler == pickled_objects.UNSCALED
    )


@pytest.mark.parametrize("power", ["16", -1, 1024, True])
def test_a_scale_that_no_float_has_is_refused(power):
    with pytest.raises(UsageError, match="expected a number from 0 to 1023"):
        pickled_objects.make_initial_scaler({"initial_scale_power": power})


@pytest.mark.parametrize(("numel", "is_named"), [(4, True), (5, False)])
def test_a_group_of_which_the_last_rank_has_no_element_is_named(numel, is_named):
    state = build_writable_state(manifest([[("a", (numel,))]]))
    notes = write.lay_out_universal(state, Request(world_size=3, zero_stage=1)).notes
    text = f"param group 0 has {numel} elements, of which the last of 3 ranks gets none"
    assert any(text in note for note in notes) == is_named


def test_a_scaler_of_stage_0_becomes_whole():
    loose = {"cur_scale": 128.0, "cur_iter": 4, "last_overflow_iter": 1, "scale_factor": 2.0}
    whole_again = pickled_objects.complete_scaler({**loose, "scale_window": 500}, {"hysteresis": 3})
    assert whole_again["cur_scale"] == 128.0
    assert whole_again["scale_window"] == 500
    assert whole_again["cur_hysteresis"] == 3
    assert pickled_objects.make_scaler_keys(whole_again, 9) == {
        "dynamic_loss_scale": True,
        **loose,
        "scale_window": 500,
    }


def test_every_universal_layout_covers_every_tensor_once():
    chance = random.Random(5)
    for _ in range(60):
        source = random_manifest(chance)
        state = build_writable_state(source)
        asked = Request(world_size=chance.choice((1, 3, 33)), zero_stage=chance.randint(0, 3))
        skeleton = write.lay_out_universal(state, asked).skeleton
        check_skeleton(skeleton)
        check_overlaps(skeleton)
        Plan(source.entries, skeleton)
        held = {key for key in source.entries if prod(source.entries[key].shape)}
        assert {e.key for e in skeleton.entries if e.numel} == held
        trained = sum(kind == "master" for kind, _ in held)
        assert len(skeleton.files) == 4 * trained + 4
        assert {file.name for file in skeleton.files} == {
            file.name
            for file in write.lay_out_universal(
                state, Request(world_size=7, zero_stage=2)
            ).skeleton.files
        }


@pytest.mark.parametrize("name", ["..", "a/b", "../../a", "a\0b"])
def test_a_name_that_leads_out_of_the_directory_is_refused(name):
    state = build_writable_state(manifest([[(name, (2,))]]))
    with pytest.raises(UnsafeError):
        write.lay_out_universal(state, Request(world_size=1, zero_stage=1))
    write.lay_out(state, Request(world_size=1, zero_stage=1))


def test_a_universal_group_that_was_never_stepped_is_named():
    source = manifest([[("a", (2,))], [("b", (2,))]])
    train = replace(source.train, optimizer_step={"a": 4.0})
    kept = [e for e in source.entries.values() if e.kind == "master" or e.fqn == "a"]
    state = build_writable_state(replace(source.with_entries(kept), train=train))
    names = {
        file.name
        for file in write.lay_out_universal(
            state, Request(world_size=1, zero_stage=1)
        ).skeleton.files
    }
    assert "global_step4_universal/zero/b/exp_avg.pt" in names
    notes = write.lay_out_universal(state, Request(world_size=1, zero_stage=1)).notes
    assert any("groups were updated 0, 4 times" in note for note in notes)


def test_stage_3_is_given_only_what_all_groups_share():
    source = manifest([[("a", (2,))], [("b", (2,))]])
    first, second = source.train.param_groups
    groups = (first, replace(second, hyper={**ADAM, "lr": 0.2}))
    state = build_writable_state(replace(source, train=replace(source.train, param_groups=groups)))
    choice = resolve_spec(state, Request(world_size=1, zero_stage=3), universal=True)
    assert universal.find_common_hyper(choice) == {"capturable": False}
    assert [group["lr"] for group in choice.build_param_groups()] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("tag", "written"),
    [("checkpoint", "checkpoint"), ("pytorch_model", "pytorch_model"), ("best", "global_step3")],
)
def test_the_tag_that_lightning_and_accelerate_load_keeps_its_name(tag, written, tmp_path):
    run = Path(__file__).parents[1] / "data" / "deepspeed_0.19.8" / "z0_fused_bf16" / "run"
    (was,) = (path for path in run.iterdir() if path.is_dir())
    shutil.copytree(was, tmp_path / "run" / tag)
    reshard.split(tmp_path / "run" / tag, tmp_path / "out", zero_stage=1, world_size=2)
    assert (tmp_path / "out" / "latest").read_text() == written
    assert list((tmp_path / "out" / written).glob("*optim_states.pt"))


@pytest.mark.parametrize("target", [{"zero_stage": 1}, {"zero_stage": 3}, {"to": "ds-universal"}])
def test_a_complex_parameter_has_no_master(target, tmp_path):
    model = torch.nn.ParameterDict({"real": torch.ones(5), "wave": torch.ones(5) * 2j})
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    (model["real"] * model["wave"]).abs().sum().backward()
    optimizer.step()
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, tmp_path / "source.pt")
    with pytest.raises(UnsupportedError, match="'wave' is trained in complex64"):
        reshard.split(tmp_path / "source.pt", tmp_path / "out", **{"to": "deepspeed", **target})
    at_stage_0 = {"to": "deepspeed", "zero_stage": 0, "dtype": "fp32"}
    reshard.split(tmp_path / "source.pt", tmp_path / "out", **at_stage_0)
    with reshard.open(tmp_path / "out") as written:
        exp_avg = optimizer.state[model["wave"]]["exp_avg"]
        assert torch.equal(written.optimizer("exp_avg")["wave"][...], exp_avg)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_counts_in_its_group_needs_no_other_count(stage, tmp_path):
    """Take Adan of timm and pytorch_optimizer, which has the moments of Adam and two more slots."""
    weight = torch.ones(3, 2)
    slots = ("exp_avg", "exp_avg_sq", "exp_avg_diff", "previous_grad")
    optimizer = {
        "state": {0: {name: weight * number for number, name in enumerate(slots)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.98, 0.92, 0.99), "step": 3, "params": [0]}],
    }
    torch.save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "x.pt")
    reshard.split(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", zero_stage=stage)
    with reshard.open(tmp_path / "out") as checkpoint:
        (group,) = checkpoint.manifest.train.param_groups
        assert group.hyper["step"] == 3
        assert all(
            torch.equal(checkpoint.optimizer(name)["w"][...], weight * number)
            for number, name in enumerate(slots)
        )
