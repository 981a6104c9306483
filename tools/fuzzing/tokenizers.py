"""tokenizer.json of texts, prompts and actions; each encodes and decodes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzzing.mutations import json_bytes
from fuzzing.parser import Parser
from fuzzing.samples import small_processor
from paddle_vl.families.pi07.inputs.discrete_actions import ActionTokenizer
from paddle_vl.families.pi07.inputs.prompt import PromptTokenizer
from paddle_vl.families.qwen3_vl.inputs.tokenizer import TextTokenizer

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
    return json_bytes(_seeds(folder), 3).map(lambda content: {_FILE: content})


def text_tokenizer(folder: Path) -> Parser:
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
    inputs = st.one_of(
        _inputs(folder), configs.map(lambda content: {"tokenizer_config.json": content})
    )
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

    configs = json_bytes([settings]).map(lambda content: {"processor_config.json": content})
    return Parser(
        st.one_of(_inputs(folder), configs, configs), parse, (_FILE, "processor_config.json")
    )
