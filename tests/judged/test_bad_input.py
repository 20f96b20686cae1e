"""Bad checkpoints: one error of its class each, which names what is wrong; nothing is left behind.

Lost, mixed and truncated files of ranks are damaged in `test_lost_files`, `test_falsified` and
`test_verify_damage`, what a file itself states in `tests/containers`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # DTensor pickles need it
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.tensor import Partial, Shard

import reshard
from reshard.core.keys import Edits
from reshard.engine.move import journal
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    ResourceError,
    StaleError,
    UnrecognisedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from tests.judged.conftest import KEPT
from tests.judged.damage import edit_file
from tests.judged.expected import read_expected
from tests.support.edited_files import edit_safetensors_header
from tests.support.programs import LIMIT_S, run_reshard

MODEL = "tests.judges.torch_models:menagerie"
TIED_MODEL = "tests.judges.torch_models:menagerie_tied"
KEY = "model.odd"
BOMB_LIMIT_S = 30  # of its own work: a busy machine may take longer
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt"
STATES = "mp_rank_00_model_states.pt"


@pytest.fixture
def folder(request):
    """Return case -> its folder: made here, or the copy that is kept for other libraries."""

    def find(case: str) -> Path:
        made = (request.getfixturevalue(name) for name in ("torch_made", "libraries", "made"))
        places = (place / case for places in (made, KEPT.iterdir()) for place in places)
        return next(place for place in places if place.is_dir())

    return find


@pytest.fixture
def copied(folder, tmp_path):
    """Return a function that makes a private, writable copy of one case's checkpoint."""

    def copy(case: str) -> Path:
        found = folder(case)
        inside = "ckpt" if (found / "ckpt").is_dir() else "run"
        return Path(shutil.copytree(found / inside, tmp_path / "src"))

    return copy


@pytest.fixture
def refused(tmp_path):
    """Assert that opening and merging fail with one error class, leave nothing, change nothing."""

    def check(sources, error, *words: str, **options: Any) -> None:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        paths = sources if isinstance(sources, list) else [sources]
        before = [_listing(path) for path in paths]
        with pytest.raises(error), reshard.open(sources, **options):
            pass
        with pytest.raises(error) as raised:
            reshard.merge(sources, out / "x.safetensors", **options)
        assert [word for word in words if word not in str(raised.value)] == []
        assert list(out.iterdir()) == []
        assert [_listing(path) for path in paths] == before

    return check


def _listing(place: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_size) for p in place.rglob("*") if p.is_file())


@pytest.fixture
def merge_all(tmp_path):
    """Return the tensors and the report of a merge that must succeed."""

    def run(sources, **options: Any):
        out = tmp_path / "good.safetensors"
        report = reshard.merge(sources, out, dtype="keep", overwrite=True, **options)
        return load_file(out), report

    return run


@pytest.fixture
def right(folder, merge_all):
    """Assert that a merge gives what PyTorch reported of the case."""

    def check(case: str, sources, **options: Any):
        expected = read_expected(folder(case))
        found, report = merge_all(sources, **options)
        wanted = {**expected["params"], **expected["buffers"]}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        return report

    return check


@contextmanager
def allow_refusal(error, word: str) -> Iterator[None]:
    """Assert what is asserted inside, or that the input is refused with a helpful message."""
    try:
        yield
    except error as raised:
        if word not in str(raised):
            raise


# Damage of a whole directory


def edit(pattern: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        for path in sorted(place.rglob(pattern)):
            edit_file(path, change)

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    def damage(place: Path) -> None:
        path = next(place.rglob(name))
        path.write_bytes(change(path.read_bytes()))

    return damage


def remove(pattern: str) -> Callable[[Path], Any]:
    return lambda place: [path.unlink() for path in sorted(place.rglob(pattern))]


def copy(name: str, other: str) -> Callable[[Path], Any]:
    def damage(place: Path) -> None:
        path = next(place.rglob(name))
        shutil.copy(path, path.with_name(other))

    return damage


def keep_rank_1(place: Path) -> None:
    (place / "rank0.pt").unlink()
    (place / "rank1.pt").rename(place / "checkpoint.pt")


def claim_four_ranks(place: Path) -> None:
    for path in list(place.rglob("*_world_size_2_rank_[01].pt")):
        shutil.copy(path, path.with_name(path.name.replace("size_2", "size_4")))


def make_several_runs(place: Path) -> None:
    for name in (".copy", "a", "b"):
        shutil.copytree(place / "global_step3", place / name / "global_step3")
        shutil.move(place / "latest", place / name) if name == "b" else shutil.copy(
            place / "latest", place / name
        )
    shutil.rmtree(place / "global_step3")


def flip_head(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x10]) + data[1:]


