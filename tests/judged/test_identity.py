"""Files of another rank, step or run in real checkpoints are detected by each command."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemReader as DcpReader

import reshard
from reshard import formats
from reshard.checks.identity import check_identity
from reshard.checks.identity.claims import find_conflicts
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.cli import cli
from reshard.commands.lines import DetailLine
from reshard.core.manifest import MASTER
from reshard.errors import CorruptError
from tests.judged import mutations
from tests.judges import deepspeed_judge

pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron's imports

MEGATRON = Path(__file__).parents[1] / "data/megatron/llama_tp2pp2/ckpt"
OPTIMIZERS = "*_optim_states.pt"


@pytest.fixture
def zero(copied):
    """Return a writable copy of a run of ZeRO 2 in bf16."""
    return copied("z2_bf16")


@pytest.fixture
def megatron(tmp_path):
    """Return a writable copy of a real run of Megatron-LM, TP 2 x PP 2."""
    return Path(shutil.copytree(MEGATRON, tmp_path / "run"))


def ranks_of(root, pattern):
    first, second, *_ = sorted(root.rglob(pattern))
    return first, second


def exchange(a, b):
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def test_exchanged_files_of_two_ranks_are_refused(zero, tmp_path):
    exchange(*ranks_of(zero, OPTIMIZERS))
    for command in (reshard.merge, reshard.split):
        with pytest.raises(
            CorruptError, match=r"optim_states.*optim_states is expected at this path"
        ):
            command(zero, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_file_that_was_copied_over_another_is_refused(zero, tmp_path):
    first, second = ranks_of(zero, OPTIMIZERS)
    shutil.copyfile(first, second)
    with pytest.raises(CorruptError, match=second.name):
        reshard.merge(zero, tmp_path / "out.safetensors")


def test_the_command_exits_with_3_and_suggests_an_option(zero, tmp_path):
    exchange(*ranks_of(zero, OPTIMIZERS))
    arguments = ["merge", str(zero), str(tmp_path / "out.safetensors")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exception.exit_code == 3
    assert "--trust none" in str(result.exception)
    assert CliRunner().invoke(cli, [*arguments, "--trust", "none"]).exit_code == 0


def test_folders_of_megatron_ranks_that_were_exchanged_are_refused(megatron, tmp_path):
    exchange(*ranks_of(megatron, "model_optim_rng.pt"))
    with pytest.raises(CorruptError, match="saved by rank"):
        reshard.merge(megatron, tmp_path / "out")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            "llama_tp4",
            "common.pt: its args says grid pp 1, tp 4, but .metadata says grid pp 1, tp 2",
        ),
        ("llama_fp16_tp2", "says precision fp16, but .metadata says precision bf16"),
        ("llama_odd_tp2", "padded_vocab_size 112, but .metadata says padded_vocab_size 96"),
        ("save", "says directory of the run /another/run, but"),
    ],
)
def test_the_common_file_of_another_run_of_megatron_is_refused(
    megatron_case, tmp_path, other, says
):
    source = megatron_case("llama_distopt_tp2dp2") / "torch_dist_fully_reshardable"
    run = Path(shutil.copytree(source, tmp_path / "run"))
    common = next(run.rglob("common.pt"))
    if other == "save":  # an argument that the judge's runs do not state
        root = torch.load(common, weights_only=False)
        about = DcpReader(common.parent).read_metadata().storage_meta
        for place, is_own in ((Path(about.checkpoint_id).parent, True), ("/another/run", False)):
            root["args"].save = str(place)
            torch.save(root, common)
            assert bool(find_conflicts(formats.read([run]).files)) is not is_own
    else:
        shutil.copy(next((megatron_case(other) / "torch_dist").rglob("common.pt")), common)
    with pytest.raises(CorruptError, match=says):
        reshard.merge(run, tmp_path / "out")
    report = reshard.verify(run)
    assert [check.name for check in report.checks if check.failures] == ["ranks"]


def test_quick_checks_refuse_what_merge_refuses(megatron_case, tmp_path):
    """Files without a statement about their rank, whose values tell it."""
    run = shutil.copytree(megatron_case("llama_distopt_tp2dp2") / "torch", tmp_path / "run")
    assert not any(check.failures for check in reshard.verify(run).checks)
    exchange(*ranks_of(Path(run), "distrib_optim.pt"))
    with pytest.raises(CorruptError, match="its master weights do not belong to the weights"):
        reshard.merge(run, tmp_path / "out")
    failed = [check for check in reshard.verify(run).checks if check.failures]
    assert [check.name for check in failed] == ["ranks"]
    assert "its master weights do not belong" in failed[0].failures[0]


def test_seeds_identify_tensor_parallel_ranks_without_arguments(megatron, tmp_path):
    files = sorted(megatron.rglob("model_optim_rng.pt"))
    for path in files:
        state = torch.load(path, weights_only=False)
        del state["args"].rank
        torch.save(state, path)
    check_identity(formats.read(megatron))
    exchange(files[0], files[2])  # the first stage's ranks
    with pytest.raises(
        CorruptError,
        match="states that the tensor-parallel rank is 1, but 0 is expected at this path",
    ):
        check_identity(formats.read(megatron))


def test_lists_of_parameters_identify_the_first_and_last_pipeline_stages(megatron):
    files = sorted(megatron.rglob("model_optim_rng.pt"))
    for path in files:
        state = torch.load(path, weights_only=False)
        del state["args"].rank, state["rng_state"]
        torch.save(state, path)
    exchange(files[0], files[1])
    exchange(files[2], files[3])
    found = find_conflicts(formats.read(megatron).files)
    assert len(found) == len(files)
    assert "states that the first pipeline stage is another, but this one is" in found[0].problem
    with pytest.raises(CorruptError, match="is expected at this path"):
        check_identity(formats.read(megatron))


def test_masters_of_another_run_are_detected_by_their_values(zero):
    _, path = ranks_of(zero, OPTIMIZERS)
    state = torch.load(path, weights_only=False)
    for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        flat.data.add_(0.125)
    torch.save(state, path)
    with pytest.raises(
        CorruptError,
        match=rf"{path.name}.*master weights do not belong to the weights in mp_rank_00",
    ):
        check_identity(formats.read(zero))


def test_one_element_that_differs_is_found_by_full_trust(zero):
    manifest = formats.read(zero)
    entry = max(manifest.of_kind(MASTER), key=lambda entry: entry.numel)
    assert entry.numel > 1000
    found = []
    for at in (0, entry.numel // 2, entry.numel - 1):
        chunk = next(c for c in entry.chunks if c.box.volume)
        path, offset = Path(chunk.file), chunk.byte_offset + 4 * (at % chunk.box.volume)
        before = path.read_bytes()
        changed = bytearray(before)
        changed[offset : offset + 4] = torch.tensor([7.0]).numpy().tobytes()
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match="its master weights do not belong"):
            check_identity(formats.read(zero), "full")
        try:
            check_identity(formats.read(zero), "sampled")
        except CorruptError:
            found.append(at)
        path.write_bytes(before)
    assert len(found) < 3  # a sample is a sample


def test_names_in_another_order_are_refused(zero):
    path = next(zero.rglob("mp_rank_00_model_states.pt"))
    state = torch.load(path, weights_only=False)
    group = state["param_shapes"][0]
    shapes = [tuple(shape) for shape in group.values()]
    twice = next(shape for shape in shapes if shapes.count(shape) > 1)
    one, two, *_ = (name for name, shape in group.items() if tuple(shape) == twice)
    other = {one: two, two: one}
    items = [(other.get(name, name), shape) for name, shape in group.items()]
    state["param_shapes"][0] = type(group)(items)
    torch.save(state, path)
    with pytest.raises(CorruptError):
        check_identity(formats.read(zero))


def test_trust_none_compares_nothing(zero):
    exchange(*ranks_of(zero, OPTIMIZERS))
    identity = check_identity(formats.read(zero), "none")
    assert (identity.evidence, identity.compared) == ([], 0)
    assert "not checked" in str(identity)


def test_verify_and_inspect_name_the_file(zero):
    exchange(*ranks_of(zero, OPTIMIZERS))
    check = reshard.verify(zero).check("ranks")
    assert check.status == "failed"
    assert len(check.failures) == 2
    assert any(
        "is expected at this path" in text for text in reshard.inspect(zero).to_dict()["warnings"]
    )


def test_the_report_warns_if_nothing_was_compared(zero, tmp_path):
    for report in (
        reshard.merge(zero, tmp_path / "out.safetensors", trust="none"),
        reshard.split(zero, tmp_path / "split", world_size=1, trust="none"),
    ):
        shown = [line for line in report.lines() if type(line) is not DetailLine]
        assert any(line.startswith("warning     --trust none: nothing checked") for line in shown)


def test_the_report_says_what_was_compared(zero, tmp_path):
    report = reshard.merge(zero, tmp_path / "out.safetensors")
    assert report.identity.compared > 0
    assert any(line.startswith("identity ") for line in report.lines())
    assert report.to_dict()["identity"]["trust"] == "sampled"


def test_contradicting_counters_are_warnings(zero):
    manifest = formats.read(zero)
    train = replace(manifest.train, step=manifest.train.step + 2)
    found = find_counter_conflicts(replace(manifest, train=train))
    assert any("the run counts" in text for text in found)


def test_an_optimizer_of_another_step_is_named_by_its_rate(library_case, tmp_path):
    """Accelerate's files state no step of the run."""
    root = Path(shutil.copytree(library_case("acc_automatic") / "ckpt/checkpoints", tmp_path / "x"))
    earlier, later = (root / f"checkpoint_{number}" for number in (0, 1))
    assert not find_counter_conflicts(formats.read(later))
    shutil.copyfile(earlier / "optimizer.bin", later / "optimizer.bin")
    (problem,) = find_counter_conflicts(formats.read(later))
    assert (
        "the last learning rate of the scheduler is 0.004, but the optimizer's is 0.003" in problem
    )
    scheduler = torch.load(later / "scheduler.bin")
    torch.save({**scheduler, "base_lrs": [0.5, 0.5]}, later / "scheduler.bin")
    assert (
        "the first learning rate of the scheduler is 0.5"
        in find_counter_conflicts(formats.read(later))[1]
    )


