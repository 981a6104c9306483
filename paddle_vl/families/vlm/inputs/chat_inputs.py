"""What a processor makes of chat messages: batches for generation or with labels, and text.

Shapes: B conversations, L length, P patches, n images or videos.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.reader import parse_record
from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.data.media_file import ImageSource
from paddle_vl.data.video_reader import VideoSource
from paddle_vl.families.vlm.inputs.collate import SampleEncoder, joined_visual, pad_rows
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.files.names import Foreign, explains

Message = Mapping[str, Any]
Messages = Sequence[Message] | Sequence[Sequence[Message]]

_NOT_CUT = Foreign("nothing is cut: shorten the messages, or bound pixels at from_pretrained")
# Arguments of HF's processors.
_CALL = {
    "max_length": _NOT_CUT,
    "padding": Foreign("rows are padded to the longest", (None, False, True, "longest")),
    "padding_side": Foreign("rows are padded on the left, for generation", (None, "left")),
    "return_attention_mask": Foreign("it is always there: leave it out", (None, True)),
    "return_tensors": Foreign("arrays are NumPy's, which the model takes", (None, "np")),
    "text": Foreign("give messages: the processor writes the prompt around images and videos"),
    "truncation": _NOT_CUT,
}
_TEMPLATE = _CALL | {
    "chat_template": Foreign("the template is the one of the model's folder"),
    "documents": Foreign("write them into the messages"),
}


class ChatInputs(SampleEncoder):
    """Base of the processor: conversations in, batches and text out; attributes as of it."""

    tokenizer: TextTokenizer
    forbidden: dict[int, str]
    pad_token_id: int

    @explains(_CALL, "the processor")
    def __call__(
        self,
        messages: Messages,
        images: Sequence[ImageSource] | Sequence[Sequence[ImageSource]] | None = None,
        videos: Sequence[VideoSource] | Sequence[Sequence[VideoSource]] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        labels: bool = False,
    ) -> dict[str, np.ndarray]:
        """Messages, images and videos to a left-padded batch, for generation or with labels.

        A conversation that ends with the user is followed by an opened answer; the answer that
        others end with is continued.

        Args:
            messages: one conversation (a list of messages) or several (a list of lists).
            images: paths, PIL images or uint8 arrays for `<image>` tags and image parts without a
                source, in order; for several conversations a list of lists.
            videos: the same for videos: paths, `VideoFrames`, uint8 arrays of frames, or lists of
                the pictures of frames that are sampled already.
            tools: definitions of tools in OpenAI's form, of every conversation.
            add_generation_prompt: False ends with the last message as it is, True opens an answer
                after it, whoever wrote it.
            continue_final_message: True leaves the last message open, whoever wrote it.
            labels: whole conversations, and the labels that training uses.

        Returns:
            As `encode_prompts`; with `labels` also these, `[B, L]` int64 and -100 outside targets.

        Raises:
            BadSampleError: as for training records.
            ValueError: arguments that exclude each other, or of HF's processors with no meaning
                here.
        """
        _check_ends(add_generation_prompt, continue_final_message, labels)
        conversations = _parsed(messages, images, videos, tools)
        if labels:
            for conversation in conversations:
                conversation.check_targets()
            samples = [self._encode(each, with_labels=True) for each in conversations]
            return self._batch(samples, with_labels=True)
        return self.encode_prompts(conversations, add_generation_prompt, continue_final_message)

    def encode_prompts(
        self,
        conversations: Sequence[Conversation],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
    ) -> dict[str, np.ndarray]:
        """A left-padded batch for generation; the ends are those of a call.

        Returns:
            input_ids and attention_mask `[B, L]` int64; with images or videos, the pixels and
            grids of all of them, in order. Errors are those of `encode_sample`.
        """
        chooses = add_generation_prompt is None and continue_final_message is None
        samples = []
        for each in conversations:
            continues = chooses and each.messages[-1]["role"] == "assistant"
            opens = add_generation_prompt or (chooses and not continues)
            samples.append(self._encode(each, opens, continue_final_message or continues))
        return self._batch(samples)

    @explains(_TEMPLATE, "apply_chat_template")
    def apply_chat_template(
        self,
        messages: Messages,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
    ) -> Any:
        """The prompt as in HF: text, token ids, or a batch for the model.

        Args:
            messages, images, videos, tools: as of a call.
            add_generation_prompt: open an answer at the end.
            continue_final_message: leave the last message open instead.
            tokenize: token ids `[B, L]` in place of text, in which an image has one placeholder.
            return_dict: with `tokenize`, the whole batch, which `generate` takes.

        Returns:
            Text, for several conversations a list of texts; or see `tokenize`, `return_dict`.
        """
        _check_ends(add_generation_prompt, continue_final_message, False)
        ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if tokenize:
            batch = self(messages, images, videos, tools=tools, **ends)
            return batch if return_dict else batch["input_ids"]
        if return_dict:
            raise ValueError("return_dict needs tokenize=True: text alone is not a batch")
        parsed = _parsed(messages, images, videos, tools)
        texts = [self.template.text(each, **ends) for each in parsed]
        return texts if _are_several(messages) else texts[0]

    @explains({"clean_up_tokenization_spaces": Foreign("text is not changed")}, "decode")
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of one row of ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, ids: Iterable[Any], *args: Any, **settings: Any) -> list[str]:
        """Texts of rows of ids; settings as of `decode`."""
        return [self.decode(row, *args, **settings) for row in ids]

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text without control tokens.

        Raises:
            BadSampleError: the text contains the name of a special token.
        """
        check_unicode(text)
        ids = self.tokenizer.encode(text)
        if forged := self.forbidden.keys() & set(ids):
            names = ", ".join(sorted(self.forbidden[token_id] for token_id in forged))
            raise BadSampleError(
                "special_token",
                f"the text contains the special token(s) {names}, which would act as control "
                "tokens; remove or rewrite them",
            )
        return ids

    def _batch(
        self, samples: Sequence[Mapping[str, np.ndarray]], with_labels: bool = False
    ) -> dict[str, np.ndarray]:
        rows = [sample["input_ids"] for sample in samples]
        length = max(len(row) for row in rows)
        batch = {
            "input_ids": pad_rows(rows, length, self.pad_token_id, "left"),
            "attention_mask": pad_rows([np.ones_like(row) for row in rows], length, 0, "left"),
        }
        if with_labels:
            labels = [sample["labels"] for sample in samples]
            batch["labels"] = pad_rows(labels, length, IGNORE_INDEX, "left")
        return batch | joined_visual(samples)


