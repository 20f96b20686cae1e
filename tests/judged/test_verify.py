"""``reshard verify`` on what frameworks wrote: no false alarm, and one manifest for all layouts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.checks import names
from reshard.core import keys
from reshard.errors import IncompleteError
from tests.judges import deepspeed_judge, library_judge, torch_judge
from tests.support.programs import run_reshard

TARGETS = ("deepspeed", "ds-universal", "dcp", "accelerate", "fsdp2", "torch")
# What a real checkpoint may be warned of: a parameter that the model never uses, running statistics
# that are each rank's own.
EXPECTED = {"zeros", "replicas"}
STRANGE = ("dcp_odd_tensors",)  # holds NaN and infinities on purpose
NOT_READ = ("moe_refused",)


def _torch_cases():
    return [name for name, case in torch_judge.CASES.items() if case.expect == "read"]


def _library_cases():
    return [n for n, case in library_judge.CASES.items() if case.writable]


def unalarmed(path, **told):
    """Verify deeply, and hold that nothing is said that should not be."""
    report = reshard.verify(path, deep=True, **told)
    said = {check.name for check in report.checks if check.status in ("failed", "warned")}
    assert said <= EXPECTED, list(report.lines())
    assert report.exit_code == 0


@pytest.mark.parametrize(
    "case",
    [n for n, c in deepspeed_judge.CASES.items() if c.kind not in NOT_READ and not c.nvme],
)
def test_no_false_alarm_of_deepspeed(made, case):
    unalarmed(made / case / "run")


@pytest.mark.parametrize("case", [n for n in _torch_cases() if n not in STRANGE])
def test_no_false_alarm_of_pytorch(torch_made, case):
    known = torch_judge.CASES[case]
    told = {"model": known.model, "wrap": known.wrap, "key": known.key}
    unalarmed(torch_made / case / "ckpt", **told)


@pytest.mark.parametrize("case", _library_cases())
def test_no_false_alarm_of_libraries(library_case, case):
    known = library_judge.CASES[case]
    told = {"model": known.model, "wrap": known.wrap}
    path = library_case(case) / "ckpt" / known.source
    if "two_models" in case:
        with pytest.raises(reshard.errors.UnrecognisedError, match="--key"):
            reshard.verify(path, **told)
        return
    unalarmed(path, **told)


def test_some_placeholders_of_zero_3_fail(made, tmp_path):
    """What a module gives at stage 3 where nothing gathers it; small ones stay whole there."""
    states = next((made / "hf_z3/run/global_step3").glob("*rank_0*model_states.pt"))
    module = torch.load(states, weights_only=False)["module"]
    module |= {fqn: torch.ones(4) for fqn in module if "norm" in fqn or "mlp" in fqn}
    save_file(module, tmp_path / "model.safetensors")
    hollow = {fqn for fqn, value in module.items() if not value.numel()}
    assert hollow
    check = reshard.verify(tmp_path).check("complete")
    assert {text.split()[0] for text in check.failures} == hollow
    with pytest.raises(IncompleteError, match=f"{len(hollow)} of .* ZeRO-3 placeholders"):
        reshard.merge(tmp_path / "model.safetensors", tmp_path / "out.safetensors")
    rest = keys.Edits(exclude=[f"^{fqn}$".replace(".", r"\.") for fqn in hollow])
    out = tmp_path / "rest.safetensors"
    report = reshard.merge(tmp_path / "model.safetensors", out, edits=rest)
    assert any("ZeRO-3 placeholders" in text for text in report.warnings)
    assert load_file(out).keys() == module.keys() - hollow


@pytest.mark.parametrize("more", [0, 1, -4])
def test_an_index_that_states_another_size_is_warned_of(torch_made, tmp_path, more):
    source = shutil.copytree(torch_made / "plain_index" / "ckpt", tmp_path / "model")
    (path,) = source.glob("*.index.json")
    about = json.loads(path.read_text())
    size = sum(t.nbytes for p in source.glob("*.bin") for t in torch.load(p).values())
    about["metadata"] = {"total_size": size + more}
    path.write_text(json.dumps(about))
    (check,) = [c for c in reshard.verify(source).checks if c.name == names.INDEX]
    text = f"{path.name} states that its files contain {size + more} bytes; they contain {size}"
    assert check.warnings == ([text] if more else [])


@pytest.mark.parametrize(
    ("text", "said"), [('{"weight_map": {"w": "gone.bin"}}', "not exist: gone.bin"), ("{", "JSON")]
)
def test_an_index_that_no_reader_used_is_not_said_to_be_right(torch_made, tmp_path, text, said):
    source = shutil.copytree(torch_made / "plain_index" / "ckpt", tmp_path / "model")
    reshard.merge(source, tmp_path / "out")
    (tmp_path / "out/model.safetensors.index.json").write_text(text)
    (warning,) = reshard.verify(tmp_path / "out").check(names.INDEX).warnings
    assert said in warning


def test_odd_values_are_located(torch_made):
    report = reshard.verify(torch_made / "dcp_odd_tensors/ckpt", deep=True)
    failed = [check.name for check in report.checks if check.status == "failed"]
    assert failed == ["finite"]
    found = report.check("finite").failures
    assert all("special." in text and ".distcp (rank " in text for text in found)
    assert any("[2]" in text and "1 NaN and 2 infinite of 8" in text for text in found)


@pytest.fixture(scope="module")
def listed(made, tmp_path_factory):
    """Return the manifest of a run of 4 ranks in fp16."""
    path = tmp_path_factory.mktemp("manifest") / "z1.json"
    assert reshard.verify(made / "z1_fp16_ws4/run", write_manifest=path).manifest
    return path


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "keep"])
@pytest.mark.parametrize("name", ["model.safetensors", "model"])
def test_a_manifest_of_4_ranks_verifies_what_was_merged(made, listed, tmp_path, dtype, name):
    reshard.merge(made / "z1_fp16_ws4/run", tmp_path / name, dtype=dtype)
    report = reshard.verify(tmp_path / name, against=listed)
    assert report.check("against").status == "passed", list(report.lines())
    assert "weights alone" in report.check("against").looked_at


@pytest.mark.parametrize("to", TARGETS)
def test_a_manifest_of_4_ranks_verifies_every_layout(made, listed, tmp_path, to):
    reshard.split(made / "z1_fp16_ws4/run", tmp_path / "out", to=to, world_size=3)
    report = reshard.verify(tmp_path / "out", against=listed)
    assert report.exit_code == 0, list(report.lines())
    assert not report.check("against").failures


def test_another_run_is_not_what_a_manifest_lists(made, listed):
    check = reshard.verify(made / "z1_fp32_ws3/run", against=listed).check("against")
    assert check.status == "failed"
    assert any("other contents" in text for text in check.failures)


def test_values_of_another_number_of_processes_are_left_out(libraries, tmp_path):
    """Accelerate counts the steps of a scheduler for each process."""
    source, listed = libraries / "acc_fsdp2_sharded/ckpt", tmp_path / "listed.json"
    reshard.verify(source, write_manifest=listed)
    reshard.split(source, tmp_path / "out", world_size=3, rng="derive")
    check = reshard.verify(tmp_path / "out", against=listed, ignore=["^rng$"]).check("against")
    assert [text.split()[0] for text in check.failures] == ["scheduler"]
    assert (check.looked_at.split("; ")[1], check.warnings) == ("differs, but ignored: rng", [])
    ignored = ["^rng$", "^scheduler$"]
    assert reshard.verify(tmp_path / "out", against=listed, ignore=ignored).passed


def test_the_command_line(made, tmp_path):
    def run(*arguments):
        return run_reshard("verify", *arguments)

    source = made / "z2_bf16/run"
    done = run(source)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:-1]] == list(names.QUICK)
    document = json.loads(run(source, "--deep", "--json").stdout)
    assert document["passed"]
    assert document["mode"] == "deep"
    assert [check["name"] for check in document["checks"]] == [*names.QUICK, *names.DEEP]
    assert run(source, "-q").stdout == ""
    assert run(tmp_path / "nowhere").returncode == 2
    assert run(source, "--against", tmp_path / "nowhere").returncode == 2


def test_memory_is_bounded(made, tmp_path):
    """The same answers with blocks of a few kilobytes, by one worker or several."""
    source = made / "z1_bf16/run"
    wanted = reshard.verify(source, deep=True).to_dict()
    for workers in (1, 3):
        held = {"workers": workers, "max_memory_bytes": workers * 128 << 10}
        found = reshard.verify(source, deep=True, **held).to_dict()
        assert found["checks"] == wanted["checks"]
