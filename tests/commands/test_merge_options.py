"""Every option of a merge, on small files that real torch and safetensors wrote."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import reshard
from reshard.core.keys import Edits
from reshard.errors import (
    CorruptError,
    DifferentError,
    ExistsError,
    ResourceError,
    UsageError,
)
from reshard.system import files
from tests.support.directories import read_files

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
CONFIG = {"model_type": "llama", "torch_dtype": "float32", "vocab_size": 99, "hidden_size": 4}


def weights() -> dict[str, torch.Tensor]:
    """Return float weights, an integer and a bool, in an order that is not the alphabet's."""
    torch.manual_seed(0)
    return {
        "z.weight": torch.randn(33, 17),
        "a.weight": torch.randn(5, 2, 3),
        "a.bias": torch.randn(7),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "steps": torch.arange(9),
        "mask": torch.tensor([True, False]),
    }


@pytest.fixture
def plain(tmp_path) -> Path:
    path = tmp_path / "plain.safetensors"
    save_file(weights(), path, metadata={"format": "pt"})
    return path


@pytest.fixture
def tied(tmp_path) -> Path:
    """Write a model whose head is the embedding's storage."""
    shared = torch.arange(32.0).reshape(8, 4)
    path = tmp_path / "tied" / "x.pt"
    path.parent.mkdir()
    torch.save({EMBED: shared, NORM: torch.ones(4), HEAD: shared}, path)
    return path


@pytest.fixture
def hf(tmp_path):
    """Make a model directory with that config, a tokenizer, and things that are not its own."""

    def make(**config) -> Path:
        place = tmp_path / "hf"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(CONFIG | config))
        (place / "tokenizer.json").write_text('{"version": "1.0"}')
        (place / "merges.txt").write_text("a b\n")
        (place / "train.py").write_text("raise SystemExit\n")
        (place / "optimizer.pt").write_bytes(b"not for export")
        (place / "runs").mkdir()
        return place

    return make


def config_of(directory: Path):
    return json.loads((directory / "config.json").read_text())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def same(found, wanted) -> bool:
    """Return whether names, shapes, dtypes and bits are equal."""
    return found.keys() == wanted.keys() and all(
        found[k].dtype == wanted[k].dtype
        and found[k].shape == wanted[k].shape
        and torch.equal(found[k].flatten().view(torch.uint8), wanted[k].flatten().view(torch.uint8))
        for k in wanted
    )


# --------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin", ".pth"])
def test_every_kind_of_file_holds_the_same_tensors(plain, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    reshard.merge(plain, out)
    loaded = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    assert same(loaded, weights())
    if suffix != ".safetensors":
        assert list(loaded) == list(load_file(plain))


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "model"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_bytes_do_not_depend_on_workers_or_memory(plain, tmp_path, name, dtype):
    made = set()
    for number, (workers, memory) in enumerate([(1, 128 << 10), (3, 1 << 20), (64, 256 << 20)]):
        (tmp_path / str(number)).mkdir()
        out = tmp_path / str(number) / name
        reshard.merge(plain, out, workers=workers, max_memory_bytes=memory, dtype=dtype)
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        made.add(b"".join(path.read_bytes() for path in files))
    assert len(made) == 1


def test_a_source_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1 << 16), "b": torch.zeros(1 << 16)}, source)
    os.utime(source, ns=(0, 0))  # whatever the grain of the clock
    reads, pread = [], files._pread

    def meanwhile(descriptor, target, offset):
        reads.append(offset)
        if len(reads) == 2:
            data = source.read_bytes()
            with source.open("r+b") as file:
                file.write(data[: -(1 << 18)] + b"?" * (1 << 18))
        return pread(descriptor, target, offset)

    monkeypatch.setattr(files, "_pread", meanwhile)
    with pytest.raises(CorruptError, match="while it was read") as caught:
        reshard.merge(source, tmp_path / "o.safetensors", workers=1, max_memory_bytes=1 << 18)
    assert caught.value.where == str(source)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_no_verify_writes_the_same(plain, tmp_path):
    checked = reshard.merge(plain, tmp_path / "a.safetensors")
    unchecked = reshard.merge(plain, tmp_path / "b.safetensors", verify=False)
    assert (checked.verified, unchecked.verified) == (True, False)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "model"])
