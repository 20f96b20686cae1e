"""Compare the contents of a wheel and a source distribution with the expected files.

python tests/support/package_contents.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("reshard", "trainer")
DATA = (".py", ".pyi", ".typed", ".yaml", ".c", ".h")
SOURCE_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


def list_sources() -> set[str]:
    """Return the Python files and data of the packages."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "__pycache__" not in path.parts and (path.suffix in DATA or "assets" in path.parts)
    }


def find_problems(place: Path) -> list[str]:
    """Return what is missing in the distributions, or does not belong there."""
    (wheel,) = place.glob("*.whl")
    (source,) = place.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expected = list_sources()
    strangers = {
        name
        for name in installed
        if name.partition("/")[0] not in PACKAGES or not name.endswith((*DATA, ".so"))
    }
    compiled = {name for name in expected if name.endswith((".c", ".h"))}
    return [
        *(f"{wheel.name} lacks {name}" for name in sorted(expected - compiled - installed)),
        *(
            f"{wheel.name} has {name}, which does not belong there"
            for name in sorted(strangers - expected)
        ),
        *(f"{source.name} lacks {name}" for name in sorted((expected | {*SOURCE_FILES}) - packed)),
    ]


if __name__ == "__main__":
    problems = find_problems(Path(sys.argv[1]))
    sys.exit("\n".join(problems) or 0)
