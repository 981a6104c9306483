"""Whether an engine serves a folder of PaddleOCR-VL as it was trained; see
`paddle_vl.families.vlm.folders.folder_check`.

PaddleX, vLLM and transformers were run on folders that lack one thing each; FastDeploy was only
read, at the commits that its rules name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.reading import checkpoint_tensors
from paddle_vl.config.bounded_yaml import read_document
from paddle_vl.config.families import FamilyEntry
from paddle_vl.families.paddleocr_vl.checkpoint_map import (
    KEPT,
    PACKED_POSITIONS,
    key_here,
    tensors_as_here,
)
from paddle_vl.families.paddleocr_vl.config import PaddleOCRVisionConfig, PaddleOCRVLConfig
from paddle_vl.families.paddleocr_vl.inputs.versions import (
    INFERENCE_FILE,
    LIMITS,
    NAMES,
    PADDLEX_NAMES,
)
from paddle_vl.families.vlm.answering.engines import EngineRules, Finding
from paddle_vl.families.vlm.folders.folder_check import (
    Found,
    adapter_findings,
    file_findings,
    refusal,
    setting_findings,
    tensor_findings,
    told,
)
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.modeling.config import HEAD_KEY
from paddle_vl.families.vlm.training.adapter import with_head
from paddle_vl.files.stored_settings import check_mapping
from paddle_vl.files.text_file import read_json_object, read_text, shown
from paddle_vl.generation.config import FILE_NAME

_TYPE = "paddleocr_vl"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TABLE = f"{KEPT[0]}weight"
_IMAGES, _TOKENS = "preprocessor_config.json", "tokenizer_config.json"
# Of the decoder, of which no shape tells, and of the model.
_DECODER = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
_MODEL = ("image_token_id", "vision_start_token_id", "vision_config.num_attention_heads")
_FLAT_ROPE = ("rope_scaling.mrope_section", "rope_theta")
_NESTED_ROPE = (
    "rope_scaling.mrope_section|rope_parameters.mrope_section|"
    "text_config.rope_parameters.mrope_section",
    "rope_theta|rope_parameters.rope_theta|text_config.rope_parameters.rope_theta",
)
_BOTH_DIALECTS = (*(f"{key}|text_config.{key}" for key in _DECODER), *_NESTED_ROPE, *_MODEL)
_TOKENIZER = ("tokenizer.json", _TOKENS, _IMAGES)

ENGINES = {
    "paddlex": EngineRules(
        "PaddleX 3.7.2, its dynamic-graph engine, which was run",
        (_TYPE,),
        missing=Finding.REFUSED,
        unknown=(("*", Finding.REFUSED),),
        settings=(*_DECODER, "head_dim", *_FLAT_ROPE, *_MODEL),
        files=(),
        templates=("chat_template.jinja",),
        adapted=(),
    ),
    "vllm": EngineRules(
        "vLLM 0.32.0 with transformers 5.19.0, which was run on a CPU",
        (_TYPE,),
        missing=Finding.MISSING,
        unknown=(
            *((f"*:{prefix}*", Finding.IGNORED) for prefix in KEPT),
            ("*", Finding.REFUSED),
        ),
        settings=_BOTH_DIALECTS,
        files=("tokenizer.json|tokenizer.model", _TOKENS, _IMAGES),
        reads_all_files=True,
        adapted=(),
    ),
    "fastdeploy": EngineRules(
        "PaddlePaddle/FastDeploy, fastdeploy: config.py at 0009064, model_executor/models/"
        "paddleocr_vl: paddleocr_vl.py at 0e7deb7, siglip.py at 06d1e48, config.py at 6bfb15e, "
        "input/paddleocr_vl_processor: image_processor.py at 40e88be, process.py at 21c20a7",
        (_TYPE,),
        settings=(*_FLAT_ROPE, *_MODEL),
        reads_older_keys=True,
        files=_TOKENIZER,
        adapted=(),
    ),
    "transformers": EngineRules(
        "transformers 5.24.0: models/paddleocr_vl, conversion_mapping.py; which was run",
        (_TYPE,),
        settings=_BOTH_DIALECTS,
        files=(_TOKENIZER[0], _TOKENS, f"{_IMAGES}|processor_config.json"),
        templates=("processor_config.json", "chat_template.json", "chat_template.jinja"),
        adapted=(_TYPE,),
        features=("rsLoRA", "ranks or alphas by module", "modules_to_save"),
        unfit=Finding.LOST,
    ),
}
# Files without which PaddleX ends, with errors that name little, and how to get them.
_NEEDED = {
    INFERENCE_FILE: f"PaddleX looks for Global.model_name in it, as {PADDLEX_NAMES['1.5']}",
    _WEIGHTS: "PaddleX reads one file of this name: write the folder with paddle-vl merge or train",
    "tokenizer.model": "PaddleX splits text with it: copy it from the checkpoint",
    _IMAGES: "copy it from the checkpoint",
}
# What PaddleX takes where preprocessor_config.json has no such key at its top.
_IMAGE_DEFAULTS = {
    ("min_pixels", "max_pixels"): "147384 and 2822400",
    ("image_mean", "image_std"): "CLIP's",
    ("patch_size",): "14",
}
# Settings of generation, and the value that PaddleX can follow.
_GREEDY = {"do_sample": False, "num_beams": 1}
# These read the head of the file also where it is the embedding.
_READS_HEAD = ("paddlex", "fastdeploy")


def check_folder(
    family: FamilyEntry, folder: Path, base: Path, engine: str
) -> tuple[bool, list[str]]:
    """See `FamilyEntry.ask`."""
    if (rules := ENGINES.get(engine)) is None:
        told_of = f"{Finding.UNCHECKED.value}: the rules of {engine} for {family.name} are not here"
        return False, [f"{told_of}: see those of vllm"]
    return told(_found(family.model_class(), folder, base, engine, rules), rules)


def _found(model_class: Any, folder: Path, base: Path, engine: str, rules: EngineRules) -> Found:
    values = read_json_object(base / "config.json", "a model's configuration")
    is_nested = "num_attention_heads" not in values
    if engine == "paddlex" and is_nested:
        yield (
            Finding.REFUSED,
            "config.json: the decoder's keys are in text_config, as transformers 5 writes them; "
            "PaddleX ends with a TypeError: paddle-vl writes them at the top",
        )
    else:
        yield from setting_findings(values, rules, _TYPE)
    try:
        files = list(file_findings(base, rules))
        if engine != "fastdeploy":
            files += _of_paddlex(base) if engine == "paddlex" else _limits_of_hf(base)
        yield from files
        config = PaddleOCRVLConfig.from_dict(values)
        named = checkpoint_tensors(base)
        if engine != "transformers" and (others := sorted({*named} - {*map(key_here, named)})):
            told_of = f"names of transformers' modules, as {others[0]}"
            yield Finding.REFUSED, f"{told_of}: write the folder with model.save_layout: hub"
            return
        stored = tensors_as_here(named, config)
        by_values = config.tied_by(stored)
        config = config.with_tie(by_values.tie_word_embeddings and engine not in _READS_HEAD)
        with paddle.LazyGuard():
            wanted = model_class(config).whole_shapes()
        unread = _unread(config.vision_config)
        if engine == "paddlex":
            has_pooling = _vision(values).get("vision_use_head", True)
            wanted |= {name: unread[name] for name in unread if has_pooling or name == _TABLE}
        elif engine == "fastdeploy":
            # It has them, and does without them.
            wanted |= {name: unread[name] for name in unread if name in stored}
        if config.tie_word_embeddings:
            stored.pop(HEAD_KEY, None)
        yield from tensor_findings(wanted, stored, rules, _TYPE)
        if Finding.MISSING not in dict(files):
            try:
                processor = VLProcessor.from_pretrained(base, model_type=_TYPE)
            except RuntimeError as error:
                # Of tokenizer.json, without which PaddleX does.
                raise ValueError(str(error)) from error
            yield from refusal(check_processor_fits, config, processor)
            yield from _versions(base, processor)
        if folder != base:
            adapter = StoredAdapter.read(folder, key_here)
            adapter.tensors.update(tensors_as_here(adapter.tensors, config))
            is_tied = config.tie_word_embeddings
            on_base = with_head(adapter, stored, config.embedding_key) if is_tied else stored
            yield from refusal(adapter.merged, on_base)
            yield from adapter_findings(adapter, rules, _TYPE)
    except RuntimeError as error:
        yield Finding.REFUSED, str(error)
    except ValueError as error:
        yield Finding.UNCHECKED, f"not read here: {error}"


def _vision(values: Mapping[str, Any]) -> dict[str, Any]:
    return check_mapping(values.get("vision_config"), "vision_config")


def _unread(vision: PaddleOCRVisionConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that no forward reads, by their keys."""
    width, inner = vision.hidden_size, vision.intermediate_size
    head = {
        "probe": (1, 1, width),
        "attention.in_proj_weight": (3 * width, width), "attention.in_proj_bias": (3 * width,),
        "attention.out_proj.weight": (width, width), "attention.out_proj.bias": (width,),
        "layernorm.weight": (width,), "layernorm.bias": (width,),
        "mlp.fc1.weight": (inner, width), "mlp.fc1.bias": (inner,),
        "mlp.fc2.weight": (width, inner), "mlp.fc2.bias": (width,),
    }  # fmt: skip
    return {_TABLE: (PACKED_POSITIONS, width)} | {KEPT[1] + key: head[key] for key in head}


