"""Start a merger that has no command of its own, or whose package needs more than merging does.

    python benchmarks/peers.py consolidate SHARDS OUTPUT --threads 2
    python benchmarks/peers.py verl ACTOR OUTPUT
    python benchmarks/peers.py plain ITERATION OUTPUT
    RESHARD_MEGATRON=CLONE python benchmarks/peers.py convert RUN OUTPUT

``consolidate`` is PyTorch's ``consolidate_safetensors_files``. ``verl`` is ``python -m
verl.model_merger``. It is started without ``verl/__init__.py``, which imports Ray, and the
checkpoint has no tokenizer, so it does less work than verl's own command.

``plain`` is Megatron-core's ``load_plain_tensors``, and a ``save_file`` of its tensors. ``convert``
is Megatron-LM's ``tools/checkpoint/convert.py`` to one rank, from a clone at core_v0.12.3. Later
releases fail for more than one tensor-parallel rank: 0.13 and 0.14 build the whole layers on each
rank, and since 0.15 the loader passes no ``model_builder`` (issue 2845 of Megatron-LM). The
converter imports Transformer Engine, whose layers it does not use here, and fused kernels, which
are not built.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
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
    root = Path(sys.prefix, "programs", "verl")  # where ./dev installs it
    sys.path.append(str(root))
    for name in VERL:
        package: Any = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["verl.utils"].hf_processor = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    sys.modules["verl.utils"].hf_tokenizer = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    sys.argv = f"- merge --backend fsdp --local_dir {source} --target_dir {output}".split()
    importlib.import_module("verl.model_merger.__main__").main()


def plain(source: Path, output: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import load_plain_tensors
    from safetensors.torch import save_file

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = load_plain_tensors(str(source))
    save_file({k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, output)
    dist.destroy_process_group()


def convert(source: Path, output: Path) -> None:
    root = Path(os.environ["RESHARD_MEGATRON"])
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the tests lie
    from tests.support.megatron.cpu import replace_cuda

    replace_cuda()
    sys.path[:0] = [str(root), str(root / "tools" / "checkpoint")]
    kernels: Any = types.ModuleType("megatron.legacy.fused_kernels")
    kernels.load = lambda _args: None
    sys.modules[kernels.__name__] = kernels
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    installed = importlib.metadata.version
    importlib.metadata.version = (  # asked for before anything else, and not used by local layers
        lambda name: "2.0" if name == "transformer-engine" else installed(name)
    )
    for part in ("loader", "saver"):
        _without_kernels(
            importlib.import_module(f"{part}_core"), f"MegatronCheckpoint{part.title()}LLM"
        )
    told = {
        "model-type": "GPT",
        "loader": "core",
        "saver": "core",
        "load-dir": source,
        "save-dir": output,
        "megatron-path": root,
        "loader-transformer-impl": "local",
        "saver-transformer-impl": "local",
        "target-tensor-parallel-size": 1,
        "target-pipeline-parallel-size": 1,
        "position-embedding-type": "rope",
    }
    sys.argv = ["-", *(f"--{name}={value}" for name, value in told.items())]
    importlib.import_module("convert").main()


def _without_kernels(module: Any, name: str) -> None:
    """Let the loader and the saver write Megatron's command line themselves."""
    kind = getattr(module, name)
    usual = kind.build_sys_argv
    off = ("--no-rope-fusion", "--no-gradient-accumulation-fusion")
    kind.build_sys_argv = lambda self: [*usual(self), *off]


PEERS = {"verl": verl, "plain": plain, "convert": convert}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["consolidate", *PEERS])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.peer == "consolidate":
        consolidate(args.source, args.output, args.threads)
    else:
        PEERS[args.peer](args.source, args.output)


if __name__ == "__main__":
    main()
