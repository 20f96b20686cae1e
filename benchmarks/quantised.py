"""Measure dequantisation of quantised models with reshard and, for fp8 and MXFP4, torch's reader.

    python benchmarks/quantised.py WORK [MEBIBYTES [ROUNDS]]

Writes random codes and scales below WORK (blocks of 128 x 128 as in DeepSeek V3, experts as in
GPT-OSS, integers of 4 bits as in Kimi K2 Thinking, NVFP4 of Model Optimizer), and runs each program
in a process of its own. Integers and NVFP4 are only merged.

    into memory    `torch.distributed.checkpoint.load` with torch's
                   `QuantizedHuggingFaceStorageReader`, and with `reshard.dcp.StorageReader`
    disk to disk   `reshard merge --dtype bf16`
    plain          a merge of that output, unchanged
    quantise       a merge of it with `--quantise-like` the model
    changed        the same with a model that has other values

For MXFP4, torch's reader does not transpose matrices as transformers does. Seconds are those of the
load or merge alone, as wall time and as CPU time: the minima of all rounds, in which the programs
take turns. The ratio is that of the CPU time to the plain merge. Peak memory is that of the whole
process, including imports and loaded tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROWS, COLUMNS = 7168, 2048  # a matrix of an expert of DeepSeek V3
EXPERT = (5760, 90)  # rows and groups of GPT-OSS's gate_up_proj
MERGED = ("merge", "plain")
PROGRAMS = ("torch", "reshard", *MERGED, "quantise", "changed")
METHODS = {"fp8": PROGRAMS, "mxfp4": PROGRAMS, "int4": MERGED, "nvfp4": MERGED}


def make(place: Path, method: str, nbytes: int) -> None:
    """Write a model of about `nbytes` codes in two files."""
    import torch
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(0)
    place.mkdir(parents=True)
    tensors = {}
    if method == "fp8":
        for number in range(max(nbytes // (ROWS * COLUMNS), 1)):
            codes = torch.randint(0, 127, (ROWS, COLUMNS), dtype=torch.uint8, generator=made)
            tensors[f"w{number}.weight"] = codes.view(torch.float8_e4m3fn)
            grid = torch.rand(ROWS // 128, COLUMNS // 128, generator=made)
            tensors[f"w{number}.weight_scale_inv"] = grid * 1e-3
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    elif method in ("int4", "nvfp4"):
        for number in range(max(nbytes // (ROWS * COLUMNS // 2), 1)):
            fqn = f"w{number}.weight"
            codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8, generator=made)
            if method == "int4":
                tensors[f"{fqn}_packed"] = codes.view(torch.int32)
                tensors[f"{fqn}_scale"] = torch.rand(ROWS, COLUMNS // 32, generator=made).bfloat16()
                tensors[f"{fqn}_shape"] = torch.tensor([ROWS, COLUMNS])
            else:
                scales = torch.rand(ROWS, COLUMNS // 16, generator=made)
                tensors[fqn] = codes
                tensors[f"{fqn}_scale"] = scales.to(torch.float8_e4m3fn)
                tensors[f"{fqn}_scale_2"] = torch.tensor(0.01)
        settings = {"quant_method": "modelopt"}
        if method == "int4":
            groups = {"group_0": {"weights": {"group_size": 32, "symmetric": True}}}
            settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    else:
        rows, groups = EXPERT
        experts = 4
        for number in range(max(nbytes // (experts * rows * groups * 16), 1)):
            shape = (experts, rows, groups, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
            scales = torch.randint(100, 130, shape[:3], dtype=torch.uint8, generator=made)
            tensors |= {f"w{number}_blocks": blocks, f"w{number}_scales": scales}
        settings = {"quant_method": "mxfp4"}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    half = len(tensors) // 2
    where = {name: names[number >= half] for number, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, place / file)
    index = {"metadata": {}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"architectures": ["Net"], "dtype": "bfloat16", "quantization_config": settings}
    (place / "config.json").write_text(json.dumps(config))


def load(place: Path, *, ours: bool) -> None:
    """Load all values as bf16 into tensors in memory."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader,
    )

    import reshard.dcp

    index = json.loads((place / "model.safetensors.index.json").read_text())["weight_map"]
    state = {}
    for name in index:
        if name.endswith(".weight"):
            state[name] = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
        elif name.endswith("_blocks"):
            rows, groups = EXPERT
            shape = (4, groups * 32, rows) if ours else (4, rows, groups * 32)
            key = name.removesuffix("_blocks") if ours else name
            state[key] = torch.zeros(shape, dtype=torch.bfloat16)
    began = time.perf_counter(), time.process_time()
    reader = (
        reshard.dcp.StorageReader(place)
        if ours
        else QuantizedHuggingFaceStorageReader(str(place), target_dtype=torch.bfloat16)
    )
    dcp.load(state, storage_reader=reader, no_dist=True)
    seconds = elapsed(began)
    memory, digests = peak(), {}
    for name, tensor in state.items():
        straight = tensor.transpose(1, 2) if ours and tensor.ndim == 3 else tensor
        bits = straight.contiguous().view(torch.int16).to(torch.int64)
        digests[name.removesuffix("_blocks")] = [int(bits.sum()), int((bits * bits).sum())]
    held = sum(tensor.nbytes for tensor in state.values())
    say(seconds, memory, held, digests)


