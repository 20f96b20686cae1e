"""Write a checkpoint of Megatron-core on CPU (gloo): only weights, as with ``--no-save-optim``.

    torchrun --nproc-per-node 4 benchmarks/make_megatron.py DIR --hidden 1024 --layers 12

``DIR/torch`` has one file per model-parallel rank; ``DIR/torch_dist`` is the output of
``dist_checkpointing.save``. Both have the same Llama with tensor parallelism 2 and pipeline
parallelism 2, after one step. The judges of the tests save it as Megatron-LM does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # where the tests lie

TP, PP = 2, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    from tests.support.megatron.cpu import replace_cuda, replace_gpu_modules

    replace_cuda()
    import torch.distributed as dist

    from tests.judges.megatron_cases import FAMILIES, LLAMA, Case, Grid
    from tests.judges.megatron_files import save
    from tests.judges.megatron_models import lay_grid
    from tests.judges.megatron_run import Run

    replace_gpu_modules()
    FAMILIES["bench"] = LLAMA | {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": args.intermediate,
        "num_attention_heads": args.hidden // 64,
        "num_query_groups": 4,
    }
    dist.init_process_group("gloo")
    grid = Grid(tp=TP, pp=PP, dp=dist.get_world_size() // (TP * PP))
    lay_grid(grid)
    run = Run(Case("bench", "bench", grid, vocabulary=args.vocab))
    run.train(1)
    for form in ("torch", "torch_dist"):
        save(run, args.directory / form, form, no_save_optim=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
