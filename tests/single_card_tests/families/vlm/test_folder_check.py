"""Model folders against the rules of the engines that serve them: every kind of folder that this
package writes fits; one that is spoilt is told, with what the engine makes of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import (
    LoRAConfig,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen4ExpForConditionalGeneration,
)
from paddle_vl.checkpoint.safetensors_io import StoredTensor
from paddle_vl.cli.main import main
from paddle_vl.config.families import family_of_folder
from paddle_vl.families.vlm.answering.engines import ENGINES
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.modeling.config import EMBEDDING_KEY, TOKEN_IDS
from paddle_vl.nn.linear import default_dtype
from paddle_vl.testing import (
    EXPERTS_3_5,
    tiny_qwen3_5_config,
    tiny_qwen3_vl_config,
    tiny_qwen4_exp_config,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from paddle_vl.testing.tiny_run import TINY_EXPERTS, VOCABULARY, write_tiny_run
from tests.single_card_tests.families.vlm.test_model_files import divide_experts

ALL = tuple(ENGINES)
WITHOUT_FASTDEPLOY = ("vllm", "sglang", "transformers")
# Text settings, dtype, largest file, and the engines that serve the folder.
WRITTEN: dict[str, tuple[dict[str, Any], str, int | None, tuple[str, ...]]] = {
    "dense": ({}, "float32", None, ALL),
    "tied": ({"tie_word_embeddings": True}, "float32", None, ALL),
    "moe": (EXPERTS | {"moe_intermediate_size": 12}, "float32", None, ALL),
    # A hidden size of twice the experts' width.
    "square moe": (EXPERTS, "float32", None, ("vllm", "sglang", "fastdeploy")),
    "sharded bfloat16": ({}, "bfloat16", 20_000, ALL),
    "3.5": ({}, "float32", None, WITHOUT_FASTDEPLOY),
    "3.5 tied bfloat16": ({"tie_word_embeddings": True}, "bfloat16", None, WITHOUT_FASTDEPLOY),
    "3.5 moe": (EXPERTS_3_5, "float32", None, WITHOUT_FASTDEPLOY),
    "4": ({"indexer_budget": 1024}, "float32", None, WITHOUT_FASTDEPLOY),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A run beside folders of all kinds."""
    root = tmp_path_factory.mktemp("folders")
    write_tiny_run(root, text=TINY_EXPERTS | {"moe_intermediate_size": 12})
    processor = VLProcessor.from_pretrained(root / "processor")
    ids = {name: getattr(processor, name) for name in TOKEN_IDS}
    for kind, (text, dtype, max_shard_bytes, _) in WRITTEN.items():
        make, model_class = tiny_qwen3_vl_config, Qwen3VLForConditionalGeneration
        if kind.startswith("3.5"):
            make, model_class = tiny_qwen3_5_config, Qwen3_5ForConditionalGeneration
        elif kind == "4":
            make, model_class = tiny_qwen4_exp_config, Qwen4ExpForConditionalGeneration
        with default_dtype(dtype):
            model = model_class.from_config(replace(make(vocab_size=VOCABULARY, **text), **ids))
        model.generation_config = processor.generation_config
        model.save_pretrained(root / kind, max_shard_bytes)
        processor.save_pretrained(root / kind)
    return root


def findings(folder: Path, engine: str) -> list[str]:
    """What is told of a folder, without the verdict, which is compared with it."""
    fits, told = family_of_folder(folder).ask("check_folder", folder, folder, engine)
    verdict, kinds = told.pop(), {text.partition(":")[0] for text in told}
    assert fits == (kinds <= {"ignored", "note"})
    only_unchecked = kinds and kinds <= {"ignored", "note", "unchecked"}
    expected = "was not compared in full with" if only_unchecked and not fits else "does not fit"
    assert verdict.startswith(f"{'fits' if fits else expected} the rules of ")
    return told


@pytest.mark.parametrize(
    ("kind", "engine"), [(kind, engine) for kind, row in WRITTEN.items() for engine in row[3]]
)
def test_written_folders_fit(kind, engine, root, monkeypatch):
    monkeypatch.delattr(StoredTensor, "read")
    assert findings(root / kind, engine) == []


