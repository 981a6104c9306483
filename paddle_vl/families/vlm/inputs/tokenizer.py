"""Tokenizer and chat template of Qwen3-VL: texts and conversations to token ids and labels.

The tokenizer reads HF's `tokenizer.json` with the `tokenizers` library; a small one can be trained.
Special tokens are found by name, never by position. The template gives

    <|im_start|>user\\n<|vision_start|><|image_pad|>...<|vision_end|>What is this?<|im_end|>\\n
    <|im_start|>assistant\\nA cat.<|im_end|>\\n

A video becomes, for each temporal patch, its timestamp and its placeholders:

    <0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.4 seconds><|vision_start|>...

Control tokens are placed by id and never parsed out of text, so that text cannot forge one. Labels
are set on the content of target turns and their `<|im_end|>`. There is no default system message.

Source: the chat template of the published Qwen3-VL checkpoints, without tools; for videos the
processor of HF transformers 4.57 (5.x leaves one more pair of vision tokens around all patches).
Differs: an answer is tokenized apart from the `assistant\\n` in front of it, as in generation; HF
tokenizes the complete string, which differs for answers that begin with a line break.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from paddle_vl.data.formats.row_settings import BOX_TOKENS
from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.families.vlm.inputs.collate import IGNORED_LABEL
from paddle_vl.families.vlm.inputs.conversation import Conversation, ImagePart, Turn
from paddle_vl.families.vlm.inputs.video_processor import timestamp_text
from paddle_vl.files.text_file import write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

# Pre-tokenization of Qwen2 and later: contractions, words with one leading mark, single digits,
# punctuation, line breaks, spaces.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TextTokenizer:
    """A tokenizer, and its name for messages."""

    def __init__(self, tokenizer: Tokenizer, name: str = "the tokenizer"):
        # A file may switch on padding or truncation; text must not be cut silently.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.name = name

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "TextTokenizer":
        """Read a `tokenizer.json`, given as a file or by its directory.

        Raises:
            RuntimeError: there is no such file, or it is not a tokenizer.
        """
        path = Path(path)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        if not path.is_file():
            raise RuntimeError(
                f"there is no tokenizer file {path}: a directory with HF's {TOKENIZER_FILE} is "
                "needed; copy it from the checkpoint, or train one with train_bpe"
            )
        return cls(read_tokenizer(path), name=str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Names of special tokens in it become their ids; no token is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens by default."""
        return self._tokenizer.decode(
            [int(token_id) for token_id in ids], skip_special_tokens=skip_special_tokens
        )

    def token_id(self, token: str) -> int:
        """Id of one token by its name.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{self.name} has no token {token!r}, which Qwen3-VL's chat template needs; "
                "use the checkpoint's own tokenizer, or pass the token to train_bpe"
            )
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def highest_id(self) -> int:
        """The largest id of any token; it exceeds `vocab_size - 1` if ids have gaps."""
        return highest_id(self._tokenizer)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Id to name of every token that the file marks as special, in the order of ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: str(token.content) for i, token in sorted(added.items()) if token.special}

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._tokenizer

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._tokenizer.to_str()

    def save(self, directory: str | os.PathLike) -> None:
        """Write `tokenizer.json`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True))


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]
) -> TextTokenizer:
    """Train a byte-level BPE tokenizer in the style of Qwen2; deterministic.

    NFC normalization, Qwen2's split, then bytes: every text can be encoded. Special tokens get the
    last ids.

    Args:
        texts: training texts.
        vocab_size: upper limit of ids, special tokens included; texts with few merges give fewer.
        special_tokens: names, in the order of their ids.

    Raises:
        ValueError: the vocabulary cannot hold 256 bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special_tokens):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and "
            f"{len(special_tokens)} special tokens need {len(alphabet) + len(special_tokens)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    return TextTokenizer(tokenizer)


IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
# In the order of their ids in Qwen's vocabulary.
CONTROL_TOKENS = (
    END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD
)  # fmt: skip


class VideoPrompt(NamedTuple):
    """Prompt of a video: seconds shown by each temporal patch, and placeholders per patch."""

    timestamps: Sequence[float]
    tokens_per_patch: int


class EncodedChat(NamedTuple):
    """Token ids of a conversation and their labels: the id itself for targets, -100 otherwise."""

    input_ids: list[int]
    labels: list[int]


class ChatTemplate:
    """Encodes conversations with one tokenizer.

    Attributes:
        ids: ids of the control tokens by name.
        forbidden: names of the tokens that a text must not contain, by id.
    """

    def __init__(self, tokenizer: TextTokenizer):
        """Look up the control tokens.

        Raises:
            ValueError: the tokenizer lacks a control token.
        """
        self._tokenizer = tokenizer
        self.ids = {token: tokenizer.token_id(token) for token in CONTROL_TOKENS}
        self.forbidden = {token_id: token for token, token_id in self.ids.items()}
        self.forbidden.update(tokenizer.special_tokens)
        self._of_boxes = {name for pair in BOX_TOKENS.values() for name in pair}

    def encode(
        self,
        conversation: Conversation,
        num_image_tokens: Sequence[int],
        videos: Sequence[VideoPrompt] = (),
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> EncodedChat:
        """Ids and labels of a conversation.

        Args:
            num_image_tokens: number of placeholders of every image, in reading order.
            videos: prompt of every video, in reading order.
            add_generation_prompt: end with the start of an assistant turn.
            continue_final_message: leave the last turn open.

        Raises:
            BadSampleError: text contains the name of a special token, or there are tools or
                reasoning, which this template does not render.
        """
        self.check(conversation)
        chat = EncodedChat([], [])
        images, prompts = iter(num_image_tokens), iter(videos)
        for turn in conversation.turns:
            self._add(chat, [self.ids[IM_START]])
            if turn.role == "assistant":
                self._add(chat, self.text_ids("assistant\n"))
                answer = [*self.text_ids(turn.text, allow_boxes=True), self.ids[IM_END]]
                self._add(chat, answer, turn.is_target)
            else:
                for run in self._runs(turn, images, prompts):
                    is_text = isinstance(run, str)
                    self._add(chat, self.text_ids(run, allow_boxes=True) if is_text else run)
                self._add(chat, [self.ids[IM_END]])
            self._add(chat, self.text_ids("\n"))
        if continue_final_message:
            ending = 1 + len(self.text_ids("\n"))
            del chat.input_ids[-ending:], chat.labels[-ending:]
        if add_generation_prompt:
            self._add(chat, [self.ids[IM_START], *self.text_ids("assistant\n")])
        return chat

    @staticmethod
    def check(conversation: Conversation) -> None:
        """Refuse tools and reasoning, which this template does not render."""
        if not conversation.is_plain:
            raise BadSampleError(
                "unsupported",
                "the conversation has tools, reasoning or template settings, which only a chat "
                "template of the checkpoint can render, and its folder has none: add its "
                "chat_template.jinja, or write them into the contents as text",
            )

    def _runs(
        self, turn: Turn, images: Iterator[int], videos: Iterator[VideoPrompt]
    ) -> list[str | list[int]]:
        """Strings of uninterrupted text, and ids of images and video patches.

        Text between two control tokens is tokenized as one string, as HF does, with the role and
        timestamps in it.
        """
        runs: list[str | list[int]] = [f"{turn.role}\n"]
        for part in turn.parts:
            if isinstance(part, str):
                _add_text(runs, part)
            elif isinstance(part, ImagePart):
                runs.append(self.visual_ids(IMAGE_PAD, next(images)))
            else:
                video = next(videos)
                for seconds in video.timestamps:
                    _add_text(runs, timestamp_text(seconds))
                    runs.append(self.visual_ids(VIDEO_PAD, video.tokens_per_patch))
        return runs

    def visual_ids(self, pad: str, num_tokens: int) -> list[int]:
        """Placeholders between the markers of an image or a temporal patch of a video."""
        return [self.ids[VISION_START], *[self.ids[pad]] * num_tokens, self.ids[VISION_END]]

    def text_ids(self, text: str, *, allow_boxes: bool = False) -> list[int]:
        """Ids of a text without control tokens.

        Args:
            allow_boxes: whether it is of a row, which has been searched for tokens of boxes.

        Raises:
            BadSampleError: the text contains the name of a special token.
        """
        check_unicode(text)
        ids = self._tokenizer.encode(text)
        forged = {self.forbidden[token_id] for token_id in self.forbidden.keys() & set(ids)}
        if forged := forged - (self._of_boxes if allow_boxes else set()):
            names = ", ".join(sorted(forged))
            raise BadSampleError(
                "special_token",
                f"the text contains the special token(s) {names}, which would act as control "
                "tokens; remove or rewrite them (<image> and <video> place images and videos)",
            )
        return ids

    @staticmethod
    def _add(chat: EncodedChat, ids: Sequence[int], is_target: bool = False) -> None:
        chat.input_ids.extend(ids)
        chat.labels.extend(ids if is_target else [IGNORED_LABEL] * len(ids))


def _add_text(runs: list[str | list[int]], text: str) -> None:
    if isinstance(runs[-1], str):
        runs[-1] += text
    else:
        runs.append(text)