def _of_paddlex(folder: Path) -> Found:
    """What PaddleX makes of files that other programs do not read, or read otherwise."""
    for file, reason in _NEEDED.items():
        if not (folder / file).is_file():
            yield Finding.MISSING, f"{file}: {reason}"
    name, known = _paddlex_name(folder), PADDLEX_NAMES.values()
    if (folder / INFERENCE_FILE).is_file() and name not in known:
        told_of = f"Global.model_name is {shown(name)}, not {' or '.join(known)}"
        yield Finding.REFUSED, f"{INFERENCE_FILE}: {told_of}"
    tokens = _read(folder / _TOKENS)
    if tokens.get("add_bos_token") is not False:
        told = f"add_bos_token is {shown(tokens.get('add_bos_token'))}: PaddleX begins every prompt"
        yield Finding.LOST, f"{_TOKENS}: {told} with <s>; set it to false"
    images = _read(folder / _IMAGES)
    for names, default in _IMAGE_DEFAULTS.items():
        if images and not all(name in images for name in names):
            told = f"no {' and '.join(names)} at the top: PaddleX takes {default}"
            yield Finding.LOST, f"{_IMAGES}: {told}"
    generation = _read(folder / FILE_NAME)
    given = [k for k, value in _GREEDY.items() if generation.get(k, value) not in (None, value)]
    if given:
        told = f"{' and '.join(given)}: PaddleX ends with an error at the first question"
        yield Finding.REFUSED, f"{FILE_NAME}: {told}, as it has the likeliest token alone"


