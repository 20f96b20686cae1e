"""Serve a directory as an S3 store whose every answer waits: its folders are the buckets.

    python benchmarks/slow_store.py DIRECTORY PORT_FILE SECONDS COUNTS

It knows the requests that reshard makes: listings, ranged reads, puts, uploads in parts, copies and
removals; it checks no signature. It writes the port to PORT_FILE. COUNTS counts the reads of
objects, as ``storages.py`` says; COUNTS.kinds has a line for each request.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from storages import Counts

_PARTS = ".parts"  # the folder of unfinished uploads
_TIME = "%Y-%m-%dT%H:%M:%S.000Z"


class Server(ThreadingHTTPServer):
    """The store."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path, seconds: float, counts: Counts) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.seconds = seconds
        self.counts = counts
        self.kinds = counts.path.with_suffix(".kinds").open("w", buffering=1)
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def handle_one_request(self) -> None:
        """Answer a request; a client may go away at any time."""
        try:
            super().handle_one_request()
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True

    def _begin(self) -> tuple[Path, str, dict[str, str]]:
        """Return bucket, key and parameters, after the time that an answer takes."""
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        given = {name: value[0] for name, value in parse_qs(url.query, True).items()}
        kind = "LIST" if self.command == "GET" and not key else self.command
        with self.server.lock:
            span = self.headers.get("Range", "")
            self.server.kinds.write(f"{time.monotonic():.4f} {kind} {self.path} {span}\n")
        time.sleep(self.server.seconds)
        return self.server.root / bucket, key, given

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._answer(status, body.encode(), Content_Type="application/xml")

    def do_HEAD(self) -> None:
        """Describe an object or a bucket."""
        bucket, key, _ = self._begin()
        path = bucket / key
        if not (path.is_file() if key else path.is_dir()):
            self._answer(404)
        elif key:
            found = path.stat()
            when = self.date_time_string(int(found.st_mtime))
            size = str(found.st_size)
            self._answer(200, Content_Length=size, ETag=get_tag(found), Last_Modified=when)
        else:
            self._answer(200)

    def do_GET(self) -> None:
        """List objects, or send a range of one."""
        with (
            self.server.counts.request(self._count_bytes()) if self._is_object() else nullcontext()
        ):
            bucket, key, given = self._begin()
            if key:
                self._send(bucket / key)
            elif "uploads" in given:
                self._answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
            else:
                body = list_objects(bucket, given.get("prefix", ""), given.get("delimiter", ""))
                self._answer(200, body, Content_Type="application/xml")

    def _is_object(self) -> bool:
        return urlsplit(self.path).path.strip("/").count("/") > 0

    def _count_bytes(self) -> int:
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        return int(last) + 1 - int(first) if last else 0

    def _send(self, path: Path) -> None:
        if not path.is_file():
            self._fail(404, "NoSuchKey")
            return
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self.headers.get("If-Match", get_tag(found)) != get_tag(found):
                self._fail(412, "PreconditionFailed")
                return
            first, last = 0, found.st_size - 1
            span = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if span[1]:
                first, last = int(span[0]), min(int(span[2] or last), last)
            self.send_response(206 if span[1] else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("Content-Range", f"bytes {first}-{last}/{found.st_size}")
            self.send_header("ETag", get_tag(found))
            self.send_header("Last-Modified", self.date_time_string(int(found.st_mtime)))
            self.end_headers()
            while first <= last:
                count = last + 1 - first
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, count)

    def do_PUT(self) -> None:
        """Write an object or a part of one, or copy one."""
        body = self._read_body()
        bucket, key, given = self._begin()
        path = bucket / key
        if "uploadId" in given:
            path = bucket / _PARTS / given["uploadId"] / f"{int(given['partNumber']):05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        source = unquote(self.headers.get("x-amz-copy-source", "")).lstrip("/")
        if source:
            shutil.copyfile(self.server.root / source, path)
        elif key:
            path.write_bytes(body)
        tag = get_tag(path.stat())
        what = f"<ETag>{escape(tag)}</ETag>" if source else ""
        self._answer(200, f"<CopyObjectResult>{what}</CopyObjectResult>".encode(), ETag=tag)

    def do_POST(self) -> None:
        """Begin or complete an upload in parts, or remove several objects."""
        body = self._read_body()
        bucket, key, given = self._begin()
        if "uploads" in given:
            number = uuid.uuid4().hex
            (bucket / _PARTS / number).mkdir(parents=True)
            what = f"<UploadId>{number}</UploadId>"
            text = f"<InitiateMultipartUploadResult>{what}</InitiateMultipartUploadResult>"
        elif "uploadId" in given:
            parts = bucket / _PARTS / given["uploadId"]
            (bucket / key).parent.mkdir(parents=True, exist_ok=True)
            with (bucket / key).open("wb") as file:
                for part in sorted(parts.iterdir()):
                    with part.open("rb") as piece:
                        shutil.copyfileobj(piece, file)
            shutil.rmtree(parts)
            tag = escape(get_tag((bucket / key).stat()))
            text = (
                f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
            )
        else:  # ?delete
            for each in body.decode().split("<Key>")[1:]:
                (bucket / each.partition("</Key>")[0]).unlink(missing_ok=True)
            text = "<DeleteResult></DeleteResult>"
        self._answer(200, text.encode(), Content_Type="application/xml")

    def do_DELETE(self) -> None:
        """Remove an object, or abort an upload."""
        bucket, key, given = self._begin()
        if "uploadId" in given:
            shutil.rmtree(bucket / _PARTS / given["uploadId"], ignore_errors=True)
        else:
            (bucket / key).unlink(missing_ok=True)
        self._answer(204)

    def _read_body(self) -> bytes:
        """Return the body of a request, without the frames of ``aws-chunked``."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        parts, at = [], 0
        while True:
            head, _, _ = body[at : at + 200].partition(b"\r\n")
            size = int(head.partition(b";")[0], 16)
            at += len(head) + 2
            if not size:
                return b"".join(parts)
            parts.append(body[at : at + size])
            at += size + 2

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def get_tag(found: os.stat_result) -> str:
    """Return the tag of an object's version."""
    return f'"{found.st_size:x}-{found.st_mtime_ns:x}"'


def list_objects(bucket: Path, prefix: str, delimiter: str) -> bytes:
    """Return the answer to a ListObjectsV2."""
    folder = bucket / prefix.rpartition("/")[0]
    found, folders = [], set()
    paths = folder.iterdir() if delimiter else folder.rglob("*")
    for path in sorted(paths) if folder.is_dir() else ():
        key = path.relative_to(bucket).as_posix()
        if not key.startswith(prefix) or key.startswith(_PARTS):
            continue
        if path.is_dir():
            folders.add(f"{key}/")
        else:
            status = path.stat()
            when = time.strftime(_TIME, time.gmtime(status.st_mtime))
            tag, size = escape(get_tag(status)), status.st_size
            text = f"<Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
            found.append(f"<Contents>{text}<ETag>{tag}</ETag><Size>{size}</Size></Contents>")
    prefixes = [f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in folders]
    inner = "".join(found + (prefixes if delimiter else []))
    head = f"<Name>{bucket.name}</Name><KeyCount>{len(found)}</KeyCount><IsTruncated>false"
    return f"<ListBucketResult>{head}</IsTruncated>{inner}</ListBucketResult>".encode()


if __name__ == "__main__":
    root, port_file, seconds, counts = sys.argv[1:]
    server = Server(Path(root), float(seconds), Counts(Path(counts)))
    Path(port_file).write_text(str(server.server_address[1]))
    server.serve_forever()