def test_new_files_have_the_permissions_of_the_umask(plain, tmp_path, name):
    umask = os.umask(0o027)
    try:
        reshard.merge(plain, tmp_path / name)
    finally:
        os.umask(umask)
    out = tmp_path / name
    for path in [out, *(out.iterdir() if out.is_dir() else ())]:
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


# --------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_a_cast_is_that_of_torch_and_spares_integers(plain, tmp_path, dtype, wanted):
    reshard.merge(plain, tmp_path / "out.safetensors", dtype=dtype)
    expected = {k: v.to(wanted) if v.is_floating_point() else v for k, v in weights().items()}
    assert same(load_file(tmp_path / "out.safetensors"), expected)


@pytest.mark.parametrize(
    "option",
    [
        *({"dtype": name} for name in ("int8", "nonsense", "", "bool")),
        {"tied": "maybe"},
        {"on_overflow": "ignore"},
        {"keep_fp32": ["nothing"]},
    ],
)
def test_a_value_that_no_option_has_is_refused(plain, tmp_path, option):
    with pytest.raises(UsageError):
        reshard.merge(plain, tmp_path / "out.safetensors", **option)
    assert names_in(tmp_path) == {"plain.safetensors"}


def test_keep_fp32_spares_what_it_names_and_widens_it(plain, tmp_path):
    reshard.merge(plain, tmp_path / "bf16.safetensors", dtype="bf16")
    kept = {"dtype": "bf16", "keep_fp32": [r"\.bias$", "^scalar$", "steps"]}
    for source in (plain, tmp_path / "bf16.safetensors"):
        report = reshard.merge(source, tmp_path / "out.safetensors", overwrite=True, **kept)
        found = {k: v.dtype for k, v in load_file(tmp_path / "out.safetensors").items()}
        assert sorted(report.kept_fp32) == ["a.bias", "scalar"]
        assert {k for k, v in found.items() if v == torch.float32} == {"a.bias", "scalar"}
        assert found["steps"] == torch.int64


@pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", "MXFP4"])
def test_a_quantised_form_needs_a_model_that_states_it(plain, tmp_path, dtype):
    with pytest.raises(UsageError, match="--quantise-like RELEASE"):
        reshard.merge(plain, tmp_path / "out.safetensors", dtype=dtype)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "needs the model's config.json"),
        ({"hf_dir": "config"}, "no linear layer of whole blocks"),
        ({"hf_dir": "config", "out": "out.safetensors"}, "the suffix of a file, but --quantise w"),
        ({"hf_dir": "large", "keep_fp32": ["q_proj"]}, "which --quantise writes as codes"),
        ({"hf_dir": "larger"}, r"of shape \(128, 128\), but .* shape \(256, 256\)"),
        ({"names": "module"}, "--quantise writes the names of files"),
        ({"quantise_like": "config"}, "has no effect with --quantise-like"),
    ],
)
def test_blocks_of_fp8_need_linear_layers_that_a_config_states(tmp_path, options, match):
    options = {"names": "source", **options}
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    save_file({q_proj: torch.randn(128, 128)}, tmp_path / "x.safetensors")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    for name, hidden in (("config", 4), ("large", 128), ("larger", 256)):
        (tmp_path / name).mkdir()
        config = json.dumps(CONFIG | sizes | {"hidden_size": hidden})
        (tmp_path / name / "config.json").write_text(config)
    paths = {
        each: tmp_path / options[each] for each in ("hf_dir", "quantise_like") if each in options
    }
    out = tmp_path / options.pop("out", "out")
    with pytest.raises(UsageError, match=match):
        reshard.merge(tmp_path / "x.safetensors", out, quantise="fp8-block", **{**options, **paths})


LARGE = {"big": torch.tensor([1.0, 7e4, -1e9, float("inf"), float("-inf"), float("nan")])}


@pytest.fixture
def large(tmp_path) -> Path:
    save_file(LARGE | {"fine": torch.ones(2)}, tmp_path / "large.safetensors")
    return tmp_path / "large.safetensors"


