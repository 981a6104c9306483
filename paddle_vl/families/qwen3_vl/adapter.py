"""Low-rank adapters of a Qwen3-VL: adding, loading, saving and merging them."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.adapter_files import (
    A_KEY,
    Adapter,
    StoredAdapter,
    is_low_rank,
    write_adapter,
)
from paddle_vl.checkpoint.reading import (
    Materializable,
    MaterializeStep,
    check_keys,
    set_value,
    stored_values,
)
from paddle_vl.checkpoint.rules import PatchKernel, StoredParameter, by_parameter
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.checkpoint.writing import STORED_DTYPES, parameter_array
from paddle_vl.config.patterns import matching_names
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.qwen3_vl.checkpoint_map import HEAD_KEY, with_experts_as_here
from paddle_vl.families.qwen3_vl.settings import PARTS
from paddle_vl.nn.linear import AdaptableLinear, fused_columns
from paddle_vl.nn.lora import LowRankSettings, initial_a
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import Tie

ALL_LINEAR = "all-linear"
_HEAD = HEAD_KEY.removesuffix(".weight")
_EMBEDDING = "model.language_model.embed_tokens"
# Parts as modules, whose parameters the patterns fit.
_PART_MODULES = {
    part: [pattern.removesuffix(".*") for pattern in patterns] for part, patterns in PARTS.items()
}


class AdaptableModel(Materializable, nn.Layer):
    """What the model inherits of adapters.

    Attributes:
        adapter: which ones it has; None without.
        name_or_path: folder that the weights come from; None for fresh ones.
    """

    adapter: Adapter | None
    name_or_path: str | None

    def add_lora(self, config: LoRAConfig) -> None:
        """Put fresh adapters beside linears and freeze what is not of them.

        They change no output before they are trained. Their values are drawn once from Paddle's
        global random state, the same however the model is spread over processes.

        Raises:
            ValueError: a pattern that fits nothing; the model has adapters already.
        """
        if self.adapter is not None:
            raise ValueError("the model has adapters already: merge_lora() first, to add others")
        targets, saved = self._resolved(config)
        self._attach(Adapter(config, targets, saved, self.name_or_path))
        # Drawn behind the weights of the model, if these are.
        seed = cache(lambda: paddle.randint(0, 2**31 - 1, [1]).item())
        self.materialize_too(
            lambda: [
                MaterializeStep(item.parameter, partial(_draw_adapter, item, seed))
                for item in self._adapter_parameters()
                if is_low_rank(item.key)
            ]
        )

    def load_adapter(self, path: str | Path) -> None:
        """Fill the model's adapters from a folder in PEFT's format, or add those that it holds.

        Raises:
            ValueError: the folder's adapters do not fit the model, or others than its own.
            RuntimeError: files are missing or damaged.
        """
        path = Path(path)
        stored = StoredAdapter.read(path)
        adapter = self._adapter_of(stored)
        if self.adapter is None:
            self._attach(adapter)
        elif _shape_of(self.adapter) != _shape_of(adapter):
            raise ValueError(
                f"the model's adapters are {_described(self.adapter)}, those in {path} are "
                f"{_described(adapter)}: merge_lora() first, to load others"
            )
        tensors = with_experts_as_here(stored.tensors, self.config)
        # A weight of the base may come with the adapter beside it.
        wanted = [
            item
            for item in self._whole().stored_parameters()
            if adapter.owns(item.key) or item.key in tensors
        ]
        check_keys(path, tensors, wanted, set(), "the model as an adapter")

        def read() -> list[MaterializeStep]:
            held = [item for item in self.stored_parameters() if item.key in tensors]
            return stored_values(held, tensors)

        self.materialize_too(read)

    def save_adapter(
        self,
        path: str | Path,
        write: FileWriter = write_file,
        store: ParameterStore | None = None,
    ) -> None:
        """Write the adapters in PEFT's format, without the base.

        All processes that hold parts of the model call this together.

        Args:
            store: of the model in training, see `paddle_vl.checkpoint.writing`.

        Raises:
            ValueError: the model has none.
        """
        adapter, ranks, path = self._own_adapter(), self.placement.checkpoint_ranks, Path(path)
        items = [
            item
            for item in self._adapter_parameters()
            if item.table[item.parameter].tie is not Tie.COPY
        ]
        # PEFT reads one file: the first process has all of it for a moment.
        own = {item.key: parameter_array(item, store) for item in items}
        arrays = ranks.gather_stage_arrays(own)
        dtypes = ranks.gather_stages({i.key: STORED_DTYPES[i.parameter.dtype] for i in items})
        if not ranks.is_first:
            return
        path.mkdir(parents=True, exist_ok=True)
        tensors = [
            TensorToWrite(key, array.shape, dtypes_of_stage[key], lambda array=array: array)
            for arrays_of_stage, dtypes_of_stage in zip(arrays, dtypes, strict=True)
            for key, array in arrays_of_stage.items()
        ]
        write_adapter(path, adapter, tensors, write)

    def merge_lora(self) -> None:
        """Add the adapters to the weights beside them, in float32, and take them away.

        Raises:
            ValueError: the model has none.
        """
        self._own_adapter()
        for layer in self.sublayers():
            if isinstance(layer, AdaptableLinear):
                layer.merge_low_rank()
        self.adapter = None

    def adapter_names(self) -> set[str] | None:
        """HF names of what the adapters train, of the whole model; None without adapters."""
        if self.adapter is None:
            return None
        return {name for name in self.whole_shapes() if self.adapter.owns(name)}

    def _own_adapter(self) -> Adapter:
        if self.adapter is None:
            raise ValueError("the model has no adapters: add_lora() or load_adapter() first")
        return self.adapter

    def _attach(self, adapter: Adapter) -> None:
        """Adapters without values, where this rank has their modules; all else is frozen."""
        config = adapter.config
        settings = LowRankSettings(config.r, config.scaling, config.lora_dropout)
        self.separate(self._divided_by(adapter))
        linears = self._linears()
        with paddle.LazyGuard():
            for module in adapter.targets:
                if module in linears:
                    self.placement.layers.add_low_rank(linears[module], settings)
        self.adapter = adapter
        for key, parameter in self.hf_named_parameters():
            parameter.stop_gradient = not adapter.owns(key)

    def _adapter_parameters(self) -> list[StoredParameter]:
        return [item for item in self.stored_parameters() if self.adapter.owns(item.key)]

    def _divided_by(self, adapter: Adapter) -> list[Tensor]:
        """Fused weights of which a linear gets an adapter, or some are trained and others not."""
        divided = []
        for items in by_parameter(self.stored_parameters()):
            modules = {item.key.removesuffix(".weight") for item in items}
            owned = {adapter.owns(item.key) for item in items}
            if items[0].block is not None and (len(owned) > 1 or modules & set(adapter.targets)):
                divided.append(items[0].parameter)
        return divided

    def _linears(self) -> dict[str, nn.Layer]:
        """Linears of this rank by HF module, some in one layer if fused; a tied head is not one of
        its own."""
        items: dict[int, list[StoredParameter]] = {}
        for item in self.stored_parameters():
            items.setdefault(id(item.parameter), []).append(item)
        found = {}
        for layer in self.sublayers():
            weight = getattr(layer, "weight", None)
            if not isinstance(layer, AdaptableLinear) and not (
                weight is not None and fused_columns(weight)
            ):
                continue
            is_tied_head = layer is self.lm_head and self.config.tie_word_embeddings
            # HF's patch embedding is a convolution.
            if not is_tied_head and not isinstance(items[id(weight)][0].layout, PatchKernel):
                found |= {i.key.removesuffix(".weight"): layer for i in items[id(weight)]}
        return found

    def _resolved(self, config: LoRAConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The modules that the settings' patterns stand for, in the model's order."""
        whole, patterns = self._whole(), config.target_modules
        linears = list(whole._linears())
        patterns = [patterns] if isinstance(patterns, str) else patterns
        targets = set(linears) - {_HEAD} if ALL_LINEAR in patterns else set()
        named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
        targets |= _fitting(named, linears, "model.lora.target_modules")
        targets -= _fitting(config.exclude_modules, linears, "model.lora.exclude_modules")
        saved = self._saved_modules(whole, config.modules_to_save, "model.lora.modules_to_save")
        adapted = tuple(m for m in linears if m in targets and not _lies_in(m, saved))
        if not adapted:
            raise ValueError(
                f"model.lora.target_modules {patterns} without exclude_modules and modules_to_save "
                "leaves no linear to adapt"
            )
        return adapted, saved

    def _saved_modules(
        self, whole: "AdaptableModel", patterns: Sequence[str], setting: str
    ) -> tuple[str, ...]:
        """The outermost modules that fit; lists of layers taken apart, which PEFT cannot wrap."""
        modules = _modules_of(key for key, _ in whole.hf_named_parameters())
        fitting = _fitting(patterns, modules, setting, _PART_MODULES)
        saved: list[str] = []
        for module in modules:
            outer, _, number = module.rpartition(".")
            if number.isdigit() and outer in fitting:
                fitting.add(module)
            is_list = f"{module}.0" in modules
            if module in fitting and not is_list and not _lies_in(module, saved):
                saved.append(module)
        if self.config.tie_word_embeddings and _lies_in(_EMBEDDING, saved):
            raise ValueError(
                f"{setting} {list(patterns)} covers {_EMBEDDING}, whose weight is the head's too: "
                "PEFT would train one of them; leave it out"
            )
        return tuple(saved)

    def _adapter_of(self, stored: StoredAdapter) -> Adapter:
        """What a folder holds, in this model's order."""
        whole = self._whole()
        linears = list(whole._linears())
        unknown = sorted(set(stored.targets) - set(linears))
        if unknown:
            raise ValueError(
                f"{stored.folder} has adapters for {', '.join(unknown)}, which are no linears of "
                "the model: load it beside its own base"
            )
        setting = f"modules_to_save of {stored.folder}"
        return Adapter(
            stored.config,
            tuple(name for name in linears if name in set(stored.targets)),
            self._saved_modules(whole, stored.modules_to_save, setting),
            self.name_or_path or stored.base,
        )


