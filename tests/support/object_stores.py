"""A real S3-compatible server on loopback, behind a proxy that can be told to misbehave."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

import pytest

from reshard.system.remote import attempts, store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama-zero3-4ranks"
DROP, CUT, SLOW = "drop", "cut", "slow"  # or the status to answer with: 500, 503, 403
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
Fault = Callable[[str, str, int], "str | int | None"]  # method, path, number of the request


def none(_method, _path, _number):
    """Do nothing: the proxy passes the request on."""
    return


class Proxy(ThreadingHTTPServer):
    """Passes requests on; ``fault`` says which of them fail, and how."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.fault: Fault = none
        self.seen: list[tuple[str, str]] = []
        self.lock = Lock()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reset(self):
        self.fault = none
        self.seen.clear()

    def handle_error(self, request, client_address):
        """Ignore a client that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it holds a body back for 40 ms after the headers

    def _pass_on(self):
        body = self._body()
        with self.server.lock:
            self.server.seen.append((self.command, self.path))
            number = len(self.server.seen)
        fault = self.server.fault(self.command, self.path, number)
        if fault == DROP:
            self.close_connection = True
            return
        if fault == SLOW:
            time.sleep(0.05)
        if isinstance(fault, int):
            body = _SLOW_DOWN if fault == 503 and self.command != "HEAD" else b""
            self.send_response(fault)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(body))
        behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if fault == CUT:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)
        behind.close()

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            data = self.rfile.read(length := int(self.headers.get("Content-Length") or 0))
            if len(data) < length:
                raise ConnectionAbortedError(
                    "the client was killed: a store keeps no part of a file"
                )
            return data
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 - http.server's names

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture(scope="module", name="proxy")
def started():
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    urllib.request.urlopen(urllib.request.Request(f"{proxy.url}/moto-api/reset", method="POST"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr(attempts, "FIRST_WAIT", 0.01)
        patch.setitem(store._S3["config_kwargs"], "retries", {"total_max_attempts": 1})
        store.get_store.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()  # it holds another module's server
        yield proxy
    store.get_store.cache_clear()
    proxy.shutdown()
    proxy.server_close()
    server.stop()


@pytest.fixture(scope="module", name="files")
def bucket(proxy):
    """Create a bucket with the example run; return the store's own view of the server."""
    files = store.get_store("s3").files
    files.mkdir("bucket")
    files.put(f"{EXAMPLE}/", "bucket/run/", recursive=True)
    return files


@pytest.fixture(autouse=True)
def calm(proxy):
    proxy.reset()
    store.get_store("s3").forget()
    yield
    proxy.reset()


def contents(files, prefix):
    files.invalidate_cache()
    return {name.removeprefix(f"{prefix}/"): files.cat_file(name) for name in files.find(prefix)}