COVERING = [  # one of each form that names its files, its ranks or its values in another way
    *("deepspeed z1_fp16", "deepspeed z3_bf16", "deepspeed bf16opt", "deepspeed moe_z2"),
    *("torch fsdp1_local_flat", "torch fsdp1_sharded_shardedtensor", "torch fsdp2_ranks"),
    *("torch fsdp2_dcp", "torch hf_storage_sharded"),
]


@pytest.mark.parametrize("name", COVERING)
@pytest.mark.parametrize("command", ["merge", "split", "convert", "reader"])
def test_every_mutation_is_reported(made, torch_made, name, command):
    place = made if name.startswith("deepspeed") else torch_made.parent
    source = next(each for each in mutations.list_sources(place) if each.name == name)
    tried = 0
    for what, mutate in mutations.list_mutations(source):
        try:
            found, text = mutations.run_mutated(source, mutate, command)
        except mutations.NotApplicableError:
            continue
        tried += 1
        assert found != mutations.SILENT, (what, text)
    assert tried > 1


def test_a_file_of_another_run_is_refused_by_its_values(made, tmp_path, monkeypatch):
    names = ["z1_fp16", "z2_bf16", "bf16opt"]
    monkeypatch.setenv("JUDGE_SEED_SHIFT", "100")
    deepspeed_judge.make_all(tmp_path, names)
    for name in names:
        source = mutations.Source(name, made / name / "run")
        for what, mutate in mutations.list_mutations(source, seed=tmp_path / name / "run"):
            if what.startswith("seed"):
                found, text = mutations.run_mutated(source, mutate, "merge")
                assert (found, "its master weights do not belong" in text) == (
                    mutations.REFUSED,
                    True,
                ), text
