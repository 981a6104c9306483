"""Loss and batch adapter of vision-language models.

With sharding stages 2 and 3 every layer issues collectives. A rank whose batch has no image then
runs the vision tower on a dummy image that no token receives, and a rank without a batch left runs
a batch of padding. Neither affects loss or gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, concat, nn

from paddle_vl.batch.row_slices import RowSlice
from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.model import VLOutput
from paddle_vl.nn.objective import BatchAdapter, Loss
from paddle_vl.nn.placement import Context

# What is not in a slice.
_CUT = ("cu_seqlens", "packed_key_ends", "visual_source_indices")
_OF_TARGETS = (
    *("target_weights", "target_sources", "target_branches"),
    *("sampler_log_probs", "old_log_probs", "reference_log_probs"),
)


class VLLoss(Loss):
    """Mean cross entropy over target tokens, plus the load-balancing loss if the model has one."""

    terms: Mapping[str, float] = {"loss": 1.0}
    reported_counts: Mapping[str, str] = {"loss": "target_tokens"}

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        if totals[0] == 0:
            raise ValueError(
                f"the {num_batches} micro-batch(es) of this step have no target token, every "
                "label is -100: nothing can be learned from them; check that the samples have "
                "assistant turns within data.max_length"
            )

    def share(
        self, output: VLOutput, totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        loss = output.share_of_step(totals[0], num_batches)
        terms = loss.detach().astype("float32").reshape([1])
        return loss, terms if output.source_sums is None else concat([terms, output.source_sums])

    def sums(self, output: VLOutput) -> Tensor:
        assert output.loss_sum is not None, "a batch of the collator has labels"
        return output.loss_sum.reshape([1])

    def metric_counts(self, model: nn.Layer) -> dict[str, Tensor]:
        counts_LX = expert_counts(model)
        return {} if counts_LX is None else {"tokens_per_expert": counts_LX}

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, float]:
        counts = totals.get("tokens_per_expert")
        if counts is None:
            return {}
        # Over the experts of all layers.
        return {
            "tokens_per_expert_min": int(counts.min()),
            "tokens_per_expert_mean": round(float(counts.mean()), 1),
            "tokens_per_expert_max": int(counts.max()),
        }


class VLBatchAdapter(BatchAdapter[VLBatch]):
    """The one optional branch is the vision tower."""

    def forward(self, model: nn.Layer, batch: VLBatch) -> Any:
        return model(batch)

    def synchronized(self, batch: VLBatch, needed: Sequence[int], model: nn.Layer) -> VLBatch:
        if (
            needed[0]
            and model.placement.ops.layers_are_collective
            and not batch.optional_branches[0]
        ):
            return with_unused_image(batch, model.config.vision_config)
        return batch

    def idle_batch(self, model: nn.Layer) -> VLBatch:
        ops = model.placement.ops
        empty = prepared(empty_batch(ops.row_part.size * ops.context.size))
        return empty if ops.context.size == 1 else sliced(empty, ops.context)


def with_unused_image(batch: VLBatch, vision: Any) -> VLBatch:
    """The batch with a dummy image of a single merged row that no token receives.

    Args:
        vision: a tower's configuration.
    """
    merge = vision.spatial_merge_size
    no_rows = np.zeros([0], dtype=np.int64)
    return batch | {
        "pixel_values": np.zeros([merge**2, vision.patch_dim], dtype=np.float32),
        "image_grid_thw": np.array([[1, merge, merge]], dtype=np.int64),
        "visual_update_indices": no_rows,
        "visual_gather_indices": no_rows,
        "num_unused_visual_rows": 1,
        # All ranks get the one row.
        "visual_rows_of_ranks": None,
    }


def sliced(batch: VLBatch, context: Context) -> VLBatch:
    """A context-parallel rank's slice of a batch, see `paddle_vl.batch.row_slices`: one row.

    Images are in it whole, as every rank may hold some tokens of each. A slice has the targets of
    its rows.

    Args:
        batch: padded on the right; its counts are those of the whole.

    Raises:
        ValueError: `size` does not divide the token rows.
    """
    whole = batch
    rows, length = whole["input_ids"].shape
    offsets_S = whole.get("cu_seqlens", np.arange(rows + 1) * length)
    offsets_S = offsets_S.astype(np.int64)
    own = RowSlice.of(offsets_S, context.rank, context.size)
    found: dict[str, Any] = dict.fromkeys(_CUT)
    for name in ("input_ids", "attention_mask", "position_ids"):
        axes = [*whole[name].shape[:-2], -1]
        found[name] = whole[name].reshape(axes)[..., own.rows][..., None, :]
    found["slice_key_rows"] = own.key_rows
    if context.exchanges_heads:
        all_rows = RowSlice.of(offsets_S, 0, 1)
        found |= {"slice_key_rows": all_rows.key_rows, "slice_orders": own.orders}
    found |= _own_targets(whole, own)
    if "visual_update_indices" in whole:
        found |= _own_visual(whole, own, context)
    if "real_row_indices" in whole:
        real_R = whole["real_row_indices"]
        found["real_row_indices"] = own.places[real_R[own.chosen(real_R)]]
    return whole | found


def _own_targets(whole: VLBatch, own: RowSlice) -> dict[str, np.ndarray]:
    rows_N, targets_N = whole["target_rows"]
    chosen_N = own.chosen(rows_N)
    if chosen_N.any():
        found = {"target_rows": np.stack([own.places[rows_N[chosen_N]], targets_N[chosen_N]])}
        return found | {name: whole[name][chosen_N] for name in _OF_TARGETS if name in whole}
    # The head runs on a row without a target, see `paddle_vl.batch.positions.target_rows`.
    found = {"target_rows": np.array([[0], [IGNORE_INDEX]])}
    return found | {name: np.zeros_like(whole[name][:1]) for name in _OF_TARGETS if name in whole}


def _own_visual(whole: VLBatch, own: RowSlice, context: Context) -> dict[str, Any]:
    """The visual rows of the slice."""
    update_M, numbers_M = whole["visual_update_indices"], whole["visual_gather_indices"]
    chosen_M, source_M = own.chosen(update_M), whole.get("visual_source_indices")
    if source_M is not None:
        numbers_M = source_M[numbers_M]
    own_M, taken_M = update_M[chosen_M], numbers_M[chosen_M]
    found: dict[str, Any] = {"visual_update_indices": own.places[own_M]}
    if context.shards_of_slice:
        # A shard gets its rows in their order.
        shard_M = own.shards(update_M, context.shards_of_slice)
        ends = np.cumsum(np.bincount(shard_M, minlength=context.size * context.shards_of_slice))
        rows = np.split(numbers_M[np.argsort(shard_M, kind="stable")], ends[:-1])
        shard_of_own_M = shard_M[chosen_M]
        places_M = np.arange(len(own_M)) - np.searchsorted(shard_of_own_M, shard_of_own_M)
        return {**found, "visual_gather_indices": places_M, "visual_rows_of_ranks": rows}
    if source_M is None:
        return {**found, "visual_gather_indices": taken_M}
    # `source` is in the order of these rows.
    places_M = np.arange(len(taken_M))
    return {**found, "visual_gather_indices": places_M, "visual_source_indices": taken_M}


def empty_batch(length: int) -> dict[str, Any]:
    """One sample of padding without targets, as a collator's.

    Args:
        length: number of tokens, a multiple of the mp degree under sequence parallelism.
    """
    ids_BL = np.zeros([1, length], dtype=np.int64)
    return {
        "input_ids": ids_BL,
        "attention_mask": np.zeros_like(ids_BL),
        "labels": np.full_like(ids_BL, IGNORE_INDEX),
        "position_ids": np.zeros([3, 1, length], dtype=np.int64),
        "num_target_tokens": 0,
        "has_left_padding": False,
    }


def expert_counts(model: nn.Layer) -> Tensor | None:
    """Token rows of each expert in the last micro-batch, `[layers, experts]` int64.

    None without experts. Padding does not count. Layers of other pipeline stages are 0. Collective
    over mp ranks that route different rows.
    """
    text = model.config.text_config
    layers = [i for i in range(text.num_hidden_layers) if text.has_experts(i)]
    if not layers:
        return None
    own, zeros = model.tokens_per_expert(), paddle.zeros([text.num_experts], dtype="int64")
    counts_LX = paddle.stack([own.get(i, zeros) for i in layers])
    return model.placement.ops.sum_routing(counts_LX)
