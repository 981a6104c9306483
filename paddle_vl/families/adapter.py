"""Low-rank adapters (LoRA) of a model: adding, loading, saving and merging them.

All ways to an adapter share the names and sizes of its modules.
"""

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_vl.checkpoint.adapter_files import (
    A_KEY,
    MAGNITUDE_KEY,
    PREFIX,
    TENSOR_FILE,
    Adapter,
    Size,
    StoredAdapter,
    is_low_rank,
    keys_of,
    with_adapter,
    write_config,
)
from paddle_vl.checkpoint.reading import MaterializeStep, check_keys, set_value, stored_values
from paddle_vl.checkpoint.rules import PatchKernel, StoredParameter, by_parameter
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, encoded, widened
from paddle_vl.checkpoint.writing import (
    STORED_DTYPES,
    parameter_array,
    parameters_to_write,
    write_tensors,
)
from paddle_vl.config.patterns import matching_names
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.nn.linear import AdaptableLinear, fused_columns
from paddle_vl.nn.lora import LowRankSettings, initial_factor
from paddle_vl.nn.master_weights import ParameterStore

# An `AdaptableModel`, whose methods call the functions of this module.
Model = Any
ALL_LINEAR = "all-linear"


def add_lora(model: Model, config: LoRAConfig) -> None:
    """See `AdaptableModel.add_lora`."""
    if model.adapter is not None:
        raise ValueError("the model has adapters already: merge_lora() first, to add others")
    attach(model, _resolved(model, config))

    @cache
    def seed() -> int:
        # Drawn after the model's own fresh weights.
        drawn: Any = paddle.randint(0, 2**31 - 1, [1]).item()
        return drawn

    def steps() -> Iterator[MaterializeStep]:
        linears = _linears(model)
        for item in filter(lambda item: is_low_rank(item.key), _adapter_parameters(model)):
            if item.key.endswith(MAGNITUDE_KEY):
                layer = linears[item.key.removesuffix(MAGNITUDE_KEY)]
                run = partial(_set_magnitude, item, layer)
                yield MaterializeStep(item.parameter, run, beside=layer.weight)
            else:
                yield MaterializeStep(item.parameter, partial(_draw_factor, item, config, seed))

    model.materialize_too(steps)


def load_adapter(model: Model, source: str | Path | StoredAdapter) -> None:
    """See `AdaptableModel.load_adapter`."""
    stored = source
    if not isinstance(stored, StoredAdapter):
        stored = StoredAdapter.read(Path(stored), model.key_here)
    adapter, path = adapter_of(model, stored), stored.folder
    if model.adapter is None:
        attach(model, adapter)
    elif differing := _differing(model.adapter, adapter):
        raise ValueError(
            f"the model's adapters and those in {path} differ in {', '.join(differing)}: "
            "merge_lora() first, to load others"
        )
    tensors = model.tensors_as_here(stored.tensors)
    # PEFT also saves the base weight of some adapted modules.
    wanted = [
        item for item in placed(model.whole()) if adapter.owns(item.key) or item.key in tensors
    ]
    check_keys(path, tensors, wanted, set(), "the model as an adapter")

    def read() -> list[MaterializeStep]:
        present = [item for item in placed(model) if item.key in tensors]
        return stored_values(present, tensors)

    model.materialize_too(read)


def _differing(own: Adapter, given: Adapter) -> list[str]:
    """Modules that two adapters adapt differently, or only one of them trains."""
    both = [
        {
            m: (s.r, each.config.scaling(s.r, s.alpha), each.config.use_dora)
            for m, s in each.sizes.items()
        }
        for each in (own, given)
    ]
    adapted = {m for m in both[0] | both[1] if both[0].get(m) != both[1].get(m)}
    return sorted(adapted | (set(own.saved) ^ set(given.saved)))


def save_adapter(
    model: Model,
    path: Path,
    write: FileWriter,
    store: ParameterStore | None,
    others: Iterable[TensorToWrite],
) -> None:
    """See `AdaptableModel.save_adapter`."""
    tensors = parameters_to_write(_adapter_parameters(model), store=store)
    ranks = model.placement.checkpoint_ranks
    if ranks.is_first:
        path.mkdir(parents=True, exist_ok=True)
        write_config(path, model.adapter, model.peft_task, model.adapter_key)
    if model.placement.stage_layers.head:
        tensors += others
    # PEFT reads a single file.
    tensors = [tensor._replace(name=PREFIX + model.adapter_key(tensor.name)) for tensor in tensors]
    write_tensors(
        path, TENSOR_FILE.removesuffix(".safetensors"), tensors, sys.maxsize, ranks, write
    )


