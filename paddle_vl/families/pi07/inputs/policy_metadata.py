"""What numbers about a demonstration a policy was made to read."""

# OpenTau's: speed is a decile rank of the episode's length, quality a score, fps a frame rate.
METADATA_RANGES: dict[str, tuple[int, int]] = {
    "speed": (0, 100),
    "quality": (1, 5),
    "fps": (1, 1000),
}


def metadata_problem(name: str, value: float) -> str | None:
    """What is wrong with a number; None if nothing is, or if any number will do."""
    least, most = METADATA_RANGES.get(name, (None, None))
    if least is None or least <= value <= most:
        return None
    # A number of thousands of digits has no text.
    is_huge = isinstance(value, int) and abs(value) >= 10**18
    shown = f"a number of {value.bit_length()} bits" if is_huge else str(value)
    return f"{name!r} is {shown}; it must be from {least} to {most}"