def merge(place: Path, program: str) -> None:
    """Merge a model, or its values as bf16, to another directory."""
    import reshard.commands.merge.command  # the imports are not measured

    values, out = (place.parent / f"{place.name}-{end}" for end in ("values", program))
    shutil.rmtree(out, ignore_errors=True)
    source, options = values, {}
    if program == "merge":
        shutil.rmtree(values, ignore_errors=True)
        source, options, out = place, {"dtype": "bf16"}, values
    elif program == "quantise":
        options = {"quantise_like": place}
    elif program == "changed":
        options = {"quantise_like": place.parent / f"{place.name}-other"}
    began = time.perf_counter(), time.process_time()
    report = reshard.merge(source, out, **options)
    say(elapsed(began), peak(), report.bytes_written, {})
    if program != "merge":
        shutil.rmtree(out)


def change(place: Path) -> None:
    """Write a copy of a model with other codes."""
    import torch
    from safetensors.torch import load_file, save_file

    other = place.parent / f"{place.name}-other"
    shutil.copytree(place, other)
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "scale" not in name:
                tensors[name].view(torch.uint8).bitwise_xor_(0x11)
        save_file(tensors, file)


def elapsed(began: tuple[float, float]) -> tuple[float, float]:
    """Return the wall time and the CPU time since then, in seconds."""
    return time.perf_counter() - began[0], time.process_time() - began[1]


def peak() -> int:
    """Return the peak memory of this program so far, in bytes.

    The figure of `getrusage` would begin with the memory of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def say(
    seconds: tuple[float, float], memory: int, nbytes: int, digests: dict[str, list[int]]
) -> None:
    """Print the result for the parent process."""
    print(json.dumps([seconds, memory, nbytes, digests]))


def run(program: str, place: Path) -> Any:
    """Run a program in a process of its own, and return what it printed."""
    command = [sys.executable, __file__, "--run", program, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main(work: Path, mebibytes: int, rounds: int) -> None:
    for method, programs in METHODS.items():
        place = work / method
        if not place.is_dir():
            make(place, method, mebibytes << 20)
            if programs != MERGED:
                change(place)
        found = [{program: run(program, place) for program in programs} for _ in range(rounds)]
        least = {
            program: [min(one[program][0][number] for one in found) for number in range(2)]
            for program in programs
        }
        for program, (wall, cpu) in least.items():
            _, memory, nbytes, _ = found[-1][program]
            print(
                f"{method:6} {program:8} {nbytes / 2**20:7.0f} MiB  {wall:7.2f} s, CPU "
                f"{cpu:7.2f} s  ratio {cpu / least['plain'][1]:5.2f}  "
                f"peak memory {memory / 2**20:6.0f} MiB",
                flush=True,
            )
        if programs == MERGED:
            continue
        same = found[-1]["torch"][3] == found[-1]["reshard"][3]
        print(f"{method:6} values are {'equal' if same else 'DIFFERENT'}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        program, place = sys.argv[2], Path(sys.argv[3])
        if program in ("torch", "reshard"):
            load(place, ours=program == "reshard")
        else:
            merge(place, program)
    else:
        sizes = [int(argument) for argument in sys.argv[2:]]
        main(Path(sys.argv[1]), *(sizes + [512, 1][len(sizes) :]))
