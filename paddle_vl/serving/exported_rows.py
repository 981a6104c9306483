"""Exported programs as what an engine runs: each row by itself, as their prompts have one length.

A prompt runs as a whole. Keys and values grow with an answer; the engine's blocks count them.

Shapes: R rows, L prompt length, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.export.qwen3_vl.exported import ExportedDecoder, ExportedQwen3VL
from paddle_vl.families.vlm.answering.batched import checked_ids


class ExportedPrompt:
    """A checked prompt; see `paddle_vl.families.vlm.answering.batched.Prompt`.

    Attributes:
        columns: the decoder, of the answer too; None when that has ended.
        next_position: of no use, as the decoder counts positions.
    """

    next_position = 0

    def __init__(self, ids_1L: np.ndarray, decoder: ExportedDecoder):
        self.ids_1L, self.length = ids_1L, ids_1L.size
        self.columns: ExportedDecoder | None = decoder


class ExportedRows:
    """Has the methods and attributes of a `paddle_vl.families.vlm.answering.batched.BatchedModel`.

    Args:
        num_blocks, block_size: bound of the keys and values of all rows.
    """

    kept_bytes = image_hits = image_misses = 0

    def __init__(self, exported: ExportedQwen3VL, num_blocks: int, block_size: int):
        self.num_blocks, self._block_size, self._exported = num_blocks, block_size, exported
        self._device = paddle.get_device()
        # The prompts hold them.
        self._decoders: WeakValueDictionary[int, ExportedDecoder] = WeakValueDictionary()

    def use_thread(self) -> None:
        """Make this thread run on the programs' device."""
        paddle.set_device(self._device)

    def prompt(self, input_ids: np.ndarray, visual: Mapping[str, Any], adapter: Any) -> Any:
        """A prompt `[L]` with its images and videos; from any thread.

        Raises:
            ValueError: ids or arrays that are not for this model, or an adapter.
        """
        if adapter is not None:
            raise ValueError(f"there is no adapter {adapter}: an export has none")
        ids_1L = checked_ids(input_ids, self._exported.vocab_size)
        return ExportedPrompt(ids_1L, self._exported.decoder_of(ids_1L, visual))

    def places_of(self, blocks: Sequence[int]) -> np.ndarray:
        """Numbers of the places of some blocks, which no program needs."""
        return np.arange(len(blocks) * self._block_size)

    @paddle.no_grad()
    def prefill(
        self, prompt: ExportedPrompt, begin: int, end: int, row: int, places: np.ndarray
    ) -> Tensor | None:
        """All of a prompt with its last part: logits `[1, V]` float32 after it."""
        if end < prompt.length or prompt.columns is None:
            return None
        self._decoders[row] = prompt.columns
        return prompt.columns.prefill()

    @paddle.no_grad()
    def advance(
        self, tokens: Sequence[int], positions: Any, rows: Sequence[int], *others: Any
    ) -> Tensor:
        """Append a token to each of R rows: logits float32 `[R, V]`."""
        return paddle.concat(
            [
                # The next run of the program writes over its outputs.
                self._decoders[row].advance(np.array([token])).clone()
                for row, token in zip(rows, tokens, strict=True)
            ]
        )
