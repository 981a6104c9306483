"""Rendering rows with a checkpoint's chat template, and the check that nothing of a row is lost."""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import TemplateError

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief
from paddle_vl.families.vlm.templates.environment import Rendered, SandboxedTemplate
from paddle_vl.families.vlm.templates.messages import (
    Message,
    for_template,
    lost_texts,
    texts_of,
    without_earlier_reasoning,
)

# One for each template and process; compiling takes milliseconds.
_compiled = functools.lru_cache(maxsize=16)(SandboxedTemplate)
_ROW_VALUES = {"messages", "tools", "documents", "add_generation_prompt"}
_MOST_NAMED = 3
# No text has it: a private character. The blank shows whether the template trims.
_MARK = "\ue0ff "
# Texts that no template writes by itself, as short ones of a row may be.
_PROBE: Any = [
    {"role": role, "content": [{"type": "text", "text": text}]}
    for role, text in (("user", "Wq7 Zk2?"), ("assistant", "Xj9 Vb4."))
]


class RenderedChat(NamedTuple):
    """A conversation, its messages as the template took them, and the text."""

    conversation: Conversation
    messages: Sequence[Message]
    rendered: Rendered


@dataclass(frozen=True)
class ChatTemplateRenderer:
    """A template with what it needs beside a row. It can be pickled and used by threads.

    Attributes:
        source: the template.
        now: what `strftime_now` shows; one moment for a run, whose data would else change daily.
        special_tokens: special tokens by name, which are variables of the template.
        tools_source: the template for rows with tools, if it is another.
        variables: template settings of the run; those of a row win over them.
        name: the template's name, for messages.
    """

    source: str
    now: datetime
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tools_source: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    name: str = "the chat template"
    _forms: Sequence[bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        """Compile the templates, and try which contents they understand: strings, lists or both.

        Raises:
            ValueError: a template has broken syntax or is too long.
        """
        for source in filter(None, (self.source, self.tools_source)):
            try:
                _compiled(source, self.now)
            except TemplateError as error:
                raise ValueError(f"{self.name} cannot be compiled: {error}; correct it") from error
        probe, forms = Conversation(_PROBE), []
        for lists in (False, True):
            with contextlib.suppress(BadSampleError):
                text = self.render([for_template(each, lists) for each in _PROBE]).text
                forms += [] if lost_texts(probe, text) else [lists]
        object.__setattr__(self, "_forms", forms or (False, True))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of messages as they are, as `apply_chat_template` of HF gives it.

        Args:
            variables: template settings of the row (`chat_template_kwargs`).

        Raises:
            BadSampleError: the template raises an error or exceeds a limit, or a variable would
                replace the conversation.
        """
        variables = {**self.special_tokens, **self.variables, **(variables or {})}
        if reserved := _ROW_VALUES & variables.keys():
            raise BadSampleError(
                "unknown_key",
                f"a template variable is named {min(reserved)!r}, which the row gives to the chat "
                "template; leave it out of chat_template_kwargs",
            )
        variables["messages"] = [for_template(message) for message in messages]
        variables.update(tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        source = self.tools_source if tools and self.tools_source else self.source
        try:
            return _compiled(source, self.now).render(variables)
        # A template may raise anything that Python does.
        except Exception as error:
            raise BadSampleError(
                "template_error",
                f"{self.name} does not take the row: {type(error).__name__}: {str(error)[:300]}; "
                "change the row, or use another template",
            ) from error

    def render_of(
        self, conversation: Conversation, messages: Sequence[Message], prompt: bool = False
    ) -> Rendered:
        """The text of messages of a conversation, with its tools and variables; see `render`."""
        tools, variables = conversation.tools, conversation.chat_template_kwargs
        return self.render(messages, tools or None, prompt, variables)

    def render_chat(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = False,
        reasoning_may_go: bool = False,
    ) -> RenderedChat:
        """Render a conversation in the form that the template understands.

        Contents without media are strings if the template shows all texts then, else lists.

        Args:
            reasoning_may_go: leave out the reasoning before the last question, if the template
                does not print it.

        Raises:
            BadSampleError: both forms fail or lose texts.
        """
        lost = error = None
        earlier = without_earlier_reasoning(conversation)
        either = [conversation, earlier] if reasoning_may_go else [conversation]
        forms = itertools.product(either, self._forms)
        for each, lists in forms:
            messages = [for_template(message, lists) for message in each.messages]
            try:
                rendered = self.render_of(each, messages, add_generation_prompt)
            except BadSampleError as failed:
                error = error or failed
                continue
            missing = lost_texts(each, rendered.text)
            if not missing:
                return RenderedChat(each, messages, rendered)
            lost = missing if lost is None or len(missing) < len(lost) else lost
        if lost is None:
            raise error or AssertionError("no form was tried")
        names = ", ".join(repr(brief(text)) for text in lost[:_MOST_NAMED])
        more = f" and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
        remedy = "take it out of the row, or use a template that prints it"
        if set(lost).isdisjoint(texts_of(earlier)):
            remedy = (
                "it is reasoning of earlier answers, which data.earlier_reasoning: drop leaves "
                "out; split makes a row of each answer"
            )
        reason = f"{self.name} prints nothing of {names}{more}, which the row has; {remedy}"
        raise BadSampleError("lost_text", reason)

    def left_open(self, whole: RenderedChat) -> str:
        """The text up to the end of the last message's text, found by a mark behind it.

        Raises:
            BadSampleError: the template does not show where that is.
        """
        conversation, messages, (complete, _) = whole
        content = messages[-1].get("content") or ""
        is_text = isinstance(content, str)
        content = content + _MARK if is_text else [*content, {"type": "text", "text": _MARK}]
        marked = [*messages[:-1], {**messages[-1], "content": content}]
        rendered = self.render_of(conversation, marked).text
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

    @property
    def prints_date(self) -> bool:
        """Whether a template asks for the time."""
        return any("strftime_now" in each for each in (self.source, self.tools_source or ""))

    def description(self) -> list[Any]:
        """What the text of a row depends on beside the row; JSON values."""
        day = str(self.now) if self.prints_date else None
        return [[self.source, self.tools_source, None], dict(self.variables), day]
