"""Define the benchmarks of ``inspect``, ``verify``, ``diff``, and programs that read the same."""

from __future__ import annotations

from pathlib import Path

from contest import PYTHON, Contender

RESHARD = [PYTHON, "-m", "reshard"]


def reading(run: Path, same: Path) -> list[Contender]:
    """Read a checkpoint, and compare it with the same training state in another layout."""
    files = [str(path) for path in sorted(run.rglob("*")) if path.is_file()]
    tensors = [name for name in files if name.endswith(".pt")]
    load = f"import torch\nfor name in {tensors!r}: torch.load(name, weights_only=False)"
    return [
        Contender("reshard verify --deep", lambda _: [*RESHARD, "verify", str(run), "--deep"]),
        Contender("reshard verify", lambda _: [*RESHARD, "verify", str(run)]),
        Contender("reshard inspect", lambda _: [*RESHARD, "inspect", str(run)]),
        Contender("reshard diff", lambda _: [*RESHARD, "diff", str(run), str(same)]),
        Contender(
            "cat > /dev/null", lambda _: ["sh", "-c", 'cat "$@" | cat > /dev/null', "-", *files]
        ),
        Contender("sha256sum", lambda _: ["sha256sum", *files]),
        Contender("torch.load of every file", lambda _: [PYTHON, "-c", load]),
    ]


def start_up() -> list[Contender]:
    return [
        Contender("reshard --version", lambda _: [*RESHARD, "--version"]),
        Contender("python -c pass", lambda _: [PYTHON, "-c", "pass"]),
        Contender("python -c 'import torch'", lambda _: [PYTHON, "-c", "import torch"]),
    ]