def flip_member(part: str) -> Callable[[bytes], bytes]:
    """Flip a bit in the last of the largest members whose names have ``part``.

    In optimizer states the moments come before the fp32 weights, which a merge reads.
    """

    def change(data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            named = [m for m in reversed(archive.infolist()) if part in m.filename]
            member = max(named, key=lambda m: m.file_size)
        name, extra = struct.unpack_from("<2H", data, member.header_offset + 26)
        at = member.header_offset + 30 + name + extra + member.file_size // 2
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    return change


def cut_off_an_offset(data: bytes) -> bytes:
    """Make [4, 0], the offsets of the first shard, [4]; POP takes the 0 off the stack again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in members if name.endswith("data.pkl"))
    cut = members[name].index(b"K\x04K\x00e", members[name].index(b"shard_offsets"))
    members[name] = members[name][:cut] + b"K\x04K\x000e" + members[name][cut + 5 :]
    return pack(members)


def pack(members: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return held.getvalue()


RANK_0, RANK_1 = "model_rank0.pt", "model_rank1.pt"
TWO_OF_ONE = (CorruptError, UnrecognisedError)
DAMAGES: dict[str, tuple[Any, ...]] = {  # a checkpoint, what is done to it, the error, its words
    "no optimizer's file": (
        *("z2_bf16", remove("*_optim_states.pt"), IncompleteError),
        *("*_optim_states.pt", "--from torch"),
    ),
    "a model-parallel rank without its model": (
        *("z2_bf16", copy(OPTIM.format(0, 0), OPTIM.format(0, 1)), IncompleteError),
        *("mp_rank_01_model_states.pt", "is missing"),
    ),
    "files of two precisions": (
        *("z2_bf16", copy(OPTIM.format(1, 0), OPTIM.format(1, 0)[5:]), CorruptError, "two runs"),
    ),
    "an empty file": (
        *("z2_bf16", rewrite(OPTIM.format(0, 0), lambda _: b""), CorruptError),
        *(OPTIM.format(0, 0), "empty"),
    ),
    "a bit of a pickle": (
        *("z2_bf16", rewrite(STATES, flip_member("data.pkl")), CorruptError),
        *(STATES, "data.pkl", "CRC-32"),
    ),
    "no latest": ("z2_bf16", remove("latest"), UnrecognisedError, "latest", "--tag"),
    "a latest that does not exist": (
        *("z2_bf16", rewrite("latest", lambda _: b"global_step9"), UnrecognisedError),
        *("global_step9", "global_step3"),
    ),
    "a latest outside": (
        *("z2_bf16", rewrite("latest", lambda _: b"../../etc"), CorruptError),
        *("latest", "not a tag"),
    ),
    "several runs": (
        *("z2_bf16", make_several_runs, UnrecognisedError),
        *("several runs: ", "/src/a, ", "/src/b\n"),
    ),
    "one rank's file, whatever it is called": (
        *(
            "fsdp2_ranks_one_file",
            keep_rank_1,
            IncompleteError,
            "checkpoint.pt of a run of 2 ranks",
        ),
        *("the file of rank 0", "saved only one rank's file"),
    ),
    "another rank's file": (
        *("fsdp2_ranks_ws4", copy(RANK_1, "model_rank2.pt"), CorruptError),
        *("model_rank2.pt", "tensors of rank 1", RANK_1),
    ),
    "another head of a file": ("fsdp2_ranks", rewrite(RANK_1, flip_head), CorruptError, RANK_1),
    "an optimizer that is empty": (
        *("fsdp2_ranks", rewrite("optim_rank1.pt", lambda _: b""), CorruptError, "optim_rank1.pt"),
    ),
    "half a file": (
        *("fsdp2_ranks", rewrite(RANK_1, lambda data: data[: len(data) // 2]), CorruptError),
        *(RANK_1, "zip directory", "fetch it again"),
    ),
    "two world sizes": (
        *("verl_sample", claim_four_ranks, CorruptError, "world_size_2", "world_size_4"),
    ),
    **{
        f"a second file {name}": ("fsdp2_ranks", copy(RANK_0, name), TWO_OF_ONE, RANK_0, name)
        for name in ("model_rank00.pt", "model_rank0.bin", "model.pt")
    },
    **{
        f"{word} on one rank": (
            *("fsdp2_ranks", edit(RANK_1, lambda state, value=value: state.update(odd=value))),
            *(CorruptError, "'odd'", word, RANK_1, "mixed"),
        )
        for value, word in ((torch.zeros(7, 13), "plain tensor"), (5, "5"), ({"a": 1}, "odd"))
    },
    "an offset fewer": (
        *("fsdp1_sharded_shardedtensor", rewrite(RANK_1, cut_off_an_offset)),
        *((CorruptError, UnsupportedError), RANK_1),
    ),
    "half of the metadata": (
        *("fsdp2_dcp", rewrite(".metadata", lambda data: data[: len(data) // 2]), CorruptError),
        ".metadata",
    ),
    "a shard of HF storage fewer": (
        *("hf_storage_sharded_ws4", remove("shard-00002-*"), IncompleteError),
        "the shard of rank 3, but none of rank 1",
    ),
    "an interrupted save beside others": (
        *("trainer_ddp", lambda place: (place / "checkpoint-6").mkdir(), UnrecognisedError),
        "checkpoint-",
    ),
    "a pointer to nothing": (
        *("verl_sample", rewrite("latest_checkpointed_iteration.txt", lambda _: b"7")),
        *(UnrecognisedError, "7", "3"),
    ),
    "other metadata of fairscale": (
        *("fairscale_flat", edit("*.pt*", lambda state: state.update(shard_metadata=5))),
        CorruptError,
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_by_name(copied, refused, name):
    case, damage, error, *words = DAMAGES[name]
    place = copied(case)
    damage(place)
    refused(place, error, *words)


@pytest.mark.parametrize(
    ("case", "other", "names", "error", "words"),
    [
        (
            *("fsdp2_ranks_ws4", "fsdp2_ranks_2d_ws4", "model_rank3.pt", StaleError),
            "mesh of 2 ranks by (Shard(0)), but model_rank0.pt has it over a mesh of 4 ranks",
        ),
        (
            *("fsdp1_sharded_shardedtensor_ws4", "fsdp1_sharded_hybrid_ws4", "model_rank3.pt"),
            *(StaleError, "in 2 shards, but model_rank0.pt has it in 4 shards"),
        ),
        (
            *("fsdp2_ranks", "fsdp2_ranks_ws4", "*_rank[23].pt", StaleError),
            "run of 4 ranks, but the other files of 2",
        ),
        ("fsdp2_dcp", "fsdp2_dcp_ws4", ".metadata", CorruptError, ".distcp"),
        ("fsdp2_dcp", "fsdp2_dcp_bf16", ".metadata", CorruptError, ".distcp"),
    ],
)
def test_files_of_another_run_are_named(copied, folder, refused, case, other, names, error, words):
    source = copied(case)
    for path in (folder(other) / "ckpt").glob(names):
        shutil.copy(path, source)
    refused(source, error, words)


# DeepSpeed


def test_every_byte_of_a_rank_is_checked(copied, tmp_path):
    run = copied("z2_bf16")
    rewrite(OPTIM.format(1, 0), flip_member("/data/"))(run)
    with pytest.raises(CorruptError, match=f"(?s){OPTIM.format(1, 0)}.*CRC-32.*altered"):
        reshard.merge(run, tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_remedies_for_missing_files_work(copied, merge_all):
    run = copied("z2_bf16")
    remove("*_optim_states.pt")(run)
    _, report = merge_all(next(run.rglob(STATES)), source_format="torch")
    assert "weights as stored" in "\n".join(report.lines())


def test_a_tag_replaces_latest(copied, merge_all):
    run = copied("z2_bf16")
    tag = (run / "latest").read_text()
    (run / "latest").unlink()
    merge_all(run, tag=tag)


def test_weights_of_size_0_are_reported_with_their_real_files(copied, refused):
    run = copied("z3_bf16")
    states = min(run.rglob("*_model_states.pt"))
    module = torch.load(states, weights_only=False)["module"]
    torch.save(module, run / "pytorch_model.bin")
    save_file({fqn: value.clone() for fqn, value in module.items()}, run / "model.safetensors")
    for name in ("pytorch_model.bin", "model.safetensors"):
        with pytest.raises(IncompleteError, match=f"(?s)size 0.*{states.parent}"):
            reshard.merge(run / name, run.parent / "x.safetensors")


def test_a_name_without_a_value_is_dropped_only_if_the_config_ties_it(copied, merge_all, tmp_path):
    """``torch.load`` gives every empty placeholder of stage 3 a storage of its own."""
    run = copied("hf_z3_tied")
    edit("*_model_states.pt", lambda state: state.pop("shared_params"))(run)
    _, report = merge_all(run)
    assert report.dropped_aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    (run / "config.json").unlink()
    with pytest.raises(IncompleteError, match=r"(?s)'lm_head.weight'.*no rank holds.*--exclude"):
        reshard.merge(run, tmp_path / "x.safetensors")


def test_a_tied_name_with_a_copy_that_differs(copied, merge_all, tmp_path):
    run, names = copied("hf_z2_tied"), {}

    def untie(state):
        names.update(state["shared_params"])
        ((alias, kept),) = names.items()
        state["module"][alias] = state["module"][kept].clone()
        state["module"][alias].view(-1)[5] += 1

    edit("*_model_states.pt", untie)(run)
    ((alias, kept),) = names.items()
    for exclude, name in (((), kept), ((f"^{kept}$",), alias)):
        with pytest.raises(DifferentError, match=f"{alias}: is tied to '{name}'.*element 5"):
            reshard.merge(run, tmp_path / "x.safetensors", edits=Edits(exclude=exclude))
    merge_all(run, tied="drop")
    merge_all(run, edits=Edits(exclude=[f"^{alias}$"]))


class Config:
    """A class of the user's own, as client states hold."""

    def __init__(self):
        self.lr = 3


def test_an_unknown_class_is_refused_until_allowed(copied, merge_all, tmp_path):
    run, name = copied("z2_bf16"), f"{Config.__module__}.Config"
    edit(STATES, lambda state: state.update(mine=Config()))(run)
    with pytest.raises(UnsafeError, match=f"--allow-pickle {name}"):
        reshard.merge(run, tmp_path / "x.safetensors")
    merge_all(run, allow_pickle=[name])


@pytest.fixture
def tiny_disk(tmp_path):
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("checks", "says"), [(True, "free"), (False, "disk is full")])
def test_a_full_disk(made, tiny_disk, monkeypatch, checks, says):
    """Before anything is written, or midway."""
    if not checks:
        monkeypatch.setattr(journal, "check_space", lambda *_: None)
    with pytest.raises(ResourceError, match=says):
        reshard.merge(made / "z2_bf16/run", tiny_disk / "x.safetensors", dtype="fp32")
    assert list(tiny_disk.iterdir()) == []


