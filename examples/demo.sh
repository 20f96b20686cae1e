#!/usr/bin/env bash
# The main job on built-in data: a checkpoint that real DeepSpeed saved from 4 ranks under ZeRO-3
# becomes a bf16 Hugging Face directory, and transformers loads it; then our trainer's own run of 4
# ranks goes on at 2 and under FSDP 2.
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