def test_overflow_is_an_error_that_names_and_counts(large, tmp_path):
    with pytest.raises(DifferentError, match=r"2 finite values .* big \(2\)") as caught:
        reshard.merge(large, tmp_path / "out.safetensors", dtype="fp16")
    assert "fine" not in str(caught.value)
    assert names_in(tmp_path) == {"large.safetensors"}


@pytest.mark.parametrize("policy", ["clamp", "allow"])
def test_overflow_is_clamped_to_the_largest_finite_value_or_allowed(large, tmp_path, policy):
    report = reshard.merge(large, tmp_path / "o.safetensors", dtype="fp16", on_overflow=policy)
    found = load_file(tmp_path / "o.safetensors")["big"]
    wanted = LARGE["big"].clamp(-65504, 65504).where(LARGE["big"].isfinite(), LARGE["big"])
    wanted = (wanted if policy == "clamp" else LARGE["big"]).half()
    assert torch.equal(found[:5], wanted[:5])
    assert found[5].isnan()
    assert report.overflowed == {"big": 2}
    assert any(line.split() == ["overflowed", "big:", "2", "values"] for line in report.lines())


def test_values_that_become_zero_are_counted(tmp_path):
    save_file({"w": torch.tensor([1e-9, 1.0, 0.0])}, tmp_path / "x.safetensors")
    report = reshard.merge(tmp_path / "x.safetensors", tmp_path / "o.safetensors", dtype="fp16")
    assert report.flushed == {"w": 1}


# ---------------------------------------------------------------------------------------- names


WRAPPED = {
    "module.model._orig_mod.layers.0._checkpoint_wrapped_module.w": "model.layers.0.w",
    "module.model.module": "model.module",
}


@pytest.mark.parametrize("strip", [True, False])
def test_wrappers_go_at_any_depth_and_are_reported(tmp_path, strip):
    save_file({name: torch.ones(2) for name in WRAPPED}, tmp_path / "x.safetensors")
    edits = Edits(strip_wrappers=strip)
    report = reshard.merge(tmp_path / "x.safetensors", tmp_path / "o.safetensors", edits=edits)
    wanted = set(WRAPPED.values() if strip else WRAPPED)
    assert load_file(tmp_path / "o.safetensors").keys() == wanted
    assert dict(report.stripped).keys() == (WRAPPED.keys() if strip else set())


def test_a_collision_by_stripping_is_refused_and_solved_by_no_strip(tmp_path):
    source = tmp_path / "c.safetensors"
    save_file({"_orig_mod.a.w": torch.ones(2), "a.w": torch.zeros(3)}, source)
    with pytest.raises(UsageError, match=r"(?s)'_orig_mod.a.w'.*'a.w'|'a.w'.*'_orig_mod.a.w'"):
        reshard.merge(source, tmp_path / "o.safetensors")
    assert names_in(tmp_path) == {"c.safetensors"}
    reshard.merge(source, tmp_path / "o.safetensors", edits=Edits(strip_wrappers=False))
    assert len(load_file(tmp_path / "o.safetensors")) == 2


def test_renames_apply_in_order_with_groups_before_the_choice_of_names(plain, tmp_path):
    renames = [(r"^(a|z)\.", r"layer.\1."), ("layer.z", "last")]
    edits = Edits(rename=renames, include=["weight$", "^last", "bias"], exclude=["bias$"])
    report = reshard.merge(plain, tmp_path / "o.safetensors", edits=edits)
    assert load_file(tmp_path / "o.safetensors").keys() == {"layer.a.weight", "last.weight"}
    assert ("z.weight", "last.weight") in report.renamed
    others = weights().keys() - {"z.weight", "a.weight", "a.bias"}
    assert set(report.excluded) == {*others, "layer.a.bias"}


def test_patterns_that_match_nothing_are_named(plain, tmp_path):
    edits = Edits(rename=[("^a", "b"), ("^b", "c"), ("none", "x")], include=["."], exclude=["noo"])
    report = reshard.merge(plain, tmp_path / "o.safetensors", edits=edits)
    said = [text for text in report.warnings if "matches no name" in text]
    assert [text.split(":")[0] for text in said] == ["--rename none=x", "--exclude noo"]