def _limits_of_hf(folder: Path) -> Found:
    images = _read(folder / _IMAGES)
    size = images.get("size")
    if "max_pixels" not in images and isinstance(size, dict) and "longest_edge" not in size:
        told = "size has no longest_edge: transformers ends with an error"
        yield Finding.REFUSED, f"{_IMAGES}: {told}; set min_pixels and max_pixels at the top"


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file, "settings") if file.is_file() else {}


def _paddlex_name(folder: Path) -> Any:
    """The name by which PaddleX knows a folder's model; None where none is there."""
    file = folder / INFERENCE_FILE
    text = read_text(file, "settings of PaddleX") if file.is_file() else ""
    content, _ = read_document(text, str(file))
    settings = content.get("Global") if isinstance(content, dict) else None
    return settings.get("model_name") if isinstance(settings, dict) else None


def _versions(folder: Path, processor: Any) -> Found:
    """Which version the files say, and whether all say the same."""
    images, name = processor.image_processor, _paddlex_name(folder)
    limits = images.min_pixels, images.max_pixels
    said = {
        "the chat template": processor.version,
        f"limits of {_IMAGES}": next((v for v in LIMITS if LIMITS[v] == limits), None),
        INFERENCE_FILE: next((v for v in PADDLEX_NAMES if PADDLEX_NAMES[v] == name), None),
    }
    said = {file: version for file, version in said.items() if version is not None}
    # In template and limits 1.6 is 1.5.
    if len({version.replace("1.6", "1.5") for version in said.values()}) > 1:
        told = ", ".join(f"{file} of {version}" for file, version in said.items())
        yield (
            Finding.LOST,
            f"files of several versions: {told}: answers get worse without an error; take all from "
            "the checkpoint that the model was trained from",
        )
    else:
        versions = said.get(INFERENCE_FILE) or NAMES.get(
            next(iter(said.values()), ""), "none known"
        )
        yield Finding.NOTE, f"the files are of PaddleOCR-VL {versions}"
