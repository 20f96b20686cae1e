"""Bad checkpoints of PyTorch and its libraries: one error each, nothing left, nothing silent."""

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
from reshard.errors import (
    CorruptError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from tests.judged.expected import read_expected
from tests.support.programs import LIMIT_S, run_reshard

MODEL = "tests.judges.torch_models:menagerie"
TIED_MODEL = "tests.judges.torch_models:menagerie_tied"
KEY = "model.odd"
BOMB_LIMIT_S = 30  # of its own work: a busy machine may take longer
KEPT = Path(__file__).parents[1] / "data"


@pytest.fixture
def folder(torch_made, libraries):
    """Return case -> its folder: made here, or the copy that is kept for other libraries."""

    def find(case: str) -> Path:
        places = (torch_made, libraries, *KEPT.iterdir())
        return next(place / case for place in places if (place / case).is_dir())

    return find


@pytest.fixture
def copied(folder, tmp_path):
    """Return a function that makes a private, writable copy of one case's checkpoint."""

    def copy(case: str, name: str = "src") -> Path:
        return Path(shutil.copytree(folder(case) / "ckpt", tmp_path / name))

    return copy


@pytest.fixture
def refused(tmp_path):
    """Assert that opening and merging fail with one error class, leave nothing, change nothing."""

    def check(sources, error: type[Exception], *words: str, **options: Any) -> str:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        paths = sources if isinstance(sources, list) else [sources]
        before = [_listing(path) for path in paths]
        with pytest.raises(error), reshard.open(sources, **options):
            pass
        with pytest.raises(error) as raised:
            reshard.merge(sources, out / "x.safetensors", **options)
        text = str(raised.value)
        for word in words:
            assert word in text
        assert list(out.iterdir()) == []
        assert [_listing(path) for path in paths] == before
        return text

    return check


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


def _listing(place: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_size) for p in place.rglob("*") if p.is_file())


def edited(path: Path, edit: Callable[[Any], None]) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


@contextmanager
def allow_refusal(
    error: type[Exception] | tuple[type[Exception], ...], word: str
) -> Iterator[None]:
    """Assert what is asserted inside, or that the input is refused with a helpful message."""
    try:
        yield
    except error as raised:
        if word not in str(raised):
            raise


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


# Rank files


def test_rank_zero_is_missing(copied, refused):
    source = copied("fsdp2_ranks")
    (source / "model_rank0.pt").unlink()
    (source / "optim_rank0.pt").unlink()
    refused(source, IncompleteError, "model_rank0.pt is missing")


def test_a_rank_between_is_missing(copied, refused):
    source = copied("fsdp2_ranks_ws4")
    (source / "model_rank1.pt").unlink()
    refused(source, IncompleteError, "model_rank0.pt", "model_rank1.pt is missing", "node")


def test_the_last_rank_is_missing(copied, refused):
    source = copied("fsdp2_ranks_ws4")
    (source / "model_rank3.pt").unlink()
    (source / "optim_rank3.pt").unlink()
    refused(
        source, IncompleteError, "model_rank0.pt of a run of 4 ranks", "model_rank3.pt is missing"
    )


def test_one_rank_alone_is_named_whatever_its_file_is_called(copied, refused):
    source = copied("fsdp2_ranks_one_file")
    (source / "rank0.pt").unlink()
    (source / "rank1.pt").rename(source / "checkpoint.pt")
    words = (
        "checkpoint.pt of a run of 2 ranks",
        "the file of rank 0",
        "saved only one rank's file",
    )
    refused(source, IncompleteError, *words)


def test_a_file_of_another_rank_is_named(copied, refused):
    source = copied("fsdp2_ranks_ws4")
    shutil.copy(source / "model_rank1.pt", source / "model_rank2.pt")
    refused(source, CorruptError, "model_rank2.pt", "tensors of rank 1", "model_rank1.pt")


