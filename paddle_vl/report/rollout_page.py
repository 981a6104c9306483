"""The report of a policy's episodes in an environment: numbers, a contact sheet and a video."""

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.files.text_file import write_text
from paddle_vl.simulation.rollout import Episode, summary

# Pictures of an episode in the contact sheet.
_COLUMNS = 8
_SMALLEST_SIDE = 192
_BORDER, _SUCCESS, _FAILURE = 4, (60, 160, 80), (200, 60, 60)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
td, th { padding: .1rem .8rem; text-align: right; } img, video { max-width: 100%; }
"""


def write_rollout(
    folder: Path, about: dict[str, Any], episodes: Sequence[Episode], fps: int
) -> list[Path]:
    """Write rollout.json, episodes.png, episodes.mp4 and a page with all of it, rollout.html.

    Args:
        about: what was evaluated, by name; goes into the numbers and the page.
        episodes: those with images are shown; green ones succeeded.
        fps: pictures per second of the video.

    Raises:
        RuntimeError: PyAV is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"seed": one.seed, "success": one.is_success, "steps": one.num_steps} for one in episodes
    ]
    results = about | summary(episodes)
    files = [folder / f"{name}" for name in ("rollout.html", "rollout.json")]
    write_text(files[1], json.dumps(results | {"episodes": rows}, indent=2) + "\n")
    figures = ""
    if shown := [episode for episode in episodes if episode.images]:
        sheet, video = folder / "episodes.png", folder / "episodes.mp4"
        Image.fromarray(contact_sheet(shown)).save(sheet)
        _write_video(video, shown, fps)
        files += [sheet, video]
        figures = (
            f'<p><video controls loop src="{_inline(video, "video/mp4")}"></video></p>\n'
            f'<p><img alt="" src="{_inline(sheet, "image/png")}"></p>\n'
        )
    write_text(files[0], _page(results, rows, figures))
    return files


def contact_sheet(episodes: Sequence[Episode]) -> np.ndarray:
    """One row per episode, evenly spaced pictures from its first to its last; `[H, W, 3]` uint8."""
    rows = []
    for episode in episodes:
        places = np.linspace(0, len(episode.images) - 1, _COLUMNS).round().astype(int)
        rows.append(np.concatenate([_framed(episode, place) for place in places], axis=1))
    return np.concatenate(rows)


def _framed(episode: Episode, place: int) -> np.ndarray:
    """A picture, the last one if the episode has ended before, enlarged and framed."""
    image = episode.images[min(place, len(episode.images) - 1)]
    times = max(1, math.ceil(_SMALLEST_SIDE / image.shape[0]))
    large = image.repeat(times, axis=0).repeat(times, axis=1)
    colour = _SUCCESS if episode.is_success else _FAILURE
    sides = ((_BORDER, _BORDER), (_BORDER, _BORDER))
    return np.stack(
        [np.pad(large[..., c], sides, constant_values=colour[c]) for c in range(3)], axis=-1
    )


def _write_video(file: Path, episodes: Sequence[Episode], fps: int) -> None:
    """All episodes side by side; those that have ended stand still."""
    try:
        import av
    except ImportError as error:
        raise RuntimeError(
            "the video of episodes is written by PyAV, which is not installed: "
            "pip install 'paddle-vl[sim]', or show no episodes"
        ) from error
    columns = math.ceil(math.sqrt(len(episodes)))
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.pix_fmt = "yuv420p"
        for place in range(max(len(episode.images) for episode in episodes)):
            tiles = [_framed(episode, place) for episode in episodes]
            tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
            rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
            picture = np.concatenate([np.concatenate(row, axis=1) for row in rows])
            if place == 0:
                stream.height, stream.width = picture.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def _inline(file: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _page(results: dict[str, Any], rows: Sequence[dict[str, Any]], figures: str) -> str:
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>\n"
        for name, value in results.items()
    )
    names = "".join(f"<th>{name}</th>" for name in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{value}</td>' for value in row.values())}</tr>\n" for row in rows
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; img-src data:; media-src data:">
<title>Episodes</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Episodes</h1>
<table>{facts}</table>
{figures}<table><tr>{names}</tr>
{body}</table>
</body>
</html>
"""