def _draw_adapter(item: StoredParameter, seed: Callable[[], int]) -> None:
    """A rank's part of a fresh factor: A is drawn by its name, B is zero."""
    if not item.key.endswith(A_KEY):
        item.parameter.initialize()
        return
    rng = np.random.default_rng([seed(), zlib.crc32(item.key.encode())])
    whole = initial_a(rng, item.table.full_shape(item.parameter))
    set_value(item.parameter, item.table.own_shard(item.parameter, whole))


def _fitting(
    patterns: Sequence[str],
    modules: Iterable[str],
    setting: str,
    groups: dict[str, list[str]] | None = None,
) -> set[str]:
    return matching_names(patterns, modules, setting, kind="modules", groups=groups, by_suffix=True)


def _modules_of(keys: Iterable[str]) -> dict[str, None]:
    """Every module of the base that has a parameter or a module with one, outer ones first."""
    modules: dict[str, None] = {}
    for key in keys:
        names = [] if is_low_rank(key) else key.split(".")[:-1]
        modules |= dict.fromkeys(".".join(names[: i + 1]) for i in range(len(names)))
    return modules


def _lies_in(module: str, outer: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in outer)


def _shape_of(adapter: Adapter) -> tuple:
    return adapter.config.r, adapter.config.scaling, adapter.targets, adapter.saved


def _described(adapter: Adapter) -> str:
    saved = f" and {len(adapter.saved)} whole modules" if adapter.saved else ""
    return (
        f"of rank {adapter.config.r} and factor {adapter.config.scaling:g} on "
        f"{len(adapter.targets)} linears{saved}"
    )
