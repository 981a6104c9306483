"""Pretraining data: rows of every format, and the containers."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzzing.mutations import as_json, damaged_bytes, in_file, json_lines
from fuzzing.parser import Parser
from fuzzing.samples import small_processor, write_image
from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.settings import VLDataConfig

_FORMATS = ("text", "image_text", "interleaved")


def _read_all(processor: Any, file: Path, kinds: tuple[str, ...]) -> None:
    """Read every document of a file; at least one must be usable in some format."""
    refused: list[BadSampleError] = []
    num_good = 0
    for kind in kinds:
        source = SourceConfig(path=str(file), format=kind)  # type: ignore[arg-type]
        data = VLDataConfig(max_length=60, allow_outside=False, on_bad_sample="skip")
        samples = Corpus.opened([source], data, processor, seed=0).samples()
        for number in range(min(len(samples), 20)):
            try:
                samples[number]
                num_good += 1
            except BadSampleError as error:
                refused.append(error)
    if refused and not num_good:
        raise refused[0]


def documents(folder: Path) -> Parser:
    """JSONL of texts, captions and pages."""
    write_image(folder / "cat.png")
    page = {"texts": ["A cat", None, "on a mat."], "images": [None, "cat.png", None]}
    info = [{"image_name": "cat.png", "matched_text_index": 1}]
    seeds: list[dict[str, Any]] = [
        {"text": "A cat on a mat."},
        {"text": ["A cat", "on a mat."], "url": "x"},
        {"image": "cat.png", "text": "A cat."},
        {"image": {"path": "cat.png", "bytes": None}, "text": "A cat."},
        page,
        {"text_list": ["A cat", "on a mat."], "image_info": info},
    ]
    file = folder / "rows.jsonl"
    file.write_bytes(as_json(seeds[2]))
    processor = small_processor()
    inputs = in_file("rows.jsonl", json_lines(seeds, 1))
    return Parser(inputs, lambda: _read_all(processor, file, _FORMATS), ("rows",))


def shards(folder: Path) -> Parser:
    """Token files, and WebDataset files of captions."""
    picture = write_image(folder / "cat.png").read_bytes()
    with TokenFileWriter(folder / "tokens", 300) as writer:
        writer.add(np.arange(20), np.array([12, 8]))
    with tarfile.open(folder / "web.tar", "w") as archive:
        page = json.dumps({"image": "png", "text": "A cat."}).encode()
        for name, content in (
            ("1.png", picture), ("1.txt", b"A cat."), ("2.json", page), ("2.png", picture),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    valid = {name: (folder / name).read_bytes() for name in ("tokens.idx", "web.tar")}
    processor = small_processor()

    def parse() -> None:
        _read_all(processor, folder / "tokens.idx", ("text",))
        _read_all(processor, folder / "web.tar", ("image_text",))

    one = [
        damaged_bytes([content]).map(lambda changed, name=name: {**valid, name: changed})
        for name, content in valid.items()
    ]
    return Parser(st.one_of(one), parse, ("tokens", "web"))
