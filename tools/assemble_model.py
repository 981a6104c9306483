"""Write the model that pretraining starts from: a language model, a vision tower and new mergers.

    python tools/assemble_model.py --language checkpoints/Qwen3-8B \
        --vision checkpoints/Qwen3-VL-8B-Instruct --output checkpoints/Qwen3-VL-8B-start

The language model is a dense Qwen3 or that of a Qwen3-VL; the tower, the tokenizer and the image
processor are those of a Qwen3-VL, whose language model may have another size. Mergers are drawn as
HF draws them: normal weights (initializer_range), norms of 1, biases of 0. Weights keep the dtype
of the language model; one tensor at a time is in memory.
"""

import argparse
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from paddle_vl.checkpoint.safetensors_io import (
    StoredTensor,
    TensorToWrite,
    encoded,
    read_checkpoint_headers,
)
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.files.text_file import read_json_object

_LANGUAGE, _HEAD = "model.language_model.", "lm_head.weight"
# Of a Qwen3's config.json; the rest of the text configuration is that of the tower's model.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta"),
)


def assemble(language: Path, vision: Path, output: Path, seed: int = 0) -> Qwen3VLConfig:
    """Write the model folder; returns its configuration.

    Args:
        language, vision: model folders in HF's layout.
        seed: of the mergers.

    Raises:
        ValueError: the parts are of other kinds or do not fit each other, or `output` is in use.
        RuntimeError: files are missing or damaged.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: choose another folder for the model")
    config = assembled_config(language, vision)
    processor = Qwen3VLProcessor.from_pretrained(vision)
    check_processor_fits(config, processor)
    model = Qwen3VLForConditionalGeneration.from_config(config, materialize=False)
    tensors = list(_tensors(model.whole_shapes(), config, language, vision, seed))
    output.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(output)
    processor.save_pretrained(output)
    write_tensors(output, "model", tensors, DEFAULT_SHARD_BYTES)
    return config


def assembled_config(language: Path, vision: Path) -> Qwen3VLConfig:
    """The configuration: sizes of the language model, tower of the other.

    Raises:
        ValueError: `language` is neither a dense Qwen3 nor a Qwen3-VL.
    """
    tower = Qwen3VLConfig.from_pretrained(vision)
    found = read_json_object(language / "config.json", "a model's configuration")
    kind = found.get("model_type")
    if kind == "qwen3":
        values = tower.to_dict()
        missing = [name for name in _SIZES if name not in found]
        if missing:
            raise ValueError(f"{language}/config.json has no {', '.join(missing)}")
        if values["model_type"] != "qwen3_vl":
            raise ValueError(f"{vision} has experts and {language} has none: take a dense one")
        tie = bool(found.get("tie_word_embeddings", False))
        values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = tie
        values["text_config"] |= {name: found[name] for name in _SIZES}
    elif kind in ("qwen3_vl", "qwen3_vl_moe"):
        values = Qwen3VLConfig.from_pretrained(language).to_dict()
        values["vision_config"] = tower.to_dict()["vision_config"]
    else:
        raise ValueError(
            f"{language}/config.json has model_type {kind!r}; a dense Qwen3 (qwen3) or a Qwen3-VL "
            "is needed as the language model"
        )
    if kind == "qwen3_vl_moe":
        values["vision_config"]["model_type"] = "qwen3_vl_moe"
    values["vision_config"]["out_hidden_size"] = values["text_config"]["hidden_size"]
    return Qwen3VLConfig.from_dict(values)


def _tensors(
    shapes: Mapping[str, tuple[int, ...]],
    config: Qwen3VLConfig,
    language: Path,
    vision: Path,
    seed: int,
) -> Iterator[TensorToWrite]:
    """The tensors of the model by HF's keys."""
    of_language = _as_language(read_checkpoint_headers(language))
    of_tower = read_checkpoint_headers(vision)
    dtype = of_language[f"{_LANGUAGE}embed_tokens.weight"].dtype
    spread = config.text_config.initializer_range
    mergers = tuple(pattern.removesuffix("*") for pattern in PARTS["mergers"])
    for key, shape in shapes.items():
        if key.startswith(mergers):
            produce: Any = partial(_drawn, key, shape, spread, seed)
        else:
            is_tower = key.startswith("model.visual.")
            stored = (of_tower if is_tower else of_language).get(key)
            folder = vision if is_tower else language
            if stored is None:
                raise RuntimeError(f"{folder} has no {key}")
            if stored.shape != shape:
                raise ValueError(
                    f"{folder}: {key} has shape {list(stored.shape)}, its config.json makes it "
                    f"{list(shape)}"
                )
            produce = stored.read
        yield TensorToWrite(key, shape, dtype, produce, partial(encoded, dtype=dtype))


def _as_language(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of a Qwen3 under a Qwen3-VL's keys; those of a Qwen3-VL as they are."""
    if f"{_LANGUAGE}embed_tokens.weight" in stored:
        return dict(stored)
    inner = "model."
    found = {
        key if key == _HEAD else _LANGUAGE + key.removeprefix(inner): tensor
        for key, tensor in stored.items()
    }
    if f"{_LANGUAGE}embed_tokens.weight" not in found:
        raise RuntimeError(f"no model.embed_tokens.weight among {json.dumps(sorted(stored)[:5])}")
    return found


def _drawn(key: str, shape: tuple[int, ...], spread: float, seed: int) -> np.ndarray:
    if key.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if key.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    return rng.normal(scale=spread, size=shape).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--language", type=Path, required=True, help="a Qwen3 or Qwen3-VL folder")
    parser.add_argument("--vision", type=Path, required=True, help="a Qwen3-VL folder")
    parser.add_argument("--output", type=Path, required=True, help="new model folder")
    parser.add_argument("--seed", type=int, default=0, help="of the mergers (default 0)")
    options = parser.parse_args()
    try:
        config = assemble(options.language, options.vision, options.output, options.seed)
    except (ValueError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    layers = config.text_config.num_hidden_layers
    print(f"{options.output}: {layers} decoder layers, {config.vision_config.depth} of the tower")


if __name__ == "__main__":
    main()
