"""The cluster and the training settings that a forecast is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from reshard import units
from reshard.errors import UsageError

Precision = Literal["bf16", "fp16", "fp32"]
Optimizer = Literal["adamw", "adamw8bit", "adagrad", "lion", "momentum", "sgd"]
STATE_BYTES: dict[str, int] = {
    "adamw": 8,
    "adamw8bit": 2,
    "adagrad": 4,
    "lion": 4,
    "momentum": 4,
    "sgd": 0,
}
"""Bytes of optimizer state per trained parameter, without the master weight."""

_GPUS = re.compile(r"(?:(\d+)\s*[x*])?\s*(\d+(?:\.\d+)?\s*[KMGT]I?B?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs.

    Args:
        host_bytes: memory of a node; None if it is not known.
    """

    gpus: int
    gpu_bytes: int
    nodes: int = 1
    host_bytes: int | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.gpus * self.nodes


def parse_gpus(text: str) -> tuple[int, int]:
    """Return the GPUs of a node and the bytes of one, from ``8x80GB`` or ``24GB``.

    >>> parse_gpus("8x80GB"), parse_gpus("24GiB")
    ((8, 80000000000), (1, 25769803776))

    Raises:
        UsageError: the text has another form.
    """
    match = _GPUS.fullmatch(text.strip())
    if match is None or (match[1] is not None and not int(match[1])):
        raise UsageError(f"--gpus {text}", "is not a number of GPUs and their memory", _GPUS_REMEDY)
    return int(match[1] or 1), units.parse_bytes(match[2], "--gpus")


_GPUS_REMEDY = "write e.g. 8x80GB or 24GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a step computes.

    Args:
        global_batch: samples of a step; 0: one micro batch on each data-parallel rank.
        micro_batch: samples of a forward pass on one rank.
        gradient_bytes: bytes of a gradient that DeepSpeed accumulates; None: as the parameters.
        lora_rank: rank of LoRA adapters on the matrices of all blocks; 0: no adapters.
        lora_targets: suffixes of the modules with adapters; empty: all matrices of the blocks
            except routers and routed experts.
        freeze: regular expression of full names that are not trained; empty: none.
    """

    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    seq_len: int = 4096
    micro_batch: int = 1
    global_batch: int = 0
    tp: int = 1
    pp: int = 1
    ep: int = 1
    gradient_bytes: int | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    freeze: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of a value in the forward pass."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass on one rank."""
        return self.seq_len * self.micro_batch


def count_data_ranks(cluster: Cluster, training: Training) -> int:
    """Return the number of data-parallel ranks.

    Raises:
        UsageError: the ranks are not a multiple of the other axes.
    """
    cut = training.tp * training.pp
    if cluster.world % cut:
        raise UsageError(
            f"{cluster.world} GPUs",
            f"are not a multiple of tp {training.tp} x pp {training.pp}",
            "choose --tp and --pp whose product divides the number of GPUs",
        )
    data = cluster.world // cut
    if data % training.ep:
        raise UsageError(
            f"--ep {training.ep}",
            f"does not divide the {data} data-parallel ranks",
            f"use --ep {units.either(units.find_nearest_divisors(data, training.ep))}",
        )
    return data


def count_accumulation(cluster: Cluster, training: Training) -> int:
    """Return the micro batches of a step on one rank.

    Raises:
        UsageError: the global batch is not a multiple of the micro batches of all ranks.
    """
    data = count_data_ranks(cluster, training)
    if not training.global_batch:
        return 1
    times, rest = divmod(training.global_batch, data * training.micro_batch)
    if rest or not times:
        unit = data * training.micro_batch
        near = [n for n in (training.global_batch // unit * unit, (times + 1) * unit) if n]
        raise UsageError(
            f"--global-batch {training.global_batch}",
            f"is not a multiple of {data} data-parallel ranks x micro batch {training.micro_batch}",
            f"use --global-batch {units.either(near)}",
        )
    return times
