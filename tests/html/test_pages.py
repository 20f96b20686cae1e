"""Pages: they show what the manifests say, and nothing in a checkpoint can be markup."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
import zlib
from collections import Counter
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard import formats
from reshard.core import dtypes
from reshard.core.box import Box, flat_span, whole
from reshard.core.chunks import contiguous
from reshard.core.manifest import Entry, OutputFile, Skeleton
from reshard.errors import ExistsError, UsageError
from reshard.html import document, pages, shards
from reshard.html.curves import Curves
from reshard.html.page import Column, Facts, Findings, Maps, Page, PageTable
from tests.support import large_manifests
from tests.support.programs import run_reshard as run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llama-zero3-4ranks"
ASSETS = ROOT / "reshard" / "html" / "assets"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">&amp;{{ 7 * 7 }}'\"\u202e"
SMALL = large_manifests.llama(layers=3, hidden=64, inner=160, heads=32, vocabulary=97)


class Parsed(HTMLParser):
    """A page's elements, texts, and the content of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.raw = [], [], {}
        self._inside = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside:
            self.raw[self._inside] = self.raw.get(self._inside, "") + data
        else:
            self.texts.append(data.strip())

    @property
    def data(self):
        return json.loads(zlib.decompress(base64.b64decode(self.raw["data"])))

    def section(self, kind):
        return next(data for name, data in self.data if name == kind)


def parsed(path):
    return Parsed(Path(path).read_text())


def held(side):
    """(file, offset, bytes, kind, fqn, first element) of every piece, from the data of a page."""
    found = []
    for _, _, files, number, index in side["rows"]:
        layout = side["layouts"][number]
        columns = zip(
            *(layout[k] for k in ("offset", "nbytes", "tensor", "start", "step")), strict=True
        )
        for offset, nbytes, tensor, start, step in columns:
            at = offset
            for file in files:
                name, size = side["files"][file]
                if at < size:
                    break
                at -= size
            fqn, kind, *_ = side["tensors"][tensor]
            found.append((name, at, nbytes, kind, fqn, start + index * step))
    return found


def bytes_of(pieces):
    """(file, kind, fqn) -> {byte: element}, for small tensors whose elements have 4 bytes."""
    found = {}
    for file, offset, nbytes, kind, fqn, start in pieces:
        held = found.setdefault((file, kind, fqn), {})
        held.update((offset + n * 4, start + n) for n in range(nbytes // 4))
    return found


def chunks_of(manifest, names):
    for entry in manifest.entries.values():
        for chunk in entry.chunks:
            if chunk.box.volume:
                start, stop = chunk.byte_span
                first = flat_span(chunk.box, entry.shape)[0]
                file = names[chunk.file]
                yield file, start, stop - start, entry.kind, entry.fqn, first


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [large_manifests.zero3, large_manifests.flat])
def test_every_element_stands_at_its_byte(make, ranks):
    manifest = make(SMALL, ranks)
    side = shards.map_manifest("x", manifest).to_json()
    wanted = bytes_of(chunks_of(manifest, {name: name for name in manifest.files}))
    assert bytes_of(held(side)) == wanted


def test_the_map_of_a_real_checkpoint_is_its_manifest():
    manifest = formats.read([EXAMPLE])
    names = {path: Path(path).name for path in manifest.files}
    side = shards.map_manifest("x", manifest).to_json()
    assert bytes_of(held(side)) == bytes_of(chunks_of(manifest, names))
    assert [row[0] for row in side["rows"]] == [f"rank {rank}" for rank in range(4)]


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 1, 2, 0), (2, 0, 1, 3), (0, 0, 0, 1)])
def test_replicas_and_ranks_in_any_order_keep_their_elements(order):
    names = [f"rank{rank}.pt" for rank in range(len(order))]
    boxes = [Box((part, 0), (1, 5)) for part in order]
    chunks = [contiguous(n, 8, dtypes.FLOAT32, b) for n, b in zip(names, boxes, strict=True)]
    entry = Entry("w", "param", dtypes.FLOAT32, (4, 5), tuple(chunks))
    side = shards.map_skeleton("x", Skeleton(tuple(OutputFile(n, 32) for n in names), (entry,)))
    assert [piece[-1] for piece in held(side.to_json())] == [part * 5 for part in order]


