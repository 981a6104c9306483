"""Model configurations and tokenizers: HF's files, and pi07's."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from fuzzing.mutations import in_file, json_bytes, of_json
from fuzzing.parser import Parser, written_back
from fuzzing.samples import small_processor
from paddle_vl.families.pi07.config import PLANNER_TYPE, PI07Config, PI07PlannerConfig
from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer
from paddle_vl.families.vlm.inputs.conversation import parse_record
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.generation.config import GenerationConfig

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def hf_config(folder: Path) -> Parser:
    """config.json of a Qwen3-VL, dense and with experts, in both dialects; read and written
    back."""
    from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig

    names = ("qwen3-vl-2b", "qwen3-vl-8b", "qwen3-vl-30b-a3b")
    sizes = [Qwen3VLConfig.named(name).to_dict() for name in names]
    seeds = sizes + [_as_transformers_5(values) for values in sizes]
    parse = lambda: written_back(Qwen3VLConfig, folder)  # noqa: E731
    return of_json(folder / "config.json", seeds, parse, most=2)


def _as_transformers_5(values: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(values)
    text = values["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
    return values


def generation_config(folder: Path) -> Parser:
    """generation_config.json."""
    seeds = [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "pad_token_id": 5,
         "repetition_penalty": 1.0, "eos_token_id": [1, 2], "bos_token_id": 5,
         "transformers_version": "4.57.0"},
        {"max_new_tokens": 16, "min_new_tokens": 1, "eos_token_id": 3, "num_beams": 1, "seed": 0},
    ]  # fmt: skip

    def parse() -> None:
        config = GenerationConfig.from_pretrained(folder)
        try:
            config.check_vocabulary(100)
        except ValueError:
            return
        written_back(GenerationConfig, folder)

    return of_json(folder / "generation_config.json", seeds, parse, most=2)


def preprocessor(folder: Path) -> Parser:
    """Files of a processor, used on a small image and a small video."""
    small_processor().save_pretrained(folder)
    names = ["preprocessor_config.json", "video_preprocessor_config.json"]
    values = {name: yaml.safe_load((folder / name).read_text()) for name in names}
    plain = {
        "size": {"shortest_edge": 64, "longest_edge": 256}, "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "resample": 3, "rescale_factor": 1 / 255, "image_processor_type": "Qwen2VLImageProcessor",
    }  # fmt: skip
    seeds = {
        names[0]: [values[names[0]], plain],
        names[1]: [values[names[1]]],
        "tokenizer_config.json": [{"chat_template": "a", "bos_token": None}],
        "chat_template.json": [{"chat_template": "a"}],
    }
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    user = {"role": "user", "content": "<image><video>What?"}
    record = {"messages": [user, {"role": "assistant", "content": "A cat."}]}
    conversation = parse_record(record | {"images": [image], "videos": [np.stack([image] * 4)]})

    def parse() -> None:
        processor = Qwen3VLProcessor.from_pretrained(folder)
        processor.encode_sample(conversation)

    # The section of transformers 5's nested file is the same.
    nested = {"image_processor": plain, "video_processor": values[names[1]]}
    inputs = [in_file(name, json_bytes(known, 2)) for name, known in seeds.items()]
    inputs += [
        in_file("processor_config.json", json_bytes([nested], 2)).map(
            lambda files: files | {names[1]: b"{"} if files else files
        ),
        inputs[0],
        inputs[1],
    ]
    # An image that does not fit a processor is reported with the sample's place, not with the file.
    return Parser(st.one_of(inputs), parse)


def pi07_config(folder: Path) -> Parser:
    """config.json of a policy or a planner; read and written back."""
    run = yaml.safe_load((_CONFIGS / "pi07" / "tiny_cpu.yaml").read_text())
    policy = run["model"]["config"]
    policy["dataset_names"] = ["arm::joint", "arm::ee"]
    policy["dataset_to_norm_index"] = {"a": 0, "b": 1}
    whole = PI07Config.from_dict(policy).to_dict()
    planner = PI07PlannerConfig().to_dict()
    file = folder / "config.json"

    def parse() -> None:
        # A file without a readable type is read as a policy's.
        is_planner = PLANNER_TYPE.encode() in file.read_bytes()
        written_back(PI07PlannerConfig if is_planner else PI07Config, folder)

    return of_json(file, [policy, whole, planner], parse, most=2)


_FILE = "tokenizer.json"
_TEXTS = ["What is this?", "", "<|im_start|>user\n", "😀 hello\nhello", "\0\u202e" * 20]


def _seeds(folder: Path) -> list[Any]:
    """The file itself, and shorter ones with other models and steps."""
    saved = json.loads((folder / _FILE).read_text())
    vocab = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "##b": 4}
    added = [{
        "id": 5, "content": "<x>", "special": True, "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False,
    }]  # fmt: skip
    plain = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None,
    }  # fmt: skip
    merged = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": "[UNK]"}
    pieces = {"type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]",
              "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}  # fmt: skip
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}
    lower = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    split = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
    template = {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {},
    }  # fmt: skip
    return [
        saved,
        plain | {"model": merged, "normalizer": lower, "pre_tokenizer": split},
        plain | {"model": merged | {"merges": ["a b"]}, "post_processor": template},
        plain | {"model": pieces, "decoder": {"type": "ByteLevel"}},
        plain | {"model": unigram, "decoder": {"type": "Metaspace", "replacement": "▁"}},
        plain | {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
                 "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0,
                                "direction": "Right"}},
    ]  # fmt: skip


def _inputs(folder: Path) -> st.SearchStrategy:
    return in_file(_FILE, json_bytes(_seeds(folder), 3))


def tokenizer(folder: Path) -> Parser:
    """The tokenizer of a Qwen3-VL."""
    small_processor().tokenizer.save(folder)

    def parse() -> None:
        tokenizer = TextTokenizer.from_file(folder)
        for text in _TEXTS:
            tokenizer.decode(tokenizer.encode(text))
        _ = tokenizer.highest_id, tokenizer.special_tokens, tokenizer.to_json()

    return Parser(_inputs(folder), parse, (_FILE,))


def prompt_tokenizer(folder: Path) -> Parser:
    """The tokenizer of a policy with its settings."""
    PromptTokenizer.fit(["stack them", "Task: , State: "], 300).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def parse() -> None:
        tokenizer = PromptTokenizer.from_pretrained(folder)
        tokenizer.padded(_TEXTS, 8, True)

    configs = json_bytes(
        [settings, {"pad_token": {"content": "<pad>"}, "added_tokens_decoder": {}}]
    )
    inputs = st.one_of(_inputs(folder), in_file("tokenizer_config.json", configs))
    return Parser(inputs, parse, (_FILE, "tokenizer_config.json"))


def action_tokenizer(folder: Path) -> Parser:
    """The tokenizer of actions with its settings."""
    chunks = np.random.default_rng(0).uniform(-1, 1, (8, 4, 2))
    ActionTokenizer.fit(chunks, vocab_size=200, time_horizon=4, action_dim=2).save_pretrained(
        folder
    )
    settings = json.loads((folder / "processor_config.json").read_text())

    def parse() -> None:
        tokenizer = ActionTokenizer.from_pretrained(folder)
        tokenizer.decode(tokenizer(chunks[:2]), 4, 2)

    configs = in_file("processor_config.json", json_bytes([settings]))
    return Parser(
        st.one_of(_inputs(folder), configs, configs), parse, (_FILE, "processor_config.json")
    )
