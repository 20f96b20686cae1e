"""``plan``: forecast the memory of every strategy, and choose one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from reshard import formats, units
from reshard.commands.forecast import Forecast
from reshard.commands.page import check_page, write_page
from reshard.commands.plan.options import DEFAULT_SEQ_LEN, PlanOptions
from reshard.commands.plan.report import PlanReport
from reshard.core import keys
from reshard.core.manifest import MASTER, PARAM, Manifest
from reshard.errors import ReshardError, UsageError
from reshard.formats import registry
from reshard.layouts.model_parallel.sizes import parse_mesh
from reshard.sizing import sources
from reshard.sizing.model import ModelSizes
from reshard.sizing.setup import Cluster, Precision, Training, count_data_ranks, parse_gpus
from reshard.sizing.strategies import fit_micro_batch, forecast
from reshard.sizing.strategy_choice import Choice, advise, choose, choose_named, find_nodes
from reshard.system.paths import as_path
from reshard.training import trainer_run
from reshard.training.batch import find_micro_batch

if TYPE_CHECKING:
    from reshard.html.page import Page

_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SLOTS = (  # a slot of the optimizer's state, and the first optimizer that has it
    ("exp_avg_sq", "adamw"),
    ("exp_avg", "lion"),
    ("momentum_buffer", "momentum"),
    ("sum", "adagrad"),
)
_LORA_LIMIT = "LoRA: activations are those of full training, an upper limit"
_HYPER = ("lr", "betas", "eps", "weight_decay")


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
    if options.micro_batch is None:
        training = _fit_batch(cluster, training)
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
            *(_note_gaps(manifest) if manifest else ()),
            *([] if choice.fits else [_describe_nodes(model, cluster, training)]),
            *([_LORA_LIMIT] if training.lora_rank else []),
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
    if options.write is None:
        return
    from reshard.engine.output.destination import check_destination
    from reshard.sizing.configs import SUFFIXES

    path = as_path(options.write)
    if path.suffix not in SUFFIXES:
        remedy = f"use {units.either(SUFFIXES)}"
        raise UsageError(f"--write {options.write}", "has no known suffix", remedy)
    if options.html is not None and as_path(options.html) == path:
        raise UsageError(f"--write {options.write}", "is also the path of --html")
    check_destination(path, list(paths), is_directory=False, overwrite=options.overwrite)


def _find_model(options: PlanOptions, manifest: Manifest | None) -> ModelSizes:
    if options.params is not None and (options.model is not None or manifest is not None):
        other = "--model" if manifest is None else "SOURCE"
        raise UsageError("--params", f"{other} states the number of parameters", "leave it out")
    if options.params is not None:
        return sources.count_parameters(options.params)
    if manifest is not None:
        return _describe_source(manifest, options)
    if options.model is not None:
        return sources.find_model(options.model)
    raise UsageError("plan", "needs a model", "pass a checkpoint, --model or --params 7B")


def _describe_source(manifest: Manifest, options: PlanOptions) -> ModelSizes:
    from reshard.training.companion_files import find_config

    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(PARAM, MASTER)}
    if not shapes:
        raise UsageError(manifest.origin.path, "has no weights")
    file = sources.find_config(options.model) if options.model else find_config(manifest)
    config = sources.read_config(file) if file else None
    model = sources.count_shapes(shapes, manifest.origin.path, config, frozen=manifest.frozen)
    return replace(model, counted_by="the tensors of the checkpoint")


def _find_training(options: PlanOptions, manifest: Manifest | None, model: ModelSizes) -> Training:
    if options.freeze:
        keys.compile_patterns([options.freeze], "--freeze")
    stated = _read_settings(manifest) if manifest is not None else {}
    length = (
        options.seq_len
        or stated.get("seq_len")
        or min(DEFAULT_SEQ_LEN, model.positions or DEFAULT_SEQ_LEN)
    )
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


def _fit_batch(cluster: Cluster, training: Training) -> Training:
    """Return the settings with the micro batch that `split` would choose for so many ranks."""
    ranks = count_data_ranks(cluster, training)
    micro = find_micro_batch(training.micro_batch, training.global_batch, ranks)
    return replace(training, micro_batch=micro or training.micro_batch)


def _read_settings(manifest: Manifest) -> dict[str, Any]:
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


def _note_gaps(manifest: Manifest) -> Iterator[str]:
    if manifest.without_frozen:
        yield "the checkpoint lacks the frozen parameters, so the forecast does not count them"
    kinds = {kind for kind, _ in manifest.entries}
    if manifest.has_optimizer and not kinds & {slot for slot, _ in _SLOTS}:
        yield "the checkpoint's optimizer is not a known one; its state is counted as Adam's"


def _read_batch(manifest: Manifest) -> dict[str, int]:
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
    found = find_nodes(model, cluster, training)
    if found is None:
        return "more nodes do not help: one sample needs more memory than a GPU has"
    if found[0] == cluster.nodes:
        return f"{found[1]} fits: leave out --strategy"
    return f"{found[1]} fits on {units.counted(found[0], 'node')}"


def _continue_run(
    manifest: Manifest, source: Path, choice: Choice, cluster: Cluster, training: Training
) -> tuple[list[str], Forecast | None]:
    strategy = choice.row.strategy
    writer = registry.find_writer(strategy.layout)
    to: dict[str, Any] = {"to": writer.name}
    to |= {"zero_stage": strategy.stage} if "zero_stage" in writer.options else {}
    to |= {"world_size": cluster.world} if training.tp * training.pp * training.ep == 1 else {}
    to |= {axis: size for axis in ("tp", "pp", "ep") if (size := getattr(training, axis)) > 1}
    target = f"{source}-{strategy.name}-{cluster.world}"
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in to.items())
    line = f"reshard split {quote(str(source))} {quote(target)} {flags}"
    steps = [f"or load it without writing: {writer.live_line.format(path=source)}"]
    try:
        expected = _forecast_split(manifest, as_path(target), to)
    except ReshardError as error:
        return [f"{line} is refused: {error.where}: {error.problem}", *steps], None
    return [line, f"it takes {expected.describe()}", *steps], expected


def _forecast_split(manifest: Manifest, target: Path, chosen: dict[str, Any]) -> Forecast:
    from reshard.commands.output import forecast_job
    from reshard.commands.split.command import plan_split
    from reshard.commands.split.options import SplitOptions

    options = SplitOptions(**chosen)
    return forecast_job(plan_split(manifest, target, options), target, options)


def _name_model(model: ModelSizes, options: PlanOptions, manifest: Manifest) -> ModelSizes:
    """Return the model with the file that the trainer builds it from, unless the run has one."""
    from reshard.training.companion_files import find_config

    where = manifest.origin.path
    if trainer_run.read(manifest.train.trainer_state, where) is not None:
        return model
    source = options.model or find_config(manifest)
    if source is None:
        raise UsageError(
            where,
            "no file states the model, which python -m trainer needs for another program's run",
            "pass --model config.json, or write .json or .yaml",
        )
    return replace(model, source=str(source))


def _write(report: PlanReport, options: PlanOptions, manifest: Manifest | None) -> None:
    from reshard.engine.output import commit
    from reshard.sizing.configs import format_config

    path = as_path(str(options.write))
    model = report.model
    if path.suffix == ".sh" and manifest is not None:
        model = _name_model(model, options, manifest)
    groups = manifest.train.param_groups if manifest is not None else ()
    known = groups[0].hyper if groups and report.training.optimizer == "adamw" else {}
    is_adamw = known.get("decoupled_weight_decay", True)  # False in torch's Adam
    hyper = {name: known[name] for name in _HYPER if name in known} if is_adamw else {}
    text = format_config(
        path.suffix,
        report.choice,
        model,
        report.cluster,
        report.training,
        optimizer=hyper,
        resume=manifest.origin.path if manifest is not None else "",
    )
    commit.write_file(path, text.encode(), overwrite=options.overwrite)
    report.written = str(options.write)


def _build_page(report: PlanReport) -> Page:
    from reshard.html import plan_pages

    return plan_pages.build_plan_page(report.to_dict())