def merged_tensors(model: Model, store: ParameterStore | None = None) -> list[TensorToWrite]:
    """All weights, unsharded, with the adapters added as they are written; the model stays as it
    is. See `paddle_vl.checkpoint.writing.parameters_to_write`. Collective, as each rank keeps all
    adapters for the weights that it writes."""
    adapter, items = model.adapter, {item.key: item for item in placed(model)}

    def merged(
        array: np.ndarray, tensor: TensorToWrite, module: str, own: dict[str, np.ndarray]
    ) -> np.ndarray:
        weight = widened(tensor.arrange(array), tensor.dtype)
        scaling = adapter.config.scaling(*adapter.sizes[module])
        return encoded(with_adapter(weight, own, scaling), tensor.dtype)

    dtypes = {key: STORED_DTYPES[item.parameter.dtype] for key, item in items.items()}
    adapters = {
        module: {
            end: widened(parameter_array(items[module + end], store), dtypes[module + end])
            for end in keys_of(adapter.config)
        }
        for module in adapter.sizes
        if module + A_KEY in items
    }
    base = [item for key, item in items.items() if not is_low_rank(key)]
    return [
        tensor._replace(
            arrange=partial(merged, tensor=tensor, module=module, own=adapters[module]),
            keeps_rows=False,
        )
        if (module := tensor.name.removesuffix(".weight")) in adapters
        else tensor
        for tensor in parameters_to_write(base, store=store)
    ]


def merge_lora(model: Model) -> None:
    """See `AdaptableModel.merge_lora`."""
    _adapter_parameters(model)
    for layer in model.sublayers():
        if isinstance(layer, AdaptableLinear):
            layer.merge_low_rank()
    model.adapter = None


def attach(model: Model, adapter: Adapter) -> None:
    """Add this rank's adapter parameters, without values, and freeze all others."""
    config = adapter.config
    # Fused weights to separate: a linear gets an adapter, or only some linears are trained.
    divided = []
    for items in by_parameter(placed(model)):
        modules = {item.key.removesuffix(".weight") for item in items}
        owned = {adapter.owns(item.key) for item in items}
        if items[0].block is not None and (len(owned) > 1 or modules & adapter.sizes.keys()):
            divided.append(items[0].parameter)
    model.separate(divided)
    linears = _linears(model)
    with paddle.LazyGuard():
        for module, size in adapter.sizes.items():
            if module in linears:
                settings = LowRankSettings(
                    size.r, config.scaling(*size), config.lora_dropout, config.use_dora
                )
                model.placement.layers.add_low_rank(linears[module], settings)
    model.adapter = adapter
    for item in placed(model):
        item.parameter.stop_gradient = not adapter.owns(item.key)


def placed(model: Model) -> Iterator[StoredParameter]:
    """This rank's parameters under the names that adapters have for them."""
    items = model.stored_parameters()
    return (replace(item, key=model.adapter_prefix + item.key) for item in items)


def _adapter_parameters(model: Model) -> list[StoredParameter]:
    """Parameters that the model's adapter owns.

    Raises:
        ValueError: it has none.
    """
    adapter = model.adapter
    if adapter is None:
        raise ValueError("the model has no adapters: add_lora() or load_adapter() first")
    return [item for item in placed(model) if adapter.owns(item.key)]


def _linears(model: Model) -> dict[str, Any]:
    """This rank's linears by HF module name, without a tied head; fused ones share a layer."""
    items: dict[int, list[StoredParameter]] = {}
    for item in placed(model):
        items.setdefault(id(item.parameter), []).append(item)
    found = {}
    for layer in model.sublayers():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, AdaptableLinear) and not (
            weight is not None and fused_columns(weight)
        ):
            continue
        is_tied_head = model.tied_embedding is not None and layer is model.lm_head
        # HF's patch embedding is a convolution.
        if not is_tied_head and not isinstance(items[id(weight)][0].layout, PatchKernel):
            found |= {i.key.removesuffix(".weight"): layer for i in items[id(weight)]}
    return found


def _resolved(model: Model, config: LoRAConfig) -> Adapter:
    """The adapters of the settings: modules in model order, and their sizes."""
    whole, patterns = model.whole(), config.target_modules
    linears = list(_linears(whole))
    patterns = [patterns] if isinstance(patterns, str) else patterns
    targets = set(linears) - {model.output_module} if ALL_LINEAR in patterns else set()
    named = [pattern for pattern in patterns if pattern != ALL_LINEAR]
    targets |= _fitting(model, named, linears, "model.lora.target_modules")
    targets -= _fitting(model, config.exclude_modules, linears, "model.lora.exclude_modules")
    saved = _saved_modules(whole, config.modules_to_save, "model.lora.modules_to_save")
    adapted = [m for m in linears if m in targets and not _lies_in(m, saved)]
    if not adapted:
        raise ValueError(
            f"model.lora.target_modules {patterns} without exclude_modules and modules_to_save "
            "leaves no linear to adapt"
        )
    ranks, alphas = (
        _of_patterns(model, getattr(config, setting), adapted, f"model.lora.{setting}")
        for setting in ("rank_pattern", "alpha_pattern")
    )
    sizes = {m: Size(ranks.get(m, config.r), alphas.get(m, config.lora_alpha)) for m in adapted}
    return Adapter(config, sizes, saved, model.name_or_path)


