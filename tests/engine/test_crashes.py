"""Killed, cut off from power, refused, interrupted: nothing or all is there, and it can go on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from reshard.engine.move import journal
from reshard.engine.output import commit
from reshard.engine.output import local as on_disk
from reshard.engine.output.local import LocalPartial
from reshard.errors import ExistsError
from tests.cli.test_cli import run
from tests.support.directories import read_files
from tests.support.programs import LIMIT_S

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/proc says which file a descriptor is of"
)
ROOT = Path(__file__).resolve().parents[2]
WINDOW = 64 << 10
FAULTS = "tests.support.faults:reshard"
SHAPE = (128, 128)
SMALL = ["--workers", "2", "--max-memory", str(4 * WINDOW)]  # bytes: windows of 64 KiB
MERGE = ["merge", "x.pt", "out", "--max-shard-size", "500KB", "--dtype", "bf16", *SMALL]
SPLIT = ["split", "x.pt", "out", "--to", "deepspeed", "--world-size", "3", *SMALL]
SPLIT += ["--init-optimizer", "zeros", "--param-groups", "groups.json"]
COMMANDS = {"merge": MERGE, "split": SPLIT}
# Packages that the commands import while they run: every child would import them again.
WARM = ("commands", "containers", "engine", "formats", "state_dict", "training")


def list_modules(packages: tuple[str, ...]) -> list[str]:
    """Return the names of all modules of these packages of reshard."""
    files = (path for name in packages for path in sorted((ROOT / "reshard" / name).rglob("*.py")))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return [name.removesuffix(".__init__") for name in names]


class Child:
    """A process that has imported everything, whose children run to their faults (`faults`)."""

    def __init__(self, directory: Path, imported: list[str]) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults", *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def run(self, what: str, arguments: list[object], *, within: str, **fault) -> int:
        places = {name: str(self.directory / name) for name in ("stdout", "stderr", "calls")}
        trial = {"run": what, "arguments": arguments, "fault": fault, "within": within, **places}
        self.process.stdin.write(json.dumps(trial) + "\n")
        self.process.stdin.flush()
        return int(self.answer())

    def end(self) -> None:
        self.process.communicate(timeout=LIMIT_S)

    @property
    def said(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def told(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def calls(self) -> list[list[str]]:
        return json.loads((self.directory / "calls").read_text())


class Lab(Child):
    """Runs of the command line, and what they leave."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ["reshard.cli", "numpy", *list_modules(WARM)])
        torch.manual_seed(0)
        torch.save({f"l.{i}.weight": torch.randn(SHAPE) for i in range(36)}, directory / "x.pt")
        (directory / "groups.json").write_text('[{"lr": 0.001}]')
        self.whole = {}
        for name, command in COMMANDS.items():
            assert self.run([*command[:2], name, *command[3:]]) == 0, self.said
            self.whole[name] = read_files(directory / name)

    def run(self, arguments, *, within=".out.partial", batch=1, **fault) -> int:
        return super().run(FAULTS, [arguments, batch], within=within, **fault)

    def beside(self) -> set[str]:
        own = {"x.pt", "groups.json", "stdout", "stderr", "calls", *COMMANDS}
        return {path.name for path in self.directory.iterdir()} - own

    def clean(self) -> None:
        subprocess.run(["rm", "-rf", "out", ".out.partial"], cwd=self.directory, check=True)


@pytest.fixture(scope="module")
def shared():
    memory = Path("/dev/shm")  # where fsync costs nothing
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        lab = Lab(Path(directory))
        yield lab
        lab.end()


@pytest.fixture
def lab(shared):
    shared.clean()
    yield shared
    shared.clean()


def count(lab, command) -> int:
    """Return how many calls a whole run makes."""
    assert lab.run(command) == 0, lab.said
    number = len(lab.calls)
    lab.clean()
    return number


