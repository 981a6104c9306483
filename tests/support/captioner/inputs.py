"""Captions in JSONL files, and their batches. No Paddle: loader workers run it.

A line is `{"features": [[...], ...], "caption": "..."}`: a vector for each region of an image.
Axes: B batch, L padded caption length, R regions, F features.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

import numpy as np

from paddle_vl.batch.schema import Array, Axes
from paddle_vl.data.jsonl import (
    MAX_LINE_BYTES,
    BadSampleError,
    LineIndex,
    SamplesOfLines,
    parse_object,
    sample_at,
)
from paddle_vl.families.qwen3_vl.inputs.tokenizer import TextTokenizer, train_bpe

END = "<end>"
IGNORED_LABEL = -100
_COLOURS = ("red", "green", "blue")
_THINGS = ("cup", "door")


class CaptionBatch(TypedDict):
    """The output of `CaptionCollator`."""

    # Each caption begins with the end token, which serves as the begin token too.
    input_ids: Required[Annotated[Array, Axes("B L", "int64")]]
    # Not shifted; -100 at padding and at the first token.
    labels: Required[Annotated[Array, Axes("B L", "int64")]]
    features: Required[Annotated[Array, Axes("B R F", "float32")]]
    num_target_tokens: Required[int]


class CaptionDataset(SamplesOfLines):
    """Samples of JSONL files; see `paddle_vl.data.worker_pool.SampleSource`."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: TextTokenizer,
        shape: tuple[int, int],
        on_bad_sample: str = "fail",
    ):
        """
        Args:
            shape: regions per image and features per region.
        """
        self.files, self.on_bad_sample = [Path(file) for file in files], on_bad_sample
        self._tokenizer, self._shape = tokenizer, shape
        self._lines = LineIndex(self.files, self._check, on_bad_sample, MAX_LINE_BYTES)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        line, _ = self._lines.line(number)
        with sample_at(self.place(number)):
            features, caption = self._parsed(line)
            end = self._tokenizer.token_id(END)
            ids = np.array([end, *self._tokenizer.encode(caption), end], dtype=np.int64)
            return {"input_ids": ids, "features": features}

    def _parsed(self, line: bytes) -> tuple[np.ndarray, str]:
        record = parse_object(line, "a caption")
        features = np.array(record.get("features", []), dtype=np.float32)
        if features.shape != self._shape or not isinstance(record.get("caption"), str):
            raise BadSampleError(
                "bad_caption",
                f"features have shape {list(features.shape)}; a caption and features of shape "
                f"{list(self._shape)} are needed",
            )
        return features, record["caption"]

    def _check(self, line: bytes, file_number: int) -> list[int]:
        self._parsed(line)
        return []


@dataclass(frozen=True)
class CaptionCollator:
    """Collates samples. The padded length is even, so that two ranks can split the token rows."""

    pad_id: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> CaptionBatch:
        rows = [sample["input_ids"] for sample in samples]
        length = max(map(len, rows))
        length += length % 2
        ids_BL = np.full((len(rows), length), self.pad_id, dtype=np.int64)
        labels_BL = np.full_like(ids_BL, IGNORED_LABEL)
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = row
            labels_BL[i, 1 : len(row)] = row[1:]
        return {
            "input_ids": ids_BL,
            "labels": labels_BL,
            "features": np.stack([sample["features"] for sample in samples]),
            "num_target_tokens": int((labels_BL != IGNORED_LABEL).sum()),
        }


def write_captions(file: Path, count: int, shape: tuple[int, int], seed: int = 0) -> None:
    """Write `count` captions whose features encode colour, thing and number."""
    rng = np.random.default_rng(seed)
    with file.open("w", encoding="utf-8") as stream:
        for i in range(count):
            colour, thing, number = i % 3, i % 2, 1 + i % 4
            features = rng.normal(scale=0.1, size=shape)
            features[0, colour] += 2
            features[1, thing] += 2
            features[2, number % shape[1]] += 2
            caption = " ".join([_COLOURS[colour]] * number + [_THINGS[thing]])
            record = {"features": features.round(4).tolist(), "caption": caption}
            stream.write(json.dumps(record) + "\n")


def make_tokenizer() -> TextTokenizer:
    return train_bpe([" ".join([*_COLOURS, *_THINGS])] * 4, 280, [END])
