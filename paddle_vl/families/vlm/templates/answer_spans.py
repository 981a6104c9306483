"""Which characters of a rendered row are learned.

A template's own generation marks are kept as they are. Without them an answer is what rendering it
adds to the prompt in front of it: right only if the prompt is a prefix of the text, and if later
messages leave the answer as it was. Such an answer begins where the model will be asked to go on,
after an opened `<think>` too, and ends with its last special token, without the white space
behind that. An empty `<think></think>` that the template adds by itself is not learned.
"""

import re
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.templates.messages import Message, has_reasoning
from paddle_vl.families.vlm.templates.rendering import RenderedChat

Span = tuple[int, int]
Render = Callable[[Sequence[Message], bool], str]

_EMPTY_REASONING = re.compile(r"\s*(?:<think>)?\s*</think>\n*")


def learned_spans(whole: RenderedChat, renderer: Any, ends: re.Pattern[str]) -> list[Span]:
    """The learned characters of a rendered conversation.

    Args:
        renderer: the `ChatTemplateRenderer`, for a template without marks.
        ends: pattern of the tokens that may end an answer.

    Raises:
        BadSampleError: the marks do not tell which answer they belong to, or an answer is not what
            the model would be asked for.
    """
    conversation, messages, (text, marks) = whole
    if marks is not None:
        return marked_spans(marks, conversation.losses)

    def render(part: Sequence[Message], prompt: bool) -> str:
        return renderer.render_of(conversation, part, prompt).text

    spans = incremental_spans(render, messages, text, conversation.targets)
    return [
        without_margins(span, conversation.messages[i], text, ends)
        for i, span in zip(conversation.targets, spans, strict=True)
    ]


def marked_spans(spans: Sequence[Span], loss: Sequence[bool]) -> list[Span]:
    """The generation blocks of the learned answers.

    Args:
        spans: all generation blocks.
        loss: of each answer whether it is learned.

    Raises:
        BadSampleError: the blocks do not tell which answer they belong to.
    """
    if len(spans) < len(loss) or (len(spans) != len(loss) and not all(loss)):
        raise BadSampleError(
            "no_target",
            f"the chat template marks {len(spans)} texts as generated, but the row has {len(loss)} "
            f"answers, {loss.count(False)} of them with loss: false, so that it is unknown which "
            "mark belongs to which; split the row, or use a template with a mark for each answer",
        )
    learned = spans if all(loss) else compress(spans, loss)
    return [(start, end) for start, end in learned if start < end]


def incremental_spans(
    render: Render,
    messages: Sequence[Message],
    text: str,
    answers: Sequence[int],
) -> list[Span]:
    """What rendering each answer adds to the prompt in front of it.

    Args:
        render: gives the text of messages, with the prompt of an answer or without it.
        messages: the row as the template takes it.
        text: the text of all messages.
        answers: indices of the answers.

    Raises:
        BadSampleError: an answer is not what the model would be asked for.
    """
    spans = []
    for i in answers:
        found = _added_by(render, messages, text, i)
        if isinstance(found, str):
            raise BadSampleError(
                "history_rewritten",
                f"message {i + 1}: {found}, so that its answer cannot be learned from here; "
                "data.earlier_reasoning: split makes a row of each answer, loss: false leaves an "
                "answer out, and a template with {% generation %} marks says what is learned",
            )
        spans.append(found)
    return spans


def _added_by(render: Render, messages: Sequence[Message], text: str, i: int) -> Span | str:
    """The span of an answer, or why there is none."""
    if i == 0:
        return "there is nothing in front of it to render"
    try:
        before = render(messages[:i], True)
        after = text if i + 1 == len(messages) else render(messages[: i + 1], False)
    except BadSampleError as error:
        return f"the messages up to it cannot be rendered ({error.reason})"
    if not after.startswith(before):
        return "the prompt that asks for it is not what the template writes in front of it"
    if not text.startswith(after):
        return "later messages change the text up to it (history is rewritten)"
    return len(before), len(after)


def without_margins(span: Span, message: Message, text: str, special: re.Pattern[str]) -> Span:
    """A span without reasoning that is empty, and cut behind its last special token.

    Args:
        special: pattern of the tokens that may end an answer.

    Raises:
        BadSampleError: the answer does not end with one of them.
    """
    start, end = span
    end = start + len(text[start:end].rstrip())
    ends = [token.end() for token in special.finditer(text, start, end)]
    if end not in ends[-1:]:
        raise BadSampleError(
            "no_answer_end",
            f"the chat template ends the answer {text[max(start, end - 40) : end]!r} without a "
            "special token, so that the model would not learn to stop; use a template with "
            "{% generation %} marks around answers and their end",
        )
    added = None if has_reasoning(message) else _EMPTY_REASONING.match(text, start, end)
    return (added.end() if added else start), end
