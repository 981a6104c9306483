"""The data set of conversations that data.train or data.eval name."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paddle_vl.config.data_sources import is_container
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.corpus.opener import ShardOpener, shard_kind
from paddle_vl.data.corpus.shard import JsonlShard
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.remote import RemoteFile, RemoteSettings
from paddle_vl.data.rows.dataset_info import DatasetInfo
from paddle_vl.data.rows.spelling import row_sources
from paddle_vl.families.vlm.inputs.dataset import ConversationData, MessagesDataset
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.rows_dataset import RowsDataset
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.files.hub import local_folder

_LINES = (".jsonl", ".json", ".ndjson")
# `data.checks` of conversations, for models with task prompts.
_CHECKS = ("tables", "spotting", "text")


def open_conversations(
    entries: Sequence[str | RowSourceConfig],
    data: VLDataConfig,
    processor: VLProcessor,
    seed: int,
    reader_class: Callable[..., RowReader] = RowReader,
    measures: bool = False,
) -> ConversationData:
    """Open what the entries name: files of lines, or a mixture of sources.

    Args:
        reader_class: of the rows; `PreferenceReader` for answers that are compared.
        measures: the lengths of all samples are needed next.

    Raises:
        RuntimeError: a file is missing or damaged, or a data set cannot be downloaded.
        BadSampleError: where bad samples are not skipped, the first.
        ValueError: an entry names nothing, or there are no rows.
    """
    make_reader = partial(row_reader, data, processor, reader_class=reader_class)
    files = [entry for entry in entries if isinstance(entry, str) and is_lines(Path(entry))]
    if len(files) == len(entries) and data.mix_strategy == "concat":
        opened: ConversationData = MessagesDataset(
            files,
            processor,
            data.max_length,
            data.on_bad_sample,
            max_line_bytes=data.max_line_bytes,
            reader=make_reader(),
            cache=Cache(data.cache),
            # Workers measure side by side.
            measures=measures and not data.num_workers and data.earlier_reasoning != "split",
        )
    else:
        info = None if data.dataset_info is None else DatasetInfo.read(data.dataset_info)
        sources = row_sources(entries, info)
        opened = RowsDataset(
            sources,
            processor,
            data.max_length,
            data.on_bad_sample,
            readers=[make_reader(source) for source in sources],
            strategy=data.mix_strategy,
            seed=seed,
            opener=ShardOpener(Cache(data.cache), max_line_bytes=data.max_line_bytes),
            fetch=partial(local_folder, kind="dataset"),
        )
    if data.earlier_reasoning == "split":
        opened.split_rows()
    return opened


def row_reader(
    data: VLDataConfig,
    processor: VLProcessor,
    source: RowSourceConfig | None = None,
    reader_class: Callable[..., RowReader] = RowReader,
) -> RowReader:
    """The reader of the rows of a source, or of files without settings of their own.

    Raises:
        ValueError: a setting of tasks, which the model has not.
    """
    checks = data.checks
    if checks is None:
        # Of pairs one answer may be meant to be bad.
        checks = _CHECKS if processor.task_prompts and reader_class is RowReader else ()
    of_tasks = [name for name in ("tables", "spotting") if name in checks]
    of_tasks += ["otsl"] if data.html_tables == "otsl" else []
    if of_tasks and not processor.task_prompts:
        raise ValueError(
            f"{', '.join(of_tasks)} in data.checks or data.html_tables is for models with task "
            "prompts, as PaddleOCR-VL: leave it out"
        )
    own = source or RowSourceConfig(path=".")
    settings = RowSettings(
        data.boxes,
        data.clip_boxes,
        tuple(data.special_tokens),
        frozenset(processor.forbidden.values()),
        own.columns or data.columns,
        own.only_columns,
        own.tags,
        data.mask_history,
        data.train_on_prompt,
        tasks=processor.task_prompts,
        checks=tuple(checks),
        html_tables=data.html_tables,
    )
    remote = None
    if data.allow_remote:
        remote = RemoteSettings(
            data.remote_max_bytes, data.remote_timeout_s,
            RemoteSettings.cache if data.cache is None else Path(data.cache) / "remote",
            tuple(data.remote_hosts),
        )  # fmt: skip
        remote = partial(RemoteFile, settings=remote)
    return reader_class(settings, own.format or data.format, data.allow_outside, remote)


def is_lines(path: Path) -> bool:
    """Whether a path is a file of lines; one that does not exist is, for the error of reading."""
    if path.suffix.lower() not in _LINES or is_container(path) or path.is_dir():
        return False
    if not path.is_file():
        return not any(mark in str(path) for mark in "#%,:")
    return shard_kind(path) is JsonlShard
