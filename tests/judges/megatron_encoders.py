"""Save and load BERT and T5 with real Megatron-core on CPUs.

``make_all(out)`` lets both take a step with random gradients and gives a directory a case::

    out/<case>/<form>/      what Megatron-core saved: ``torch`` and ``torch_dist``
    out/<case>/rank<r>.pt   what each rank holds, by the names of the parameters: see ``_hold``

``load_all`` has it load checkpoints and save the same ``rank<r>.pt``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.judges import megatron_worker, ranks, server
from tests.judges.megatron_cases import SEQUENCE, Case, Grid

if TYPE_CHECKING:
    from tests.judges.megatron_run import Run

FORMS = ("torch", "torch_dist")
# Of the family only the sizes count, and that the head is tied.
CASES = {name: Case(name, "gpt2", Grid(tp=2), distributed=True) for name in ("bert", "t5")}
WORKER = "tests.judges.megatron_encoders"

preload = megatron_worker.preload


def make_all(out: Path) -> None:
    """Have Megatron-core train and save both models."""
    _ask(out, CASES)


def load_all(out: Path, cases: Mapping[str, Case]) -> None:
    """Have Megatron-core load checkpoints strictly; the cases are those of ``CASES``, changed."""
    _ask(out, cases)


def _ask(out: Path, cases: Mapping[str, Case]) -> None:
    judge = server.Judge(WORKER, "Megatron-core", cases, like=megatron_worker.__name__)
    judge.make(out, cases, table=dict(cases))


def work(job: ranks.Job, rank: int) -> None:
    """Take a step and save, or load; then save what this rank holds."""
    import torch

    from tests.judges import megatron_files as files
    from tests.judges import megatron_models as models
    from tests.judges.megatron_run import Run

    case = job.told["table"][job.case]
    ranks.join_group(job, rank)
    models.lay_grid(case.grid)
    models._gpt = {"bert": _build_bert, "t5": _build_t5}[case.name]
    run = Run(case)
    if case.start is None:
        for param in run.chunks[0].parameters():
            param.main_grad.normal_()
        run.optimizer.step()
        run.step = 1
        for form in FORMS:
            files.save(run, job.out / form, form)
    else:
        files.load(run, Path(case.start), case.form)
    torch.save(_hold(run), job.out / f"rank{rank}.pt")
    if rank == 0:
        torch.save({}, job.result)


def _hold(run: Run) -> dict[str, dict[str, Any]]:
    """Return name -> the rank's values, and the dim that ranks cut (None: each has the whole)."""
    names = {param: name for name, param in run.models()[0].named_parameters()}
    held = {}
    for optimizer in getattr(run.optimizer, "chained_optimizers", [run.optimizer]):
        groups = zip(
            optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True
        )
        for params, masters in groups:
            for param, master in zip(params, masters, strict=True):
                is_cut = getattr(param, "tensor_model_parallel", False)
                held[names[param]] = {
                    "dim": param.partition_dim if is_cut else None,
                    "param": param.detach().clone(),
                    "master": master.detach().view(param.shape).clone(),
                    "exp_avg": optimizer.optimizer.state[master]["exp_avg"].view(param.shape),
                }
    return held


def _build_bert(case: Case, config: Any, _stage: int) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config,
        2,
        bert_layer_local_spec,
        case.padded_vocabulary,
        SEQUENCE,
        share_embeddings_and_output_weights=True,
    )


def _build_t5(case: Case, config: Any, _stage: int) -> Any:
    from megatron.core.models.T5 import T5Model, t5_spec

    return T5Model(
        config,
        copy.deepcopy(config),
        t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers),
        t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers),
        vocab_size=case.padded_vocabulary,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
    )


if __name__ == "__main__":
    ranks.serve(work, preload)
