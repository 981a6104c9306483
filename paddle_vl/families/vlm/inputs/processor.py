"""A processor, Qwen3-VL's or a base: tokenizer, image and video processors and chat template, in
HF's files.

Shapes: B conversations, L length, P patches, n images or videos.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from copy import copy
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paddle_vl.config.families import model_values, processor_class
from paddle_vl.data.formats.canonical import ROLES
from paddle_vl.families.vlm.inputs.chat_inputs import ChatInputs
from paddle_vl.families.vlm.inputs.image_processor import ImageProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer, train_bpe
from paddle_vl.families.vlm.inputs.video_processor import VideoMarkers, VideoProcessor
from paddle_vl.families.vlm.templates.built_in import (
    CONTROL_TOKENS,
    END_OF_TEXT,
    IM_END,
    JINJA_TEMPLATE,
)
from paddle_vl.families.vlm.templates.encoding import (
    QWEN_MEDIA,
    EarlierReasoning,
    MediaTokens,
    TemplateEncoder,
)
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import (
    NESTED_CONFIG_FILE,
    read_folder_templates,
    special_tokens,
)
from paddle_vl.files.hub import path_or_download
from paddle_vl.files.text_file import naming, read_text, replacing, write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE
from paddle_vl.generation.config import FILE_NAME, GenerationConfig

# Files of a checkpoint that are copied unchanged, for other programs.
_CARRIED_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Of a token that a family does not have.
NO_TOKEN = -1
# The end and the unknown token of SentencePiece, which also pads.
SENTENCE_END, UNKNOWN = "</s>", "<unk>"
_CARRIED_PATTERN = "additional_chat_templates/*.jinja"
# SHA-256 of templates that render texts, images and videos as the built-in one, which is faster;
# without white space around them. Ours, and the one of the published Qwen3-VL Instruct models.
_EQUAL_TEMPLATES = (
    hashlib.sha256(JINJA_TEMPLATE.strip().encode()).hexdigest(),
    "9d879ef91075acbfb2df7e441fd79d60bacfca989cf6d511d2af45c681e94f10",
)

P = TypeVar("P", bound="VLProcessor")


class VLProcessor(ChatInputs):
    """Encodes conversations with images and videos.

    Attributes:
        tokenizer, image_processor, video_processor, template: the components.
        image_token_id, video_token_id, vision_start_token_id, vision_end_token_id, pad_token_id:
            ids of the control tokens, found by name.
        forbidden: names of the tokens that a text must not contain, by id.
        eos_token_ids: ids of `<|im_end|>` and `<|endoftext|>`, which end an answer.
        generation_config: these and the pad token, for a model that names none.
        image_processor_class: of the family; as the others below.
        media_tokens: placeholders of images and videos, and what encloses them.
        control_tokens: tokens that the vocabulary needs.
        pad_token, end_tokens: the token that pads, and those that end an answer.
        carried_files: files of a checkpoint that are written again unchanged, for other programs.
        hidden_variables: special tokens that a chat template does not get.
        cuts_answers: see `TemplateEncoder`.
        special_tokens_map: special tokens by HF's names, for a new tokenizer.
        task_prompts: the question of each task that a row or a question may name.
    """

    image_processor_class: ClassVar[type[ImageProcessor]] = ImageProcessor
    media_tokens: ClassVar[MediaTokens] = QWEN_MEDIA
    control_tokens: ClassVar[tuple[str, ...]] = CONTROL_TOKENS
    pad_token: ClassVar[str] = END_OF_TEXT
    end_tokens: ClassVar[tuple[str, ...]] = (IM_END, END_OF_TEXT)
    carried_files: ClassVar[tuple[str, ...]] = _CARRIED_FILES
    hidden_variables: ClassVar[tuple[str, ...]] = ()
    cuts_answers: ClassVar[bool] = False
    special_tokens_map: ClassVar[dict[str, Any]] = {
        "additional_special_tokens": [token for token in CONTROL_TOKENS if token != END_OF_TEXT],
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
    }
    task_prompts: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        image_processor: ImageProcessor,
        video_processor: VideoProcessor | None = None,
        carried_files: Mapping[str, str | bytes] | None = None,
        template: TemplateEncoder | None = None,
    ):
        """Combine the components.

        Args:
            video_processor: None for `VideoProcessor.like_images`.
            carried_files: name to content of further files that `save_pretrained` writes unchanged.
            template: of the checkpoint; None for the built-in one.

        Raises:
            ValueError: the tokenizer lacks a control token.
        """
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor or VideoProcessor.like_images(image_processor)
        self.template = template or TemplateEncoder(None, tokenizer.backend)
        self._carried_files = dict(carried_files or {})
        ids = {token: tokenizer.token_id(token) for token in self.control_tokens}
        self.forbidden = {token_id: token for token, token_id in ids.items()}
        self.forbidden.update(tokenizer.special_tokens)
        image, video, start, end = self.media_tokens
        self.image_token_id, self.video_token_id = ids[image], ids.get(video, NO_TOKEN)
        self.vision_start_token_id, self.vision_end_token_id = ids[start], ids[end]
        self.pad_token_id = ids[self.pad_token]
        self.eos_token_ids = [ids[token] for token in self.end_tokens]
        self.generation_config = end_settings(ids)

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        patch_size: int = 16,
        min_pixels: int | None = None,
        max_pixels: int = 256 * 256,
        model_type: str | None = None,
    ) -> "VLProcessor":
        """A processor for a small model, with a tokenizer trained on the texts; deterministic.

        Args:
            vocab_size: upper limit of ids; at least 256 bytes and 7 control tokens.
            patch_size: side of a patch; 2 x 2 patches are one visual token. Pixels.
            min_pixels, max_pixels: area of a resized image; None for one visual token.
            model_type: of the model, see `from_pretrained`; None splits text as "qwen3_vl" and
                leaves video_markers to the model that the processor is saved beside.

        Raises:
            ValueError: the vocabulary is too small, or the areas exclude each other.
        """
        images = ImageProcessor(
            min_pixels=min_pixels or (2 * patch_size) ** 2, max_pixels=max_pixels,
            patch_size=patch_size, temporal_patch_size=2, merge_size=2,
            image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
        )  # fmt: skip
        # Every prompt contains names of roles.
        texts = [*texts, *(f"{role}\n" for role in ROLES)]
        videos = VideoProcessor.like_images(images)
        videos = videos.replaced(video_markers=_markers_of(str(model_type)))
        tokenizer = train_bpe(texts, vocab_size, CONTROL_TOKENS, model_type or "qwen3_vl")
        return cls(tokenizer, images, videos)

    @classmethod
    def from_pretrained(
        cls: type[P],
        directory: str | os.PathLike,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        video_fps: float | None = None,
        video_min_frames: int | None = None,
        video_max_frames: int | None = None,
        video_min_pixels: int | None = None,
        video_max_pixels: int | None = None,
        video_markers: VideoMarkers | None = None,
        template_variables: Mapping[str, Any] | None = None,
        earlier_reasoning: EarlierReasoning = "refuse",
        template_date: date | None = None,
        model_type: str | None = None,
    ) -> P:
        """Read the processor files of a checkpoint directory, or of a model named on a hub.

        Args:
            min_pixels, max_pixels: override the area of an image; pixels.
            video_fps: overrides the frames sampled per second of video.
            video_min_frames, video_max_frames: override the bounds of sampled frames.
            video_min_pixels, video_max_pixels: override frames x height x width of a video; pixels.
            video_markers: overrides what a vision start and end enclose, see `VideoProcessor`.
            template_variables: of the checkpoint's chat template (`enable_thinking`); those of a
                row win.
            earlier_reasoning: see `TemplateEncoder`.
            template_date: what `strftime_now` shows; None for today.
            model_type: of the model, whose family decides how text is split and, where nothing
                else says it, video_markers; None for that of the directory's config.json.

        Raises:
            RuntimeError: `tokenizer.json` or `preprocessor_config.json` is missing or damaged.
            ValueError: a setting is missing or not supported, a control token is missing, or the
                chat template cannot be compiled.
        """
        directory = path_or_download(os.fspath(directory))
        kind: type[Any] = cls
        if cls is VLProcessor:
            kind = processor_class(directory, model_type)
        image_processor = kind.image_processor_class.from_pretrained(
            directory, min_pixels=min_pixels, max_pixels=max_pixels
        )
        of_videos = {
            "fps": video_fps,
            "min_frames": video_min_frames,
            "max_frames": video_max_frames,
            "min_pixels": video_min_pixels,
            "max_pixels": video_max_pixels,
            "video_markers": video_markers,
        }
        if kind.media_tokens.video:
            video_processor = VideoProcessor.from_pretrained(
                directory, image_processor, **of_videos
            )
        else:
            kind.refuse_videos(of_videos)
            video_processor = VideoProcessor.like_images(image_processor)
        if kind.media_tokens.video and video_processor.video_markers is None:
            markers = _markers_of(model_type or str(model_values(directory).get("model_type")))
            video_processor = video_processor.replaced(video_markers=markers)
        more = (file.relative_to(directory) for file in directory.glob(_CARRIED_PATTERN))
        carried = {
            str(name): _content(directory / name)
            for name in (*kind.carried_files, *sorted(more))
            if (directory / name).is_file()
        }
        tokenizer = TextTokenizer.from_file(directory, model_type)
        found = read_folder_templates(directory)
        if found is None:
            return kind(tokenizer, image_processor, video_processor, carried)
        if found.file.name == NESTED_CONFIG_FILE:
            # Which is not written; HF takes none of the other files beside it.
            carried = {name: carried[name] for name in carried if "chat_template" not in name}
            carried["chat_template.jinja"] = found.source
            if found.tools_source is not None:
                carried[_CARRIED_PATTERN.replace("*", "tool_use")] = found.tools_source
        plain = found.source.replace("\r\n", "\n").strip().encode(errors="surrogatepass")
        is_built_in = hashlib.sha256(plain).hexdigest() in _EQUAL_TEMPLATES
        settings = generation_settings(directory, read=tokenizer) or GenerationConfig()
        own = TemplateEncoder(
            ChatTemplateRenderer(
                found.source,
                datetime.combine(template_date, time()) if template_date else datetime.now(),
                {
                    name: token
                    for name, token in special_tokens(directory).items()
                    if name not in kind.hidden_variables
                },
                found.tools_source,
                variables=template_variables or {},
                name=f"the chat template in {found.file}",
            ),
            tokenizer.backend,
            earlier_reasoning,
            tuple(settings.eos_token_ids),
            is_built_in and not template_variables,
            **kind.template_settings(),
        )
        return kind(tokenizer, image_processor, video_processor, carried, own)

    @classmethod
    def template_settings(cls) -> dict[str, Any]:
        """What a `TemplateEncoder` needs to know of the family."""
        return {
            "tokens": cls.media_tokens,
            "control_tokens": cls.control_tokens,
            "cuts_answers": cls.cuts_answers,
        }

    @classmethod
    def refuse_videos(cls, settings: Mapping[str, Any]) -> None:
        """Refuse settings of videos, where there are none.

        Raises:
            ValueError: with their names.
        """
        names = [name.removeprefix("video_") for name in settings if settings[name]]
        if given := [f"data.video_{name}" for name in names]:
            raise ValueError(f"the model takes images alone: leave {', '.join(given)} out")

    def save_pretrained(self, directory: str | os.PathLike) -> None:
        """Write the processor under HF's file names.

        Tokenizer files of a checkpoint are written unchanged; those of a new tokenizer generated.
        Files of an earlier processor that HF would read beside them are removed.
        """
        directory = Path(directory)
        self.tokenizer.save(directory)
        self.image_processor.save_pretrained(directory)
        if self.media_tokens.video:
            self.video_processor.save_pretrained(directory)
        files = dict(self._carried_files)
        files.setdefault("tokenizer_config.json", _dump(self._tokenizer_config()))
        files.setdefault("special_tokens_map.json", _dump(self.special_tokens_map))
        if self.template.renderer is None:
            files["chat_template.jinja"] = JINJA_TEMPLATE
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            if isinstance(content, str):
                write_text(directory / name, content)
            else:
                with replacing(directory / name) as partial:
                    partial.write_bytes(content)
        others = (*self.carried_files, NESTED_CONFIG_FILE)
        for file in {*map(directory.joinpath, others), *directory.glob(_CARRIED_PATTERN)}:
            if str(file.relative_to(directory)) not in files:
                file.unlink(missing_ok=True)

    def task_prompt(self, name: str) -> str:
        """The question of a task.

        Raises:
            ValueError: the model has no such task.
        """
        if name not in self.task_prompts:
            known = ", ".join(self.task_prompts) or "none"
            raise ValueError(f"the model has no task {name!r}; its tasks are: {known}")
        return self.task_prompts[name]

    def with_max_pixels(self, max_pixels: int) -> "VLProcessor":
        """The processor with another area of a resized image at most; pixels."""
        processor = copy(self)
        processor.image_processor = self.image_processor.replaced(max_pixels=max_pixels)
        return processor

    def refusing_shrunk(self) -> "VLProcessor":
        """The processor that takes no image with more pixels than the area at most."""
        processor = copy(self)
        processor.image_processor = self.image_processor.replaced(refuses_shrinking=True)
        return processor

    def fingerprint(self) -> str:
        """Hash of the tokenizer, of the settings of the image and video processors, and of a chat
        template that differs from the built-in one."""
        settings: list[Any] = [self.image_processor.to_dict(), self.video_processor.to_dict()]
        settings += ["refuses shrinking"] if self.image_processor.refuses_shrinking else []
        if (template := self.template.description()) is not None:
            settings.append(template)
        content = self.tokenizer.to_json() + json.dumps(settings, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _tokenizer_config(self) -> dict[str, Any]:
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        return {
            "tokenizer_class": self.tokenizer.hf_class,
            "processor_class": "Qwen3VLProcessor",
            "added_tokens_decoder": {
                str(token_id): {"content": token, **flags, "special": True}
                for token_id, token in self.tokenizer.special_tokens.items()
            },
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "split_special_tokens": False,
            "unk_token": None,
            **self.special_tokens_map,
        }


def _markers_of(model_type: str) -> VideoMarkers | None:
    """For Qwen3.5 and Qwen4-Exp those of transformers 5.24, for Qwen3-VL those of 4.57, with which
    its published models were trained; None where no type of model is named."""
    both = ("qwen3_5", "qwen4_exp", "qwen3_8_flash_next")
    by_type: dict[str, VideoMarkers] = {**dict.fromkeys(both, "both"), "qwen3_vl": "inner"}
    return next((by_type[each] for each in by_type if model_type.startswith(each)), None)


def end_settings(ids: Mapping[str, int]) -> GenerationConfig:
    """Settings with the tokens that end an answer and the one that pads, of ids by name."""
    ends = tuple(ids[token] for token in (IM_END, END_OF_TEXT, SENTENCE_END) if token in ids)
    pad = ids.get(END_OF_TEXT, ids.get(UNKNOWN) if SENTENCE_END in ids else None)
    return GenerationConfig(eos_token_id=ends or None, pad_token_id=pad)


def generation_settings(
    *folders: Path, read: TextTokenizer | None = None
) -> GenerationConfig | None:
    """Settings of the first model folder that has them; None without.

    Where they name no end tokens, those of the first folder's tokenizer are taken.

    Args:
        read: that tokenizer, if it was read already.
    """
    stored = [folder for folder in folders if (folder / FILE_NAME).is_file()]
    found = GenerationConfig.from_pretrained(stored[0]) if stored else None
    tokenizers = [folder for folder in folders if (folder / TOKENIZER_FILE).is_file()]
    if tokenizers and (found is None or found.eos_token_id is None):
        tokenizer = read or TextTokenizer.from_file(tokenizers[0])
        ends = end_settings({token: number for number, token in tokenizer.special_tokens.items()})
        found = (found or GenerationConfig()).with_ends_of(ends)
    return found


def _content(file: Path) -> str | bytes:
    """The content of a carried file; bytes of one that is no text."""
    if file.suffix != ".model":
        return read_text(file, "a tokenizer's file")
    with naming(file):
        return file.read_bytes()


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


# HF's name.
Qwen3VLProcessor = VLProcessor