def test_fastdeploy_has_no_images_for_3_5(root):
    told = "refused: it serves qwen3_vl, qwen3_vl_moe, not qwen3_5"
    assert findings(root / "3.5", "fastdeploy") == [told]


def test_paddlex_has_none_of_these_models(root):
    fits, told = family_of_folder(root / "3.5").ask("check_folder", *[root / "3.5"] * 2, "paddlex")
    assert (fits, told) == (False, ["refused: paddlex has no models of this family"])


@pytest.mark.parametrize("engine", ALL)
def test_averaged_weights_of_a_run_fit_without_reading_them(engine, root, monkeypatch, capsys):
    if not (root / "out").exists():
        assert main(["train", str(root / "run.yaml"), "train.ema={decay: 0.5}"]) == 0
    monkeypatch.setattr("paddle_vl.train.checkpoint.check_weights", None)
    assert main(["check-folder", str(root / "out"), "--for", engine]) == 0
    told = capsys.readouterr().out
    assert str(root / "out" / "final") in told
    assert "fits the rules of " in told


@pytest.mark.parametrize(
    ("settings", "vllm", "sglang", "transformers"),
    [
        ({"r": 4}, "", "", ""),
        ({"r": 24, "use_rslora": True}, "note: rank 24 needs --max-lora-rank 24", "rsLoRA", ""),
        ({"target_modules": ["q_proj", "qkv"]}, "need --enable-tower-connector-lora", "tower", ""),
        (
            {"use_dora": True, "rank_pattern": {"q_proj": 2}},
            "no DoRA: merge them",
            "DoRA",
            "no DoRA: merge them",
        ),
        ({"rank_pattern": {"q_proj": 2}}, "", "ranks or alphas by module", ""),
        ({"modules_to_save": ["mergers"]}, "modules_to_save", "modules_to_save", ""),
    ],
)
def test_adapters_fit_or_are_to_be_merged(
    settings, vllm, sglang, transformers, root, tmp_path, capsys
):
    """transformers 5.24's own loader gives the merged model's logits but for DoRA, whose
    magnitudes it drops without a message; PEFT 0.21.2 gives them always."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(root / "dense")
    model.add_lora(LoRAConfig(**{"target_modules": ["q_proj", "down_proj"], **settings}))
    model.save_adapter(tmp_path / "adapter")
    expected = {"vllm": vllm, "sglang": sglang, "fastdeploy": "merge them"}
    expected["transformers"] = transformers
    for engine, fragment in expected.items():
        fits = not fragment or "need" in fragment
        arguments = ["check-folder", str(tmp_path / "adapter"), "--for", engine]
        assert main(arguments) == (0 if fits else 1)
        told = capsys.readouterr().out
        assert fragment in told
        assert ("refused: " in told or "lost: " in told) != fits
    merged = str(tmp_path / "merged")
    assert main(["merge", str(tmp_path / "adapter"), merged]) == 0
    assert [findings(Path(merged), engine) for engine in ALL] == [[]] * 4


def test_merging_into_a_base_of_transformers_gives_both_flags_and_the_hubs_dialect(root, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(root / "dense", base)
    config(lambda v: (as_transformers_5(v), v.pop("tie_word_embeddings")))(base)
    kinds = {text.partition(":")[0] for text in findings(base, "fastdeploy")}
    assert kinds == {"lost", "refused"}
    model = Qwen3VLForConditionalGeneration.from_pretrained(base)
    model.add_lora(LoRAConfig(r=2, target_modules=["q_proj"]))
    model.save_adapter(tmp_path / "adapter")
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    assert findings(tmp_path / "merged", "fastdeploy") == []
    found, first = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "merged", root / "dense")
    )
    assert found == first


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        arrays = load_file(file)
        change(arrays)
        save_file(arrays, file)

    return edit


def config(
    change: Callable[[dict[str, Any]], object], name: str = "config.json"
) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return edit


def written(name: str, values: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(values))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def as_transformers_5(values: dict[str, Any]) -> None:
    text = values["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    values["dtype"] = values.pop("torch_dtype")


def swap_experts(arrays: dict[str, np.ndarray]) -> None:
    for name in [name for name in arrays if ".experts." in name]:
        arrays[name] = np.ascontiguousarray(arrays[name].swapaxes(1, 2))


def nested_settings(longest_edge: int) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        settings = {name: value for name, value in settings.items() if "_pixels" not in name}
        settings["size"] = {"shortest_edge": 64, "longest_edge": longest_edge}
        written("processor_config.json", {"image_processor": settings})(folder)

    return write


def template_of_the_tokenizer(folder: Path) -> None:
    without("chat_template.jinja")(folder)
    config(lambda v: v.update(chat_template="{{ messages }}"), "tokenizer_config.json")(folder)


def table(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The first layer's table of n-grams, whose parts the arrays lose."""
    return np.concatenate([arrays.pop(f"{TABLE}shard_{number}.weight") for number in range(4)])


