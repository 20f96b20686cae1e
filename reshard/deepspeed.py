"""Load any checkpoint into a live DeepSpeed engine, at any stage and number of ranks.

    import reshard.deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    path, client_state = reshard.deepspeed.load_checkpoint(engine, "run/")

No file is written. Each rank computes in memory what `reshard split --to deepspeed` would write for
it, and DeepSpeed's own ``load_checkpoint`` takes it from there through the interface of its
checkpoint engines (DeepSpeed 0.19.8 ``runtime/checkpoint_engine/checkpoint_engine.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reshard import formats
from reshard.commands.split.options import SplitOptions
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import ReshardError, UnsupportedError
from reshard.live.comparison import compare_files
from reshard.live.files import (
    create_names,
    describe_program,
    log_report,
    open_live_files,
    raise_on_all_ranks,
    read_options,
)
from reshard.live.memory import iterate_engine
from reshard.live.safe_load import load_safely
from reshard.live.swapped_optimizer import SCALE, load_unread, patch_swap_loading
from reshard.system.attributes import replace_attributes
from reshard.training.batch import Batch, LiveBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["load_checkpoint"]


def load_checkpoint(  # noqa: PLR0913 - the arguments of DeepSpeed's method
    engine: Any,
    load_dir: formats.Paths,
    tag: str | None = None,
    load_module_strict: bool = True,  # noqa: FBT002 - as DeepSpeed declares it
    load_optimizer_states: bool = True,  # noqa: FBT002
    load_lr_scheduler_states: bool = True,  # noqa: FBT002
    load_module_only: bool = False,  # noqa: FBT002
    custom_load_fn: Callable[..., Any] | None = None,
    *,
    workers: int | None = None,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint of any format into an engine; every rank must call it.

    Weights, fp32 masters, optimizer state, steps, param groups, scheduler, loss scaler, counters
    and the script's own state are loaded as `split` would write them. What is derived or dropped
    is in the log of rank 0 (logger ``reshard``).

    Args:
        engine: a ``DeepSpeedEngine`` that has not trained yet; its configuration decides the stage,
            the precision and the layout.
        load_dir: the checkpoint: a path as for `reshard.open`.
        tag: the checkpoint of a run directory.
        load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn: as for ``DeepSpeedEngine.load_checkpoint``.
        workers: threads that read for this rank; by default the cores of the node, divided by its
            ranks.
        options: further options of `reshard.split` about the source: ``model``, ``wrap``,
            ``rules``, ``key``, ``init_optimizer``, ``param_groups``, ``replicas``, ``trust``, ...

    Returns:
        The path of the checkpoint, and the client state.

    Raises:
        ReshardError: on every rank; the engine is unchanged if no rank had begun to load.
    """
    config = engine._config._param_dict  # noqa: SLF001 - no public name
    refuse_setup(config)
    _refuse_swaps(engine)
    # At stage 3 the weights are in the optimizer's files alone.
    leaves_optimizer = engine.zero_optimization_partition_weights() and (
        load_module_only or not load_optimizer_states
    )
    # The files of stage 3 need an optimizer, which a source of weights alone does not have.
    if leaves_optimizer and load_module_only:
        options = {"init_optimizer": "zeros", **options}
    weights_only = load_module_only and not leaves_optimizer
    choice = _choose_options(engine, options, tag=tag, weights_only=weights_only)
    target = replace(
        describe_program(engine.module, _list_groups(engine)),
        config=config,
        batch=_find_batch(engine),
    )
    with open_live_files(load_dir, choice, target, workers=workers) as live:
        log_report(live.planned.report)
        with ExitStack() as stack:
            folder = stack.enter_context(create_names(live.files))
            loader = _MemoryEngine(live.files, folder, engine.checkpoint_engine)
            stack.enter_context(replace_attributes(engine, checkpoint_engine=loader))
            if _offloads_optimizer_to_nvme(engine):
                filled = patch_swap_loading(
                    engine,
                    folder,
                    loader.load_unread,
                    has_scale=not load_module_only,
                    has_states=not leaves_optimizer,
                )
                stack.enter_context(filled)
            elif leaves_optimizer:
                stack.enter_context(_load_weights_only(engine, folder))
            _, client_state = engine.load_checkpoint(
                str(folder),
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states or leaves_optimizer,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
            _discard_second_partitions(engine)
        raise_on_all_ranks(_find_error(live.files))
        loads_all = load_optimizer_states and not (load_module_only or choice.without_optimizer)
        blocks = iterate_engine(
            engine,
            has_weights=custom_load_fn is None,
            has_masters=loads_all or leaves_optimizer,
            has_slots=loads_all,
        )
        compare_files(blocks, live)
        return live.planned.report.source, client_state


def _offloads_optimizer_to_nvme(engine: Any) -> bool:
    # DeepSpeed before 0.16.9 has no such method; `_refuse_swaps` refuses its optimizers in files.
    method = getattr(engine, "zero_nvme_offload_optimizer", None)
    return method is not None and bool(method())


def _find_batch(engine: Any) -> LiveBatch:
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return LiveBatch(Batch(micro, steps, engine.train_batch_size() // (micro * steps)))


def _discard_second_partitions(engine: Any) -> None:
    # With ``zero_hpz_partition_size``, stage 3 gathers a parameter from such a partition and makes
    # it again if there is none. DeepSpeed 0.19.8 discards only those of trained parameters
    # (``runtime/zero/stage3.py``, ``invalidate_secondary_tensor``).
    for parameter in engine.module.parameters():
        if not parameter.requires_grad and hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None


def refuse_setup(config: Mapping[str, Any]) -> None:
    """Refuse an old DeepSpeed, and a configuration with which it expects files that `split` lacks.

    Raises:
        UnsupportedError: naming the version or the setting.
    """
    from deepspeed import __version__ as version

    from reshard.formats.deepspeed.flat_order import get_section

    if tuple(map(int, version.split(".")[:2])) < (0, 16):  # 0.12.6 trains differently at stage 1
        raise UnsupportedError(
            f"DeepSpeed {version}",
            "is too old to load a checkpoint without files; the oldest is 0.16",
            "update it, or write files with  reshard split --to deepspeed",
        )
    if get_section(config, "checkpoint").get("load_universal"):
        raise UnsupportedError(
            "load_universal",
            "is set in the engine's configuration, so that DeepSpeed expects a universal"
            " checkpoint",
            'remove it from the section "checkpoint": reshard needs no universal checkpoint',
        )
    if get_section(config, "expert_parallel").get("enabled"):
        raise UnsupportedError(
            "expert_parallel",
            "is enabled in the engine's configuration, but reshard does not write AutoEP's files",
            "leave it out of the configuration",
        )


def _refuse_swaps(engine: Any) -> None:
    swaps = getattr(engine.optimizer, "swap_optimizer", False)
    if swaps and not hasattr(engine, "zero_nvme_offload_optimizer"):
        raise UnsupportedError(
            "offload_optimizer",
            "is set to NVMe, and the installed DeepSpeed loads no such optimizer from other files",
            "install DeepSpeed 0.16.9 or later, or write files with  reshard split --to deepspeed",
        )


def _choose_options(
    engine: Any, options: Mapping[str, Any], *, tag: str | None, weights_only: bool
) -> SplitOptions:
    from torch import distributed as dist

    decided = {
        "to": "deepspeed",
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": dist.get_world_size(),
        "dtype": _name_precision(engine),
        "tag": tag,
        "weights_only": weights_only,
    }
    if engine.mp_world_size > 1:
        decided["tp"] = engine.mp_world_size
    # Layers with different numbers of ranks keep those of the source.
    sizes = {m.ep_size for m in engine.module.modules() if hasattr(m, "deepspeed_moe")}
    if len(sizes) == 1:
        decided["ep"] = sizes.pop()
    return SplitOptions(**read_options(options, decided))


def _name_precision(engine: Any) -> str:
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def _list_groups(engine: Any) -> list[dict[str, Any]]:
    """Return the param groups of an engine's optimizer, in the order of its flat partitions.

    The result is empty for an engine with experts, whose optimizer divides the groups itself, and
    for a pipeline, of which each rank has the parameters of one stage. Tensor-parallel ranks have
    parts of the same parameters.

    Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``param_names``), ``zero/stage_1_and_2.py``
    (``bit16_groups``), ``zero/stage3.py`` (``fp16_groups``, of which each is a sub-group),
    ``bf16_optimizer.py`` and ``fp16/``.
    """
    optimizer = engine.optimizer
    live = getattr(optimizer, "param_groups", None)
    is_cut_in_stages = engine.mp_world_size > 1 and engine.pipeline_parallelism
    if not live or engine.has_moe_layers or is_cut_in_stages:
        return []
    params: list[list[Any]] = [group["params"] for group in live]
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        params = getattr(optimizer, name, params)
    if hasattr(optimizer, "sub_group_to_group_id"):
        of_groups: list[list[Any]] = [[] for _ in live]
        for number, members in enumerate(params):
            of_groups[optimizer.sub_group_to_group_id[number]] += members
        if [] in of_groups:  # parameters without elements are in no sub-group
            of_groups[of_groups.index([])] = [
                p for p in engine.module.parameters() if p.requires_grad and not p.ds_numel
            ]
        params = of_groups
    return [{**group, "params": own} for group, own in zip(live, params, strict=True)]


class _MemoryEngine:
    """The part of a ``CheckpointEngine`` that ``load_checkpoint`` uses: it loads from memory."""

    def __init__(self, files: OnDemandFiles, folder: Path, own: Any) -> None:
        self._files = files
        self._folder = folder
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what ``torch.load`` makes of a file.

        Raises:
            UnsafeError: the file names a class that is not known to be safe.
        """
        return load_safely(*self._open(path), map_location)

    def load_unread(self, path: str) -> Any:
        """Return the object in a file, with an `UnreadTensor` for each tensor.

        Raises:
            UnsafeError: the file names a class that is not known to be safe.
        """
        return load_unread(*self._open(path))

    def _open(self, path: str) -> tuple[IO[bytes], str]:
        name = Path(path).relative_to(self._folder).as_posix()
        return self._files.open(name, checks=False), name


@contextmanager
def _load_weights_only(engine: Any, folder: Path) -> Iterator[None]:
    # DeepSpeed itself would gather all weights in fp32 on every rank. Its optimizer can load the
    # fp32 partitions without the state beside them (DeepSpeed 0.19.8 ``zero/stage3.py``,
    # ``_rigid_load_state_dict``); with ``load_module_only`` the engine would skip even that.
    optimizer, own = engine.optimizer, engine._load_zero_checkpoint  # noqa: SLF001 - no public name

    def load_weights(load_dir: str, tag: str, **_: Any) -> Any:
        return own(load_dir, tag, load_optimizer_states=False)

    def restore_weights() -> None:
        scale = {name: getattr(optimizer, name) for name in SCALE if hasattr(optimizer, name)}
        own(str(folder), (folder / "latest").read_text().strip(), load_optimizer_states=False)
        vars(optimizer).update(scale)

    with (
        replace_attributes(engine, _load_zero_checkpoint=load_weights),
        replace_attributes(optimizer, _restore_from_bit16_weights=restore_weights),
    ):
        yield


def _find_error(files: OnDemandFiles) -> ReshardError | None:
    try:
        files.check()
    except ReshardError as error:
        return error
    return None
