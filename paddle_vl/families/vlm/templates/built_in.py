"""The built-in chat template, of ChatML with images and videos: in HF's format, and as a function.

    <|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\\n
    <|im_start|>assistant\\nA cat.<|im_end|>\\n

There is no default system message.

Source: the chat template of the published Qwen3-VL checkpoints, without tools.
"""

from collections.abc import Sequence

from paddle_vl.families.vlm.inputs.tokenizer import (
    IM_END,
    IM_START,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)
from paddle_vl.families.vlm.templates.environment import Rendered
from paddle_vl.families.vlm.templates.messages import Message

_PLACES = {
    kind: f"{VISION_START}{pad}{VISION_END}"
    for kind, pad in (("image", IMAGE_PAD), ("video", VIDEO_PAD))
}
# HF's processor repeats <|image_pad|>.
JINJA_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('only the first message may be a system message') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type in ['image', 'image_url'] %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


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
