"""Rows to token ids and labels with a checkpoint's own chat template."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from paddle_vl.data.formats.row_settings import BOX_TOKENS
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.collate import IGNORED_LABEL
from paddle_vl.families.vlm.inputs.tokenizer import (
    CONTROL_TOKENS,
    IM_END,
    EncodedChat,
    VideoPrompt,
)
from paddle_vl.families.vlm.templates.answer_spans import (
    Span,
    incremental_spans,
    marked_spans,
    without_margins,
)
from paddle_vl.families.vlm.templates.built_in import plain_text
from paddle_vl.families.vlm.templates.media_text import MediaText
from paddle_vl.families.vlm.templates.messages import Chat, Message
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer, RenderedChat

Row = Mapping[str, Any]
# No text has it: a private character. The blank shows whether the template trims.
_MARK = "\ue0ff "
# Characters that a template may make of a row, for each of its own, each message, and beside that;
# tokenizing takes hundreds of bytes for each.
_MOST_TIMES, _MOST_PER_MESSAGE, _MOST_MORE = 16, 1 << 10, 1 << 17


@dataclass(frozen=True)
class TemplateSettings:
    """What a template does not say.

    Attributes:
        earlier_reasoning: what becomes of reasoning before the last question that the template
            leaves out: `refuse` the row, `drop` the reasoning, or `split` the row into one for each
            learned answer.
        end_token_ids: ids that end an answer, beside the special tokens.
        is_built_in: whether it renders plain rows as the built-in template.
    """

    earlier_reasoning: Literal["refuse", "drop", "split"] = "refuse"
    end_token_ids: tuple[int, ...] = ()
    is_built_in: bool = False


class TemplateEncoder:
    """Encodes rows in the canonical form with one template and one tokenizer.

    With the built-in template, or one that is known to write the same, an answer is tokenized apart
    from the `assistant\\n` in front of it, as in generation. HF, and other templates here, tokenize
    the complete string, which differs for answers that begin with a line break.

    Args:
        renderer: of the checkpoint's template; None for the built-in one.
    """

    def __init__(
        self,
        renderer: ChatTemplateRenderer | None,
        tokenizer: Tokenizer,
        settings: TemplateSettings,
    ):
        self._settings = settings
        self.renderer: Any = renderer
        self._media = MediaText(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        special = {*CONTROL_TOKENS, *(str(token.content) for token in added if token.special)}
        ends = filter(None, map(tokenizer.id_to_token, settings.end_token_ids))
        # Rows have been searched for tokens of boxes that their writer did not mean.
        of_boxes = {name for pair in BOX_TOKENS.values() for name in pair}
        self._forbidden, self._ends = _any_of(special - of_boxes), _any_of({*special, *ends})

    def description(self) -> list[Any] | None:
        """What the ids of a row depend on, beside the row and the tokenizer; JSON values. None for
        the built-in template and those like it."""
        renderer, settings = self.renderer, self._settings
        if renderer is None or settings.is_built_in:
            return None
        sources = [renderer.source, renderer.tools_source, None]
        day = str(renderer.now) if self.prints_date else None
        return [sources, dict(renderer.variables), day, settings.earlier_reasoning]

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for the time."""
        renderer = self.renderer
        sources = [] if renderer is None else [renderer.source, renderer.tools_source or ""]
        return any("strftime_now" in source for source in sources)

    def _is_built_in(self, chat: Chat) -> bool:
        """Whether the built-in template renders a chat.

        Raises:
            BadSampleError: there is only that, and it cannot.
        """
        if self.renderer is None and not chat.is_plain:
            raise BadSampleError(
                "unsupported",
                "the conversation has tools, reasoning or template settings, which only a chat "
                "template of the checkpoint can render, and its folder has none: add its "
                "chat_template.jinja, or write them into the contents as text",
            )
        return self.renderer is None or (self._settings.is_built_in and chat.is_plain)

    def rows(self, row: Row) -> list[Row]:
        """The rows to encode: for `split` one up to each learned answer, else this one."""
        messages, splits = row["messages"], self._settings.earlier_reasoning == "split"
        learned = [i for i, message in enumerate(messages) if message.get("loss")]
        if not splits or not learned or self.renderer is None:
            return [row]
        if self._is_built_in(Chat.from_row(row)):
            return [row]
        unlearned = [{**each, "loss": False} if "loss" in each else each for each in messages]
        return [{**row, "messages": [*unlearned[:i], messages[i]]} for i in learned]

    def encode(
        self,
        row: Row,
        num_image_tokens: Sequence[int] = (),
        videos: Sequence[VideoPrompt] = (),
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        has_labels: bool = True,
    ) -> EncodedChat:
        """Ids and labels of a row; of a prompt no token is learned.

        Args:
            row: one of `rows`.
            num_image_tokens: number of placeholders of every image, in reading order.
            videos: prompt of every video, in reading order.
            add_generation_prompt: end with the start of an answer: the row is a prompt.
            continue_final_message: leave the last message open: the row is a prompt.
            has_labels: False for no labels of a row that is no prompt either.

        Raises:
            BadSampleError: a text contains a special token; the template fails, loses a part of
                the row, or does not show what is learned; or nothing is.
        """
        chat = Chat.from_row(row)
        if forged := self._forbidden.search(chat.all_text()):
            raise BadSampleError(
                "special_token",
                f"the row contains the special token {forged.group()}, which would act as a "
                "control token; remove or rewrite it (<image> and <video> place images and "
                "videos)",
            )
        whole = self._rendered(chat, add_generation_prompt)
        is_prompt = add_generation_prompt or continue_final_message or not has_labels
        text = self._left_open(whole) if continue_final_message else whole.rendered.text
        is_built_in = self._is_built_in(chat)
        cuts = [start for start, _ in whole.rendered.spans or ()] if is_built_in else ()
        spans = [] if is_prompt else self._learned_spans(whole)
        encoded = self._media.encode(text, spans, chat.media(), num_image_tokens, videos, cuts)
        is_learned = is_prompt or any(label != IGNORED_LABEL for label in encoded.labels)
        # Rows of the built-in template have been checked for targets.
        if not is_learned and not is_built_in:
            reason = "no token of the row is learned; an answer with text and loss: true is needed"
            raise BadSampleError("no_target", reason)
        return encoded

    def check(self, row: Row) -> None:
        """Check that the template renders a row.

        Raises:
            BadSampleError: it fails, or loses a part of the row.
        """
        if not self._is_built_in(Chat.from_row(row)):
            for each in self.rows(row):
                self.text(each)

    def text(
        self,
        row: Row,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a row, one placeholder per image or video; see `encode`."""
        whole = self._rendered(Chat.from_row(row), add_generation_prompt)
        return self._left_open(whole) if continue_final_message else whole.rendered.text

    def _rendered(self, chat: Chat, add_generation_prompt: bool) -> RenderedChat:
        if self._is_built_in(chat):
            rendered = plain_text(chat.messages, add_generation_prompt)
            return RenderedChat(chat, chat.messages, rendered)
        whole = self.renderer.render_chat(
            chat,
            add_generation_prompt=add_generation_prompt,
            reasoning_may_go=self._settings.earlier_reasoning != "refuse",
        )
        own, length = len(chat.all_text()), len(whole.rendered.text)
        messages = len(chat.messages)
        if length > _MOST_TIMES * own + _MOST_PER_MESSAGE * messages + _MOST_MORE:
            raise BadSampleError(
                "template_error",
                f"{self.renderer.name} makes {length} characters of a row of {own}; use another "
                "template",
            )
        return whole

    def _learned_spans(self, whole: RenderedChat) -> list[Span]:
        chat, messages, (text, marks) = whole
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        loss = [bool(chat.messages[i]["loss"]) for i in answers]
        if marks is not None:
            return marked_spans(marks, loss)

        def render(part: Sequence[Message], prompt: bool) -> str:
            return self.renderer.render(part, chat.tools, prompt, chat.variables).text

        learned = [i for i, is_on in zip(answers, loss, strict=True) if is_on]
        spans = incremental_spans(render, messages, text, learned)
        return [
            without_margins(span, chat.messages[i], text, self._ends)
            for i, span in zip(learned, spans, strict=True)
        ]

    def _left_open(self, whole: RenderedChat) -> str:
        """The text up to the end of the last message's text, found by a mark behind it."""
        chat, messages, (complete, _) = whole
        if self._is_built_in(chat):
            return complete.removesuffix(f"{IM_END}\n")
        content = messages[-1].get("content") or ""
        is_text = isinstance(content, str)
        content = content + _MARK if is_text else [*content, {"type": "text", "text": _MARK}]
        marked = [*messages[:-1], {**messages[-1], "content": content}]
        rendered = self.renderer.render(marked, chat.tools, variables=chat.variables).text
        text, found, _ = rendered.rpartition(_MARK)
        # A template that trims its texts would have trimmed this one.
        text = text if found else rendered.rpartition(_MARK.strip())[0].rstrip()
        if not text or not complete.startswith(text):
            raise BadSampleError(
                "template_error",
                "the chat template does not show where the last message ends, so that it cannot be "
                "continued; ask for a new answer with add_generation_prompt instead",
            )
        return text


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Pattern of any of the names, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
