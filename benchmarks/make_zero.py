"""Write a ZeRO checkpoint of a given size with real DeepSpeed on CPU (gloo).

    torchrun --nproc-per-node 8 benchmarks/make_zero.py DIR --stage 2 --hidden 1536 --layers 12

Without ``--train`` no step is taken, and the checkpoint has master weights but no moments.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch._dynamo

import deepspeed  # isort: skip
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument(
        "--train", action="store_true", help="take one step, so that the optimizer has moments"
    )
    args = parser.parse_args()
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        vocab_size=args.vocab,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and spins
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    if args.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    if args.train:
        tokens = torch.randint(0, args.vocab, (1, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(str(args.directory))
    if engine.global_rank == 0:
        config.save_pretrained(args.directory)


if __name__ == "__main__":
    main()
