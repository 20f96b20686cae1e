"""`resume-check` with programs that behave well and badly: its verdicts, errors and cleaning-up.

The programs stand for training; real ones are in tests/judged/test_resume_check.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import reshard
from reshard.checks import trajectory
from reshard.cli.run import show_program
from reshard.commands import programs
from reshard.commands.resume_check.command import resume_check
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.errors import IncompleteError, NotRunError, ReshardError, UsageError
from tests.html.test_pages import parsed
from tests.support.programs import LIMIT_S
from trainer.checkpoint.state import make_document
from trainer.core.loop import Progress
from trainer.core.scaling import LossScaler
from trainer.resolve import resolve

STEP, MORE = 3, 4
PROGRAM = """
import json, os, sys, time
how, checkpoint, ranks, steps, log = sys.argv[1:6]
at, ranks, resumed = 3, int(ranks), "unbroken" not in log
spoilt = "control" in log
if how == "ignores":
    at = 0
if how == "fails" and resumed:
    print("a line"); sys.exit("no such parameter: 'w'")
if how == "stuck":
    open(os.environ["PID_FILE"], "w").write(str(os.getpid())); time.sleep(600)
if how == "writes":
    open(os.path.join(os.path.dirname(checkpoint), "scratch"), "w").close()
with open(log, "w") as file:
    for step in range(at + 1, at + 1 + int(steps) - (how == "stops" and resumed)):
        loss = 4 / step
        if how == "noisy" and ranks == 1:
            loss *= 1 + 1e-6
        if how == "forgets" and resumed or spoilt and how != "blind":
            loss *= 1.01 ** step
        line = {"step": step, "loss": loss, "loss_hex": loss.hex()}
        if how == "rounds":
            line = {"step": step, "loss": round(loss, 3)}
        file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Save a checkpoint with torch after three steps of AdamW."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEP):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("source") / "checkpoint.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEP}
    torch.save(state, path)
    return path


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def command(how):
        words = "{checkpoint} {world_size} {steps} {log}"
        return f"{sys.executable} {path} {how} {words}"

    return command


def checked(source, command, **options):
    chosen = {"to": ["dcp"], "world_sizes": [1, 2], "steps": MORE, **options}
    return reshard.resume_check(source, command=command, **chosen)


def test_the_same_losses_reach_every_level(source, program):
    report = checked(source, program("same"), require="bitwise")
    assert (report.reached, report.exit_code) == (True, 0)
    found = report.to_dict()
    assert [target["name"] for target in found["targets"]] == ["dcp, 1 rank", "dcp, 2 ranks"]
    for target in found["targets"]:
        assert target["reached"] == {"state": True, "trajectory": True, "bitwise": True}
        assert target["state"]["equal"] == 6
        steps = [point["step"] for point in target["run"]["series"]]
        assert steps == [4, 5, 6, 7]
        assert target["run"]["series"] == found["unbroken"]["series"]
    text = "\n".join(report.lines())
    assert "norms     not compared, because they are not in both logs" in text
    assert "parameter_hash is not in both logs" in text


@pytest.mark.parametrize(
    ("how", "options", "code", "says"),
    [
        ("noisy", {"rtol": 1e-7}, 1, "OUTSIDE the tolerance 1e-07"),
        ("noisy", {"rtol": 1e-5, "require": "bitwise"}, 1, "1e-06"),
        ("forgets", {}, 1, "OUTSIDE the tolerance 1e-06"),
        ("forgets", {"require": "state"}, 0, "OUTSIDE the tolerance 1e-06"),
        ("rounds", {}, 0, ""),
        ("rounds", {"require": "bitwise"}, 1, "in decimals without hex"),
        ("stops", {}, 1, "only one of the two runs logged step 7"),
    ],
)
def test_other_losses_reach_lower_levels(source, program, how, options, code, says):
    report = checked(source, program(how), world_sizes=[2], **options)
    assert report.exit_code == code
    assert says in "\n".join(report.lines())


def test_noise_is_a_trajectory_and_is_measured(source, program):
    (target,) = checked(source, program("noisy"), world_sizes=[2], rtol=1e-5).to_dict()["targets"]
    assert target["reached"] == {"state": True, "trajectory": True, "bitwise": False}
    assert target["trajectory"]["loss"]["max_rel"] == pytest.approx(1e-6, rel=1e-3)


def test_a_program_that_ignores_the_checkpoint_gets_no_verdict(source, program):
    with pytest.raises(IncompleteError, match="did not resume from it"):
        checked(source, program("ignores"))


