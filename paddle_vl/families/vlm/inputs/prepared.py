"""A batch as the model takes it, complete: made of a collator's in a loader's workers, in NumPy.

Labels become target rows, and what would else be laid out in every step, places of patches and ends
of packed samples, comes with the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from paddle_vl.batch.positions import key_ends, patch_places
from paddle_vl.batch.rows import IGNORE_INDEX, target_rows
from paddle_vl.batch.schema import GRIDS, PIXELS, VLBatch

# Fields that become `target_rows`, `target_weights`, `target_sources` and `target_branches`.
LABEL_FIELDS = ("labels", "loss_weights", "label_sources", "label_branches")


def prepared(batch: Any, vision: Any = None) -> VLBatch:
    """A collator's batch, and those within it, complete.

    Args:
        vision: a tower's configuration, to lay out the patches; None where the model does it.
    """
    found: dict[str, Any] = {
        name: prepared(value, vision) if isinstance(value, dict) else value
        for name, value in with_target_rows(batch).items()
        if name not in LABEL_FIELDS
    }
    grids = [found[name] for name in GRIDS if name in found]
    if vision is not None and not found.keys().isdisjoint(PIXELS):
        found |= patch_places(np.concatenate(grids), vision)
    if "cu_seqlens" in found:
        found["packed_key_ends"] = key_ends(found["cu_seqlens"], found["input_ids"].shape[1])
    return cast(VLBatch, found)


@dataclass(frozen=True)
class PreparedCollator:
    """Collates with another collator, and prepares its batches.

    Attributes:
        target_sources: names of the sources whose target tokens the batches count.
    """

    collator: Any
    vision: Any

    def __call__(self, rows: Sequence[Any]) -> VLBatch:
        return prepared(self.collator(rows), self.vision)

    @property
    def target_sources(self) -> tuple[str, ...]:
        return getattr(self.collator, "target_sources", ())


def with_target_rows(batch: VLBatch) -> VLBatch:
    """The batch with `target_rows`, and `target_weights`, `target_sources` and `target_branches` if
    its labels have factors, sources and answers of pairs that they belong to.

    Unchanged if it has them, or no labels on the host.
    """
    labels_BL = batch.get("labels")
    if "target_rows" in batch or not isinstance(labels_BL, np.ndarray):
        return batch
    # Row i predicts label i + 1; the last row of a sample predicts nothing.
    targets_BL = np.full_like(labels_BL, IGNORE_INDEX)
    targets_BL[:, :-1] = labels_BL[:, 1:]
    targets_T = targets_BL.reshape(-1)
    added: Any = {"target_rows": target_rows(targets_T)}
    if "loss_weights" in batch:
        weights_T = np.roll(batch["loss_weights"], -1, axis=1).reshape(-1)
        added["target_weights"] = weights_T[added["target_rows"][0]]
    fields: Any = batch
    for name in ("sources", "branches"):
        if f"label_{name}" in batch:
            numbers_T = np.roll(fields[f"label_{name}"], -1, axis=1).reshape(-1)
            added[f"target_{name}"] = numbers_T[added["target_rows"][0]].astype(np.int64)
    return cast(VLBatch, {**batch, **added})
