"""`reshard mount`: a run of real DeepSpeed as a directory that other programs read."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import reshard
from reshard.commands.mount import ComputedBlocks, check_directory
from reshard.errors import UsageError
from tests.support.directories import read_files
from tests.support.ports import find_free_port
from tests.support.programs import LIMIT_S, run_python, run_reshard
from tests.support.sample_tensors import same

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "live.md"
RUN = ROOT / "examples" / "llama-zero3-4ranks"
WEIGHTS = "model.safetensors"
READS_SLOWLY = """
import sys, time
with open(sys.argv[1], "rb", buffering=0) as file:
    file.read(100)
    print("reading", flush=True)
    while True:
        file.seek(0)
        file.read()
"""


@pytest.fixture(scope="module", autouse=True)
def can_mount(tmp_path_factory):
    """Skip without libfuse, the device, or the right to mount (as in most containers)."""
    pytest.importorskip("mfusepy", exc_type=(ImportError, OSError))
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"/dev/fuse cannot be used: {error.strerror}")
    if os.geteuid() == 0:  # other users mount with fusermount3, which has the right
        place = tmp_path_factory.mktemp("any")
        tried = subprocess.run(
            ["mount", "-t", "tmpfs", "none", place], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            pytest.skip(f"nothing can be mounted: {tried.stderr.strip()}")
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def place(tmp_path):
    """Return an empty directory, and unmount it in the end."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    yield directory
    subprocess.run(["umount", "-l", directory], capture_output=True, check=False)


@pytest.fixture
def merged(tmp_path):
    reshard.merge(RUN, tmp_path / "merged")
    return tmp_path / "merged"


@pytest.fixture
def mounted(place):
    """Return (source, options) -> the process of the command once the files are there."""
    with contextlib.ExitStack() as stack:

        def start(source, *words, **options):
            command = [sys.executable, "-m", "reshard", "mount", *map(str, (source, place, *words))]
            program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)
            stack.callback(program.stderr.close)
            stack.callback(program.wait, 30)
            stack.callback(program.kill)
            lines = []
            while not lines or not lines[-1].startswith("mounted "):  # libfuse may warn before
                lines.append(program.stderr.readline())
                assert lines[-1], lines
            return program

        yield start


def is_mounted(place):
    return str(place) in Path("/proc/mounts").read_text()