def test_ranks_that_are_alike_share_a_layout():
    side = shards.map_manifest("x", large_manifests.zero3(SMALL, 32)).to_json()
    assert len(side["layouts"]) < 8
    assert len(side["rows"]) == 32


def test_a_thousand_ranks_stay_small():
    manifest = large_manifests.zero3(large_manifests.llama(layers=1), 1024)
    side = shards.map_manifest("x", manifest)
    assert sum(len(row.pieces) for row in side.rows) > 30_000
    assert side.coarse == 0
    assert len(document.pack(side.to_json())) < 100_000


@pytest.mark.parametrize("most", [40, 400])
def test_what_is_too_much_is_drawn_together_and_said(most, monkeypatch):
    manifest = large_manifests.irregular(SMALL, 8, random.Random(3))
    full = shards.map_manifest("x", manifest)
    monkeypatch.setattr(shards, "MOST_PIECES", most)
    side = shards.map_manifest("x", manifest)
    document = side.to_json()
    pieces = sum(len(layout["offset"]) for layout in document["layouts"])
    assert pieces <= most < sum(len(row.pieces) for row in full.rows)
    assert side.coarse > 0
    assert side.kinds == full.kinds
    count = sum(piece.more + 1 for row in side.rows for piece in row.pieces)
    assert count == sum(len(row.pieces) for row in full.rows)


def test_columns_of_a_tensor_are_no_run():
    left, right = (Box((0, o), (4, 3)) for o in (0, 3))
    chunks = tuple(contiguous("f", at, dtypes.FLOAT32, b) for at, b in ((0, left), (48, right)))
    entry = Entry("w", "param", dtypes.FLOAT32, (4, 6), chunks)
    side = shards.map_skeleton("x", Skeleton((OutputFile("f", 96),), (entry,)))
    assert [(p.offset, p.shape, p.start) for p in side.rows[0].pieces] == [
        (0, (4, 3), 0),
        (48, (4, 3), 3),
    ]


def test_files_of_no_rank_have_rows_of_their_own():
    names = [
        "latest",
        "step/mp_rank_00_model_states.pt",
        "step/zero_pp_rank_10_mp_rank_00_optim_states.pt",
    ]
    names += ["step/zero_pp_rank_9_mp_rank_00_optim_states.pt"]
    entries = tuple(
        Entry(
            name,
            "param",
            dtypes.FLOAT32,
            (2,),
            (contiguous(name, 0, dtypes.FLOAT32, whole((2,))),),
        )
        for name in names[1:]
    )
    side = shards.map_skeleton("x", Skeleton(tuple(OutputFile(n, 8) for n in names), entries))
    assert [row.label for row in side.rows] == ["rank 9", "rank 10", "mp_rank_00_model_states.pt"]
    assert [side.files[n][0] for n in side.undrawn] == ["latest"]


# ---- the document


def hostile_page():
    chunk = contiguous(HOSTILE, 0, dtypes.FLOAT32, whole((2,)))
    entry = Entry(HOSTILE, HOSTILE, dtypes.FLOAT32, (2,), (chunk,))
    side = shards.map_skeleton(HOSTILE, Skeleton((OutputFile(HOSTILE, 8),), (entry,)))
    series = [{"name": HOSTILE, "steps": [1, 2], "loss": [1.0, 2.0]}] * 2
    return Page(
        HOSTILE,
        HOSTILE,
        HOSTILE,
        "good",
        facts=[Facts(HOSTILE, [(HOSTILE, HOSTILE)])],
        findings=[Findings(HOSTILE, [HOSTILE] * 20)],
        sections=(
            PageTable(HOSTILE, [Column(HOSTILE, "name", [HOSTILE])], HOSTILE),
            Maps([side], [(HOSTILE, HOSTILE)], HOSTILE),
            Curves.of(series),
        ),
    )


