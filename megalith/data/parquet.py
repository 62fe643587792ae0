"""Parquet tables as documents: the text column of each row (behind the extra `parquet`)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megalith.data.errors import DataError

ROWS = 1024
"""Number of rows that are decoded at once."""


def rows(path: Path, field: str, advance_to: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of column `field` of each row, in order, without blank texts; `advance_to` is called with the approximate number of
    bytes read.

    Raises DataError for a table without this text column, a null cell, text that is not UTF-8 (each with the row), and a damaged file."""
    import pyarrow  # an extra
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            _check(table.schema_arrow, path, field)
            size, count, number = path.stat().st_size, table.metadata.num_rows, 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for cell in batch.column(0):
                    number += 1
                    if text := _text(cell, path, number, field):
                        yield text
                advance_to(size * number // max(1, count))
            if number != count:
                raise DataError(f"{path} has {number} rows, but its metadata has {count}", "Copy or download the file again.")
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's error, not the file's
        raise DataError(f"{path} cannot be read as Parquet: {error}", "Copy or download the file again.") from error


def _check(schema: Any, path: Path, field: str) -> None:
    """Raise DataError unless the table has exactly one column named `field`, and this column is text."""
    from pyarrow import types

    columns = [one for one in schema if one.name == field]
    held = ", ".join(f"{one.name} ({one.type})" for one in schema)
    kind = columns[0].type if columns else None
    kind = kind.value_type if kind is not None and types.is_dictionary(kind) else kind
    if len(columns) != 1 or not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{path} has no text column {field!r} (its columns: {held})", "Name the text column with --field.")


def _text(cell: Any, path: Path, number: int, field: str) -> str:
    """Return the text of a cell; empty if it is blank."""
    try:
        text = cell.as_py()
    except UnicodeDecodeError as error:
        wrong = f"byte {error.object[error.start]:#04x} ({error.reason})"
        raise DataError(
            f"{path}, row {number} is not UTF-8 text: {wrong}", "Write the table again with its text in UTF-8."
        ) from error
    if text is None:
        raise DataError(f"{path}, row {number} has no text in column {field!r}: the cell is null", "Take the row out.")
    return text if text.strip() else ""
