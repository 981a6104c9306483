"""The built-in chat template in HF's format: ChatML with images and videos.

    <|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\\n
    <|im_start|>assistant\\nA cat.<|im_end|>\\n

There is no default system message. `encoding.plain_text` writes the same text faster.

Source: the chat template of the published Qwen3-VL checkpoints, without tools.
"""

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
