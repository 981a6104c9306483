"""Sources of a fine-tuning mixture: files or data sets of rows, and how many rows each gives."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paddle_vl.config.section import FilePath, Section

# Strategies of a mixture, and the stopping strategies of `datasets.interleave_datasets`.
Strategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]
STOPPING: dict[str, Strategy] = {
    "first_exhausted": "interleave_under",
    "all_exhausted": "interleave_over",
    "all_exhausted_without_replacement": "interleave_once",
}


RowFormat = Literal[
    "messages", "sharegpt", "llava", "erniekit", "prompt_completion", "alpaca", "query_response"
]


class RowSourceConfig(Section):
    """One source of rows."""

    path: FilePath
    """a file, a folder of a data set, or a data set on a hub: hf://org/name, ms://org/name"""
    name: Annotated[str, Field(min_length=1)] | None = None
    """name in messages; default: the path"""
    format: RowFormat | None = None
    """format of the rows; default: recognised from the first row"""
    columns: dict[str, str] = Field(default={})
    """names of columns in the file and the keys that they stand for; _ hides a column"""
    only_columns: bool = False
    """read the columns that are named and no others"""
    tags: dict[str, str] = Field(default={})
    """names of a message's keys and roles as in dataset_info.json: role_tag, user_tag, ..."""
    subsets: list[str] = Field(default=[])
    """subsets of a data set; default: its default one"""
    split: str | list[str] | None = None
    """split of a data set, or several; default: train"""
    folder: str | None = None
    """folder within the data set"""
    num_samples: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """rows to draw: the whole source as often as it fits, then some of it; default: all, once"""
    ratio: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """rows to draw, as a fraction or multiple of those there are"""
    weight: Annotated[float, Field(ge=0)] | None = None
    """how often a row of an interleaved mixture is of this source, relative to the other weights; 0
    leaves the source out; all sources have one, or none"""
    max_length: Annotated[int, Field(gt=0)] | None = None
    """tokens that a row of this source may have; default: that of the run"""
    max_pixels: Annotated[int, Field(gt=0)] | None = None
    """pixels that an image of this source is scaled to at most; default: that of the run"""
    metrics: list[str] = Field(default=[])
    """what answers to these rows are scored with, in an evaluation; default: that of all data"""

    @model_validator(mode="after")
    def _one_count(self) -> "RowSourceConfig":
        if self.num_samples is not None and self.ratio is not None:
            raise ValueError("num_samples and ratio both say how many rows are drawn: set one")
        return self

    @property
    def label(self) -> str:
        """The name, or the path."""
        return self.name or self.path
