"""Low-rank adapters (LoRA) of a model: adding, loading, saving and merging them."""

import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_vl.checkpoint.adapter_files import (
    A_KEY,
    Adapter,
    StoredAdapter,
    base_folder,
    is_low_rank,
    write_adapter,
)
from paddle_vl.checkpoint.reading import (
    MaterializeStep,
    check_keys,
    checkpoint_tensors,
    set_value,
    stored_values,
)
from paddle_vl.checkpoint.rules import PatchKernel, StoredParameter, by_parameter
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite
from paddle_vl.checkpoint.writing import (
    DEFAULT_SHARD_BYTES,
    STORED_DTYPES,
    parameter_array,
    write_tensors,
)
from paddle_vl.config.patterns import matching_names
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.vlm.config import EMBEDDING_KEY, HEAD_KEY
from paddle_vl.families.vlm.inputs.processor import generation_settings
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.nn.linear import AdaptableLinear, fused_columns
from paddle_vl.nn.lora import LowRankSettings, initial_a
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import Saved

# A `PretrainedVLModel`, whose methods call the functions of this module.
Model = Any
ALL_LINEAR = "all-linear"
_HEAD = HEAD_KEY.removesuffix(".weight")
_EMBEDDING = EMBEDDING_KEY.removesuffix(".weight")
# vision, mergers and language as patterns over modules; `settings.PARTS` is over parameters.
_GROUPS = {
    group: [pattern.removesuffix(".*") for pattern in patterns] for group, patterns in PARTS.items()
}


def add_lora(model: Model, config: LoRAConfig) -> None:
    """See `PretrainedVLModel.add_lora`."""
    if model.adapter is not None:
        raise ValueError("the model has adapters already: merge_lora() first, to add others")
    targets, saved = _resolved(model, config)
    attach(model, Adapter(config, targets, saved, model.name_or_path))

    @cache
    def seed() -> int:
        # Drawn after the model's own fresh weights.
        drawn: Any = paddle.randint(0, 2**31 - 1, [1]).item()
        return drawn

    model.materialize_too(
        lambda: [
            MaterializeStep(item.parameter, partial(_draw_adapter, item, seed))
            for item in _adapter_parameters(model)
            if is_low_rank(item.key)
        ]
    )


def load_adapter(model: Model, path: str | Path) -> None:
    """See `PretrainedVLModel.load_adapter`."""
    path = Path(path)
    stored = StoredAdapter.read(path)
    adapter = _adapter_of(model, stored)
    if model.adapter is None:
        attach(model, adapter)
    else:
        both = [
            (each.config.r, each.config.scaling, each.targets, each.saved)
            for each in (model.adapter, adapter)
        ]
        if both[0] != both[1]:
            own, given = (
                f"rank {rank} and scaling {scaling:g} on {len(targets)} linears and {len(saved)} "
                "fully trained modules"
                for rank, scaling, targets, saved in both
            )
            raise ValueError(
                f"the model's adapters have {own}, those in {path} have {given}: merge_lora() "
                "first, to load others"
            )
    tensors = model.checkpoint_map.tensors_as_here(stored.tensors, model.config)
    # PEFT also saves the base weight of some adapted modules.
    wanted = [
        item
        for item in model.whole().stored_parameters()
        if adapter.owns(item.key) or item.key in tensors
    ]
    check_keys(path, tensors, wanted, set(), "the model as an adapter")

    def read() -> list[MaterializeStep]:
        present = [item for item in model.stored_parameters() if item.key in tensors]
        return stored_values(present, tensors)

    model.materialize_too(read)


