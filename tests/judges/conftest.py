"""Modules that import an optional library, which pytest must not search for doctests."""

from __future__ import annotations

OPTIONAL = "fairscale lightning peft torchtitan verl"
MEGATRON = "files models run state"
collect_ignore = [f"library_{library}.py" for library in OPTIONAL.split()]
collect_ignore += [f"megatron_{part}.py" for part in MEGATRON.split()]
collect_ignore += ["lightning_worker.py", "torchtitan_worker.py"]
