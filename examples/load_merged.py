"""Load a merged directory with transformers and compare its logits with the training run's.

python load_merged.py MODEL_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def main() -> None:
    """Compare the logits; exit with 1 if they differ from those of the training run."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    run = json.loads((Path(__file__).parent / "llama-zero3-4ranks" / "logits.json").read_text())
    with torch.no_grad():
        logits = model.eval()(torch.tensor(run["input_ids"])).logits[0, -1].float()
    same = logits.tolist() == run["last_logits"]
    print(f"transformers loaded {sys.argv[1]} in {model.dtype};")
    print(f"its logits are {'bitwise those' if same else 'NOT those'} of the training run")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
