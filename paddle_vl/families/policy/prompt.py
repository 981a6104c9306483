"""Texts of the prefix, and their tokenizer.

A prompt is `Task: <prompt>, `; response and metadata have fixed forms too. The labels between them
("State: " and the like) are blocks of the prefix, see `prefix_layout.py`.

Source: the prompt preparation of OpenTau's pi07 policies.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paddle_vl.files.text_file import read_json_object, shown, write_text
from paddle_vl.files.tokenizer_json import TOKENIZER_FILE, highest_id, read_tokenizer

CONFIG_FILE = "tokenizer_config.json"
_PAD_TOKEN = "<pad>"
_SPECIAL_TOKENS = (_PAD_TOKEN, "<eos>", "<bos>", "<unk>")
# Metadata in the order of the prompt; numbers have a `<name>_is_pad` beside them.
_METADATA = (
    ("speed", "Speed"),
    ("quality", "Quality"),
    ("mistake", "Mistake"),
    ("robot_type", "Robot"),
    ("fps", "FPS"),
    ("control_mode", "Control"),
)
_WORDS = ("robot_type", "control_mode")


class PromptTokenizer:
    """The backbone's tokenizer: Gemma 3's for published weights.

    Attributes:
        bos_id: put before texts that get special tokens; None if `tokenizer.json` does that.
        pad_id: fills texts on the right.
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
        tokenizer, beside = read_tokenizer(file), file.with_name(CONFIG_FILE)
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

        Raises:
            ValueError: the vocabulary is too small for the bytes and the special tokens.
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
        write_text(Path(path) / CONFIG_FILE, text)

    @property
    def highest_id(self) -> int:
        """The largest token id."""
        return highest_id(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, neither padded nor cut."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens)

    def token_id(self, token: str) -> int:
        """Id of a token by its name.

        Raises:
            ValueError: the tokenizer has no such token.
        """
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token!r}: give the backbone's own")
        return found

    def padded(
        self, texts: Sequence[str], length: int, add_special_tokens: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of texts, cut or padded on the right to one length.

        Returns:
            Ids `[B, length]` int64 and a mask `[B, length]` bool, True for real tokens.
        """
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


def check_vocabulary(tokenizer: PromptTokenizer, size: int) -> None:
    """Refuse a tokenizer with more tokens than the backbone.

    Raises:
        ValueError: names both numbers.
    """
    if tokenizer.highest_id >= size:
        raise ValueError(
            f"the tokenizer has the id {tokenizer.highest_id}, text_config.vocab_size is {size}: "
            "give the tokenizer that the policy was trained with"
        )


def prompt_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Task: <prompt>, ` for each sample.

    Raises:
        ValueError: the batch has no prompts, or not one per sample.
    """
    return [f"Task: {text}, " for text in required_words(batch, "prompt", batch_size)]


def response_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Subtask: <response>, ` for each sample; empty without a response."""
    words = words_of(batch, "response", batch_size)
    return [f"Subtask: {text}, " if text else "" for text in words]


def metadata_texts(batch: Mapping[str, Any], batch_size: int) -> list[str]:
    """`Metadata: Speed: 50,  Quality: 3, ...` for each sample; empty without metadata.

    Numbers count if `<name>_is_pad` is there and False, texts if they are not empty.
    """
    texts = []
    for row in range(batch_size):
        segments = []
        for name, title in _METADATA:
            if name in _WORDS:
                value = words_of(batch, name, batch_size)[row]
            else:
                value = _number(batch, name, batch_size, row)
            if value not in ("", None):
                segments.append(f"{title}: {value}, ")
        texts.append(f"Metadata: {' '.join(segments)}" if segments else "")
    return texts


def required(batch: Mapping[str, Any], name: str) -> Any:
    """An entry of a raw batch; it raises ValueError if the batch lacks it."""
    if name not in batch:
        raise ValueError(f"the batch has no {name!r}; its entries are {sorted(batch)}")
    return batch[name]


def required_words(batch: Mapping[str, Any], name: str, batch_size: int) -> list[str]:
    """`words_of` an entry that must be there."""
    required(batch, name)
    return words_of(batch, name, batch_size)


def words_of(batch: Mapping[str, Any], name: str, batch_size: int) -> list[str]:
    """The texts of an entry, one per sample; empty texts if the batch lacks it.

    Raises:
        ValueError: not one per sample.
    """
    words = batch.get(name, "")
    words = [words] * batch_size if isinstance(words, str) else [str(word) for word in words]
    if len(words) != batch_size:
        raise ValueError(f"{name!r} has {len(words)} texts for a batch of {batch_size}")
    return words


def _number(batch: Mapping[str, Any], name: str, batch_size: int, row: int) -> str | None:
    if name not in batch or f"{name}_is_pad" not in batch:
        return None
    values, is_pad = np.asarray(batch[name]), np.asarray(batch[f"{name}_is_pad"])
    if values.shape != (batch_size,) or is_pad.shape != (batch_size,):
        raise ValueError(
            f"{name!r} has shape {list(values.shape)} and {name}_is_pad {list(is_pad.shape)}; both "
            f"must be [{batch_size}]"
        )
    if is_pad[row]:
        return None
    value = values[row].item()
    if name != "mistake":
        if isinstance(value, bool):
            raise ValueError(f"{name!r} is {value!r}; a number is needed")
        if (problem := metadata_problem(name, value)) is not None:
            raise ValueError(problem)
    return str(value)


def _token_text(settings: Mapping[str, Any], name: str, file: Path) -> str | None:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not (isinstance(text, str) and text.isprintable()):
        raise RuntimeError(f"{file}: {name} is {shown(token)}; the name of a token is needed")
    return text


# As in OpenTau: speed is the decile rank of the episode's length, quality a score, fps in Hz.
METADATA_RANGES: dict[str, tuple[int, int]] = {
    "speed": (0, 100),
    "quality": (1, 5),
    "fps": (1, 1000),
}


def metadata_problem(name: str, value: float) -> str | None:
    """What is wrong with a metadata number; None if it is valid."""
    if name not in METADATA_RANGES:
        return None
    least, most = METADATA_RANGES[name]
    if least <= value <= most:
        return None
    if isinstance(value, int) and abs(value) >= 10**18:
        # Python refuses to print integers of thousands of digits.
        found = f"a number of {value.bit_length()} bits"
    else:
        found = str(value)
    return f"{name!r} is {found}; it must be from {least} to {most}"
