"""The built-in chat template of `ChatTemplate`: in HF's format, for folders that have none, and as
text."""

from paddle_vl.families.vlm.inputs.conversation import Conversation, ImagePart, Part
from paddle_vl.families.vlm.inputs.tokenizer import (
    IM_END,
    IM_START,
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)

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


def prompt_text(
    conversation: Conversation, add_generation_prompt: bool, continue_final_message: bool
) -> str:
    """The text of HF's template, one placeholder per image or video; see `apply_chat_template`."""

    def shown(part: Part) -> str:
        pad = IMAGE_PAD if isinstance(part, ImagePart) else VIDEO_PAD
        return part if isinstance(part, str) else f"{VISION_START}{pad}{VISION_END}"

    text = "".join(
        f"{IM_START}{turn.role}\n{''.join(map(shown, turn.parts))}{IM_END}\n"
        for turn in conversation.turns
    )
    if continue_final_message:
        return text.removesuffix(f"{IM_END}\n")
    return f"{text}{IM_START}assistant\n" if add_generation_prompt else text
