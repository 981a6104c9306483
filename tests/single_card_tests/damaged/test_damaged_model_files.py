"""Models: configurations, tokenizers, weights, adapters.

Guarantees: see `checking.check`; configurations written back are the same.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    read_checkpoint_headers,
    read_header,
    write_file,
)
from paddle_vl.data.formats.reader import parse_record
from paddle_vl.families.pi07.config import PLANNER_TYPE, PI07Config, PI07PlannerConfig
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.testing import tiny_pi07_config
from tests.single_card_tests.damaged.checking import check
from tests.single_card_tests.damaged.damage import as_json, one_damaged
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor


def written_back(kind: Any, folder: Path) -> None:
    """Read a configuration, write it, and read it again."""
    config, again = kind.from_pretrained(folder), folder / "again"
    again.mkdir(exist_ok=True)
    config.save_pretrained(again)
    assert kind.from_pretrained(again) == config


def test_config_of_qwen3_vl(folder):
    """Dense and with experts, as transformers 4 and 5 write it."""
    seeds = [Qwen3VLConfig.named(f"qwen3-vl-{size}").to_dict() for size in ("2b", "30b-a3b") * 2]
    for values in seeds[2:]:
        text = values["text_config"] = dict(values["text_config"])
        text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
        if "num_experts" in text:
            text["num_local_experts"] = text.pop("num_experts")
    (folder / "config.json").write_bytes(as_json(seeds[0]))
    inputs = one_damaged(folder, "*", *seeds)
    check(folder, lambda: written_back(Qwen3VLConfig, folder), inputs, "config.json")


def test_config_of_a_policy_or_a_planner(folder):
    names, index = ["arm::joint", "arm::ee"], {"a": 0, "b": 1}
    policy = tiny_pi07_config(dataset_names=names, dataset_to_norm_index=index)
    file = folder / "config.json"
    file.write_bytes(as_json(policy.to_dict()))

    def parse() -> None:
        # A file without a readable type is read as a policy's.
        is_planner = PLANNER_TYPE.encode() in file.read_bytes()
        written_back(PI07PlannerConfig if is_planner else PI07Config, folder)

    check(folder, parse, one_damaged(folder, "*", PI07PlannerConfig().to_dict()), file.name)


def test_generation_config(folder):
    seeds = [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "pad_token_id": 5,
         "repetition_penalty": 1.0, "eos_token_id": [1, 2], "bos_token_id": 5,
         "transformers_version": "4.57.0"},
        {"max_new_tokens": 16, "min_new_tokens": 1, "eos_token_id": 3, "num_beams": 1, "seed": 0},
    ]  # fmt: skip
    file = folder / "generation_config.json"
    file.write_bytes(as_json(seeds[0]))

    def parse() -> None:
        GenerationConfig.from_pretrained(folder).check_vocabulary(100)
        written_back(GenerationConfig, folder)

    # That a number is beyond the vocabulary is said without the file.
    check(folder, parse, one_damaged(folder, "*", seeds[1]), file.name, "vocabulary")


def test_processor(folder):
    """Its files, used on a small image and a small video."""
    tiny_processor().save_pretrained(folder)
    one, two = (folder / f"{name}processor_config.json" for name in ("pre", "video_pre"))
    # transformers 5 has both in one file.
    nested = {"image_processor": json.loads(one.read_text())}
    nested["video_processor"] = json.loads(two.read_text())
    (folder / "processor_config.json").write_bytes(as_json(nested))
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    user = {"role": "user", "content": "<image><video>What?"}
    record = {"messages": [user, {"role": "assistant", "content": "A cat."}]}
    conversation = parse_record(record | {"images": [image], "videos": [np.stack([image] * 4)]})
    # An image that does not fit a processor is reported with the sample's place, not with the file.
    check(
        folder,
        lambda: Qwen3VLProcessor.from_pretrained(folder).encode_sample(conversation),
        one_damaged(folder, "*_config.json"),
    )


TEXTS = ["What is this?", "", "<|im_start|>user\n", "😀 hello\nhello", "\0\u202e" * 20]
VOCAB = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "##b": 4}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
PLAIN: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [{"id": 5, "content": "<x>", "special": True, **FLAGS}],
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
}  # fmt: skip
MERGED = {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]], "unk_token": "[UNK]"}
SPLIT = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
# Files with other models and steps than those of Qwen.
TOKENIZERS = [
    PLAIN | {"model": MERGED, "normalizer": {"type": "NFC"}, "pre_tokenizer": SPLIT},
    PLAIN | {"model": MERGED | {"merges": ["a b"]}},
    PLAIN | {"decoder": {"type": "ByteLevel"},
             "model": {"type": "WordPiece", "vocab": VOCAB, "unk_token": "[UNK]",
                       "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}},
    PLAIN | {"decoder": {"type": "Metaspace", "replacement": "▁"},
             "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}},
    PLAIN | {"model": {"type": "WordLevel", "vocab": VOCAB, "unk_token": "[UNK]"}},
]  # fmt: skip


def test_tokenizer(folder):
    tiny_processor().tokenizer.save(folder)

    def parse() -> None:
        tokenizer = TextTokenizer.from_file(folder)
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))
        _ = tokenizer.highest_id, tokenizer.special_tokens, tokenizer.to_json()

    check(folder, parse, one_damaged(folder, "tokenizer.json", *TOKENIZERS), "tokenizer.json")


def test_tokenizers_of_a_policy(folder):
    """Of prompts and of actions, with their settings."""
    (folder / "prompts").mkdir()
    chunks = np.random.default_rng(0).uniform(-1, 1, (8, 4, 2))
    fitted = ActionTokenizer.fit(chunks, vocab_size=200, time_horizon=4, action_dim=2)
    fitted.save_pretrained(folder / "actions")
    PromptTokenizer.fit(["stack them", "Task: , State: "], 300).save_pretrained(folder / "prompts")

    def parse() -> None:
        PromptTokenizer.from_pretrained(folder / "prompts").padded(TEXTS, 8, True)
        tokenizer = ActionTokenizer.from_pretrained(folder / "actions")
        tokenizer(chunks[:2])

    whole = one_damaged(folder, "tokenizer.json", *TOKENIZERS)
    check(folder, parse, st.one_of(whole, one_damaged(folder, "*_config.json")), str(folder))


def write_tensors(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> bytes:
    """Write a safetensors file of ones; return its bytes."""
    kind = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64}[dtype]
    write_file(file, [
        TensorToWrite(name, shape, dtype, lambda shape=shape: np.ones(shape, kind))
        for name, shape in shapes.items()
    ])  # fmt: skip
    return file.read_bytes()


def test_tensors(folder):
    file = folder / "model.safetensors"
    shapes = {"a.weight": (2, 3), "a.bias": (3,), "b": (), "none": (0, 4)}
    seeds = [write_tensors(file, shapes, dtype) for dtype in ("F32", "BF16", "I64")]

    def parse() -> None:
        for tensor in read_header(file).values():
            tensor.read()
            if len(tensor.shape) == 2:
                tensor.swapped().read()

    check(folder, parse, one_damaged(folder, "*", *seeds), file.name)


def test_index_of_two_shards(folder):
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write_tensors(folder / names[0], {"a": (2, 3), "b": (2,)})
    write_tensors(folder / names[1], {"c": (4,)})
    weight_map = {"a": names[0], "b": names[0], "c": names[1]}
    index = {"weight_map": weight_map, "metadata": {"total_size": 48}}
    (folder / "model.safetensors.index.json").write_bytes(as_json(index))

    def parse() -> None:
        for tensor in read_checkpoint_headers(folder).values():
            tensor.read()

    check(folder, parse, one_damaged(folder), str(folder))


LORA: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": 2,
    "lora_alpha": 4, "lora_dropout": 0.0, "use_rslora": False, "target_modules": ["q", "v"],
    "modules_to_save": None, "bias": "none", "fan_in_fan_out": False, "use_dora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "inference_mode": True,
}  # fmt: skip


def test_adapter_that_is_merged_with_its_base_model(folder):
    (folder / "base").mkdir()
    write_tensors(folder / "base/model.safetensors", {"q.weight": (4, 3), "v.weight": (5, 3)})
    base, name = read_checkpoint_headers(folder / "base"), "base_model.model."
    write_tensors(folder / "adapter_model.safetensors", {
        f"{name}q.lora_A.weight": (2, 3), f"{name}q.lora_B.weight": (4, 2),
        f"{name}v.lora_A.weight": (2, 3), f"{name}v.lora_B.weight": (5, 2),
    })  # fmt: skip
    (folder / "adapter_config.json").write_bytes(as_json(LORA))

    def parse() -> None:
        for tensor in StoredAdapter.read(folder).merged(base):
            tensor.produce()

    check(folder, parse, one_damaged(folder, "adapter_*"), "adapter_", str(folder))
