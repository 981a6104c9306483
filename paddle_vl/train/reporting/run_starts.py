"""Reading run.json, which `paddle_vl.train.reporting.run_record` writes."""

import json
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"


def read_starts(output_dir: Path) -> list[dict[str, Any]]:
    """The entries of a run's run.json, oldest first; none without the file.

    Raises:
        RuntimeError: the file is damaged.
    """
    path = output_dir / RUN_FILE
    if not path.exists():
        return []
    try:
        return list(map(dict, json.loads(path.read_text(encoding="utf-8"))["starts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"{path} is not what a run writes ({error!r}): mend it, or move it away"
        ) from error
