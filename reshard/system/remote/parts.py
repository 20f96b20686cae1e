"""The upload of a local file to S3 in parts, several at once, none of which is held in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reshard.system.ranges import RangeStream
from reshard.system.remote.attempts import attempt_patiently
from reshard.system.remote.store import Store

_PARTS_AT_ONCE = 16


class _FilePart(RangeStream):
    """A range of an open file as a stream; requests that are repeated read it again."""

    def __init__(self, descriptor: int, start: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._descriptor = descriptor
        self._start = start

    def __len__(self) -> int:
        return self._nbytes

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._descriptor, wanted, self._start + self._at)
        self._at += len(data)
        return data


def upload_in_parts(
    store: Store, file: Path, url: str, part_nbytes: int, check: Callable[[], None]
) -> None:
    """Upload a file to S3; after an error, its parts are removed from the store.

    Args:
        check: called before each part; it may raise an error to stop the upload.
    """
    from fsspec import asyn

    nbytes = file.stat().st_size
    bucket, key, _ = store.files.split_path(store.name_of(url))
    target = {"Bucket": bucket, "Key": key}

    async def call(method: str, **arguments: Any) -> Any:
        # The public method is not asynchronous.
        request = partial(store.files._call_s3, method, **target, **arguments)  # noqa: SLF001
        return await attempt_patiently(request)

    async def upload_all(descriptor: int) -> None:
        upload_id = (await call("create_multipart_upload"))["UploadId"]
        limit = asyncio.Semaphore(_PARTS_AT_ONCE)

        async def upload_one(start: int) -> dict[str, Any]:
            async with limit:
                check()
                part = _FilePart(descriptor, start, min(part_nbytes, nbytes - start))
                number = start // part_nbytes + 1
                answer = await call("upload_part", UploadId=upload_id, PartNumber=number, Body=part)
                return {"PartNumber": number, "ETag": answer["ETag"]}

        uploads = [asyncio.ensure_future(upload_one(at)) for at in range(0, nbytes, part_nbytes)]
        try:
            parts = {"Parts": await asyncio.gather(*uploads)}
            await call("complete_multipart_upload", UploadId=upload_id, MultipartUpload=parts)
        except BaseException:
            for upload in uploads:
                upload.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)
            await call("abort_multipart_upload", UploadId=upload_id)
            raise

    with file.open("rb") as opened:
        asyn.sync(store.files.loop, upload_all, opened.fileno())
