"""DeepSpeed runs split for other ranks and stages: read back, and resumed by real DeepSpeed."""

from __future__ import annotations

import pickle
import re
import zipfile
from argparse import Namespace
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import reshard
from reshard import formats
from reshard.commands.output import check_overlaps, check_skeleton
from reshard.containers import torch_reader
from reshard.containers.pickles.values import Call
from reshard.containers.torch_objects import Tensor
from reshard.containers.torch_writer import AS_WRITTEN
from reshard.core import keys
from reshard.core.box import whole
from reshard.core.dtypes import BFLOAT16
from reshard.core.stamps import Save
from reshard.engine.move.execute import execute
from reshard.engine.move.options import MoveOptions
from reshard.engine.planning.planner import Plan
from reshard.errors import IncompleteError
from reshard.formats.deepspeed import write
from reshard.formats.request import Request
from reshard.layouts.partition import compute_equal_piece
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block
from reshard.training.state import build_writable_state
from tests.judged.expected import read_expected
from tests.judged.resumed import Resumed, assert_goes_on, resume_all

pytestmark = pytest.mark.slow

TARGETS = ((0, 2), (1, 3), (2, 1), (2, 8), (3, 6))  # (stage, ranks)
SPLIT = """
    z0_bf16 z0_fp16_overflow z0_fp32 z1_bf16 z1_round_robin z1_adagrad z2_fp16 z2_fp16_overflow
    z2_groups_tiny z2_amsgrad z2_non_zip z2_alignment_round_robin_ws3 z3_bf16 z3_fp32 z3_full
    z3_groups_decay z3_subgroups_groups z3_exclude_frozen z3_zero_init_tied_ws4 bf16opt_groups_ws4
    hf_z2_tied hf_z3_tied
""".split()
SAME = """
    z0_bf16 z0_fp16_overflow z1_bf16 z1_alignment z1_fp16_ws4 z1_groups_tiny z1_full
    z2_fp16_overflow z2_groups_tiny z2_round_robin_groups_ws4 z2_alignment_round_robin_ws3 z2_sgd
    z2_fp32_ws1 z3_fp16_overflow z3_groups_tiny z3_groups_empty z3_subgroups_groups
    z3_fp32_ws3 hf_z3_tied
""".split()


def run_of(case, made):
    return made / case / "run"


def read(path):
    return keys.edit(formats.read([Path(path)]), keys.Edits()).manifest


def split(source, directory, *, stage, precision=None, **options):
    """Split as the command does, without its checks of the result."""
    manifest = read(source)
    state = replace(build_writable_state(manifest), save=Save("an id", 3))
    request = Request(zero_stage=stage, dtype=precision, **options)
    skeleton = write.lay_out(state, request).skeleton
    check_skeleton(skeleton)
    check_overlaps(skeleton)
    directory.mkdir(parents=True, exist_ok=True)
    planned = Plan(manifest.entries, skeleton)
    execute(planned, manifest.files, directory, MoveOptions(workers=2))
    return directory


def contents(manifest):
    """Return (kind or "weight", fqn) -> dtype and bytes; of each weight its most precise value."""
    state = build_writable_state(manifest)
    named = {("weight", weight.fqn): weight.value for weight in state.weights}
    named |= {
        (slot, member.fqn): entry
        for group in state.groups
        for member in group.members
        for slot, entry in member.slots.items()
    }
    with SourceFiles() as pool:
        return {
            key: (entry.dtype.name, entry.shape, bytes(read_block(pool, entry, whole(entry.shape))))
            for key, entry in named.items()
        }