def split_table(arrays: dict[str, np.ndarray], count: int) -> None:
    pieces = np.array_split(table(arrays), count)
    arrays.update({f"{TABLE}shard_{i}.weight": each for i, each in enumerate(pieces)})


TABLE = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding."
INDEXED = ["linear_attention", "indexed_attention", "linear_attention"]
INDEX, IMAGES = "model.safetensors.index.json", "preprocessor_config.json"
NORM, MERGER = "model.language_model.norm.weight", "model.visual.merger.norm.weight"
UP = "model.language_model.layers.0.mlp.up_proj.weight"
LACKS, OTHERS = "tensors that the folder lacks: ", "tensors that the model does not have: "
VLLM, SGLANG, FASTDEPLOY, HF = ("vllm",), ("sglang",), ("fastdeploy",), ("transformers",)
READ = (*VLLM, *HF)
Told = list[tuple[tuple[str, ...], tuple[str, ...]]]
# What is spoilt: the kind of folder, how, and what engines tell.
SPOILT: dict[str, tuple[str, Callable[[Path], object], Told]] = {
    "a name": (
        "dense", tensors(lambda a: a.update({f"{MERGER}s": a.pop(MERGER)})),
        [(VLLM, (f"missing: {LACKS}{MERGER}", f"refused: {OTHERS}{MERGER}s")),
         (SGLANG, (f"lost: {LACKS}{MERGER}", f"refused: {OTHERS}{MERGER}s")),
         (FASTDEPLOY + HF, (f"lost: {LACKS}{MERGER}", f"ignored: {OTHERS}{MERGER}s"))],
    ),
    "a name of 3.5": (
        "3.5", tensors(lambda a: a.update({f"{NORM}s": a.pop(NORM)})),
        [(VLLM, (f"missing: {LACKS}{NORM}", f"refused: {OTHERS}{NORM}s"))],
    ),
    "a tensor too many": (
        "moe", tensors(lambda a: a.update({UP.replace("weight", "bias"): a[NORM]})),
        [(VLLM, (f"refused: {OTHERS}{UP.replace('weight', 'bias')}",)),
         (ALL[1:], (f"ignored: {OTHERS}{UP.replace('weight', 'bias')}",))],
    ),
    "a bias too many": (
        "dense", tensors(lambda a: a.update({UP.replace("weight", "bias"): a[NORM]})),
        [(ALL, (f"ignored: {OTHERS}{UP.replace('weight', 'bias')}",))],
    ),
    "tensors for more tokens at once": (
        "3.5", tensors(lambda a: a.update({"mtp.norm.weight": a[NORM].copy()})),
        [(WITHOUT_FASTDEPLOY, (f"ignored: {OTHERS}mtp.norm.weight",))],
    ),
    "a shape": (
        "dense", tensors(lambda a: a.update({UP: a[UP].T.copy()})),
        [(ALL, (f"refused: tensors of another shape: {UP} [16, 24], not [24, 16]",))],
    ),
    "a dtype": (
        "dense", tensors(lambda a: a.update({UP: a[UP].astype(np.int8)})),
        [(ALL, (f"lost: tensors of no floating point numbers: {UP} I8",))],
    ),
    "swapped experts": (
        "moe", tensors(swap_experts),
        [(VLLM + SGLANG + FASTDEPLOY, ("refused: experts stored swapped: ",)), (HF, ())],
    ),
    # transformers 5.24 turns published experts unless their shape fits already.
    "square experts": (
        "square moe", lambda _: None, [(HF, ("lost: square experts, which it takes as swapped",))],
    ),
    "square experts that are swapped": ("square moe", tensors(swap_experts), [(HF, ())]),
    "single experts of 3.5": ("3.5 moe", tensors(divide_experts), [(WITHOUT_FASTDEPLOY, ())]),
    "attention of transformers' name": (
        "4", config(lambda v: v["text_config"].update(layer_types=INDEXED)),
        [(VLLM, ("refused: config.json: layer_types has indexed_attention, not linear_atten",)),
         (SGLANG + HF, ())],
    ),
    "few blocks": (
        "4", config(lambda v: v["text_config"].update(indexer_budget=8)),
        [(VLLM, ("refused: config.json: indexer_budget / indexer_compress_ratio is 4, not 512",)),
         (SGLANG + HF, ())],
    ),
    "no kind of gate": (
        "4", config(lambda v: v["text_config"].update(output_gate_type=None)),
        [(VLLM, ("lost: config.json: no text_config.output_gate_type: ",)), (SGLANG + HF, ())],
    ),
    "other parts of a table": (
        "4", tensors(lambda a: split_table(a, 3)),
        [(SGLANG, (f"lost: {TABLE}weight is in 3 parts, split_ngram_parts is 4: it places",)),
         (READ, ())],
    ),
    "a table in one tensor": (
        "4", tensors(lambda a: a.update({f"{TABLE}weight": table(a)})),
        [(SGLANG, (f"refused: {TABLE}weight is one tensor, not parts: save it",)), (READ, ())],
    ),
    "a head beside a tied embedding": (
        "tied", tensors(lambda a: a.update({"lm_head.weight": a[EMBEDDING_KEY].copy()})),
        [(ALL, ("ignored: lm_head.weight: the embedding is the head",))],
    ),
    "a quantization": (
        "dense", config(lambda v: v.update(quantization_config={"quant_method": "fp8"})),
        [(READ, ("unchecked: not read here: a configuration of Qwen3-VL: quantization",))],
    ),
    "a key that is unknown here": (
        "3.5", config(lambda v: v["text_config"].update(own=1)),
        [(VLLM, ("unchecked: not read here: text_config of qwen3_5_text does not know the keys",))],
    ),
    # transformers 5.24 reads the file, vLLM and SGLang what the index names.
    "an index beside the file": (
        "dense", written(INDEX, {"weight_map": {"x": "model-00001-of-00002.safetensors"}}),
        [(READ, ("lost: transformers reads model.safetensors, others the files of",))],
    ),
    "an index of the file": (
        "dense", written(INDEX, {"weight_map": {"x": "model.safetensors"}}), [(READ, ())],
    ),
    "settings of processors that differ": (
        "dense", nested_settings(1024),
        [(READ, ("lost: processor_config.json and preprocessor_config.json differ: ",))],
    ),
    "settings of processors that agree": ("dense", nested_settings(256), [(READ, ())]),
    # AutoProcessor of transformers 5.24 does not read it, AutoTokenizer does.
    "a chat template of the tokenizer": (
        "dense", template_of_the_tokenizer,
        [(VLLM, ()), (HF, ("missing: a chat template: chat_template.jinja",))],
    ),
    "chat templates that differ": (
        "dense", written("chat_template.json", {"chat_template": "{{ messages }}"}),
        [(READ, ("lost: the chat templates of chat_template.json and chat_template.jinj",))],
    ),
    "a tie flag": (
        "tied", config(lambda v: v["text_config"].pop("tie_word_embeddings")),
        [(ALL, ("lost: config.json: tie_word_embeddings is True, in text_config None",))],
    ),
    "a key": (
        "moe", config(lambda v: v["text_config"].pop("norm_topk_prob")),
        [(VLLM + SGLANG, ("lost: config.json: no text_config.norm_topk_prob: the engine",)),
         (FASTDEPLOY + HF, ())],
    ),
    "a size": (
        "dense", config(lambda v: v["text_config"].pop("rms_norm_eps")),
        [(ALL, ("lost: config.json: no text_config.rms_norm_eps: the engine takes",))],
    ),
    "the dialect": (
        "dense", config(as_transformers_5),
        [(WITHOUT_FASTDEPLOY, ()),
         (FASTDEPLOY, ("lost: config.json: no text_config.rope_scaling.mrope_section: ",
                       "lost: config.json: no text_config.rope_theta: ",
                       "refused: config.json: dtype: torch_dtype alone is the sign of HF's"))],
    ),
    "two dtypes": (
        "dense", config(lambda v: v["text_config"].update(dtype="float32")),
        [(VLLM, ()), (FASTDEPLOY, ("refused: config.json: dtype and torch_dtype: torch_dtype",))],
    ),
    "the hub's dtype": (
        "dense",
        config(lambda v: v.update(dtype=v.pop("torch_dtype"), transformers_version="4.57.0")),
        [(FASTDEPLOY, ())],
    ),
    "no dtype": (
        "dense", config(lambda v: v.pop("torch_dtype")),
        [(VLLM, ()), (FASTDEPLOY, ("refused: config.json: no torch_dtype: torch_dtype alone is",))],
    ),
    "the architecture": (
        "dense", config(lambda v: v.update(architectures=["Qwen3ForCausalLM"])),
        [(ALL, ("refused: config.json: architectures is ['Qwen3ForCausalLM'], not [",))],
    ),
    "a token id": (
        "dense", config(lambda v: v.update(image_token_id=5)),
        [(ALL, ("refused: model and processor do not fit: image_token_id is 5 in",))],
    ),
    "limits of images": (
        "dense", config(lambda v: v.pop("max_pixels"), IMAGES),
        [(VLLM, ()), (FASTDEPLOY, (f"lost: {IMAGES}: no min_pixels, max_pixels",))],
    ),
    "a file of the optimizer": (
        "dense", lambda f: shutil.copyfile(f / "model.safetensors", f / "optimizer.safetensors"),
        [(VLLM + SGLANG, ("refused: optimizer.safetensors: the engine reads",)),
         (FASTDEPLOY + HF, ())],
    ),
    "a file of weights": ("dense", without("model.safetensors"), [(VLLM, ("refused: ",))]),
    "no end tokens": (
        "dense", without("generation_config.json"),
        [(VLLM, ("note: no generation_config.json: only the tokenizer's eos_token ends answers",))],
    ),
    **{
        name: ("dense", without(name), [(engines, (f"missing: {told}{name}",))])
        for name, told, engines in (
            ("tokenizer.json", "", ALL),
            ("tokenizer_config.json", "", ALL),
            (IMAGES, "", ALL),
            ("video_preprocessor_config.json", "", WITHOUT_FASTDEPLOY),
            ("chat_template.jinja", "a chat template: ", ALL),
        )
    },
    "settings of videos": ("dense", without("video_preprocessor_config.json"), [(FASTDEPLOY, ())]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "engine", "expected"),
    [
        (what, engine, told)
        for what, (*_, rows) in SPOILT.items()
        for engines, told in rows
        for engine in engines
    ],
)
def test_what_is_spoilt_is_told(what, engine, expected, root, tmp_path):
    kind, spoil, _ = SPOILT[what]
    shutil.copytree(root / kind, tmp_path / "folder")
    spoil(tmp_path / "folder")
    told = findings(tmp_path / "folder", engine)
    assert len(told) == len(expected), told
    for text, start in zip(told, expected, strict=True):
        assert text.startswith(start)


def test_a_policy_is_of_no_engine(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"type": "pi07_low_level"}))
    assert main(["check-folder", str(tmp_path), "--for", "vllm"]) == 1
    assert "refused: vllm has no models of this family" in capsys.readouterr().out
