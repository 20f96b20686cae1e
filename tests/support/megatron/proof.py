"""The steps of a proof: each shows a fact about one configuration on one grid of ranks.

transformers builds a tiny random model with the features of the configuration (`models`). The steps
for each grid are:

    convert     ``reshard convert --to megatron`` writes it, with its optimizer
    load        megatron-core builds a model from the reported command line alone, and loads
                weights and Adam strictly; every moment is compared with its weight
    logits      Megatron's logits equal those of transformers
    merge       ``reshard merge`` returns each tensor with its name and its bits, and transformers
                loads the directory and computes the same logits
    moments     under Hugging Face's names, the moments still fit the weights, and the step is kept
    published   a conversion of the files of ``save_pretrained`` has the same weights
    ranks       a split to another grid and back returns the same training state
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from reshard import api
from reshard.containers.yaml_files import parse_yaml
from reshard.errors import ReshardError
from reshard.layouts.model_parallel import config_keys, families
from tests.support.megatron import models, mtp
from tests.support.megatron.models import Sources
from tests.support.megatron.ranks import LoadJob, run_jobs

NEAR = 2e-5  # of the largest logit: sums in another order
PROVED, FAILED, REFUSED = "proved", "failed", "refused"
THERE_AND_BACK = "there and back"  # the verdict if Megatron-core does not build the model
CONVERT, LOAD, LOGITS = "convert", "load", "logits"
MERGE, MOMENTS, PUBLISHED, RANKS = "merge", "moments", "published", "ranks"
STEPS = (CONVERT, LOAD, LOGITS, MERGE, MOMENTS, PUBLISHED, RANKS)
_SHOWN = 4
_WITHOUT_OPTION = re.compile(r" has no option for (.+): ")
# Configurations of families for which the defaults of their class cannot be proved. transformers
# raises the steps of a Mamba layer to time_step_min, but Megatron does not. Megatron-Bridge builds
# Exaone 4 only without a window. The class of Nemotron has no default for its heads, and that of
# dots.llm1 none for its experts.
CONFIGS = {
    "dots1": """{"model_type": "dots1", "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "max_window_layers": 2}""",
    "exaone4": """{"model_type": "exaone4", "sliding_window": null, "layer_types":
        ["full_attention", "full_attention", "full_attention", "full_attention"],
        "num_hidden_layers": 4}""",
    "nemotron": """{"model_type": "nemotron", "head_dim": 128, "num_key_value_heads": 8}""",
    "nemotron_h": """{"model_type": "nemotron_h", "time_step_min": 1e-9, "layers_block_type":
        ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"]}""",
    "nemotron_h_moe": """{"model_type": "nemotron_h", "time_step_min": 1e-9, "layers_block_type":
        ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"]}""",
}
HYBRID = ("nemotron_h",)
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with gated delta nets


@dataclass(frozen=True)
class RankGrid:
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