# Hugging Face's index


@pytest.mark.parametrize(
    ("name", "held", "error", "word"),
    [
        *((n, {}, UnsafeError, "outside") for n in ("../secret", "/etc/passwd", "sub/x", "..")),
        ("model-00001-of-00002", {}, IncompleteError, "missing"),
        ("model-1", {"w": torch.ones(2), "old": torch.ones(3)}, CorruptError, "'old'"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(tmp_path, refused, name, held, error, word):
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    if held:
        save_file(held, source / f"{name}.safetensors")
    shard = name if name in ("..", "/etc/passwd") else f"{name}.safetensors"
    index = {"metadata": {}, "weight_map": {"w": shard}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, error, shard, word)


def test_shards_whose_index_is_lost(made, tmp_path, refused, merge_all):
    """As transformers writes them: all of them say which tensors there are, some do not."""
    import transformers

    source, config = tmp_path / "hf", made / "hf_z3/run/config.json"
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(config)
    )
    model.save_pretrained(source, max_shard_size="100KB")
    (source / "model.safetensors.index.json").unlink()
    held, report = merge_all(source)
    assert "no model.safetensors.index.json" in "\n".join(report.lines())
    assert held.keys() == model.state_dict().keys()
    assert all(torch.equal(held[fqn], value) for fqn, value in model.state_dict().items())
    max(source.glob("*.safetensors")).unlink()
    refused(source, IncompleteError, "but no index")


# Rank files


def test_a_drifted_buffer_is_reported(copied, merge_all):
    source = copied("fsdp2_ranks")
    edit(RANK_1, lambda state: state.update(running=state["running"] + 1))(source)
    _, report = merge_all(source)
    assert any("'running' differs" in str(line) for line in report.lines())


def _spec(**fields: Any) -> Callable[[Any], None]:
    return lambda tensor: [object.__setattr__(tensor._spec, k, v) for k, v in fields.items()]


def _mesh(**fields: Any) -> Callable[[Any], None]:
    return lambda tensor: [object.__setattr__(tensor._spec.mesh, k, v) for k, v in fields.items()]


def _axis(size: Any) -> Callable[[Any], None]:
    return lambda tensor: object.__setattr__(tensor._spec.mesh._layout.axes[0], "shape", size)


def _local(**fields: Any) -> Callable[[Any], None]:
    def edit(tensor):
        tensor._local_tensor = torch.zeros(fields["shape"], dtype=fields["dtype"])

    return edit


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        (_spec(placements=()), UnsupportedError),
        (_spec(placements=(Shard(0), Shard(0))), UnsupportedError),
        (_spec(placements=(Partial(),)), UnsupportedError),
        (_spec(placements=(Shard(1),)), CorruptError),
        (_spec(placements="ab"), UnsupportedError),
        (_mesh(_coordinate_on_dim=[0]), CorruptError),
        (_mesh(_coordinate_on_dim=[9]), CorruptError),
        (_mesh(_coordinate_on_dim=[-1]), CorruptError),
        (_mesh(_coordinate_on_dim=[]), UnsupportedError),
        (_mesh(_coordinate_on_dim=["x"]), UnsupportedError),
        (_mesh(_coordinate_on_dim=None), CorruptError),
        (_axis(2), CorruptError),
        (_axis(-4), (CorruptError, UnsupportedError)),
        (_axis(0), (CorruptError, UnsupportedError)),
        (_axis(float("inf")), (CorruptError, UnsupportedError)),
        (_local(shape=(3, 13), dtype=torch.float32), CorruptError),
        (_local(shape=(2, 13), dtype=torch.bfloat16), CorruptError),
    ],
)
def test_a_dtensor_with_wrong_metadata_is_refused(copied, refused, lie, error):
    source = copied("fsdp2_ranks_ws4")
    edit(RANK_1, lambda state: lie(state["odd"]))(source)
    refused(source, error, "model_rank")


