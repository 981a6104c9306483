"""Language rows of LeRobot 0.6: what is said or planned at a moment of an episode.

`language_persistent` has the rows of the whole episode, each valid from its timestamp on;
`language_events` those of one frame.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERSISTENT = "language_persistent"
# The schema of tool calls in datasets that state none.
SAY: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Speak a short utterance to the user via the TTS executor.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The verbatim text to speak."}
            },
            "required": ["text"],
        },
    },
}

Row = dict[str, Any]


def language_rows(stored: Sequence[Mapping[str, Any]] | None) -> list[Row]:
    """Rows as lerobot gives them: times in float32, tool calls as objects.

    Tool calls are stored as structs or as JSON text, whichever program wrote them last.
    """
    rows = []
    for row in stored or ():
        row = dict(row)
        if row.get("timestamp") is not None:
            row["timestamp"] = float(np.float32(row["timestamp"]))
        if row.get("tool_calls") is not None:
            row["tool_calls"] = [
                json.loads(call) if isinstance(call, str) else call for call in row["tool_calls"]
            ]
        rows.append(row)
    return rows


def active_row(rows: Sequence[Row], style: str, time: float) -> Row | None:
    """The latest persistent row of a style at or before a time in seconds, if there is one."""
    before = [row for row in rows if row["style"] == style and row["timestamp"] <= time]
    return max(before, key=lambda row: row["timestamp"], default=None)
