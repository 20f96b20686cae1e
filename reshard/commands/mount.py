"""``mount``: the files that `merge` or `split` would write, in a directory, without writing them.

The directory is a file system in user space (FUSE). Every byte is computed when a program reads
it. The mount is read-only for the kernel too, which refuses all writing by itself (EROFS).
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from reshard import formats
from reshard.commands.open_files import FilesOptions, open_files
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import ReshardError, UsageError
from reshard.system.paths import is_remote
from reshard.units import counted

_BLOCK_BYTES = 4 << 20  # computed at once; the kernel asks for 128 KiB
_DEVICE = "/dev/fuse"
_INSTALL = "install libfuse (Debian and Ubuntu: apt install fuse3; Fedora: dnf install fuse3)"
_ENDED_BY_SIGNAL = 8  # result of fuse_main after a signal (libfuse 3 helper.c); libfuse 2 returns 0
_MOST_THREADS = 16
_Key = tuple[str, int]  # a block: its file, and its number in the file
_KEPT_S = 86400  # seconds that the kernel keeps names and sizes, which never change


def mount(
    source: formats.Paths,
    directory: Path,
    options: FilesOptions | None = None,
    print_line: Callable[[str], None] = print,
) -> None:
    """Mount the files until an interrupt, or until the directory is unmounted.

    Args:
        source: a path as for `reshard.open`.
        directory: an empty directory.

    Raises:
        ReshardError: the source cannot be read, trusted or laid out, or nothing can be mounted at
            the directory.
    """
    options = options or FilesOptions()
    check_directory(directory)
    fuse = _import_fuse()
    _check_device()
    with open_files(source, options) as files, closing(ComputedBlocks(files, options)) as blocks:
        count = counted(len(list(files)), "file")
        greeting = f"mounted {count} of {options.to} at {directory}"
        operations = FileOperations(files, blocks, print_line, f"{greeting}; Ctrl-C unmounts them")
        with _unmount_at_signals():
            _run(fuse, operations, directory)


def check_directory(directory: Path) -> None:
    """Check that a directory is there and empty.

    Raises:
        UsageError: it is not.
    """
    if is_remote(str(directory)):
        raise UsageError(directory, "is a URL; a mount needs a directory of this machine")
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError as error:
        remedies = {
            errno.ENOENT: f"create it: mkdir -p {directory}",
            # Its process was killed.
            errno.ENOTCONN: "an earlier mount still occupies it; remove that mount:"
            f" umount -l {directory}",
        }
        raise UsageError(
            directory,
            f"expected an empty directory: {error.strerror}",
            remedies.get(error.errno or 0, "choose or create another directory"),
        ) from error
    if names:
        problem = f"expected an empty directory; it contains {names[0]}"
        raise UsageError(directory, problem, "choose or create another directory")


def _import_fuse() -> Any:
    try:
        import mfusepy
    except (OSError, AttributeError) as error:  # missing; of another version
        raise UsageError("libfuse", f"cannot be loaded: {error}", _INSTALL) from error
    return mfusepy


def _check_device() -> None:
    if sys.platform != "linux":
        return
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise UsageError(
            _DEVICE,
            f"cannot be used: {error.strerror}",
            "load the kernel module: modprobe fuse; let users open the device: chmod 666 /dev/fuse;"
            " give a container the device and the right to mount: docker run --device /dev/fuse"
            " --cap-add SYS_ADMIN; or write the files with merge or split",
        ) from error


def _run(fuse: Any, operations: FileOperations, directory: Path) -> None:
    bounded: dict[str, int] = {}
    if (fuse.fuse_version_major, fuse.fuse_version_minor) >= (3, 12):  # older ones have no option
        bounded = {"max_threads": _MOST_THREADS, "max_idle_threads": _MOST_THREADS}
    try:
        fuse.FUSE(
            operations,
            str(directory.resolve()),
            foreground=True,
            ro=True,
            fsname="reshard",
            kernel_cache=True,
            use_ino=True,
            entry_timeout=_KEPT_S,
            attr_timeout=_KEPT_S,
            **bounded,
        )
    except RuntimeError as error:
        if error.args != (_ENDED_BY_SIGNAL,):
            problem = f"cannot be mounted: libfuse failed with code {error}; its message is above"
            raise UsageError(
                directory, problem, f"{_INSTALL}; it needs fusermount3 unless you are root"
            ) from error


@contextmanager
def _unmount_at_signals() -> Iterator[None]:
    # libfuse then unmounts, and returns. It replaces only handlers that are the default.
    replaced = {}
    with suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                replaced[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


class ComputedBlocks:
    """Blocks of files, each computed once for all readers that want it at the same time.

    The blocks that were read last are kept, up to half of ``--max-memory``; the other half is for
    computing blocks, as many at a time as there are workers. While a file is read from one block
    to the next, the blocks that follow are computed ahead of the reader, one for each worker.
    """

    def __init__(self, files: OnDemandFiles, options: FilesOptions) -> None:
        self._files = files
        self._most = max(options.max_memory_bytes // 2 // _BLOCK_BYTES, 1)
        self._kept: OrderedDict[_Key, Future[mmap.mmap]] = OrderedDict()
        self._computed: dict[str, set[int]] = defaultdict(set)
        self._lock = threading.Lock()
        workers = options.budget()[0]
        self._free_workers = threading.BoundedSemaphore(workers)
        # A reader's block, the one before it and those ahead of it must be kept together.
        self._ahead = max(min(workers, self._most - 2), 0)
        self._threads = ThreadPoolExecutor(workers)

    def close(self) -> None:
        """Stop computing blocks that nobody has asked for."""
        self._threads.shutdown(cancel_futures=True)

    def read(self, name: str, byte_offset: int, nbytes: int) -> bytes:
        """Return a range of a file; shorter at its end."""
        stop = min(byte_offset + nbytes, self._files.nbytes(name))
        pieces = []
        while byte_offset < stop:
            index, start = divmod(byte_offset, _BLOCK_BYTES)
            size = min(stop - byte_offset, _BLOCK_BYTES - start)
            pieces.append(self._find(name, index)[start : start + size])  # a copy
            byte_offset += size
        return b"".join(pieces)

    def _find(self, name: str, index: int) -> mmap.mmap:
        key = name, index
        with self._lock:
            block, is_new = self._keep(key)
            ahead = self._keep_ahead(name, index)
        for following, future in ahead:
            self._threads.submit(self._fulfil, following, future)
        return self._fulfil(key, block) if is_new else block.result()

    def _keep(self, key: _Key) -> tuple[Future[mmap.mmap], bool]:
        """Return the block and whether the caller must compute it; the caller holds the lock."""
        is_new = key not in self._kept
        block = self._kept.setdefault(key, Future())
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return block, is_new

    def _keep_ahead(self, name: str, index: int) -> list[tuple[_Key, Future[mmap.mmap]]]:
        """Return the blocks to compute ahead of a reader; the caller holds the lock."""
        if (name, index - 1) not in self._kept:  # not a sequential read
            return []
        last = (self._files.nbytes(name) - 1) // _BLOCK_BYTES
        keys = [(name, number) for number in range(index + 1, min(index + self._ahead, last) + 1)]
        return [(key, self._keep(key)[0]) for key in keys if key not in self._kept]

    def _fulfil(self, key: _Key, block: Future[mmap.mmap]) -> mmap.mmap:
        """Compute a block for all that wait for it; after an error, the next reader tries again."""
        try:
            with self._free_workers:
                block.set_result(self._compute(*key))
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is block:
                    del self._kept[key]
            block.set_exception(error)
            raise
        return block.result()

    def _compute(self, name: str, index: int) -> mmap.mmap:
        """Compute a block; the last one of a file, in any order, is returned only after a check."""
        start = index * _BLOCK_BYTES
        # A mapping is given back to the system at once; malloc keeps what many threads have freed.
        block = mmap.mmap(-1, min(_BLOCK_BYTES, self._files.nbytes(name) - start))
        with memoryview(block) as target:
            self._files.read_into(name, start, target)
        with self._lock:
            computed = self._computed[name]
            computed.add(index)
            is_last = len(computed) * _BLOCK_BYTES >= self._files.nbytes(name)
        if is_last:
            try:
                self._files.check_records()
            except ReshardError:
                with self._lock:
                    computed.discard(index)
                raise
        return block


class FileOperations:
    """The operations of the mounted directory (`mfusepy.Operations`, without inheriting it).

    mfusepy leaves out the operations that are not here; those that write never reach a read-only
    mount.

    Args:
        print_line: called with a line for the user: the reason of each error.
        greeting: the line that follows the mount.
    """

    use_ns = True  # times are integers

    def __init__(
        self,
        files: OnDemandFiles,
        blocks: ComputedBlocks,
        print_line: Callable[[str], None],
        greeting: str,
    ) -> None:
        self._files = files
        self._blocks = blocks
        self._print_line = print_line
        self._greeting = greeting
        self._last_printed: list[str] = []
        self._mounted_ns = time.time_ns()
        self._folders = _list_folders(files)
        self._working_directory = Path.cwd()

    def init(self, _path: str) -> None:
        """Tell the user that the files are there."""
        os.chdir(self._working_directory)  # libfuse went to /, and paths of sources may be relative
        self._print_line(self._greeting)

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, Any]:
        """Return the type, size, owner and times of a file or directory.

        Time and inode number are those of the content: they change with the source, so that web
        servers and other caches do not take a file for that of an earlier save.

        Raises:
            OSError: there is none.
        """
        name = path.strip("/")
        tag, changed_ns = sha256(name.encode()).digest(), 0
        if name in self._files:
            mode, nbytes, links = stat.S_IFREG | 0o444, self._files.nbytes(name), 1
            tag = self._files.compute_tag(name)
            # The other files were read from documents, whose versions are not known.
            changed_ns = self._files.changed_ns if self._files.has_tensors(name) else 0
        elif name in self._folders:
            mode, nbytes, links = stat.S_IFDIR | 0o555, 0, 2
        else:
            raise OSError(errno.ENOENT, path)
        inode = {"st_ino": int.from_bytes(tag[:7], "little")}
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), changed_ns or self._mounted_ns)
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        blocks = -(-nbytes // 512)  # POSIX counts blocks of 512 bytes
        size = {"st_size": nbytes, "st_blocks": blocks, "st_nlink": links}
        return {"st_mode": mode, **inode, **size, **owner, **times}

    def readdir(self, path: str, _handle: int) -> list[tuple[str, dict[str, Any], int]]:
        """Return the names in a directory, with their types and inode numbers."""
        folder = path.strip("/")
        own = self.getattr(folder)
        names = self._folders[folder]
        inside = [(name, self.getattr(f"{folder}/{name}"), 0) for name in names]
        return [(".", own, 0), ("..", own, 0), *inside]

    def open(self, _path: str, _flags: int) -> int:
        """Return a handle, which is not used: reads come with the path."""
        return 0

    def read(self, path: str, nbytes: int, byte_offset: int, _handle: int) -> bytes:
        """Return a range of a file.

        Raises:
            OSError: it cannot be computed.
        """
        try:
            return self._blocks.read(path.strip("/"), byte_offset, nbytes)
        except ReshardError as error:
            self._print_once(error.lines)
            raise OSError(errno.EIO, str(error)) from error

    def statfs(self, _path: str) -> dict[str, int]:
        """Return the size of the file system, which has no free space."""
        nbytes = sum(map(self._files.nbytes, self._files))
        size = {"f_bsize": _BLOCK_BYTES, "f_frsize": 512, "f_blocks": -(-nbytes // 512)}
        return {**size, "f_files": len(list(self._files)), "f_namemax": 255}

    def _print_once(self, lines: list[str]) -> None:
        """Print lines, unless they were the last ones: the kernel repeats reads that fail."""
        if lines != self._last_printed:
            self._last_printed = lines
            for line in lines:
                self._print_line(line)


def _list_folders(files: OnDemandFiles) -> dict[str, list[str]]:
    """Return the names in each folder of the files; the topmost is the empty name."""
    folders: dict[str, dict[str, None]] = {"": {}}
    for name in files:
        while name:
            folder, _, base = name.rpartition("/")
            folders.setdefault(folder, {})[base] = None
            name = folder  # noqa: PLW2901 - up to the topmost folder
    return {folder: list(names) for folder, names in folders.items()}