@pytest.mark.parametrize(
    "name",
    [
        "model_rank99999999999.pt",
        "model_world_size_99999999999_rank_0.pt",
    ],
)
def test_a_huge_rank_in_a_name(copied, name):
    source = copied("fsdp2_ranks")
    shutil.copy(source / "model_rank0.pt", source / name)
    assert _run_bounded("inspect", source).returncode in (1, 3)


# DCP


def edit_metadata(source: Path, edit: Callable[[Any], Any]) -> Path:
    """Edit the metadata of a directory, and return the directory."""
    about = pickle.loads((source / ".metadata").read_bytes())
    edit(about)
    (source / ".metadata").write_bytes(pickle.dumps(about))
    return source


def _index(about: Any, key: str = KEY) -> Any:
    return next(index for index in about.storage_data if index.fqn == key)


def _chunk(number: int, **fields: Any) -> Callable[[Any], None]:
    def edit(about):
        for name, value in fields.items():
            chunk = about.state_dict_metadata[KEY].chunks[number]
            object.__setattr__(chunk, name, torch.Size(value))

    return edit


def _size(*dims: Any, chunks: bool = True) -> Callable[[Any], None]:
    def edit(about):
        about.state_dict_metadata[KEY].size = dims
        if not chunks:
            about.state_dict_metadata[KEY].chunks.clear()

    return edit


def _placed(**fields: Any) -> Callable[[Any], None]:
    def edit(about):
        index = _index(about)
        about.storage_data[index] = replace(about.storage_data[index], **fields)

    return edit


def _path(*parts: Any) -> Callable[[Any], None]:
    return lambda about: about.planner_data.update({KEY: parts})


def _at_the_same_place(about):
    other = _index(about, "optim.state.odd.exp_avg")
    about.storage_data[_index(about)] = about.storage_data[other]


def _find_object(about: Any) -> str:
    kinds = about.state_dict_metadata.items()
    return next(key for key, kind in kinds if isinstance(kind, BytesStorageMetadata))


def _spell_twice(about):
    about.planner_data = None  # as a planner leaves it that flattens nothing
    kinds, key = about.state_dict_metadata, _find_object(about)
    for name in ("optim.param_groups.0.lr", "optim.param_groups.00.lr"):
        kinds[name] = kinds[key]
        index = _index(about, key)
        about.storage_data[replace(index, fqn=name)] = about.storage_data[index]


