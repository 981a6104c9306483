"""Intermediate values of a Qwen4-Exp under their golden names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddle_vl.nn.attention import RotaryTables
from paddle_vl.nn.dispatch import watched
from parity.qwen3_5 import DecoderRecording
from parity.recording import array

# Results of operations, in the order of the layers that call them.
_OF_EMBEDDINGS = {
    "ngram_rows": "ple_ids", "ngram_gates": "ple_gate", "dilated_conv_silu": "ple_conv",
}  # fmt: skip


class Qwen4Recording(DecoderRecording):
    """Records also what readers, embeddings of n-grams and indexers make."""

    def __init__(self, model):
        super().__init__(model)
        self._layers = dict(self._layers)
        self.layers = list(model.language_model.layers)
        for i, layer in enumerate(self.layers):
            self._layers[f"attn_in.{i}"] = layer.attn_hyper_connection
            self._layers[f"mlp_in.{i}"] = layer.mlp_hyper_connection
            if layer.ple is not None:
                self._layers |= {
                    f"ple_embed.{i}": layer.ple.ple_embedding,
                    f"ple_value.{i}": layer.ple.value_proj,
                    f"ple_out.{i}": layer.ple,
                }
        self.results: dict[str, list[Any]] = {}

    def __enter__(self):
        def keep(operation: Any, args: tuple[Any, ...], result: Any) -> None:
            name = operation.__name__
            if name in (*_OF_EMBEDDINGS, "write_streams"):
                self.results.setdefault(name, []).append(array(result))
            if name == "chosen_blocks":
                self.results.setdefault(name, []).append((array(result), args[2]))

        self._watch = watched(keep)
        self._watch.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._watch.__exit__(None, None, None)

    def quantities(self, offsets: np.ndarray | None) -> dict[str, np.ndarray]:
        """As of `DecoderRecording`, streams too."""
        found = super().quantities(offsets)
        for i, layer in enumerate(self.layers):
            for name in ("attn", "mlp"):
                found[f"lm.{name}_inject.{i}"] = self.calls[f"{name}_in.{i}"][0][1]
            # A layer writes three times: its mixer's output, the shared expert's, all experts'.
            found[f"lm.streams_mid.{i}"] = self.results["write_streams"][3 * i]
            if layer.ple is not None:
                for name in ("ple_embed", "ple_out"):
                    found[f"lm.{name}.{i}"] = self.calls[f"{name}.{i}"][0][1]
                number = sum(each.ple is not None for each in self.layers[:i])
                for operation, name in _OF_EMBEDDINGS.items():
                    value = self.results[operation][number]
                    found[f"lm.{name}.{i}"] = value.reshape(len(found["lm.inputs_embeds"]), -1)
        return found

    def of_indexers(self, samples: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
        """What indexers make, and the tokens that queries attend to.

        Args:
            samples: row, first column and length of each sample.

        Returns:
            By golden names, `[B, L, ...]`; block keys are those of a row one sample after the
            other.
        """
        found, number = {}, 0
        for i, layer in enumerate(self.layers):
            if layer.mixer_name != "self_attn":
                continue
            x, tables = self.calls[f"mixer_out.{i} input"][0][:2]
            chosen = self.results.get("chosen_blocks", [])
            own = chosen[number] if chosen else None
            found |= _of_indexer(layer.self_attn.indexer, x, tables, samples, own, str(i))
            number += 1
        return found


def _of_indexer(
    indexer: Any,
    x_TD: np.ndarray,
    tables: RotaryTables,
    samples: list[tuple[int, int, int]],
    choice: tuple[np.ndarray, Any] | None,
    layer: str,
) -> dict[str, np.ndarray]:
    batch, length = tables.cos_TH.shape[:2]
    size = indexer.sizes.size
    queries, raw = map(array, indexer(paddle.to_tensor(x_TD), tables))
    queries, raw = (x.reshape(batch, length, *x.shape[1:]) for x in (queries, raw))
    counts = [0] * batch
    for row, _, count in samples:
        counts[row] += count // size
    keys = np.zeros([batch, max(counts), raw.shape[-1]], np.float32)
    # Numbered within each sample.
    most = max(count // size for _, _, count in samples)
    scores = np.full([batch, length, most], -1.0, np.float32)
    selected = np.zeros([batch, length, length], np.uint8)
    ends = [0] * batch
    for row, first, count in samples:
        blocks, begin = count // size, ends[row]
        ends[row] += blocks
        columns = first + np.arange(blocks * size)
        if blocks:
            cos, sin = (x[row, first : first + blocks * size : size] for x in tables)
            members = paddle.to_tensor(raw[row, columns])
            own = array(indexer.keys(members, RotaryTables(cos, sin)))
            keys[row, begin : begin + blocks] = own
            products = np.einsum("qhc,kc->hqk", queries[row, first : first + count], own)
            score = np.maximum(products, 0.0).sum(0) / own.shape[1] ** 0.5
            is_complete = (np.arange(count)[:, None] + 1) // size > np.arange(blocks)
            scores[row, first : first + count, :blocks] = np.where(is_complete, score, -1.0)
        selected[row, first : first + count, first : first + count] = np.tri(count)
    blocks_QJ, of_samples = choice or (raw, None)
    for part in of_samples.parts if of_samples is not None else ():
        for number in range(part.count):
            row, query = divmod(part.query + number, length)
            place = part.place + number
            seen = (blocks_QJ[part.number + number, :, None] * size + np.arange(size)).ravel()
            seen = np.r_[seen, (place + 1) // size * size : place + 1]
            selected[row, query] = 0
            selected[row, query, part.key - row * length + seen] = 1
    found = {
        "index_keys": raw, "index_q": queries, "block_keys": keys, "index_scores": scores,
        "selected": selected,
    }  # fmt: skip
    return {f"lm.{name}.{layer}": value for name, value in found.items()}


class IndexKeys:
    """Context manager that records the keys of every indexer, as they come during generation."""

    def __init__(self, model: Any):
        layers = enumerate(model.language_model.layers)
        self._indexers = {
            i: layer.self_attn.indexer for i, layer in layers if layer.mixer_name == "self_attn"
        }
        self._parts: dict[int, list[np.ndarray]] = {i: [] for i in self._indexers}

    def __enter__(self) -> "IndexKeys":
        def kept(number: int) -> Callable[..., Any]:
            def keep(layer: Any, inputs: Any, output: Any) -> None:
                batch = inputs[1].cos_TH.shape[0]
                raw = array(output[1])
                self._parts[number].append(raw.reshape(batch, -1, raw.shape[-1]))

            return keep

        self._hooks = [
            indexer.register_forward_post_hook(kept(i)) for i, indexer in self._indexers.items()
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def so_far(self) -> dict[int, np.ndarray]:
        """By layer, `[B, tokens, C]`."""
        return {i: np.concatenate(parts, axis=1) for i, parts in self._parts.items()}