@pytest.mark.parametrize("kind", ["kill", "torn", "power"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_that_died_anywhere_leaves_nothing_or_all_and_goes_on(lab, name, kind):
    command = COMMANDS[name]
    calls = count(lab, command)
    coin = random.Random(f"{name} {kind}")
    resumed = 0
    for at in sorted(coin.sample(range(calls), 6)):
        died = lab.run(command, kind=kind, at=at, seed=at)
        whole = (lab.directory / "out").exists()
        assert died == -signal.SIGKILL or (died == 0 and whole), (at, lab.said)
        if not whole:  # the journal alone has to be right: what it says is not read back
            assert lab.run([*command, "--resume", "--no-verify"]) == 0, (at, lab.said)
            resumed += "resumed " in lab.told
        assert read_files(lab.directory / "out") == lab.whole[name], at
        lab.clean()
    assert resumed >= 2


def test_a_run_that_dies_again_and_again_comes_to_its_end(lab):
    for step in range(30):
        code = lab.run([*SPLIT, "--resume", "--no-verify"], kind="power", at=200, seed=step)
        if "out" in lab.beside():
            break
    assert step > 1
    assert read_files(lab.directory / "out") == lab.whole["split"]
    assert lab.beside() == {"out"} or code  # the last may have died while it cleaned up


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_overwrite_leaves_the_old_or_the_new(lab, kind):
    command = [*MERGE, "--overwrite"]
    assert lab.run([*MERGE, "--include", r"l\.0\."]) == 0, lab.said
    old = read_files(lab.directory / "out")
    assert lab.run(command) == 0
    last = len(lab.calls)
    for at in range(last - 11, last, 2):
        lab.clean()
        assert lab.run([*MERGE, "--include", r"l\.0\."]) == 0
        lab.run(command, kind=kind, at=at, seed=at)
        assert read_files(lab.directory / "out") in (old, lab.whole["merge"])
        assert lab.run([*command, "--resume"]) == 0, lab.said
        assert read_files(lab.directory / "out") == lab.whole["merge"]
        assert lab.beside() == {"out"}


@pytest.mark.parametrize("name", COMMANDS)
def test_everything_is_durable_before_it_has_its_name(lab, name):
    assert lab.run(COMMANDS[name], within="") == 0
    ours = {str(lab.directory), str(lab.directory / "out")}
    calls = [c for c in lab.calls if c[1] in ours or ".out.partial" in c[1]]
    place = str(lab.directory / ".out.partial")
    named = next(i for i, call in enumerate(calls) if call[0] == "os.rename")
    assert calls[named][1:] == [f"{place}/output", str(lab.directory / "out")]
    for i, (kind, path, *_) in enumerate(calls):
        if not path.startswith(f"{place}/output/"):
            continue
        assert i < named
        where = str(Path(path).parent) if kind in ("create", "os.mkdir") else path
        assert ["fsync", where] in calls[i:named], path
    journal_gone = calls.index(["os.remove", f"{place}/journal"])
    assert ["fsync", place] in calls[journal_gone:named]
    assert calls[named + 1] == ["fsync", str(lab.directory)]


def test_a_line_of_the_journal_comes_after_its_bytes(lab):
    assert lab.run(SPLIT) == 0
    output = f"{lab.directory}/.out.partial/output"
    durable: set[str] = set()
    lines = 0
    for kind, path, *_ in lab.calls:
        if kind == "fsync":
            durable.add(path)
        elif kind == "pwrite" and path.endswith("/journal"):
            lines += 1
            assert any(p.startswith(f"{output}/") for p in durable), "a line vouches for no bytes"
            assert lines > 1 or {output, f"{output}/global_step0"} <= durable, "names may be lost"
            durable.clear()
    assert lines > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_can_be_gone_on_with(lab, number):
    code = lab.run(MERGE, kind="signal", signal=number, at=8, within="/journal")
    assert code == 130, lab.said
    assert "interrupted; nothing was written to " in lab.said
    assert "of finished output are kept in" in lab.said
    assert "pass --resume to continue" in lab.said
    assert lab.beside() == {".out.partial"}
    assert lab.run([*MERGE, "--resume"]) == 0
    assert "of an interrupted run" in lab.told
    assert read_files(lab.directory / "out") == lab.whole["merge"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_signal_while_a_file_is_closed_is_heeded(lab, workers):
    command = [*MERGE, "--workers", workers]
    assert lab.run(command, within="", kind="none", at=-1, only="close") == 0
    calls = [place for _, place in lab.calls]
    sources = [at for at, place in enumerate(calls) if place.endswith("/x.pt")]
    outputs = [at for at, place in enumerate(calls) if place.endswith("001-of-00003.safetensors")]
    assert sources
    for at in (*sources, outputs[-1]):
        lab.clean()
        close = {"only": "close", "within": "", "at": at}
        assert lab.run(command, kind="signal", signal=signal.SIGTERM, **close) == 130, lab.said
        # A thread closes the last one, while the output may get its name already.
        whole = at == outputs[-1] and "was already written completely" in lab.said
        assert whole or "nothing was written to " in lab.said
        assert "Traceback" not in lab.said
        assert ("out" in lab.beside()) == whole


def test_a_signal_before_anything_is_done_leaves_nothing(lab):
    assert lab.run(MERGE, kind="signal", signal=signal.SIGTERM, at=6) == 130
    assert "interrupted; nothing was written to " in lab.said
    assert "--resume" not in lab.said
    assert lab.beside() == set()


def test_a_signal_while_the_output_gets_its_name_waits(lab):
    assert lab.run(MERGE) == 0
    at = next(i for i, call in enumerate(lab.calls) if call[0] == "os.rename")
    lab.clean()
    assert lab.run(MERGE, kind="signal", signal=signal.SIGINT, at=at) == 130
    assert "was already written" in lab.said
    assert read_files(lab.directory / "out") == lab.whole["merge"]
    assert lab.beside() == {"out"}


def test_an_output_whose_name_is_not_made_durable_is_not_told_of_as_if_it_were_not_there(lab):
    one = [*MERGE, "--workers", "1"]
    assert lab.run(one, within="", kind="none", at=-1, only="fsync") == 0
    last = len(lab.calls) - 1
    assert lab.calls[last] == ["fsync", str(lab.directory)]
    lab.clean()
    assert lab.run(one, within="", kind="EIO", at=last, only="fsync") == 4
    assert "could not be made durable: Input/output error" in lab.said
    assert "was already written completely" in lab.said
    assert read_files(lab.directory / "out") == lab.whole["merge"]
    assert lab.beside() == {"out"}


@pytest.mark.parametrize("only", ["os.remove", "os.rmdir", "close"])
def test_an_error_after_the_output_has_its_name_is_a_warning(lab, only):
    one = [*MERGE, "--workers", "1"]
    assert lab.run(one, kind="none", at=-1, only=only) == 0
    last = len(lab.calls) - 1
    lab.clean()
    assert lab.run(one, kind="EIO", at=last, only=only) == 0
    assert read_files(lab.directory / "out") == lab.whole["merge"]
    left = lab.beside() - {"out"}
    assert left == (set() if only == "close" else {".out.partial"})
    assert ("the output is complete, but" in lab.told) == bool(left)


@pytest.mark.parametrize("only", ["os.remove", "os.mkdir", "close"])
def test_an_error_before_the_output_has_its_name_tells_what_is_there(lab, only):
    one = [*MERGE, "--workers", "1"]
    assert lab.run(one, kind="none", at=-1, only=only) == 0
    count = min(len(lab.calls), 12)
    for at in range(count):
        lab.clean()
        code = lab.run(one, kind="EIO", at=at, only=only)
        if code:
            assert "nothing was written to " in lab.said, at
            assert not (lab.directory / "out").exists()
            assert (".out.partial" in lab.beside()) == ("are kept in" in lab.said), at


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ENOSPC", "the disk is full"),
        ("EDQUOT", "the disk is full"),
        ("EFBIG", "the file is too large for the file system"),
    ],
)
def test_a_full_disk_is_told_and_given_back(lab, name, said):
    assert lab.run(SPLIT, kind=name, at=30, only="pwrite") == 4
    assert said in lab.said
    assert lab.beside() == set()


def test_a_full_disk_takes_nothing_from_a_run_that_is_to_go_on(lab):
    assert lab.run(SPLIT, kind="kill", at=9, within="/journal") == -signal.SIGKILL
    assert lab.run([*SPLIT, "--resume"], kind="ENOSPC", at=10, only="pwrite") == 4
    assert "pass --resume to continue" in lab.said
    assert lab.run([*SPLIT, "--resume"]) == 0
    assert read_files(lab.directory / "out") == lab.whole["split"]


@pytest.mark.parametrize("only", ["pwrite", "fsync", "create", "os.mkdir", "os.rename"])
def test_a_disk_that_fails_ends_in_a_message(lab, only):
    assert lab.run(MERGE, kind="EIO", at=0, only=only) in (2, 4)
    assert lab.said.startswith("reshard: ")
    assert "Input/output error" in lab.said
    assert lab.beside() == set()


def test_a_source_that_cannot_be_read_is_told_and_its_work_kept(lab):
    one = [*MERGE, "--workers", "1"]  # the first windows are on the disk then
    code = lab.run(one, kind="EIO", at=8, only="preadv", within="x.pt")
    assert code == 2
    assert "x.pt: cannot be read: Input/output error" in lab.said
    assert "pass --resume to continue" in lab.said
    assert lab.run([*MERGE, "--resume"]) == 0
    assert read_files(lab.directory / "out") == lab.whole["merge"]


@pytest.mark.parametrize("name", COMMANDS)
def test_short_reads_and_writes_are_gone_on_with(lab, name):
    assert lab.run(COMMANDS[name], within="", short=True) == 0
    assert read_files(lab.directory / "out") == lab.whole[name]


def interrupted(lab, command=MERGE) -> Path:
    """Leave what a run leaves that wrote some lines of its journal."""
    assert lab.run(command, kind="kill", at=14, within="/journal") == -signal.SIGKILL
    return lab.directory / ".out.partial"


def test_without_resume_what_a_killed_run_left_goes_and_is_told(lab):
    interrupted(lab)
    assert lab.run(MERGE) == 0
    assert "of an interrupted run were removed from" in lab.told
    assert "resumed" not in lab.told
    assert read_files(lab.directory / "out") == lab.whole["merge"]
    assert lab.beside() == {"out"}


def test_what_was_damaged_meanwhile_is_done_again(lab):
    """Of files that store checksums; of others what was read back and flushed is trusted."""
    place = interrupted(lab, SPLIT)
    for line in (place / "journal").read_text().splitlines()[1:]:
        for name, windows in json.loads(line[9:])["windows"].items():
            with (place / "output" / name).open("r+b") as file:
                file.seek(windows[0][0] + 10)
                file.write(b"?")
    assert lab.run([*SPLIT, "--resume"]) == 0
    assert "had changed and were written again" in lab.told
    assert read_files(lab.directory / "out") == lab.whole["split"]


def test_a_file_that_is_gone_is_made_again(lab):
    place = interrupted(lab)
    first, second = sorted((place / "output").glob("*.safetensors"))[:2]
    first.unlink()
    os.truncate(second, 10)
    assert lab.run([*MERGE, "--resume", "--no-verify"]) == 0
    assert read_files(lab.directory / "out") == lab.whole["merge"]


def test_what_was_gone_once_is_not_trusted_by_a_third_run(lab):
    """The second one makes the file anew, and dies before it is filled."""
    place = interrupted(lab)
    (place / "journal-1").write_bytes((place / "journal").read_bytes())
    gone = min((place / "output").glob("*.safetensors"))
    gone.unlink()
    said = [*MERGE, "--resume"]
    assert lab.run(said, kind="kill", at=0, only="pwrite", within=gone.name) == -signal.SIGKILL
    assert lab.run(said) == 0
    assert read_files(lab.directory / "out") == lab.whole["merge"]


@pytest.mark.parametrize("cut", [1, 7, 100])
def test_a_journal_that_is_cut_off_says_less(lab, cut):
    path = interrupted(lab) / "journal"
    os.truncate(path, path.stat().st_size - cut)
    assert lab.run([*MERGE, "--resume"], kind="kill", at=2, within="/journal") == -signal.SIGKILL
    assert lab.run([*MERGE, "--resume"]) == 0
    assert read_files(lab.directory / "out") == lab.whole["merge"]


def test_journals_of_several_processes_are_read_together(lab):
    place = interrupted(lab)
    lines = (place / "journal").read_bytes().splitlines(keepends=True)
    (place / "journal").write_bytes(b"".join(lines[:3]))
    (place / "journal-1").write_bytes(b"".join([lines[0], *lines[3:]]))
    assert lab.run([*MERGE, "--resume"]) == 0
    assert "resumed" in lab.told
    assert read_files(lab.directory / "out") == lab.whole["merge"]


def test_smaller_windows_go_on_where_larger_ones_stopped(lab):
    more = [*MERGE[:-1], str(16 * WINDOW)]
    assert lab.run(more, kind="kill", at=6, within="/journal") == -signal.SIGKILL
    assert lab.run([*MERGE, "--resume"]) == 0
    assert "resumed" in lab.told
    assert read_files(lab.directory / "out") == lab.whole["merge"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--on-overflow", "clamp"], "on_overflow"),
        (["--dtype", "fp16"], "dtype"),
        (["--max-shard-size", "1MB"], "max_shard_bytes"),
    ],
)
def test_another_job_is_not_gone_on_with_and_takes_nothing_away(lab, change, word):
    interrupted(lab)
    assert lab.run([*MERGE, "--resume", *change]) == 2
    assert f"cannot be resumed: {word} has changed since" in lab.said
    assert lab.run([*MERGE, "--resume"]) == 0
    assert "resumed" in lab.told


