"""`paddle-vl show-data`: samples of a run as its model sees them; `convert-data`: rows of any files
as one file."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_vl.cli.table import (
    CACHE,
    CONFIG,
    MAX_LINE,
    OVERRIDES,
    SKIP_BAD,
    Command,
    natural,
    number,
    switch,
    value,
)

if TYPE_CHECKING:
    from paddle_vl.config.row_sources import RowSourceConfig


# Settings that need `data.eval`: samples are shown also where it is taken away.
_NO_EVALUATION = ("train.eval_steps=null", "train.eval=null", "train.best=null")


def show_data(options: argparse.Namespace) -> int:
    """Print the samples, and write the page."""
    from paddle_vl.cli.hubs import read_run
    from paddle_vl.config.families import family_of_run
    from paddle_vl.report.samples_page import as_text, page

    options.overrides += _NO_EVALUATION
    config = read_run(options)
    family = family_of_run(config)
    asked = (options.eval, options.first, options.samples)
    samples = list(family.ask("shown_samples", config, *asked))
    for sample in samples:
        print(as_text(sample, sys.stdout.isatty()))
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        title = f"Samples of {options.config}"
        options.page.write_text(page(samples, title), encoding="utf-8")
        print(f"the pictures are in {options.page}")
    return 0


SHOW_DATA = Command(
    show_data,
    "print samples of a run as its model sees them",
    "Print samples of a run after the chat template, with the text that carries the loss in colour "
    "(between [[ and ]] where the output is no terminal), and write a page with the pictures as "
    "they are resized, and the boxes of the answers drawn on them. No weights are read.",
    "examples:\n  paddle-vl show-data run.yaml\n"
    "  paddle-vl show-data run.yaml --samples 50 --page samples.html 'data.train=[talks.json]'",
    [
        CONFIG,
        OVERRIDES,
        number("--samples", "number of samples (default 3)", 3),
        value("--first", "N", "number of the first sample, from 0 (default 0)", type=natural,
              default=0),
        switch("--eval", "samples of data.eval in place of data.train"),
        value("--page", "FILE", "write a page with pictures too", type=Path),
    ],
)  # fmt: skip


def convert_data(options: argparse.Namespace) -> int:
    """Write the file."""
    from paddle_vl.data.corpus.cache import Cache
    from paddle_vl.data.corpus.opener import ShardOpener
    from paddle_vl.data.formats.keys import RowSettings
    from paddle_vl.data.rows.convert import convert_rows
    from paddle_vl.data.rows.spelling import strategy_of
    from paddle_vl.files.hub import local_folder

    tokens = [name.strip() for name in options.special_tokens.split(",") if name.strip()]
    written, skipped = convert_rows(
        _sources(options),
        options.output,
        RowSettings(options.boxes, options.clip_boxes, tokens),
        strategy=strategy_of(options.mix_strategy),
        seed=options.seed,
        on_bad_sample="skip" if options.skip_bad else "fail",
        overwrite=options.overwrite,
        opener=ShardOpener(Cache(options.cache), max_line_bytes=options.max_line_bytes),
        fetch=partial(local_folder, kind="dataset"),
    )
    print(f"{written} rows are in {options.output}")
    if tokens or options.boxes == "markers":
        print("set data.special_tokens to [box, object_ref] where it is read")
    for kind, count in sorted(skipped.items()):
        print(f"skipped: {count} of kind {kind}")
    return 0


def _sources(options: argparse.Namespace) -> "list[RowSourceConfig]":
    """The sources of the command line, with its columns and weights."""
    from paddle_vl.data.rows.dataset_info import DatasetInfo, source_config
    from paddle_vl.data.rows.spelling import row_sources, weighted

    columns = None
    if options.columns is not None:
        try:
            columns = json.loads(options.columns)
        except ValueError as error:
            raise ValueError(f'--columns is no JSON ({error}): write {{"a": "b"}}') from error
    info = None if options.dataset_info is None else DatasetInfo.read(options.dataset_info)
    sources = row_sources(options.sources, info)
    if columns is not None and (own := [each.label for each in sources if each.columns]):
        raise ValueError(f"{own[0]} has columns in {options.dataset_info}: write all of them there")
    sources = [
        source_config(
            each.label,
            **{
                **each.model_dump(),
                "format": each.format or options.format,
                "columns": each.columns if columns is None else columns,
            },
        )
        for each in sources
    ]
    return sources if options.weights is None else weighted(sources, options.weights)


CONVERT_DATA = Command(
    convert_data,
    "write rows of any format, files and mixtures as one JSONL file",
    "Write the rows of files, data sets on a hub or names of a dataset_info file as one JSONL file "
    "of messages, in the order in which a run with the same seed draws them. Bytes of images and "
    "videos become files in the folder media beside it, paths become relative to it. data.train "
    "reads it without further settings, but for data.special_tokens if there are any. A row that "
    "cannot be used ends the command, and no file is written.",
    "examples:\n  paddle-vl convert-data talks.parquet talks.jsonl\n"
    "  paddle-vl convert-data 'talks.json#500' hf::org/name mixed.jsonl --skip-bad\n"
    "  paddle-vl convert-data tides rows.jsonl --dataset-info data/dataset_info.json",
    [
        value("sources", "IN",
              "files, folders, hf::org/name, or names of a dataset_info file; #500 or %%50 behind "
              "one", nargs="+"),
        value("output", "OUT.jsonl", "the new file", type=Path),
        value("--format", "NAME",
              "format of the rows (default: recognised from the first row of each source)"),
        value("--dataset-info", "FILE",
              "a dataset_info.json of LLaMA-Factory or ms-swift, whose names IN uses", type=Path),
        value("--columns", "JSON",
              "names of columns and the keys that they stand for, as JSON; _ hides a column"),
        value("--boxes", "KIND", "how boxes of objects are written, json or markers (default json)",
              choices=("json", "markers"), default="json"),
        switch("--clip-boxes", "move boxes that are partly outside of their image"),
        value("--special-tokens", "NAMES",
              "special tokens that texts may contain: box, object_ref, or both with a comma",
              default=""),
        value("--mix-strategy", "NAME",
              "how rows of several sources follow one another (default concat)", default="concat"),
        value("--weights", "NUMBERS",
              "weights of the sources of an interleaved mixture, such as 0.7,0.3"),
        value("--seed", "N", "seed of mixtures, as train.seed (default 42)", type=natural,
              default=42),
        switch("--overwrite", "replace OUT.jsonl if it is there"),
        SKIP_BAD,
        CACHE,
        MAX_LINE,
    ],
)  # fmt: skip