@pytest.mark.parametrize(
    ("edits", "match"),
    [
        ({"rename": [("(", "x")]}, None),
        ({"rename": [("a", r"\9")]}, None),
        ({"rename": [("^.*$", "")]}, None),
        ({"rename": [("^[az]", "b")]}, "would get this name"),
        ({"rename": [("^scalar$", "__metadata__")]}, "safetensors can store"),
        ({"exclude": ["."]}, "none of the 7 tensors"),
        ({"include": ["nothing"]}, "none of the 7 tensors"),
    ],
)
def test_edits_of_names_that_make_no_sense_are_refused(plain, tmp_path, edits, match):
    with pytest.raises(UsageError, match=match):
        reshard.merge(plain, tmp_path / "o.safetensors", edits=Edits(**edits))
    assert names_in(tmp_path) == {"plain.safetensors"}


def test_a_rename_onto_a_tied_name_is_refused(tied, tmp_path):
    with pytest.raises(UsageError, match="would get this name"):
        reshard.merge(tied, tmp_path / "o.safetensors", edits=Edits(rename=[(f"^{NORM}$", HEAD)]))


# ----------------------------------------------------------------------------------------- tied


@pytest.mark.parametrize("policy", ["auto", "drop"])
def test_an_alias_goes_and_the_file_says_so(tied, tmp_path, policy):
    report = reshard.merge(tied, tmp_path / "o.safetensors", tied=policy)
    assert load_file(tmp_path / "o.safetensors").keys() == {EMBED, NORM}
    assert report.dropped_aliases == {HEAD: EMBED}
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", HEAD: EMBED}


@pytest.mark.parametrize("name", ["o.safetensors", "o.pt", "model"])
def test_an_alias_kept_is_a_copy(tied, tmp_path, name):
    report = reshard.merge(tied, tmp_path / name, tied="keep")
    out = tmp_path / name
    found = tensors_of(out) if out.is_dir() else None
    found = found or (torch.load(out) if out.suffix == ".pt" else load_file(out))
    assert found.keys() == {EMBED, NORM, HEAD}
    assert torch.equal(found[HEAD], found[EMBED])
    assert report.written_aliases == {HEAD: EMBED}


@pytest.mark.parametrize(
    ("declared", "policy", "head", "after"),
    [
        (True, "auto", False, True),
        (True, "drop", False, True),
        (True, "keep", True, False),
        (False, "auto", True, False),
        (False, "keep", True, False),
        (False, "drop", False, False),
    ],
)
def test_the_config_says_whether_the_head_is_written(
    tied, tmp_path, hf, declared, policy, head, after
):
    model = hf(tie_word_embeddings=declared)
    reshard.merge(tied, tmp_path / "out", hf_dir=model, tied=policy)
    assert (HEAD in tensors_of(tmp_path / "out")) == head
    assert config_of(tmp_path / "out")["tie_word_embeddings"] == after


@pytest.mark.parametrize(
    ("is_equal", "policy", "kept"),
    [(True, "auto", {EMBED}), (False, "keep", {EMBED, HEAD}), (False, "drop", {EMBED})],
)
def test_a_declared_tie_of_two_storages_is_compared(tmp_path, hf, is_equal, policy, kept):
    embedding, source = torch.arange(32.0).reshape(8, 4), tmp_path / "separate.safetensors"
    head = embedding.clone()
    head[1, 1] += 0 if is_equal else 1
    save_file({EMBED: embedding, HEAD: head}, source)
    model = hf(tie_word_embeddings=True)
    if not is_equal:
        with pytest.raises(DifferentError, match="element 5"):
            reshard.merge(source, tmp_path / "out", hf_dir=model)
        assert not (tmp_path / "out").exists()
    report = reshard.merge(source, tmp_path / "out", hf_dir=model, tied=policy)
    assert tensors_of(tmp_path / "out").keys() == kept
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is (HEAD not in kept)
    if is_equal:
        assert report.dropped_aliases == {HEAD: EMBED}
    elif policy == "drop":
        assert any(HEAD in text and "differs" in text for text in report.warnings)


