"""Modules that import a library which may be absent: pytest would look for doctests in them."""

from __future__ import annotations

OPTIONAL = "fairscale lightning peft torchtitan verl"
collect_ignore = [f"library_{library}.py" for library in OPTIONAL.split()]
