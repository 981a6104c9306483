"""The report of a policy's episodes in an environment: numbers, a contact sheet and a video."""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.files.text_file import write_text
from paddle_vl.report.html import address, document, picture, table
from paddle_vl.simulation.rollout import RolledEpisode, summary

# Pictures of an episode in the contact sheet.
_COLUMNS = 8
_SMALLEST_SIDE = 192
_BORDER, _SUCCESS, _FAILURE = 4, (60, 160, 80), (200, 60, 60)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; }
td, th { padding: .1rem .8rem; text-align: right; } img, video { max-width: 100%; }
"""


def write_rollout(
    folder: Path, about: dict[str, Any], episodes: Sequence[RolledEpisode], fps: int
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
    files = [folder / "rollout.html", folder / "rollout.json"]
    write_text(files[1], json.dumps(results | {"episodes": rows}, indent=2) + "\n")
    figures = ""
    if shown := [episode for episode in episodes if episode.images]:
        sheet, video = folder / "episodes.png", folder / "episodes.mp4"
        image = Image.fromarray(contact_sheet(shown))
        image.save(sheet)
        _write_video(video, shown, fps)
        files += [sheet, video]
        figures = (
            f'<p><video controls loop src="{address(video.read_bytes(), "video/mp4")}"></video></p>'
            f"<p>{picture(image)}</p>\n"
        )
    write_text(files[0], _page(results, rows, figures))
    return files


def contact_sheet(episodes: Sequence[RolledEpisode]) -> np.ndarray:
    """One row per episode, evenly spaced pictures from its first to its last; `[H, W, 3]` uint8."""
    rows = []
    for episode in episodes:
        places = np.linspace(0, len(episode.images) - 1, _COLUMNS).round().astype(int)
        rows.append(np.concatenate([_framed(episode, place) for place in places], axis=1))
    return np.concatenate(rows)


def _framed(episode: RolledEpisode, place: int) -> np.ndarray:
    """A picture, the last one if the episode has ended before, enlarged and framed."""
    image = episode.images[min(place, len(episode.images) - 1)]
    times = max(1, math.ceil(_SMALLEST_SIDE / image.shape[0]))
    large = image.repeat(times, axis=0).repeat(times, axis=1)
    colour = _SUCCESS if episode.is_success else _FAILURE
    sides = ((_BORDER, _BORDER), (_BORDER, _BORDER))
    return np.stack(
        [np.pad(large[..., c], sides, constant_values=colour[c]) for c in range(3)], axis=-1
    )


def _write_video(file: Path, episodes: Sequence[RolledEpisode], fps: int) -> None:
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


def _page(results: dict[str, Any], rows: Sequence[dict[str, Any]], figures: str) -> str:
    facts = table((name, [escape(str(value))]) for name, value in results.items())
    episodes = [[str(value) for value in row.values()] for row in rows]
    return document(
        "Episodes",
        _STYLE,
        facts
        + figures
        + table([(f"seed {seed}", told) for seed, *told in episodes], [*rows[0]][1:]),
    )