def test_transformers_and_safetensors_load_the_bits_of_merge(mounted, merged, place):
    from transformers import AutoModelForCausalLM

    mounted(RUN)
    assert read_files(place) == read_files(merged)
    got = AutoModelForCausalLM.from_pretrained(place, dtype="auto").state_dict()
    wanted = AutoModelForCausalLM.from_pretrained(merged, dtype="auto").state_dict()
    assert wanted
    assert all(same(got[fqn], value) for fqn, value in wanted.items())
    with (
        safetensors.safe_open(place / WEIGHTS, "pt") as one,
        safetensors.safe_open(merged / WEIGHTS, "pt") as other,
    ):
        assert set(one.keys()) == set(other.keys())
        assert all(same(one.get_tensor(fqn), other.get_tensor(fqn)) for fqn in set(other.keys()))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_loads_a_dcp_checkpoint(mounted, place, tmp_path):
    reshard.split(RUN, tmp_path / "dcp", to="dcp", world_size=2)
    mounted(RUN, "--to", "dcp", "--world-size", 2)
    assert read_files(place) == read_files(tmp_path / "dcp")
    shapes = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    tensors = {
        fqn: each
        for fqn, each in shapes.items()
        if isinstance(each, dcp.metadata.TensorStorageMetadata)
    }
    got, wanted = (
        {fqn: torch.zeros(each.size, dtype=each.properties.dtype) for fqn, each in tensors.items()}
        for _ in range(2)
    )
    dcp.load(got, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert any(value.any() for value in wanted.values())
    assert all(same(got[fqn], value) for fqn, value in wanted.items())


@pytest.fixture
def served(place):
    """Return the address of an nginx that serves the mounted directory, as docs/live.md shows."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    (example,) = re.findall(r"```nginx\n(.+?)```", PAGE.read_text(), re.DOTALL)
    port = str(find_free_port())
    assert example.count("8080") == example.count("root model;") == 1
    (place.parent / "nginx.conf").write_text(
        example.replace("8080", port).replace("root model;", f"root {place};")
    )
    command = ["nginx", "-p", place.parent, "-c", "nginx.conf"]
    subprocess.run(command, check=True)
    yield f"http://127.0.0.1:{port}"
    subprocess.run([*command, "-s", "stop"], check=True)


def test_nginx_serves_the_bytes_of_merge(mounted, merged, served):
    mounted(RUN)
    wanted = (merged / WEIGHTS).read_bytes()

    def ask(**headers):
        with urlopen(Request(f"{served}/{WEIGHTS}", headers=headers), timeout=LIMIT_S) as answer:
            return answer.status, answer.read()

    assert ask() == (200, wanted)
    assert ask(Range="bytes=5-99") == (206, wanted[5:100])


def test_time_and_inode_change_with_the_source(mounted, place, tmp_path):
    """A web server makes its ETag from them, so no client keeps the previous step's weights."""
    source, codes = tmp_path / "x.safetensors", torch.arange(200, 232, dtype=torch.uint8)

    def look():
        server = mounted(source)
        status = (place / WEIGHTS).stat()
        assert bytes(codes) in (place / WEIGHTS).read_bytes()
        subprocess.run(["umount", place], check=True)
        server.wait(LIMIT_S)
        return status.st_size, int(status.st_mtime), status.st_ino

    seen = []
    for value in (1.0, 2.0):
        tensors = {"a": torch.full((4,), value), "f4": codes.view(torch.float4_e2m1fn_x2)}
        safetensors.torch.save_file(tensors, source)
        seen.append(look())
        assert look() == seen[-1]
        time.sleep(1)
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] < seen[1][1]
    assert seen[0][2] != seen[1][2]


def test_a_layout_with_folders_has_the_names_of_split(mounted, place, tmp_path):
    reshard.split(RUN, tmp_path / "split", to="deepspeed", world_size=2)
    mounted(RUN, "--to", "deepspeed", "--world-size", 2)

    def files(top):
        return {
            path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()
        }

    assert files(place) == files(tmp_path / "split")


def test_parallel_readers_survive_a_killed_one(mounted, merged, place):
    wanted = (merged / WEIGHTS).read_bytes()
    server = mounted(RUN)
    command = [sys.executable, "-c", READS_SLOWLY, str(place / WEIGHTS)]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout.readline() == "reading\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(Path.read_bytes, [place / WEIGHTS] * 2)) == [wanted] * 2
    assert server.poll() is None


def test_writing_is_refused(mounted, place):
    mounted(RUN)
    for write in (
        lambda: (place / "new").write_bytes(b"x"),
        lambda: (place / WEIGHTS).write_bytes(b"x"),
        (place / WEIGHTS).unlink,
        lambda: (place / WEIGHTS).rename(place / "other"),
        lambda: (place / WEIGHTS).chmod(0o777),
        (place / "folder").mkdir,
        lambda: os.truncate(place / WEIGHTS, 1),
        lambda: os.utime(place / WEIGHTS),
    ):
        with pytest.raises(OSError, match="Read-only file system"):
            write()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unmounts(mounted, place, number):
    # Under nohup the tests run with SIGHUP ignored, and the command would ignore it, too.
    server = mounted(RUN, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    server.send_signal(number)
    assert server.wait(LIMIT_S) == 0
    assert not is_mounted(place)
    assert list(place.iterdir()) == []


def test_umount_ends_the_command(mounted, place):
    server = mounted(RUN)
    subprocess.run(["umount", place], check=True)
    assert server.wait(LIMIT_S) == 0
    assert server.stderr.read() == ""


def test_a_server_that_is_killed_leaves_errors_and_can_be_cleaned_up(mounted, place):
    server = mounted(RUN)
    file = os.open(place / WEIGHTS, os.O_RDONLY)
    server.kill()
    server.wait()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is looked at
        os.read(file, 100)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with contextlib.suppress(OSError):  # the kernel cannot tell the server
        os.close(file)
    with pytest.raises(UsageError, match=r"umount -l .*"):
        check_directory(place)
    subprocess.run(["umount", "-l", place], check=True)
    assert list(place.iterdir()) == []
    mounted(RUN)  # the same directory can be used again


def rewrite(path):
    with path.open("r+b") as file:
        file.write(path.read_bytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 100),
        rewrite,
        lambda path: Path(shutil.copy(path, path.with_suffix(".new"))).replace(path),
    ],
)
def test_a_source_that_changes_is_an_error_not_other_bytes(mounted, place, tmp_path, change):
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    server = mounted(run)
    for path in run.rglob("*.pt"):
        change(path)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        (place / WEIGHTS).read_bytes()
    assert caught.value.errno == errno.EIO
    assert (place / "config.json").read_bytes() == (RUN / "config.json").read_bytes()
    server.send_signal(signal.SIGINT)
    assert "was modified or replaced while it was read" in server.stderr.read()