def save_adapter(
    model: Model, path: str | Path, write: FileWriter, store: ParameterStore | None
) -> None:
    """See `PretrainedVLModel.save_adapter`."""
    items = [item for item in _adapter_parameters(model) if item.table[item.parameter].joins_saving]
    adapter, ranks, path = model.adapter, model.placement.checkpoint_ranks, Path(path)
    # PEFT reads a single file, so the first rank gathers all tensors.
    own = {item.key: parameter_array(item, store) for item in items}
    items = [item for item in items if item.table[item.parameter].saved is Saved.HERE]
    own = {item.key: own[item.key] for item in items}
    arrays = ranks.gather_stage_arrays(own)
    dtypes = ranks.gather_stages({i.key: STORED_DTYPES[i.parameter.dtype] for i in items})
    if not ranks.is_first:
        return
    path.mkdir(parents=True, exist_ok=True)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    tensors = [
        TensorToWrite(key, array.shape, dtypes_of_stage[key], lambda array=array: array)
        for arrays_of_stage, dtypes_of_stage in zip(arrays, dtypes, strict=True)
        for key, array in arrays_of_stage.items()
    ]
    write_adapter(path, adapter, tensors, write)


def merge_lora(model: Model) -> None:
    """See `PretrainedVLModel.merge_lora`."""
    _adapter_parameters(model)
    for layer in model.sublayers():
        if isinstance(layer, AdaptableLinear):
            layer.merge_low_rank()
    model.adapter = None


def merge_adapter(
    model_class: Any, folder: Path, out: Path, base: str | Path | None = None
) -> Path:
    """Write the base's weights with the adapter added, and its configuration, to a new folder.

    Tensors are read, merged and written one by one in the base's dtypes; no model is built.

    Args:
        model_class: of the family, see `PretrainedVLModel`.
        folder: adapter in PEFT's format.
        base: base model to use instead of the one that the adapter names.

    Returns:
        The folder of the base.

    Raises:
        ValueError: the adapter does not fit the base, or `out` is not empty.
        RuntimeError: a folder or file is missing or damaged.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: merge into a new folder")
    base = base_folder(folder, base)
    config, names = model_class.config_class.from_pretrained(base), model_class.checkpoint_map
    adapter = StoredAdapter.read(folder)
    adapter.tensors.update(names.tensors_as_here(adapter.tensors, config))
    tensors = adapter.merged(names.tensors_as_here(checkpoint_tensors(base), config))
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out, "model", tensors, DEFAULT_SHARD_BYTES)
    shutil.copyfile(base / "config.json", out / "config.json")
    settings = generation_settings(folder, base)
    if settings is not None:
        settings.save_pretrained(out)
    return base


def attach(model: Model, adapter: Adapter) -> None:
    """Add this rank's adapter parameters, without values, and freeze all others."""
    config = adapter.config
    settings = LowRankSettings(config.r, config.scaling, config.lora_dropout)
    # Fused weights to separate: a linear gets an adapter, or only some linears are trained.
    divided = []
    for items in by_parameter(model.stored_parameters()):
        modules = {item.key.removesuffix(".weight") for item in items}
        owned = {adapter.owns(item.key) for item in items}
        if items[0].block is not None and (len(owned) > 1 or modules & set(adapter.targets)):
            divided.append(items[0].parameter)
    model.separate(divided)
    linears = _linears(model)
    with paddle.LazyGuard():
        for module in adapter.targets:
            if module in linears:
                model.placement.layers.add_low_rank(linears[module], settings)
    model.adapter = adapter
    for key, parameter in model.hf_named_parameters():
        parameter.stop_gradient = not adapter.owns(key)


def _adapter_parameters(model: Model) -> list[StoredParameter]:
    """Parameters that the model's adapter owns.

    Raises:
        ValueError: it has none.
    """
    adapter = model.adapter
    if adapter is None:
        raise ValueError("the model has no adapters: add_lora() or load_adapter() first")
    return [item for item in model.stored_parameters() if adapter.owns(item.key)]


