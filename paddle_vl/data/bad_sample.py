"""The one error of the data path: a sample that cannot be used, where it stands, and why."""


class BadSampleError(ValueError):
    """A sample that cannot be used.

    Raised without a place by the code that finds the fault, and given one by the dataset, which
    knows the file and the line. Survives pickling, so a worker's error reaches the main process
    whole.

    Attributes:
        kind: short name of the fault (`broken_json`, `missing_image`, ...), for counting.
        reason: what was found, what was needed, what to do.
        place: `file:line`, or None while nobody has said.
    """

    def __init__(self, kind: str, reason: str, place: str | None = None):
        super().__init__(kind, reason, place)
        self.kind = kind
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason

    def at(self, place: str) -> "BadSampleError":
        """The same fault, with its place."""
        return BadSampleError(self.kind, self.reason, place)
