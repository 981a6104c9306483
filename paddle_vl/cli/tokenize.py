"""`paddle-vl tokenize`: texts to memory-mapped token files."""

import argparse
from pathlib import Path

from paddle_vl.cli.commands import positive


def add_tokenize(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl tokenize FILES --tokenizer DIR --output PREFIX`"""
    parser = subparsers.add_parser(
        "tokenize",
        help="write token files (.bin and .idx) of texts for pretraining",
        description="Tokenize the texts of JSONL (also .gz and .zst), Parquet and WebDataset files "
        "into one pair of memory-mapped token files in Megatron's format, which PaddleNLP and "
        "PaddleFormers read too. Rows have `text`, a string or a list of strings. The end token "
        "follows every document. The result does not depend on the number of processes.",
        epilog="example:\n  paddle-vl tokenize 'web/*.jsonl.gz' --tokenizer Qwen3-VL-2B-Instruct "
        "--output tokens/web --processes 16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", help="data files, or patterns of them")
    parser.add_argument(
        "--tokenizer", metavar="DIR", required=True, help="a folder with tokenizer.json"
    )
    parser.add_argument(
        "--output", metavar="PREFIX", required=True, help="path of the new files, without suffix"
    )
    parser.add_argument(
        "--processes", type=positive, default=1, metavar="N", help="processes (default 1)"
    )
    parser.add_argument(
        "--text", metavar="NAME", default="text", help="entry of a row with its text (default text)"
    )
    parser.add_argument(
        "--end-token",
        metavar="TOKEN",
        default="<|endoftext|>",
        help="token behind every document (default <|endoftext|>)",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave documents out that cannot be used, and count them (default: stop at the first)",
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="folder for indexes and copies (default: beside the data)"
    )
    parser.add_argument(
        "--max-line-bytes",
        type=positive,
        default=1 << 20,
        metavar="N",
        help="longest line of a JSONL file, in bytes (default 1048576)",
    )
    parser.set_defaults(run=tokenize)


def tokenize(options: argparse.Namespace) -> int:
    """Write the token files."""
    from paddle_vl.config.data_sources import SourceConfig
    from paddle_vl.data.corpus.cache import CacheFolders
    from paddle_vl.data.corpus.local_copies import LocalCopies
    from paddle_vl.data.corpus.open_shard import ShardOpener
    from paddle_vl.data.corpus.tokenize import TextTokens, write_token_files
    from paddle_vl.files.tokenizer_json import TOKENIZER_FILE

    files = SourceConfig(path=options.files, format="text").files()
    if not files:
        raise ValueError(f"there is no data file {', '.join(options.files)}")
    folder = Path(options.tokenizer)
    folders = CacheFolders(options.cache)
    tokens = TextTokens(
        folder / TOKENIZER_FILE if folder.is_dir() else folder,
        options.end_token,
        {"text": options.text},
        "skip" if options.skip_bad else "fail",
    )
    opener = ShardOpener(folders, LocalCopies(folders), max_line_bytes=options.max_line_bytes)
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