def test_a_control_that_nothing_notices_takes_the_verdict_away(source, program):
    report = checked(source, program("same"), control=True)
    assert report.reached
    assert report.control.wiped == "exp_avg of weight"
    report = checked(source, program("blind"), control=True)
    assert report.exit_code == 1
    assert "NOT noticed" in "\n".join(report.lines())


def test_weights_alone_have_no_control(program, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(4, 2).state_dict(), path)
    (note,) = checked(path, program("same")).notes
    assert "states no step" in note
    assert "--control" not in note
    with pytest.raises(IncompleteError, match=r"weights.pt: has no optimizer state"):
        checked(path, program("fails"), control=True)


def test_a_run_that_fails_is_told_with_its_last_words(source, program):
    report = checked(source, program("fails"))
    assert report.exit_code == 6
    text = "\n".join(report.lines())
    assert ": COULD NOT RUN: trajectory reached by 0 of 2 layouts" in text
    assert "NOT THE SAME" not in text
    assert "dcp, 1 rank: state; could not run" in text
    assert "ended with exit code 1" in text
    assert "no such parameter: 'w'" in text


def test_a_run_that_differs_outweighs_one_that_could_not_run(source, program):
    report = checked(source, f"{program('forgets')} --", world_sizes=[1])
    assert report.exit_code == 1
    report.targets.append(checked(source, program("fails"), world_sizes=[2]).targets[0])
    assert report.verdict == "not the same"
    assert report.exit_code == 1


def test_an_unbroken_run_that_fails_is_no_verdict(source):
    command = f"{sys.executable} -c import,nothing {{checkpoint}} {{world_size}} {{steps}} {{log}}"
    with pytest.raises(NotRunError, match=r"could not run: .*ended with exit code 1") as caught:
        checked(source, command)
    assert caught.value.exit_code == 6
    assert any("SyntaxError" in line for line in caught.value.output)


@pytest.mark.parametrize(
    "cause",
    [
        "[rank1]: ValueError: a shape",
        "train.py: error: unrecognized arguments: --los",
        "/venv/bin/python3: can't open file 'no.py': [Errno 2] No such file or directory",
        "/venv/bin/python3: No module named train",
    ],
)
def test_a_launcher_s_summary_does_not_hide_why_a_rank_failed(cause, tmp_path):
    text = "\n".join(["usage: train.py", cause, cause, *(f"  rank : {n}" for n in range(30))])
    ended = programs.run([sys.executable, "-c", f"raise SystemExit({text!r})"], tmp_path, LIMIT_S)
    assert ended.last_lines[:2] == (cause, "  rank : 18")


def test_time_and_last_line_of_a_program_are_told(tmp_path, monkeypatch):
    told, seen = [], tmp_path / "seen"

    def watch(seconds, line):
        told.append((seconds, line))
        if line == "two" and len(told) > 1:
            seen.touch()

    monkeypatch.setattr(programs, "_WATCH_EVERY_S", 0.2)
    code = "import os, sys, time\nprint('one')\nprint('two', flush=True)\n"
    code += "while not os.path.exists(sys.argv[1]): time.sleep(0.05)"
    ended = programs.run([sys.executable, "-c", code, str(seen)], tmp_path, LIMIT_S, watch)
    assert ended.exit_code == 0
    assert told[-1][1] == "two"
    times = [0.0, *(seconds for seconds, _ in told)]
    assert all(later - earlier > 0.19 for earlier, later in itertools.pairwise(times))
    slow = f"import time; time.sleep({LIMIT_S})"
    ended = programs.run([sys.executable, "-c", slow], tmp_path, 0.5, lambda *each: None)
    assert ended.timed_out
    assert 0.5 <= ended.seconds < LIMIT_S


