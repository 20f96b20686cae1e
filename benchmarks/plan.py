"""Print the forecasts of `reshard plan` beside those of other tools and real allocations.

    python benchmarks/plan.py [WORK]     # WORK: directory that keeps the measured runs

The second table takes some minutes: DeepSpeed, FSDP and DDP train a small Llama on CPU ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reshard.sizing.families import count_config
from reshard.sizing.rank_share import take_share
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.sources import count_parameters
from reshard.sizing.strategies import STRATEGIES, forecast, forecast_one

GB = 10**9


def print_estimates() -> None:
    """Compare 7 billion parameters with the estimators of DeepSpeed and Accelerate."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model, numel = count_parameters("7B"), 7 * 10**9
    adam = estimate_training_usage(4 * numel, "float32")["step"]
    print("| GPUs | ddp | zero1 | zero2 | zero3, fsdp | DeepSpeed's zero2 | zero3 | Accelerate |")
    for gpus, nodes in ((1, 1), (8, 1), (8, 8)):
        rows = {
            row.strategy.name: row for row in forecast(model, Cluster(gpus, GB, nodes), Training())
        }
        _, two = estimate_zero2_model_states_mem_needs(numel, gpus, nodes, cpu_offload=False)
        _, three, layer = estimate_zero3_model_states_mem_needs(
            numel, 0, gpus, nodes, cpu_offload=False
        )
        states = [rows[name].states for name in ("ddp", "zero1", "zero2", "zero3")]
        cells = [f"{size / GB:.3g}" for size in (*states, two, three - layer, adam)]
        print(f"| {gpus * nodes} | {' | '.join(cells)} |")


def print_measured(work: Path) -> None:
    """Compare a small Llama with the tensors that the frameworks keep on a rank."""
    from tests.judges.memory_cases import CASES, CONFIG, JUDGE, SEQ_LEN

    missing = [name for name in CASES if not (work / name).is_dir()]
    if missing:
        JUDGE.make(work, missing)
    model = count_config(CONFIG, "config")
    print("| case | forecast, bytes | measured, bytes | measured / forecast |")
    for name, case in CASES.items():
        nodes = 2 if case.strategy == "hsdp" else 1
        cluster = Cluster(case.world // nodes, GB, nodes)
        training = Training(
            precision=case.precision,  # type: ignore[arg-type]
            seq_len=SEQ_LEN,
            freeze=case.frozen,
        )
        strategy = next(each for each in STRATEGIES if each.name == case.strategy)
        row = forecast_one(strategy, model, take_share(model, training), cluster, training)
        expected = row.states + row.host // cluster.gpus
        found = max(json.loads((work / name / "found.json").read_text()))
        print(f"| {name} | {expected:,} | {found:,} | {found / expected:.3f} |")


if __name__ == "__main__":
    print_estimates()
    place = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=True)
    print_measured(place)
