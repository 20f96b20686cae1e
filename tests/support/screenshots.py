"""Take screenshots of pages: ``python -m tests.support.screenshots OUT PAGE.html ...``.

Of each page, by day, by night and on a phone; and of maps of 2, 64 and 1,024 ranks, and of curves.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from reshard.html import document, shards
from reshard.html.curves import Curves
from reshard.html.page import Maps, Page, Section
from tests.support import browser, large_manifests


def main() -> None:
    """Take the pictures."""
    if browser.find() is None:
        sys.exit(f"no browser: install one of {', '.join(browser.NAMES)}")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    paths = [Path(name) for name in sys.argv[2:]]
    shapes = large_manifests.llama(layers=16)
    for ranks in (2, 64, 1024):
        sides = [
            shards.map_manifest("Before", large_manifests.zero3(shapes, ranks)),
            shards.map_manifest("After", large_manifests.flat(shapes, max(ranks // 4, 3))),
        ]
        paths.append(made(out / f"{ranks}-ranks.html", Maps(sides)))
    paths.append(made(out / "curves.html", curves()))
    with browser.tab() as tab:
        for path in paths:
            for name, options in LOOKS.items():
                tab.show(path, **options)
                tab.picture(out / f"{path.stem}-{name}.png")


LOOKS = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 390, "height": 844, "scale": 2, "phone": True},
}


def made(path: Path, section: Section) -> Path:
    """Write a page of one section."""
    page = Page("screenshots", path.stem, "made of numbers", "plain", sections=(section,))
    document.write(page, path, overwrite=True)
    return path


def curves() -> Curves:
    """Return the curves of a run, the same run resumed, and one that diverges."""
    chance = random.Random(4)
    steps = list(range(1, 121))
    whole = [4.2 * 0.985**step + 0.4 + chance.gauss(0, 0.04) for step in steps]
    noise = [chance.gauss(0, 2e-7) * max(step - 50, 0) for step in steps]
    astray = [loss + wrong for loss, wrong in zip(whole, noise, strict=True)]
    return Curves.of(
        [
            {"name": "unbroken, 4 ranks", "steps": steps, "loss": whole},
            {"name": "resumed at 2 ranks", "steps": steps[40:], "loss": whole[40:]},
            {"name": "resumed as FSDP 2", "steps": steps[40:], "loss": astray[40:]},
        ]
    )


if __name__ == "__main__":
    main()
