"""What the pages of a Parquet file state about their size.

A reader makes room for what a page's header states, however few bytes are stored, and the file's
footer may state less. Headers are structs of Thrift's compact protocol.

Source: https://parquet.apache.org/docs/file-format/data-pages/ (parquet.thrift, PageHeader) and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

# Offset, level and validity of a value, at least.
VALUE_BYTES = 8
# Fields of PageHeader, and of the headers of data and dictionary pages in it.
_UNPACKED, _STORED, _NUM_VALUES = 2, 3, 1
_DICTIONARY = 7
_PAGE_KINDS = (5, _DICTIONARY, 8)
# Types of pyarrow that older versions do not have, and those with the same values.
_VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}


def stated_size(path: Path, metadata: Any, group: int) -> tuple[int, list[str]]:
    """Bytes that reading a row group takes by its pages' headers, entries of dictionaries once; and
    the columns of byte strings with a dictionary.

    Args:
        metadata: pyarrow's, of the file.

    Raises:
        ValueError: the pages are damaged.
    """
    total, packed = 0, []
    row_group = metadata.row_group(group)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number in range(row_group.num_columns):
            column, described = row_group.column(number), metadata.schema.column(number)
            starts = column.dictionary_page_offset, column.data_page_offset
            at = min(start for start in starts if start is not None)
            end = at + column.total_compressed_size
            if not 0 < at <= end <= len(data):
                raise ValueError(f"column {described.path} lies at bytes {at} to {end} of the file")
            # Values of fixed length can stand in a dictionary too.
            width = max(VALUE_BYTES, described.length)
            header = _Header(data, at)
            while header.at < end:
                page = header.struct()
                size, stored = page.get(_UNPACKED), page.get(_STORED)
                kinds = [page[kind] for kind in _PAGE_KINDS if isinstance(page.get(kind), dict)]
                count = kinds[0].get(_NUM_VALUES) if kinds else None
                numbers = [number for number in (size, stored, count) if type(number) is int]
                if len(numbers) < 3 or min(numbers) < 0:
                    raise ValueError(f"a page of column {described.path} is damaged")
                total += numbers[0] + numbers[2] * width
                if _DICTIONARY in page and column.physical_type == "BYTE_ARRAY":
                    packed.append(described.path)
                header.at += numbers[1]
    return total, packed


def unpacked_bytes(column: Any) -> int:
    """Bytes of pyarrow's column, chunked or not, if dictionaries and views were written out."""
    import pyarrow.compute
    from pyarrow import chunked_array, types

    # Its functions are made when it is imported.
    compute: Any = pyarrow.compute
    kind, chunks = column.type, getattr(column, "chunks", [column])
    if types.is_struct(kind):
        return sum(map(unpacked_bytes, column.flatten()))
    if types.is_map(kind):
        parts = [part for chunk in chunks for part in (chunk.keys, chunk.items)]
        return sum(unpacked_bytes(chunked_array([part])) for part in parts)
    if hasattr(kind, "value_field"):
        return unpacked_bytes(compute.list_flatten(column))
    if str(kind) in _VIEWS:
        return sum(map(_bytes_of_views, chunks))
    if not types.is_dictionary(kind):
        return column.nbytes
    total = 0
    for chunk in chunks:
        lengths = compute.binary_length(chunk.dictionary).cast("int64")
        total += chunk.indices.nbytes
        total += compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
    return total


def _bytes_of_views(column: Any) -> int:
    # Views of 16 bytes begin with the length.
    lengths = np.frombuffer(column.buffers()[1] or b"", "<i4")[::4]
    own = lengths[column.offset : column.offset + len(column)]
    return int(own[np.asarray(column.is_valid())].sum(dtype=np.int64)) + 16 * len(column)


def plain_type(kind: Any) -> Any:
    """pyarrow's type without dictionaries and views (polars has both), to which it cannot cast
    columns that were read with their dictionaries."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if (name := str(kind)) in _VIEWS:
        return getattr(pyarrow, _VIEWS[name])()
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(plain_type(field.type)) for field in fields])
    if types.is_map(kind):
        return pyarrow.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if hasattr(kind, "value_field"):
        inner = kind.value_field.with_type(plain_type(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pyarrow.list_(inner, kind.list_size)
        # pyarrow 26 casts a view to a list with offsets of the same width wrongly.
        is_large_view = name.startswith("large_list_view")
        return pyarrow.list_(inner) if is_large_view else pyarrow.large_list(inner)
    return kind


class _Header:
    """Reads structs of integers, byte strings and structs."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def struct(self) -> dict[int, Any]:
        """Values by the numbers of their fields."""
        found: dict[int, Any] = {}
        field = 0
        try:
            while kind := self._byte():
                field = field + (kind >> 4) if kind >> 4 else self._integer()
                found[field] = self._value(kind & 15)
        except (IndexError, RecursionError) as error:
            raise ValueError("a page's header is damaged") from error
        return found

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            length = self._varint()
            self.at += length
            return None
        if kind == 12:
            return self.struct()
        raise ValueError(f"a page's header has a field of type {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value, shift = value | (byte & 127) << shift, shift + 7
            if shift > 63:
                raise ValueError("a page's header has a number of more than 64 bits")
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
