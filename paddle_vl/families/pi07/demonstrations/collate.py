"""Demonstrations to the raw batch that a policy takes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_vl.families.pi07.demonstrations.sample import Demonstration


def collate_demonstrations(samples: Sequence[Demonstration]) -> dict[str, Any]:
    """Texts as lists, arrays and numbers stacked; what is None in all samples stays out.

    Raises:
        RuntimeError: samples that do not agree in their entries, types or shapes. A source gives
            all samples the same ones, so that this is its fault, or that of sources that were
            joined.
    """
    batch: dict[str, Any] = {}
    for name in sorted({name for sample in samples for name in sample}):
        values = [sample.get(name) for sample in samples]
        kinds = {_kind(value) for value in values}
        if len(kinds) > 1:
            raise RuntimeError(
                f"samples of one batch differ in {name!r}: {', '.join(sorted(kinds))}; sources "
                "that are joined need the same optional fields and shapes"
            )
        if isinstance(values[0], str):
            batch[name] = values
        elif values[0] is not None:
            batch[name] = np.stack(values)
    return batch


def _kind(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, str):
        return "text"
    return f"{value.dtype} {list(value.shape)}"
