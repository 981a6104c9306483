"""PaddleOCR-VL's processor: the folder's own chat template, images alone, and task prompts.

1.0 opens an answer with `Assistant: `, 1.5 and 1.6 with `Assistant:\\n`; nothing but the template
tells them apart, so a folder without one is refused. Prompt and answer are tokenized apart, as in
generation: 1.0's space would else become part of the answer's first word.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from paddle_vl.families.paddleocr_vl.inputs.image_processor import PaddleOCRVLImageProcessor
from paddle_vl.families.paddleocr_vl.inputs.tokenizer import (
    ANSWER_TOKENS,
    CONVERSATION_START,
    HF_CLASS,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    SENTENCE_END,
    SENTENCE_START,
    UNKNOWN,
    VIDEO,
    as_sentencepiece,
    train_tokenizer,
)
from paddle_vl.families.paddleocr_vl.inputs.versions import (
    HEADS,
    INFERENCE_FILE,
    LIMITS,
    NAMES,
    inference_settings,
)
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.processor import NO_TOKEN, VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from paddle_vl.families.vlm.templates.encoding import MediaTokens, TemplateEncoder
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer

_LOGGER = logging.getLogger(__name__)
TASK_PROMPTS = {
    "text": "OCR:",
    "table": "Table Recognition:",
    "formula": "Formula Recognition:",
    "chart": "Chart Recognition:",
    "spotting": "Spotting:",
    "seal": "Seal Recognition:",
}
_QUESTION = "Wq?"
_PROBE: Any = [
    {
        "role": "user",
        "content": [{"type": "image", "image": "image"}, {"type": "text", "text": _QUESTION}],
    }
]
_PLACE = IMAGE_START + IMAGE + IMAGE_END
# That of 1.5, for models from fresh weights. vLLM gives parts only to a template with a loop over a
# message's content.
TEMPLATE = f"""\
{{{{- '{CONVERSATION_START}' }}}}
{{%- for message in messages %}}
    {{%- if message.role not in ['system', 'user', 'assistant'] or message.content is string %}}
        {{{{- raise_exception('a role of system, user or assistant and parts are needed') }}}}
    {{%- endif %}}
    {{%- set texts = message.content | selectattr('type', 'equalto', 'text') | list %}}
    {{%- set text = texts | map(attribute='text') | join %}}
    {{%- if message.role == 'user' %}}
        {{{{- 'User: ' }}}}
        {{%- for part in message.content if part.type == 'image' %}}
            {{{{- '{_PLACE}' }}}}
        {{%- endfor %}}
        {{{{- text ~ '\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- 'Assistant:\\n' ~ text ~ '{SENTENCE_END}' }}}}
    {{%- else %}}
        {{%- for each in texts %}}{{{{- each.text ~ '\\n' }}}}{{%- endfor %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- 'Assistant:\\n' }}}}
{{%- endif %}}
"""


def answer_opening(renderer: ChatTemplateRenderer) -> str:
    """What a template writes in front of an answer, behind the question's line.

    Raises:
        ValueError: it writes an image in another way than PaddleOCR-VL's.
    """
    prompt = renderer.render(_PROBE, add_generation_prompt=True).text
    if prompt.count(_PLACE) != 1:
        raise ValueError(
            f"{renderer.name} writes an image of a question as {prompt!r}; {_PLACE} is needed "
            "once: take the template of the checkpoint"
        )
    return prompt.partition(_QUESTION)[2].removeprefix("\n")


class PaddleOCRVLProcessor(VLProcessor):
    """Encodes conversations about images; see `VLProcessor`.

    Attributes:
        opening: what the template writes in front of an answer, behind the question's line.
        version: of the template: `1.0`, `1.5` (which is also 1.6's), or None for another one.
    """

    image_processor_class = PaddleOCRVLImageProcessor
    media_tokens = MediaTokens(IMAGE, "", IMAGE_START, IMAGE_END)
    control_tokens = (UNKNOWN, SENTENCE_END, IMAGE, IMAGE_START, IMAGE_END)
    pad_token = UNKNOWN
    end_tokens = (SENTENCE_END,)
    carried_files: ClassVar[tuple[str, ...]] = (
        *VLProcessor.carried_files, "tokenizer.model", INFERENCE_FILE
    )  # fmt: skip
    # Early templates of 1.0 print an image by it, without what encloses it.
    hidden_variables = ("image_token", "video_token")
    cuts_answers = True
    special_tokens_map: ClassVar[dict[str, Any]] = {
        "cls_token": CONVERSATION_START,
        "bos_token": SENTENCE_START,
        "eos_token": SENTENCE_END,
        "pad_token": UNKNOWN,
        "unk_token": UNKNOWN,
        # transformers' processor, which vLLM takes, ends with an error if it is not there.
        "image_token": IMAGE,
    }
    task_prompts = TASK_PROMPTS

    def __init__(
        self,
        tokenizer: TextTokenizer,
        image_processor: ImageProcessor,
        video_processor: VideoProcessor | None = None,
        carried_files: Mapping[str, str | bytes] | None = None,
        template: TemplateEncoder | None = None,
    ):
        """Combine the components; see `VLProcessor`.

        Raises:
            ValueError: there is no template, or it writes an image in another way.
        """
        if template is None:
            raise ValueError(
                f"{tokenizer.name} has no chat template beside it: PaddleOCR-VL 1.0 and 1.5 differ "
                "in what opens an answer, and nothing else tells which it is; copy "
                "chat_template.jinja from the checkpoint"
            )
        super().__init__(tokenizer, image_processor, video_processor, carried_files, template)
        video = tokenizer.backend.token_to_id(VIDEO)
        self.video_token_id = NO_TOKEN if video is None else video
        renderer: ChatTemplateRenderer = template.renderer
        self.opening = answer_opening(renderer)
        self.version = next((name for name in HEADS if HEADS[name] == self.opening), None)
        self._carried_files.setdefault(INFERENCE_FILE, inference_settings(self.version))
        self._tell(renderer.name)

    def _tell(self, name: str) -> None:
        """Say which version the template and the limits of images are of."""
        images = self.image_processor
        limits = images.min_pixels, images.max_pixels
        of = f"of PaddleOCR-VL {NAMES[self.version]}" if self.version else "of no published version"
        _LOGGER.info(
            "%s is %s: answers follow %r; images have %d to %d pixels",
            name,
            of,
            self.opening,
            *limits,
        )
        other = next((each for each in LIMITS if LIMITS[each] == limits), None)
        if None not in (other, self.version) and other != self.version:
            _LOGGER.warning(
                "%s is that of %s, and images have the limits of %s (%d to %d pixels), with which "
                "its model was not trained: take %s from the same checkpoint",
                name, self.version, other, *limits, images.config_file,
            )  # fmt: skip

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        patch_size: int = 14,
        min_pixels: int | None = None,
        max_pixels: int = 448 * 448,
        model_type: str | None = None,
        answer_tokens: Sequence[str] = ANSWER_TOKENS,
    ) -> "PaddleOCRVLProcessor":
        """A processor for a small model with 1.5's template and a tokenizer trained on the texts;
        deterministic.

        Args:
            vocab_size: upper limit of ids; 256 bytes, the control tokens and the answers' are among
                them.
            patch_size: side of a patch; 2 x 2 patches are one visual token. Pixels.
            min_pixels, max_pixels: area of a resized image; None for one visual token.
            model_type: not used, there is one.
            answer_tokens: of tables and places, that are one token each.

        Raises:
            ValueError: the vocabulary is too small, or the areas exclude each other.
        """
        images = PaddleOCRVLImageProcessor(
            min_pixels=min_pixels or (2 * patch_size) ** 2, max_pixels=max_pixels,
            patch_size=patch_size, temporal_patch_size=1, merge_size=2,
            image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
        )  # fmt: skip
        heads = ("User: ", *HEADS.values(), *TASK_PROMPTS.values())
        tokenizer = train_tokenizer([*heads, *texts], vocab_size, answer_tokens)
        name = "the template of 1.5"
        template = TemplateEncoder(
            ChatTemplateRenderer(TEMPLATE, datetime.now(), cls.special_tokens_map, name=name),
            tokenizer.backend,
            **cls.template_settings(),
        )
        carried = {"chat_template.jinja": TEMPLATE, "tokenizer.model": as_sentencepiece(tokenizer)}
        return cls(tokenizer, images, None, carried, template)

    def _tokenizer_config(self) -> dict[str, Any]:
        # Without add_bos_token PaddleX puts <s> in front of every prompt.
        return {
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "processor_class": type(self).__name__,
            "tokenizer_class": HF_CLASS,
            **self.special_tokens_map,
        }
