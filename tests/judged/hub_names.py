"""Prove for every model type of transformers that ``reshard merge`` writes what transformers does.

``python -m tests.judged.hub_names OUT`` builds a tiny random model of each type, trains it for two
steps under FSDP 2 and DeepSpeed ZeRO stage 3 with two ranks, merges both checkpoints, compares the
result with ``save_pretrained``, loads it with transformers, and converts the published form back
into a live model. OUT keeps a result for each type, so that an interrupted run continues; `--page`
writes the table of all results. All types take about an hour on two cores.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.judges.hub_models import Case

LIMIT_SECONDS = 240
LIMIT_BYTES = 12 << 30  # address space of one process; most of it is libraries
POLL_SECONDS = 0.05
LATE_IMPORTS = (  # modules that frameworks import when they first train or save
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
)


@dataclass(frozen=True)
class How:
    """Where and how every case is proved."""

    out: Path
    frameworks: tuple[str, ...]
    keep: bool


@dataclass
class Running:
    """A process that proves one case."""

    case: Case
    begun: float


def main() -> None:
    """Run the cases that the command line names, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.judged.hub_names",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="directory of results, logs and scratch files")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types or classes to run")
    parser.add_argument("--mapping", action="store_true", help="run what transformers converts")
    parser.add_argument("--again", action="store_true", help="also run cases that have a result")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints for a later run")
    parser.add_argument(
        "--frameworks", nargs="+", default=["fsdp2", "zero3"], choices=["fsdp2", "zero3"]
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time [default: 2]")
    parser.add_argument("--page", action="store_true", help="write docs/hub-names.csv and .md")
    asked = parser.parse_args()
    cases = import_and_list()
    chosen = [name for name in cases if not asked.only or name in asked.only]
    if asked.mapping:
        chosen = [name for name in chosen if cases[name].in_mapping]
    todo = [n for n in chosen if asked.again or not _result_path(asked.out, n).exists()]
    _say(f"{len(chosen)} cases, {len(todo)} to run")
    how = How(asked.out, tuple(asked.frameworks), asked.keep)
    run_all([cases[name] for name in todo], how, asked.jobs)
    if asked.page:
        from tests import hub_page
        from tests.judges.hub_page import list_rows

        found = {n: read_result(asked.out, n) for n in cases if _result_path(asked.out, n).exists()}
        hub_page.write(list_rows(cases, found))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def import_and_list() -> dict[str, Case]:
    """Import the frameworks, once for all forks, and return the cases."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import reshard
    from tests.judges import hub_models, hub_page, hub_proof
    from tests.judges.deepspeed_train import leave_out_shared_memory

    del hub_page, hub_proof
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(reshard.__path__, "reshard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    leave_out_shared_memory()
    cases = hub_models.list_cases()
    gc.freeze()
    return cases


def run_all(cases: Sequence[Case], how: How, jobs: int) -> None:
    """Prove each case in a process of its own, `jobs` at a time, and print the results."""
    for folder in ("results", "logs", "work"):
        (how.out / folder).mkdir(parents=True, exist_ok=True)
    waiting, running = list(cases), dict[int, Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop(0)
            running[_start(case, how)] = Running(case, time.monotonic())
        time.sleep(POLL_SECONDS)
        for pid, one in list(running.items()):
            if _has_ended(pid, one, how.out):
                del running[pid]
                _print_result(read_result(how.out, one.case.name))


def _has_ended(pid: int, one: Running, out: Path) -> bool:
    """Return whether a process has ended; end it if it takes too long."""
    late = time.monotonic() - one.begun > LIMIT_SECONDS
    if late:
        os.killpg(pid, signal.SIGKILL)
    done, status = os.waitpid(pid, 0 if late else os.WNOHANG)
    if not done:
        return False
    if late or status:
        why = f"took more than {LIMIT_SECONDS} s" if late else "the process was killed"
        _write_result(out, {"case": one.case.name, "steps": {"build": why}, "seconds": {}})
    return True


def _start(case: Case, how: How) -> int:
    """Fork a process that proves a case; return its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # its ranks end with it
        path = how.out / "logs" / f"{case.name}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        _prove(case, how)
        code = 0
    except BaseException:  # noqa: BLE001 - the exit code carries the failure
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prove(case: Case, how: How) -> None:
    from tests.judges import hub_proof

    place = how.out / "work" / case.name
    place.mkdir(exist_ok=True)
    found = hub_proof.prove(case, place, how.frameworks)
    if not how.keep:
        shutil.rmtree(place)
    _write_result(how.out, asdict(found))


def _result_path(out: Path, name: str) -> Path:
    return out / "results" / f"{name}.json"


def read_result(out: Path, name: str) -> dict[str, object]:
    """Return what was found for a case."""
    found: dict[str, object] = json.loads(_result_path(out, name).read_text())
    return found


def _write_result(out: Path, found: Mapping[str, object]) -> None:
    path = _result_path(out, str(found["case"]))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1))
    partial.replace(path)


def _print_result(found: Mapping[str, object]) -> None:
    from tests.judges import hub_page

    _say(f"{found['case']}: {hub_page.summarize(found)}")


if __name__ == "__main__":
    main()
