"""Pages in a real browser: drawn, without an error or a request, and quick at a thousand ranks."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.html import document, shards
from reshard.html.curves import Curves, LossRun
from reshard.html.page import Column, Maps, Page, PageTable
from tests.html.test_pages import EXAMPLE, HOSTILE, hostile_page
from tests.support import browser, large_manifests

pytestmark = pytest.mark.skipif(
    browser.find() is None,
    reason=f"no browser: pages were not looked at (install one of {', '.join(browser.NAMES)})",
)


@pytest.fixture(scope="module")
def tab():
    with browser.tab() as opened:
        yield opened


@pytest.fixture
def show(tab, tmp_path):
    def show(*sections, **options):
        page = Page("test", "test", "test", "plain", sections=sections)
        document.write(page, tmp_path / "x.html", overwrite=True)
        tab.show(tmp_path / "x.html", **options)
        return tab

    return show


def texts(tab, selector):
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return tab.js(found)


def plot(tab):
    """Return the left, top, width and height of the first map's drawing, scrolled into view."""
    tab.js("document.querySelector('.stage').scrollIntoView({block: 'center'})")
    return tab.js(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('.stage').getBoundingClientRect())"
    )


def colours(tab):
    """Count the pixels of each colour on a map's canvas."""
    return tab.js(
        "(() => { const c = document.querySelector('.stage canvas');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const found = {}; for (let i = 0; i < d.length; i += 4) {"
        " const k = '#' + [0, 1, 2].map((n) => d[i + n].toString(16).padStart(2, '0')).join('');"
        " found[k] = (found[k] ?? 0) + 1; } return found; })()"
    )


def test_no_name_runs_and_nothing_is_asked_of_the_network(tab, tmp_path):
    document.write(hostile_page(), tmp_path / "x.html", overwrite=False)
    tab.show(tmp_path / "x.html")
    left, top, width, _ = plot(tab)
    tab.click(left + width * 0.6, top + 10)
    assert texts(tab, ".tip b") == [HOSTILE]
    assert HOSTILE in texts(tab, "td.name")
    assert tab.js("document.images.length") == 0
    assert tab.js("document.title") != "owned"
    assert tab.js("document.documentElement.dataset.error") is None
    assert [url for url in tab.requests if not url.startswith("file:")] == []


def test_pointing_at_a_piece_names_its_tensor_file_and_bytes(tab, tmp_path):
    reshard.split(EXAMPLE, tmp_path / "two", world_size=2, html=tmp_path / "x.html")
    tab.show(tmp_path / "x.html")
    left, top, width, _ = plot(tab)
    tab.mouse("Moved", left + width * 0.5, top + 10)
    told = "".join(texts(tab, ".tip"))
    assert "of [" in told
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in told
    assert "rank 0" in told


def test_a_row_that_is_clicked_is_listed(tab, tmp_path):
    reshard.inspect(EXAMPLE, html=tmp_path / "x.html")
    tab.show(tmp_path / "x.html")
    left, top, width, height = plot(tab)
    tab.click(left + width * 0.5, top + (height - 22) * 0.9)
    assert texts(tab, ".row-list h3")[0].startswith("Shards: rank 3")
    assert "model.embed_tokens.weight" in texts(tab, ".row-list td.name")


def test_kinds_have_their_colours_by_day_and_by_night(show):
    side = shards.map_manifest("x", large_manifests.zero3(large_manifests.llama(layers=2), 4))
    for dark in (False, True):
        tab = show(Maps([side]), dark=dark)
        wanted = [tab.js(f"colour('kind-{kind}')") for kind in large_manifests.SLOTS]
        counts = colours(tab)
        assert all(counts.get(name, 0) > 5000 for name in wanted), counts


def test_a_kind_alone_stands_out(show):
    tab = show(
        Maps([shards.map_manifest("x", large_manifests.zero3(large_manifests.llama(layers=2), 4))])
    )
    tab.js(
        "[...document.querySelectorAll('.chip')].find((c) => /^master/.test(c.textContent)).click()"
    )
    counts = colours(tab)
    assert counts.get(tab.js("colour('kind-master')"), 0) > 5000
    assert tab.js("colour('kind-exp_avg')") not in counts


def test_a_thousand_ranks_are_drawn_at_once(show):
    shapes = large_manifests.llama(layers=2)
    sides = [
        shards.map_manifest("Before", large_manifests.zero3(shapes, 1024)),
        shards.map_manifest("After", large_manifests.flat(shapes, 256)),
    ]
    tab = show(Maps(sides))
    milliseconds = tab.js(
        "(() => { const began = performance.now();"
        " document.querySelectorAll('.map-tools button')[1].click();"
        " return performance.now() - began; })()"
    )
    assert milliseconds < 10_000  # 20 on an idle core
    assert "1,024 ranks" in texts(tab, ".map h3")[0]
    tab.js(
        "(() => { const f = document.querySelector('.map-tools input'); f.value = '700';"
        " f.dispatchEvent(new Event('change')); })()"
    )
    assert texts(tab, ".row-list h3")[0].startswith("Before: rank 700")


def many(count):
    states = ["failed" if n % 100 == 7 else "passed" for n in range(count)]
    return PageTable(
        "many",
        [
            Column("Name", "name", [f"layer.{n}.weight" for n in range(count)]),
            Column("State", "state", states),
            Column("Size", "bytes", [n * 7919 % count for n in range(count)]),
        ],
    )


