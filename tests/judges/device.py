"""The device on which judges train: the CPU, or with ``JUDGE_DEVICE=cuda`` the first GPU.

All ranks share that GPU. Several ranks communicate over gloo, because nccl refuses two ranks on one
GPU; one rank has nccl. FSDP 2 of torch 2.11 crashes over gloo on a GPU, so its cases have one rank.
"""

from __future__ import annotations

import os

IS_GPU = os.environ.get("JUDGE_DEVICE") == "cuda"
DEVICE_TYPE = "cuda" if IS_GPU else "cpu"
DEVICE = "cuda:0" if IS_GPU else "cpu"
