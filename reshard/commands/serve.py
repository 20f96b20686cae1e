"""``serve``: the files that `merge` or `split` would write, over HTTP, without writing them.

Every byte of a file is computed when a client reads it. Clients see a directory: ``/`` lists the
files, ``/NAME`` is one, with ranges. The paths of the Hugging Face Hub work too, so that
``HF_ENDPOINT=http://host:port`` makes ``from_pretrained("any/name")`` load the checkpoint
(huggingface_hub 1.x ``file_download.py``: ``resolve``, ``X-Repo-Commit``, ``X-Error-Code``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from reshard import formats
from reshard.commands.open_files import FilesOptions, open_files
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import ReshardError, UsageError
from reshard.options import option
from reshard.units import counted

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BLOCK_BYTES = 4 << 20
# No more digits than an offset in a file has: Python refuses to parse thousands of them.
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_RESOLVE = re.compile(r"/[^/]+/[^/]+/resolve/[^/]+/(?P<name>.+)")
_MODEL_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/[^/]+)?")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FilesOptions):
    """The options of ``serve``."""

    host: str = option("127.0.0.1", "Address to listen on.", group="Server")
    port: int = option(8000, "Port; 0 takes a free one.", group="Server", minimum=0, maximum=65535)
    token: str | None = option(
        None,
        "Token that clients must send (Authorization: Bearer TOKEN).",
        group="Server",
        unset="none on this machine, else a new one, which is printed",
    )


def serve(
    source: formats.Paths,
    options: ServeOptions | None = None,
    print_line: Callable[[str], None] = print,
) -> None:
    """Serve the files until an interrupt.

    Args:
        source: a path as for `reshard.open`.

    Raises:
        ReshardError: the source cannot be read, trusted or laid out; or the address is in use.
    """
    options = options or ServeOptions()
    with open_files(source, options) as files, create_server(files, options, print_line) as server:
        host, port = server.server_address[:2]
        count = counted(len(list(files)), "file")
        print_line(f"serving {count} of {options.to} at http://{host!s}:{port}/")
        if server.token and not options.token:
            print_line(f"clients must send the header: Authorization: Bearer {server.token}")
        server.serve_forever()


def create_server(
    files: OnDemandFiles, options: ServeOptions, print_line: Callable[[str], None]
) -> FileServer:
    """Return a server that listens; its `serve_forever` answers requests.

    Raises:
        UsageError: the address cannot be listened on.
    """
    token = options.token
    if token is None and options.host not in _LOOPBACK:
        token = secrets.token_urlsafe(24)
    try:
        return FileServer(files, (options.host, options.port), token or "", print_line)
    except OSError as error:
        raise UsageError(
            f"{options.host}:{options.port}",
            f"the server cannot listen on this address: {error.strerror}",
            "choose another --port, or --port 0",
        ) from error


class FileServer(ThreadingHTTPServer):
    """A read-only server of files; each connection has a thread."""

    daemon_threads = True

    def __init__(
        self,
        files: OnDemandFiles,
        address: tuple[str, int],
        token: str,
        print_line: Callable[[str], None],
    ) -> None:
        self.files = files
        self.token = token
        self.print_line = print_line
        sizes = repr([(name, files.nbytes(name)) for name in files])
        self.revision = hashlib.sha256(sizes.encode()).hexdigest()[:40]
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds; an idle connection ends
    server: FileServer

    def log_message(self, *_args: Any) -> None:
        """Print no line for each request."""

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self._answer(has_content=False)

    def do_GET(self) -> None:
        """Answer with the content."""
        self._answer(has_content=True)

    def _answer(self, *, has_content: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        files = self.server.files
        info, resolved = _MODEL_INFO.fullmatch(path), _RESOLVE.fullmatch(path)
        name = resolved["name"] if resolved else path.removeprefix("/")
        if not self._is_allowed():
            self._send(HTTPStatus.UNAUTHORIZED, b"a token is required\n", has_content=has_content)
        elif info or path == "/":
            document = self._describe_model(info["repo"]) if info else self._list_files()
            self._send(HTTPStatus.OK, json.dumps(document).encode(), has_content=has_content)
        elif name in files:
            self._send_file(name, has_content=has_content)
        else:
            text = f"{name}: no such file\n".encode()
            self._send(HTTPStatus.NOT_FOUND, text, has_content=has_content, code="EntryNotFound")

    def _is_allowed(self) -> bool:
        token, given = self.server.token, self.headers.get("Authorization", "")
        return not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())

    def _list_files(self) -> list[dict[str, Any]]:
        files = self.server.files
        return [{"name": name, "bytes": files.nbytes(name)} for name in files]

    def _describe_model(self, repo: str) -> dict[str, Any]:
        siblings = [{"rfilename": name} for name in self.server.files]
        return {"id": repo, "sha": self.server.revision, "private": False, "siblings": siblings}

    def _send(self, status: HTTPStatus, data: bytes, *, has_content: bool, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if has_content:
            self.wfile.write(data)

    def _send_file(self, name: str, *, has_content: bool) -> None:
        nbytes = self.server.files.nbytes(name)
        span = _parse_range(self.headers.get("Range"), nbytes)
        if span is None:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{nbytes}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start, stop = span
        is_part = self.headers.get("Range") is not None
        self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{nbytes}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        tag = hashlib.sha256(f"{self.server.revision} {name}".encode()).hexdigest()
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", self.server.revision)
        self.end_headers()
        if has_content:
            self._send_range(name, start, stop)

    def _send_range(self, name: str, start: int, stop: int) -> None:
        """Send a range block by block; the client sees an error as a response that is cut off."""
        files = self.server.files
        try:
            for at in range(start, stop, _BLOCK_BYTES):
                data = files.read(name, at, min(_BLOCK_BYTES, stop - at))
                if at + len(data) == stop:
                    # Checked before the last block is sent: no range with an error is complete.
                    files.check_records()
                self.wfile.write(data)
        except ReshardError as error:
            for line in error.lines:
                self.server.print_line(line)
            self.close_connection = True
        except ConnectionError:  # the client has gone
            self.close_connection = True


def _parse_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """Return the first byte and the end of a range, or None if the file does not have it."""
    if header is None:
        return 0, nbytes
    match = _RANGE.fullmatch(header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(nbytes - int(match[2]), 0), nbytes
    else:
        start, stop = int(match[1]), min(int(match[2]) + 1, nbytes) if match[2] else nbytes
    return (start, stop) if start < stop else None