def check_train(got, wanted, *, stage):
    for name in ("step", "skipped_steps", "samples", "optimizer_step", "scheduler", "client"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert [group.hyper for group in got.param_groups] == [g.hyper for g in wanted.param_groups]
    for group, other in zip(got.param_groups, wanted.param_groups, strict=True):
        assert sorted(group.fqns) == sorted(other.fqns)
    if wanted.scaler is None or got.scaler is None:
        return
    common = got.scaler.keys() & wanted.scaler.keys()
    assert "cur_scale" in common
    assert {key: got.scaler[key] for key in common} == {key: wanted.scaler[key] for key in common}
    if stage and "class" in wanted.scaler:
        assert got.scaler == wanted.scaler


@pytest.mark.parametrize("case", SPLIT)
def test_every_layout_holds_the_same_state(case, made, tmp_path):
    source = read(run_of(case, made))
    wanted = contents(source)
    for stage, ranks in TARGETS:
        made_here = split(
            run_of(case, made), tmp_path / f"{stage}_{ranks}", stage=stage, world_size=ranks
        )
        found = read(made_here)
        assert contents(found) == wanted, (stage, ranks)
        check_train(found.train, source.train, stage=stage)
        assert found.tied == source.tied
        assert found.frozen == source.frozen
        held = {weight.fqn for weight in build_writable_state(source).weights} | source.tied.keys()
        assert found.trained_dtypes == {
            fqn: dtype for fqn, dtype in source.trained_dtypes.items() if fqn in held
        }
        assert found.origin.mesh["world"] == ranks
        assert found.origin.detail == f"ZeRO stage {stage}"
        assert found.train.config["zero_optimization"]["stage"] == stage
        assert not found.absent


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("way", ["straight", "round"])
def test_same_layout_gives_the_files_that_deepspeed_wrote(case, way, made, tmp_path):
    """Every key and value of every file, but for what DeepSpeed gets wrong or leaves open."""
    source = run_of(case, made)
    manifest = read(source)
    own = {"stage": int(manifest.origin.detail[-1]), "world_size": manifest.origin.mesh["world"]}
    if way == "round":
        source = split(source, tmp_path / "a", stage=own["stage"], world_size=own["world_size"] + 3)
        source = split(source, tmp_path / "b", stage=(own["stage"] or 1) % 3 + 1, world_size=5)
    result = split(source, tmp_path / "same", **own)
    tag = (result / "latest").read_text()
    original = run_of(case, made)
    assert tag == (original / "latest").read_text()
    names = sorted(path.name for path in (original / tag).glob("*.pt"))
    assert sorted(path.name for path in (result / tag).iterdir()) == names
    model = torch_reader.read(next((original / tag).glob("*mp_rank_00_model_states.pt"))).root
    for name in names:
        written, ours = (Held(run / tag / name, model).flattened() for run in (original, result))
        different = [
            key for key in written.keys() | ours.keys() if written.get(key) != ours.get(key)
        ]
        assert not different, name
        with zipfile.ZipFile(result / tag / name) as archive:
            assert {each.partition("/")[0] for each in archive.namelist()} == {Path(name).stem}
        stamp = torch_reader.read(result / tag / name).stamp
        assert (stamp.save_id, stamp.step, stamp.file) == ("an id", 3, name)
        assert stamp.world_size == own["world_size"]
        assert f"pp_rank_{stamp.rank}_" in name or (stamp.rank == 0 and "pp_rank" not in name)


class Held:
    """A file as it was pickled, flattened: path -> value, or a tensor's dtype, shape and bytes."""

    def __init__(self, path, model):
        self.path, self.file = path, torch_reader.read(path, builders=AS_WRITTEN)
        found = re.search(r"pp_rank_(\d+)_", path.name)
        self.rank, self.ranks = int(found[1]) if found else 0, model["dp_world_size"]
        self.shapes, self.frozen = model["param_shapes"], model["frozen_param_shapes"]
        self.takes_turns = "round_robin_gradients" in model["ds_config"]["zero_optimization"]

    def flattened(self):
        root = self.file.root
        # The root of our model states is ordered, for an attribute: its stamp.
        return dict(self._of("", root.items if isinstance(root, Call) else root))

    def _of(self, where, value):
        if isinstance(value, Call):
            yield f"{where}()", (value.name, value.args)
            if not where.endswith("/module"):  # its state is the versions of the model's classes
                yield from self._of(f"{where}.", value.state)
            value = value.items
        if isinstance(value, dict):
            # the place of a tied name is not kept
            yield f"{where}{{}}", sorted(value) if where == "/module" else list(value)
            for key, item in value.items():
                if not self._is_wrong(key):
                    yield from self._of(f"{where}/{key}", item)
        elif isinstance(value, (list, tuple)):
            yield f"{where}[]", (type(value), len(value))
            for index, item in enumerate(value):
                yield from self._of(f"{where}/{index}", item)
        elif isinstance(value, Tensor):
            yield where, (value.dtype, value.shape, self._bytes(where, value))
        else:
            yield where, value

    def _is_wrong(self, key):
        """Return whether DeepSpeed itself writes a wrong value under the key."""
        return key == "param_slice_mappings" and self.takes_turns

    def _bytes(self, where, tensor):
        if not tensor.numel:
            return b""
        at, size = tensor.chunk.byte_offset, tensor.dtype.itemsize
        stored = self.path.read_bytes()[at : at + tensor.numel * size]
        return b"".join(stored[a * size : b * size] for a, b in self._values(where, tensor.numel))

    def _values(self, where, numel):
        """Return the elements that are not padding, which DeepSpeed leaves unchanged at stage 3."""
        section, _, key = where.rpartition("/")
        if section.endswith("/fp32_flat_groups"):
            members = list(self.shapes[int(key)].values())
        elif section.endswith("/frozen_param_fragments") and numel != prod(self.frozen[key]):
            members = [self.frozen[key]]
        else:
            return [(0, numel)]
        spans, at = [], 0
        for shape in members:
            start, stop = compute_equal_piece(prod(shape), self.ranks, self.rank)
            spans.append((at, at + stop - start))
            at += -(-prod(shape) // self.ranks)
        assert at == numel
        return spans


RUNS = (
    Resumed("z2_bf16", "z2_bf16", 2, 2),
    Resumed("z2_groups_decay", "z3_groups_decay", 3, 3),
    Resumed("z1_round_robin", "z1_round_robin", 3, 1),
    Resumed("z2_alignment", "z2_alignment", 3, 2),
    Resumed("z3_fp32", "z1_fp32", 3, 1),
    Resumed("z0_fp16_overflow", "z2_fp16", 2, 2),
    Resumed("z3_groups_tiny", "z2_groups_tiny", 4, 2),
    Resumed("z3_groups_empty", "z3_groups_empty", 3, 3),
    Resumed("hf_z3_tied", "hf_z0_tied", 2, 0),
    Resumed("z3_ulysses_ws4", "z1_bf16", 2, 1),
    Resumed("z2_bf16", "z3_ulysses_ws4", 4, 3),
    Resumed("z3_checkpointed", "z2_checkpointed", 3, 2),
    Resumed("z2_checkpointed", "z3_checkpointed", 2, 3),
    Resumed("z3_headed", "z1_headed", 3, 1),
    Resumed("z1_headed", "z3_headed", 2, 3),
)


@pytest.fixture(scope="module")
def resumed(made, tmp_path_factory) -> dict[Resumed, Any]:
    """Run -> what DeepSpeed holds and how it goes on; one process for all: imports take long."""
    place = tmp_path_factory.mktemp("resumed")
    directories = {
        run: split(
            run_of(run.source, made),
            place / "runs" / run.case,
            stage=run.stage,
            world_size=run.ranks,
        )
        for run in RUNS
    }
    return resume_all(directories, place)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_deepspeed_resumes_from_it(run, resumed, made):
    assert_goes_on(run, resumed[run], made)


@pytest.mark.parametrize(
    ("case", "stage", "is_told"),
    [
        ("z0_fp16", 1, True),
        ("z1_fp16", 0, True),
        ("z0_fp16", 0, False),
        ("z1_fp16", 2, False),
        ("z0_bf16", 1, False),
    ],
)
def test_moments_without_the_loss_scale_are_warned_of(made, tmp_path, case, stage, is_told):
    report = reshard.split(run_of(case, made), tmp_path / "out", zero_stage=stage)
    found = [text for text in report.warnings if "not multiply the loss by the loss scale" in text]
    assert len(found) == is_told


class _Stub:
    """Any class of DeepSpeed's, as torch.load needs one."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub if module.startswith("deepspeed") else super().find_class(module, name)


class _Stubs:
    """What torch.load takes as a pickle module."""

    Unpickler = _Unpickler
    load = pickle.load
    loads = pickle.loads


def torch_loaded(path):
    return torch.load(path, weights_only=False, pickle_module=_Stubs)


def test_fsdp_becomes_zero_2(torch_made, tmp_path):
    """DCP's fp32 weights are the masters; the module is cast from them; torch loads the files."""
    source = torch_made / "fsdp2_dcp" / "ckpt"
    expected = read_expected(torch_made / "fsdp2_dcp")
    run = split(source, tmp_path / "run", stage=2, world_size=3, precision=BFLOAT16)
    state, found = build_writable_state(read(source)), contents(read(run))
    assert {k: v for k, v in contents(read(source)).items() if k[0] != "weight"} == {
        k: v for k, v in found.items() if k[0] != "weight"
    }
    tag = run / "global_step3"
    model = torch_loaded(tag / "mp_rank_00_model_states.pt")
    trained = {member.fqn for group in state.groups for member in group.members}
    for name, value in expected["params"].items():
        assert torch.equal(model["module"][name], value.bfloat16()), name
    ranks = [
        torch_loaded(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for rank in range(3)
    ]
    states = [rank["optimizer_state_dict"] for rank in ranks]
    pieces = {
        "params": [state["single_partition_of_fp32_groups"][0] for state in states],
        "exp_avg": [state["base_optimizer_state"]["state"][0]["exp_avg"] for state in states],
    }
    assert all(state["base_optimizer_state"]["state"][0]["step"] == 3 for state in states)
    assert "clip_grad" not in states[0]  # loading it would end the run's own clipping
    shapes = model["param_shapes"][0]
    assert set(shapes) == trained
    for kind, parts in pieces.items():
        flat, at = torch.cat(parts), 0
        for name, shape in shapes.items():
            value = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
            held = {**expected["optimizer"][name], "params": expected["params"][name]}
            assert torch.equal(value, held[kind]), (kind, name)
    notes = write.lay_out(state, Request(zero_stage=2, world_size=3, dtype=BFLOAT16)).notes
    assert any("torch_adam" in note for note in notes)


def test_fsdp_1_is_in_the_order_of_units_and_zero_in_that_of_the_model(torch_made, tmp_path):
    """DeepSpeed would give each parameter what stands at its place, whatever its name."""
    source = torch_made / "fsdp1_full" / "ckpt"
    expected = read_expected(torch_made / "fsdp1_full")
    (group,) = read(source).train.param_groups
    wanted = [name for name in expected["params"] if name in group.fqns]
    assert list(group.fqns) != wanted
    for stage in (1, 3):
        run = split(source, tmp_path / str(stage), stage=stage, world_size=2)
        assert list(read(run).train.param_groups[0].fqns) == wanted


def test_weights_alone_are_refused(torch_made, tmp_path):
    with pytest.raises(IncompleteError, match="has no optimizer state"):
        split(torch_made / "dcp_model_only" / "ckpt", tmp_path / "run", stage=2, world_size=2)


@pytest.mark.parametrize(("stage", "count"), [(0, 3), (1, 2), (2, 2), (3, 3)])
def test_a_group_without_elements_stays_where_an_engine_may_have_it(made, tmp_path, stage, count):
    source = run_of("z3_groups_empty", made)
    reshard.split(source, tmp_path / "out", to="deepspeed", zero_stage=stage, world_size=3)
    with reshard.open(tmp_path / "out") as checkpoint:
        groups = checkpoint.manifest.train.param_groups
    assert [bool(group.fqns) for group in groups] == [True, True, False][:count]


def test_elastic_checkpoints_lack_what_the_optimizer_needs(made, tmp_path):
    with pytest.raises(IncompleteError, match="hyper-parameters"):
        split(run_of("z1_elastic", made), tmp_path / "run", stage=1, world_size=2)


def make_client_state():
    """Return what a script may pass as ``client_state``, which DeepSpeed pickles with its keys."""
    queue = torch.arange(6.0).reshape(2, 3).t()
    return {
        "ema": {"weights": [queue, queue], "fast": torch.ones(3, dtype=torch.bfloat16)},
        "seen": {"numpy": np.arange(5), "words": np.array(["x", "yy"]), "mean": np.float64(2.5)},
        "by_epoch": {0: 0.5, 10: None},
        "raw": b"\x80",
        "kinds": {"a", "b"},
        "args": Namespace(dtype=torch.float16, table=torch.ones(2)),
        "inner": {"scheduler": {"last_epoch": 77}},
    }


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(got[key], value)
    elif isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Namespace):
        assert_same(vars(got), vars(wanted))
    elif isinstance(wanted, (torch.Tensor, np.ndarray)):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert bool((got == wanted).all())
    else:
        assert got == wanted


@pytest.mark.parametrize("case", ["z1_full", "z3_full"])
def test_a_scripts_own_tensors_and_objects_go_along(case, copied, tmp_path):
    source, own = copied(case), make_client_state()
    weight = torch.nn.Parameter(torch.ones(1))
    by_step = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight]), [5, 9])
    for file in source.rglob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        torch.save({**state, **own, "lr_scheduler": by_step.state_dict()}, file)
    report = reshard.split(source, tmp_path / "there", world_size=3)
    assert not any("not copied" in note for note in report.notes)
    reshard.split(tmp_path / "there", tmp_path / "back", world_size=2)
    for file in (tmp_path / "back").rglob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        assert_same({key: state[key] for key in own}, own)
        assert state["ema"]["weights"][0] is state["ema"]["weights"][1]
        assert state["lr_scheduler"] == by_step.state_dict()  # its milestones are by number
        assert state["lr_scheduler"]["milestones"] == {5: 1, 9: 1}
    assert reshard.diff(source, tmp_path / "back").same
    for file in (tmp_path / "back").rglob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["ema"]["fast"][0] = 2
        torch.save(state, file)
    (other,) = reshard.diff(source, tmp_path / "back").unequal
    assert (other.kind, other.fqn) == ("client tensor", "ema.fast")


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_scripts_own_tensors_go_to_layouts_of_pytorch(to, copied, tmp_path):
    source, own = copied("z1_full"), make_client_state()
    del own["seen"]  # numpy arrays are objects of DCP, which dcp_to_torch_save does not load
    (file,) = source.rglob("*model_states.pt")
    torch.save({**torch.load(file, weights_only=False), **own}, file)
    written = tmp_path / ("out" if to == "dcp" else "out.pt")
    reshard.split(source, written, to=to, world_size=3 if to == "dcp" else 1)
    if to == "dcp":
        dcp_to_torch_save(written, written := tmp_path / "out.pt")
        own["by_epoch"] = {str(key): value for key, value in own["by_epoch"].items()}
    found = torch.load(written, weights_only=False)
    assert_same({key: found[key] for key in own}, own)
