"""The description of a model for a target whose files are named and cut by a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.rules import Table


@dataclass(frozen=True, slots=True)
class Described:
    """The model of a training state, as far as its files or the user describe it.

    Args:
        args: arguments of the run, under the target's names.
    """

    table: Table
    architecture: Architecture
    args: Mapping[str, Any]
