"""Templates and rows of the tests of chat templates."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer

GOLDEN = Path(__file__).parents[4] / "golden" / "templates"
NOW = datetime(2026, 1, 1)
TOKENIZER = Tokenizer.from_file(str(GOLDEN / "tokenizer" / "tokenizer.json"))

# Prints reasoning of the last answer only, and then an empty block too; takes strings.
THINKING = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.last -%}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
PLAIN = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
MARKED = PLAIN.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}",
    "{{- '<|im_start|>' + m.role + '\\n' -}}{%- if m.role == 'assistant' -%}{%- generation -%}"
    "{{- m.content + '<|im_end|>\\n' -}}{%- endgeneration -%}{%- else -%}"
    "{{- m.content + '<|im_end|>\\n' -}}{%- endif -%}",
)


def user(text: str) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def answer(text: str, loss: bool = True, **more: object) -> dict:
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "loss": loss, **more}


def row(
    *messages: Any, tools: Sequence[Any] = (), variables: Mapping[str, Any] = {}
) -> Conversation:
    return Conversation([*messages], tools=[*tools], chat_template_kwargs=dict(variables))


def renderer(source: str, **more) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(source, NOW, **more)


def encoder(source: str, earlier_reasoning="refuse", **more) -> TemplateEncoder:
    return TemplateEncoder(renderer(source, **more), TOKENIZER, earlier_reasoning)


def learned_text(encoded) -> str:
    ids = [label for label in encoded.labels if label != -100]
    return TOKENIZER.decode(ids, skip_special_tokens=False)
