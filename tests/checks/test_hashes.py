"""A manifest of contents: written, read, altered, and compared with checkpoints of every layout."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.checks import digests, hashes
from reshard.errors import CorruptError, ExistsError, UsageError
from tests.support.sample_tensors import raw, sample_tensors


@pytest.fixture
def tensors():
    wanted = {name: value.contiguous().clone() for name, value in sample_tensors().items()}
    return {n: v for n, v in wanted.items() if "complex" not in n and not n.startswith("special")}


@pytest.fixture
def source(tmp_path, tensors):
    path = tmp_path / "source.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture
def manifest(source, tmp_path):
    path = tmp_path / "manifest.json"
    ignored = [r"^float|^bfloat"]  # any bits, NaN among them
    report = reshard.verify(source, write_manifest=path, ignore=ignored)
    assert report.manifest == str(path), list(report.lines())
    return path


def against(path, manifest):
    return reshard.verify(path, against=manifest, ignore=["^float|^bfloat"]).check("against")


@pytest.fixture
def without_blake3(monkeypatch):
    monkeypatch.setattr(digests, "has_blake3", lambda: False)
    monkeypatch.setattr(hashes, "list_algorithms", lambda: (digests.SHA256,))


def test_blake3_stands_beside_sha256_and_suffices(source, tensors, manifest, tmp_path, monkeypatch):
    """What a loader computes of one tensor is what the manifest has of it."""
    blake3 = pytest.importorskip("blake3").blake3
    document = json.loads(manifest.read_text())
    for content in document["tensors"]:
        assert content["blake3"].keys() == content["sha256"].keys()
        value = raw(tensors[content["fqn"]])
        assert content["blake3"][content["dtype"]] == blake3(value).hexdigest()
    computed = []
    monkeypatch.setattr(
        "reshard.checks.scan.start_hash", lambda name: computed.append(name) or digests.start(name)
    )
    assert against(source, manifest).status == "passed"
    assert set(computed) == {"blake3"}
    value = load_file(source)
    value["float32"] = value["float32"].clone()
    value["float32"].view(torch.uint8).view(-1)[0] ^= 1
    save_file(value, tmp_path / "other.safetensors")
    failed = against(tmp_path / "other.safetensors", manifest)
    assert failed.failures == [
        "weight float32 has other contents than in the manifest (as float32)"
    ]


def test_a_manifest_with_blake3_is_compared_without_the_package(source, manifest, without_blake3):
    assert against(source, manifest).status == "passed"


def test_without_blake3_the_manifest_has_sha256_and_says_so(source, tmp_path, without_blake3):
    path = tmp_path / "plain.json"
    report = reshard.verify(source, write_manifest=path, ignore=["^float|^bfloat"])
    assert any("SHA-256 digests only" in note for note in report.notes)
    assert not any("blake3" in each for each in json.loads(path.read_text())["tensors"])
    assert against(source, path).status == "passed"


def test_a_manifest_with_blake3_alone_needs_the_package(source, manifest, tmp_path, monkeypatch):
    pytest.importorskip("blake3")
    document = json.loads(manifest.read_text())
    for content in document["tensors"]:
        del content["sha256"]
    document["digest"] = hashes._compute_digest(document["tensors"])
    path = tmp_path / "blake3.json"
    path.write_text(json.dumps(document))
    assert against(source, path).status == "passed"
    monkeypatch.setattr(hashes, "list_algorithms", lambda: (digests.SHA256,))
    with pytest.raises(UsageError, match="blake3 is not installed"):
        against(source, path)


def test_digests_are_of_the_elements(tensors, manifest):
    held = {t["fqn"]: t for t in json.loads(manifest.read_text())["tensors"]}
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        content = held[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert (content["kind"], content["dtype"]) == ("weight", dtype)
        assert content["shape"] == list(tensor.shape)
        assert content["sha256"][dtype] == hashlib.sha256(raw(tensor)).hexdigest()


def test_casts_are_hashed_as_torch_casts(tensors, manifest):
    held = {t["fqn"]: t for t in json.loads(manifest.read_text())["tensors"]}
    for name in ("one", "prime.2d", "wide.5d", "float32", "float64"):
        for dtype in (torch.bfloat16, torch.float16):
            wanted = hashlib.sha256(raw(tensors[name].to(dtype))).hexdigest()
            assert held[name]["sha256"][str(dtype).removeprefix("torch.")] == wanted
    assert set(held["int64"]["sha256"]) == {"int64"}


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16", "fp32"])
def test_what_merge_writes_is_what_the_manifest_lists(source, manifest, tmp_path, dtype):
    out = tmp_path / "out.safetensors"
    reshard.merge(source, out, dtype=dtype, on_overflow="allow")
    assert against(out, manifest).status == "passed"


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_bytes_whatever_the_workers(source, manifest, tmp_path, workers):
    again = tmp_path / "again.json"
    options = {"workers": workers, "max_memory_bytes": 1 << 20}
    reshard.verify(source, write_manifest=again, ignore=["^float|^bfloat"], **options)
    assert again.read_bytes() == manifest.read_bytes()


def changed(path, tmp_path, edit):
    held = load_file(path)
    edit(held)
    save_file(held, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("prime"), "prime is missing"),
        (lambda t: t.update(more=torch.ones(2)), "more is not listed"),
        (lambda t: t["prime"].view(-1)[5].add_(1e-6), "prime has other contents"),
        (
            lambda t: t.update(prime=t["prime"].reshape(1, 13)),
            "prime has the shape [1, 13], but [13]",
        ),
        (
            lambda t: t.update(int64=t["int64"].float()),
            "int64 is float32, but int64 in the manifest",
        ),
    ],
)
def test_what_differs_is_named(source, manifest, tmp_path, edit, words):
    check = against(changed(source, tmp_path, edit), manifest)
    assert [text for text in check.failures if words in text] == check.failures
    assert len(check.failures) == 1


def test_a_wider_value_is_compared_as_cast(source, manifest, tmp_path):
    def halved(held):
        for name in ("prime", "one", "odd.3d"):
            held[name] = held[name].bfloat16()

    narrow = changed(source, tmp_path, halved)
    other = tmp_path / "narrow.json"
    reshard.verify(narrow, write_manifest=other, ignore=["^float|^bfloat"])
    check = against(source, other)
    assert check.status == "passed"
    assert "3 as cast" in check.looked_at


def test_an_altered_manifest_is_refused(source, manifest, tmp_path):
    text = manifest.read_text()
    broken = tmp_path / "broken.json"
    for content in (text.replace('"prime"', '"Prime"'), text[:-40], "[]", "{}", '"x"', ""):
        broken.write_text(content)
        with pytest.raises(CorruptError):
            reshard.verify(source, against=broken)
    for wrong, remedy in ((tmp_path / "nowhere.json", "--write-manifest"), (tmp_path, "diff")):
        with pytest.raises(UsageError, match=remedy):
            reshard.verify(source, against=wrong)


def test_a_manifest_is_not_replaced_unless_asked(source, manifest):
    with pytest.raises(ExistsError):
        reshard.verify(source, write_manifest=manifest)
    ignored = ["^float|^bfloat"]
    assert reshard.verify(source, write_manifest=manifest, overwrite=True, ignore=ignored).manifest


def test_a_damaged_source_gets_no_manifest(tmp_path):
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "x.safetensors")
    path = tmp_path / "manifest.json"
    report = reshard.verify(tmp_path / "x.safetensors", write_manifest=path)
    assert (report.exit_code, report.manifest, path.exists()) == (1, "", False)
    assert any("not written" in note for note in report.notes)
    assert reshard.verify(tmp_path / "x.safetensors", deep=True, ignore=["^w$"]).passed


def test_optimizer_values_that_are_no_tensors_are_listed(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["kind"] = "row"
    path, listed = tmp_path / "x.pt", tmp_path / "manifest.json"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    reshard.verify(path, write_manifest=listed)
    assert json.loads(listed.read_text())["train"]["non_tensor_state"] == {
        "weight": {"kind": "row"}
    }
    assert reshard.verify(path, against=listed).exit_code == 0
    state["state"][0]["kind"] = "column"
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    assert reshard.verify(path, against=listed).exit_code != 0
