"""Tokenizers of texts and of action chunks. A ValueError says what they cannot take.

Shapes: B batch, C steps of a chunk, A action dims, L tokens.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paddle_vl.files.stored_settings import Number, checked
from paddle_vl.files.text_file import read_json_object, shown, write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

logger = logging.getLogger(__name__)
_PROMPT_SETTINGS, _ACTION_SETTINGS = "tokenizer_config.json", "processor_config.json"
_PAD_TOKEN = "<pad>"
_SPECIAL_TOKENS = (_PAD_TOKEN, "<eos>", "<bos>", "<unk>")
# Where newer transformers keep the byte-pair file of action tokens.
_SUBFOLDER = "bpe_tokenizer"
# With fewer merges than this, an action tokenizer hardly compresses.
_FEW_MERGES = 100
# Code points that are not characters.
_SURROGATES = 0xD800, 0xDFFF


class PromptTokenizer:
    """The backbone's tokenizer: Gemma 3's for published weights.

    Attributes:
        bos_id: put before texts that get special tokens; None if `tokenizer.json` does that.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None = None, pad_id: int = 0):
        self._tokenizer, self.bos_id, self.pad_id = tokenizer, bos_id, pad_id

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "PromptTokenizer":
        """Read a `tokenizer.json`, given as a file or a folder.

        BOS and padding tokens come from the `tokenizer_config.json` beside it, if there is one.

        Raises:
            RuntimeError: there is no tokenizer, or it cannot be read.
        """
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise RuntimeError(
                f"there is no tokenizer file {file}: give a folder with the {TOKENIZER_FILE} of "
                "the backbone (of google/gemma-3-4b-pt for published weights)"
            )
        tokenizer, beside = read_tokenizer(file), file.with_name(_PROMPT_SETTINGS)
        settings = read_json_object(beside, "a tokenizer's settings") if beside.is_file() else {}
        pad, bos = (_token_text(settings, name, beside) for name in ("pad_token", "bos_token"))
        pad_id = tokenizer.token_to_id(pad or _PAD_TOKEN)
        bos_id = None
        if settings.get("add_bos_token"):
            bos_id = tokenizer.token_to_id(bos or "<bos>")
        return cls(tokenizer, bos_id, pad_id or 0)

    @classmethod
    def fit(cls, texts: Iterable[str], vocab_size: int) -> "PromptTokenizer":
        """Train a byte-level tokenizer, for a policy with weights of its own.

        Its first tokens are Gemma's special tokens, in Gemma's order.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < (least := len(alphabet) + len(_SPECIAL_TOKENS)):
            raise ValueError(f"vocab_size is {vocab_size}; at least {least} is needed")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            special_tokens=list(_SPECIAL_TOKENS),
            initial_alphabet=alphabet,
        )
        tokenizer.train_from_iterator(texts, trainer=trainer)
        pad_id = tokenizer.token_to_id(_PAD_TOKEN)
        assert pad_id is not None, "it is one of the special tokens"
        return cls(tokenizer, tokenizer.token_to_id("<bos>"), pad_id)

    def save_pretrained(self, path: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into a folder."""
        write_text(Path(path) / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self._tokenizer.id_to_token(self.pad_id),
        }
        if self.bos_id is not None:
            bos = self._tokenizer.id_to_token(self.bos_id)
            settings |= {"add_bos_token": True, "bos_token": bos}
        text = json.dumps(settings, indent=2) + "\n"
        write_text(Path(path) / _PROMPT_SETTINGS, text)

    @property
    def highest_id(self) -> int:
        return highest_id(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, neither padded nor cut."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens)

    def token_id(self, token: str) -> int:
        """Id of a token by its name."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}: give the backbone's own")
        return found

    def padded(
        self, texts: Sequence[str], length: int, add_special_tokens: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """`padded_rows` of texts."""
        return padded_rows(
            [self.encode(text, add_special_tokens) for text in texts], length, self.pad_id
        )


def padded_rows(
    rows: Sequence[Sequence[int]], length: int, pad_id: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, cut or padded on the right to one length.

    Returns:
        Ids `[B, length]` int64 and a mask `[B, length]` bool, True for real tokens.
    """
    ids_BL = np.full((len(rows), length), pad_id, dtype=np.int64)
    mask_BL = np.zeros((len(rows), length), dtype=bool)
    for row, ids in enumerate(rows):
        kept = list(ids)[:length]
        ids_BL[row, : len(kept)] = kept
        mask_BL[row, : len(kept)] = True
    return ids_BL, mask_BL


def _token_text(settings: Mapping[str, Any], name: str, file: Path) -> str | None:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not (isinstance(text, str) and text.isprintable()):
        raise RuntimeError(f"{file}: {name} is {shown(token)}; the name of a token is needed")
    return text


@checked
class ActionTokenizer:
    """Encodes normalized action chunks as token ids: a cosine transform over time, a character for
    each rounded coefficient, byte-pair merging.

    Source: FAST (Pertsch et al., 2025). Reads and writes the files of `physical-intelligence/fast`:
    `processor_config.json` and `tokenizer.json`.
    """

    tokenizer: Any
    # Beyond, a coefficient of normalized actions has no character.
    scale: Annotated[Number, Field(gt=0, le=10_000)] = 10
    """factor of the coefficients before rounding"""
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)] = 1024
    """entries that a model needs, whether or not the merges use them all"""
    min_token: Annotated[int, Field(ge=-(1 << 15), le=1 << 20)] = 0
    """least coefficient with a character of its own; smaller ones share it"""
    time_horizon: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """number of steps of a chunk, for decoders"""
    action_dim: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """number of action values, for decoders"""

    def __call__(self, actions_BCA: np.ndarray) -> list[list[int]]:
        """Token ids of each chunk `[C, A]`; a 2-d array is one chunk."""
        actions = np.asarray(actions_BCA, dtype=np.float32)
        actions = actions[None] if actions.ndim == 2 else actions
        if actions.ndim != 3:
            raise ValueError(
                f"actions have shape {list(actions.shape)}; [batch, steps, dims] is needed"
            )
        coefficients = np.around(_dct()(actions, axis=1, norm="ortho") * self.scale)
        return [
            self.tokenizer.encode(_characters(chunk, self.min_token)).ids for chunk in coefficients
        ]

    @classmethod
    def fit(
        cls,
        chunks: Iterable[np.ndarray],
        scale: float = 10,
        vocab_size: int = 1024,
        time_horizon: int | None = None,
        action_dim: int | None = None,
    ) -> "ActionTokenizer":
        """Train a tokenizer on action chunks.

        Args:
            chunks: normalized actions, each `[C, A]`.
        """
        chunks = [np.asarray(chunk) for chunk in chunks]
        if not chunks:
            raise ValueError("there are no action chunks to fit a tokenizer to")
        dct = _dct()
        rounded = [np.around(dct(chunk, axis=0, norm="ortho") * scale) for chunk in chunks]
        least = int(min(chunk.min() for chunk in rounded))
        most = int(max(chunk.max() for chunk in rounded))
        if most - least > vocab_size:
            raise ValueError(
                f"the coefficients take values from {least} to {most}, which vocab_size "
                f"{vocab_size} cannot hold: raise it, lower scale {scale}, or normalize the actions"
            )
        if most - least + _FEW_MERGES > vocab_size:
            logger.warning(
                "coefficients from %d to %d leave few of %d entries for merges; consider more",
                least,
                most,
                vocab_size,
            )
        tokenizer = Tokenizer(
            models.BPE(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[],
            initial_alphabet=[chr(i) for i in range(most - least + 1)],
            max_token_length=10000,
        )
        texts = (_characters(chunk, least) for chunk in rounded)
        tokenizer.train_from_iterator(texts, trainer=trainer)
        return cls(tokenizer, scale, vocab_size, least, time_horizon, action_dim)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ActionTokenizer":
        """Read a tokenizer's folder.

        Raises:
            RuntimeError: files are missing or damaged.
        """
        folder = Path(path)
        file = folder / TOKENIZER_FILE
        file = file if file.is_file() else folder / _SUBFOLDER / TOKENIZER_FILE
        for needed in (folder / _ACTION_SETTINGS, file):
            if not needed.is_file():
                raise RuntimeError(
                    f"{folder} is not the folder of an action tokenizer: there is no {needed}; "
                    "fetch physical-intelligence/fast, or fit one with ActionTokenizer.fit"
                )
        values = read_json_object(folder / _ACTION_SETTINGS, "an action tokenizer's settings")
        tokenizer = read_tokenizer(file)
        names = {each.name for each in fields(cls)} - {"tokenizer"}
        try:
            made = cls(tokenizer, **{name: values[name] for name in names & values.keys()})
        except ValueError as error:
            raise ValueError(f"{folder / _ACTION_SETTINGS}: {error}") from error
        if (highest := highest_id(tokenizer)) >= made.vocab_size:
            raise ValueError(
                f"{folder / _ACTION_SETTINGS}: vocab_size is {made.vocab_size}, but {file} has the "
                f"id {highest}: they are of two tokenizers"
            )
        return made

    def save_pretrained(self, path: str | Path) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TOKENIZER_FILE, self.tokenizer.to_str(pretty=True))
        values = {"processor_class": "UniversalActionProcessor"}
        values |= {each.name: getattr(self, each.name) for each in fields(self)}
        del values["tokenizer"]
        write_text(folder / _ACTION_SETTINGS, json.dumps(values, indent=2) + "\n")
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
        write_text(folder / _PROMPT_SETTINGS, text)


