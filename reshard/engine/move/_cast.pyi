from collections.abc import Callable

from typing_extensions import Buffer

def cast(
    source_dtype: str, target_dtype: str, source: Buffer, target: Buffer, /
) -> tuple[int, int]: ...
def read(
    source_dtype: str,
    target_dtype: str,
    descriptor: int,
    byte_offset: int,
    target: Buffer,
    piece: Buffer,
    checksum: Callable[[Buffer, int], int] | None,
    crc: int | None,
    /,
) -> tuple[int, int, int | None] | None: ...
