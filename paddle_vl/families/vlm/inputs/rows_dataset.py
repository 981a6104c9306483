"""Dataset of conversations in a mixture of files of any kind.

When it is opened the first rows of each source are read and checked, so that a million rows start
in seconds; others are when they are loaded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from paddle_vl.config.row_sources import RowSourceConfig, Strategy
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import unread_keys
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError, FileContent, OnBadSample
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import open_source
from paddle_vl.families.vlm.inputs.dataset import ConversationData, checked, tell_unread
from paddle_vl.families.vlm.inputs.processor import VLProcessor

# Rows of each source that are read when it is opened.
_CHECKED_ROWS = 100


class RowsDataset(ConversationData):
    """Samples of a mixture of sources: the rows that it draws, in their order.

    Attributes:
        skipped: empty; bad rows are found when they are loaded.
        contents: hashes of every source.
    """

    def __init__(
        self,
        sources: Sequence[RowSourceConfig],
        processor: VLProcessor,
        max_length: int | None = None,
        on_bad_sample: OnBadSample = "fail",
        *,
        readers: Sequence[RowReader],
        strategy: Strategy = "concat",
        seed: int = 0,
        opener: ShardOpener | None = None,
        fetch: Callable[[str], Path] = Path,
    ):
        """Open the files of the sources, and read their first rows.

        Args:
            readers: of the rows of each source.
            strategy, seed: see `paddle_vl.data.rows.mixture.draws_of`.
            fetch: gives the local path of a source's path.

        Raises:
            RuntimeError: a file does not exist, or is damaged.
            BadSampleError: with "fail", one of the first rows cannot be used.
            ValueError: a source has no rows, or they cannot be mixed.
        """
        super().__init__(processor, max_length)
        self.on_bad_sample: OnBadSample = on_bad_sample
        self.skipped: Counter[str] = Counter()
        self._sources = list(sources)
        self._rows = [open_source(source, fetch=fetch, opener=opener) for source in sources]
        self._readers = list(readers)
        self.files = [Path(shard.path) for rows in self._rows for shard in rows.shards]
        for number in range(len(self._sources)):
            self._check_source(number)
        self._draws = draws_of(sources, [len(rows) for rows in self._rows], strategy, seed=seed)
        self._processors = {
            source.max_pixels: processor.with_max_pixels(source.max_pixels)
            for source in sources
            if source.max_pixels is not None
        }
        self.contents = [
            FileContent(source.label, f"{rows.fingerprint:x}-{rows.samples:x}", "unread")
            for source, rows in zip(self._sources, self._rows, strict=True)
        ]
        labels = [source.label for source in self._sources]
        names = list(dict.fromkeys(labels[number] for number in np.unique(self._draws.sources)))
        self.source_names = names if len(names) > 1 else ()
        # Of each source, by its name; those that are not drawn have none.
        self._name_numbers = [names.index(label) if label in names else 0 for label in labels]
        drawn = self._draws.sources.tobytes() + self._draws.rows.tobytes()
        self.fingerprint = xxh3_64_intdigest(drawn + str(self.contents).encode())

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        sample = super().__getitem__(number)
        if not self.source_names:
            return sample
        source, _ = self._drawn(self.row_of(number))
        return {**sample, "source": np.asarray(self._name_numbers[source])}

    def row_count(self) -> int:
        return len(self._draws)

    def row(self, number: int) -> Conversation:
        return self._read(*self._drawn(number))

    def row_place(self, number: int) -> str:
        source, row = self._drawn(number)
        return self._rows[source].place(row)

    def limits(self, number: int) -> tuple[VLProcessor, int | None]:
        source = self._sources[self._drawn(number)[0]]
        given = [each for each in (source.max_length, self.max_length) if each is not None]
        processor = self._processors.get(source.max_pixels or 0, self._processor)
        return processor, min(given, default=None)

    def metrics(self, number: int) -> Sequence[str]:
        return self._sources[self._drawn(number)[0]].metrics

    def source_name(self, number: int) -> str | None:
        return self._sources[self._drawn(number)[0]].name

    def _drawn(self, number: int) -> tuple[int, int]:
        return int(self._draws.sources[number]), int(self._draws.rows[number])

    def _read(self, source: int, row: int) -> Conversation:
        rows = self._rows[source]
        found = rows.row(row)
        with rows.at_place(row):
            return self._readers[source](found, rows.folder)

    def _check_source(self, source: int) -> None:
        """Read the first rows of a source; the first good one gives the format of the others."""
        rows, unread = self._rows[source], {}
        for row in range(min(len(rows), _CHECKED_ROWS)):
            try:
                conversation = self._read(source, row)
                with rows.at_place(row):
                    checked(conversation, self._processor)
            except BadSampleError:
                if self.on_bad_sample == "fail":
                    raise
                continue
            reader = self._readers[source]
            if reader.format is None:
                self._readers[source] = replace(reader, format=conversation.format)
            unread.update(dict.fromkeys(unread_keys(conversation.extras)))
        tell_unread(self._sources[source].label, unread)
