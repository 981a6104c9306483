"""Low-rank adapters of several folders on one base model, chosen for each token row.

The factors of all adapters of a weight are stacked, those of the linears fused in it side by side:
a token row takes its adapter's. Shapes: T token rows, I input and O output features of a weight, n
adapters, R the ranks of all linears of a weight together.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.adapter_files import (
    A_KEY,
    B_KEY,
    MAGNITUDE_KEY,
    StoredAdapter,
    is_low_rank,
    with_adapter,
)
from paddle_vl.checkpoint.rules import StoredParameter, by_parameter
from paddle_vl.families.adapter import adapter_of
from paddle_vl.nn.linear import biased_linear, column_slices, use_product


class RowAdapters:
    """Gives the linears of a model the adapters of several folders.

    Args:
        model: with folders, without adapters of its own.
        folders: in PEFT's format, by the names that rows have for them; None for a model that runs
            as it is, with the adapters that it may have.

    Attributes:
        folders: as given.
        numbers: of the adapters by name; 0 is the base, None.
        of_tower: names of those that change the vision tower.
        chosen: the adapter of all token rows, or int64 `[T]` that of each.

    Raises:
        ValueError: an adapter does not fit the model, or trains more than low-rank factors.
        RuntimeError: files are missing or damaged.
    """

    def __init__(self, model: Any, folders: Mapping[str, Path] | None):
        if model.adapter is not None and folders is not None:
            raise ValueError(
                "the model has an adapter, so it is no base: merge_lora() first, or load the base "
                "and give the adapter's folder a name here"
            )
        self.folders = folders = folders or {}
        self.numbers = {name: number for number, name in enumerate([None, *folders])}
        self.of_tower: set[str] = set()
        self.chosen: int | Tensor = 0
        adapters = {name: _read(model, Path(folder)) for name, folder in folders.items()}
        tower = {id(parameter) for parameter in model.visual.parameters()}
        products = []
        for items in by_parameter(model.stored_parameters()):
            weight, modules = items[0].parameter, [i.key.removesuffix(".weight") for i in items]
            adapting = {name for name, own in adapters.items() if own.sizes.keys() & {*modules}}
            if adapting:
                factors = _stacked(items, modules, list(adapters.values()))
                products.append((weight, partial(self._product, factors)))
                self.of_tower |= adapting if id(weight) in tower else set()
        # None, where a folder does not fit.
        for weight, product in products:
            use_product(weight, product)
        self._weights = [weight for weight, _ in products]

    def with_folder(self, model: Any, name: str, folder: Path) -> "RowAdapters":
        """The adapters with another one, or another folder of one, in place of these."""
        found = RowAdapters(model, {**self.folders, name: folder})
        adapted = {id(weight) for weight in found._weights}
        for weight in self._weights:
            if id(weight) not in adapted:
                use_product(weight, None)
        return found

    def _product(self, factors: list[Tensor], x_TI: Tensor, weight: Tensor, bias: Any) -> Tensor:
        base = paddle.matmul(x_TI, weight) if bias is None else biased_linear(x_TI, weight, bias)
        chosen = self.chosen
        if isinstance(chosen, int):
            if chosen == 0:
                return base
            A, B, *scales = (each[chosen] for each in factors)
            change = paddle.matmul(paddle.matmul(x_TI, A), B)
        else:
            A, B, *scales = (paddle.index_select(each, chosen) for each in factors)
            change = paddle.bmm(paddle.bmm(x_TI.unsqueeze(1), A), B).squeeze(1)
        if not scales:
            return base + change
        without = base if bias is None else base - bias
        return base + (scales[0] - 1.0) * without + scales[0] * change


def _read(model: Any, folder: Path) -> StoredAdapter:
    stored = StoredAdapter.read(folder, model.key_here)
    stored.tensors.update(model.tensors_as_here(stored.tensors))
    adapter = adapter_of(model, stored)
    others = [key for key in stored.tensors if not is_low_rank(key)]
    if adapter.saved or others or model.output_module in adapter.sizes:
        raise ValueError(
            f"{folder} trains {', '.join([*adapter.saved, *others]) or model.output_module}, which "
            "cannot differ from row to row: merge this adapter and serve it as a model of its own"
        )
    return stored


def _stacked(
    items: list[StoredParameter], modules: list[str], adapters: list[StoredAdapter]
) -> list[Tensor]:
    """The factors of a weight, of whose linears each adapter adapts some, the first of each zero,
    or one, for the base: A `[n + 1, I, R]`; B with the scaling, `[n + 1, R, O]`; and with DoRA the
    scales of the outputs, `[n + 1, O]`."""
    stored_shapes = [item.stored_shape for item in items]
    outs = column_slices([shape[0] for shape in stored_shapes])
    ranks = [max([a.sizes[m].r for a in adapters if m in a.sizes], default=0) for m in modules]
    parts, count = column_slices(ranks), len(adapters) + 1
    A = np.zeros([count, stored_shapes[0][1], sum(ranks)], np.float32)
    B = np.zeros([count, sum(ranks), outs[-1].stop], np.float32)
    scales = np.ones([count, outs[-1].stop], np.float32)
    for number, adapter in enumerate(adapters, 1):
        for item, module, out, part in zip(items, modules, outs, parts, strict=True):
            if module not in adapter.sizes:
                continue
            own = {
                end: adapter.tensors[module + end].read().astype(np.float32)
                for end in (A_KEY, B_KEY, MAGNITUDE_KEY)
                if module + end in adapter.tensors
            }
            rank, (rows, columns) = own[A_KEY].shape[0], item.stored_shape
            if own[A_KEY].shape != (rank, columns) or own[B_KEY].shape != (rows, rank):
                raise ValueError(
                    f"{adapter.folder} has factors of shapes {own[A_KEY].shape} and "
                    f"{own[B_KEY].shape} for {module}, a weight of {item.stored_shape}: it belongs "
                    "to another base"
                )
            scaling = adapter.config.scaling(*adapter.sizes[module])
            used = slice(part.start, part.start + rank)
            A[number, :, used] = own[A_KEY].T
            B[number, used, out] = own[B_KEY].T * np.float32(scaling)
            if MAGNITUDE_KEY in own:
                weight = item.parameter.astype("float32").numpy()[:, out].T
                directions = {end: own[end] for end in (A_KEY, B_KEY)}
                norms = np.linalg.norm(with_adapter(weight, directions, scaling), axis=1)
                scales[number, out] = own[MAGNITUDE_KEY] / norms
    factors = (A, B, scales) if (scales != 1).any() else (A, B)
    return [paddle.to_tensor(each).astype(items[0].parameter.dtype) for each in factors]
