"""`GPTEmbedding` of PaddleFleet with the visual indices of a step.

Shapes: B batch, S padded length, D width; mp ranks share a sequence under sequence parallelism;
M visual embeddings of the batch, M_local those in this rank's token rows; G deepstack levels.
Hidden states are `[B, S, D]`, or `[S / mp, B, D]` under sequence parallelism.

Source of the interface: `models/gpt/gpt_embedding.py`, `tensor_parallel/mappings.py` and
`parallel_state.py` of PaddleFleet.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.batch.visual_index import (
    RowPart,
    VisualIndices,
    check_visual_counts,
    compute_visual_indices,
)

# Later releases of PaddleFormers carry PaddleFleet's modules in a package of their own.
_HOMES = ("paddlefleet", "paddleformers.fleet")
_VISUAL_INPUTS = tuple(
    f"{prefix}{kind}_embeds" for prefix in ("", "deepstack_") for kind in ("image", "video")
)


@functools.cache
def indexed_embedding(parent: Any) -> type:
    """`IndexedGPTEmbedding` over PaddleFleet's `GPTEmbedding`, or over a subclass of it."""
    if getattr(parent, "_has_visual_indices", False):
        return parent

    class IndexedGPTEmbedding(parent):
        """`GPTEmbedding` which finds the visual token rows once per step.

        It has the parent's constructor. The parent embeds the text, cuts the sequence and makes the
        rotary embedding; the visual embeddings are placed here, in this rank's token rows.
        """

        _has_visual_indices = True

        def forward(
            self,
            dict_args: dict[str, Any],
            decoder_input: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> dict[str, Any]:
            """The parent's output with visual rows in place, and what deepstack levels need.

            Args:
                dict_args: as of the parent: `input_ids` `[B, S]` and optionally `image_embeds`,
                    `video_embeds` `[M, D]`, and lists `deepstack_image_embeds`,
                    `deepstack_video_embeds` of G tensors `[M, D]`.
                decoder_input: embedded text in the parent's layout, instead of `input_ids`' own.
                packed_seq_params: passed on.

            Returns:
                The parent's entries, and with images or videos: `visual_pos_masks` `[B, S]` bool;
                `visual_update_indices` `[M_local]` int64, rows of the local `[B, S / mp]` token
                rows, batch-major; `visual_gather_indices` `[M_local]` int64, number of their
                embedding in reading order; `deepstack_visual_emb`, G tensors `[M, D]` in reading
                order, as of the parent.

            Raises:
                ValueError: embeddings do not fit the placeholders, the levels or each other; mp
                    does not divide S; or the parent's hidden states have another layout.
            """
            sources = _sources(self.config, dict_args)
            if not sources:
                return super().forward(dict_args, decoder_input, packed_seq_params)
            text_args = dict_args | dict.fromkeys(_VISUAL_INPUTS)
            outputs = super().forward(text_args, decoder_input, packed_seq_params)
            return outputs | _visual_outputs(self, dict_args["input_ids"], sources, outputs)

    IndexedGPTEmbedding.__name__ = IndexedGPTEmbedding.__qualname__ = f"Indexed{parent.__name__}"
    return IndexedGPTEmbedding


def hidden_rows(config: Any, update: Tensor, hidden: Tensor) -> Tensor:
    """Row in the flattened hidden states of each row in the local `[B, S / mp]` token rows."""
    if not config.sequence_parallel or hidden.ndim != 3 or hidden.shape[1] == 1:
        return update
    length, batch = hidden.shape[:2]
    return update % length * batch + update // length


def local_rows(whole: Tensor, update: Tensor, gather: Any) -> Tensor:
    """This rank's rows of embeddings in reading order; all of them are in order already."""
    return whole if whole.shape[0] == update.shape[0] else paddle.index_select(whole, gather)


def _sources(config: Any, dict_args: dict[str, Any]) -> dict[str, list[Tensor]]:
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
            "PaddleFormers' Qwen3-VL does"
        )
    return sources


def _visual_outputs(
    embedding: Any,
    input_ids: Tensor,
    sources: dict[str, list[Tensor]],
    outputs: dict[str, Any],
) -> dict[str, Any]:
    """The entries that images and videos add to the embedding's output, or replace in it."""
    config, hidden = embedding.config, outputs["hidden_states"]
    # Without sequence parallelism every rank has all rows, and whole gradients.
    group = _tensor_parallel_group(embedding) if config.sequence_parallel else None
    part = RowPart() if group is None else RowPart(group.rank, group.nranks)
    _check_layout(hidden, input_ids, config.sequence_parallel, part)
    masks = {kind: input_ids == getattr(config, f"{kind}_token_id") for kind in sources}
    indices = _indices(masks, sources, part)
    if not any(source[0].shape[0] for source in sources.values()):
        return {}
    merged, *levels = _in_reading_order(
        list(sources.values()), indices, group, home_of(type(embedding)), hidden.dtype
    )
    rows_TD = paddle.scatter(
        hidden.reshape([-1, hidden.shape[-1]]),
        hidden_rows(config, indices.update, hidden),
        local_rows(merged, indices.update, indices.gather),
    )
    visual = {
        "hidden_states": rows_TD.reshape(hidden.shape),
        "visual_pos_masks": functools.reduce(paddle.logical_or, masks.values()),
        "visual_update_indices": indices.update,
        "visual_gather_indices": indices.gather,
    }
    return visual | ({"deepstack_visual_emb": levels} if levels else {})


