"""Conversations to token ids and labels with a chat template.

The text is tokenized as a whole, as HF does, unless it is cut. A video's placeholder is replaced by
the timestamps of its patches before that; how often a placeholder stands for a patch or an image is
a matter of ids, because it is a token by itself.

A vision start and end enclose each patch of a video. The template's own pair around the video is
replaced too, as by HF transformers up to 5.9; or it stays, as it does from 5.10 on.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import BOX_TOKENS
from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.families.vlm.templates.answer_spans import Span, learned_spans
from paddle_vl.families.vlm.templates.built_in import (
    CONTROL_TOKENS,
    IM_END,
    IM_START,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)
from paddle_vl.families.vlm.templates.environment import Rendered
from paddle_vl.families.vlm.templates.messages import Message
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer, RenderedChat

# Characters that a template may make of a row, for each of its own, each message, and beside that;
# tokenizing takes hundreds of bytes for each.
_MOST_TIMES, _MOST_PER_MESSAGE, _MOST_MORE = 16, 1 << 10, 1 << 17
# Characters of a text whose tokens are remembered.
_LONGEST_KEPT = 256


EarlierReasoning = Literal["refuse", "drop", "split"]


class VideoPrompt(NamedTuple):
    """Prompt of a video.

    Attributes:
        timestamps: seconds shown by each temporal patch.
        tokens_per_patch: placeholders of each.
        is_enclosed: whether the template's vision start and end stay around all patches.
    """

    timestamps: Sequence[float]
    tokens_per_patch: int
    is_enclosed: bool = False


class EncodedChat(NamedTuple):
    """Token ids of a conversation and their labels: the id itself for targets, -100 otherwise."""

    input_ids: list[int]
    labels: list[int]


def timestamp_text(seconds: float) -> str:
    """The timestamp in front of a temporal patch: `<1.4 seconds>`."""
    return f"<{seconds:.1f} seconds>"


class TemplateEncoder:
    """Encodes rows in the canonical form with one template and one tokenizer.

    With the built-in template, or one that is known to write the same, an answer is tokenized apart
    from the `assistant\\n` in front of it, as in generation. HF, and other templates here, tokenize
    the complete string, which differs for answers that begin with a line break.

    Args:
        renderer: of the checkpoint's template; None for the built-in one.
        tokens: placeholders of images and videos.
        control_tokens: names that a text must not contain, beside the tokenizer's special ones.
        cuts_answers: tokenize a learned answer apart from what is in front of it, with every
            template.
        earlier_reasoning: what becomes of reasoning before the last question that the template
            leaves out: `refuse` the row, `drop` the reasoning, or `split` the row into one for each
            learned answer.
        end_token_ids: ids that end an answer, beside the special tokens.
        is_built_in: whether it renders plain rows as the built-in template.
    """

    def __init__(
        self,
        renderer: ChatTemplateRenderer | None,
        tokenizer: Tokenizer,
        earlier_reasoning: EarlierReasoning = "refuse",
        end_token_ids: tuple[int, ...] = (),
        is_built_in: bool = False,
        *,
        tokens: "MediaTokens | None" = None,
        control_tokens: Sequence[str] = CONTROL_TOKENS,
        cuts_answers: bool = False,
    ):
        self.renderer: Any = renderer
        self._earlier_reasoning, self._is_known = earlier_reasoning, is_built_in
        self._cuts_answers, self._tokens = cuts_answers, tokens or QWEN_MEDIA
        self._media = MediaText(tokenizer, self._tokens)
        added = tokenizer.get_added_tokens_decoder().values()
        special = {*control_tokens, *(str(token.content) for token in added if token.special)}
        ends = filter(None, map(tokenizer.id_to_token, end_token_ids))
        # Rows have been searched for tokens of boxes that their writer did not mean.
        of_boxes = {name for pair in BOX_TOKENS.values() for name in pair}
        self._forbidden, self._ends = _any_of(special - of_boxes), _any_of({*special, *ends})

    def description(self) -> list[Any] | None:
        """What the ids of a row depend on, beside the row and the tokenizer; JSON values. None for
        the built-in template and those like it."""
        if self.renderer is None or self._is_known:
            return None
        return [*self.renderer.description(), self._earlier_reasoning]

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for the time."""
        return self.renderer is not None and self.renderer.prints_date

    def _is_built_in(self, conversation: Conversation) -> bool:
        """Whether the built-in template renders it; a BadSampleError if nothing here can."""
        if self.renderer is None and not conversation.is_plain:
            raise BadSampleError(
                "unsupported",
                "the conversation has tools, reasoning or template settings, which only a chat "
                "template of the checkpoint can render, and its folder has none: add its "
                "chat_template.jinja, or write them into the contents as text",
            )
        return self.renderer is None or (self._is_known and conversation.is_plain)

    def split(self, conversation: Conversation) -> list[Conversation]:
        """What training takes one by one: with `earlier_reasoning: split` a conversation up to each
        learned answer, else this one."""
        learned = conversation.targets
        splits = self._earlier_reasoning == "split" and self.renderer is not None
        if not splits or not learned or self._is_built_in(conversation):
            return [conversation]
        messages = conversation.messages
        unlearned = [{**each, "loss": False} if "loss" in each else each for each in messages]
        return [conversation.with_messages([*unlearned[:i], messages[i]]) for i in learned]

    def encode(
        self,
        conversation: Conversation,
        num_image_tokens: Sequence[int] = (),
        videos: Sequence[VideoPrompt] = (),
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        has_labels: bool = True,
    ) -> EncodedChat:
        """Ids and labels; of a prompt no token is learned.

        Args:
            conversation: one of `split`.
            num_image_tokens: number of placeholders of every image, in reading order.
            videos: prompt of every video, in reading order.
            add_generation_prompt: end with the start of an answer: it is a prompt.
            continue_final_message: leave the last message open: it is a prompt.
            has_labels: False for no labels of what is no prompt either.

        Raises:
            BadSampleError: a text contains a special token; the template fails, loses a part of
                the row, or does not show what is learned; or nothing is.
        """
        is_built_in = self._is_built_in(conversation)
        text = conversation.plain_text if is_built_in else conversation.all_text
        if forged := self._forbidden.search(text):
            raise BadSampleError(
                "special_token",
                f"the row contains the special token {forged.group()}, which would act as a "
                "control token; remove or rewrite it (<image> and <video> place images and "
                "videos)",
            )
        whole = self._rendered(conversation, add_generation_prompt)
        is_prompt = add_generation_prompt or continue_final_message or not has_labels
        text = self._left_open(whole) if continue_final_message else whole.rendered.text
        answers = whole.rendered.spans or [] if is_built_in else []
        cuts = [start for start, _ in answers]
        spans: Iterable[Span] = []
        if not is_prompt and is_built_in:
            spans = compress(answers, conversation.losses)
        elif not is_prompt:
            spans = learned_spans(whole, self.renderer, self._ends)
            cuts = [start for start, _ in spans] if self._cuts_answers else cuts
        counts = (conversation.media, num_image_tokens, videos)
        encoded = self._media.encode(text, spans, *counts, cuts)
        # Rows of the built-in template have been checked for targets.
        if not (is_prompt or is_built_in or any(each != IGNORE_INDEX for each in encoded.labels)):
            reason = "no token of the row is learned; an answer with text and loss: true is needed"
            raise BadSampleError("no_target", reason)
        return encoded

    def check(self, conversation: Conversation) -> None:
        """Check that the template renders a conversation.

        Raises:
            BadSampleError: it fails, or loses a part of it.
        """
        if not self._is_built_in(conversation):
            for each in self.split(conversation):
                self.text(each)

    def text(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text, one placeholder per image or video; see `encode`."""
        whole = self._rendered(conversation, add_generation_prompt)
        return self._left_open(whole) if continue_final_message else whole.rendered.text

    def _rendered(self, conversation: Conversation, add_generation_prompt: bool) -> RenderedChat:
        messages = conversation.messages
        if conversation.videos and not self._tokens.video:
            raise BadSampleError(
                "unsupported",
                "the row has a video, and the model takes images alone: leave it out, or write its "
                "frames as images",
            )
        if self._is_built_in(conversation):
            rendered = plain_text(messages, add_generation_prompt)
            return RenderedChat(conversation, messages, rendered)
        whole = self.renderer.render_chat(
            conversation,
            add_generation_prompt=add_generation_prompt,
            reasoning_may_go=self._earlier_reasoning != "refuse",
        )
        own, length = len(conversation.all_text), len(whole.rendered.text)
        if length > _MOST_TIMES * own + _MOST_PER_MESSAGE * len(messages) + _MOST_MORE:
            raise BadSampleError(
                "template_error",
                f"{self.renderer.name} makes {length} characters of a row of {own}; use another "
                "template",
            )
        return whole

    def _left_open(self, whole: RenderedChat) -> str:
        if self._is_built_in(whole.conversation):
            return whole.rendered.text.removesuffix(f"{IM_END}\n")
        return self.renderer.left_open(whole)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Pattern of any of the names, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


# The place of a medium in the built-in template's text.
_PLACES = {
    kind: f"{VISION_START}{pad}{VISION_END}"
    for kind, pad in (("image", IMAGE_PAD), ("video", VIDEO_PAD))
}


def plain_text(messages: Sequence[Message], add_generation_prompt: bool) -> Rendered:
    """The text of plain messages, many times faster than in the sandbox, and the answers in it.

    A span is an answer and its `<|im_end|>`.
    """
    text, spans = "", []
    for message in messages:
        text += f"{IM_START}{message['role']}\n"
        begin = len(text)
        for part in message["content"]:
            text += part["text"] if part["type"] == "text" else _PLACES[part["type"]]
        text += IM_END
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
        text += "\n"
    return Rendered(f"{text}{IM_START}assistant\n" if add_generation_prompt else text, spans)


class MediaTokens(NamedTuple):
    """Placeholders of an image and a video, which is empty where there are none, and what encloses
    a temporal patch of a video."""

    image: str
    video: str
    start: str
    end: str


QWEN_MEDIA = MediaTokens(IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)


class MediaText:
    """Tokenizes texts with the placeholders of one model."""

    def __init__(self, tokenizer: Tokenizer, tokens: MediaTokens = QWEN_MEDIA):
        self._tokenizer, self._tokens = tokenizer, tokens
        image, video, start, end = map(re.escape, tokens)
        places = f"(?P<image>{image})"
        if video:
            places += f"|(?P<video>(?:{start})?(?P<pad>{video})(?:{end})?)"
        self._places = re.compile(places)
        pads = filter(None, (tokens.image, tokens.video))
        self._ids = {tokenizer.token_to_id(name) for name in pads}

    def encode(
        self,
        text: str,
        spans: Iterable[Span],
        media: Sequence[str],
        num_image_tokens: Sequence[int],
        videos: Sequence[VideoPrompt],
        cuts: Sequence[int] = (),
    ) -> EncodedChat:
        """Ids of a text, and labels of the tokens that touch a span.

        Args:
            spans: start and end character of learned texts.
            media: `image` or `video` for each of the row.
            num_image_tokens: number of placeholders of every image, in reading order.
            videos: prompt of every video, in reading order.
            cuts: characters in front of which the text is tokenized apart.

        Raises:
            BadSampleError: the text has other placeholders than the row has media, or is no
                Unicode.
        """
        places = list(self._places.finditer(text))
        kinds = [str(place.lastgroup) for place in places]
        if sorted(kinds) != sorted(media):
            raise BadSampleError(
                "lost_text",
                f"the row has {list(media)}, but the chat template places {kinds}; move images "
                "and videos to user messages, or use a template that places them",
            )
        images, prompts = iter(num_image_tokens), iter(videos)
        # The text up to each video; where it ended in the old text, and how far that moved.
        new, ends, moved, repeats = "", [0], [0], []
        for place in places:
            if place.lastgroup == "image":
                repeats.append(next(images))
                continue
            video = next(prompts)
            repeats += [video.tokens_per_patch] * len(video.timestamps)
            patch = self._tokens.start + self._tokens.video + self._tokens.end
            head, tail = place.span("pad" if video.is_enclosed else "video")
            new += text[ends[-1] : head]
            new += "".join(timestamp_text(seconds) + patch for seconds in video.timestamps)
            ends.append(tail)
            moved.append(len(new) - tail)
        new += text[ends[-1] :]
        check_unicode(new)

        def at_new(at: int) -> int:
            return at + moved[bisect_right(ends, at) - 1]

        spans = [(at_new(start), at_new(end)) for start, end in spans]
        ids, labels = [], []
        for begin, stop in pairwise([0, *map(at_new, cuts), len(new)]):
            encoding = _encoding(self._tokenizer, new[begin:stop])
            found = encoding.ids
            learned = [IGNORE_INDEX] * len(found)
            for start, end in spans:
                if start < stop and begin < end:
                    own = _touched(encoding, max(start - begin, 0), min(end, stop) - begin)
                    learned[own] = found[own]
            ids += found
            labels += learned
        if len(repeats) != sum(map(self._ids.__contains__, ids)):
            raise ValueError(
                f"the tokenizer has no tokens {self._tokens.image} and {self._tokens.video}, which "
                "stand for images and videos; use the checkpoint's own tokenizer"
            )
        if not repeats:
            return EncodedChat(ids, labels)
        left = iter(repeats)
        counts = [next(left) if each in self._ids else 1 for each in ids]
        return EncodedChat(np.repeat(ids, counts).tolist(), np.repeat(labels, counts).tolist())


def _encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    """A text's tokens; those of short ones are remembered, as many rows ask the same."""
    if len(text) > _LONGEST_KEPT:
        return tokenizer.encode(text, add_special_tokens=False)
    return _kept_encoding(tokenizer, text)


@lru_cache(maxsize=1 << 10)
def _kept_encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    return tokenizer.encode(text, add_special_tokens=False)


def _touched(encoding: Encoding, start: int, end: int) -> slice:
    """Tokens from that of the first character to that of the last: HF's rule."""

    def first(places: range) -> int | None:
        # A normalizer may leave out characters.
        tokens = map(encoding.char_to_token, places)
        return next((token for token in tokens if token is not None), None)

    head, tail = first(range(start, end)), first(range(end - 1, start - 1, -1))
    return slice(0) if head is None or tail is None else slice(head, tail + 1)
