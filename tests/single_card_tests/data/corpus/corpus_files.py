"""Data files of pretraining for tests."""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener


def opener(cache: Path | None = None, **settings) -> ShardOpener:
    return ShardOpener(Cache(None if cache is None else str(cache)), **settings)


def lines(rows: Iterable[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def picture(number: int = 0, width: int = 12) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (12, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
