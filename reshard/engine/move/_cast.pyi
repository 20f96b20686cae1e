from typing_extensions import Buffer

def cast(
    source_dtype: str, target_dtype: str, source: Buffer, target: Buffer, /
) -> tuple[int, int]: ...
