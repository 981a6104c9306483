"""Tokenizers of texts and action chunks.

Guarantees: texts begin with the file's or the configured token, and are cut and padded on the
right; the action tokenizer computes as FAST's published code, survives saving and loading, and
decodes chunks; both refuse invalid files.
"""

import json
import sys

import numpy as np
import pytest
from scipy.fft import dct
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from paddle_vl.families.policy.tokenizers import ActionTokenizer, PromptTokenizer, padded_tokens


def word_tokenizer(begins_texts: bool) -> Tokenizer:
    words = {"<pad>": 0, "<bos>": 2, "Task": 3, ":": 4, "go": 5, ",": 6, "<unk>": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if begins_texts:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(1)
    return tokenizer


@pytest.mark.parametrize("begins_texts", [True, False])
def test_texts_begin_with_bos_and_fill_up_on_the_right(tmp_path, begins_texts):
    word_tokenizer(begins_texts).save(str(tmp_path / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": {"content": "<bos>"}, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = PromptTokenizer.from_pretrained(tmp_path)
    ids, mask = tokenizer.padded(["Task: go, ", "", "go go go go go go"], 5, True)
    assert ids.tolist() == [[2, 3, 4, 5, 6], [2, 0, 0, 0, 0], [2, 5, 5, 5, 5]]
    assert mask.tolist() == [[True] * 5, [True] + [False] * 4, [True] * 5]
    ids, mask = tokenizer.padded(["go", ""], 2, False)
    assert ids.tolist() == [[5, 0], [0, 0]]
    assert mask.tolist() == [[True, False], [False, False]]
    assert tokenizer.encode("Task: ") == [3, 4]
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save_pretrained(again)
    assert PromptTokenizer.from_pretrained(again).encode("go", True) == [2, 5]


def test_prompt_tokenizer_refuses_what_is_none(tmp_path):
    with pytest.raises(RuntimeError, match="no tokenizer file.*gemma-3-4b-pt"):
        PromptTokenizer.from_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    for text in ("{", "[1]", "{}"):
        file.write_text(text)
        with pytest.raises(
            RuntimeError, match=r"tokenizer\.json is not (a tokenizer file|valid JSON)"
        ):
            PromptTokenizer.from_pretrained(tmp_path)


def chunks(count: int = 40) -> np.ndarray:
    random = np.random.default_rng(3)
    steps = np.linspace(0, 3, 8)[None, :, None]
    waves = np.sin(
        steps * random.uniform(0.5, 2, (count, 1, 3)) + random.uniform(0, 6, (count, 1, 3))
    )
    return waves.astype(np.float32)


def published_fit(
    data: np.ndarray, scale: float, vocab_size: int
) -> tuple[ByteLevelBPETokenizer, int]:
    """FAST's `fit`, written from its description."""
    rounded = [np.around(dct(a, axis=0, norm="ortho").flatten() * scale) for a in data]
    least, most = int(np.concatenate(rounded).min()), int(np.concatenate(rounded).max())
    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=[],
        initial_alphabet=[chr(i) for i in range(most - least + 1)], max_token_length=10000,
    )  # fmt: skip
    texts = ("".join(map(chr, (r - least).astype(int))) for r in rounded)
    bpe._tokenizer.train_from_iterator(texts, trainer=trainer)
    return bpe, least


def test_fit_and_encode_are_those_of_fast():
    data = chunks()
    tokenizer = ActionTokenizer.fit(data, scale=10, vocab_size=300)
    bpe, least = published_fit(data, 10, 300)
    assert tokenizer.min_token == least
    coefficients = np.around(dct(data, axis=1, norm="ortho") * 10)
    texts = ["".join(map(chr, (c.flatten() - least).astype(int))) for c in coefficients]
    assert tokenizer(data) == [bpe.encode(text).ids for text in texts]
    # Merges give fewer tokens than coefficients.
    assert max(len(ids) for ids in tokenizer(data)) < data[0].size


def test_chunks_come_back_from_their_tokens_and_files(tmp_path):
    data = chunks()
    tokenizer = ActionTokenizer.fit(data, scale=20, vocab_size=400, time_horizon=8, action_dim=3)
    tokenizer.save_pretrained(tmp_path / "fast")
    again = ActionTokenizer.from_pretrained(tmp_path / "fast")
    assert again(data) == tokenizer(data)
    assert (again.scale, again.vocab_size, again.min_token) == (20, 400, tokenizer.min_token)
    back = again.decode(again(data))
    assert back.shape == data.shape
    rounding = 0.5 / 20
    assert np.abs(dct(back - data, axis=1, norm="ortho")).max() <= rounding + 1e-6


def test_coefficients_below_the_least_become_it():
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    assert tokenizer(chunks()[0] * 100 - 100)[0]


def test_tokens_of_no_whole_chunk_are_zeros_and_warned_of(caplog):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    assert not tokenizer.decode([[1]], 8, 3).any()
    assert "a chunk has 8 x 3" in caplog.text
    with pytest.raises(ValueError, match=r"time_horizon 8, action_dim None"):
        tokenizer.decode([[1]], 8)


def test_action_tokenizer_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="no action chunks"):
        ActionTokenizer.fit([])
    with pytest.raises(ValueError, match="vocab_size 5 cannot hold"):
        ActionTokenizer.fit(chunks(), vocab_size=5)
    with pytest.raises(RuntimeError, match=r"there is no .*processor_config\.json"):
        ActionTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\[8\]"):
        ActionTokenizer.fit(chunks(), vocab_size=300)(np.zeros(8))


@pytest.mark.parametrize("value", [1e9, 55_296 / np.sqrt(8) / 10, np.nan, np.inf])
def test_actions_whose_coefficients_have_no_character_are_refused(value):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    tokenizer.min_token = 0
    with pytest.raises(ValueError, match="has no character: normalize the actions, or lower the "):
        tokenizer(np.full((8, 3), value))


def test_without_scipy_its_extra_is_named(monkeypatch):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    monkeypatch.setitem(sys.modules, "scipy", None)
    for use in (tokenizer, ActionTokenizer.fit, lambda data: tokenizer.decode([[1]], 8, 3)):
        with pytest.raises(RuntimeError, match="install 'scipy.*extra `pi07`"):
            use(chunks())


def test_files_of_newer_libraries_are_found(tmp_path):
    tokenizer = ActionTokenizer.fit(chunks(), vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "bpe_tokenizer").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "bpe_tokenizer" / "tokenizer.json")
    assert ActionTokenizer.from_pretrained(tmp_path)(chunks()) == tokenizer(chunks())


def test_tokens_are_cut_with_a_warning_and_filled_with_zeros(caplog):
    ids, mask = padded_tokens([[5, 6, 7], [8]], 2)
    assert ids.tolist() == [[5, 6], [8, 0]]
    assert mask.tolist() == [[True, True], [True, False]]
    assert "3 action tokens" in caplog.text
