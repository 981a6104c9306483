"""Conversations and texts of clients to prompts, with the rules for their images and videos.

What a client names is not trusted: files are opened in one folder alone, addresses only where that
is allowed, and public ones. The length of a prompt is checked before pixels are decoded, so that
what a request takes is bounded by the tokens that it may have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError, sample_at
from paddle_vl.data.media_file import MediaFolder, media_source
from paddle_vl.data.remote import RemoteFile, RemoteSettings
from paddle_vl.data.video_reader import FrameFiles
from paddle_vl.serving.answer_parts import THINK
from paddle_vl.serving.openai_protocol import ApiError

_FORMAT = "messages"
# Tokens among which an opened reasoning is looked for.
_LAST = 16


@dataclass(frozen=True)
class MediaRules:
    """What clients may name.

    Attributes:
        folder: of the files; None for none.
        allow_remote: whether http(s) addresses are fetched, of public hosts.
    """

    folder: Path | None = None
    allow_remote: bool = False


class ServedPrompt(NamedTuple):
    """A prompt.

    Attributes:
        ids: `[L]` int64.
        visual: pixels and grids, as of the processor.
        opens_reasoning: whether the answer begins within reasoning.
    """

    ids: np.ndarray
    visual: Mapping[str, np.ndarray] = {}
    opens_reasoning: bool = False


class Prompts:
    """Makes prompts, in any thread.

    Args:
        processor: a `VLProcessor`.
        vocab: number of ids that the model knows.
        max_length: most tokens of a prompt with its answer.
    """

    def __init__(self, processor: Any, vocab: int, max_length: int, rules: MediaRules):
        self.processor, self.vocab, self.max_length = processor, vocab, max_length
        self._rules = rules

    def of_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], variables: Any
    ) -> ServedPrompt:
        """The prompt of a conversation; an answer that it ends with is continued.

        Args:
            tools: definitions in OpenAI's form.
            variables: of the chat template.

        Raises:
            ApiError: of status 400, with what cannot be used.
        """
        row = {"messages": [*map(_literal, messages)], "tools": tools}
        if variables:
            row["chat_template_kwargs"] = variables
        with TemporaryDirectory(prefix="paddle-vl-") as work:
            try:
                with sample_at("the request"):
                    batch = self._batch(row, Path(work))
            except BadSampleError as error:
                reason = error.reason.removeprefix(f"a row of format {_FORMAT}: ")
                # Without the folders of this machine.
                for name, shown in self._own_names(work):
                    reason = reason.replace(name, shown)
                raise ApiError(400, reason, "messages", error.kind) from error
        ids = batch.pop("input_ids")[0]
        del batch["attention_mask"]
        self.check_length(len(ids))
        last = self.processor.decode(ids[-_LAST:], skip_special_tokens=False)
        return ServedPrompt(ids, batch, last.rstrip().endswith(THINK))

    def of_text(self, text: str | Sequence[int]) -> ServedPrompt:
        """The prompt of a text as it is, control tokens included, or of token ids.

        Raises:
            ApiError: of status 400: an id is unknown or a placeholder, or there is none.
        """
        ids = self.processor.tokenizer.encode(text) if isinstance(text, str) else [*text]
        media = {self.processor.image_token_id, self.processor.video_token_id}
        for token_id in ids:
            if token_id in media:
                reason = "it has a placeholder of an image or a video: ask /v1/chat/completions"
                raise ApiError(400, f"prompt: {reason}", "prompt")
            if not 0 <= token_id < self.vocab:
                reason = f"token {token_id} is not from 0 to {self.vocab - 1}"
                raise ApiError(400, f"prompt: {reason}", "prompt")
        if not ids:
            raise ApiError(400, "prompt: it is empty; give at least one token", "prompt")
        self.check_length(len(ids))
        return ServedPrompt(np.array(ids, dtype=np.int64))

    def check_length(self, prompt: int, answer: int = 1) -> None:
        """Raises an ApiError of status 400 if a prompt and its answer have no room."""
        if prompt + answer > self.max_length:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_length} tokens, and the request "
                f"has {prompt} of its prompt and wants {answer} of the answer: shorten it, or make "
                "images smaller",
                code="context_length_exceeded",
            )

    def _own_names(self, work: str) -> Iterator[tuple[str, str]]:
        """What messages call files of this machine, and what clients are told."""
        if (renderer := self.processor.template.renderer) is not None:
            yield renderer.name, "the chat template"
        for folder in (work, self._rules.folder):
            if folder is not None and Path(folder).name:
                yield f"{folder}/", ""
                yield str(folder), "the server's folder"

    def _batch(self, row: Mapping[str, Any], work: Path) -> dict[str, np.ndarray]:
        """A row as the processor encodes it."""
        canonical = to_canonical(row, RowSettings(nulls_are_values=True), format=_FORMAT)
        conversation = canonical.with_sources(lambda kind, source: self._source(kind, source, work))
        outline = self.processor.media(conversation, with_pixels=False)
        videos = outline.video_prompts
        num_visual = sum(len(each.timestamps) * each.tokens_per_patch for each in videos)
        self.check_length(num_visual + sum(outline.num_image_tokens))
        return self.processor.encode_prompts([conversation])

    def _source(self, kind: str, source: Any, work: Path) -> Any:
        if isinstance(source, list):
            return FrameFiles(tuple(self._source("image", frame, work) for frame in source))
        if isinstance(source, bytes):
            if kind == "image":
                return source
            # PyAV is given files alone.
            file = work / f"video{len([*work.iterdir()])}"
            file.write_bytes(source)
            return str(file)
        is_remote = source.startswith(("http://", "https://"))
        if is_remote and not self._rules.allow_remote:
            raise _refused(f"{kind}s are not fetched", "--allow-remote")
        if not is_remote and self._rules.folder is None:
            raise _refused(f"{kind}s are not read from files", "--allowed-media-path")
        fetched = partial(RemoteFile, settings=RemoteSettings(cache=work))
        folder = MediaFolder(self._rules.folder, allow_outside=False, remote=fetched)
        try:
            return media_source(source, kind, f"{kind} source", folder)
        except BadSampleError as error:
            if error.kind != "outside_path":
                raise
            # Without the folders of this machine.
            what = f"this {kind} is not in the server's folder"
            raise _refused(what, "another --allowed-media-path") from None


def _refused(what: str, option: str) -> BadSampleError:
    reason = f"{what}: send a data URI, or start the server with {option}"
    return BadSampleError("refused_source", reason)


def _literal(message: Any) -> Any:
    """A message whose text is literal: in plain contents of data, tags are places of images."""
    if not isinstance(message, Mapping):
        return message
    # What OpenAI's client makes of an answer is no part of it.
    message = {key: each for key, each in message.items() if each is not None and key != "parsed"}
    if message.get("role") == "developer":
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        message["content"] = [*map(_with_path, content)]
    return message


def _with_path(part: Any) -> Any:
    """A part of which a `file://` address is a path."""
    for key in ("image_url", "video_url"):
        source = part.get(key) if isinstance(part, Mapping) else None
        address = source.get("url") if isinstance(source, Mapping) else source
        if isinstance(address, str) and address.startswith("file://"):
            part = {**part, key: {"url": unquote(address.removeprefix("file://"))}}
    return part