@pytest.mark.parametrize("policy", ["auto", "keep", "drop"])
@pytest.mark.parametrize(("excluded", "kept"), [(HEAD, EMBED), (EMBED, HEAD)])
def test_of_two_names_one_can_be_excluded(tied, tmp_path, policy, excluded, kept):
    edits = Edits(exclude=[f"^{excluded}$"])
    reshard.merge(tied, tmp_path / "o.safetensors", tied=policy, edits=edits)
    found = load_file(tmp_path / "o.safetensors")
    assert found.keys() == {kept, NORM}
    assert torch.equal(found[kept], torch.arange(32.0).reshape(8, 4))


# --------------------------------------------------------------------------- the model directory


def test_shards_stay_below_the_limit_and_the_index_is_right(plain, tmp_path):
    reshard.merge(plain, tmp_path / "out", max_shard_bytes=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        shard = load_file(tmp_path / "out" / name)
        sizes = [t.nbytes for t in shard.values()]
        assert sum(sizes) <= 300 or len(sizes) == 1
        assert all(index["weight_map"][fqn] == name for fqn in shard)
        found |= shard
    assert same(found, weights())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights().values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in weights().values())
    total = len(set(index["weight_map"].values()))
    numbered = {f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)}
    assert names_in(tmp_path / "out") == {*numbered, "model.safetensors.index.json"}
    reshard.merge(tmp_path / "out", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), weights())


