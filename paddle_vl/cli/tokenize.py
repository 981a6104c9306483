"""`paddle-vl tokenize`: texts to memory-mapped token files."""

import argparse
from pathlib import Path

from paddle_vl.cli.commands import add_command, add_number, add_switch, add_value


def add_tokenize(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl tokenize FILES --tokenizer DIR --output PREFIX`"""
    parser = add_command(
        subparsers,
        tokenize,
        "write token files (.bin and .idx) of texts for pretraining",
        "Tokenize the texts of JSONL (also .gz and .zst), Parquet and WebDataset files into one "
        "pair of memory-mapped token files in Megatron's format, which PaddleNLP and PaddleFormers "
        "read too. Rows have `text`, a string or a list of strings. The end token follows every "
        "document. The result does not depend on the number of processes.",
        "example:\n  paddle-vl tokenize 'web/*.jsonl.gz' --tokenizer Qwen3-VL-2B-Instruct "
        "--output tokens/web --processes 16",
    )
    add_value(parser, "files", "FILE", "data files, or patterns of them", nargs="+")
    for name, metavar, text in (
        ("--tokenizer", "DIR", "a folder with tokenizer.json, or org/name on a hub"),
        ("--output", "PREFIX", "path of the new files, without suffix"),
    ):
        add_value(parser, name, metavar, text, required=True)
    add_number(parser, "--processes", "processes (default 1)", 1)
    text = "entry of a row with its text (default text)"
    add_value(parser, "--text", "NAME", text, default="text")
    text = "token behind every document (default <|endoftext|>)"
    add_value(parser, "--end-token", "TOKEN", text, default="<|endoftext|>")
    text = "leave documents out that cannot be used, and count them (default: stop at the first)"
    add_switch(parser, "--skip-bad", text)
    add_value(parser, "--cache", "DIR", "folder for indexes and copies (default: beside the data)")
    text = "longest line of a JSONL file, in bytes (default 1048576)"
    add_number(parser, "--max-line-bytes", text, 1 << 20)


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
