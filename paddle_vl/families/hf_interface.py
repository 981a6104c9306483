"""What users of HF's libraries expect of a model: outputs by index, its size, arguments by name,
and adapters.

An argument of HF that is not one here is accepted at values that ask for nothing, and otherwise
refused with what to do instead. Nothing here imports Paddle at the top, for loader workers.
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, cast

import numpy as np

from paddle_vl.files.names import Foreign, without_foreign
from paddle_vl.files.text_file import shown

if TYPE_CHECKING:
    from paddle_vl.checkpoint.adapter_files import Adapter, StoredAdapter
    from paddle_vl.checkpoint.rules import StoredParameter
    from paddle_vl.checkpoint.safetensors_io import FileWriter, StoredTensor, TensorToWrite
    from paddle_vl.config.schema import LoRAConfig
    from paddle_vl.nn.master_weights import ParameterStore

P = ParamSpec("P")
R = TypeVar("R")


# Of a model's call.
FORWARD = {
    "past_key_values": Foreign("generate() and stream() keep keys and values: call one of them"),
    "use_cache": Foreign("generate() and stream() keep keys and values: call one of them"),
    "output_attentions": Foreign("attention keeps no weights in any kernel: leave it out"),
    "output_hidden_states": Foreign(
        "register a forward post hook on the layers of model.decoder_layers"
    ),
    "return_dict": Foreign("take output.to_tuple()", (None, True)),
    "inputs_embeds": Foreign("give input_ids: visual tokens find their rows by them"),
    "mm_token_type_ids": Foreign("input_ids tell images and videos apart: leave it out"),
    "cache_position": Foreign("positions come from input_ids and grids: leave it out"),
    "rope_deltas": Foreign("positions come from input_ids and grids: leave it out"),
}
_FETCHED = "the hub's environment variables say it, see docs/data.md"
_QUANTIZED = "weights are loaded in a floating point dtype: leave it out"
# Of `from_pretrained`.
LOADING = {
    "attn_implementation": Foreign(
        "kernels follow from device and dtype, FlashAttention on GPUs in bfloat16: leave it out",
        (None, "sdpa"),
    ),
    "cache_dir": Foreign(_FETCHED),
    "force_download": Foreign(_FETCHED),
    "load_in_4bit": Foreign(_QUANTIZED),
    "load_in_8bit": Foreign(_QUANTIZED),
    "local_files_only": Foreign(_FETCHED, (None, False, True)),
    "low_cpu_mem_usage": Foreign("tensors are read one at a time", (None, False, True)),
    "quantization_config": Foreign(_QUANTIZED),
    "token": Foreign(_FETCHED),
    "trust_remote_code": Foreign("no code of a folder is run: leave it out"),
    "use_safetensors": Foreign("weights are read from .safetensors only", (None, True)),
}


def loads_like_hf(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of `from_pretrained(cls, path, ...)`: HF's arguments.

    `path` may be the name of a model on a hub, with its `revision`. `torch_dtype` is `dtype`; a
    dtype may be torch's own. `device_map` may name the current device.

    Raises:
        RuntimeError: there is no such folder, and no such name on the hub.
        ValueError: an argument of HF that asks for something else; see `LOADING`.
    """

    untyped: Any = function

    @functools.wraps(function)
    def load(cls: Any, path: str | os.PathLike, *args: Any, **kwargs: Any) -> R:
        kwargs = without_foreign(kwargs, LOADING, "from_pretrained")
        device_map = kwargs.pop("device_map", None)
        if device_map is not None:
            import paddle

            # Models are built on Paddle's current device.
            here = paddle.get_device()
            same = {here, here.replace("gpu", "cuda"), here.split(":")[0].replace("gpu", "cuda")}
            if paddle.device.cuda.device_count() < 2:
                same.add("auto")
            if str(device_map) not in same:
                raise ValueError(
                    f"device_map is {shown(device_map)}, but a model is built on Paddle's current "
                    f"device, {here}: call paddle.set_device() first; it is on one device, and "
                    "only training divides it over several (parallel.mp_degree)"
                )
        dtype = kwargs.pop("torch_dtype", kwargs.get("dtype"))
        if dtype is not None:
            is_torchs = str(dtype).startswith("torch.")
            kwargs["dtype"] = str(dtype).removeprefix("torch.") if is_torchs else dtype
        from paddle_vl.files.hub import local_folder

        folder = local_folder(path, revision=kwargs.pop("revision", None))
        return untyped(cls, folder, *args, **kwargs)

    return cast(Any, load)


def id_rows(rows: Any) -> Any:
    """Token ids, a mask or labels `[B, L]`; lists as an int64 array, None as it is.

    Raises:
        ValueError: rows of different lengths, no integers, or another number of dimensions.
    """
    if isinstance(rows, list | tuple):
        lengths = {len(row) for row in rows if isinstance(row, list | tuple)}
        if len(lengths) > 1:
            raise ValueError(
                f"the batch has rows of {min(lengths)} to {max(lengths)} tokens: pad them on the "
                "left and give attention_mask, or let the processor do both"
            )
        rows = np.array(rows)
        if rows.dtype.kind not in "biu":
            raise ValueError(f"the batch has values of {rows.dtype}; integers are needed")
        rows = rows.astype(np.int64)
    if rows is not None and len(rows.shape) != 2:
        raise ValueError(
            f"the batch has the shape {list(rows.shape)}; [B, L] is needed: put a single row into "
            "a list"
        )
    return rows


