"""A model whose prompts and answers join and leave: what continuous batching asks of it.

Keys and values lie in one memory of a bounded size, in blocks, of which every row has its own. A
prompt runs alone, in parts whose borders do not depend on other prompts; then its row takes a token
in each step of all rows. Images and videos are encoded one by one, once, and kept by checksum.

Shapes: R rows, L prompt length, V vocabulary, D width, G deepstack levels.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.positions import checked_grid
from paddle_vl.checkpoint.reading import check_keys, checkpoint_tensors, stored_value
from paddle_vl.checkpoint.rules import by_parameter
from paddle_vl.families.vlm.answering.generate import EmbeddedPrompts, step_logits
from paddle_vl.families.vlm.answering.row_adapters import RowAdapters
from paddle_vl.families.vlm.modeling.layers import VisionFeatures, decoder_positions
from paddle_vl.nn.attention import PagedKeys, RotaryTables
from paddle_vl.nn.transfer import device_tensor

# Rows of whole tiles of a matrix product, on CPUs and GPUs.
_TILE = 16
# Positions whose rotary tables are made at first.
_TABLE_ROWS = 1024


class _Item(NamedTuple):
    """An image or a video, and a checksum of its patches."""

    kind: str
    pixels: np.ndarray
    grid_1x3: np.ndarray
    checksum: bytes


class Prompt:
    """A checked prompt.

    Attributes:
        length: L.
        adapter: see `BatchedModel`.
    """

    def __init__(self, model: Any, input_ids: np.ndarray, visual: Mapping[str, Any], adapter: Any):
        self.ids_1L = checked_ids(input_ids, model.config.text_config.vocab_size)
        self.length, self.adapter = self.ids_1L.size, adapter
        self.items = list(_items(visual))
        grids = [visual.get(name) for name in ("image_grid_thw", "video_grid_thw")]
        self.position_ids, deltas_1 = model.position_ids(self.ids_1L, None, *grids)
        self.next_position = self.length + int(deltas_1[0])
        # While the prompt runs.
        self.columns: EmbeddedPrompts | None = None


def checked_ids(input_ids: np.ndarray, vocab: int) -> np.ndarray:
    """The ids `[L]` of a prompt as `[1, L]` int64.

    Raises:
        ValueError: another shape, or ids outside the vocabulary.
    """
    ids_L = np.asarray(input_ids)
    if ids_L.ndim != 1 or not len(ids_L) or ids_L.dtype.kind not in "iu":
        raise ValueError(f"input_ids has shape {ids_L.shape}: give one prompt, [L] of integers")
    if not 0 <= ids_L.min() <= ids_L.max() < vocab:
        raise ValueError(f"input_ids has ids outside the model's vocabulary of {vocab}")
    return ids_L[None].astype(np.int64)


def _items(visual: Mapping[str, Any]) -> Iterator[_Item]:
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        pixels, grid = visual.get(name), visual.get(f"{kind}_grid_thw")
        if pixels is None and grid is None:
            continue
        grid = checked_grid(kind, None if pixels is None else len(pixels), grid)
        ends = np.cumsum(grid.prod(axis=1))[:-1]
        for own, own_grid in zip(np.split(np.asarray(pixels), ends), grid, strict=True):
            checksum = hashlib.blake2b(own_grid.tobytes(), digest_size=16)
            checksum.update(np.ascontiguousarray(own).data)
            yield _Item(kind, own, own_grid[None], checksum.digest())


class BatchedModel:
    """
    Args:
        model: complete; it is in evaluation mode from now on.
        num_rows: most prompts and answers at once.
        block_size: places of a block.
        num_blocks: that rows may have.
        image_bytes: bound of the encoded images that are kept.
        adapters: see `RowAdapters`.

    Attributes:
        image_hits, image_misses, kept_bytes: of the encoded images.

    Raises:
        ValueError: a model split over ranks, or adapters that do not fit it.
    """

    def __init__(
        self,
        model: Any,
        num_rows: int,
        block_size: int,
        num_blocks: int,
        image_bytes: int,
        adapters: Mapping[str, Path] | None,
    ):
        if model.placement.splits_parameters:
            raise ValueError(
                "this model is split over ranks: load the checkpoint in a single process"
            )
        self._model, self._block_size, self._image_bytes = model, block_size, image_bytes
        self._device = paddle.get_device()
        model.eval()
        self.adapters = RowAdapters(model, adapters)
        # The first block and one more row are for rows that only fill a batch.
        self.num_blocks, self._num_rows = num_blocks, num_rows
        places = (num_blocks + 1) * block_size
        layers = range(len(model.language_model.layers))
        self._pools = [model.new_pool(i, places, num_rows + 1) for i in layers]
        self._kept: OrderedDict[Any, tuple[VisionFeatures, int]] = OrderedDict()
        self.image_hits = self.image_misses = self.kept_bytes = 0
        self._tables: RotaryTables | None = None

    def use_thread(self) -> None:
        """Make this thread run on the model's device."""
        paddle.set_device(self._device)

    def prompt(self, input_ids: np.ndarray, visual: Mapping[str, Any], adapter: Any) -> Prompt:
        """A prompt `[L]` with its images and videos; from any thread.

        Raises:
            ValueError: ids, arrays or adapter that are not for this model.
        """
        if adapter not in self.adapters.numbers:
            names = ", ".join(name for name in self.adapters.numbers if name) or "none"
            raise ValueError(f"there is no adapter {adapter}: there is {names}")
        return Prompt(self._model, input_ids, visual, adapter)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Take an adapter from a folder, a new one or in place of that of this name.

        Raises:
            ValueError, RuntimeError: see `RowAdapters`; the adapters are as before.
        """
        self.adapters = self.adapters.with_folder(self._model, name, folder)
        self._forget_images()

    def load_weights(self, folder: Path) -> None:
        """Take the weights of another folder of the model.

        Raises:
            ValueError: they do not fit, or there are adapters, whose factors are of these weights.
            RuntimeError: files are missing or damaged.
        """
        if self.adapters.folders:
            names = ", ".join(self.adapters.folders)
            raise ValueError(f"the model has the adapters {names}, which are of its weights")
        model = self._model
        stored = model.checkpoint_map.tensors_as_here(checkpoint_tensors(folder), model.config)
        wanted = list(model.stored_parameters())
        check_keys(folder, stored, wanted, set())
        for items in by_parameter(wanted):
            items[0].parameter.set_value(stored_value(items, stored))
        self._forget_images()

    def _forget_images(self) -> None:
        """Encoded images are those of a tower."""
        self._kept.clear()
        self.kept_bytes = 0

    def places_of(self, blocks: Sequence[int]) -> np.ndarray:
        """All places of some blocks, which are numbered from 0: int64."""
        first = (np.asarray(blocks, dtype=np.int64) + 1) * self._block_size
        return (first[:, None] + np.arange(self._block_size)).reshape(-1)

    @paddle.no_grad()
    def prefill(
        self, prompt: Prompt, begin: int, end: int, row: int, places: np.ndarray
    ) -> Tensor | None:
        """Run columns of a prompt, which come one after the other: logits `[1, V]` float32 after
        the last one.

        Args:
            row: number of the row that gets what layers keep, below `num_rows`.
            places: of the row's keys.
        """
        self.adapters.chosen = self.adapters.numbers[prompt.adapter]
        if prompt.columns is None:
            visual = self._visual(prompt)
            prompt.items.clear()
            prompt.columns = EmbeddedPrompts(
                self._model, prompt.ids_1L, prompt.position_ids, visual
            )
        self._use(PagedKeys([places[:end]], end - begin, [row]))
        hidden_1LD = prompt.columns.run(begin, end, self._pools)
        if end < prompt.length:
            return None
        prompt.columns = None
        return self._model.lm_head(hidden_1LD[:, -1]).astype("float32")

    def fork(self, row: int, rows: Sequence[int]) -> None:
        """Give other rows what layers keep of a row beside keys, whose places they may share."""
        for pool in self._pools:
            pool.fork(row, rows)

    @paddle.no_grad()
    def advance(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        places: Sequence[np.ndarray],
        adapters: Sequence[str | None],
        fills: bool,
    ) -> Tensor:
        """Append a token to each of R rows: logits float32 `[R, V]`.

        Args:
            places: of each row those of all keys, the new token's last.
            fills: run as many rows as for `num_rows`; those behind the given ones mean nothing.
        """
        # Whole tiles, as products add the rows of a part of one in another order.
        more = -(-self._num_rows // _TILE) * _TILE - len(rows) if fills else 0
        nowhere = np.zeros(1, dtype=np.int64)
        chosen = np.array([self.adapters.numbers[name] for name in [*adapters, *[None] * more]])
        self.adapters.chosen = device_tensor(chosen) if chosen.any() else 0
        numbers = [*rows, *[self._num_rows] * more]
        self._use(PagedKeys([*places, *[nowhere] * more], rows=numbers))
        inputs = self._decoder_inputs(np.array([*positions, *[0] * more]))
        ids_R1 = device_tensor(np.array([*tokens, *[0] * more], dtype=np.int64)[:, None])
        return step_logits(self._model, ids_R1, inputs, self._pools)

    def _decoder_inputs(self, position_R: np.ndarray) -> dict[str, Any]:
        """Positions and rotary tables of a token of each row, taken from tables of all positions,
        which grow."""
        if self._tables is None or position_R.max() >= len(self._tables.cos_TH):
            count = _TABLE_ROWS
            while count <= position_R.max():
                count *= 2
            every_3P1 = np.tile(np.arange(count)[:, None], [3, 1, 1])
            made = decoder_positions(self._model.config, paddle.to_tensor(every_3P1))
            self._tables = made["rotary_pos_emb"]
        position_R1 = device_tensor(position_R[:, None])
        tables: Any = self._tables
        rows = (paddle.index_select(x, position_R1[:, 0]) for x in tables)
        return {"position_ids": position_R1, "rotary_pos_emb": RotaryTables(*rows)}

    def _use(self, paged: PagedKeys) -> None:
        for pool in self._pools:
            pool.paged = paged

    def _visual(self, prompt: Prompt) -> VisionFeatures | None:
        """Embeddings and levels of a prompt, as of `model.encode_visual`."""
        found = [self._features(item, prompt) for item in prompt.items]
        if not found:
            return None
        merged, levels = zip(*found, strict=True)
        of_levels = [paddle.concat(list(level)) for level in zip(*levels, strict=True)]
        return VisionFeatures(paddle.concat(list(merged)), of_levels)

    def _features(self, item: _Item, prompt: Prompt) -> VisionFeatures:
        """Of one image or video, alone, so that they do not depend on others."""
        of_tower = prompt.adapter if prompt.adapter in self.adapters.of_tower else None
        key = (item.checksum, of_tower)
        if key in self._kept:
            self._kept.move_to_end(key)
            self.image_hits += 1
            return self._kept[key][0]
        self.image_misses += 1
        features = self._model.encode_items([device_tensor(item.pixels)], item.grid_1x3)
        size = sum(x.size * x.element_size() for x in (features.merged, *features.levels))
        if size <= self._image_bytes:
            self._kept[key] = features, size
            self.kept_bytes += size
            while self.kept_bytes > self._image_bytes:
                self.kept_bytes -= self._kept.popitem(last=False)[1][1]
        return features