def _of_patterns(
    model: Model, given: Mapping[str, Any], adapted: Sequence[str], setting: str
) -> dict[str, Any]:
    """The value of each module that a pattern names; of several patterns that of the last."""
    found = {}
    for pattern, value in given.items():
        found |= dict.fromkeys(_fitting(model, [pattern], adapted, setting), value)
    return found


def _saved_modules(whole: Model, patterns: Sequence[str], setting: str) -> tuple[str, ...]:
    """The outermost matching modules; a list of layers becomes its layers, as PEFT needs."""
    # Every module that has parameters or contains one that has, outer modules first.
    modules: dict[str, None] = {}
    for item in placed(whole):
        names = [] if is_low_rank(item.key) else item.key.split(".")[:-1]
        modules |= dict.fromkeys(".".join(names[: i + 1]) for i in range(len(names)))
    fitting = _fitting(whole, patterns, modules, setting)
    saved: list[str] = []
    for module in modules:
        outer, _, number = module.rpartition(".")
        if number.isdigit() and outer in fitting:
            fitting.add(module)
        is_list = f"{module}.0" in modules
        if module in fitting and not is_list and not _lies_in(module, saved):
            saved.append(module)
    if whole.tied_embedding is not None and _lies_in(whole.tied_embedding, saved):
        raise ValueError(
            f"{setting} {list(patterns)} covers {whole.tied_embedding}, whose weight is tied to "
            "the head: "
            "PEFT would train only one of them; leave it out"
        )
    return tuple(saved)


def adapter_of(model: Model, stored: StoredAdapter) -> Adapter:
    """The adapter of a folder, its modules in model order."""
    whole = model.whole()
    linears = list(_linears(whole))
    if (tied := whole.tied_embedding) is not None and any(
        _lies_in(key, (tied, whole.output_module)) for key in stored.tensors
    ):
        how = "as one (ensure_weight_tying)" if stored.keeps_ties else "apart"
        raise ValueError(
            f"{stored.folder} trains {tied} and the head, which its base ties, {how}: make one "
            "model of them, paddle-vl merge, and go on with that"
        )
    unknown = sorted(stored.sizes.keys() - set(linears))
    if unknown:
        raise ValueError(
            f"{stored.folder} has adapters for {', '.join(unknown)}, which are not linears of the "
            "model: load it with its own base"
        )
    setting = f"modules_to_save of {stored.folder}"
    return Adapter(
        stored.config,
        {name: stored.sizes[name] for name in linears if name in stored.sizes},
        _saved_modules(whole, stored.modules_to_save, setting),
        model.name_or_path or stored.base,
    )


def _draw_factor(item: StoredParameter, config: LoRAConfig, seed: Callable[[], int]) -> None:
    """Initialize this rank's shard of a factor, with random numbers seeded by its name."""
    rng = np.random.default_rng([seed(), zlib.crc32(item.key.encode())])
    rows, columns = item.table.full_shape(item.parameter)
    is_a = item.key.endswith(A_KEY)
    full = initial_factor(rng, (rows, columns), is_a, config.init_lora_weights)
    set_value(item.parameter, item.table.own_shard(item.parameter, full))


@paddle.no_grad()
def _set_magnitude(item: StoredParameter, layer: Any) -> None:
    """Begin with the norms of the linear's own weight."""
    norms = layer.lora.norms(layer.weight.t() if layer.input_axis else layer.weight)
    if bool((norms == 0).any()):
        raise ValueError(
            f"{item.key}: some rows of the weight are zero, and DoRA divides by their norms: leave "
            "the linear out (model.lora.exclude_modules), or set model.lora.use_dora=false"
        )
    set_value(item.parameter, norms.numpy())


def _fitting(
    model: Model, patterns: Sequence[str], modules: Iterable[str], setting: str
) -> set[str]:
    """Modules that patterns match; a part of the model (vision) matches what lies in it."""
    groups = {
        part: [end for p in of_part for end in (p.removesuffix(".*"), p)]
        for part, of_part in model.adapter_parts.items()
    }
    return matching_names(patterns, modules, setting, kind="modules", groups=groups, by_suffix=True)


def _lies_in(module: str, outer: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in outer)