Grids = tuple[RankGrid, ...]
DENSE = (RankGrid(tp=2), RankGrid(tp=2, pp=2), RankGrid(tp=2, pp=2, form="torch_dist"))
SPARSE = (
    *(
        RankGrid(tp=2),
        RankGrid(tp=2, pp=2),
        RankGrid(ep=2),
        RankGrid(pp=2, ep=2),
        RankGrid(tp=2, ep=2),
    ),
    RankGrid(tp=2, ep=2, form="torch_dist"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a step found on one grid; ``ranks`` is None if it is of no grid."""

    ranks: RankGrid | None
    step: str
    text: str

    def __str__(self) -> str:
        return ": ".join(str(each) for each in (self.ranks, self.step, self.text) if each)


@dataclass
class Proof:
    """The results of the proof of one configuration.

    Args:
        name: the configuration, as it was given.
        place: the directory for all files of the proof.
        rules: a user's file of rules, with a family of its own.
        grids: the grids to which the model was converted.
        refused: the reason -> the last grid that was refused for it.
        lines: grid -> the command line that starts Megatron-LM, and the settings without an option.
    """

    name: str
    place: Path
    rules: Path | None = None
    model_type: str = ""
    sources: Sources | None = None
    grids: list[RankGrid] = field(default_factory=list)
    refused: dict[str, RankGrid] = field(default_factory=dict)
    lines: dict[RankGrid, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The result: proved, there and back, failed or refused."""
        if self.problems:
            return FAILED
        return (THERE_AND_BACK if self.builder else PROVED) if self.grids else REFUSED

    @property
    def impl(self) -> str:
        """The implementation of Megatron's layers; some models exist only with one of the two."""
        te_alone = self.builder or self.model_type in (*HYBRID, *DELTA)
        return "transformer_engine" if te_alone else "local"

    @property
    def builder(self) -> str:
        """The program that builds the model, if Megatron-core does not."""
        known = families.load_families(self.rules).values()
        return next((each.builder for each in known if each.model_type == self.model_type), "")

    @property
    def options(self) -> dict[str, Any]:
        """The options of every conversion."""
        return {"rules": self.rules} if self.rules else {}

    def list_lines(self) -> Iterator[str]:
        """Yield the lines for a terminal: the verdict, the steps of each grid, and the problems."""
        yield f"{self.name}: {self.verdict}"
        for ranks in self.grids:
            failed = {problem.step for problem in self.problems if problem.ranks == ranks}
            skipped = {LOAD, LOGITS} if self.builder else {}
            steps = [
                f"{step} {'FAILED' if step in failed else '-' if step in skipped else 'ok'}"
                for step in STEPS
            ]
            yield f"  {ranks}: {', '.join(steps)}"
        shown = [*map(str, self.problems[:_SHOWN])]
        shown += [f"{ranks}: refused: {why}" for why, ranks in self.refused.items()]
        more = len(self.problems) - _SHOWN
        yield from (f"  {text}" for text in [*shown, *([f"{more} more problems"] * (more > 0))])

    def describe(self) -> str:
        """Return the problems, the refusal or the grids, for a table."""
        more = len(self.problems) - _SHOWN
        shown = [*map(str, self.problems[:_SHOWN]), *([f"{more} more"] * (more > 0))]
        if self.problems:
            return "; ".join(shown)
        reasons = [f"{grid}: {why}" if self.grids else why for why, grid in self.refused.items()]
        names = [f"names of {self.builder}"] if self.builder and self.grids else []
        return "; ".join([", ".join(map(str, self.grids)), *names, *reasons]).removeprefix("; ")

    def locate_run(self, ranks: RankGrid) -> Path:
        """Return the path of the checkpoint of a grid."""
        return self.place / re.sub(r"\W", "", str(ranks))


def begin(
    configs: Iterable[str],
    place: Path,
    dense: Grids = DENSE,
    sparse: Grids = SPARSE,
    rules: Path | None = None,
) -> list[Proof]:
    """Run the conversions of each configuration; `finish` runs the other steps.

    Args:
        configs: each a file, a directory, the text of a ``config.json`` or a ``model_type``.
        place: a directory for all files.
        dense: the grids for a model without experts.
        sparse: the grids for a model with experts.
        rules: a user's file of rules, with a family of its own.
    """
    return [
        _begin(Proof(config, place / f"config{number}", rules), dense, sparse)
        for number, config in enumerate(configs)
    ]


def finish(proofs: list[Proof], place: Path) -> list[Proof]:
    """Run the steps after the conversions, and return the proofs; Megatron-core starts once.

    Args:
        proofs: what `begin` returned, in one call or in several.
        place: a directory for the files of Megatron-core.
    """
    tried = [(proof, ranks) for proof in proofs for ranks in proof.grids]
    built = [each for each in tried if not each[0].builder]
    jobs = [_make_job(proof, ranks) for proof, ranks in built]
    for (proof, ranks), found in zip(built, run_jobs(jobs, place / "megatron"), strict=True):
        proof.problems += [Problem(ranks, *each) for each in _check_megatron(proof, found)]
    for proof, ranks in tried:
        proof.problems += [Problem(ranks, *each) for each in _check_way_back(proof, ranks)]
    return proofs


def _make_job(proof: Proof, ranks: RankGrid) -> LoadJob:
    run = proof.locate_run(ranks)
    tokens, directory = proof.place / models.TOKENS, proof.place / f"{run.name}.megatron"
    return LoadJob(str(run), str(tokens), ranks.world, str(directory), *proof.lines[ranks])


def _begin(proof: Proof, dense: Grids, sparse: Grids) -> Proof:
    """Build the model, and convert it to every grid; return the proof with the grids."""
    try:
        config = models.read_config(proof.name)
        proof.model_type = config.model_type
        if _is_lacking(proof):
            proof.refused[families.describe_unknown(proof.model_type, proof.rules)] = dense[0]
            return proof
        tiny = models.shrink(config)
        proof.sources = models.write_sources(tiny, proof.place)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is the answer
        proof.problems.append(Problem(None, "transformers", _describe_error(error)))
        return proof
    for ranks in sparse if _has_experts(tiny) else dense:
        try:
            options: dict[str, Any] = {"transformer_impl": proof.impl}
            # transformers' own class lacks MTP layers: a model that it builds would not fit.
            options |= {} if proof.sources.mtp else {"model": str(proof.sources.model)}
            run = proof.locate_run(ranks)
            report = _convert(proof, proof.sources.run, run, ranks, **options)
        except ReshardError as error:
            proof.refused[error.problem] = ranks
            continue
        proof.grids.append(ranks)
        proof.lines[ranks] = report.load_line, _find_settings(report.notes)
    return proof


def _find_settings(notes: Iterable[str]) -> dict[str, Any]:
    """Return the settings that a report names because no option of Megatron-LM sets them."""
    told = next(filter(None, map(_WITHOUT_OPTION.search, notes)), None)
    pairs = [pair.partition("=") for pair in told[1].split(", ")] if told else []
    return {name: parse_yaml(Path("report"), value) for name, _, value in pairs}


def _is_lacking(proof: Proof) -> bool:
    """Return whether Megatron lacks a part of the model, so that no tiny one needs to be built."""
    is_known = families.is_known(proof.model_type, proof.rules)
    return proof.model_type in config_keys.load_settings().lacking and not is_known


def _has_experts(config: Any) -> bool:
    if getattr(config, "layers_block_type", None):
        return "moe" in config.layers_block_type
    return any(getattr(config, key, None) for key in models.EXPERT_COUNTS)


def _convert(proof: Proof, source: Path, target: Path, ranks: RankGrid, **options: Any) -> Any:
    sizes: dict[str, Any] = {"tp": ranks.tp, "pp": ranks.pp, "ep": ranks.ep, "dp": ranks.dp}
    sizes["ckpt_format"] = ranks.form
    how: dict[str, Any] = {"adam": "torch", "make_vocab_size_divisible_by": 8}
    return api.split(source, target, to="megatron", **sizes, **how, **proof.options, **options)


def _check_megatron(proof: Proof, found: dict[str, Any] | str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with Megatron-core's model of one grid: the step, and why."""
    sources = proof.sources
    assert sources is not None
    if isinstance(found, str):
        yield LOAD, f"Megatron-core: {found.rstrip().splitlines()[-1]}"
        yield LOGITS, "not computed"
        return
    yield from ((LOAD, text) for text in found["wrong"])
    for number, wanted in enumerate((sources.logits, *sources.mtp)):
        logits = [each[number] for each in found["logits"]]
        yield from ((LOGITS, text) for text in _compare_logits(logits, wanted))


def _check_way_back(proof: Proof, ranks: RankGrid) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the conversions from one grid: the step, and why."""
    steps: dict[str, Callable[[Proof, RankGrid], Iterator[str]]] = {
        MERGE: _merge,
        MOMENTS: _compare_moments,
        PUBLISHED: _compare_published,
        RANKS: _go_there_and_back,
    }
    for step, check in steps.items():
        try:
            yield from ((step, text) for text in check(proof, ranks))
        except ReshardError as error:
            yield step, str(error).splitlines()[0]
        except Exception as error:  # noqa: BLE001 - transformers refuses what was merged
            yield step, f"transformers: {_describe_error(error)}"


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _merge(proof: Proof, ranks: RankGrid) -> Iterator[str]:
    """Yield what is wrong with the merged Hugging Face directory."""
    run = proof.locate_run(ranks)
    back = proof.place / f"{run.name}.back"
    assert proof.sources is not None
    # A hybrid model's config has settings that Megatron lacks (`tables/nemotron_h.yaml`), and a
    # family that computes the same as another type writes that type's config.
    is_own = proof.model_type not in HYBRID and families.is_known(proof.model_type, proof.rules)
    options: dict[str, Any] = _name_family(proof) if is_own else {"hf_dir": proof.sources.model}
    api.merge(run, back, **options, **proof.options)
    yield from _compare_directories(back, proof.sources)


def _compare_logits(found: list[torch.Tensor], wanted: torch.Tensor) -> Iterator[str]:
    """Yield by how much logits differ from those of transformers, if it is more than `NEAR`."""
    most = wanted.abs().max()
    for logits in found:
        near = logits[:, : wanted.shape[1], : wanted.shape[2]]
        apart = (near - wanted).abs().max()
        if not apart <= NEAR * most:
            yield f"logits differ by {apart:.2g} of {most:.2g}"
    if not found:
        yield "no logits"


def _compare_directories(back: Path, sources: Sources) -> Iterator[str]:
    """Yield the tensors that differ from those of ``save_pretrained``, and unequal logits."""
    before, after = _read(sources.model), _read(back)
    if before.keys() != after.keys():
        yield f"names: {sorted(before.keys() ^ after.keys())[:4]}"
    for name in before.keys() & after.keys():
        mine, theirs = after[name], before[name]
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            yield f"{name} has other values"
    config = AutoConfig.from_pretrained(back)
    config.pad_token_id = None  # the default of the class may be beyond the few rows
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        back, config=config, output_loading_info=True
    )
    model, report = loaded
    layers = model.config.num_hidden_layers
    report["unexpected_keys"] = [
        key for key in report["unexpected_keys"] if not mtp.is_of_mtp(key, layers)
    ]
    yield from (
        f"{key}: {report[key]}" for key in ("missing_keys", "unexpected_keys") if report[key]
    )
    with torch.no_grad():
        logits = model.eval()(sources.tokens, use_cache=False).logits
    # The bits can differ, because gelu_new of a config may have become gelu_pytorch_tanh.
    yield from _compare_logits([logits], sources.logits)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _name_family(proof: Proof) -> dict[str, Any]:
    """Return the option that names the family, which Megatron's arguments may not state."""
    base = families.find_base_type(proof.model_type, proof.rules)
    return {"family": base or proof.model_type}


def _compare_moments(proof: Proof, ranks: RankGrid) -> Iterator[str]:
    """Yield the moments under Hugging Face's names that do not fit their weights."""
    assert proof.sources is not None
    run = proof.locate_run(ranks)
    target = proof.place / f"{run.name}.dcp"
    options = {"verify": False, **_name_family(proof), **proof.options}  # all of it is read below
    api.split(run, target, to="dcp", names="hf", **options)
    with api.open(target) as state:
        moments = {slot: state.optimizer(slot) for slot in ("exp_avg", "exp_avg_sq")}
        # The copies of tied weights and buffers have no moments.
        for name in _read(proof.sources.model).keys() - proof.sources.buffers:
            weight = state[name][...]
            wanted = {"exp_avg": 2 * weight, "exp_avg_sq": weight.square()}
            for slot, value in wanted.items():
                if name not in moments[slot] or not torch.equal(moments[slot][name][...], value):
                    yield f"{slot} of {name} does not fit its weight"
        if set(state.manifest.train.optimizer_step.values()) != {models.STEPS}:
            yield "the step was not kept"


def _compare_published(proof: Proof, ranks: RankGrid) -> Iterator[str]:
    """Yield the differences between the run and a conversion of the published files."""
    assert proof.sources is not None
    run = proof.locate_run(ranks)
    target = run.with_suffix(".published")
    options: dict[str, Any] = {"weights_only": True, "transformer_impl": proof.impl}
    options["verify"] = False  # `diff` reads all of it
    _convert(proof, proof.sources.model, target, ranks, **options)
    yield from _describe(api.diff(run, target, kinds=["weight"]))


def _go_there_and_back(proof: Proof, ranks: RankGrid) -> Iterator[str]:
    """Yield the differences after a split to another grid and back."""
    run, other = proof.locate_run(ranks), RankGrid(pp=2) if ranks.tp > 1 else RankGrid(tp=2)
    there, again = (run.with_name(run.name + word) for word in (".there", ".again"))
    _convert(proof, run, there, other)
    _convert(proof, there, again, ranks, verify=False)  # `diff` reads all of it
    yield from _describe(api.diff(run, again))


def _describe(report: Any) -> Iterator[str]:
    if not report.same:
        yield "; ".join(list(report.lines())[:3])


def list_known() -> list[str]:
    """Return the model types of all families, also of those that Megatron-core cannot build.

    An item of `CONFIGS` stands for its family.
    """
    known = dict.fromkeys(
        CONFIGS.get(family.name, family.model_type) for family in families.load_families().values()
    )
    return [*known, *config_keys.load_settings().lacking]