class IndexedOutput(Mapping):
    """Base of an output dataclass that is indexed as HF's: by name, or by place without None."""

    def to_tuple(self) -> tuple:
        """The values that are not None, in the order of the fields."""
        return tuple(self.values())

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in list(self):
            raise KeyError(f"{key}: the output has {', '.join(self)}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        names: Any = fields(self)  # pyright: ignore[reportArgumentType]
        return (field.name for field in names if getattr(self, field.name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SizedModel:
    """Mixin of an `nn.Layer` with HF's names for its dtype and size."""

    parameters: Callable[[], list[Any]]

    @property
    def dtype(self) -> Any:
        """Paddle's dtype of the parameters, as of the first one."""
        return self.parameters()[0].dtype

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Number of parameters that this rank has; tied ones count once."""
        parameters = self.parameters()
        chosen = [p for p in parameters if not (only_trainable and p.stop_gradient)]
        return sum(int(np.prod(parameter.shape)) for parameter in chosen)


class AdaptableModel(ABC):
    """Mixin of a `paddle_vl.checkpoint.reading.Materializable` that may have low-rank adapters.

    Methods import the code of adapters themselves, to keep a model's imports few.

    Attributes:
        adapter: the low-rank adapters; None without.
        name_or_path: folder that the weights come from; None for fresh weights.
        adapter_prefix: what stands before the keys of `stored_parameters` in names of adapters.
        output_module: the head, which `all-linear` leaves out.
        peft_task: PEFT's task_type.
        tied_embedding: module of the embedding whose weight the head `lm_head` has too; None
            without such.
    """

    adapter: "Adapter | None" = None
    name_or_path: str | None = None
    adapter_prefix: ClassVar[str] = ""
    output_module: ClassVar[str] = "lm_head"
    peft_task: ClassVar[str | None] = None
    tied_embedding: str | None = None
    stored_parameters: Callable[[], "list[StoredParameter]"]
    whole: Callable[[], Any]

    @property
    @abstractmethod
    def adapter_parts(self) -> Mapping[str, Sequence[str]]:
        """Named parts of the model, as patterns over its parameters, for settings of adapters."""

    def tensors_as_here(self, tensors: "dict[str, StoredTensor]") -> "dict[str, StoredTensor]":
        """An adapter's tensors in the shapes of this package."""
        return tensors

    def key_here(self, key: str) -> str:
        """The key in this package's files of one in an adapter's file."""
        return key

    def adapter_key(self, key: str) -> str:
        """The key in an adapter's file of one in this package's files."""
        return key

    def add_lora(self, config: "LoRAConfig") -> None:
        """Add fresh low-rank adapters to linears and freeze all other parameters.

        With PEFT's initial values the output is unchanged until they are trained. The values come
        from Paddle's global random state and do not depend on how the model is sharded.

        Raises:
            ValueError: a pattern matches nothing, or the model has adapters already.
        """
        from paddle_vl.families.adapter import add_lora

        add_lora(self, config)

    def load_adapter(self, source: "str | Path | StoredAdapter") -> None:
        """Load adapters in PEFT's format; adds them if the model has none.

        Args:
            source: their folder, or what was read of it.

        Raises:
            ValueError: the adapters do not fit the model, or differ from those that it has.
            RuntimeError: files are missing or damaged.
        """
        from paddle_vl.families.adapter import load_adapter

        load_adapter(self, source)

    def save_adapter(
        self,
        path: str | Path,
        write: "FileWriter | None" = None,
        store: "ParameterStore | None" = None,
        others: "Iterable[TensorToWrite]" = (),
    ) -> None:
        """Write the adapters, without the base, in PEFT's format. All checkpoint ranks call it.

        Args:
            write, store: as of `save_pretrained`.
            others: tensors of the first rank for the same file.

        Raises:
            ValueError: the model has no adapters.
        """
        from paddle_vl.checkpoint.safetensors_io import write_file
        from paddle_vl.families.adapter import save_adapter

        save_adapter(self, Path(path), write or write_file, store, others)

    def merge_lora(self) -> None:
        """Merge the adapters into the weights, in float32, and remove them.

        Raises:
            ValueError: the model has no adapters.
        """
        from paddle_vl.families.adapter import merge_lora

        merge_lora(self)

    def adapter_names(self) -> set[str] | None:
        """Keys of all parameters that the adapters train; None without adapters."""
        if self.adapter is None:
            return None
        from paddle_vl.families.adapter import placed

        return {item.key for item in placed(self.whole()) if self.adapter.owns(item.key)}

    def hf_named_parameters(self) -> Iterator[tuple[str, Any]]:
        """This rank's parameters by their keys in files; a fused one under those of its linears."""
        return ((item.key, item.parameter) for item in self.stored_parameters())

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes of all parameters of the model, on all ranks, by their keys in files."""
        return {item.key: item.stored_shape for item in self.whole().stored_parameters()}

    def separate(self, weights: Iterable[Any]) -> None:
        """Give the linears of some fused weights a weight each, see `paddle_vl.nn.linear`."""
        from paddle_vl.nn.linear import separate

        model: Any = self
        separate(model, weights, model.placement.layers.separate_projections)

    def base_parameters(self) -> "list[StoredParameter]":
        """This rank's parameters without the factors of adapters."""
        from paddle_vl.checkpoint.adapter_files import is_low_rank

        return [item for item in self.stored_parameters() if not is_low_rank(item.key)]

    def with_adapter_of(self, other: Any) -> Any:
        """This model, with parameters without storage for the adapters of another."""
        if other.adapter is not None:
            from paddle_vl.families.adapter import attach

            attach(self, other.adapter)
        return self
