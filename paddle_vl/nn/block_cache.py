"""What attention to chosen blocks keeps during generation: keys, values, and the indexer's keys.

Beside the key and value of a token, its place of the memory has its index key and rotary table.
When a block is complete, its key replaces that of its last token, which is not needed any more:
places of a prompt that several rows share are only read then.

Shapes: as in `paddle_vl.nn.block_attention`; B batch, L new tokens, M places, F half the rotated
channels.
"""

from functools import cached_property
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.attention import (
    CachedKeys,
    PagedKeys,
    RotaryTables,
    causal_attention,
    paged_attention,
)
from paddle_vl.nn.block_attention import Indexer, block_attention, chosen_blocks
from paddle_vl.nn.block_samples import BlockSamples, BlockSizes
from paddle_vl.nn.key_value_cache import KeyValuePool, TokenKeys
from paddle_vl.nn.transfer import device_tensor


class BlockPlaces:
    """Where blocks of rows lie; made once of the `PagedKeys` of a forward pass.

    Attributes:
        samples: the rows, whose keys come one row after the other.
        members, lasts: places of all tokens, and of the last ones, of the blocks that the new
            tokens complete: int64 `[X * c]`, `[X]`; None if they complete none.
    """

    def __init__(self, paged: PagedKeys, sizes: BlockSizes):
        self._paged, self._sizes, size = paged, sizes, sizes.size
        length = np.array(paged.lengths, dtype=np.int64)
        new = np.minimum(length, paged.num_new)
        self._offsets = np.cumsum([0, *length])
        query = np.arange(1, len(length) + 1) * paged.num_new - new
        rows = [query, new, self._offsets[:-1], length]
        self.samples = BlockSamples(np.stack(rows, axis=1), sizes)
        self._long = [len(places) > sizes.reach for places in paged.of_rows]
        ends = zip(paged.of_rows, (length - new) // size * size, length // size * size, strict=True)
        members = np.concatenate([places[begin:end] for places, begin, end in ends])
        self.members = self.lasts = None
        if members.size:
            self.members = device_tensor(members)
            self.lasts = device_tensor(members[size - 1 :: size].copy())

    @cached_property
    def keys(self) -> Tensor:
        """Places of the blocks' keys of rows that choose, int64."""
        size = self._sizes.size
        rows = zip(self._paged.of_rows, self._long, strict=True)
        found = [places[size - 1 :: size] for places, is_long in rows if is_long]
        return device_tensor(np.concatenate(found))

    def chosen(self, chosen_QJ: Tensor) -> "ChosenPlaces":
        """Places of the keys that one query of each row sees: chosen ones, or all."""
        others, order, lengths = self._others
        size = self._sizes.size
        in_block_c = paddle.arange(size, dtype="int64")
        keys_QJc = chosen_QJ.astype("int64").unsqueeze(2) * size + in_block_c
        keys_QJc = keys_QJc + self._first_keys
        of_blocks = paddle.index_select(self._paged.places, keys_QJc.flatten())
        places = paddle.index_select(paddle.concat([of_blocks, others]), order)
        return ChosenPlaces(lengths, places)

    @cached_property
    def _first_keys(self) -> Tensor:
        """Of each row that chooses where it begins among all keys: int64 `[Q, 1, 1]`."""
        return device_tensor(self._offsets[:-1][self._long][:, None, None])

    @cached_property
    def _others(self) -> tuple[Tensor, Tensor, list[int]]:
        """Places of tails and of rows that do not choose; of all keys their order among chosen ones
        and these; and the number of keys of each row."""
        size, chosen = self._sizes.size, self._sizes.chosen * self._sizes.size
        others, order, lengths = [], [], []
        num_chosen, num_others = 0, sum(self._long) * chosen
        for places, is_long in zip(self._paged.of_rows, self._long, strict=True):
            if is_long:
                order.append(np.arange(num_chosen, num_chosen + chosen))
                num_chosen += chosen
                places = places[len(places) // size * size :]
            others.append(places)
            order.append(np.arange(num_others, num_others + len(places)))
            num_others += len(places)
            lengths.append(len(places) + is_long * chosen)
        return device_tensor(np.concatenate(others)), device_tensor(np.concatenate(order)), lengths


class ChosenPlaces(PagedKeys):
    """Places that are on the device only: int64, of the rows one after the other.

    Args:
        lengths: of each row.
    """

    def __init__(self, lengths: list[int], places: Tensor):
        CachedKeys.__init__(self, max(lengths))
        self.lengths, self.places, self.num_new, self.begins = lengths, places, 1, False


class BlockPool(KeyValuePool):
    """`KeyValuePool` of a layer whose `Indexer` chooses, before it attends.

    Its memories are made of the first tokens, of which a rank may have some of the heads.
    """

    def __init__(self, places: int):
        self._num_places = places
        self._key: Any = None
        self._value: Any = None
        self._index: Any = None
        self._tables: Any = None
        self._places: BlockPlaces | None = None
        self._chosen_QJ: Tensor | None = None

    def begin(self, tables: RotaryTables, shared: CachedKeys) -> None:
        """Before the new tokens of a forward pass; `paged` is known then."""

    @paddle.no_grad()
    def choose(
        self, x_TD: Tensor, tables: RotaryTables, shared: CachedKeys, indexer: Indexer
    ) -> None:
        """Keep the index keys of new tokens, and choose what `attend` sees."""
        self.begin(tables, shared)
        paged = self.paged
        places = self._places = paged.once(BlockPlaces, indexer.sizes)
        q_TIC, raw_TC = indexer(x_TD, tables)
        halves = [x.flatten(0, 1).chunk(2, axis=-1)[0] for x in tables.astype(x_TD.dtype)]
        self._keep("_index", raw_TC)
        self._keep("_tables", paddle.concat(halves, axis=-1))
        if places.members is not None and places.lasts is not None:
            first = places.members[:: indexer.sizes.size]
            cos_XF, sin_XF = paddle.index_select(self._tables, first).chunk(2, axis=-1)
            of_firsts = RotaryTables(*(paddle.concat([x, x], axis=-1) for x in (cos_XF, sin_XF)))
            keys_XC = indexer.keys(paddle.index_select(self._index, places.members), of_firsts)
            paddle.scatter_(self._index, places.lasts, keys_XC)
        self._chosen_QJ = None
        if places.samples.parts:
            keys_XC = paddle.index_select(self._index, places.keys)
            self._chosen_QJ = chosen_blocks(q_TIC, keys_XC, places.samples)

    def _keep(self, name: str, new: Tensor) -> None:
        """Write rows of new tokens to a memory."""
        if getattr(self, name) is None:
            setattr(self, name, paddle.empty([self._num_places, *new.shape[1:]], new.dtype))
        paddle.scatter_(getattr(self, name), self.paged.new, new)

    def _append(self, key_BLKH: Tensor, value_BLKH: Tensor, paged: PagedKeys) -> None:
        self._keep("_key", key_BLKH.flatten(0, 1))
        self._keep("_value", value_BLKH.flatten(0, 1))

    @property
    def takes_token(self) -> bool:
        """Whether the rows that run next have one token each, and see all keys, of which there
        are some."""
        return self._chosen_QJ is None and self._key is not None and super().takes_token

    def for_token(self, paged: CachedKeys) -> TokenKeys:
        return super().for_token(self.paged)

    def attend(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, shared: CachedKeys
    ) -> Tensor:
        paged, chosen_QJ = self.paged, self._chosen_QJ
        if chosen_QJ is None:
            return self._attend_to_all(q_BLNH, key_BLKH, value_BLKH, shared)
        assert self._places is not None, "with the choice"
        self._append(key_BLKH, value_BLKH, paged)
        if paged.num_new == 1:
            keys = self._places.chosen(chosen_QJ)
            return paged_attention(q_BLNH.squeeze(1), self._key, self._value, keys).unsqueeze(1)
        k_RKH, v_RKH = (paddle.index_select(x, paged.places) for x in (self._key, self._value))
        q_TNH = q_BLNH.flatten(0, 1)
        out_TNH = block_attention(q_TNH, k_RKH, v_RKH, chosen_QJ, self._places.samples)
        return out_TNH.reshape(q_BLNH.shape)

    def _attend_to_all(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, shared: CachedKeys
    ) -> Tensor:
        return super().attend(q_BLNH, key_BLKH, value_BLKH, self.paged)


class BlockCache(BlockPool):
    """`BlockPool` of a batch of prompts, whose places are one row of the batch after the other, and
    grow in chunks.

    Args:
        prompt, most: as of `KeyValueCache`.

    Attributes:
        length: number of tokens so far, with padding.
    """

    CHUNK = 64

    def __init__(self, prompt: int, most: int | None):
        super().__init__(0)
        self.length, self._prompt, self._most, self._capacity = 0, prompt, most, 0

    def mask(self, num_new: int, key_bias_BS: Tensor | None) -> CachedKeys:
        return CachedKeys(self.length + num_new, key_bias_BS)

    def begin(self, tables: RotaryTables, shared: CachedKeys) -> None:
        batch, num_new = tables.cos_TH.shape[:2]
        self._make_room(batch, num_new)
        self.paged = shared.once(PromptPlaces, batch, num_new, self._capacity)

    def _make_room(self, batch: int, num_new: int) -> None:
        past, self.length = self.length, self.length + num_new
        if self.length <= self._capacity:
            return
        needed = max(self.length, self._prompt)
        room = needed + max(self.CHUNK, needed // 8)
        room = room if self._most is None else max(needed, min(room, self._most))
        for name in ("_key", "_value", "_index", "_tables") if past else ():
            old = getattr(self, name)
            shape = [batch, room, *old.shape[1:]]
            new = paddle.empty(shape, old.dtype)
            new[:, :past] = old.reshape([batch, self._capacity, *shape[2:]])[:, :past]
            setattr(self, name, new.flatten(0, 1))
        self._capacity, self._num_places = room, batch * room

    def _attend_to_all(
        self, q_BLNH: Tensor, key_BLKH: Tensor, value_BLKH: Tensor, shared: CachedKeys
    ) -> Tensor:
        batch, num_new = q_BLNH.shape[:2]
        if num_new == 1:
            return super()._attend_to_all(q_BLNH, key_BLKH, value_BLKH, shared)
        self._append(key_BLKH, value_BLKH, self.paged)
        if self.length == num_new:
            return causal_attention(q_BLNH, key_BLKH, value_BLKH, shared.key_bias_BS)
        key_BSKH, value_BSKH = (
            x.reshape([batch, self._capacity, *x.shape[1:]])[:, : self.length]
            for x in (self._key, self._value)
        )
        return causal_attention(q_BLNH, key_BSKH, value_BSKH, shared.key_bias_BS)


class PromptPlaces(PagedKeys):
    """Places of the keys of a batch that are not padding; the host reads the bias.

    Args:
        cached: with S keys of each prompt.
        num_new: L.
        capacity: places of each prompt.
    """

    def __init__(self, cached: CachedKeys, batch: int, num_new: int, capacity: int):
        length, self._first = cached.length, np.arange(batch) * capacity
        start_B = np.zeros(batch, dtype=np.int64)
        if cached.key_bias_BS is not None:
            hidden_BS = cached.key_bias_BS.numpy() < 0.0
            # Where all is padding so far, the last token sees itself.
            start_B = np.where(hidden_BS.all(axis=1), length - 1, hidden_BS.argmin(axis=1))
        rows = zip(self._first, start_B, strict=True)
        super().__init__([first + np.arange(start, length) for first, start in rows], num_new)
        self.begins, self._columns = length == num_new, np.arange(length - num_new, length)

    @cached_property
    def new(self) -> Tensor:
        """Places of all new tokens, of padding too: int64 `[B * L]`."""
        return device_tensor((self._first[:, None] + self._columns).reshape(-1))