def test_where_no_terminal_is_a_line_comes_every_30_seconds(capsys):
    with show_program("dcp, 1 rank", 8) as watch:
        for second in range(1, 65):
            watch(second // 10, float(second), f"step {second}" if second > 40 else "")
    with show_program("dcp, 2 ranks", 8) as watch:
        watch(8, 31.0, "loss 1.5")
    assert capsys.readouterr().err.splitlines() == [
        "dcp, 1 rank: 3 of 8 steps; 30 s; nothing printed yet",
        "dcp, 1 rank: 6 of 8 steps; 60 s; step 60",
        "dcp, 2 ranks: 8 of 8 steps; 31 s; loss 1.5",
    ]


def test_on_a_terminal_a_bar_shows_the_steps_and_disappears(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_program("dcp, 1 rank", 4) as watch:
        watch(1, 1.0, "loss 1.5")
        watch(3, 2.0, "a line\x1b[2J")
    states = terminal.getvalue().split("\r")
    assert any("dcp, 1 rank: 1/4 steps" in state and "loss 1.5" in state for state in states)
    assert any("3/4 steps" in state and "a line" in state for state in states)
    assert "\x1b[2J" not in terminal.getvalue()
    assert not states[-1].strip()


def test_steps_are_counted_in_a_log_that_is_being_written(tmp_path):
    log = tmp_path / "log.jsonl"
    assert trajectory.count_steps(log) == 0
    line = json.dumps({"step": 4, "loss": None})
    log.write_text(f'{line}\n{{"note": 1}}\n7\n{line}\n{line[:-4]}')
    assert trajectory.count_steps(log) == 2


def test_a_run_shows_its_steps_while_it_runs(source, tmp_path):
    """Each step of the program waits until the display has shown the step before."""
    seen = tmp_path / "seen"
    seen.write_text("0")
    code = (
        "import json, pathlib, sys, time\n"
        "log, seen = open(sys.argv[2], 'w'), pathlib.Path(sys.argv[1])\n"
        "for step in (4, 5):\n"
        "    print(json.dumps({'step': step, 'loss': 1.0}), file=log, flush=True)\n"
        "    while seen.read_text() != str(step - 3):\n"
        "        time.sleep(0.02)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    shown = []

    @contextlib.contextmanager
    def meter(name, steps):
        seen.write_text("0")

        def show(done, _seconds, _line):
            shown.append((name, done, steps))
            seen.write_text(str(done))

        yield show

    options = ResumeCheckOptions(
        to=["dcp"],
        steps=2,
        command=f"{sys.executable} {program} {seen} {{log}} {{checkpoint}} {{steps}}",
    )
    assert resume_check(source, options, run_meter=meter).reached
    assert set(shown) >= {(n, d, 2) for n in ("unbroken", "dcp, 1 rank") for d in (1, 2)}


def test_its_page_lays_the_runs_over_each_other_with_the_bits_of_their_logs(
    source, program, tmp_path
):
    report = checked(source, program("noisy"), html=tmp_path / "x.html", control=True).to_dict()
    page = parsed(tmp_path / "x.html")
    runs = [report["unbroken"], *(target["run"] for target in report["targets"])]
    bits = [[float.fromhex(point["loss_hex"]) for point in run["series"]] for run in runs]
    assert [run["loss"] for run in page.section("curves")["runs"]] == bits
    tables = {table["title"]: table["columns"] for kind, table in page.data if kind == "table"}
    levels = {column["title"]: column["values"] for column in tables["Layouts"]}
    programs_run = {column["title"]: column["values"] for column in tables["Runs"]}
    again = "unbroken, weights rounded"
    assert programs_run["Run"] == ["unbroken", "dcp, 1 rank", "dcp, 2 ranks", again, "control"]
    assert programs_run["Steps"] == [MORE] * 5
    assert all("program.py noisy" in command for command in programs_run["Command"])
    assert (levels["Trajectory"], levels["Bitwise"]) == (["yes", "yes"], ["yes", "no"])
    assert "trajectory reached by 2 of 2 layouts" in page.texts


def test_its_page_says_which_run_failed_and_what_nothing_shows(source, program, tmp_path):
    checked(source, program("fails"), html=tmp_path / "x.html")
    texts = parsed(tmp_path / "x.html").texts
    verdict = "could not run: trajectory reached by 0 of 2 layouts"
    assert {verdict, "ended with exit code 1"} <= set(texts)
    assert any("no such parameter: 'w'" in text for text in texts)
    checked(source, program("blind"), html=tmp_path / "y.html", control=True)
    assert any("these steps show nothing" in text for text in parsed(tmp_path / "y.html").texts)


def test_a_program_that_changes_the_source_is_told(source, program, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "checkpoint.pt").write_bytes(source.read_bytes())
    command = program("writes").replace("{checkpoint}", str(place / "x"))
    with pytest.raises(ReshardError, match="the program changed the checkpoint"):
        checked(place, f"{command} {{checkpoint}}")


def test_the_log_of_the_run_that_went_on_stands_for_it(source, program, tmp_path):
    log = tmp_path / "unbroken.jsonl"
    lines = [{"step": n, "loss": 4 / n, "loss_hex": (4 / n).hex()} for n in range(1, 20)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = checked(source, program("same"), unbroken=log, require="bitwise")
    assert report.reached
    assert report.unbroken.command == []
    assert len(report.unbroken.points) == MORE


def test_what_is_kept_and_what_is_not(source, program, tmp_path):
    kept = tmp_path / "kept"
    checked(source, program("same"), keep=kept)
    made = {"unbroken", "unbroken-weights-rounded", "dcp-1-rank", "dcp-2-ranks"}
    assert {path.name for path in kept.iterdir()} == made
    assert (kept / "dcp-2-ranks" / "checkpoint" / ".metadata").is_file()
    assert (kept / "dcp-2-ranks" / "log.jsonl").is_file()
    with pytest.raises(UsageError, match="is not empty"):
        checked(source, program("same"), keep=kept)


def test_placeholders_are_checked_before_anything_runs(source):
    for command, message in (
        ("python x.py {checkpoint} {steps}", "has no {log}"),
        ("python x.py {log} {steps}", "has no {checkpoint}"),
        ("python x.py {log} {checkpoint} {world_size}", "contains neither {steps} nor {until}"),
        ("python x.py {log} {checkpoint} {steps}", "has no {world_size}"),
        ("python x.py {log} {checkpoint} {steps} {ranks}", "is not a placeholder"),
        ("python 'x.py {log}", "cannot be split into words"),
    ):
        with pytest.raises(UsageError, match=message):
            checked(source, command)
    with pytest.raises(UsageError, match="cannot be started"):
        checked(source, "/nowhere/x {checkpoint} {log} {steps} {world_size}")
    with pytest.raises(UsageError, match="not a checkpoint of python -m trainer"):
        checked(source, None)


def test_no_shell_sees_the_command(source, program, tmp_path):
    command = program("same") + f" '; touch {tmp_path}/made' $(touch {tmp_path}/made)"
    assert checked(source, command).reached
    assert not (tmp_path / "made").exists()


def test_a_timeout_ends_the_program(source, program, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid))
    for seconds in (1.0, 4.0, 16.0, 64.0):  # until it has come so far
        with pytest.raises(NotRunError, match="was stopped after"):
            checked(source, program("stuck"), timeout_s=seconds)
        if pid.exists() and pid.read_text():
            break
    assert gone(int(pid.read_text()))


def test_an_interrupt_ends_the_program_and_leaves_nothing(source, program, tmp_path):
    pid, temporary = tmp_path / "pid", tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["resume-check", source, "--to", "dcp", "--command", program("stuck")]

    def default() -> None:  # a runner in the background hands the signal down as ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *map(str, arguments)],
        env={**os.environ, "PID_FILE": str(pid), "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        preexec_fn=default,  # noqa: PLW1509
    )
    until = time.monotonic() + LIMIT_S
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"interrupted" in told
    assert gone(int(pid.read_text()))
    assert list(temporary.iterdir()) == []


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_program_that_does_not_end_when_asked_is_made_to(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "_GRACE_S", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    ended = programs.run([sys.executable, "-c", stubborn], tmp_path, 1.0)
    assert ended.timed_out
    assert ended.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_signal_without_a_name_is_told_by_its_number():
    ended = [
        programs.ProgramResult(-number, 1.0, timed_out=False, last_lines=()) for number in (9, 35)
    ]
    assert [each.describe() for each in ended] == ["was ended by SIGKILL", "was ended by signal 35"]


@pytest.mark.parametrize(
    ("to", "options", "flags"),
    [
        ("deepspeed", {"zero_stage": 0}, "--strategy ddp"),
        ("deepspeed", {"zero_stage": 3}, "--strategy zero3"),
        ("accelerate", {}, "--strategy fsdp2 --state-dict-type sharded"),
        (
            "fsdp",
            {"state_dict_type": "full"},
            "--strategy fsdp --state-dict-type full",
        ),
        (
            "fsdp",
            {"rank_files": True},
            "--strategy fsdp2 --state-dict-type sharded",
        ),
    ],
)
def test_our_trainer_is_told_what_loads_a_layout(source, tmp_path, monkeypatch, to, options, flags):
    place = tmp_path / "run"
    place.mkdir()
    (place / "checkpoint.pt").write_bytes(source.read_bytes())
    settings = resolve({"strategy": "zero2"}, 1)
    progress = Progress(step=STEP, updates=STEP)
    document = make_document(settings, progress, LossScaler(), "")
    (place / "trainer_state.json").write_text(json.dumps(document))
    commands = []

    def run(command, folder, _timeout):
        commands.append(" ".join(command))
        log = Path(command[command.index("--step-log") + 1])
        log.write_text('{"step": 4, "loss": 1.0}\n')
        return programs.ProgramResult(0, 0.0, timed_out=False, last_lines=())

    monkeypatch.setattr(programs, "run", run)
    reshard.resume_check(place, to=[to], world_sizes=[2], steps=1, rtol=1e-3, **options)
    unbroken, resumed = commands
    assert "--strategy" not in unbroken
    assert f"--nproc 2 --steps {STEP + 1}" in resumed
    assert flags in resumed
