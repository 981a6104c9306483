"""The type of a parser under test, and the list of parsers."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

Files = dict[str, bytes]


@dataclass(frozen=True)
class Parser:
    """A parser and its inputs.

    Attributes:
        inputs: strategy for files by name, which are written into the parser's folder.
        parse: reads them from the folder and uses the result. Called once without an input, it must
            accept the folder's valid files.
        named: every refusal must contain one of these texts; empty if the caller adds the name.
        mebibytes: memory that an input may take, if less than what is given for all parsers.
    """

    inputs: SearchStrategy[Files]
    parse: Callable[[], object]
    named: tuple[str, ...] = ()
    mebibytes: float = math.inf


# The parsers by module: functions that make the `Parser` in an empty folder.
_FUNCTIONS = {
    "run_files": "yaml_file overrides settings metrics pictures run_record",
    "containers": "documents corpus_shards archives tables zst_files gz_files",
    "rows": "row_formats json_arrays text_tables arrow_folders energon_folders dataset_infos",
    "templates": "chat_templates template_rows",
    "caches": "offset_index lengths_cache token_index",
    "samples": "conversations demonstrations statistics",
    "media": "images videos",
    "weights": "safetensors shard_index adapter manifest exported_folder",
    "model_files": "hf_config generation_config preprocessor pi07_config tokenizer "
    "prompt_tokenizer action_tokenizer",
}
# Name to `module:function`.
PARSERS = {
    name.removesuffix("_file"): f"fuzzing.{module}:{name}"
    for module, names in _FUNCTIONS.items()
    for name in names.split()
}
# Fraction of the requested inputs for parsers that take a second per input.
SHARES = {"pictures": 0.05}


def written_back(kind: Any, folder: Path) -> None:
    """Read a configuration of a class, write it, and read it again.

    Raises:
        AssertionError: that is another one.
    """
    config, again = kind.from_pretrained(folder), folder / "again"
    again.mkdir(exist_ok=True)
    config.save_pretrained(again)
    if kind.from_pretrained(again) != config:
        raise AssertionError("a configuration written back is another")


def make_parser(target: str, folder: Path) -> Parser:
    """Import a parser's module and let it write its valid files into the folder.

    Args:
        target: `module:function`.
    """
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(folder)
