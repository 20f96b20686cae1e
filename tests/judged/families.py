"""Prove that a family of models goes from Hugging Face to Megatron and back.

``python -m tests.judged.families [--work DIR] [--table FILE] [CONFIG ...]``

CONFIG is a ``config.json``, its directory, a ``model_type`` of transformers (the defaults of its
class) or the text of a ``config.json``. Without one, every family is tried that ``reshard`` has a
table of, and every model that it says Megatron-core lacks arguments for.

A tiny random model with the features of the configuration is made by transformers
(``tests.judges.family_models``), and for each grid of ranks:

    convert     ``reshard convert --to megatron`` writes it, with its optimizer
    load        megatron-core builds a model from the ``args`` in the checkpoint alone, and loads
                strictly: weights and Adam, every moment compared with its weight
    logits      Megatron's are those of transformers
    merge       ``reshard merge`` gives back each tensor, name for name and bit for bit, and
                transformers loads the directory and computes the same
    moments     under Hugging Face's names they still fit the weights, and so does the step
    published   the files of ``save_pretrained`` give the same weights as the model in memory
    ranks       another grid and back: the same training state

It prints a line for each configuration. The exit code is 0 where all are proved, 1 where a proof
failed, 3 where none failed, but ``reshard`` refused a configuration, and 6 where megatron-core is
not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.errors import ReshardError
from reshard.model_parallel import config_keys, families
from tests.judges import family_models, family_mtp
from tests.judges.family_models import Sources
from tests.judges.server import Judge

JUDGE = Judge("tests.judges.family_worker", "Megatron-core", {}, 180.0)
NEAR = 2e-5  # of the largest logit: sums in another order
PROVED, FAILED, REFUSED = "proved", "failed", "refused"
EXIT_CODES = {PROVED: 0, FAILED: 1, REFUSED: 3}
NOT_RUN = 6
_SHOWN = 4
# Hybrid models by their types. transformers raises the steps of a Mamba layer to time_step_min, and
# Megatron does not; layers of experts are Transformer Engine's, which no CPU runs.
HYBRID = {
    "nemotron_h": """{"model_type": "nemotron_h", "time_step_min": 1e-9, "layers_block_type":
        ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]}"""
}
_HEAD = "| model type | result | grids, or why not |"


@dataclass(frozen=True)
class Ranks:
    """A grid of ranks, and the form of their checkpoint (``--ckpt-format``)."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    form: str = "torch"

    @property
    def dp(self) -> int:
        """Data-parallel ranks, which hold the experts."""
        return self.ep

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "EP": self.ep}
        grid = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return grid if self.form == "torch" else f"{grid} ({self.form})"


Grids = tuple[Ranks, ...]
DENSE = (Ranks(tp=2), Ranks(tp=2, pp=2), Ranks(tp=2, pp=2, form="torch_dist"))
SPARSE = (
    *(Ranks(tp=2), Ranks(tp=2, pp=2), Ranks(ep=2), Ranks(pp=2, ep=2), Ranks(tp=2, ep=2)),
    Ranks(tp=2, ep=2, form="torch_dist"),
)


@dataclass
class Proof:
    """What was found of one configuration."""

    name: str
    place: Path
    model_type: str = ""
    sources: Sources | None = None
    grids: list[Ranks] = field(default_factory=list)
    refused: dict[str, Ranks] = field(default_factory=dict)  # the reason -> the last such grid
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One of the three."""
        if self.problems:
            return FAILED
        return PROVED if self.grids else REFUSED

    @property
    def impl(self) -> str:
        """The implementation of Megatron's layers: hybrid models have only one."""
        return "transformer_engine" if self.model_type in HYBRID else "local"

    def describe(self) -> str:
        """Return a line for a terminal."""
        return f"{self.name:<16} {self.verdict:<8} {self.tell()}"

    def tell(self) -> str:
        """Return the problems, the refusal or the grids."""
        more = len(self.problems) - _SHOWN
        shown = [*self.problems[:_SHOWN], *([f"{more} more"] * (more > 0))]
        if self.problems:
            return "; ".join(shown)
        reasons = [f"{grid}: {why}" if self.grids else why for why, grid in self.refused.items()]
        return "; ".join([", ".join(map(str, self.grids)), *reasons]).removeprefix("; ")

    def run(self, ranks: Ranks) -> Path:
        """Return where the checkpoint of a grid lies."""
        return self.place / re.sub(r"\W", "", str(ranks))