def test_a_relative_source_is_found_by_reads_too(mounted, merged, place):
    mounted(RUN.name, cwd=RUN.parent)
    assert read_files(place) == read_files(merged)


def test_impossible_mounts_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused = {"full": "it contains file", "none": "mkdir -p", "full/file": "choose or create"}
    for name, said in refused.items():
        done = run_reshard("mount", RUN, tmp_path / name)
        assert done.returncode == 2
        assert said in done.stderr


def test_without_libfuse_the_system_package_is_named(tmp_path):
    probe = (
        "import sys, ctypes.util\n"
        "ctypes.util.find_library = lambda _name: None\n"
        "from reshard.cli import main\n"
        f"sys.argv = ['reshard', 'mount', {str(RUN)!r}, {str(tmp_path)!r}]\n"
        "main()\n"
    )
    done = run_python("-c", probe)
    assert done.returncode == 2
    assert "apt install fuse3" in done.stderr


class Zeros:
    """Files of 40 MiB whose blocks are counted as they are computed."""

    def __init__(self):
        self.reads = []
        self.was_read = defaultdict(threading.Event)

    def nbytes(self, _name):
        return 40 << 20

    def read_into(self, name, byte_offset, _target):
        self.reads.append((name, byte_offset))
        time.sleep(0.01)
        self.was_read[byte_offset >> 22].set()

    def check_records(self):
        pass


def open_blocks(mebibytes):
    options = reshard.FilesOptions(max_memory_bytes=mebibytes << 20, workers=2)
    files = Zeros()
    return files, contextlib.closing(ComputedBlocks(files, options))


def test_blocks_are_computed_once_for_all_readers_and_kept_within_the_limit():
    files, opened = open_blocks(16)
    start = threading.Barrier(8)
    with opened as blocks:

        def read(_):
            start.wait()
            return blocks.read("a", 100, 1000)

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, range(8))) == {bytes(1000)}
        assert files.reads == [("a", 0)]
        assert len(blocks.read("a", 0, 40 << 20)) == 40 << 20
        assert len(blocks._kept) <= 2


def test_sequential_reads_find_the_next_blocks_computed():
    files, opened = open_blocks(64)
    with opened as blocks:
        blocks.read("a", 0, 1)
        assert files.reads == [("a", 0)]  # may be the only read
        blocks.read("a", 4 << 20, 1)
        assert files.was_read[2].wait(60)
        assert files.was_read[3].wait(60)
        assert len(files.reads) == 4
        assert len(blocks.read("a", 0, 40 << 20)) == 40 << 20
        assert len(blocks._kept) <= 8
    assert sorted(files.reads) == [("a", block << 22) for block in range(10)]


def test_blocks_ahead_stay_within_the_limit():
    files, opened = open_blocks(24)  # keeps 3 blocks: the reader's, the one before, one ahead
    with opened as blocks:
        for block in range(10):
            blocks.read("a", block << 22, 1 << 22)
            assert len(blocks._kept) <= 3
    assert sorted(files.reads) == [("a", block << 22) for block in range(10)]