def test_names_are_never_markup():
    page = Parsed(document.render(hostile_page()))
    count = Counter(tag for tag, _ in page.elements)
    assert count["img"] == 0
    assert count["script"] == 2
    assert HOSTILE in page.texts
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
    assert page.section("table")["columns"][0]["values"] == [HOSTILE]
    assert page.section("maps")["sides"][0]["tensors"][0][:2] == [HOSTILE, HOSTILE]


def test_only_the_pages_own_script_may_run_and_nothing_is_loaded():
    page = Parsed(document.render(hostile_page()))
    policy = next(a["content"] for _, a in page.elements if "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.raw["script"].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not any({"src", "href", "srcset"} & attrs.keys() for _, attrs in page.elements)
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    own = "".join((ASSETS / name).read_text() for name in document._SCRIPTS)
    ways = ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "sendBeacon", "innerHTML")
    assert [way for way in ways if way in own] == []
    assert [way for way in ("url(", "@import") if way in page.raw["style"]] == []


def test_the_same_report_gives_the_same_bytes(tmp_path):
    inspection = reshard.inspect(EXAMPLE)
    made = [
        pages.build_inspect_page(inspection.to_dict(), formats.read([EXAMPLE])) for _ in range(2)
    ]
    assert document.render(made[0]) == document.render(made[1])


def test_only_pages_with_curves_carry_the_library_that_draws_them():
    without = document.render(Page("x", "x", "x", "plain"))
    assert "uPlot" not in Parsed(without).raw["script"].replace("new uPlot(", "")
    assert "leeoniya/uPlot (v1.6.32)" in document.render(hostile_page())


