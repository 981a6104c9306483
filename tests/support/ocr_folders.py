"""Folders of tiny PaddleOCR-VL models, written by this package from the golden ones."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
from paddle_vl.families.vlm.inputs.processor import VLProcessor

GOLDEN = Path(__file__).parents[1] / "golden" / "paddleocr_vl"
TABLE = "visual.vision_model.embeddings.packing_position_embedding.weight"
# Of models with patches of 8 pixels; images are enlarged to 24 patches and reduced to 240.
IMAGES = {
    "image_processor_type": "PaddleOCRVLImageProcessor", "processor_class": "PaddleOCRVLProcessor",
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3,
    "rescale_factor": 1 / 255, "min_pixels": 1536, "max_pixels": 15360,
    "patch_size": 8, "merge_size": 2, "temporal_patch_size": 1,
}  # fmt: skip


def write_folder(folder: Path, kind: str = "tied", version: str = "1.5") -> Path:
    """Write the golden model of a kind with the processor of a version.

    Args:
        kind: tied or untied.
        version: of the chat template, 1.0 or 1.5.
    """
    folder.mkdir(parents=True)
    source = folder.with_name(f"{folder.name} source")
    shutil.copytree(GOLDEN / "tokenizer", source)
    templates = json.loads((GOLDEN / "templates" / "templates.json").read_text())["templates"]
    (source / "chat_template.jinja").write_text(templates[version])
    (source / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    processor = VLProcessor.from_pretrained(source, model_type="paddleocr_vl")
    shutil.copy(GOLDEN / "models" / kind / "config.hub_style.json", source / "config.json")
    tensors = load_file(GOLDEN / "models" / kind / "model.safetensors")
    # Of the golden files' table only the first rows are there.
    tensors[TABLE] = np.zeros((32768, tensors[TABLE].shape[1]), np.float32)
    save_file(tensors, source / "model.safetensors")
    model = PaddleOCRVLForConditionalGeneration.from_pretrained(source)
    model.generation_config = processor.generation_config
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