@pytest.mark.parametrize(
    ("case", "other", "words"),
    [
        (
            "fsdp2_ranks_ws4",
            "fsdp2_ranks_2d_ws4",
            ("mesh of 2 ranks by (Shard(0)), but model_rank0.pt has it over a mesh of 4 ranks",),
        ),
        (
            "fsdp1_sharded_shardedtensor_ws4",
            "fsdp1_sharded_hybrid_ws4",
            ("in 2 shards, but model_rank0.pt has it in 4 shards",),
        ),
    ],
)
def test_a_rank_of_another_mesh_is_named(copied, torch_made, refused, case, other, words):
    """Check files of runs with the same number of ranks."""
    source = copied(case)
    shutil.copy(torch_made / other / "ckpt" / "model_rank3.pt", source)
    refused(source, StaleError, "model_rank3.pt", *words)


def test_the_last_of_a_stated_world_is_missing(copied, refused):
    source = copied("verl_sample") / "global_step_3" / "actor"
    for path in source.glob("*_world_size_2_rank_1.pt"):
        path.unlink()
    refused(source, IncompleteError, "world_size_2_rank_1.pt is missing")


@pytest.mark.parametrize("name", ["model_rank1.pt", "optim_rank1.pt"])
@pytest.mark.parametrize("damage", ["empty", "head"])
def test_a_damaged_rank_file_is_named(copied, refused, name, damage):
    path = copied("fsdp2_ranks") / name
    path.write_bytes(b"") if damage == "empty" else flip(path, 0)
    refused(path.parent, (CorruptError, IncompleteError), name)


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_truncated_rank_file(copied, refused, keep):
    path = copied("fsdp2_ranks") / "model_rank1.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path.parent, CorruptError, str(path), "zip directory")


def test_stale_ranks_of_a_larger_world(copied, torch_made, refused):
    source = copied("fsdp2_ranks")
    for path in (torch_made / "fsdp2_ranks_ws4" / "ckpt").glob("*_rank[23].pt"):
        shutil.copy(path, source)
    refused(source, CorruptError, "model_rank2.pt", "run of 4 ranks, but the other files of 2")


def test_two_world_sizes_side_by_side(copied, refused):
    source = copied("verl_sample") / "global_step_3" / "actor"
    for path in list(source.glob("*_world_size_2_rank_[01].pt")):
        shutil.copy(path, source / path.name.replace("world_size_2", "world_size_4"))
    refused(source, CorruptError, "world_size_2", "world_size_4")


@pytest.mark.parametrize("name", ["model_rank00.pt", "model_rank0.bin", "model.pt"])
def test_two_files_of_one_rank(copied, refused, name):
    source = copied("fsdp2_ranks")
    shutil.copy(source / "model_rank0.pt", source / name)
    refused(source, (CorruptError, UnrecognisedError), "model_rank0.pt", name)


def test_ranks_of_two_steps(copied, refused):
    source = copied("fsdp2_ranks")

    def later(state):
        for slots in state["state"].values():
            slots["step"] += 3

    edited(source / "optim_rank1.pt", later)
    refused(source, CorruptError, "optim_rank1.pt", "step", "mixed")


def test_a_drifted_buffer_is_reported(copied, merge_all):
    source = copied("fsdp2_ranks")

    def drifted(state):
        state["running"] = state["running"] + 1

    edited(source / "model_rank1.pt", drifted)
    _, report = merge_all(source)
    assert any("'running' differs" in str(line) for line in report.lines())


@pytest.mark.parametrize(
    ("value", "word"),
    [(torch.zeros(7, 13), "plain tensor"), (5, "5"), ({"a": 1}, "odd")],
)
def test_another_kind_of_value_on_one_rank(copied, refused, value, word):
    source = copied("fsdp2_ranks")
    edited(source / "model_rank1.pt", lambda state: state.update(odd=value))
    refused(source, CorruptError, "'odd'", word, "model_rank1.pt", "mixed")


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
    edited(source / "model_rank1.pt", lambda state: lie(state["odd"]))
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


def test_a_sharded_tensor_of_another_shape(copied, refused):
    path = copied("fsdp1_sharded_shardedtensor") / "model_rank1.pt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in members if name.endswith("data.pkl"))
    # the offsets of the first shard: [4, 0] become [4]; POP takes the 0 off the stack again
    at = members[name].index(b"shard_offsets")
    cut = members[name].index(b"K\x04K\x00e", at)
    members[name] = members[name][:cut] + b"K\x04K\x000e" + members[name][cut + 5 :]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    refused(path.parent, (CorruptError, UnsupportedError), "model_rank1.pt")


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


