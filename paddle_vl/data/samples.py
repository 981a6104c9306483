"""What a loader asks of a dataset, and of what collates its samples."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Sample = dict[str, np.ndarray]
# From a list of samples, for packed rows a list of lists, to a batch.
Collator = Callable[[Sequence[Any]], Any]


class SampleSource(Protocol):
    """A dataset for the loader. It must be picklable and not defined in `__main__`.

    It may also have:
        in_epoch(epoch): the dataset with the random draws of that epoch.
        files, place(number): its files, and the location `file:line` of a sample.
        contents, positions_fingerprint: per file its path, the hash of its lines, and the hash of
            the sizes of its images and videos; the fingerprint without them, as older checkpoints
            store it.
    """

    @property
    def on_bad_sample(self) -> str: ...

    @property
    def skipped(self) -> Counter[str]: ...

    @property
    def fingerprint(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...