METADATA_LIES = """
    chunk, all_chunks, announcement, place, path, shared_place, empty_path, unhashable_path,
    other_path, taken_path, deep_path, moved, negative_block, empty_block, negative_size,
    larger, smaller, more_dims, text_size, no_number, float_size, negative_and_empty,
    huge_and_empty, many_dims, huge, absolute, above, no_name, dot, long_name, no_file,
    number_as_name, before, behind, too_long, shifted, no_announcements, no_places,
    spelt_twice, no_object
""".replace(",", " ").split()


@pytest.mark.parametrize(
    ("edit", "error", "word"),
    [
        (lambda a: a.state_dict_metadata[KEY].chunks.pop(), CorruptError, "of 91 elements"),
        (lambda a: a.state_dict_metadata[KEY].chunks.clear(), CorruptError, "0 of 91"),
        (lambda a: a.state_dict_metadata.pop(KEY), CorruptError, KEY),
        (lambda a: a.storage_data.pop(_index(a)), IncompleteError, "where it is stored"),
        (lambda a: a.planner_data.pop(KEY), CorruptError, KEY),
        (_at_the_same_place, CorruptError, ""),
        (_path(), CorruptError, KEY),
        (_path("model", ["odd"]), CorruptError, KEY),
        (_path("model", "old"), CorruptError, KEY),
        (_path("model", "small"), CorruptError, "small"),
        (_path(*["x"] * 20_000), CorruptError, KEY),
        (_chunk(1, offsets=(3, 0)), IncompleteError, "where it is stored"),
        (_chunk(1, sizes=(-3, 13)), CorruptError, ""),
        (_chunk(1, sizes=(0, 13)), CorruptError, ""),
        (_size(-7, 13), CorruptError, ""),
        (_size(8, 13), CorruptError, "91 of 104"),
        (_size(6, 13), CorruptError, "outside"),
        (_size(7, 13, 1), CorruptError, "not a shape or index"),
        (_size("a", "b"), CorruptError, ""),
        (_size(None), CorruptError, ""),
        (_size(7.0, 13.0), CorruptError, ""),
        (_size(-7, 13, chunks=False), CorruptError, ""),
        (_size(0, 1 << 80, chunks=False), CorruptError, ".metadata"),
        (_size(*[0] * 1000, chunks=False), CorruptError, ".metadata"),
        (_size(1 << 62, 1 << 62, chunks=False), CorruptError, ""),
        (_placed(relative_path="/etc/passwd"), UnsafeError, "outside"),
        (_placed(relative_path="a/../../b"), UnsafeError, "outside"),
        (_placed(relative_path=""), UnsafeError, "outside"),
        (_placed(relative_path="."), IncompleteError, "missing"),
        (_placed(relative_path="a" * 300), IncompleteError, "missing"),
        (_placed(relative_path="__9_0.distcp"), IncompleteError, "__9_0.distcp is missing"),
        (_placed(relative_path=5), CorruptError, "that reshard cannot read"),
        (_placed(offset=-1), CorruptError, "impossible position"),
        (_placed(offset=1 << 62), CorruptError, "truncated"),
        (_placed(length=1 << 62), CorruptError, "truncated"),
        (_placed(offset=1), CorruptError, "neither a torch.save archive"),
        (lambda a: setattr(a, "state_dict_metadata", 5), CorruptError, "that reshard cannot read"),
        (lambda a: setattr(a, "storage_data", [1]), CorruptError, "that reshard cannot read"),
        (_spell_twice, CorruptError, "is stored more than once"),
        (
            lambda a: a.storage_data.pop(_index(a, _find_object(a))),
            IncompleteError,
            "param_groups",
        ),
    ],
    ids=METADATA_LIES,
)
def test_wrong_dcp_metadata_are_refused(copied, refused, edit, error, word):
    refused(edit_metadata(copied("fsdp2_dcp"), edit), error, word)


