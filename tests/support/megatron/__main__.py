"""``python -m tests.support.megatron``: the command line of the proof; see the package."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.megatron.proof import Proof

NOT_RUN = 6  # the exit code of `reshard.errors.NotRunError`
_HEAD = "| model types | result | grids, or why not |"
_MISSING = (
    "megatron-core is not installed, and the proof runs its models\n"
    "  -> pip install 'megatron-core>=0.16.1,<0.17'"
)
_EPILOG = """The exit code is 0 if all configurations are proved, 1 if a step failed, 3 if nothing
failed and reshard refused a configuration, and 6 if megatron-core is not installed.

examples:
  python -m tests.support.megatron path/to/config.json
  python -m tests.support.megatron qwen3 '{"model_type": "phi3", "sliding_window": 2047}'
  python -m tests.support.megatron --rules family.yaml path/to/config.json
"""


def main() -> int:
    """Prove the configurations of the command line, print the steps, and return the exit code."""
    options = _parse_command_line()
    if importlib.util.find_spec("megatron") is None:
        print(_MISSING, file=sys.stderr)
        return NOT_RUN
    from transformers.utils import logging

    from tests.support.megatron import proof

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns about layers of multi-token prediction
    place = options.work or Path(tempfile.mkdtemp(prefix="families-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        begun = proof.begin(options.configs or proof.list_known(), place, rules=options.rules)
        proofs = proof.finish(begun, place)
    finally:
        if options.work is None:
            shutil.rmtree(place)
    for each in proofs:
        print("\n".join(each.list_lines()))
    if options.table:
        page = options.table.read_text() if options.table.exists() else ""
        options.table.write_text(write_table(proofs, page))
    codes = {proof.FAILED: 1, proof.REFUSED: 3}
    verdicts = {each.verdict for each in proofs}
    return next((code for verdict, code in codes.items() if verdict in verdicts), 0)


def _parse_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.megatron",
        description="Prove that a family of models goes from Hugging Face to Megatron and back.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    configs = "a config.json, its directory or text, or a model_type [default: all families]"
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help=configs)
    parser.add_argument(
        "--rules", type=Path, metavar="FILE", help="rules of a model family of your own"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep all files in DIR")
    table = "write the results into the table at the end of FILE"
    parser.add_argument("--table", type=Path, metavar="FILE", help=table)
    return parser.parse_args()


def write_table(proofs: Iterable[Proof], page: str) -> str:
    """Return a page like `docs/megatron-families.md` with these results in the table at its end.

    The results of other configurations stay as they are. Types with one result share a row.
    """
    from tests.support.megatron.proof import CONFIGS

    by_config = {config: name for name, config in CONFIGS.items()}
    text, _, table = page.partition(_HEAD)
    found = {}
    for row in table.strip().splitlines()[1:]:
        names, verdict, said = row.strip("| ").split(" | ")
        found |= dict.fromkeys(re.findall("`([^`]+)`", names), (verdict, said))
    for proof in proofs:
        own = proof.name if proof.name.startswith("{") else proof.model_type
        found[by_config.get(proof.name, own)] = (proof.verdict, proof.describe())
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (verdict, said) in found.items():
        reason = said.removeprefix(f"describes a model of type {name}, and ")
        groups.setdefault((verdict, reason), []).append(f"`{name}`")
    by_verdict = sorted(groups.items(), key=lambda group: group[0][0] == "refused")
    rows = [f"| {', '.join(names)} | {' | '.join(said)} |" for said, names in by_verdict]
    return "\n".join([text + _HEAD, "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