def test_hf_dir_gives_the_files_of_a_model_and_nothing_else(tied, tmp_path, hf):
    reshard.merge(tied, tmp_path / "out", hf_dir=hf())
    made = names_in(tmp_path / "out")
    assert made == {"config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b\n"


def test_config_follows_what_was_written(tied, tmp_path, hf):
    model = hf(tie_word_embeddings=True)
    report = reshard.merge(tied, tmp_path / "out", hf_dir=model, dtype="bf16")
    wanted = CONFIG | {"torch_dtype": "bfloat16", "vocab_size": 8, "tie_word_embeddings": True}
    assert config_of(tmp_path / "out") == wanted
    assert len(report.changes) == 2
    assert config_of(model) == CONFIG | {"tie_word_embeddings": True}


def test_config_that_is_right_is_not_changed(tied, tmp_path, hf):
    model = hf(vocab_size=8, tie_word_embeddings=True)
    report = reshard.merge(tied, tmp_path / "out", hf_dir=model)
    assert (report.changes, config_of(tmp_path / "out")) == ([], config_of(model))


def test_a_broken_config_beside_the_checkpoint_stops_a_merge_to_a_directory(tied, tmp_path):
    (tied.parent / "config.json").write_text("// not JSON")
    reshard.merge(tied, tmp_path / "o.safetensors")
    with pytest.raises(CorruptError, match=r"config\.json"):
        reshard.merge(tied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["nowhere", "tied"])
def test_hf_dir_without_a_config_is_refused(tied, tmp_path, place):
    with pytest.raises(UsageError, match=r"config\.json"):
        reshard.merge(tied, tmp_path / "out", hf_dir=tmp_path / place)


# ---------------------------------------------------------------------------------- destinations


@pytest.mark.parametrize("name", ["o.safetensors", "out"])
def test_what_is_there_stays_or_is_replaced_when_asked_for(plain, large, tmp_path, name):
    out = tmp_path / name
    if name == "out":
        (tmp_path / "out").mkdir()  # an empty directory is a destination
    else:
        out.write_bytes(b"precious")
        with pytest.raises(ExistsError):
            reshard.merge(plain, out)
        assert out.read_bytes() == b"precious"
    options = {"max_shard_bytes": 300} if name == "out" else {"overwrite": True}
    reshard.merge(plain, out, **options)
    before = read_files(tmp_path)
    for options in ({"source": plain}, {"source": large, "overwrite": True, "dtype": "fp16"}):
        with pytest.raises((ExistsError, DifferentError)):
            reshard.merge(destination=out, **options)
        assert read_files(tmp_path) == before
    reshard.merge(plain, out, overwrite=True)
    assert names_in(tmp_path) == {"plain.safetensors", "large.safetensors", name}
    assert name != "out" or names_in(out) == {"model.safetensors"}
    path = out / "model.safetensors" if name == "out" else out
    assert same(load_file(path), weights())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", ["rank", "o.safetensors/", "file", "plain.safetensors", "model"])
def test_what_is_no_export_is_never_replaced(plain, tmp_path, there, overwrite):
    """A training checkpoint, a directory with the name of a file, and the source itself."""
    out, source = tmp_path / there, plain
    if there == "rank":
        out = tmp_path / "global_step9"
        out.mkdir()
        (out / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"weeks of training")
    elif there == "model":
        reshard.merge(plain, out)
        source = out
    elif there.endswith("/"):
        out.mkdir()
    elif there == "file":
        out.write_bytes(b"precious")
    before = read_files(tmp_path)
    with pytest.raises(ExistsError):
        reshard.merge(source, out, overwrite=overwrite, dtype="bf16")
    assert read_files(tmp_path) == before
    assert names_in(tmp_path) == {"plain.safetensors", out.name}


def link_out(link, target):
    target.write_text("secret")
    link.symlink_to(target)


def test_links_out_of_the_source_are_named_and_not_copied(tmp_path, hf):
    elsewhere, source = tmp_path / "elsewhere", tmp_path / "run" / "checkpoint-1"
    elsewhere.mkdir()
    source.parent.mkdir()
    hf().rename(source)
    for name in ("merges.txt", "optimizer.pt"):
        (source / name).unlink()
    save_file(weights(), elsewhere / "weights")
    (source / "model.safetensors").symlink_to(elsewhere / "weights")  # weights are read anywhere
    link_out(source / "tokenizer.model", elsewhere / "secret")
    link_out(source / "merges.txt", source / "inside")
    link_out(source / "chat_template.jinja", source.parent / "chat_template.jinja")
    link_out(source / "vocab.txt", source.parent / "of-another-run")
    for out, write in (
        (tmp_path / "merged", reshard.merge),
        (tmp_path / "split", partial(reshard.split, to="dcp", init_optimizer="none")),
    ):
        report = write(source, out)
        found = {path.name for path in out.iterdir()}
        assert {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"} <= found
        assert not {"tokenizer.model", "vocab.txt"} & found
        notes = [line for line in report.warnings if "outside of the checkpoint" in line]
        assert len(notes) == 2
        assert any(f"it is a link to {elsewhere / 'secret'}" in note for note in notes)
    link = source / "config.json"
    link.rename(elsewhere / "config.json")
    link.symlink_to(elsewhere / "config.json")
    report = reshard.merge(source, tmp_path / "without")
    assert not (tmp_path / "without" / "config.json").exists()
    assert any("config.json was not copied" in line for line in report.warnings)


def test_links_of_a_snapshot_to_its_own_blobs_are_copied(tmp_path, hf):
    for repo in ("one", "two"):
        (tmp_path / repo).mkdir()
        hf().rename(tmp_path / repo / "blobs")
    snapshot = tmp_path / "one" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file(weights(), tmp_path / "one" / "blobs" / "0")
    for name, blob in (("model.safetensors", "0"), ("config.json",) * 2, ("tokenizer.json",) * 2):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    link_out(snapshot / "tokenizer.model", tmp_path / "two" / "blobs" / "1")
    reshard.merge(snapshot, tmp_path / "out")
    assert names_in(tmp_path / "out") == {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["o.safetensors", "out"])
def test_a_link_is_followed_to_where_it_points(plain, tmp_path, name):
    """Or refused; never is something made beside its target, under the link's name."""
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / name).symlink_to(there / f"real-{name}")
    if name == "out":
        (there / "real-out").mkdir()
    try:
        reshard.merge(plain, tmp_path / name, overwrite=True)
    except ExistsError:
        assert names_in(there) <= {"real-out"}
    else:
        assert (tmp_path / name).exists()
        assert names_in(there) <= {f"real-{name}"}


def test_the_working_directory_is_written_or_refused_at_once(plain, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        reshard.merge(plain, ".")
    except ExistsError as error:
        assert "not empty" not in str(error)  # noqa: PT017 - it is empty
    assert names_in(tmp_path) == {"plain.safetensors", "here"}


@pytest.mark.parametrize("name", ["o.safetensors", "o.pt", "out"])
@pytest.mark.parametrize("exists", [False, True])
def test_dry_run_touches_nothing(plain, tmp_path, name, exists):
    if exists:
        reshard.merge(plain, tmp_path / name)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    report = reshard.merge(plain, tmp_path / name, dry_run=True, overwrite=True, dtype="bf16")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (report.done, report.verified, report.seconds) == (False, False, 0.0)
    assert report.dtypes == {"bfloat16": 5, "int64": 1, "bool": 1}


def test_too_little_memory_is_refused_before_anything_is_written(plain, tmp_path):
    with pytest.raises(ResourceError):
        reshard.merge(plain, tmp_path / "o.safetensors", max_memory_bytes=1000)
    assert names_in(tmp_path) == {"plain.safetensors"}
    for workers in (0, 1, 3, 64):
        limits = {"workers": workers, "max_memory_bytes": 1 << 20, "dry_run": True}
        assert 0 < reshard.merge(plain, tmp_path / "o.pt", **limits).peak_buffer_bytes <= 1 << 20


def test_a_state_dict_deep_in_a_file_is_found_by_key(tmp_path):
    torch.save({"a": {"b": {"w": torch.ones(2)}}, "c": {"v": torch.ones(1)}}, tmp_path / "x.pt")
    reshard.merge(tmp_path / "x.pt", tmp_path / "o.safetensors", key="a.b")
    assert load_file(tmp_path / "o.safetensors").keys() == {"w"}
    with pytest.raises(UsageError, match="it contains b"):
        reshard.merge(tmp_path / "x.pt", tmp_path / "p.safetensors", key="a.nothing")


def test_a_quantised_model_keeps_its_codes_scales_and_dtype(tmp_path):
    from transformers import FineGrainedFP8Config, LlamaConfig

    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {
        name: torch.randn(8, 4).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.rand(1, 1) + 1 / 3,
        "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    config = LlamaConfig(dtype="bfloat16", quantization_config=FineGrainedFP8Config().to_dict())
    source = tmp_path / "fp8"
    config.save_pretrained(source)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    reshard.merge(source, tmp_path / "out")
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written == (source / "model.safetensors").read_bytes()
    wanted, got = (
        json.loads((place / "config.json").read_text()) for place in (source, tmp_path / "out")
    )
    assert got["dtype"] == wanted["dtype"]
    assert got["quantization_config"] == wanted["quantization_config"]


def test_codes_without_scales_keep_their_dtype_with_a_note(tmp_path):
    codes = {"a": torch.randn(8, 4).to(torch.float8_e4m3fn), "b": torch.ones(2)}
    save_file(codes, tmp_path / "codes.safetensors")
    report = reshard.merge(tmp_path / "codes.safetensors", tmp_path / "o.safetensors", dtype="bf16")
    assert report.warnings == ["weights keep their dtype, as no scales are known: a"]
    kept = reshard.merge(tmp_path / "codes.safetensors", tmp_path / "p.safetensors")
    assert not kept.warnings


def test_one_file_has_no_shards(plain, tmp_path):
    with pytest.raises(UsageError, match="--max-shard-size: has no effect, because the suffix"):
        reshard.merge(plain, tmp_path / "out.safetensors", max_shard_bytes=1000)


# The model that the user names


def make_other():
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(1000, 8)
    return model


def test_a_model_with_other_shapes_is_refused(tmp_path):
    run = Path(__file__).parents[1] / "data" / "deepspeed_0.19.8" / "z3_nvme_sub" / "run"
    with pytest.raises(UsageError, match=r"'embed.weight' has shape .*, in the model \(1000, 8\)"):
        reshard.merge(run, tmp_path / "out", model=f"{__name__}:make_other")
