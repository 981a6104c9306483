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


# Name to `module:function`; the function makes the `Parser` in an empty folder.
PARSERS = {
    "yaml": "fuzzing.run_files:yaml_file",
    "overrides": "fuzzing.run_files:overrides",
    "settings": "fuzzing.run_files:settings",
    "metrics": "fuzzing.run_files:metrics",
    "pictures": "fuzzing.run_files:pictures",
    "run_record": "fuzzing.run_files:run_record",
    "documents": "fuzzing.corpora:documents",
    "corpus_shards": "fuzzing.corpora:shards",
    "archives": "fuzzing.containers:archives",
    "tables": "fuzzing.containers:tables",
    "zst_files": "fuzzing.containers:zst_files",
    "gz_files": "fuzzing.containers:gz_files",
    "row_formats": "fuzzing.rows:row_formats",
    "json_arrays": "fuzzing.rows:json_arrays",
    "text_tables": "fuzzing.rows:text_tables",
    "arrow_folders": "fuzzing.rows:arrow_folders",
    "energon_folders": "fuzzing.rows:energon_folders",
    "dataset_infos": "fuzzing.rows:dataset_infos",
    "chat_templates": "fuzzing.templates:chat_templates",
    "template_rows": "fuzzing.templates:template_rows",
    "offset_index": "fuzzing.caches:offset_index",
    "lengths_cache": "fuzzing.caches:lengths_cache",
    "token_index": "fuzzing.caches:token_index",
    "conversations": "fuzzing.samples:conversations",
    "demonstrations": "fuzzing.samples:demonstrations",
    "statistics": "fuzzing.samples:statistics",
    "images": "fuzzing.media:images",
    "videos": "fuzzing.media:videos",
    "safetensors": "fuzzing.weights:safetensors",
    "shard_index": "fuzzing.weights:shard_index",
    "adapter": "fuzzing.weights:adapter",
    "manifest": "fuzzing.weights:manifest",
    "exported_folder": "fuzzing.weights:exported_folder",
    "hf_config": "fuzzing.model_files:hf_config",
    "generation_config": "fuzzing.model_files:generation_config",
    "preprocessor": "fuzzing.model_files:preprocessor",
    "pi07_config": "fuzzing.model_files:pi07_config",
    "tokenizer": "fuzzing.model_files:text_tokenizer",
    "prompt_tokenizer": "fuzzing.model_files:prompt_tokenizer",
    "action_tokenizer": "fuzzing.model_files:action_tokenizer",
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