def prove(
    configs: Iterable[str], place: Path, dense: Grids = DENSE, sparse: Grids = SPARSE
) -> list[Proof]:
    """Try each configuration, in directories of ``place``; Megatron-core is started once.

    Args:
        dense: the grids of a model without experts.
        sparse: the grids of one with experts.
    """
    proofs = [
        _begin(config, place / f"config{number}", dense, sparse)
        for number, config in enumerate(configs)
    ]
    jobs = {
        f"{number}-{proof.run(ranks).name}": (proof, ranks)
        for number, proof in enumerate(proofs)
        for ranks in proof.grids
    }
    told = {
        name: (ranks.world, {"checkpoint": str(proof.run(ranks)), "tokens": proof.sources.tokens})
        for name, (proof, ranks) in jobs.items()
    }
    found = JUDGE.run(place / "megatron", told) if told else {}
    for name, (proof, ranks) in jobs.items():
        proof.problems += [f"{ranks}: {text}" for text in _judge(proof, ranks, found[name])]
    return proofs


def _begin(config: str, place: Path, dense: Grids, sparse: Grids) -> Proof:
    """Make the model and convert it to every grid."""
    proof = Proof(config, place)
    try:
        tiny = family_models.shrink(family_models.read_config(config))
        proof.model_type = tiny.model_type
        proof.sources = family_models.write_sources(tiny, proof.place)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is the answer
        proof.problems.append(f"transformers: {type(error).__name__}: {error}".splitlines()[0])
        return proof
    for ranks in sparse if _has_experts(tiny) else dense:
        try:
            told = {} if proof.sources.mtp else {"model": str(proof.sources.model)}
            told["transformer_impl"] = proof.impl
            _convert(proof.sources.run, proof.run(ranks), ranks, **told)
        except ReshardError as error:
            proof.refused[error.problem] = ranks
            continue
        proof.grids.append(ranks)
    return proof


def _has_experts(config: Any) -> bool:
    if getattr(config, "layers_block_type", None):
        return "moe" in config.layers_block_type
    return any(getattr(config, key, None) for key in family_models.EXPERT_COUNTS)


def _convert(source: Path, target: Path, ranks: Ranks, **options: Any) -> None:
    sizes = {"tp": ranks.tp, "pp": ranks.pp, "ep": ranks.ep, "dp": ranks.dp}
    sizes["ckpt_format"] = ranks.form
    how = {"adam": "torch", "make_vocab_size_divisible_by": 8}
    reshard.split(source, target, to="megatron", **sizes, **how, **options)


def _judge(proof: Proof, ranks: Ranks, found: dict[str, Any] | str) -> Iterator[str]:
    """Yield what is wrong with one grid, in words."""
    sources, run = proof.sources, proof.run(ranks)
    if isinstance(found, str):
        yield f"Megatron-core: {found.rstrip().splitlines()[-1]}"
    else:
        yield from found["wrong"]
        for number, wanted in enumerate((sources.logits, *sources.mtp)):
            yield from _compare_logits([each[number] for each in found["logits"]], wanted)
    back = proof.place / f"{run.name}.back"
    try:
        # A hybrid model's config has settings that Megatron has not (`tables/nemotron_h.yaml`).
        told = {"hf_dir": sources.model} if proof.model_type in HYBRID else _name_family(proof)
        reshard.merge(run, back, **told)
        yield from _compare_directories(back, sources)
        yield from _compare_moments(proof, ranks, proof.place / f"{run.name}.dcp")
        yield from _compare_published(proof, ranks)
        yield from _go_there_and_back(run, ranks)
    except ReshardError as error:
        yield str(error).splitlines()[0]
    except Exception as error:  # noqa: BLE001 - transformers refuses what was merged
        yield f"transformers: {type(error).__name__}: {str(error).splitlines()[0]}"


def _compare_logits(found: list[torch.Tensor], wanted: torch.Tensor) -> Iterator[str]:
    """Yield how far Megatron's logits are from transformers', where they are not near."""
    most = wanted.abs().max()
    for logits in found:
        near = logits[:, : wanted.shape[1], : wanted.shape[2]]
        apart = (near - wanted).abs().max()
        if not apart <= NEAR * most:
            yield f"logits differ by {apart:.2g} of {most:.2g}"
    if not found:
        yield "no logits"


