"""Arrow IPC streams as shards: data sets saved by Hugging Face's `datasets`, and files of its
cache. A record batch is checked at once; rows are read from the mapped file, so that an opened
batch takes no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.data.corpus.cache import CacheFolders, LocalCopies, OpenThings
from paddle_vl.data.corpus.offset_index import index_of, whole_file
from paddle_vl.data.corpus.table_shard import TableShard, needs_pyarrow
from paddle_vl.data.jsonl import BadSampleError

# Mapped batches that a process keeps.
_batches = OpenThings(1024)
# Marks the end of a stream; only a file that is cut off has none.
_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class ArrowShard(TableShard):
    """Rows of a stream, in record batches."""

    @classmethod
    def opened(
        cls, path: Path, folders: CacheFolders, copies: LocalCopies | None, max_line_bytes: int
    ) -> "ArrowShard":
        """Open a file; only the headers of its batches are read where its sums are known.

        Raises:
            RuntimeError: it is no Arrow stream, damaged, of another layout, or pyarrow is missing.
        """
        arrow = _arrow(path)
        index = index_of(path, folders, lambda: whole_file(path))
        groups, spans = [], []
        try:
            with arrow.memory_map(str(path)) as file:
                # It checks that there is a schema, which `read_schema` does not.
                schema = arrow.ipc.open_stream(file).schema
                begin = file.tell()
                while (message := _next(arrow, file)) is not None:
                    if message.type != "record batch":
                        raise ValueError(f"it has a {message.type}; save the data set again")
                    end = file.tell()
                    batch = arrow.ipc.read_record_batch(message, schema)
                    batch.validate()
                    if batch.get_total_buffer_size() > end - begin:
                        raise ValueError("its batches are compressed: save it without compression")
                    groups.append(batch.num_rows)
                    spans.append((begin, end))
                    begin = end
                file.seek(begin)
                if file.read(len(_END)) != _END:
                    raise ValueError("it ends early")
        except (OSError, EOFError, ValueError, arrow.ArrowException) as error:
            raise RuntimeError(
                f"data file {path} is no whole Arrow stream ({error}): fetch or save it again"
            ) from error
        return cls(
            str(path), tuple(groups), index.sums, index, copies, max_line_bytes, tuple(spans)
        )

    def group(self, number: int) -> Any:
        return _batches.get((self.path, self.sums, number), lambda: self._batch(number))

    def _batch(self, number: int) -> tuple[Any, Callable[[], None]]:
        self.check_sums(number)
        path = Path(self.path)
        arrow = _arrow(path)
        local = self.path if self.copies is None else self.copies.file(path)
        try:
            with arrow.memory_map(local) as file:
                schema = arrow.ipc.open_stream(file).schema
                file.seek(self.spans[number][0])
                batch = arrow.ipc.read_record_batch(arrow.ipc.read_message(file), schema)
            # Offsets that lie would be read beyond the end of the file.
            batch.validate(full=True)
        except (OSError, EOFError, ValueError, arrow.ArrowException) as error:
            raise BadSampleError(
                "unreadable_sample", f"record batch {number + 1} cannot be read: {error}"
            ) from error
        return batch, lambda: None


def _next(arrow: Any, file: Any) -> Any:
    try:
        return arrow.ipc.read_message(file)
    except EOFError:
        return None


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise needs_pyarrow(path, "an Arrow file") from error
    return pyarrow
