#!/usr/bin/env bash
# Show reshard on built-in data. Merge a checkpoint that real DeepSpeed saved from 4 ranks under ZeRO 3
# to a bf16 Hugging Face directory, and load it with transformers. Then train with the trainer on 4
# ranks, and check that training continues on 2 ranks and under FSDP 2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
bin=../.venv/bin
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

show() {
    printf '\n$ %s\n' "$*"
    "$@"
}

export PATH="$PWD/$bin:$PATH"
show reshard inspect llama-zero3-4ranks
show reshard merge llama-zero3-4ranks "$out/model.safetensors" --dtype fp32
show reshard merge llama-zero3-4ranks "$out/model" --dtype bf16
show python load_merged.py "$out/model"
show reshard demo
printf '\nFrom here: docs/start/ has a page for each first task, README.md the overview.\n'