def _compare_directories(back: Path, sources: Sources) -> Iterator[str]:
    """Yield the tensors that are not as ``save_pretrained`` wrote them, and what they compute."""
    before, after = _read(sources.model), _read(back)
    if before.keys() != after.keys():
        yield f"names: {sorted(before.keys() ^ after.keys())[:4]}"
    for name in before.keys() & after.keys():
        mine, theirs = after[name], before[name]
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            yield f"{name} has other values"
    config = AutoConfig.from_pretrained(back)
    config.pad_token_id = None  # the default of the class may be beyond the few rows
    model, told = AutoModelForCausalLM.from_pretrained(
        back, config=config, output_loading_info=True
    )
    layers = model.config.num_hidden_layers
    told["unexpected_keys"] = [
        key for key in told["unexpected_keys"] if not family_mtp.is_of_mtp(key, layers)
    ]
    yield from (f"{key}: {told[key]}" for key in ("missing_keys", "unexpected_keys") if told[key])
    with torch.no_grad():
        logits = model.eval()(sources.tokens, use_cache=False).logits
    # Not the same bits: gelu_new of a config may have become gelu_pytorch_tanh.
    yield from _compare_logits([logits], sources.logits)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _name_family(proof: Proof) -> dict[str, Any]:
    """Return the option that names the family, which Megatron's arguments may not tell."""
    known = families.is_known(proof.model_type)
    return {"family": proof.model_type} if known else {"hf_dir": proof.sources.model}


def _compare_moments(proof: Proof, ranks: Ranks, target: Path) -> Iterator[str]:
    """Yield the moments under Hugging Face's names that do not fit their weights."""
    reshard.split(proof.run(ranks), target, to="dcp", names="hf", **_name_family(proof))
    with reshard.open(target) as state:
        moments = {slot: state.optimizer(slot) for slot in ("exp_avg", "exp_avg_sq")}
        # Without the copies of what is tied, and without buffers.
        for name in _read(proof.sources.model).keys() - proof.sources.buffers:
            weight = state[name][...]
            wanted = {"exp_avg": 2 * weight, "exp_avg_sq": weight.square()}
            for slot, value in wanted.items():
                if name not in moments[slot] or not torch.equal(moments[slot][name][...], value):
                    yield f"{slot} of {name} does not fit its weight"
        if set(state.manifest.train.optimizer_step.values()) != {family_models.STEPS}:
            yield "another step"


def _compare_published(proof: Proof, ranks: Ranks) -> Iterator[str]:
    """Yield what is not the same of a checkpoint that the published files became."""
    target = proof.run(ranks).with_suffix(".published")
    told = {"weights_only": True, "transformer_impl": proof.impl}
    _convert(proof.sources.model, target, ranks, **told)
    yield from _describe(reshard.diff(proof.run(ranks), target, kinds=["weights"]))


def _go_there_and_back(run: Path, ranks: Ranks) -> Iterator[str]:
    """Yield what is not the same after another grid."""
    other = Ranks(pp=2) if ranks.tp > 1 else Ranks(tp=2)
    there, again = (run.with_name(run.name + word) for word in (".there", ".again"))
    _convert(run, there, other)
    _convert(there, again, ranks)
    yield from _describe(reshard.diff(run, again))


def _describe(report: Any) -> Iterator[str]:
    if not report.same:
        yield "; ".join(list(report.lines())[:3])


def write_table(proofs: Iterable[Proof], page: str) -> str:
    """Return a page (`docs/megatron-families.md`) with these results in the table at its end.

    The rows of other configurations stay as they are.
    """
    text, _, table = page.partition(_HEAD)
    rows = {row.split(" | ")[0]: row for row in table.strip().splitlines()[1:]}
    for proof in proofs:
        name = f"| `{proof.name if proof.name.startswith('{') else proof.model_type}`"
        rows[name] = f"{name} | {proof.verdict} | {proof.tell()} |"
    by_verdict = sorted(rows.values(), key=lambda row: row.split(" | ")[1] == REFUSED)
    return "\n".join([text + _HEAD, "| --- | --- | --- |", *by_verdict, ""])


def list_known() -> list[str]:
    """Return the model types of all families, and of those that Megatron-core cannot build.

    Hybrid ones are configurations.
    """
    known = dict.fromkeys(family.model_type for family in families.load_families().values())
    return [*(HYBRID.get(name, name) for name in known), *config_keys.load_settings().lacking]


def main() -> int:
    """Prove what the command line names, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", metavar="CONFIG")
    parser.add_argument("--work", type=Path, help="keep what is made in this directory")
    parser.add_argument("--table", type=Path, help="put the results into the table that ends FILE")
    told = parser.parse_args()
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed", file=sys.stderr)  # noqa: T201
        return NOT_RUN
    place = told.work or Path(tempfile.mkdtemp(prefix="families-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        proofs = prove(told.configs or list_known(), place)
    finally:
        if told.work is None:
            shutil.rmtree(place)
    for proof in proofs:
        print(proof.describe())  # noqa: T201
    if told.table:
        page = told.table.read_text() if told.table.exists() else ""
        told.table.write_text(write_table(proofs, page))
    verdicts = {proof.verdict for proof in proofs}
    return next((EXIT_CODES[each] for each in (FAILED, REFUSED) if each in verdicts), 0)


if __name__ == "__main__":
    sys.exit(main())
