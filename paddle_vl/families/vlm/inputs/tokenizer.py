"""Tokenizer of Qwen3-VL, and the names of its control tokens.

It reads HF's `tokenizer.json` with the `tokenizers` library; a small one can be trained. Special
tokens are found by name, never by position.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from paddle_vl.config.families import model_values
from paddle_vl.files.text_file import write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

# Pre-tokenization of Qwen2 and later: contractions, words with one leading mark, single digits,
# punctuation, line breaks, spaces.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of Qwen3.5, where combining marks belong to letters.
QWEN3_5_SPLIT = QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)


class TextTokenizer:
    """A tokenizer, its name for messages, and HF's class of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str = "the tokenizer",
        hf_class: str = "Qwen2Tokenizer",
    ):
        # A file may switch on padding or truncation; text must not be cut silently.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.name, self.hf_class = name, hf_class

    @classmethod
    def from_file(cls, path: str | os.PathLike, model_type: str | None = None) -> "TextTokenizer":
        """Read a `tokenizer.json`, given as a file or by its directory.

        Args:
            model_type: of the model; None for that of the directory's config.json. Qwen3.5 splits
                text in its own way whatever the file says, as HF's AutoTokenizer.

        Raises:
            RuntimeError: there is no such file, or it is not a tokenizer.
        """
        path = Path(path)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        if not path.is_file():
            raise RuntimeError(
                f"there is no tokenizer file {path}: a directory with HF's {TOKENIZER_FILE} is "
                "needed; copy it from the checkpoint, or train one with train_bpe"
            )
        tokenizer = read_tokenizer(path)
        model_type = model_type or str(model_values(path.parent).get("model_type"))
        if _is_qwen3_5(model_type):
            tokenizer.pre_tokenizer = _splitting(model_type)
        return cls(tokenizer, str(path), _hf_class(model_type))

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Names of special tokens in it become their ids; no token is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens by default."""
        return self._tokenizer.decode(
            [int(token_id) for token_id in ids], skip_special_tokens=skip_special_tokens
        )

    def token_id(self, token: str) -> int:
        """Id of one token by its name.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{self.name} has no token {token!r}, which the model's prompts need; "
                "use the checkpoint's own tokenizer, or pass the token to train_bpe"
            )
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def highest_id(self) -> int:
        """The largest id of any token; it exceeds `vocab_size - 1` if ids have gaps."""
        return highest_id(self._tokenizer)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Id to name of every token that the file marks as special, in the order of ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: str(token.content) for i, token in sorted(added.items()) if token.special}

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._tokenizer

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._tokenizer.to_str()

    def save(self, directory: str | os.PathLike) -> None:
        """Write `tokenizer.json`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True))


def _is_qwen3_5(model_type: str) -> bool:
    return model_type.startswith(("qwen3_5", "qwen4_exp", "qwen3_8_flash_next"))


def _hf_class(model_type: str) -> str:
    return "Qwen3_5Tokenizer" if _is_qwen3_5(model_type) else "Qwen2Tokenizer"


def _splitting(model_type: str) -> pre_tokenizers.PreTokenizer:
    """Qwen2's split, or that of Qwen3.5, then bytes."""
    pattern = Regex(QWEN3_5_SPLIT if _is_qwen3_5(model_type) else QWEN2_SPLIT)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    model_type: str = "qwen3_vl",
) -> TextTokenizer:
    """Train a byte-level BPE tokenizer in the style of Qwen2 or Qwen3.5; deterministic.

    NFC normalization, the model's split, then bytes: every text can be encoded. Special tokens get
    the last ids.

    Args:
        texts: training texts.
        vocab_size: upper limit of ids, special tokens included; texts with few merges give fewer.
        special_tokens: names, in the order of their ids.
        model_type: of the model that the tokenizer is for.

    Raises:
        ValueError: the vocabulary cannot hold 256 bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special_tokens):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and "
            f"{len(special_tokens)} special tokens need {len(alphabet) + len(special_tokens)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitting(model_type)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    return TextTokenizer(tokenizer, hf_class=_hf_class(model_type))
