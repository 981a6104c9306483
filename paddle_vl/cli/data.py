"""Commands on data: `paddle-vl show-data`, `convert-data`, `tokenize`, `compute-stats` and
`precompute-reference`."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_vl.cli.commands import configure_training_runtime
from paddle_vl.cli.hubs import read_run
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


# Samples of data.train are shown without the evaluation, whatever its data are.
_NO_EVALUATION = (
    "data.eval=[]", "train.eval_steps=null", "train.eval=null", "train.best=null", "train.guard=[]",
)  # fmt: skip


def show_data(options: argparse.Namespace) -> int:
    """Print the samples, and write the page."""
    from paddle_vl.config.families import family_of_run
    from paddle_vl.report.samples_page import as_text, page

    options.overrides += () if options.eval else _NO_EVALUATION
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


def tokenize(options: argparse.Namespace) -> int:
    """Write the token files."""
    from paddle_vl.config.data_sources import SourceConfig
    from paddle_vl.data.corpus.cache import Cache
    from paddle_vl.data.corpus.opener import ShardOpener
    from paddle_vl.data.corpus.tokenize import TextTokens, write_token_files
    from paddle_vl.files.hub import path_or_download
    from paddle_vl.files.tokenizer_json import TOKENIZER_FILE

    files = SourceConfig(path=options.files, format="text").files()
    if not files:
        raise ValueError(f"there is no data file {', '.join(options.files)}")
    folder = path_or_download(options.tokenizer)
    tokens = TextTokens(
        folder / TOKENIZER_FILE if folder.is_dir() else folder,
        options.end_token,
        {"text": options.text},
        "skip" if options.skip_bad else "fail",
    )
    opener = ShardOpener(Cache(options.cache), max_line_bytes=options.max_line_bytes)
    written = write_token_files(
        [Path(file) for file in files], Path(options.output), tokens, opener, options.processes
    )
    print(
        f"{written.documents} documents with {written.tokens} tokens are in {options.output}.bin "
        f"and {options.output}.idx"
    )
    for kind, count in sorted(written.skipped.items()):
        print(f"skipped: {count} of kind {kind}")
    return 0


TOKENIZE = Command(
    tokenize,
    "write token files (.bin and .idx) of texts for pretraining",
    "Tokenize the texts of JSONL (also .gz and .zst), Parquet and WebDataset files into one pair "
    "of memory-mapped token files in Megatron's format, which PaddleNLP and PaddleFormers read "
    "too. Rows have `text`, a string or a list of strings. The end token follows every document. "
    "The result does not depend on the number of processes.",
    "example:\n  paddle-vl tokenize 'web/*.jsonl.gz' --tokenizer Qwen3-VL-2B-Instruct "
    "--output tokens/web --processes 16",
    [
        value("files", "FILE", "data files, or patterns of them", nargs="+"),
        value("--tokenizer", "DIR", "a folder with tokenizer.json, or org/name on a hub",
              required=True),
        value("--output", "PREFIX", "path of the new files, without suffix", required=True),
        number("--processes", "processes (default 1)", 1),
        value("--text", "NAME", "entry of a row with its text (default text)", default="text"),
        value("--end-token", "TOKEN", "token behind every document (default <|endoftext|>)",
              default="<|endoftext|>"),
        SKIP_BAD,
        CACHE,
        MAX_LINE,
    ],
)  # fmt: skip


def compute_stats(options: argparse.Namespace) -> int:
    """Write the statistics."""
    from paddle_vl.data.lerobot.dataset import LeRobotDataset
    from paddle_vl.data.lerobot.statistics import (
        RECOMPUTED,
        recomputed_statistics,
        write_statistics,
    )

    dataset = LeRobotDataset(options.dataset, excluded_episodes=options.excluded_episodes)
    file = options.output or dataset.root / RECOMPUTED
    # Refused before the frames are read.
    if file.exists() and not options.overwrite:
        raise ValueError(f"{file} is there already: choose another --output, or add --overwrite")
    found = recomputed_statistics(dataset, not options.no_images, options.num_workers)
    write_statistics(found, file)
    print(f"statistics of {len(found)} features over {len(dataset)} frames are in {file}")
    return 0


COMPUTE_STATS = Command(
    compute_stats,
    "statistics of a LeRobot dataset from its frames",
    "Compute min, max, mean, std, count and the quantiles q01, q10, q50, q90 and q99 of every "
    "numeric feature and camera of a LeRobot dataset from all of its frames. Training reads the "
    "file, meta/recomputed_stats.json in the dataset, in place of what lerobot wrote, whose "
    "quantiles are none of the whole dataset, and whose standard deviations of images are wrong in "
    "version 0.4.4. The quantiles are exact; memory stays bounded.",
    "examples:\n  paddle-vl compute-stats datasets/pusht --num-workers 8\n"
    "  paddle-vl compute-stats datasets/pusht --output datasets/pusht/meta/stats.json --overwrite",
    [
        value("dataset", "DIR", "folder of the dataset, with meta/info.json", type=Path),
        value("--output", "FILE", "another file to write", type=Path),
        switch("--overwrite", "replace the file if it is there"),
        value("--excluded-episodes", "N", "numbers of episodes to leave out", type=natural,
              nargs="+", default=[]),
        switch("--no-images", "leave the cameras out, whose images take most of the time"),
        value("--num-workers", "N", "processes that decode images (default 0: this one)",
              type=natural, default=0),
    ],
)  # fmt: skip


def precompute_reference(options: argparse.Namespace) -> int:
    """Write the files."""
    configure_training_runtime()
    from paddle_vl.config.families import family_of_run

    config = read_run(options)
    for path in family_of_run(config).ask("precompute_reference", config):
        print(f"the reference's log-probabilities are in {path}")
    return 0


PRECOMPUTE = Command(
    precompute_reference,
    "log-probabilities of the reference of preference training, beside the data",
    "Compute the log-probabilities of all answers in data.train and data.eval under the reference, "
    "preference.ref_model or model.pretrained, and write them beside the data. Training with "
    "preference.precompute_ref_log_probs=true then needs no reference. The files have checksums of "
    "data, settings and weights, and a run refuses them when these are others.",
    "example:\n  paddle-vl precompute-reference dpo.yaml",
    [CONFIG, OVERRIDES],
)
