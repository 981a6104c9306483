"""What engines read of a model folder, as data for `paddle_vl.families.vlm.folders.folder_check`.

The rules are facts of the sources that each engine names, at that commit. transformers and, but for
Qwen4-Exp, vLLM were run; the others were only read. All of them take HF's tensor names.
"""

from dataclasses import dataclass
from enum import Enum


class Finding(Enum):
    """What a fault leads to: an error of the engine (`REFUSED`; `MISSING` where something is not
    there), other answers without an error (`LOST`), or the same answers (`IGNORED`). `UNCHECKED`:
    this package cannot read it, the engine perhaps can."""

    REFUSED = "refused"
    MISSING = "missing"
    LOST = "lost"
    UNCHECKED = "unchecked"
    IGNORED = "ignored"
    NOTE = "note"


_QWEN3_VL, _QWEN3_5 = ("qwen3_vl", "qwen3_vl_moe"), ("qwen3_5", "qwen3_5_moe")
_QWEN4_EXP = "qwen4_exp"
_TOWER = "adapters of the tower"
# Keys of config.json that no shape shows.
_SIZES = (
    *("text_config.num_attention_heads", "text_config.num_key_value_heads"),
    *("text_config.rms_norm_eps", "text_config.max_position_embeddings"),
    *("vision_config.num_heads", "vision_config.deepstack_visual_indexes"),
    "*_moe text_config.num_experts_per_tok",
    *(
        f"{_QWEN4_EXP} text_config.{name}"
        for name in ("num_experts_per_tok", "ple_layer_ids", "ngram_size", "seed", "eos_token_id")
    ),
)
_ROPE = (
    "text_config.rope_scaling.mrope_section|text_config.rope_parameters.mrope_section",
    "text_config.rope_theta|text_config.rope_parameters.rope_theta",
)


@dataclass(frozen=True)
class EngineRules:
    """One engine.

    Attributes:
        sources: files that the rules are from, and their commits.
        models: `model_type`s that it serves with images.
        missing: what a tensor is that the folder lacks.
        unknown: what a tensor is that the model lacks: of the first pattern for `model_type:name`.
        experts: `model_type` and how it reads the experts' matrices: stacked as published,
            `[E, in, out]` for Qwen3-VL, else `[E, out, in]`, swapped, or one by one.
        tells_by_shape: it takes square matrices of Qwen3-VL's experts as swapped.
        settings, files: keys of config.json, some after a pattern of `model_type`s, and files; a
            bar stands between alternatives.
        reads_older_keys: of alternatives only the first; `torch_dtype`, or `dtype` with
            `transformers_version`, and not both; `min_pixels` and `max_pixels` of images.
        templates: files of which its processor takes a chat template; empty for any.
        layers: `layer_types` of Qwen4-Exp that it has; empty for any that this package reads.
        blocks: numbers of blocks that an indexer chooses which it has; empty for any.
        places_parts: it needs tables of n-grams in the parts that `split_ngram_parts` makes.
        reads_all_files: without an index it reads every `*.safetensors` of the folder.
        adapted: `model_type`s of which it takes adapters.
        features, max_rank: what adapters may have beyond one rank and alpha for linears of the
            decoder, and the rank without an option, 0 for any.
        unfit: what other adapters are.
    """

    sources: str
    models: tuple[str, ...] = (*_QWEN3_VL, *_QWEN3_5, _QWEN4_EXP)
    missing: Finding = Finding.LOST
    unknown: tuple[tuple[str, Finding], ...] = (("*", Finding.IGNORED),)
    experts: tuple[str, ...] = (
        "qwen3_vl_moe published", "qwen3_5_moe published", "qwen3_5_moe one by one",
        "qwen4_exp published", "qwen4_exp one by one",
    )  # fmt: skip
    tells_by_shape: bool = False
    settings: tuple[str, ...] = (
        *(*_SIZES, *_ROPE, "*_moe text_config.num_experts"),
        "qwen3_vl_moe text_config.norm_topk_prob",
    )
    reads_older_keys: bool = False
    files: tuple[str, ...] = (
        "tokenizer.json",
        "tokenizer_config.json",
        "preprocessor_config.json|processor_config.json",
        # Without it videos silently get the area of images.
        "video_preprocessor_config.json|processor_config.json",
    )
    templates: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    places_parts: bool = False
    reads_all_files: bool = False
    adapted: tuple[str, ...] = _QWEN3_VL
    features: tuple[str, ...] = ()
    max_rank: int = 0
    unfit: Finding = Finding.REFUSED


ENGINES = {
    "vllm": EngineRules(
        "vLLM 0.32.0, which was run on a CPU; of Qwen4-Exp, for which that has no kernels, read: "
        "vllm-project/vllm, vllm/models/qwen4_exp, nvidia/model.py at ef55daa, config.py at "
        "a7a8741",
        missing=Finding.MISSING,
        unknown=(
            ("qwen3_vl_moe:model.language_model.*.mlp.*bias", Finding.REFUSED),
            ("*:model.language_model.*bias", Finding.IGNORED),
            ("qwen[34]_[5e]*:mtp.*", Finding.IGNORED),
            ("*", Finding.REFUSED),
        ),
        settings=(*EngineRules.settings, f"{_QWEN4_EXP} text_config.output_gate_type"),
        layers=("linear_attention", "full_attention"),
        blocks=(512, 2048),
        reads_all_files=True,
        adapted=(*_QWEN3_VL, "qwen3_5"),
        features=("rsLoRA", "ranks or alphas by module", _TOWER),
        max_rank=16,
    ),
    "sglang": EngineRules(
        "sgl-project/sglang, python/sglang/srt/models: qwen3_vl.py at 2409eac and 005fa83, "
        "qwen3_vl_moe.py at d9eb001, qwen3_5.py at cf4465f, qwen4_exp.py at 73a2552; "
        "python/sglang/srt/lora: lora.py at "
        "db2a4cc",
        unknown=(
            ("qwen3_vl:*.bias", Finding.IGNORED),
            ("qwen3_vl:*", Finding.REFUSED),
            ("*", Finding.IGNORED),
        ),
        places_parts=True,
        reads_all_files=True,
    ),
    "fastdeploy": EngineRules(
        "PaddlePaddle/FastDeploy, fastdeploy: config.py and model_executor/utils.py at 0009064, "
        "model_executor/load_weight_utils.py at 0004557, model_executor/models/qwen3_vl: "
        "qwen3_vl.py at 153f0d5, qwen3_vl_moe.py at df14deb",
        _QWEN3_VL,  # It has Qwen3.5 as a model of text alone.
        settings=(*_SIZES, *_ROPE, "*_moe text_config.num_experts"),
        # Otherwise it takes a rotary base of 10000 without a message.
        reads_older_keys=True,
        files=("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"),
        adapted=(),
    ),
    "transformers": EngineRules(
        "transformers 5.24.0: conversion_mapping.py, core_model_loading.py, models/qwen3_vl, "
        "qwen3_vl_moe, qwen3_5, qwen3_5_moe and qwen4_exp, integrations/peft.py",
        experts=(*EngineRules.experts, "qwen3_vl_moe swapped"),
        tells_by_shape=True,
        templates=("processor_config.json", "chat_template.json", "chat_template.jinja"),
        settings=(*_SIZES, *_ROPE),
        adapted=(*_QWEN3_VL, *_QWEN3_5, _QWEN4_EXP),
        # Its own loader drops the magnitudes of DoRA, which PEFT's keeps.
        features=("rsLoRA", "ranks or alphas by module", "modules_to_save", _TOWER),
        unfit=Finding.LOST,
    ),
}