def test_every_byte_of_a_weight_in_dcp_is_checked(copied, tmp_path):
    source = copied("fsdp2_dcp")
    about = pickle.loads((source / ".metadata").read_bytes())
    place = about.storage_data[_index(about)]
    path = source / place.relative_path
    data = bytearray(path.read_bytes())
    item = data[place.offset :][: place.length]
    tensor = torch.load(io.BytesIO(item), weights_only=True)
    data[place.offset + item.index(tensor.numpy().tobytes()) + 5] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32"):
        reshard.merge(source, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == [source]


# HuggingFaceStorageWriter


def test_the_last_shard_of_unconsolidated_weights(copied, merge_all):
    source = copied("hf_storage_sharded_ws4")
    max(source.glob("shard-*")).unlink()
    with allow_refusal(IncompleteError, "rank"):
        _, report = merge_all(source)
        assert any("ranks" in warning for warning in report.warnings)


def _positions(offsets):
    def edit(header):
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        info["odd"]["saved_offsets"] = offsets
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    return edit


def _stored_as(dtype, size):
    def edit(header):
        start, stop = header["odd"]["data_offsets"]
        assert header["odd"]["dtype"] == "F32"
        rows, _ = header["odd"]["shape"]
        header["odd"] |= {"dtype": dtype, "shape": [rows, (stop - start) // size // rows]}

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        *((_stored_as(*each), "has another dtype or n") for each in (("I32", 4), ("BF16", 2))),
        (lambda header: header["__metadata__"].pop("DCP_SHARDING_INFO"), "DCP_SHARDING_INFO"),
        *(
            (_positions(offsets), "")
            for offsets in ([4], [4, 0, 0], [-4, 0], [3, 0], ["a", 0], None, [4.5, 0])
        ),
    ],
)
def test_unconsolidated_blocks_that_do_not_fit_are_refused(copied, refused, edit, words):
    source = copied("hf_storage_sharded")
    edit_safetensors_header(max(source.glob("shard-*")), edit)
    refused(source, CorruptError, "shard-0000", words)


# Pickles


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


SHARDED_TENSOR = named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
CLASS = named("transformers.x", "X") + b")R"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def write_payload(path: Path, payload: bytes) -> Path:
    """Write a file {'w': tensor, 'x': payload}, with the payload in pickle opcodes."""
    torch.save({"w": torch.ones(2, 2)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    members[name] = members[name][:-1] + text("x") + payload + b"s."
    path.write_bytes(pack(members))
    return path


@pytest.mark.parametrize(
    "payload",
    [
        named("os", "system") + text("touch pwned") + b"\x85R",
        named("builtins", "eval") + text("1") + b"\x85R",
        named("builtins", "getattr") + SHARDED_TENSOR + text("other") + b"\x86R",
        named("builtins", "getattr") + named("builtins", "getattr") + text("x") + b"\x86R",
        named("builtins", "getattr") + b")\x81",
        named("torch", "load") + b")R",
    ],
)
@pytest.mark.parametrize("where", ["file", "legacy", "states", "rank", ".metadata", "item"])
def test_pickles_that_would_run_code(copied, refused, tmp_path, payload, where):
    if where == "file":
        source = write_payload(tmp_path / "m.pt", payload)
    elif where == "legacy":
        source = tmp_path / "x.pt"
        torch.save({"w": torch.ones(2)}, source, _use_new_zipfile_serialization=False)
        head = source.read_bytes()
        source.write_bytes(head[: head.index(b".", 200) + 1] + b"\x80\x02" + payload + b".")
    elif where == "states":
        source = copied("z2_bf16")
        write_payload(next(source.rglob(STATES)), payload)
    elif where == "rank":
        source = copied("fsdp2_ranks")
        write_payload(source / RANK_1, payload)
    else:
        source = copied("fsdp2_dcp")
        if where == ".metadata":
            (source / ".metadata").write_bytes(b"\x80\x02" + payload + b".")
        else:
            bad = write_payload(source / "__0_0.distcp", payload)
            size = bad.stat().st_size
            edit_metadata(source, _placed(relative_path=bad.name, offset=0, length=size))
    refused(source, UnsafeError, "its pickle asks for")
    assert not Path("pwned").exists()


def _nest_doubled(empty: bytes, pair: bytes, times: int) -> bytes:
    """Return containers, each of twice the one before: 2 ** times elements in a few bytes."""
    return empty + b"q\x01" + (b"0" + pair + b"q\x01") * times


TUPLES = _nest_doubled(b"K\x01\x85", b"h\x01h\x01\x86", 60)
LISTS = _nest_doubled(b"]", b"](h\x01h\x01e", 60)
DICTS = _nest_doubled(b"}", b"}(K\x00h\x01K\x01h\x01u", 60)
WIDE = _nest_doubled(b"]", b"](" + b"h\x01" * 2000 + b"e", 4)


def _run_bounded(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line with little time and memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (BOMB_LIMIT_S, BOMB_LIMIT_S))

    return run_reshard(*arguments, timeout=LIMIT_S, preexec_fn=limit)


@pytest.mark.parametrize(
    "payload",
    [TUPLES, LISTS, DICTS, WIDE, named("transformers.x", "X") + TUPLES + b"\x85R"],
    ids=["tuples", "lists", "dicts", "wide", "arguments"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_pickle_bombs_end_within_limits(tmp_path, payload, ranks):
    for rank in range(ranks):
        write_payload(tmp_path / f"model_rank{rank}.pt", payload)
    done = _run_bounded("inspect", "--json", tmp_path)
    assert done.returncode in (0, 3), done.stderr
    assert len(done.stdout) < 1 << 26


@pytest.mark.parametrize(
    "payload",
    [
        b"]" * 5000 + b"a" * 4999,
        b")" + b"\x85" * 5000,
        b"}" + b"K\x00}" * 5000 + b"s" * 5000,
        CLASS + (b"}K\x00" + CLASS) * 3000 + b"sb" * 3000,
    ],
    ids=["lists", "tuples", "dicts", "objects"],
)
def test_deep_nesting(tmp_path, payload):
    path = write_payload(tmp_path / "m.pt", payload)
    with allow_refusal(CorruptError, str(path)), reshard.open(path) as checkpoint:
        assert list(checkpoint) == ["w"]


@pytest.mark.parametrize(
    "payload",
    [
        b"]q\x01h\x01a",
        b"}q\x01K\x00h\x01s",
        CLASS + b"q\x01}" + text("_parent") + b"h\x01sb",
        CLASS + b"q\x01h\x01a",
    ],
    ids=["list", "dict", "object", "elements"],
)
def test_values_that_contain_themselves_are_refused(tmp_path, merge_all, payload):
    path = write_payload(tmp_path / "m.pt", payload)
    with reshard.open(path) as checkpoint:
        assert list(checkpoint) == ["w"]
    assert list(merge_all(path)[0]) == ["w"]


# Which of several


@pytest.mark.parametrize("module", ["generator", "sampler", "scaler", "random", "dataloader"])
def test_modules_with_names_of_other_parts(tmp_path, merge_all, module):
    state = {"encoder.weight": torch.ones(2), f"{module}.proj.weight": torch.ones(3)}
    torch.save(state, tmp_path / "m.pt")
    assert merge_all(tmp_path / "m.pt")[0].keys() == state.keys()


def test_a_tensor_beside_the_model_is_not_the_model(tmp_path, merge_all):
    model = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    torch.save({"net": model, "best_acc": torch.tensor(0.9)}, tmp_path / "m.pt")
    with allow_refusal(UnrecognisedError, "--key"):
        assert merge_all(tmp_path / "m.pt")[0].keys() == model.keys()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_the_model_twice(copied, refused, name):
    source = copied("dcp_two_directories")
    value = {"odd": torch.zeros(7, 13)}
    (save_file if name.endswith("s") else torch.save)(value, source / name)
    refused(source, (UnrecognisedError, CorruptError), "model")


def test_two_models_and_wrong_keys(copied, refused):
    source = copied("plain_gan") / "checkpoint.pt"
    before = source.read_bytes()
    refused(source, UnrecognisedError, "generator, discriminator", "--key")
    refused(source, UsageError, "no 'nope'", key="nope")
    words = ("not a state dict", "choose one of generator, discriminator")
    refused(source, UsageError, *words, key="optimizer_g")
    assert source.read_bytes() == before
    held = torch.load(source, weights_only=False)
    torch.save({"g": {"net": held["generator"]}, "d": {"net": held["discriminator"]}}, source)
    with reshard.open(source, key="g") as checkpoint:
        assert set(checkpoint) == set(held["generator"])


def test_an_optimizer_alone(torch_made, tmp_path, refused):
    source = tmp_path / "run"
    source.mkdir()
    shutil.copy(torch_made / "plain_pair" / "ckpt" / "optim.pt", source / "optimizer.pt")
    refused(source, UnrecognisedError, "an optimizer but no weights", "all files", "unet")


@pytest.mark.parametrize("data", [b"", b"junk" * 10], ids=["empty", "junk"])
@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "optimizer.bin"])
def test_a_damaged_part_is_never_ignored(copied, tmp_path, name, data):
    path = max(copied("trainer_fsdp1_full").rglob(name))
    path.write_bytes(data)
    with allow_refusal((CorruptError, IncompleteError), name):
        report = reshard.merge(path.parent, tmp_path / "x.safetensors")
        assert any(name in warning for warning in report.warnings)


def test_code_beside_a_config_never_runs(copied, right):
    source = copied("trainer_ddp") / "checkpoint-4"
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text(f"open({str(source / 'pwned')!r}, 'w')")
    right("trainer_ddp", source)
    assert not (source / "pwned").exists()


# Flat parameters


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({}, UnsupportedError, ("flat parameter of the root module with", "--model", "--wrap")),
        ({"model": MODEL}, UnsupportedError, ("--wrap",)),
        ({"model": MODEL, "wrap": "none"}, CorruptError, ("4222 elements", "have 18942")),
        ({"model": MODEL, "wrap": "LlamaMLP"}, CorruptError, ("4222 elements",)),
        ({"model": MODEL, "wrap": "Nope"}, UsageError, ("LlamaDecoderLayer",)),
        ({"model": TIED_MODEL, "wrap": "LlamaDecoderLayer"}, CorruptError, ("4222 elements",)),
        ({"model": "no.such:thing"}, UsageError, ("cannot be imported",)),
        ({"wrap": "LlamaDecoderLayer"}, UsageError, ("--model",)),
    ],
)
def test_a_wrong_model_or_wrapping_is_refused(copied, refused, told, error, words):
    refused(copied("fsdp1_local_flat"), error, *words, **told)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fsdp1_local_flat", "flat parameter of 'llama.model.layers.0', the flat parameter of"),
        ("fsdp1_local_orig", "have the same shape, and their group is not in the model's order"),
    ],
)
def test_an_optimizer_that_is_not_in_the_model_s_order_is_left_out(copied, case, words):
    """As one that was made of the parameters in reverse order."""
    source = copied(case)
    for path in source.glob("optim*.pt"):
        optimizer = torch.load(path, weights_only=False)
        last = max(optimizer["param_groups"][0]["params"])
        optimizer["state"] = {last - key: slots for key, slots in optimizer["state"].items()}
        torch.save(optimizer, path)
    manifest = reshard.inspect(source, model=MODEL, wrap="LlamaDecoderLayer").manifest
    (note,) = [warning for warning in manifest.warnings if "left out" in warning]
    assert words in note
    assert not manifest.has_optimizer


