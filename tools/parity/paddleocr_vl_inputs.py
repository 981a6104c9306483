"""The cases of PaddleOCR-VL without a model: bit-exact pixels, texts, token ids and labels.

A picture is compared in the way that HF's image processor gets it, not turned and with 16 bits
clipped; before Pillow 13 with what that gave. Patches of HF are in raster order. Where HF's
template loses a text or a role, the row must be refused here or its texts kept.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image
from PIL import __version__ as pillow_version

from paddle_vl.batch.positions import in_blocks
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.paddleocr_vl.inputs.image_processor import PaddleOCRVLImageProcessor
from paddle_vl.families.paddleocr_vl.inputs.processor import PaddleOCRVLProcessor
from parity.comparison import CaseReport
from parity.golden import QwenCase

_ROLES = ("system", "user", "assistant")


def compare_processor(case: QwenCase, scale: float) -> Iterator[CaseReport]:
    """One report for sizes and settings, and one for pixels."""
    tables, settings = case.meta, case.meta["config"]
    sizes = CaseReport(f"{case.name}/sizes", scale)
    columns = tables["smart_resize"]["columns"][:5]
    for *values, wanted, _ in tables["smart_resize"]["rows"]:
        given = dict(zip(columns, values, strict=True))
        limits = {name: given[name] for name in ("min_pixels", "max_pixels")}
        sides = {"patch_size": given["factor"] // settings["merge_size"]}
        processor = PaddleOCRVLImageProcessor.from_dict(settings | limits | sides)
        found = _size_after(processor, given["height"], given["width"])
        sizes.exact("resize", str(given), found == wanted, True)
    for version, values in tables["hub_preprocessor_config"].items():
        written = PaddleOCRVLImageProcessor.from_dict(values).to_dict()
        kept = {name: written.get(name) for name in values}
        sizes.exact("settings", version, kept == values, True)
    yield sizes

    pixels = CaseReport(f"{case.name}/pixels", scale, case.tensors)
    processor = PaddleOCRVLImageProcessor.from_dict(settings)
    for each in tables["images"]:
        name = f"image.{each['name']}"
        with Image.open(case.file.parent / each["file"]) as picture:
            if each["mode"].startswith("I;16"):
                with_16_bits = partial(processor, [case.file.parent / each["file"]])
                pixels.exact("refused", name, _is_refused(with_16_bits), True)
                picture = picture.convert("RGB")
            picture.getexif().clear()
            found = processor([picture])
        grid = found["image_grid_thw"]
        pixels.exact("grids", name, grid, [each["grid"]])
        pixels.exact("grids", f"{name} tokens", processor.num_tokens(grid), [each["tokens"]])
        older = f"{name}.older_pillow.resized"
        if int(pillow_version.split(".")[0]) < 13 and older in case.tensors:
            wanted = _of_pillow(case.tensors[older], processor)
        else:
            wanted = _in_blocks(case.tensors[f"{name}.pil.pixel_values"], grid, processor)
        pixels.exact("pixels", f"{name}.pil.pixel_values", found["pixel_values"], wanted)
    whole = PaddleOCRVLImageProcessor.from_dict(settings | {"do_resize": False})
    for name, tensor in case.tensors.items():
        if name.startswith("image.noresize."):
            file = case.file.parent / "images" / f"{name.split('.')[2]}.png"
            found = whole([file])
            grid = found["image_grid_thw"]
            pixels.exact("grids", name, grid, [tables["noresize_grid"]])
            pixels.exact("pixels", name, found["pixel_values"], _in_blocks(tensor, grid, whole))
    together = [case.file.parent / "images" / f"{name}.png" for name in tables["several"]["images"]]
    found = processor(together)
    alone = np.concatenate([processor([file])["pixel_values"] for file in together])
    pixels.exact("grids", "several", found["image_grid_thw"], tables["several"]["grids"])
    pixels.exact("pixels", "several", found["pixel_values"], alone)
    yield pixels


def compare_templates(case: QwenCase, scale: float) -> Iterator[CaseReport]:
    """One report for each version of the template."""
    beside = case.file.parent.parent / "tokenizer"
    tokens = beside if beside.is_dir() else case.folders.file("tokenizer.json").parent
    for version, template in case.meta["templates"].items():
        report = CaseReport(f"{case.name}/{version}", scale)
        with TemporaryDirectory() as folder:
            shutil.copytree(tokens, folder, dirs_exist_ok=True)
            (Path(folder) / "chat_template.jinja").write_text(template, encoding="utf-8")
            settings = json.dumps(case.meta["config"])
            (Path(folder) / "preprocessor_config.json").write_text(settings, encoding="utf-8")
            processor = PaddleOCRVLProcessor.from_pretrained(folder)
        report.exact("version", version, processor.version == version, True)
        prompts = {f"{task} prompt": text for task, text in processor.task_prompts.items()}
        wanted = {f"{_task(task)} prompt": text for task, text in case.meta["prompts"].items()}
        report.exact("prompts", "task prompts", prompts == wanted, True)
        for row in case.meta["conversations"]:
            if row["version"] == version:
                _compare_conversation(processor, row, report)
        for row in case.meta["training"]:
            if row["version"] == version:
                _compare_training(processor, row, report)
        yield report


def _compare_conversation(
    processor: PaddleOCRVLProcessor, row: dict[str, Any], report: CaseReport
) -> None:
    messages, opens = row["messages"], row["add_generation_prompt"]
    name = f"{row['name']}{' with prompt' if opens else ''}"
    images = _blank(row.get("image_sizes_hw", ()))
    lost = [text for message in messages for text in _lost_by_hf(message)]
    try:
        text = processor.apply_chat_template(messages, images, add_generation_prompt=opens)
        found = processor(messages, images, add_generation_prompt=opens)
    except BadSampleError as error:
        if lost:
            report.exact("lost texts", name, True, True)
        else:
            report.fail("texts", name, str(error))
        return
    if lost:
        report.exact("lost texts", name, [each in text for each in lost], [True] * len(lost))
        return
    ids = found["input_ids"][0]
    report.exact("texts", name, text == row["text"], True)
    report.exact("ids", f"{name}, text", processor.tokenizer.encode(text), row["text_ids"])
    report.exact("ids", name, ids, row["input_ids"])
    of_images = (ids == processor.image_token_id).astype(int)
    report.exact("ids", f"{name}, types", of_images, row["mm_token_type_ids"])
    if images:
        report.exact("grids", name, found["image_grid_thw"], row["image_grid_thw"])


def _compare_training(
    processor: PaddleOCRVLProcessor, row: dict[str, Any], report: CaseReport
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["query"]}]},
        {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
    ]
    found = processor(messages, _blank([row["image_size_hw"]]), labels=True)
    name = f"{row['query']} {row['answer']}"
    report.exact("ids", name, found["input_ids"][0], row["input_ids"])
    report.exact("labels", name, found["labels"][0], row["labels"])
    report.exact("grids", name, found["image_grid_thw"], row["image_grid_thw"])


def _lost_by_hf(message: dict[str, Any]) -> list[str]:
    """Texts that HF's template drops: contents that are no list, and other roles."""
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [] if message["role"] in _ROLES else [part["text"] for part in content if "text" in part]


def _task(name: str) -> str:
    return "text" if name == "ocr" else name


def _blank(sizes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.zeros((*size, 3), np.uint8) for size in sizes]


def _size_after(processor: PaddleOCRVLImageProcessor, height: int, width: int) -> Any:
    """Height and width after resizing; `ValueError` for a size that is refused."""
    try:
        _, grid = processor.encode_one(Image.new("1", (width, height)), with_pixels=False)
    except ValueError:
        return "ValueError"
    return [side * processor.patch_size for side in grid[1:]]


def _is_refused(call: Any) -> bool:
    with suppress(BadSampleError):
        call()
        return False
    return True


def _in_blocks(
    tensor_PCHW: np.ndarray, grid: np.ndarray, processor: PaddleOCRVLImageProcessor
) -> np.ndarray:
    rows = tensor_PCHW.reshape(len(tensor_PCHW), -1)
    return rows[in_blocks(grid, processor.merge_size)]


def _of_pillow(resized_HWC: np.ndarray, processor: PaddleOCRVLImageProcessor) -> np.ndarray:
    """The pixels of a picture that was resized already."""
    return processor.replaced(do_resize=False)([resized_HWC])["pixel_values"]
