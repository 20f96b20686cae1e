"""Which files are DCP's, told by their names."""

from __future__ import annotations

import re

from reshard.location import Location

METADATA = ".metadata"
HF_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


def is_part(name: str) -> bool:
    """Whether a file's name is one of DCP's."""
    return name == METADATA or name.endswith((".distcp", ".metadata"))


def detect(location: Location) -> bool:
    """Whether DCP's files lie in a directory."""
    return any(is_part(name) for name in location.files)


def is_hf_shard(name: str) -> bool:
    """Whether a file's name is that of a rank's shard for Hugging Face."""
    return HF_SHARD.fullmatch(name) is not None
