"""``plan``: which strategy fits a cluster, what it needs, and the configuration for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from reshard import formats, units
from reshard.commands.forecast import Forecast
from reshard.commands.lines import Report, format_row
from reshard.commands.options import ReportOptions
from reshard.commands.page import check_page, write_page
from reshard.errors import ReshardError, UsageError
from reshard.manifest import MASTER, PARAM, Manifest
from reshard.model_parallel.sizes import parse_mesh
from reshard.options import option
from reshard.paths import as_path
from reshard.sizing import sources
from reshard.sizing.choice import Advice, Choice, advise, choose, choose_named, find_nodes
from reshard.sizing.model import ModelSizes
from reshard.sizing.setup import Cluster, Optimizer, Precision, Training, parse_gpus
from reshard.sizing.strategies import MARGIN, Row, fit_micro_batch, forecast
from reshard.training import trainer_run

if TYPE_CHECKING:
    from reshard.html.page import Page

_SEQ_LEN = 4096
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SLOTS = (  # a slot of the optimizer's state, and the first optimizer that has it
    ("exp_avg_sq", "adamw"),
    ("exp_avg", "lion"),
    ("momentum_buffer", "momentum"),
    ("sum", "adagrad"),
)
_HYPER = ("lr", "betas", "eps", "weight_decay")
StrategyName = Literal[
    "ddp",
    "hsdp",
    "fsdp",
    "zero1",
    "zero2",
    "zero2-offload",
    "zero3",
    "zero3-offload-optimizer",
    "zero3-offload",
]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReportOptions):
    """The options of ``plan``."""

    gpus: str = option(
        "1x80GB",
        "GPUs of a node and the memory of each, e.g. 8x80GB.",
        group="Cluster",
        is_common=True,
    )
    nodes: int = option(1, "Number of nodes.", group="Cluster", minimum=1, is_common=True)
    host_memory_bytes: int | None = option(
        None,
        "Memory of a node, e.g. 512GB.",
        group="Cluster",
        flags=("--host-memory",),
        parse=lambda text: units.parse_bytes(text, "--host-memory"),
        unset="not compared",
    )
    params: str | None = option(
        None,
        "Number of parameters instead of a model, e.g. 7B.",
        group="Training",
        is_common=True,
    )
    seq_len: int | None = option(
        None,
        "Tokens of a sample.",
        group="Training",
        minimum=1,
        unset=f"as SOURCE states, else {_SEQ_LEN} or the most that the model supports",
        is_common=True,
    )
    micro_batch: int | None = option(
        None,
        "Samples of a forward pass on one GPU.",
        group="Training",
        minimum=1,
        unset="as SOURCE states, else 1",
    )
    global_batch: int | None = option(
        None,
        "Samples of a step on all GPUs.",
        group="Training",
        minimum=1,
        unset="as SOURCE states, else one micro batch on each data-parallel rank",
        is_common=True,
    )
    optimizer: Optimizer | None = option(
        None,
        "Optimizer.",
        group="Training",
        unset="as SOURCE states, else adamw",
        is_common=True,
    )
    precision: Precision | None = option(
        None,
        "Precision of the forward and backward pass.",
        group="Training",
        unset="as SOURCE states, else bf16",
        is_common=True,
    )
    lora_rank: int = option(
        0, "Train LoRA adapters of this rank; 0: train the model.", group="Training", minimum=0
    )
    lora_targets: Sequence[str] = option(
        (),
        "Name of modules with adapters, e.g. q_proj.",
        group="Training",
        unset="all matrices of the layers except routers and routed experts",
    )
    freeze: str | None = option(
        None, "Regular expression of parameters that are not trained.", group="Training"
    )
    tp: int = option(1, "Tensor-parallel ranks.", group="Training", minimum=1)
    pp: int = option(1, "Pipeline stages.", group="Training", minimum=1)
    ep: int = option(
        1,
        "Expert-parallel ranks, which divide the data-parallel ranks as in DeepSpeed.",
        group="Training",
        minimum=1,
    )
    strategy: StrategyName | None = option(
        None,
        "Strategy for --write and for the advice.",
        group="Output",
        unset="the recommended one",
        is_common=True,
    )
    write: str | Path | None = option(
        None,
        "Write the configuration of the chosen strategy: .json for DeepSpeed (or HF Trainer's"
        " arguments for FSDP), .yaml for accelerate, .sh for python -m trainer.",
        group="Output",
        metavar="FILE",
        shapes_output=False,
        is_common=True,
    )


@dataclass(kw_only=True, repr=False)
class PlanReport(Report):
    """The result of `plan`."""

    model: ModelSizes
    cluster: Cluster
    training: Training
    rows: list[Row]
    choice: Choice
    micro_batch: int  # the largest that fits with the chosen strategy
    advice: list[Advice]
    next_steps: list[str] = field(default_factory=list)
    split: Forecast | None = None  # of the split of a source for the chosen strategy
    notes: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # those that were given
    written: str = ""

    @property
    def exit_code(self) -> int:
        """0 if the chosen strategy fits, else 1."""
        return 0 if self.choice.fits else 1

    def to_json(self) -> dict[str, Any]:
        """Return one document with a stable schema; sizes are in bytes."""
        return {
            "schema": 1,
            "command": "plan",
            "options": self.options,
            "model": {
                "source": self.model.source,
                "counted_by": self.model.counted_by,
                "parameters": self.model.numel,
                "largest_layer": self.model.largest_block,
                "layers": len(self.model.blocks),
            },
            "cluster": asdict(self.cluster),
            "training": asdict(self.training),
            "rows": [self._row_to_json(row) for row in self.rows],
            "recommended": {
                "strategy": self.choice.row.strategy.name,
                "activation_checkpointing": self.choice.checkpointing,
                "fits": self.choice.fits,
                "reason": self.choice.reason,
                "largest_micro_batch": self.micro_batch,
            },
            "advice": [asdict(each) for each in self.advice],
            "next_steps": self.next_steps,
            "split": None if self.split is None else asdict(self.split),
            "notes": self.notes,
            "written": self.written,
        }

    def _row_to_json(self, row: Row) -> dict[str, Any]:
        sizes = asdict(row)
        sizes["strategy"] = row.strategy.name
        return {
            **sizes,
            "total": row.count_total(checkpointing=False),
            "total_with_checkpointing": row.count_total(checkpointing=True),
            "fits": row.fits(self.cluster, checkpointing=False),
            "fits_with_checkpointing": row.fits(self.cluster, checkpointing=True),
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        training, cluster = self.training, self.cluster
        yield format_row("model", f"{self.model.source}: {sources.describe_count(self.model)}")
        gpus = units.counted(cluster.world, "GPU")
        yield format_row("cluster", f"{gpus} of {units.show_bytes(cluster.gpu_bytes)}")
        axes = ", ".join(f"{a} {n}" for a in ("tp", "pp", "ep") if (n := getattr(training, a)) > 1)
        yield format_row(
            "training",
            f"{training.precision}, {training.optimizer}, {training.seq_len} tokens x micro batch"
            f" {training.micro_batch}{', ' if axes else ''}{axes}",
        )
        yield from _format_table(self.rows, cluster)
        word = "use" if self.choice.fits else "none fits"
        yield format_row(word, self.choice.reason)
        if self.choice.fits and self.micro_batch > training.micro_batch:
            yield format_row("", f"a micro batch of {self.micro_batch} still fits")
        for line in self.next_steps:
            yield format_row("next", line)
        if not self.choice.fits:
            for each in self.advice:
                yield format_row("saves", f"{units.show_bytes(each.saved):>8}  {each.what}")
        for note in self.notes:
            yield format_row("note", note)
        if self.written:
            yield format_row("wrote", self.written)


_HEADERS = (
    "params grads masters moments gathered buckets logits margin activ. ckpt total total+ckpt"
    " host disk sent fits"
).split()


def _format_table(rows: Sequence[Row], cluster: Cluster) -> Iterator[str]:
    """Yield the table of all strategies, in decimal gigabytes."""
    cells = [_format_cells(row, cluster) for row in rows]
    widths = [
        max(len(header), *(len(each[n]) for each in cells)) for n, header in enumerate(_HEADERS)
    ]
    name = max(len(row.strategy.name) for row in rows)
    yield f"{'GB per GPU':<{name}}  " + "  ".join(
        f"{header:>{width}}" for header, width in zip(_HEADERS, widths, strict=True)
    )
    for row, each in zip(rows, cells, strict=True):
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(each, widths, strict=True))
        yield f"{row.strategy.name:<{name}}  {line}"


def _format_cells(row: Row, cluster: Cluster) -> list[str]:
    names = (
        "parameters gradients masters moments gathered buckets logits margin activations recomputed"
    ).split()
    totals = [row.count_total(checkpointing=each) for each in (False, True)]
    sizes = [*(getattr(row, name) for name in names), *totals, row.host, row.disk, row.sent]
    return [*map(_format_size, sizes), describe_fit(row, cluster)]


def _format_size(nbytes: int) -> str:
    """Return gigabytes with three digits.

    >>> _format_size(112_000_000_000), _format_size(1_940_000_000), _format_size(0)
    ('112', '1.94', '-')
    """
    if not nbytes:
        return "-"
    return f"{nbytes / 1e9:.0f}" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g}"


def describe_fit(row: Row, cluster: Cluster) -> str:
    """Return whether a row fits, in a word."""
    if row.fits(cluster, checkpointing=False):
        return "yes"
    if row.fits(cluster, checkpointing=True):
        return "with ckpt"
    return "no"


def plan(source: formats.Paths | None = None, options: PlanOptions | None = None) -> PlanReport:
    """Forecast the memory of every strategy for a model, or for the run in a checkpoint.

    Args:
        source: a checkpoint as for `reshard.open`; None: the options name the model.

    Raises:
        ReshardError: the source cannot be read, or the options contradict each other.
    """
    options = options or PlanOptions()
    paths: Sequence[Path] = formats.as_paths(source) if source else ()
    check_page(options, paths)
    _check_written(options, paths)
    manifest = formats.read(paths, **options.reader_arguments()) if paths else None
    model = _find_model(options, manifest)
    gpus, gpu_bytes = parse_gpus(options.gpus)
    cluster = Cluster(gpus, gpu_bytes, options.nodes, options.host_memory_bytes)
    training = _find_training(options, manifest, model)
    rows = forecast(model, cluster, training)
    choice = (
        choose_named(rows, options.strategy, cluster) if options.strategy else choose(rows, cluster)
    )
    largest = fit_micro_batch(
        choice.row.strategy, model, cluster, training, checkpointing=choice.checkpointing
    )
    steps, split = (
        _continue_run(manifest, paths[0], choice, cluster, training) if manifest else ([], None)
    )
    report = PlanReport(
        model=model,
        cluster=cluster,
        training=training,
        rows=rows,
        choice=choice,
        micro_batch=largest,
        advice=advise(model, cluster, training, choice),
        notes=[
            *model.notes,
            *(_find_gaps(manifest) if manifest else ()),
            *([] if choice.fits else [_describe_nodes(model, cluster, training)]),
            *_describe_assumptions(training),
        ],
        next_steps=steps,
        split=split,
        options=options.given(),
    )
    if options.write is not None:
        _write(report, options, manifest)
    write_page(options, lambda: _build_page(report))
    return report


def _check_written(options: PlanOptions, paths: Sequence[Path]) -> None:
    """Check the path of --write before any work is done.

    Raises:
        UsageError: its suffix is not known, or it is the path of the page.
        ExistsError: it exists, or is inside the source.
    """
    if options.write is None:
        return
    from reshard.output.destination import check_destination
    from reshard.sizing.configs import SUFFIXES

    path = as_path(options.write)
    if path.suffix not in SUFFIXES:
        remedy = f"use {units.either(SUFFIXES)}"
        raise UsageError(f"--write {options.write}", "has no known suffix", remedy)
    if options.html is not None and as_path(options.html) == path:
        raise UsageError(f"--write {options.write}", "is also the path of --html")
    check_destination(path, list(paths), is_directory=False, overwrite=options.overwrite)


def _find_model(options: PlanOptions, manifest: Manifest | None) -> ModelSizes:
    """Return the sizes of the model that SOURCE, --model or --params describes.

    Raises:
        UsageError: none of them is given, or two.
    """
    if options.params is not None and (options.model is not None or manifest is not None):
        other = "--model" if manifest is None else "SOURCE"
        raise UsageError("--params", f"{other} states the number of parameters", "leave it out")
    if options.params is not None:
        return sources.count_parameters(options.params)
    if manifest is not None:
        return _describe_source(manifest, options)
    if options.model is not None:
        return sources.find_model(options.model)
    raise UsageError("plan", "has no model", "pass a checkpoint, --model or --params 7B")


def _describe_source(manifest: Manifest, options: PlanOptions) -> ModelSizes:
    """Return the sizes of the model in a checkpoint.

    Raises:
        UsageError: it has no weights.
    """
    from reshard.training.companion_files import config_beside

    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(PARAM, MASTER)}
    if not shapes:
        raise UsageError(manifest.origin.path, "has no weights")
    file = sources.find_config(options.model) if options.model else config_beside(manifest)
    config = sources.read_config(file) if file else None
    model = sources.count_shapes(shapes, manifest.origin.path, config, frozen=manifest.frozen)
    return replace(model, counted_by="the tensors of the checkpoint")


def _find_training(options: PlanOptions, manifest: Manifest | None, model: ModelSizes) -> Training:
    """Return the settings that the options give, else those of the run, else the defaults."""
    stated = _read_settings(manifest) if manifest is not None else {}
    length = options.seq_len or stated.get("seq_len") or min(_SEQ_LEN, model.positions or _SEQ_LEN)
    return Training(
        precision=options.precision or stated.get("precision", "bf16"),
        optimizer=options.optimizer or stated.get("optimizer", "adamw"),
        seq_len=length,
        micro_batch=options.micro_batch or stated.get("micro_batch", 1),
        global_batch=options.global_batch or stated.get("global_batch", 0),
        gradient_bytes=stated.get("gradient_bytes"),
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        lora_rank=options.lora_rank,
        lora_targets=tuple(options.lora_targets),
        freeze=options.freeze or "",
    )


def _read_settings(manifest: Manifest) -> dict[str, Any]:
    """Return the settings that a checkpoint states."""
    settings: dict[str, Any] = {}
    if manifest.origin.precision in _PRECISIONS:
        settings["precision"] = _PRECISIONS[manifest.origin.precision]
    kinds = {kind for kind, _ in manifest.entries}
    for slot, optimizer in _SLOTS:
        if slot in kinds:
            settings["optimizer"] = optimizer
            break
    config = manifest.train.config
    dtypes = config.get("data_types") if isinstance(config, dict) else None
    if isinstance(dtypes, dict) and dtypes.get("grad_accum_dtype") in ("fp32", "float32"):
        settings["gradient_bytes"] = 4
    return settings | _read_batch(manifest)


def _find_gaps(manifest: Manifest) -> Iterator[str]:
    """Yield what a checkpoint does not state, so that the forecast assumes it."""
    if manifest.without_frozen:
        yield "the checkpoint lacks frozen parameters, which the forecast therefore lacks, too"
    kinds = {kind for kind, _ in manifest.entries}
    if manifest.has_optimizer and not kinds & {slot for slot, _ in _SLOTS}:
        yield "the checkpoint's optimizer is not a known one; its state is counted as Adam's"


def _read_batch(manifest: Manifest) -> dict[str, int]:
    """Return the sizes of the batch: of our trainer, or of a DeepSpeed configuration."""
    config, state = manifest.train.config, manifest.train.trainer_state
    run = trainer_run.read(state, manifest.origin.path)
    if run is not None:
        chosen = run.document["settings"]
        names = ("micro_batch", "global_batch", "seq_len")
        return {name: chosen[name] for name in names if type(chosen.get(name)) is int}
    micro = config.get("train_micro_batch_size_per_gpu") if isinstance(config, dict) else None
    if type(micro) is not int:
        return {}
    steps = config.get("gradient_accumulation_steps", 1)
    ranks = manifest.origin.world // parse_mesh(manifest.origin.mesh).model
    whole = config.get("train_batch_size", micro * steps * ranks if type(steps) is int else 0)
    return {"micro_batch": micro, "global_batch": whole if type(whole) is int else 0}


def _describe_nodes(model: ModelSizes, cluster: Cluster, training: Training) -> str:
    """Return on how many nodes a strategy fits."""
    found = find_nodes(model, cluster, training)
    if found is None:
        return "more nodes do not help: one sample needs more memory than a GPU has"
    return f"{found[1]} fits on {units.counted(found[0], 'node')}"


def _describe_assumptions(training: Training) -> list[str]:
    """Return what the numbers assume, for the report."""
    assumed = (
        f"{MARGIN:.0%} of each GPU is left free for CUDA, NCCL and fragmentation: an assumption,"
        " while all other sizes are counted"
    )
    notes = [assumed]
    if training.lora_rank:
        notes.append("LoRA: activations are those of full training, an upper limit")
    return notes


def _continue_run(
    manifest: Manifest, source: Path, choice: Choice, cluster: Cluster, training: Training
) -> tuple[list[str], Forecast | None]:
    """Return how a run goes on with the chosen strategy: by a split, or by loading it live.

    Returns:
        Lines for the report, and the forecast of the split.
    """
    strategy = choice.row.strategy
    if strategy.framework == "deepspeed":
        to: dict[str, Any] = {"to": "deepspeed", "zero_stage": strategy.stage}
        live = f'reshard.deepspeed.load_checkpoint(engine, "{source}")'
    else:
        to = {"to": "dcp"}
        reader = f'reshard.dcp.StorageReader("{source}")'
        live = f"torch.distributed.checkpoint.load(state, storage_reader={reader})"
    to |= {"world_size": cluster.world} if training.tp * training.pp * training.ep == 1 else {}
    to |= {axis: size for axis in ("tp", "pp", "ep") if (size := getattr(training, axis)) > 1}
    target = f"{source}-{strategy.name}-{cluster.world}"
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in to.items())
    line = f"reshard split {quote(str(source))} {quote(target)} {flags}"
    steps = [f"or load it without writing: {live}"]
    try:
        expected = _forecast_split(manifest, as_path(target), to)
    except ReshardError as error:
        return [f"{line} is refused: {error}", *steps], None
    return [line, f"it takes {expected.describe()}", *steps], expected


def _forecast_split(manifest: Manifest, target: Path, chosen: dict[str, Any]) -> Forecast:
    """Plan a split as its command does, and forecast it.

    Raises:
        ReshardError: the run cannot be written so.
    """
    from reshard.commands.output import forecast_job
    from reshard.commands.split.command import plan_split
    from reshard.commands.split.options import SplitOptions

    options = SplitOptions(**chosen)
    return forecast_job(plan_split(manifest, target, options), target, options)


def _write(report: PlanReport, options: PlanOptions, manifest: Manifest | None) -> None:
    """Write the configuration of the chosen strategy, complete or not at all.

    Raises:
        ReshardError: the file cannot be written, or its program does not support the strategy.
    """
    from reshard.output import commit
    from reshard.output.local import disk_error
    from reshard.sizing.configs import format_config

    path = as_path(str(options.write))
    groups = manifest.train.param_groups if manifest is not None else ()
    hyper = (
        {name: groups[0].hyper[name] for name in _HYPER if name in groups[0].hyper}
        if (groups)
        else {}
    )
    text = format_config(
        path.suffix,
        report.choice,
        report.model,
        report.cluster,
        report.training,
        optimizer=hyper,
        resume=manifest.origin.path if manifest is not None else "",
    )
    try:
        with commit.stage_output(path, is_directory=False, overwrite=options.overwrite) as staging:
            (staging / path.name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(path, error) from error
    report.written = str(options.write)


def _build_page(report: PlanReport) -> Page:
    from reshard.html import plan_pages

    return plan_pages.planned(report.to_json())
