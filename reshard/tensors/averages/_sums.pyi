from typing_extensions import Buffer

def average(
    values: Buffer, dtypes: str, factors: Buffer, divisor: float, means: Buffer, /
) -> bool: ...
