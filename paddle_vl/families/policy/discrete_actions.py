"""Action chunks as discrete tokens: cosine transform over time, rounding, byte-pair merging.

Shapes: B batch, C steps of a chunk, A action dims.

Source: FAST (Pertsch et al., 2025). Reads and writes the files of `physical-intelligence/fast`:
`processor_config.json` and `tokenizer.json`.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paddle_vl.families.policy.prompt import padded_rows
from paddle_vl.files.checked_values import Number, checked
from paddle_vl.files.text_file import read_json_object, write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

logger = logging.getLogger(__name__)
CONFIG_FILE = "processor_config.json"
# Where newer transformers keep the byte-pair file.
_SUBFOLDER = "bpe_tokenizer"
# With fewer merges than this, the tokenizer hardly compresses.
_FEW_MERGES = 100
# Code points that are not characters.
_SURROGATES = 0xD800, 0xDFFF


@checked
class _Settings:
    """Content of `processor_config.json`, see `ActionTokenizer`."""

    # Beyond, a coefficient of normalized actions has no character.
    scale: Annotated[Number, Field(gt=0, le=10_000)] = 10
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)] = 1024
    min_token: Annotated[int, Field(ge=-(1 << 15), le=1 << 20)] = 0
    time_horizon: Annotated[int, Field(ge=1, le=10_000)] | None = None
    action_dim: Annotated[int, Field(ge=1, le=1 << 16)] | None = None


class ActionTokenizer:
    """Encodes normalized action chunks as token ids, and back.

    Attributes:
        scale: factor of the coefficients before rounding.
        vocab_size: entries that a model needs, whether or not the merges use them all.
        min_token: least coefficient with a character of its own; smaller ones share it.
        time_horizon, action_dim: default chunk size of `decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        scale: float = 10,
        vocab_size: int = 1024,
        min_token: int = 0,
        time_horizon: int | None = None,
        action_dim: int | None = None,
    ):
        self._tokenizer = tokenizer
        self.scale, self.vocab_size, self.min_token = scale, vocab_size, min_token
        self.time_horizon, self.action_dim = time_horizon, action_dim

    def __call__(self, actions_BCA: np.ndarray) -> list[list[int]]:
        """Token ids of each chunk `[C, A]`; a 2-d array is one chunk.

        Raises:
            ValueError: an array with another number of dims.
        """
        actions = np.asarray(actions_BCA, dtype=np.float32)
        actions = actions[None] if actions.ndim == 2 else actions
        if actions.ndim != 3:
            raise ValueError(
                f"actions have shape {list(actions.shape)}; [batch, steps, dims] is needed"
            )
        coefficients = np.around(_transform("dct")(actions, axis=1, norm="ortho") * self.scale)
        return [
            self._tokenizer.encode(_characters(chunk, self.min_token)).ids for chunk in coefficients
        ]

    def decode(
        self,
        tokens: Sequence[Sequence[int]],
        time_horizon: int | None = None,
        action_dim: int | None = None,
    ) -> np.ndarray:
        """Chunks `[B, time_horizon, action_dim]` float64 from token ids.

        Tokens that do not decode to a whole chunk give zeros and a warning.

        Raises:
            ValueError: the size of a chunk is not known.
        """
        steps, dims = time_horizon or self.time_horizon, action_dim or self.action_dim
        if steps is None or dims is None:
            raise ValueError(
                f"the size of a chunk is not known (time_horizon {steps}, action_dim {dims}): give "
                "both, the tokenizer was saved without"
            )
        idct, chunks = _transform("idct"), []
        for ids in tokens:
            text = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
            coefficients = np.array([ord(character) for character in text]) + self.min_token
            if coefficients.size != steps * dims:
                logger.warning(
                    "%d tokens stand for %d coefficients, a chunk has %d x %d: taken as zeros",
                    len(ids),
                    coefficients.size,
                    steps,
                    dims,
                )
                coefficients = np.zeros(steps * dims)
            chunks.append(
                idct(coefficients.reshape(steps, dims) / self.scale, axis=0, norm="ortho")
            )
        return np.stack(chunks)

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

        Raises:
            ValueError: no chunks, or the coefficients take more values than the vocabulary has
                entries.
        """
        chunks = [np.asarray(chunk) for chunk in chunks]
        if not chunks:
            raise ValueError("there are no action chunks to fit a tokenizer to")
        dct = _transform("dct")
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
            ValueError: a setting is out of range.
        """
        folder = Path(path)
        file = folder / TOKENIZER_FILE
        file = file if file.is_file() else folder / _SUBFOLDER / TOKENIZER_FILE
        for needed in (folder / CONFIG_FILE, file):
            if not needed.is_file():
                raise RuntimeError(
                    f"{folder} is not the folder of an action tokenizer: there is no {needed}; "
                    "fetch physical-intelligence/fast, or fit one with ActionTokenizer.fit"
                )
        values = read_json_object(folder / CONFIG_FILE, "an action tokenizer's settings")
        tokenizer = read_tokenizer(file)
        names = [field.name for field in fields(_Settings)]
        try:
            settings = _Settings(**{name: values[name] for name in names if name in values})
        except ValueError as error:
            raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
        if (highest := highest_id(tokenizer)) >= settings.vocab_size:
            raise ValueError(
                f"{folder / CONFIG_FILE}: vocab_size is {settings.vocab_size}, but {file} has the "
                f"id {highest}: they are of two tokenizers"
            )
        return cls(tokenizer, **asdict(settings))

    def save_pretrained(self, path: str | Path) -> None:
        """Write the tokenizer's folder."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TOKENIZER_FILE, self._tokenizer.to_str(pretty=True))
        values = {
            "processor_class": "UniversalActionProcessor",
            "scale": self.scale,
            "vocab_size": self.vocab_size,
            "min_token": self.min_token,
            "time_horizon": self.time_horizon,
            "action_dim": self.action_dim,
        }
        text = json.dumps(values, indent=2) + "\n"
        write_text(folder / CONFIG_FILE, text)
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
        write_text(folder / "tokenizer_config.json", text)


def padded_tokens(tokens: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, cut or padded with 0 on the right to one length.

    Returns:
        Ids `[B, length]` int64 and a mask `[B, length]` bool, True for real tokens.
    """
    for ids in tokens:
        if len(ids) > length:
            logger.warning(
                "a chunk has %d action tokens, discrete_action_max_length is %d: the rest is cut",
                len(ids),
                length,
            )
    return padded_rows(tokens, length)


def _transform(name: str) -> Callable:
    # Imported here: acting needs no SciPy.
    try:
        from scipy import fft
    except ImportError as error:
        raise RuntimeError(
            "discrete actions need SciPy, which is not installed; install it with: pip install "
            "'scipy>=1.11' (the extra `pi07` of this package)"
        ) from error
    return getattr(fft, name)


def _characters(coefficients: np.ndarray, min_token: int) -> str:
    """One character per coefficient; coefficients below `min_token` get its character.

    Raises:
        ValueError: a coefficient has no character: NaN, or far beyond those of normalized actions.
    """
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
