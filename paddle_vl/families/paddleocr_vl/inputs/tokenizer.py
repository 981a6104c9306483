"""Names of PaddleOCR-VL's tokens, and a small tokenizer of its kind for models from fresh weights.

The kind is SentencePiece's BPE with byte fallback: a space is U+2581 and none is added in front,
and a character without a piece becomes its bytes.
"""

from collections.abc import Iterable, Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from paddle_vl.data.formats.otsl import TAGS
from paddle_vl.data.formats.spotting import UNITS
from paddle_vl.families.paddleocr_vl.inputs.sentencepiece_file import Kind, sentencepiece_file
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer

UNKNOWN, SENTENCE_START, SENTENCE_END = "<unk>", "<s>", "</s>"
CONVERSATION_END, CONVERSATION_START = "<|end_of_sentence|>", "<|begin_of_sentence|>"
IMAGE_START, IMAGE, IMAGE_END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"
# Of config.json, where no model has videos.
VIDEO = "<|video_pad|>"
# Tokens of answers, which decoding keeps.
ANSWER_TOKENS = (*(f"<|LOC_{value}|>" for value in range(UNITS + 1)), *TAGS)
_FIRST = (UNKNOWN, SENTENCE_START, SENTENCE_END, CONVERSATION_END, CONVERSATION_START)
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
_SPACE = "\u2581"
HF_CLASS = "LlamaTokenizer"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, answer_tokens: Sequence[str] = ANSWER_TOKENS
) -> TextTokenizer:
    """Train a tokenizer of PaddleOCR-VL's kind; deterministic.

    Args:
        texts: training texts.
        vocab_size: upper limit of ids, all tokens included; texts with few merges give fewer.
        answer_tokens: those of answers that are one token each, with the last ids.

    Raises:
        ValueError: the vocabulary cannot hold 256 bytes and the tokens.
    """
    media = (IMAGE, VIDEO, IMAGE_START, IMAGE_END)
    last = (*media, *answer_tokens)
    fixed = len(_FIRST) + len(_BYTES) + len(last)
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", _SPACE)
    # Pieces of one word: across words BPE would learn phrases.
    trained.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size - fixed, 0), show_progress=False, initial_alphabet=[_SPACE]
    )
    trained.train_from_iterator(texts, trainer)
    numbers = trained.get_vocab()
    names = [*_FIRST, *_BYTES, *sorted(numbers, key=numbers.__getitem__)]
    if len(names) + len(last) > vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: bytes, control tokens and the letters of the "
            f"texts need {len(names) + len(last)}"
        )
    # As in SentencePiece any two pieces merge that are one together, the first of these first.
    merges = [
        (name[:place], name[place:])
        for name in names[len(names) - len(numbers) :]
        for place in range(1, len(name))
        if name[:place] in numbers and name[place:] in numbers
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: number for number, name in enumerate(names)},
            merges=merges,
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([_added(token, True) for token in (*_FIRST, *media)])
    tokenizer.add_tokens([_added(token, False) for token in answer_tokens])
    return TextTokenizer(tokenizer, hf_class=HF_CLASS)


def as_sentencepiece(tokenizer: TextTokenizer) -> bytes:
    """The file `tokenizer.model` of a tokenizer of `train_tokenizer`."""
    ids = tokenizer.backend.get_vocab()
    kinds = {UNKNOWN: Kind.UNKNOWN, SENTENCE_START: Kind.CONTROL, SENTENCE_END: Kind.CONTROL}
    kinds |= dict.fromkeys(_BYTES, Kind.BYTE)
    added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    kinds = dict.fromkeys(added, Kind.USER_DEFINED) | kinds
    names = sorted(ids, key=ids.__getitem__)
    return sentencepiece_file((name, kinds.get(name, Kind.NORMAL)) for name in names)


def _added(token: str, is_special: bool) -> AddedToken:
    return AddedToken(token, special=is_special, normalized=False)