def test_the_wrapping_is_asked_for_where_an_optimizer_may_be_flat(copied):
    manifest = reshard.inspect(copied("fsdp1_full_optim_raw"), model=MODEL).manifest
    assert any("FSDP 1), pass --wrap, too" in warning for warning in manifest.warnings)


@pytest.mark.parametrize("case", ["fsdp1_local_orig_ws4", "fsdp1_local_flat_ws4"])
def test_exchanged_rank_files_are_never_read_wrongly(copied, right, case):
    source = copied(case)
    (source / "model_rank0.pt").rename(source / "first.tmp")
    (source / "model_rank1.pt").rename(source / "model_rank0.pt")
    (source / "first.tmp").rename(source / "model_rank1.pt")
    with allow_refusal(CorruptError, "rank"):
        right(case, source, model=MODEL, wrap="LlamaDecoderLayer")


# Optimizers: right or left out


@pytest.fixture
def named_rightly(torch_made):
    """Assert that no slot stands under another parameter's name."""

    def check(source: Path) -> int:
        expected = read_expected(torch_made / "plain_pair")["optimizer"]
        with reshard.open(source) as checkpoint:
            try:
                found = checkpoint.optimizer("exp_avg")
            except reshard.ReshardError:
                return 0
            for fqn, value in found.items():
                assert torch.equal(expected[fqn]["exp_avg"], value[...]), fqn
            return len(found)

    return check