@pytest.mark.parametrize("later_ns", [0, 1])
def test_a_source_that_changed_is_not_gone_on_with(lab, later_ns):
    interrupted(lab)
    source = lab.directory / "x.pt"
    status = source.stat()
    source.write_bytes(source.read_bytes())
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + later_ns))
    assert lab.run([*MERGE, "--resume"]) == 2
    assert "x.pt has changed since" in lab.said


def test_a_source_with_another_mode_and_another_link_is_gone_on_with(lab):
    interrupted(lab)
    (lab.directory / "x.pt").chmod(0o600)
    link = lab.directory / "link"
    link.hardlink_to(lab.directory / "x.pt")
    assert lab.run([*MERGE, "--resume"]) == 0
    link.unlink()
    assert "resumed" in lab.told


def test_resume_with_nothing_to_go_on_with_begins(lab):
    assert lab.run([*MERGE, "--resume"]) == 0
    assert "resumed" not in lab.told
    assert read_files(lab.directory / "out") == lab.whole["merge"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_of_two_processes_one_writes_and_the_other_says_so(tmp_path, is_directory):
    (tmp_path / "x.pt").write_bytes(b"")
    out = tmp_path / ("out" if is_directory else "out.safetensors")
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    with commit.stage_output(out, is_directory=is_directory, overwrite=False) as place:
        made = place / ("x.json" if is_directory else out.name)
        made.write_bytes(b"ours")
        done = run("merge", tmp_path / "x.pt", out)
        assert done.returncode == 2
        assert f"is being written by process {os.getpid()} on " in done.stderr
        assert made.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [out.name, "x.pt"]


def test_a_holder_can_remove_its_directory_at_any_moment(tmp_path, monkeypatch):
    first, second = LocalPartial(tmp_path / "out"), LocalPartial(tmp_path / "out")
    first.claim()
    lstat = Path.lstat

    def remove_and_ask(path):
        if path == first.path and first.path.exists():
            first.remove()
            first.release()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", remove_and_ask)
    second.claim()
    second.remove()
    second.release()


def test_many_at_once_leave_one_whole_output(tmp_path):
    outcomes: list[str] = []
    begin = threading.Barrier(8)

    def attempt(number: int) -> None:
        begin.wait()
        try:
            with commit.stage_output(tmp_path / "out", is_directory=True, overwrite=False) as place:
                for name in "ab":
                    (place / name).write_text(str(number))
            outcomes.append(str(number))
        except ExistsError:
            pass

    for _ in range(20):
        threads = [threading.Thread(target=attempt, args=(n,)) for n in range(8)]
        outcomes.clear()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 1
        assert {path.read_text() for path in (tmp_path / "out").iterdir()} == {outcomes[0]}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()


def test_where_nothing_can_be_locked_the_living_are_left_alone(tmp_path, monkeypatch):
    def refuse(_descriptor, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = LocalPartial(tmp_path / "out"), LocalPartial(tmp_path / "out")
    first.claim()
    with pytest.raises(ExistsError, match="no locks"):
        second.claim()
    dead = subprocess.run(["true"], check=True) and {"pid": 2**22 + 1, "host": os.uname().nodename}
    (first.path / "lock").write_text(json.dumps(dead))
    second.claim()
    first.release()
    second.remove()
    second.release()


def test_what_is_not_ours_is_not_cleared(tmp_path):
    (tmp_path / "theirs" / "output").mkdir(parents=True)
    (tmp_path / ".out.partial").symlink_to("theirs")
    with (
        pytest.raises(ExistsError, match="in the way"),
        commit.stage_output(tmp_path / "out", is_directory=True, overwrite=False),
    ):
        raise AssertionError
    assert (tmp_path / "theirs" / "output").exists()


@pytest.mark.parametrize("has_modes", [True, False])
def test_what_others_can_write_to_is_cleared_only_where_all_can(has_modes, tmp_path, monkeypatch):
    """FAT and some network mounts give every directory the same mode."""
    original = Path.mkdir

    def mkdir(path, mode=0o777, **options):
        original(path, mode, **options)
        path.chmod(0o777)

    (tmp_path / ".out.partial" / "output").mkdir(parents=True)
    (tmp_path / ".out.partial").chmod(0o777)
    if not has_modes:
        monkeypatch.setattr(Path, "mkdir", mkdir)
    place = LocalPartial(tmp_path / "out")
    if has_modes:
        with pytest.raises(ExistsError, match="in the way"):
            place.claim()
    else:
        place.claim()
        place.remove()
        place.release()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"] * has_modes


def test_a_replaced_directory_comes_back_where_the_swap_takes_two_steps(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.json").write_text("old")
    monkeypatch.setattr(on_disk, "_exchange", lambda *_: False)
    place = LocalPartial(tmp_path / "out")
    place.claim()
    (tmp_path / "out").rename(place.replaced)  # and then the process died
    place.release()
    with (
        pytest.raises(RuntimeError),
        commit.stage_output(tmp_path / "out", is_directory=True, overwrite=True),
    ):
        raise RuntimeError
    assert read_files(tmp_path) == {"out/old.json": b"old"}
    with commit.stage_output(tmp_path / "out", is_directory=True, overwrite=True) as output:
        (output / "new.json").write_text("new")
    assert read_files(tmp_path) == {"out/new.json": b"new"}


@pytest.mark.parametrize("name", ["EROFS", "EACCES"])
def test_a_directory_that_is_read_only_is_told(lab, name):
    assert lab.run(MERGE, kind=name, at=0) == 2
    assert f"cannot be written to: {os.strerror(getattr(errno, name))}" in lab.said
    assert lab.beside() == set()


def test_every_option_is_known_to_shape_the_output_or_not():
    """A new option counts as one that does, so that no run goes on with another's bytes."""
    from reshard.commands.merge.options import MergeOptions

    shaping = MergeOptions().shaping_output()
    assert {"dtype", "edits", "on_overflow", "replicas", "max_shard_bytes"} <= shaping.keys()
    assert not {"workers", "verify", "resume", "html"} & shaping.keys()
    assert journal.BATCH_BYTES > WINDOW


@pytest.fixture(scope="module")
def saver():
    """Children that save checkpoints as the trainer does, without training."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        child = Child(Path(directory), ["tests.trainer.saving", "torch"])
        yield child
        child.end()


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_saving_that_died_anywhere_leaves_latest_at_a_whole_checkpoint(saver, kind):
    from tests.trainer import saving

    place = saver.directory / "run"
    steps = [str(place), [2, 4, 6, 4], 2]
    assert saver.run("tests.trainer.saving:save", steps, within="/run") == 0, saver.said
    calls = len(saver.calls)
    coin = random.Random(kind)
    for at in sorted(coin.sample(range(calls), 20)):
        shutil.rmtree(place)
        died = saver.run(
            "tests.trainer.saving:save", steps, within="/run", kind=kind, at=at, seed=at
        )
        assert died == -signal.SIGKILL, saver.said
        saving.check(place)
        assert saver.run("tests.trainer.saving:save", [str(place), [8], 2], within="/run") == 0
        assert saving.check(place) == "global_step8"
        assert not list(place.glob(".global_step*"))


def test_a_rank_that_outlives_the_first_keeps_others_out(tmp_path):
    first, other, late = (LocalPartial(tmp_path / "out") for _ in range(3))
    first.claim()
    other.join(1)
    first.release()  # as its death does
    with pytest.raises(ExistsError, match=f"being written by process {os.getpid()}"):
        late.claim()
    other.release()
    late.claim()
    late.remove()
    late.release()
    assert list(tmp_path.iterdir()) == []