def test_the_library_is_the_published_one():
    digests = {  # of uplot-1.6.32.tgz from the npm registry
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    assert {n: hashlib.sha256((ASSETS / n).read_bytes()).hexdigest() for n in digests} == digests
    assert "Leon Sorokin" in (ASSETS / "uPlot.LICENSE").read_text()


def test_numbers_that_json_lacks_are_words():
    text = document.pack([nan, inf, {"x": (-inf, 1.5)}])
    assert json.loads(zlib.decompress(base64.b64decode(text))) == [
        "nan",
        "inf",
        {"x": ["-inf", 1.5]},
    ]


def test_a_path_that_is_no_utf8_is_shown(tmp_path):
    page = Page(
        "x",
        "run\udcff",
        "x",
        "plain",
        sections=(PageTable("t", [Column("a", "name", ["\udcff"])]),),
    )
    document.write(page, tmp_path / "x.html", overwrite=False)
    assert "run\\udcff" in (tmp_path / "x.html").read_text()


def test_the_wheel_has_every_asset():
    pattern = '"html/assets/*"'
    assert pattern in (ROOT / "pyproject.toml").read_text()
    used = {*document._SCRIPTS, document._TEMPLATE, document._STYLE, document._PLOTS, "dark.css"}
    used |= {document._PLOTS_STYLE, "uPlot.LICENSE"}
    assert {path.name for path in ASSETS.iterdir()} == used


# ---- curves


def apart(*losses, steps=None):
    steps = steps or [list(range(len(loss))) for loss in losses]
    series = [
        {"name": str(n), "steps": s, "loss": loss}
        for n, (s, loss) in enumerate(zip(steps, losses, strict=True))
    ]
    return list(Curves.of(series).differences())


@pytest.mark.parametrize(
    ("one", "two", "found"),  # steps, equal ones, the first that is not, the largest and its step
    [
        ([3.0, nan, 1.0], [3.0, nan, 1.0], (3, 3, None, 0.0, None)),
        ([4.0, 3.0, 2.0], [4.0, 3.25, 1.0], (3, 1, 1, 1.0, 2)),
        ([4.0, 3.0], [4.0, nan], (2, 1, 1, 0.0, None)),
    ],
)
def test_the_largest_difference_and_its_step_are_found(one, two, found):
    (each,) = apart(one, two)
    assert (each.steps, each.equal, each.first, each.largest, each.at) == found
    assert each.relative == each.largest / 2  # where it is largest, the first loss is 2.0


def test_runs_are_compared_at_the_steps_that_both_have():
    (found,) = apart([4.0, 3.0, 2.0], [3.0, 2.0], steps=[[1, 2, 3], [2, 3]])
    assert (found.steps, found.equal) == (2, 2)


def test_series_must_have_a_value_a_step():
    with pytest.raises(UsageError, match="2 values of loss for 3 steps"):
        Curves.of([{"name": "x", "steps": [1, 2, 3], "loss": [1.0, 2.0]}])


# ---- the commands


def test_inspect_writes_what_it_says(tmp_path):
    done = run("inspect", EXAMPLE, "--html", tmp_path / "x.html")
    assert (done.returncode, done.stderr) == (0, "")
    page, manifest = parsed(tmp_path / "x.html"), formats.read([EXAMPLE])
    columns = {c["title"]: c["values"] for c in page.section("table")["columns"]}
    assert columns["Name"] == [entry.fqn for entry in manifest.entries.values()]
    assert columns["Elements"] == [entry.numel for entry in manifest.entries.values()]
    assert {"deepspeed, ZeRO stage 3", "bfloat16"} <= set(page.texts)


@pytest.mark.parametrize("dry_run", [False, True])
def test_split_shows_before_and_after(tmp_path, dry_run):
    options = {"world_size": 2, "html": tmp_path / "x.html", "dry_run": dry_run}
    reshard.split(EXAMPLE, tmp_path / "two", **options)
    page = parsed(tmp_path / "x.html")
    before, after = page.section("maps")["sides"]
    assert (before["title"], len(before["rows"])) == ("Before", 4)
    ranks = [row for row in after["rows"] if row[1] is not None]
    assert (after["title"], len(ranks)) == ("After", 2)
    assert (tmp_path / "two").exists() != dry_run
    assert any("dry run" in text for text in page.texts) == dry_run


LAYOUTS = [
    *({"to": "deepspeed", "zero_stage": stage} for stage in range(4)),
    {"to": "deepspeed", "zero_stage": 1, "dtype": "fp32"},
    *({"to": to} for to in ("ds-universal", "dcp", "fsdp2", "accelerate", "verl", "torch")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_map_of_what_is_written_is_what_a_reader_finds(tmp_path, layout):
    out = tmp_path / "out"
    reshard.split(EXAMPLE, out, html=tmp_path / "x.html", **layout)
    after = parsed(tmp_path / "x.html").section("maps")["sides"][1]
    manifest = formats.read([out])
    names = {path: str(Path(path).relative_to(out)) for path in manifest.files}
    found = {(name, at, kind) for name, at, _, kind, _, _ in held(after)}
    wanted = {(name, at, kind) for name, at, _, kind, _, _ in chunks_of(manifest, names)}
    read = {(name, at): kind for name, at, kind in wanted}
    assert {read[name, at] for name, at, _ in found if (name, at) in read} >= {"exp_avg"}
    wrong = [each for each in found if read.get(each[:2], each[2]) != each[2]]
    assert wrong == []


def test_what_the_report_says_stands_in_the_page(tmp_path):
    done = reshard.split(EXAMPLE, tmp_path / "v", to="verl", html=tmp_path / "x.html")
    lists = (done.kept, done.derived, done.dropped, done.notes, done.warnings)
    said = {text for texts in lists for text in texts}
    assert said
    assert said <= set(parsed(tmp_path / "x.html").texts)


def test_diff_lists_what_is_unequal_and_keeps_its_exit_code(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        held = {"same": torch.ones(3), "other": torch.tensor([1.0, value]), name: torch.ones(1)}
        save_file(held, tmp_path / f"{name}.safetensors")
    places = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert reshard.diff(*places, html=tmp_path / "x.html").exit_code == 1
    page = parsed(tmp_path / "x.html")
    columns = {c["title"]: c["values"] for c in page.section("table")["columns"]}
    assert (columns["Name"], columns["Unequal"], columns["First at"]) == (["other"], [1], ["[1]"])
    assert page.section("maps")["singled"] == [["weight", "other"]]


def columns_of(page):
    return {column["title"]: column["values"] for column in page.section("table")["columns"]}


def test_verify_shows_its_checks_and_a_map(tmp_path):
    report = reshard.verify(EXAMPLE, html=tmp_path / "x.html").to_dict()
    page = parsed(tmp_path / "x.html")
    checks = columns_of(page)
    assert checks["Check"] == [check["name"] for check in report["checks"]]
    assert checks["Result"] == [check["status"] for check in report["checks"]]
    assert len(page.section("maps")["sides"][0]["rows"]) == 4


@pytest.mark.parametrize("spoil", ["flipped", "lost"])
def test_verify_writes_out_what_it_found(tmp_path, spoil):
    shutil.copytree(EXAMPLE, tmp_path / "run")
    file = sorted((tmp_path / "run").rglob("*_optim_states.pt"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    if spoil == "lost":
        file.unlink()
    report = reshard.verify(tmp_path / "run", deep=True, html=tmp_path / "x.html").to_dict()
    page = parsed(tmp_path / "x.html")
    assert report["exit_code"] > 0
    found = [text for check in report["checks"] for text in check["failures"]]
    assert found
    assert set(found) <= set(page.texts)
    assert "failed" in columns_of(page)["Result"]
    assert ("maps" in dict(page.data)) == (spoil == "flipped")


def test_merge_names_what_it_left_out(tmp_path):
    page = tmp_path / "x.html"
    reshard.merge(
        EXAMPLE, tmp_path / "m.safetensors", html=page, edits=reshard_edits(exclude=["norm"])
    )
    texts = parsed(page).texts
    assert "40 optimizer tensors (merge writes weights only)" in texts
    assert "model.norm.weight" in texts


def reshard_edits(**options):
    from reshard.core import keys

    return keys.Edits(**options)


def test_a_page_never_replaces_what_is_there(tmp_path):
    (tmp_path / "x.html").write_text("precious")
    done = run("split", EXAMPLE, tmp_path / "two", "--html", tmp_path / "x.html")
    assert done.returncode == 2
    assert "x.html" in done.stderr
    assert (tmp_path / "x.html").read_text() == "precious"
    assert not (tmp_path / "two").exists()
    done = run("inspect", EXAMPLE, "--html", tmp_path / "x.html", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")


def test_a_page_lies_in_no_source_and_in_no_output(tmp_path):
    with pytest.raises(ExistsError, match="never written to"):
        reshard.inspect(EXAMPLE, html=EXAMPLE / "x.html")
    (tmp_path / "out").mkdir()
    with pytest.raises(ExistsError, match="inside the output"):
        reshard.split(EXAMPLE, tmp_path / "out", html=tmp_path / "out" / "x.html")
    with pytest.raises(UsageError, match="no directory"):
        reshard.inspect(EXAMPLE, html=tmp_path / "nowhere" / "x.html")


def test_a_page_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def broken(_page):
        raise RuntimeError("no page")

    monkeypatch.setattr(document, "render", broken)
    with pytest.raises(RuntimeError):
        reshard.inspect(EXAMPLE, html=tmp_path / "x.html")
    assert list(tmp_path.iterdir()) == []
