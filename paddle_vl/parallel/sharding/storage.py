"""When parameters that stage 3 divides are whole: those that compute, and the next ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from paddle_vl.parallel.sharding.buckets import Bucket


class Storage:
    """Gives parameters storage while they are used, and gathers the next ones meanwhile.

    Beside those that are kept, at most two buckets are whole at any time: the one in use and the
    one gathered ahead. Every rank uses the same buckets in the same order, so the gathers that this
    decides on are the same on every rank.
    """

    def __init__(self):
        self._whole: set[Bucket] = set()
        self._kept: set[Bucket] = set()
        self._ahead: Bucket | None = None

    @contextmanager
    def of(self, bucket: Bucket, following: Bucket | None = None) -> Iterator[None]:
        """Parameters of a bucket are whole inside, and behind it if it is kept.

        Args:
            following: what is used next; its gather starts before anything is computed here.
        """
        if bucket not in self._whole:
            bucket.give_storage()
            self._whole.add(bucket)
        if bucket is self._ahead:
            self._ahead = None
        if following is not None and following not in self._whole and self._ahead is None:
            following.start_gather()
            self._ahead = following
        try:
            yield
        finally:
            if bucket not in self._kept:
                self._free(bucket)

    def keep(self, bucket: Bucket) -> None:
        """From its next use on it stays whole, until `release`."""
        self._kept.add(bucket)

    def release(self, bucket: Bucket) -> None:
        """It is freed behind its next use."""
        self._kept.discard(bucket)

    def drop_ahead(self) -> None:
        """Forget what was gathered ahead, if it was not used."""
        if self._ahead is not None:
            self._ahead.drop_gather()
            self._ahead = None

    def free_all(self) -> None:
        """Nothing is whole or kept any more; nothing is in use."""
        self.drop_ahead()
        self._kept.clear()
        for bucket in list(self._whole):
            self._free(bucket)

    def _free(self, bucket: Bucket) -> None:
        self._whole.discard(bucket)
        bucket.take_storage()
