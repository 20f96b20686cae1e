"""Compare `merge --merge-lora` with PEFT, and with a plain merge of the same base model.

python benchmarks/lora.py --layers 12 --rank 16 --rounds 2 --place /dev/shm/bench-lora
"""

from __future__ import annotations

import argparse
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

from contest import HERE, PYTHON, Contender, compete, report


def make(base: Path, adapter: Path, hidden: int, layers: int, rank: int) -> None:
    """Write a Llama of random values in bf16, and an adapter of all its linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.01)
    adapted.save_pretrained(adapter)


def merge_with_peft(base: Path, adapter: Path, out: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


def list_contenders(base: Path, adapter: Path) -> list[Contender]:
    command = [PYTHON, "-m", "reshard", "merge"]
    added = [str(adapter), "--merge-lora", str(base)]
    peft = [PYTHON, str(HERE / "lora.py"), "--peft", str(base), str(adapter)]
    return [
        Contender("reshard --merge-lora", lambda out: [*command, added[0], str(out), *added[1:]]),
        Contender(
            "reshard, 1 worker",
            lambda out: [*command, added[0], str(out), *added[1:], "--workers", "1"],
        ),
        Contender(
            "reshard --merge-lora, fp32",
            lambda out: [*command, added[0], str(out), *added[1:], "--dtype", "fp32"],
        ),
        Contender("reshard, the base alone", lambda out: [*command, str(base), str(out)]),
        Contender(
            "reshard, the base as fp32",
            lambda out: [*command, str(base), str(out), "--dtype", "fp32"],
        ),
        Contender("PEFT merge_and_unload", lambda out: [*peft, str(out)]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm/bench-lora"))
    options = parser.parse_args()
    options.place.mkdir(parents=True)
    try:
        base, adapter = options.place / "base", options.place / "adapter"
        # A process of its own: the peak memory of a child counts what its parent has at its start.
        made = get_context("spawn").Process(
            target=make, args=(base, adapter, options.hidden, options.layers, options.rank)
        )
        made.start()
        made.join()
        contenders = list_contenders(base, adapter)
        compete(contenders, options.place / "out" / "model", options.rounds)
        size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
        report(f"LoRA of rank {options.rank} into {size / 1e9:.2f} GB of bf16", contenders)
    finally:
        shutil.rmtree(options.place)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peft"]:
        merge_with_peft(*map(Path, sys.argv[2:5]))
    else:
        main()
