"""What a row group of a Parquet file will take in memory, from the headers of its pages.

A reader believes these headers: it makes room for the size that a page states, however few bytes
are stored, and for its number of values. The file's footer may say less. Headers are structs of
Thrift's compact protocol.

Source: https://parquet.apache.org/docs/file-format/data-pages/ (parquet.thrift, PageHeader) and
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md.
"""

import mmap
from pathlib import Path
from typing import Any

# Fields of PageHeader, and of the headers of data and dictionary pages in it.
_UNPACKED, _STORED, _NUM_VALUES = 2, 3, 1
_DICTIONARY = 7
_PAGE_KINDS = (5, _DICTIONARY, 8)
# Offset, level and validity of a value, at least.
_VALUE_BYTES = 8


def stated_size(path: Path, metadata: Any, group: int) -> tuple[int, list[str]]:
    """Bytes that reading a row group takes by its pages' headers, entries of dictionaries once; and
    the columns of byte strings with a dictionary.

    Args:
        metadata: pyarrow's, of the file.
        group: number of the row group.

    Raises:
        ValueError: the pages are damaged.
    """
    total, packed = 0, []
    row_group = metadata.row_group(group)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number in range(row_group.num_columns):
            column, described = row_group.column(number), metadata.schema.column(number)
            starts = column.dictionary_page_offset, column.data_page_offset
            header = _Header(data, min(start for start in starts if start))
            is_text = column.physical_type == "BYTE_ARRAY"
            # Values of fixed length can stand in a dictionary too.
            width = max(_VALUE_BYTES, described.length)
            end = min(header.at + column.total_compressed_size, len(data))
            while header.at < end:
                page = header.struct()
                size, stored = page.get(_UNPACKED), page.get(_STORED)
                kinds = [page[kind] for kind in _PAGE_KINDS if kind in page]
                count = kinds[0].get(_NUM_VALUES) if kinds and isinstance(kinds[0], dict) else None
                numbers = [number for number in (size, stored, count) if type(number) is int]
                if len(numbers) < 3 or min(numbers) < 0:
                    raise ValueError(f"a page of column {described.path} is damaged")
                total += numbers[0] + numbers[2] * width
                if _DICTIONARY in page and is_text:
                    packed.append(described.path)
                header.at += numbers[1]
    return total, packed


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
