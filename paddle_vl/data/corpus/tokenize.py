"""Tokenizes texts into memory-mapped token files, in several processes.

The files do not depend on the number of processes: documents keep the order of the data files.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from paddle_vl.data.corpus.opener import ShardOpener, open_shards
from paddle_vl.data.corpus.shard import Shard, refuse_empty, text_of
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import (
    BadSampleError,
    OnBadSample,
    check_unicode,
    parse_object,
    sample_at,
)
from paddle_vl.data.worker_pool import results_in_order
from paddle_vl.files.text_file import replacing
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

# Documents of a job.
_CHUNK = 512


class Tokenized(NamedTuple):
    """Documents of one job.

    Attributes:
        ids: of all documents, each with its end.
        sizes: ids of each document.
        skipped: bad documents by kind of fault.
    """

    ids: np.ndarray
    sizes: np.ndarray
    skipped: Counter[str]


@dataclass(frozen=True)
class TextTokens:
    """Tokenizes rows of texts. It can be pickled.

    Attributes:
        file: tokenizer.json.
        end: token behind every document.
        columns: other names of a row's entries.
    """

    file: Path
    end: str
    columns: Mapping[str, str]
    on_bad_sample: OnBadSample

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `file`."""
        return read_tokenizer(self.file)

    @cached_property
    def special(self) -> dict[int, str]:
        """Names of special tokens by id, which a text must not contain."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: str(token.content) for number, token in added.items() if token.special}

    @property
    def end_id(self) -> int:
        """
        Raises:
            ValueError: the tokenizer has no such token.
        """
        found = self.tokenizer.token_to_id(self.end)
        if found is None:
            raise ValueError(
                f"{self.file} has no token {self.end!r}: name the one that ends documents with "
                "--end-token"
            )
        return found

    def ids(self, row: Mapping[str, Any]) -> list[int]:
        """Ids of a row's text and the end.

        Raises:
            BadSampleError: it has no text, or a special token in it.
        """
        named = {name: row[key] for name, key in self.columns.items() if key in row}
        text = text_of({**row, **named})
        refuse_empty(bool(text.strip()))
        check_unicode(text)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if forged := self.special.keys() & set(ids):
            names = ", ".join(sorted(self.special[number] for number in forged))
            raise BadSampleError(
                "special_token", f"the text contains the special token(s) {names}; remove them"
            )
        return [*ids, self.end_id]

    def chunk(self, shard: Shard, begin: int, stop: int) -> Tokenized:
        """The documents of some rows of a shard."""
        documents: list[list[int]] = []
        skipped: Counter[str] = Counter()
        for row in range(begin, stop):
            try:
                with sample_at(f"{shard.path}:document {row + 1}"):
                    documents.append(self.ids(shard.read(row)))
            except BadSampleError as error:
                if self.on_bad_sample == "fail":
                    raise BadSampleError(error.kind, error.reason, shard.place(row)) from error
                skipped[error.kind] += 1
        flat = [number for document in documents for number in document]
        sizes = np.array([len(document) for document in documents], dtype=np.int32)
        return Tokenized(np.array(flat, dtype=np.int32), sizes, skipped)


class Written(NamedTuple):
    """What was written: documents, tokens and skipped documents by kind of fault."""

    documents: int
    tokens: int
    skipped: dict[str, int]


def write_token_files(
    files: Sequence[Path],
    prefix: Path,
    tokens: TextTokens,
    opener: ShardOpener,
    num_processes: int = 1,
) -> Written:
    """Tokenize the documents of all files into `prefix`.bin, .idx and .json.

    The .json says which tokenizer made them; a run with another one refuses the files.

    Raises:
        BadSampleError: a bad document where they are not skipped, as `file:line: reason`.
        ValueError: a file exists, or the tokenizer lacks the end token.
        RuntimeError: a file cannot be read, or there is no document.
    """
    record = prefix.with_name(prefix.name + ".json")
    binary, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    taken = [path for path in (record, binary, index) if path.exists()]
    if taken:
        raise ValueError(f"{taken[0]} exists already: choose another output, or remove it")
    tokens.end_id  # noqa: B018 - refused before long work
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Workers are the processes; the library's own threads would compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    skipped: Counter[str] = Counter()
    shards = open_shards([str(file) for file in files], opener, num_processes)
    jobs = (
        (shard, begin, min(begin + _CHUNK, shard.count))
        for shard in shards
        for begin in range(0, shard.count, _CHUNK)
    )
    workers = num_processes if num_processes > 1 else 0
    with TokenFileWriter(prefix, highest_id(tokens.tokenizer)) as writer:
        for done in results_in_order(TextTokens.chunk, tokens, jobs, workers):
            writer.add(done.ids, done.sizes)
            skipped += done.skipped
        if not writer.num_documents:
            raise RuntimeError(f"no document of {len(files)} file(s) can be used: {dict(skipped)}")
    content = {
        "tokenizer": tokenizer_hash(tokens.tokenizer.to_str()),
        "end_token": tokens.end,
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "skipped": dict(skipped),
        "files": [path.name for path in files],
    }
    with replacing(record) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    # Finds the sums of the .bin, so that the first run need not read it.
    opener(index)
    return Written(writer.num_documents, writer.num_tokens, dict(skipped))


def tokenizer_hash(content: str) -> str:
    """Hash of a tokenizer.json, as the library writes it."""
    return hashlib.sha256(content.encode()).hexdigest()


def check_same_tokenizer(index: Path, content: str) -> None:
    """Check that a token file was written with this tokenizer, if its .json says so.

    Args:
        index: the .idx.
        content: the tokenizer.json of the run.

    Raises:
        ValueError: it was another one.
        RuntimeError: the .json is damaged.
    """
    record = index.with_suffix(".json")
    if not record.is_file():
        return
    try:
        written = parse_object(record.read_bytes(), "the tokenizer's hash").get("tokenizer")
    except BadSampleError as error:
        raise RuntimeError(
            f"{record}, which names the tokenizer of {index.name}, is damaged ({error.reason}): "
            "restore it, or remove it if that tokenizer is certain"
        ) from error
    if written is not None and written != tokenizer_hash(content):
        raise ValueError(
            f"{index} was written with another tokenizer than the run's (see {record.name}): "
            f"tokenize its texts with the {TOKENIZER_FILE} of data.processor or model.pretrained"
        )
