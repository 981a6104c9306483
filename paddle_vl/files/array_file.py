"""Arrays in a file that ends with a checksum: what takes long to find, and can be found again."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_digest

from paddle_vl.files.text_file import replacing

logger = logging.getLogger(__name__)
_SUM_BYTES = 8


def read_arrays(path: Path, remedy: str) -> dict[str, np.ndarray] | None:
    """What `write_arrays` wrote; None if there is no file, or it is damaged, which is logged.

    Args:
        remedy: what happens without it, for the message.
    """
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()
        content, stored_sum = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        if xxh3_64_digest(content) != stored_sum:
            raise ValueError("its checksum is wrong, or it has none")
        with np.load(io.BytesIO(content)) as stored:
            return dict(stored)
    except Exception as error:
        # Whatever is wrong with it: it can be made again.
        logger.warning("%s is damaged (%s): %s", path, error, remedy)
        return None


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays and texts, compressed; NumPy reads the file too.

    Raises:
        OSError: the file cannot be written.
    """
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    with replacing(path) as partial:
        # Readers of the format pass over the bytes behind its end.
        partial.write_bytes(content.getvalue() + xxh3_64_digest(content.getvalue()))
