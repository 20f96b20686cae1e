"""Rotary positions scaled by YaRN, as transformers and as megatron-core state them.

Both compute the same (transformers 5.23 ``modeling_rope_utils.py``, ``_compute_yarn_parameters``;
Megatron-LM core_v0.16.1 ``core/models/common/embeddings/yarn_rotary_pos_embedding.py``), from
settings under other names: those that ``GPTModel`` reads in its config begin with ``yarn_``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

KIND = "yarn"
_FACTOR, _ORIGINAL = "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"
_READ = frozenset(
    """
    rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow
    mscale mscale_all_dim truncate
    """.split()
)


def make_args(scaling: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
    """Return megatron-core's settings for a ``rope_scaling`` without obstacles."""
    factor, original = _get_sizes(scaling, max_positions)
    mscale, all_dim = _get_mscales(scaling, factor)
    return {
        _FACTOR: factor,
        _ORIGINAL: original,
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1),
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": scaling.get("truncate", True) is not False,
    }


def normalize(scaling: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
    """Return a sound ``rope_scaling`` with its defaults, and one factor in place of mscales."""
    args = make_args(scaling, max_positions)
    mscale, all_dim = args.pop("yarn_mscale"), args.pop("yarn_mscale_all_dim")
    factor = _get_attention_factor(args[_FACTOR], mscale, all_dim)
    return args | {"attention_factor": round(factor, 9)}


def list_obstacles(
    scaling: Mapping[str, Any], max_positions: int | None, rotary_percent: float
) -> list[str]:
    """Describe the settings of a ``rope_scaling`` that megatron-core's class cannot have."""
    obstacles = [
        f"YaRN's {key} {value!r}"
        for key, value in scaling.items()
        if value is not None and (key not in _READ or not _is_sound(key, value))
    ]
    if obstacles:
        return obstacles
    factor, original = _get_sizes(scaling, max_positions)
    if not factor or factor < 1 or not original:
        obstacles.append(f"YaRN with factor {factor} over {original} positions")
    elif factor == 1 and scaling.get("attention_factor") not in (None, 1):
        obstacles.append(
            f"YaRN's attention_factor {scaling['attention_factor']} at factor {factor}"
        )
    if rotary_percent != 1.0:
        obstacles.append(f"YaRN on a part of each head ({rotary_percent})")
    return obstacles


def _is_sound(key: str, value: Any) -> bool:
    if key in ("rope_type", "type"):
        return bool(value == KIND)
    return isinstance(value, bool) if key == "truncate" else type(value) in (int, float)


def _get_sizes(
    scaling: Mapping[str, Any], max_positions: int | None
) -> tuple[float | None, int | None]:
    original = scaling.get("original_max_position_embeddings") or max_positions
    factor = scaling.get("factor")
    if factor is None and original and max_positions:
        factor = max_positions / original
    return factor, original


def _get_mscales(scaling: Mapping[str, Any], factor: float | None) -> tuple[float, float]:
    # The factor of cos and sin is ``m(mscale) / m(mscale_all_dim)`` where ``m(x)`` is ``0.1 * x *
    # log(factor) + 1``: equal numbers change nothing. transformers lets attention_factor override
    # the mscales. The mscale that gives it is the solution of m(mscale) = attention_factor, as m(0)
    # is 1.
    stated = scaling.get("attention_factor")
    if stated is not None:
        return (float(stated) - 1) / (0.1 * log(factor)) if factor and factor > 1 else 0.0, 0.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return float(scaling["mscale"]), float(scaling["mscale_all_dim"])
    return 1.0, 0.0


def parse_args(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of a run's arguments; None where they do not state it."""
    if args.get(_FACTOR) is None or args.get(_ORIGINAL) is None:
        return None
    factor = float(args[_FACTOR])
    mscale, all_dim = args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")
    scaling = {
        "rope_type": KIND,
        "factor": factor,
        "original_max_position_embeddings": int(args[_ORIGINAL]),
        "beta_fast": float(args.get("yarn_beta_fast") or 32),
        "beta_slow": float(args.get("yarn_beta_slow") or 1),
    }
    if args.get("yarn_correction_range_round_to_int") is False:
        scaling["truncate"] = False
    if mscale is not None and all_dim is not None and (mscale, all_dim) != (1, 0):
        scaling["attention_factor"] = _get_attention_factor(factor, mscale, all_dim)
    return scaling


def _get_attention_factor(factor: float, mscale: float, all_dim: float) -> float:
    scale = max(log(factor), 0.0) * 0.1
    return (mscale * scale + 1) / (all_dim * scale + 1)
