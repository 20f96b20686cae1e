"""Start a merger that has no command of its own, or one whose package needs more than merging does.

    python benchmarks/peers.py consolidate SHARDS OUTPUT --threads 2
    RESHARD_VERL=PACKAGES python benchmarks/peers.py verl ACTOR OUTPUT

``consolidate`` is PyTorch's ``consolidate_safetensors_files``. ``verl`` is ``python -m
verl.model_merger``: entered without ``verl/__init__.py``, which imports Ray, and with a checkpoint
that has no tokenizer, so it is spared some of what it does at its user's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import struct
import sys
import types
from pathlib import Path
from typing import Any

VERL = ("verl", "verl.utils")


def consolidate(source: Path, output: Path, threads: int) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    output.mkdir()
    fqns: set[str] = set()
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        fqns |= header.keys() - {"__metadata__"}
    mapping = dict.fromkeys(sorted(fqns), 1)
    consolidate_safetensors_files(str(source), str(output), mapping, num_threads=threads)


def verl(source: Path, output: Path) -> None:
    root = Path(os.environ["RESHARD_VERL"])
    sys.path.append(str(root))
    for name in VERL:
        package: Any = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["verl.utils"].hf_processor = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    sys.modules["verl.utils"].hf_tokenizer = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    sys.argv = f"- merge --backend fsdp --local_dir {source} --target_dir {output}".split()
    importlib.import_module("verl.model_merger.__main__").main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["consolidate", "verl"])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.peer == "consolidate":
        consolidate(args.source, args.output, args.threads)
    else:
        verl(args.source, args.output)


if __name__ == "__main__":
    main()