def _kept(state: Any, numbers: list[int], count_anew: bool) -> None:
    held = state["state"]
    new = range(len(numbers)) if count_anew else numbers
    state["state"] = {n: held[old] for n, old in zip(new, numbers, strict=True)}
    state["param_groups"][0]["params"] = list(state["state"])


@pytest.mark.parametrize(
    "numbers",
    [[n for n in range(23) if n != left_out] for left_out in (0, 3, 5, 10, 22)]
    + [list(range(22, -1, -1)), [1, 0, *range(2, 23)], [*range(12, 23), *range(12)]],
    ids=["no 0", "no 3", "no 5", "no 10", "no 22", "reversed", "exchanged", "rotated"],
)
def test_an_optimizer_of_other_parameters(copied, named_rightly, numbers):
    source = copied("plain_pair")
    edit("optim.pt", lambda state: _kept(state, numbers, count_anew=True))(source)
    named_rightly(source)


def test_weights_are_read_if_a_rank_lacks_optimizer_state(copied, tmp_path):
    source = copied("fsdp2_ranks")
    edit("optim_rank1.pt", lambda state: state["state"].pop(0))(source)
    with pytest.raises(CorruptError, match="copy of the directory without the optimizer's files"):
        reshard.merge(source, tmp_path / "out.safetensors")
    for file in source.glob("optim_rank*.pt"):
        file.unlink()
    reshard.merge(source, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()


def test_parameters_without_state_do_not_change_other_names(copied, named_rightly):
    source = copied("plain_pair")
    edit("optim.pt", lambda state: [state["state"].pop(n) for n in (0, 3, 22)])(source)
    assert named_rightly(source) == 20


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o["param_groups"][0].update(params=5),
        lambda o: o["param_groups"][0].update(params=[[0], [1]]),
        lambda o: o["param_groups"][0].update(params=[0, "a", None]),
        lambda o: o["param_groups"][0].update(params=["²"]),
        lambda o: o["state"].update({0: 5}),
        lambda o: o["state"].update({0: torch.ones(3)}),
        lambda o: o["state"][0].update(step=10**400),
        lambda o: o["state"][0].update(step=torch.tensor(3.0, dtype=torch.bfloat16)),
        lambda o: o["param_groups"][0].update(lr=torch.tensor(True)),
        lambda o: o["param_groups"][0].update(param_names=["a"] * 23),
    ],
)
def test_an_optimizer_of_unknown_structure_is_refused(copied, named_rightly, change):
    source = copied("plain_pair")
    edit("optim.pt", change)(source)
    with allow_refusal((CorruptError, UnsupportedError), str(source)):
        named_rightly(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool])
def test_an_odd_counter_does_not_stop_a_merge_of_weights(copied, right, dtype):
    source = copied("plain_pair")
    edit("optim.pt", lambda o: o["state"][0].update(step=torch.ones((), dtype=dtype)))(source)
    right("plain_pair", source)


# Several directories, run directories


def halves(source: Path, *patterns: str) -> list[Path]:
    other = source.parent / "other"
    other.mkdir()
    for pattern in patterns:
        for path in source.glob(pattern):
            path.rename(other / path.name)
    return [source, other]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("case", "patterns"),
    [
        ("fsdp2_ranks_ws4", ("*_rank[23].pt",)),
        ("fsdp2_dcp_ws4", ("__[23]_*.distcp",)),
        ("dcp_no_collectives", ("__1*",)),
    ],
)
def test_halves_on_two_nodes_are_read_as_one_checkpoint(copied, right, case, patterns, backwards):
    both = halves(copied(case), *patterns)
    right(case, both[::-1] if backwards else both)


def test_a_half_and_a_file_in_both_halves(copied, right, refused):
    both = first, second = halves(copied("fsdp2_dcp_ws4"), "__[23]_*.distcp")
    refused(first, IncompleteError, "__2_0.distcp is missing", "second source")
    refused(second, IncompleteError, "no .metadata", "second source")
    for number, place in enumerate(both):
        (place / "train.log").write_text(f"node {number}")  # logs may differ
    shutil.copy(first / ".metadata", second)
    right("fsdp2_dcp_ws4", both)
    rewrite(".metadata", lambda data: data[:200] + b"?" + data[201:])(second)
    refused(both, CorruptError, str(second / ".metadata"), "which has the same name")


def test_neither_a_file_nor_the_destination_is_one_of_several_sources(copied):
    both = halves(copied("fsdp2_ranks_ws4"), "*_rank[23].pt")
    with pytest.raises(UsageError, match="is a file"):
        reshard.open([both[0], both[0] / "model_rank0.pt"])
    for inside in both:
        with pytest.raises(UsageError, match="inside the source"):
            reshard.merge(both, inside / "x.safetensors")
        assert not (inside / "x.safetensors").exists()


@pytest.mark.parametrize("tag", ["9", "../..", "9" * 5000, "²"])
def test_missing_tags_are_refused(copied, refused, tag):
    refused(copied("verl_sample"), UnrecognisedError, "no checkpoint", tag=tag)


def test_broken_links_and_pipes_are_refused(tmp_path, refused):
    place = tmp_path / "place"
    place.mkdir()
    (place / "model_rank0.pt").symlink_to("nowhere.pt")
    (place / "loop").symlink_to(".")
    os.mkfifo(place / "model_rank1.pt")
    with pytest.raises(UnrecognisedError):
        reshard.merge(place, tmp_path / "x.safetensors")
