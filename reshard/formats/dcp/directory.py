"""Recognize DCP's files by their names."""

from __future__ import annotations

import re

from reshard.core.location import Location

METADATA = ".metadata"
ADAPTER = "adapter_model.safetensors"
HF_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


def is_part(name: str) -> bool:
    """Return whether a file's name is one of DCP's."""
    return name.endswith(".distcp") or is_metadata(name)


def is_metadata(name: str) -> bool:
    """Return whether a file's name is that of the metadata of all ranks, or of one."""
    return name.endswith(METADATA)


def detect(location: Location) -> bool:
    """Return whether a directory has files of DCP."""
    return any(is_part(name) for name in location.files)


def is_hf_shard(name: str) -> bool:
    """Return whether a file's name is that of a rank's shard for Hugging Face."""
    return HF_SHARD.fullmatch(name) is not None
