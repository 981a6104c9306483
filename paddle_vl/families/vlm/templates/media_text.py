"""Text with placeholders of images and videos to token ids, and character spans to labels.

The text is tokenized as a whole, as HF does, unless it is cut. A video's placeholder is replaced by
the timestamps of its patches before that; how often a placeholder stands for a patch or an image is
a matter of ids, because it is a token by itself.

The form of videos is that of HF transformers 4.57; 5.x leaves one more pair of vision tokens around
all patches.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.families.vlm.inputs.collate import IGNORED_LABEL
from paddle_vl.families.vlm.inputs.tokenizer import (
    IMAGE_PAD,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    EncodedChat,
    VideoPrompt,
)
from paddle_vl.families.vlm.inputs.video_processor import timestamp_text
from paddle_vl.families.vlm.templates.answer_spans import Span


class MediaTokens(NamedTuple):
    """Placeholders of an image and a video, and what encloses a temporal patch of a video."""

    image: str
    video: str
    start: str
    end: str


QWEN_MEDIA = MediaTokens(IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END)


class MediaText:
    """Tokenizes texts with the placeholders of one model."""

    def __init__(self, tokenizer: Tokenizer, tokens: MediaTokens = QWEN_MEDIA):
        self._tokenizer, self._tokens = tokenizer, tokens
        image, video, start, end = map(re.escape, tokens)
        self._places = re.compile(f"(?P<image>{image})|(?P<video>(?:{start})?{video}(?:{end})?)")
        self._ids = {tokenizer.token_to_id(name) for name in (tokens.image, tokens.video)}

    def encode(
        self,
        text: str,
        spans: Sequence[Span],
        media: Sequence[str],
        num_image_tokens: Sequence[int],
        videos: Sequence[VideoPrompt],
        cuts: Sequence[int] = (),
    ) -> EncodedChat:
        """Ids of a text, and labels of the tokens that touch a span.

        Args:
            spans: start and end character of learned texts.
            media: `image` or `video` for each of the row.
            num_image_tokens: number of placeholders of every image, in reading order.
            videos: prompt of every video, in reading order.
            cuts: characters in front of which the text is tokenized apart.

        Raises:
            BadSampleError: the text has other placeholders than the row has media, or is no
                Unicode.
        """
        places = list(self._places.finditer(text))
        kinds = [str(place.lastgroup) for place in places]
        if sorted(kinds) != sorted(media):
            raise BadSampleError(
                "lost_text",
                f"the row has {list(media)}, but the chat template places {kinds}; move images "
                "and videos to user messages, or use a template that places them",
            )
        images, prompts = iter(num_image_tokens), iter(videos)
        # The text up to each video; where it ended in the old text, and how far that moved.
        new, ends, moved, repeats = "", [0], [0], []
        for place in places:
            if place.lastgroup == "image":
                repeats.append(next(images))
                continue
            video = next(prompts)
            repeats += [video.tokens_per_patch] * len(video.timestamps)
            patch = self._tokens.start + self._tokens.video + self._tokens.end
            new += text[ends[-1] : place.start()]
            new += "".join(timestamp_text(seconds) + patch for seconds in video.timestamps)
            ends.append(place.end())
            moved.append(len(new) - place.end())
        new += text[ends[-1] :]
        check_unicode(new)

        def place(at: int) -> int:
            return at + moved[bisect_right(ends, at) - 1]

        ids, labels = [], []
        for begin, stop in pairwise([0, *map(place, cuts), len(new)]):
            encoding = self._tokenizer.encode(new[begin:stop], add_special_tokens=False)
            learned = np.full(len(encoding.ids), IGNORED_LABEL)
            for start, end in spans:
                start, end = max(place(start), begin), min(place(end), stop)
                tokens = _touched(encoding, start - begin, end - begin)
                learned[tokens] = encoding.ids[tokens]
            ids += encoding.ids
            labels += learned.tolist()
        if len(repeats) != sum(each in self._ids for each in ids):
            raise ValueError(
                f"the tokenizer has no tokens {self._tokens.image} and {self._tokens.video}, which "
                "stand for images and videos; use the checkpoint's own tokenizer"
            )
        left = iter(repeats)
        counts = [next(left) if each in self._ids else 1 for each in ids] if repeats else 1
        return EncodedChat(np.repeat(ids, counts).tolist(), np.repeat(labels, counts).tolist())


def _touched(encoding: Encoding, start: int, end: int) -> slice:
    """Tokens from that of the first character to that of the last: HF's rule."""

    def first(places: range) -> int | None:
        # A normalizer may leave out characters.
        tokens = map(encoding.char_to_token, places)
        return next((token for token in tokens if token is not None), None)

    head, tail = first(range(start, end)), first(range(end - 1, start - 1, -1))
    return slice(0) if head is None or tail is None else slice(head, tail + 1)