def test_a_table_of_many_rows_makes_only_those_in_sight(show):
    tab = show(many(20_000))
    assert 10 < tab.js("document.querySelectorAll('tbody tr').length") < 80
    tab.js("document.querySelector('.scroller').scrollTop = 1e9")
    tab.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert "layer.19999.weight" in texts(tab, "td.name")


def test_a_table_sorts_and_filters(show):
    tab = show(many(5000))
    tab.js("document.querySelectorAll('th button')[2].click()")
    assert texts(tab, "tbody tr:nth-child(2) td.right") == ["5 KB"]
    tab.js(
        "(() => { const menu = document.querySelector('.tools select'); menu.value = '=failed';"
        " menu.dispatchEvent(new Event('change')); })()"
    )
    assert set(texts(tab, "td.state")) == {"failed"}
    assert texts(tab, ".note") == ["50 of 5,000"]
    tab.js(
        "(() => { const field = document.querySelector('.tools input'); field.value = 'layer.4907';"
        " field.dispatchEvent(new Event('input')); })()"
    )
    assert texts(tab, "td.name") == ["layer.4907.weight"]


def test_curves_and_their_difference_are_drawn(show):
    steps = list(range(1, 40))
    series = [
        {"name": "unbroken", "steps": steps, "loss": [4 / n for n in steps]},
        {"name": "resumed", "steps": steps[20:], "loss": [4 / n + 1e-6 for n in steps[20:]]},
    ]
    tab = show(Curves.of(series))
    assert texts(tab, ".u-title") == ["Loss", "Difference from unbroken"]
    assert tab.js("document.querySelectorAll('.uplot canvas').length") == 2
    assert tab.js("document.documentElement.dataset.error") is None


def test_curves_without_a_baseline_have_no_difference(show):
    """As the history of a run has them: a line for each group of layers."""
    runs = tuple(
        LossRun(f"model.layers.{n}", (2, 4, 6), {"change": (1e-3, None, 2e-5 * n)})
        for n in range(12)
    )
    tab = show(Curves(runs, None, {"change": "Change per update"}))
    assert texts(tab, ".u-title") == ["Change per update"]
    assert len(texts(tab, ".u-series .u-label")) == 13  # and the step
    assert tab.js("document.documentElement.dataset.error") is None
    assert texts(tab, ".apart") == []


def test_the_button_changes_the_colours(show):
    tab = show(many(3), dark=True)
    before = tab.js("getComputedStyle(document.body).backgroundColor")
    tab.js("document.getElementById('theme').click()")
    assert tab.js("getComputedStyle(document.body).backgroundColor") != before
    assert texts(tab, "#theme") == ["Dark"]


@pytest.mark.parametrize("width", [360, 800])
def test_no_page_is_wider_than_its_window(tab, tmp_path, width):
    long = "model." * 40 + "weight"
    save_file({long: torch.ones(2)}, tmp_path / "x.safetensors")
    reshard.inspect(tmp_path / "x.safetensors", html=tmp_path / "x.html")
    tab.show(tmp_path / "x.html", width=width, height=800)
    assert tab.js("document.documentElement.scrollWidth") <= width


CUT = (  # cells whose text does not fit
    "[...document.querySelectorAll('th, td, dt, dd')]"
    ".filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent.slice(0, 80))"
)
OUT_OF_REACH = (  # last columns that scrolling to the right does not show
    "[...document.querySelectorAll('.scroller')].filter((e) => { e.scrollLeft = 1e6;"
    " const last = [...e.querySelectorAll('th')].at(-1).getBoundingClientRect();"
    " return last.right > e.getBoundingClientRect().right + 1; }).length"
)


@pytest.mark.parametrize("command", ["inspect", "merge", "split", "diff", "verify"])
def test_no_column_of_a_report_is_cut(tab, tmp_path, command):
    out, page, picture = (tmp_path / name for name in ("out", "x.html", "x.png"))
    if command in ("inspect", "verify"):
        getattr(reshard, command)(EXAMPLE, html=page)
    else:
        made = {"merge": reshard.merge, "split": partial(reshard.split, world_size=2)}
        report = made.get(command, reshard.merge)(EXAMPLE, out, html=page)
        assert report.done
    if command == "diff":
        reshard.diff(EXAMPLE, out, html=page, overwrite=True)
    tab.show(page)
    assert tab.js(CUT) == []
    assert tab.js(OUT_OF_REACH) == 0
    tab.picture(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    if command in ("merge", "split"):
        facts = texts(tab, "dd")
        assert f"reshard {command} {report.source} {out}" in facts
        assert report.load_line in facts


def test_on_paper_all_is_light_and_tables_are_written_out(show, tmp_path):
    tab = show(
        many(200),
        Maps([shards.map_manifest("x", large_manifests.zero3(large_manifests.llama(2), 4))]),
        dark=True,
    )
    tab.js("window.dispatchEvent(new Event('beforeprint'))")
    assert len(texts(tab, "td.name")) == 200
    assert tab.js("colour('panel')") == "#ffffff"
    tab.js("window.dispatchEvent(new Event('afterprint'))")
    assert tab.js("colour('panel')") != "#ffffff"