def padded_tokens(tokens: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """`padded_rows` of action tokens; warns of those that are cut."""
    for ids in tokens:
        if len(ids) > length:
            logger.warning(
                "a chunk has %d action tokens, discrete_action_max_length is %d: the rest is cut",
                len(ids),
                length,
            )
    return padded_rows(tokens, length)


def _dct() -> Callable:
    # Imported here: acting needs no SciPy.
    try:
        from scipy import fft
    except ImportError as error:
        raise RuntimeError(
            "discrete actions need SciPy, which is not installed; install it with: pip install "
            "'scipy>=1.11' (the extra `pi07` of this package)"
        ) from error
    return fft.dct


def _characters(coefficients: np.ndarray, min_token: int) -> str:
    """One character per coefficient; coefficients below `min_token` get its character."""
    codes = np.maximum(coefficients.flatten() - min_token, 0)
    has_character = (codes < _SURROGATES[0]) | (
        (codes > _SURROGATES[1]) & (codes <= sys.maxunicode)
    )
    if not has_character.all():
        raise ValueError(
            f"a coefficient of the actions is {coefficients.flatten()[~has_character][0]:g}, which "
            "has no character: normalize the actions, or lower the action tokenizer's scale"
        )
    return "".join(map(chr, codes.astype(int)))