def _check_ends(opens: bool | None, continues: bool | None, labels: bool) -> None:
    if opens and continues:
        raise ValueError(
            "add_generation_prompt opens an answer and continue_final_message continues the last "
            "message: give one of them"
        )
    if labels and (opens or continues):
        raise ValueError(
            "labels are those of whole conversations: leave add_generation_prompt and "
            "continue_final_message out"
        )


def _are_several(messages: Messages) -> bool:
    return not (messages and isinstance(messages[0], Mapping))


def _parsed(
    messages: Messages, images: Any, videos: Any, tools: Sequence[Any] | None
) -> list[Conversation]:
    """Conversations with their images and videos.

    Raises:
        BadSampleError: as for training records.
        ValueError: no conversations, or another number of lists of images or videos.
    """
    batch: Sequence[Any] = messages
    media: dict[str, Any] = {"images": images, "videos": videos}
    if not _are_several(messages):
        batch, media = [messages], {name: [own or ()] for name, own in media.items()}
    if not batch:
        raise ValueError("no conversation given: at least one is needed")
    for name, lists in media.items():
        media[name] = lists = [()] * len(batch) if lists is None else lists
        if len(lists) != len(batch):
            raise ValueError(
                f"{len(batch)} conversations but {len(lists)} lists of {name}: give one list "
                "per conversation (empty where it has none)"
            )
    row = {"tools": tools}
    return [
        parse_record(
            row | {"messages": each, "images": [*(own or ())], "videos": [*(clips or ())]},
            nulls_are_values=True,
        )
        for each, own, clips in zip(batch, *media.values(), strict=True)
    ]
