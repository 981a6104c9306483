"""`paddle-vl tokenize`: texts to memory-mapped token files."""

import argparse
from pathlib import Path

from paddle_vl.cli.table import CACHE, MAX_LINE, SKIP_BAD, Command, number, value


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