METADATA_LIES = """
    chunk, all_chunks, announcement, place, path, shared_place, empty_path, unhashable_path,
    other_path, taken_path, deep_path, moved, negative_block, empty_block, negative_size,
    larger, smaller, more_dims, text_size, no_number, float_size, negative_and_empty,
    huge_and_empty, many_dims, huge, absolute, above, no_name, dot, long_name, no_file,
    number_as_name, before, behind, too_long, shifted, no_announcements, no_places
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
    ],
    ids=METADATA_LIES,
)
def test_wrong_dcp_metadata_are_refused(copied, refused, edit, error, word):
    refused(edit_metadata(copied("fsdp2_dcp"), edit), error, word)


def test_two_keys_with_one_path_are_refused(copied, refused):
    def spell_twice(about):
        about.planner_data = None  # as a planner leaves it that flattens nothing
        kinds = about.state_dict_metadata
        key = next(key for key, kind in kinds.items() if isinstance(kind, BytesStorageMetadata))
        for name in ("optim.param_groups.0.lr", "optim.param_groups.00.lr"):
            kinds[name] = kinds[key]
            about.storage_data[replace(_index(about, key), fqn=name)] = about.storage_data[
                _index(about, key)
            ]

    refused(
        edit_metadata(copied("fsdp2_dcp"), spell_twice), CorruptError, "is stored more than once"
    )


def test_an_object_without_a_position_is_refused(copied, refused):
    def forget(about):
        kinds = about.state_dict_metadata.items()
        key = next(key for key, kind in kinds if isinstance(kind, BytesStorageMetadata))
        about.storage_data.pop(_index(about, key))

    refused(edit_metadata(copied("fsdp2_dcp"), forget), IncompleteError, "param_groups")


def test_no_metadata(copied, refused):
    source = copied("fsdp2_dcp")
    (source / ".metadata").unlink()
    refused(source, IncompleteError, "no .metadata", "interrupted", "second source")


def test_a_missing_data_file(copied, refused):
    source = copied("fsdp2_dcp")
    (source / "__1_0.distcp").unlink()
    refused(source, IncompleteError, "__1_0.distcp is missing", "second source")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_the_ranks_metadata_is_missing(copied, refused, rank):
    source = copied("dcp_no_collectives")
    (source / f"__{rank}.metadata").unlink()
    refused(source, IncompleteError, f"rank {rank}")


@pytest.mark.parametrize("other", ["fsdp2_dcp_ws4", "fsdp2_dcp_bf16"])
def test_metadata_of_another_save(copied, torch_made, refused, other):
    source = copied("fsdp2_dcp")
    shutil.copy(torch_made / other / "ckpt" / ".metadata", source)
    refused(source, CorruptError, ".distcp")


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_truncated_dcp_file(copied, refused, name, keep):
    path = copied("fsdp2_dcp") / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path.parent, CorruptError, name)


def test_every_byte_of_a_weight_in_dcp_is_checked(copied, refused):
    source = copied("fsdp2_dcp")
    about = pickle.loads((source / ".metadata").read_bytes())
    place = about.storage_data[_index(about)]
    path = source / place.relative_path
    item = path.read_bytes()[place.offset :][: place.length]
    tensor = torch.load(io.BytesIO(item), weights_only=True)
    flip(path, place.offset + item.index(tensor.numpy().tobytes()) + 5)
    out = source.parent / "out"
    out.mkdir()
    with pytest.raises(CorruptError, match="CRC-32"):
        reshard.merge(source, out / "x.safetensors")
    assert list(out.iterdir()) == []


# HuggingFaceStorageWriter


def test_the_last_shard_of_unconsolidated_weights(copied, merge_all):
    source = copied("hf_storage_sharded_ws4")
    max(source.glob("shard-*")).unlink()
    with allow_refusal(IncompleteError, "rank"):
        _, report = merge_all(source)
        assert any("ranks" in warning for warning in report.warnings)


def test_a_shard_between_of_unconsolidated_weights(copied, refused):
    source = copied("hf_storage_sharded_ws4")
    sorted(source.glob("shard-*"))[1].unlink()
    refused(source, IncompleteError, "the shard of rank 3, but none of rank 1")


@pytest.mark.parametrize("dtype", ["I32", "BF16"])
def test_unconsolidated_blocks_of_two_dtypes(copied, refused, dtype):
    source = copied("hf_storage_sharded")
    path = max(source.glob("shard-*"))

    def change(header):
        start, stop = header["odd"]["data_offsets"]
        assert header["odd"]["dtype"] == "F32"
        rows, columns = header["odd"]["shape"]
        header["odd"]["dtype"] = dtype
        header["odd"]["shape"] = [rows, columns * (stop - start) // {"I32": 4, "BF16": 2}[dtype]]
        header["odd"]["shape"][1] //= rows * columns

    with_header(path, change)
    refused(source, CorruptError, "has another dtype or number of dims than in")


def test_unconsolidated_blocks_without_a_position_are_refused(copied, refused):
    source = copied("hf_storage_sharded")
    path = max(source.glob("shard-*"))
    with_header(path, lambda header: header["__metadata__"].pop("DCP_SHARDING_INFO"))
    refused(source, CorruptError, path.name, "DCP_SHARDING_INFO")


def with_header(path: Path, edit: Callable[[Any], Any]) -> None:
    """Return another header before the same data."""
    data = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + nbytes])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + nbytes :])


@pytest.mark.parametrize("offsets", [[4], [4, 0, 0], [-4, 0], [3, 0], ["a", 0], None, [4.5, 0]])
def test_unconsolidated_blocks_with_wrong_positions_are_refused(copied, refused, offsets):
    source = copied("hf_storage_sharded")

    def change(header):
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        info["odd"]["saved_offsets"] = offsets
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)

    with_header(max(source.glob("shard-*")), change)
    refused(source, CorruptError, "shard-0000")


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
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            bad = data[:-1] + text("x") + payload + b"s."
            archive.writestr(name, bad if name.endswith("data.pkl") else data)
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
@pytest.mark.parametrize("where", ["file", "rank", ".metadata", "item"])
def test_pickles_that_would_run_code(copied, refused, tmp_path, payload, where):
    if where == "file":
        source = write_payload(tmp_path / "m.pt", payload)
        before = source.read_bytes()
    elif where == "rank":
        source = copied("fsdp2_ranks")
        write_payload(source / "model_rank1.pt", payload)
    else:
        source = copied("fsdp2_dcp")
        if where == ".metadata":
            (source / ".metadata").write_bytes(b"\x80\x02" + payload + b".")
        else:
            bad = write_payload(source / "__0_0.distcp", payload)
            edit_metadata(source, _placed(relative_path=bad.name, offset=0, length=_nbytes(bad)))
    refused(source, UnsafeError, "its pickle asks for")
    if where == "file":
        assert source.read_bytes() == before
    assert not Path("pwned").exists()


def _nbytes(path: Path) -> int:
    return path.stat().st_size


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
    done = _run_bounded("inspect", tmp_path)
    assert done.returncode in (0, 3), done.stderr


def test_a_bomb_as_json_is_bounded(tmp_path):
    done = _run_bounded("inspect", "--json", write_payload(tmp_path / "m.pt", DICTS))
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


def test_slices_of_a_missing_rank(copied, refused):
    source = copied("fsdp1_local_orig_ws4")
    for path in source.glob("*_rank3.pt"):
        path.unlink()
    refused(source, IncompleteError, "model_rank3.pt is missing", "the ranks store", model=MODEL)


@pytest.mark.parametrize("case", ["fsdp1_local_orig_ws4", "fsdp1_local_flat_ws4"])
def test_exchanged_rank_files_are_never_read_wrongly(copied, right, case):
    source = copied(case)
    (source / "model_rank0.pt").rename(source / "first.tmp")
    (source / "model_rank1.pt").rename(source / "model_rank0.pt")
    (source / "first.tmp").rename(source / "model_rank1.pt")
    with allow_refusal(CorruptError, "rank"):
        right(case, source, model=MODEL, wrap="LlamaDecoderLayer")


def test_wrong_fairscale_metadata_are_refused(copied, refused):
    source = _only_directory(copied("fairscale_flat"))
    path = min(path for path in source.iterdir() if "shard_metadata" in _keys(path))
    edited(path, lambda state: state.update(shard_metadata=5))
    refused(source, CorruptError)


def _only_directory(place: Path) -> Path:
    return place if any(p.is_file() for p in place.iterdir()) else next(place.iterdir())


def _keys(path: Path) -> list[str]:
    state = torch.load(path, weights_only=False) if path.suffix in (".pt", ".pth") else {}
    return list(state) if isinstance(state, dict) else []


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
    edited(source / "optim.pt", lambda state: _kept(state, numbers, count_anew=True))
    named_rightly(source)


def test_weights_are_read_if_a_rank_lacks_optimizer_state(copied, tmp_path):
    source = copied("fsdp2_ranks")
    edited(source / "optim_rank1.pt", lambda state: state["state"].pop(0))
    with pytest.raises(CorruptError, match="copy of the directory without the optimizer's files"):
        reshard.merge(source, tmp_path / "out.safetensors")
    for file in source.glob("optim_rank*.pt"):
        file.unlink()
    reshard.merge(source, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").exists()


def test_parameters_without_state_do_not_change_other_names(copied, named_rightly):
    source = copied("plain_pair")
    edited(source / "optim.pt", lambda state: [state["state"].pop(n) for n in (0, 3, 22)])
    assert named_rightly(source) == 20


@pytest.mark.parametrize(
    "edit",
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
def test_an_optimizer_of_unknown_structure_is_refused(copied, named_rightly, edit):
    source = copied("plain_pair")
    edited(source / "optim.pt", edit)
    with allow_refusal((CorruptError, UnsupportedError), str(source)):
        named_rightly(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.bool])
def test_an_odd_counter_does_not_stop_a_merge_of_weights(copied, right, dtype):
    source = copied("plain_pair")
    edited(source / "optim.pt", lambda o: o["state"][0].update(step=torch.ones((), dtype=dtype)))
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


def test_one_half_names_what_is_missing(copied, refused):
    first, second = halves(copied("fsdp2_dcp_ws4"), "__[23]_*.distcp")
    refused(first, IncompleteError, "__2_0.distcp is missing", "second source")
    refused(second, IncompleteError, "no .metadata", "second source")


def test_a_file_in_both_halves(copied, right, refused):
    first, second = halves(copied("fsdp2_dcp_ws4"), "__[23]_*.distcp")
    shutil.copy(first / ".metadata", second)
    right("fsdp2_dcp_ws4", [first, second])
    flip(second / ".metadata", 200)
    refused([first, second], CorruptError, str(second / ".metadata"), "which has the same name")


def test_log_files_of_two_nodes_are_ignored(copied, right):
    both = halves(copied("fsdp2_dcp_ws4"), "__[23]_*.distcp")
    for number, place in enumerate(both):
        (place / "train.log").write_text(f"node {number}")
    right("fsdp2_dcp_ws4", both)


def test_a_file_among_several_sources(copied, refused):
    source = copied("fsdp2_ranks_ws4")
    with (
        pytest.raises(UsageError, match="is a file"),
        reshard.open([source, source / "model_rank0.pt"]),
    ):
        pass


@pytest.mark.parametrize("inside", [0, 1])
def test_destination_inside_any_source(copied, inside):
    both = halves(copied("fsdp2_ranks_ws4"), "*_rank[23].pt")
    with pytest.raises(UsageError, match="inside the source"):
        reshard.merge(both, both[inside] / "x.safetensors")
    assert not (both[inside] / "x.safetensors").exists()


def test_newest_checkpoint_was_interrupted(copied, refused):
    source = copied("trainer_ddp")
    (source / "checkpoint-6").mkdir()
    refused(source, UnrecognisedError, "checkpoint-")


def test_a_pointer_to_a_missing_checkpoint_is_refused(copied, refused):
    source = copied("verl_sample")
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    refused(source, UnrecognisedError, "7", "3")


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
