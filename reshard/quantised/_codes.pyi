from typing_extensions import Buffer

def decode(
    codes: Buffer,
    table: Buffer,
    zeros: Buffer,
    scales: Buffer,
    out: Buffer,
    itemsize: int,
    columns: int,
    high: int,
    wide: int,
    code: str,
    /,
) -> int: ...
def encode(
    values: Buffer,
    itemsize: int,
    scales: Buffer,
    codes: Buffer,
    columns: int,
    high: int,
    dtype: str,
    /,
) -> None: ...
def encode_pairs(
    values: Buffer,
    itemsize: int,
    exponents: Buffer,
    codes: Buffer,
    columns: int,
    high: int,
    /,
) -> None: ...
def find_largest(
    values: Buffer, itemsize: int, lines: Buffer, columns: int, high: int, /
) -> None: ...
def compare(
    values: Buffer,
    itemsize: int,
    others: Buffer,
    other_itemsize: int,
    lines: Buffer,
    columns: int,
    high: int,
    /,
) -> None: ...
def compare_codes(
    values: Buffer,
    itemsize: int,
    codes: Buffer,
    table: Buffer,
    scales: Buffer,
    lines: Buffer,
    columns: int,
    high: int,
    dtype: str,
    /,
) -> None: ...
def compare_columns(
    values: Buffer,
    itemsize: int,
    codes: Buffer,
    exponents: Buffer,
    lines: Buffer,
    columns: int,
    high: int,
    /,
) -> None: ...
def transpose(
    matrix: Buffer, columns: int, first: int, out: Buffer, width: int, at: int, /
) -> None: ...
def decode_columns(
    codes: Buffer,
    scales: Buffer,
    out: Buffer,
    height: int,
    first_row: int,
    first_column: int,
    columns: int,
    at: int,
    group: int,
    /,
) -> None: ...
