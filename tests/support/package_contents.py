"""Compare the contents of the wheels and source distributions with the expected files.

python tests/support/package_contents.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {  # distribution -> its folder, and the packages in it
    "reshard": (ROOT, ("reshard", "trainer")),
    "reshard_nanotron": (ROOT / "plugins" / "nanotron", ("reshard_nanotron",)),
}
DATA = (".py", ".pyi", ".typed", ".yaml", ".c", ".h")
SOURCE_FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")


def list_sources(project: Path, packages: Iterable[str]) -> set[str]:
    """Return the Python files and data of the packages."""
    files = (path for name in packages for path in (project / name).rglob("*") if path.is_file())
    return {
        path.relative_to(project).as_posix()
        for path in files
        if "__pycache__" not in path.parts and (path.suffix in DATA or "assets" in path.parts)
    }


def find_problems(place: Path, distribution: str) -> list[str]:
    """Return what is missing in the files of a distribution, or does not belong there."""
    project, packages = PACKAGES[distribution]
    (wheel,) = place.glob(f"{distribution}-*.whl")
    (source,) = place.glob(f"{distribution}-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expected = list_sources(project, packages)
    beside = {name for name in SOURCE_FILES if (project / name).exists()}
    strangers = {
        name
        for name in installed
        if name.partition("/")[0] not in packages or not name.endswith((*DATA, ".so"))
    }
    compiled = {name for name in expected if name.endswith((".c", ".h"))}
    return [
        *(f"{wheel.name} lacks {name}" for name in sorted(expected - compiled - installed)),
        *(
            f"{wheel.name} has {name}, which does not belong there"
            for name in sorted(strangers - expected)
        ),
        *(f"{source.name} lacks {name}" for name in sorted((expected | beside) - packed)),
    ]


if __name__ == "__main__":
    problems = [text for name in PACKAGES for text in find_problems(Path(sys.argv[1]), name)]
    sys.exit("\n".join(problems) or 0)
