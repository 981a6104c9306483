"""What the vision tower gives PaddleFleet's `GPTEmbedding`, checked, and where it belongs.

Shapes as in `embedding.py`. Source of the interface: `models/gpt/gpt_embedding.py`,
`tensor_parallel/mappings.py` and `parallel_state.py` of PaddleFleet.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_vl.batch.visual_index import check_visual_counts

VISUAL_INPUTS = tuple(
    f"{prefix}{kind}_embeds" for prefix in ("", "deepstack_") for kind in ("image", "video")
)
# Merged embeddings `[M, D]` and then the levels, by modality.
Sources = dict[str, list[Tensor]]


class VisualRows(NamedTuple):
    """Token rows of the batch that hold a visual token.

    Attributes:
        mask: `[B, S]` bool, True there.
        by_kind: `[M]` int64, those of images, then those of videos, batch-major within a kind.
        order: `[M]` int64, place in `by_kind` of each of them in reading order; None for one kind,
            whose order it is.
    """

    mask: Tensor
    by_kind: Tensor
    order: Tensor | None

    @property
    def in_order(self) -> Tensor:
        if self.order is None:
            return self.by_kind
        return paddle.index_select(self.by_kind, self.order)


def given_sources(config: Any, dict_args: dict[str, Any]) -> Sources:
    """Merged embeddings and levels, `[M, D]` each, by modality; without those that are absent.

    Raises:
        ValueError: numbers of rows or levels differ, or there is nothing to place them by.
    """
    sources = {}
    for kind in ("image", "video"):
        embeds = dict_args.get(f"{kind}_embeds")
        levels = list(dict_args.get(f"deepstack_{kind}_embeds") or [])
        if embeds is None and levels:
            raise ValueError(
                f"deepstack_{kind}_embeds has {len(levels)} levels but {kind}_embeds is missing: "
                "pass both outputs of the vision tower"
            )
        if embeds is None:
            continue
        rows = [level.shape[0] for level in levels]
        if any(number != embeds.shape[0] for number in rows):
            raise ValueError(
                f"{kind}_embeds has {embeds.shape[0]} rows but deepstack_{kind}_embeds has {rows}: "
                "the tower gives each level one row per merged embedding"
            )
        sources[kind] = [embeds, *levels]
    numbers = {kind: len(source) - 1 for kind, source in sources.items()}
    if len(set(numbers.values())) > 1:
        raise ValueError(
            f"images have {numbers['image']} deepstack levels and videos {numbers['video']}: pass "
            "the levels of both, or of neither"
        )
    names = " and ".join(f"{kind}_embeds" for kind in sources)
    if sources and dict_args.get("input_ids") is None:
        raise ValueError(
            f"{names} without input_ids: their places are unknown; pass input_ids as well"
        )
    if sources and not getattr(config, "multimodal_embedding", True):
        raise ValueError(
            f"{names} with multimodal_embedding=False: set it to True in the text config, as "
            "PaddleFleet's Qwen3-VL and Qwen3.5 do"
        )
    return sources


def find_rows(config: Any, input_ids: Tensor, sources: Sources) -> VisualRows:
    """The token rows of the sources: one search a kind, and nothing is read on the host.

    Raises:
        ValueError: placeholders and embeddings are not equally many.
    """
    masks = [input_ids == getattr(config, f"{kind}_token_id") for kind in sources]
    places = [nonzero(mask.reshape([-1])) for mask in masks]
    counts = {kind: (0, 0) for kind in ("image", "video")} | {
        kind: (rows.shape[0], source[0].shape[0])
        for rows, (kind, source) in zip(places, sources.items(), strict=True)
    }
    check_visual_counts(*counts["image"], *counts["video"])
    if len(places) == 1:
        return VisualRows(masks[0], places[0], None)
    by_kind = paddle.concat(places)
    return VisualRows(functools.reduce(paddle.logical_or, masks), by_kind, paddle.argsort(by_kind))


def in_reading_order(
    sources: Sequence[Sequence[Tensor]], rows: VisualRows, group: Any, dtype: Any
) -> list[Tensor]:
    """Tensors of each kind by place in its list, as those of the batch `[M, D]`, contiguous.

    Ranks that share a sequence hold equal copies and use different rows, so the gradient of a copy
    is only a part. One all-reduce sums it, for all tensors together.

    Args:
        sources: of each kind, equally many.
        group: of the ranks that share a sequence, None without them.
    """
    whole = [joined(of_kinds, dtype) for of_kinds in zip(*sources, strict=True)]
    if whole and whole[0].shape[0] and group is not None and group.nranks > 1:
        mappings = published("tensor_parallel.mappings")
        packed = paddle.concat(whole)
        packed = mappings.copy_to_tensor_model_parallel_region(packed, group=group)
        whole = paddle.split(packed, len(whole))
    if rows.order is not None:
        whole = [paddle.index_select(tensor, rows.order) for tensor in whole]
    return [tensor.contiguous() for tensor in whole]


def joined(tensors: Sequence[Tensor], dtype: Any) -> Tensor:
    """Rows of the tensors, one after the other, in a dtype; one tensor is not copied."""
    tensors = [tensor.astype(dtype) for tensor in tensors]
    return tensors[0] if len(tensors) == 1 else paddle.concat(tensors)


def nonzero(mask: Tensor) -> Tensor:
    """Positions of the True entries of a 1-D mask: `[M]` int64. Waits for the device."""
    return paddle.nonzero(mask).reshape([-1])


def sequence_group(embedding: Any) -> Any:
    """The group that shares a sequence; None without sequence parallelism."""
    if not embedding.config.sequence_parallel:
        return None
    group = getattr(getattr(embedding, "embedding", None), "tp_group", None)
    if group is None:
        state = published("parallel_state")
        group = state.get_tensor_model_parallel_group(check_initialized=False)
    return group


def published(module: str) -> Any:
    """A module of PaddleFleet by its name below the package, as `models.gpt.gpt_embedding`.

    Raises:
        ImportError: PaddleFleet is not installed, or its version has no such module.
    """
    try:
        return importlib.import_module(f"paddlefleet.{module}")
    except ImportError as error:
        raise ImportError(
            f"paddlefleet.{module} cannot be imported: {error}. "
            "paddle_vl.integrations.paddlefleet needs PaddleFleet, which is not a requirement of "
            "this package; install the paddlefleet wheel for your GPU build of Paddle"
        ) from error
