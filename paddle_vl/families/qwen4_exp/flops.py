"""Floating point operations of Qwen4-Exp: those of `DeltaFlops`, of the readers of its streams, the
projections of embedded n-grams, and attention to chosen blocks with the scores that choose them.

A query attends to what it chose. Its scores of blocks count where it chooses, behind the tokens
that it sees all of; they have no backward.
"""

from typing import Any

import numpy as np

from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.flops import Operations
from paddle_vl.families.vlm.modeling.delta_flops import DeltaFlops
from paddle_vl.families.vlm.modeling.flops import attention


class Qwen4ExpFlops(DeltaFlops):
    """Counts the operations of batches, see `FlopCounter`."""

    def units(self, batch: VLBatch) -> dict[str, int]:
        """As of `VLFlops`; `token_pairs` are of tokens and those that they chose, `block_pairs` of
        tokens and blocks that they score."""
        units, text = super().units(batch), self.config.text_config
        if text.indexer_budget is None:
            return units
        size, budget = text.indexer_compress_ratio, text.indexer_budget
        # Of a token with `seen` tokens up to itself, at every place up to the longest sample's end.
        lengths = np.array(batch.lengths, dtype=np.int64)
        seen = np.arange(1, max(lengths, default=0) + 1)
        chooses = seen >= budget + size
        chosen = np.where(chooses, budget + seen % size, seen)
        of_all = {"token_pairs": chosen, "block_pairs": np.where(chooses, seen // size, 0)}
        for name, of_token in of_all.items():
            sums = np.concatenate([[0], np.cumsum(of_token)])
            units[name] = int(sums[lengths].sum())
        return units

    @classmethod
    def decoder_layer(cls, operations: Operations, text: Any, number: int, rows: bool) -> bool:
        layer = operations.at("tokens", f"{cls.decoder}.layers.{number}")
        if text.has_ngrams(number):
            rows |= _ngrams(layer, text, rows)
        read, weights = _reader(layer, "attn_hyper_connection.", text, rows)
        rows |= cls.mixer(layer, text, number, read) | weights
        read, weights = _reader(layer, "mlp_hyper_connection.", text, rows)
        return rows | cls.experts(layer, text, read) | weights

    @classmethod
    def attention(cls, layer: Operations, text: Any, normed: bool) -> bool:
        heads, width = text.indexer_n_heads, text.indexer_head_dim
        scores = layer.without_backward()
        scores.matrix("", text.hidden_size * (heads + 1) * width, False)
        scores.at("block_pairs").matrix("", heads * width, False)
        return attention(layer, text, normed, query_parts=2)

    def last_norm(self, head: Operations, rows: bool) -> bool:
        inside = f"{self.decoder}.hyper_connection_mixer."
        return _reader(head, inside, self.config.text_config, rows, is_last=True)[0]


def _reader(
    layer: Operations, name: str, text: Any, rows: bool, is_last: bool = False
) -> tuple[bool, bool]:
    """Count a reader of the streams: whether gradients flow into what it reads, and into the
    weights with which it writes."""
    channels, rank = text.hc_count * text.hidden_size, text.hc_lowrank
    normed = layer.norm(f"{name}hc_norm", rows)
    inner = layer.linear(f"{name}input_mix_weight_down", channels, rank, normed)
    read = normed | layer.linear(f"{name}input_mix_weight_up", rank, channels, inner)
    if is_last:
        return read, False
    return read, layer.linear(f"{name}block_inject_weight", channels, text.hc_count, normed)


def _ngrams(layer: Operations, text: Any, rows: bool) -> bool:
    """Count the projections of embedded n-grams: whether gradients flow into what they add."""
    found = layer.trains("ple.ple_embedding.ngram_embedding.weight")
    width, channels = text.ple_embed_dim, text.hc_count * text.hidden_size
    key = layer.norm("ple.norm_key", layer.linear("ple.key_proj", width, channels, found))
    value = layer.linear("ple.value_proj", width, text.hidden_size, found)
    added = key | value | layer.norm("ple.norm_query", rows)
    return layer.norm("ple.norm_conv", added) or layer.trains("ple.conv1d.weight")
