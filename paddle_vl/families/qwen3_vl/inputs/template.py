"""The chat template of Qwen3-VL: turns to token ids and labels.

    <|im_start|>user\\n<|vision_start|><|image_pad|>...<|vision_end|>What is this?<|im_end|>\\n
    <|im_start|>assistant\\nA cat.<|im_end|>\\n

In place of a video stands, for every temporal patch, the time it shows and its placeholders:

    <0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.4 seconds><|vision_start|>...

Control tokens are placed by id and never parsed out of text, so a user cannot forge one. Only the
content of assistant turns and its `<|im_end|>` are targets, of those that are to be learned. There
is no default system message.

Source: the chat template of the published Qwen3-VL checkpoints, without tools; for videos the
processor of HF transformers 4.57 (5.x leaves one more pair of vision tokens around all patches).
Differs: an answer is tokenised apart from the `assistant\\n` in front of it, because generation
sees it that way; HF tokenises the whole string, which differs for answers that begin with a line
break.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.line_index import check_unicode
from paddle_vl.data.tokenizer import TextTokenizer
from paddle_vl.families.qwen3_vl.inputs.collate import IGNORED_LABEL
from paddle_vl.families.qwen3_vl.inputs.turns import Conversation, ImagePart, Turn
from paddle_vl.families.qwen3_vl.inputs.video_frames import timestamp_text

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

# The same template for HF's users; the processor there repeats <|image_pad|>.
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


class VideoPrompt(NamedTuple):
    """What stands for a video: seconds shown by each temporal patch, and placeholders of one."""

    timestamps: Sequence[float]
    tokens_per_patch: int


class EncodedChat(NamedTuple):
    """Ids of a conversation, and for each the label: itself where it is a target, else -100."""

    input_ids: list[int]
    labels: list[int]


class ChatTemplate:
    """Renders conversations with one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer):
        """Find the control tokens.

        Raises:
            ValueError: the tokenizer lacks one; it is named.
        """
        self._tokenizer = tokenizer
        self.ids = {token: tokenizer.token_id(token) for token in CONTROL_TOKENS}
        self._forbidden = {token_id: token for token, token_id in self.ids.items()}
        self._forbidden.update(tokenizer.special_tokens)

    def encode(
        self,
        conversation: Conversation,
        num_image_tokens: Sequence[int],
        videos: Sequence[VideoPrompt] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> EncodedChat:
        """Ids and labels of a conversation.

        Args:
            num_image_tokens: placeholders of every image, in reading order.
            videos: what stands for every video, in reading order.
            add_generation_prompt: end with the opening of an assistant turn.

        Raises:
            BadSampleError: text contains the name of a special token.
        """
        chat = EncodedChat([], [])
        images, videos = iter(num_image_tokens), iter(videos)
        for turn in conversation.turns:
            self._add(chat, [self.ids[IM_START]])
            if turn.role == "assistant":
                self._add(chat, self._encode_text("assistant\n"))
                answer = [*self._encode_text(turn.text), self.ids[IM_END]]
                self._add(chat, answer, turn.is_target)
            else:
                for run in self._runs(turn, images, videos):
                    self._add(chat, self._encode_text(run) if isinstance(run, str) else run)
                self._add(chat, [self.ids[IM_END]])
            self._add(chat, self._encode_text("\n"))
        if add_generation_prompt:
            self._add(chat, [self.ids[IM_START], *self._encode_text("assistant\n")])
        return chat

    def _runs(
        self, turn: Turn, images: Iterator[int], videos: Iterator[VideoPrompt]
    ) -> list[str | list[int]]:
        """Text as it is, joined with the role in front of it, and ids of images and frames.

        Text that no control token interrupts is tokenised as one, as HF does; a timestamp, too,
        joins the text in front of it.
        """
        runs: list[str | list[int]] = [f"{turn.role}\n"]
        for part in turn.parts:
            if isinstance(part, str):
                _add_text(runs, part)
            elif isinstance(part, ImagePart):
                runs.append(self._visual_ids(IMAGE_PAD, next(images)))
            else:
                video = next(videos)
                for seconds in video.timestamps:
                    _add_text(runs, timestamp_text(seconds))
                    runs.append(self._visual_ids(VIDEO_PAD, video.tokens_per_patch))
        return runs

    def _visual_ids(self, pad: str, num_tokens: int) -> list[int]:
        return [self.ids[VISION_START], *[self.ids[pad]] * num_tokens, self.ids[VISION_END]]

    def _encode_text(self, text: str) -> list[int]:
        check_unicode(text)
        ids = self._tokenizer.encode(text)
        forged = self._forbidden.keys() & set(ids)
        if forged:
            names = ", ".join(sorted(self._forbidden[token_id] for token_id in forged))
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