def _linears(model: Model) -> dict[str, Any]:
    """This rank's linears by HF module name, without a tied head; fused ones share a layer."""
    items: dict[int, list[StoredParameter]] = {}
    for item in model.stored_parameters():
        items.setdefault(id(item.parameter), []).append(item)
    found = {}
    for layer in model.sublayers():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, AdaptableLinear) and not (
            weight is not None and fused_columns(weight)
        ):
            continue
        is_tied_head = layer is model.lm_head and model.config.tie_word_embeddings
        # HF's patch embedding is a convolution.
        if not is_tied_head and not isinstance(items[id(weight)][0].layout, PatchKernel):
            found |= {i.key.removesuffix(".weight"): layer for i in items[id(weight)]}
    return found


def _resolved(model: Model, config: LoRAConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules to adapt and modules to train in full, from the settings, in model order."""
    whole, patterns = model.whole(), config.target_modules
    linears = list(_linears(whole))
    patterns = [patterns] if isinstance(patterns, str) else patterns
    targets = set(linears) - {_HEAD} if ALL_LINEAR in patterns else set()
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    targets |= _fitting(named, linears, "model.lora.target_modules")
    targets -= _fitting(config.exclude_modules, linears, "model.lora.exclude_modules")
    saved = _saved_modules(whole, config.modules_to_save, "model.lora.modules_to_save")
    adapted = tuple(m for m in linears if m in targets and not _lies_in(m, saved))
    if not adapted:
        raise ValueError(
            f"model.lora.target_modules {patterns} without exclude_modules and modules_to_save "
            "leaves no linear to adapt"
        )
    return adapted, saved


def _saved_modules(whole: Model, patterns: Sequence[str], setting: str) -> tuple[str, ...]:
    """The outermost matching modules; a list of layers becomes its layers, as PEFT needs."""
    # Every module that has parameters or contains one that has, outer modules first.
    modules: dict[str, None] = {}
    for key, _ in whole.hf_named_parameters():
        names = [] if is_low_rank(key) else key.split(".")[:-1]
        modules |= dict.fromkeys(".".join(names[: i + 1]) for i in range(len(names)))
    fitting = _fitting(patterns, modules, setting, _GROUPS)
    saved: list[str] = []
    for module in modules:
        outer, _, number = module.rpartition(".")
        if number.isdigit() and outer in fitting:
            fitting.add(module)
        is_list = f"{module}.0" in modules
        if module in fitting and not is_list and not _lies_in(module, saved):
            saved.append(module)
    if whole.config.tie_word_embeddings and _lies_in(_EMBEDDING, saved):
        raise ValueError(
            f"{setting} {list(patterns)} covers {_EMBEDDING}, whose weight is tied to the head: "
            "PEFT would train only one of them; leave it out"
        )
    return tuple(saved)


def _adapter_of(model: Model, stored: StoredAdapter) -> Adapter:
    """The adapter of a folder, its modules in model order."""
    whole = model.whole()
    linears = list(_linears(whole))
    unknown = sorted(set(stored.targets) - set(linears))
    if unknown:
        raise ValueError(
            f"{stored.folder} has adapters for {', '.join(unknown)}, which are not linears of the "
            "model: load it with its own base"
        )
    setting = f"modules_to_save of {stored.folder}"
    return Adapter(
        stored.config,
        tuple(name for name in linears if name in set(stored.targets)),
        _saved_modules(whole, stored.modules_to_save, setting),
        model.name_or_path or stored.base,
    )


def _draw_adapter(item: StoredParameter, seed: Callable[[], int]) -> None:
    """Initialize this rank's shard of a factor: A random, seeded by its name; B zero."""
    if not item.key.endswith(A_KEY):
        item.parameter.initialize()
        return
    rng = np.random.default_rng([seed(), zlib.crc32(item.key.encode())])
    inputs, rank = item.table.full_shape(item.parameter)
    full = initial_a(rng, (inputs, rank))
    set_value(item.parameter, item.table.own_shard(item.parameter, full))


def _fitting(
    patterns: Sequence[str],
    modules: Iterable[str],
    setting: str,
    groups: dict[str, list[str]] | None = None,
) -> set[str]:
    return matching_names(patterns, modules, setting, kind="modules", groups=groups, by_suffix=True)


def _lies_in(module: str, outer: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in outer)