def _tensor_parallel_group(embedding: Any) -> Any:
    """The group that shares a sequence, None without one."""
    group = getattr(getattr(embedding, "embedding", None), "tp_group", None)
    if group is None:
        state = published("parallel_state", home_of(type(embedding)))
        group = state.get_tensor_model_parallel_group(check_initialized=False)
    return group


def _check_layout(hidden: Tensor, input_ids: Tensor, by_sequence: bool, part: RowPart) -> None:
    batch, length = input_ids.shape
    start, stop = part.bounds(length, of="tokens of a sample (padded length)")
    expected = [stop - start, batch] if by_sequence else [batch, length]
    if hidden.ndim != 3 or hidden.shape[:2] != expected:
        raise ValueError(
            f"GPTEmbedding gave hidden states {hidden.shape} for input_ids {input_ids.shape}; "
            f"expected {[*expected, 'D']} with sequence_parallel={by_sequence} and {part.size} "
            "tensor-parallel ranks: multi-token prediction and context parallelism are not "
            "supported with images"
        )


def _indices(
    masks: dict[str, Tensor], sources: dict[str, list[Tensor]], part: RowPart
) -> VisualIndices:
    """The indices of this rank, after a check that placeholders and embeddings are equally many."""
    first, *second = masks.values()
    indices = compute_visual_indices(
        first,
        second[0] if second else None,
        nonzero=_nonzero,
        part=part,
        layout="batch_slices",
    )
    if indices.source is None and part.size == 1:
        tokens = [indices.update.shape[0]]
    else:
        # A shard does not say how many placeholders the batch has, and a total not of which kind.
        tokens = [_nonzero(first.reshape([-1])).shape[0]]
    if indices.source is not None:
        tokens.append(indices.source.shape[0] - tokens[0])
    counts = {kind: (0, 0) for kind in ("image", "video")} | {
        kind: (number, source[0].shape[0])
        for (kind, source), number in zip(sources.items(), tokens, strict=True)
    }
    check_visual_counts(*counts["image"], *counts["video"])
    return indices


def _nonzero(mask: Tensor) -> Tensor:
    return paddle.nonzero(mask).reshape([-1])


def _in_reading_order(
    sources: Sequence[Sequence[Tensor]],
    indices: VisualIndices,
    group: Any,
    home: str,
    dtype: Any,
) -> list[Tensor]:
    """The merged embeddings and then each level, all rows of the batch `[M, D]`.

    Ranks that share a sequence hold equal copies and use different rows, so the gradient of a copy
    is only a part. One all-reduce sums it, for merged embeddings and levels together.
    """
    pairs = [[tensor.astype(dtype) for tensor in pair] for pair in zip(*sources, strict=True)]
    if group is not None and group.nranks > 1:
        packed = paddle.concat([tensor for pair in pairs for tensor in pair])
        mappings = published("tensor_parallel.mappings", home)
        packed = mappings.copy_to_tensor_model_parallel_region(packed, group=group)
        whole = paddle.split(packed, len(pairs))
    else:
        whole = [pair[0] if len(pair) == 1 else paddle.concat(pair) for pair in pairs]
    if indices.source is None:
        return whole
    return [paddle.index_select(rows, indices.source) for rows in whole]


def published(module: str, home: str | None = None) -> Any:
    """A module of PaddleFleet.

    Args:
        module: its name below the package, such as `models.gpt.gpt_embedding`.
        home: the package; None for the first one that has it.

    Raises:
        ImportError: PaddleFleet is not installed, or its version has no such module.
    """
    reasons = []
    for package in _HOMES if home is None else (home,):
        try:
            return importlib.import_module(f"{package}.{module}")
        except ImportError as error:
            reasons.append(f"{package}.{module} cannot be imported: {error}")
    raise ImportError(
        "; ".join(reasons) + ". paddle_vl.integrations.paddlefleet needs PaddleFleet, which is not "
        "a requirement of this package; install the paddlefleet wheel for your GPU build of Paddle"
    )


def home_of(embedding: type) -> str:
    """The package of the `GPTEmbedding` that a class is or inherits from."""
    for base in embedding.__mro__:
        home, found, _ = base.__module__.partition(".models.")
        if base.__name__ == "GPTEmbedding" and found:
            return home
    return _HOMES[0]
