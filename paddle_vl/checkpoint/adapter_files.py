"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

Keys are `base_model.model.` and HF's module with `.lora_A.weight` `[r, in]`, `.lora_B.weight`
`[out, r]` or, of DoRA, `.lora_magnitude_vector` `[out]`; fully trained modules keep their
parameters' keys. PEFT also saves the weight of an adapted head or embedding, as
`.base_layer.weight`.

Source: PEFT 0.21, `peft/utils/save_and_load.py` and `peft/tuners/lora/config.py`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from paddle_vl.checkpoint.safetensors_io import (
    JoinedRows,
    StoredTensor,
    TensorToWrite,
    encoded,
    read_header,
)
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.files.hub import path_or_download
from paddle_vl.files.stored_settings import explained
from paddle_vl.files.text_file import read_json_object, shown, write_text

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
A_KEY, B_KEY, MAGNITUDE_KEY = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_BASE_LAYER = ".base_layer."
_EMBEDDING_ENDS = (".lora_embedding_A", ".lora_embedding_B")
# PEFT's settings that change what an adapter computes unless they are null, false, empty or this.
_NOT_SUPPORTED = {
    "bias": "none", "fan_in_fan_out": None, "lora_bias": None, "target_parameters": None,
    "trainable_token_indices": None, "layer_replication": None, "use_qalora": None,
    "use_bdlora": None, "alora_invocation_tokens": None, "arrow_config": None, "kasa_config": None,
    "velora_config": None, "monteclora_config": None,
}  # fmt: skip

# Values of `init_lora_weights` that leave the base as it is. Others (pissa, olora, corda, loftq,
# lora_ga) take the adapter's start out of the base's weights, which no file of the adapter has.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Settings of an adapter that are read.
_COMPUTED = (
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
)  # fmt: skip


# Types of further entries.
_TYPES: tuple[tuple[str, Any, str], ...] = (
    ("target_modules", str | list[str] | None, "a list of names"),
    ("modules_to_save", list[str] | None, "a list of names"),
    ("base_model_name_or_path", str | None, "the path of a folder"),
    ("ensure_weight_tying", bool | None, "true or false"),
)


class Size(NamedTuple):
    """Rank and alpha of an adapter."""

    r: int
    alpha: float


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model.

    Attributes:
        sizes: by HF module of the linears with a low-rank adapter.
        saved: HF modules that are trained fully (PEFT's `modules_to_save`).
        base: folder of the base model; None if unknown.
    """

    config: LoRAConfig
    sizes: Mapping[str, Size]
    saved: tuple[str, ...] = ()
    base: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """Modules with a low-rank adapter."""
        return tuple(self.sizes)

    def owns(self, key: str) -> bool:
        """Whether the HF key belongs to the adapters, not to the base."""
        return is_low_rank(key) or any(key.startswith(f"{m}.") for m in self.saved)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter folder, its tensors unread.

    Attributes:
        sizes: by module with a low-rank adapter, from the file's tensors, not from PEFT's patterns.
        tensors: by HF key; some may replace parameters of the base.
        modules_to_save: PEFT's names, which may be suffixes of module names.
        keeps_ties: whether PEFT trained a tied embedding and head as one (`ensure_weight_tying`);
            else as two, of which it adapts or replaces what the adapter names.
    """

    folder: Path
    config: LoRAConfig
    sizes: Mapping[str, Size]
    modules_to_save: tuple[str, ...]
    base: str | None
    tensors: dict[str, StoredTensor]
    keeps_ties: bool

    @classmethod
    def read(cls, folder: Path, key_here: Callable[[str], str] = str) -> "StoredAdapter":
        """Read an adapter's configuration and the headers of its tensors.

        Args:
            key_here: the key in this package's files of one in the adapter's file.

        Raises:
            RuntimeError: a file is missing or damaged.
            ValueError: a setting of PEFT that is not supported, or keys that are not PEFT's.
        """
        values = _config_values(folder)
        tensors = {}
        for key, tensor in read_header(folder / TENSOR_FILE).items():
            if not key.startswith(PREFIX):
                raise ValueError(
                    f"{folder / TENSOR_FILE} holds {key}, but keys of PEFT's format begin with "
                    f"{PREFIX}: it is not an adapter for a whole model"
                )
            if key.endswith(_EMBEDDING_ENDS):
                raise ValueError(
                    f"{folder / TENSOR_FILE} holds {key}: adapters of an embedding are not "
                    "supported; train it whole (modules_to_save), or merge the adapter with PEFT"
                )
            tensors[key.removeprefix(PREFIX).replace(_BASE_LAYER, ".")] = tensor
        targets = [key.removesuffix(A_KEY) for key in tensors if key.endswith(A_KEY)]
        if not targets:
            raise ValueError(f"{folder / TENSOR_FILE} has no tensor that ends in {A_KEY}")
        here = {module: key_here(f"{module}.").removesuffix(".") for module in targets}
        settings = {name: values[name] for name in _COMPUTED if values.get(name) is not None}
        try:
            config = LoRAConfig(**settings, target_modules=list(here.values()))
        except ValidationError as error:
            raise ValueError(f"{folder / CONFIG_FILE}: {explained(error)}") from error
        try:
            sizes = {
                here[module]: Size(
                    _of_module(module, config.rank_pattern, config.r),
                    _of_module(module, config.alpha_pattern, config.lora_alpha),
                )
                for module in targets
            }
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{folder / CONFIG_FILE}: a pattern is no expression: {error}"
            ) from error
        saved = [key_here(f"{m}.").removesuffix(".") for m in values.get("modules_to_save") or ()]
        base, tensors = "base_model_name_or_path", {key_here(k): t for k, t in tensors.items()}
        keeps_ties = bool(values.get("ensure_weight_tying"))
        return cls(folder, config, sizes, tuple(saved), values.get(base), tensors, keeps_ties)

    def merged(self, base: Mapping[str, StoredTensor]) -> list[TensorToWrite]:
        """The base's tensors with the adapter added, computed as they are written.

        Raises:
            ValueError: tensors of the adapter that do not fit the base.
        """
        shapes = {key: base[key].shape for key in self.tensors if key in base}
        for module, size in self.sizes.items():
            weight = base.get(f"{module}.weight")
            if weight is not None and len(weight.shape) == 2:
                shapes[module + A_KEY] = (size.r, weight.shape[1])
                shapes[module + B_KEY] = (weight.shape[0], size.r)
                if self.config.use_dora:
                    shapes[module + MAGNITUDE_KEY] = (weight.shape[0],)
        strange = sorted(self.tensors.keys() - shapes.keys())
        misfits = [
            f"{key} {list(self.tensors[key].shape) if key in self.tensors else 'absent'}, not "
            f"{list(shape)}"
            for key, shape in sorted(shapes.items())
            if key not in self.tensors or self.tensors[key].shape != shape
        ]
        if strange or misfits:
            raise ValueError(
                f"the adapter in {self.folder} does not fit the base: {len(strange)} tensors are "
                f"for what it does not have ({', '.join(strange)}), {len(misfits)} are of other "
                f"shapes ({'; '.join(misfits)}); choose its own base"
            )
        written = list[TensorToWrite]()
        for key, tensor in base.items():
            if isinstance(tensor, JoinedRows) and key not in self.tensors:
                written += [part.copied(part.name) for part in tensor.parts]
            else:
                merged = partial(self._merged, key, tensor)
                written.append(TensorToWrite(key, tensor.shape, tensor.dtype, merged))
        return written

    def _merged(self, key: str, tensor: StoredTensor) -> np.ndarray:
        array, module = self.tensors.get(key, tensor).read(), key.removesuffix(".weight")
        if module + A_KEY in self.tensors:
            own = {
                end: self.tensors[module + end].read().astype(np.float32)
                for end in keys_of(self.config)
            }
            array = with_adapter(array, own, self.config.scaling(*self.sizes[module]))
        return encoded(array, tensor.dtype)


def keys_of(config: LoRAConfig) -> tuple[str, ...]:
    """The ends of the keys of a linear's adapter."""
    return (A_KEY, B_KEY, MAGNITUDE_KEY) if config.use_dora else (A_KEY, B_KEY)


def with_adapter(weight: np.ndarray, own: Mapping[str, np.ndarray], scaling: float) -> np.ndarray:
    """A linear's weight with its adapter in it, `[out, in]` float32.

    Args:
        weight: `[out, in]`.
        own: the adapter's arrays, float32, by the ends of their keys.
    """
    whole = weight.astype(np.float32) + (own[B_KEY] @ own[A_KEY]) * np.float32(scaling)
    if MAGNITUDE_KEY not in own:
        return whole
    return whole * (own[MAGNITUDE_KEY] / np.linalg.norm(whole, axis=1))[:, None]


def is_low_rank(key: str) -> bool:
    """Whether the key is of a low-rank adapter."""
    return key.endswith((A_KEY, B_KEY, MAGNITUDE_KEY))


def is_adapter(folder: Path) -> bool:
    """Whether a folder has adapters but no full model, of which a policy's has a configuration."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    is_full = any((folder / name).is_file() for name in weights)
    return (folder / CONFIG_FILE).is_file() and not (is_full and (folder / "config.json").is_file())


def base_folder(folder: Path, base: str | Path | None = None) -> Path:
    """The folder of an adapter's base model.

    Args:
        base: the folder to use instead of the one that the adapter names.

    Raises:
        RuntimeError: the adapter names none, or a folder without a model.
    """
    named = base or _config_values(folder).get("base_model_name_or_path")
    if not named:
        raise RuntimeError(
            f"{folder / CONFIG_FILE} names no base_model_name_or_path: say which model the adapter "
            "belongs to (--base)"
        )
    path = path_or_download(str(named))
    if not (path / "config.json").is_file():
        source = "" if base else f", which {folder / CONFIG_FILE} names as its base,"
        raise RuntimeError(
            f"{path}{source} is not a model folder (it has no config.json): say where the base "
            "lies (--base)"
        )
    return path


def folder_with(file: str, folder: Path, base: str | Path | None = None) -> Path:
    """The folder itself, or its base if it is an adapter folder without that file."""
    has_it = (folder / file).is_file() or not is_adapter(folder)
    return folder if has_it else base_folder(folder, base)


def write_config(
    folder: Path,
    adapter: Adapter,
    task: str | None = "CAUSAL_LM",
    key: Callable[[str], str] = str,
) -> None:
    """Write `adapter_config.json`. Modules are listed by full name, so that PEFT matches these.

    Args:
        task: PEFT's task_type.
        key: the key in the adapter's file of one in this package's files.
    """
    config = adapter.config
    sizes, saved = (
        {key(f"{module}.").removesuffix("."): size for module, size in adapter.sizes.items()},
        [key(f"{module}.").removesuffix(".") for module in adapter.saved],
    )
    alpha = config.lora_alpha
    values = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": adapter.base,
        "r": config.r,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": list(sizes),
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": config.use_dora,
        "rank_pattern": {m: size.r for m, size in sizes.items() if size.r != config.r},
        "alpha_pattern": {m: size.alpha for m, size in sizes.items() if size.alpha != alpha},
        "init_lora_weights": True,
        "inference_mode": True,
    }
    text = json.dumps(values, indent=2) + "\n"
    write_text(folder / CONFIG_FILE, text)


def _of_module(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """PEFT's choice: the first pattern, a regular expression, that fits the end of the name."""
    fitting = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", module))
    return next(fitting, default)


def _config_values(folder: Path) -> dict:
    file = folder / CONFIG_FILE
    values = read_json_object(file, "an adapter's configuration")
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"{file}: peft_type is {values.get('peft_type')!r}, only LORA is supported"
        )
    absent = [name for name in ("r", "lora_alpha") if name not in values]
    if absent:
        raise ValueError(f"{file} has no {', '.join(absent)}: it is not a LoRA configuration")
    for name, kind, needed in _TYPES:
        try:
            TypeAdapter[Any](kind).validate_python(values.get(name), strict=True)
        except ValidationError as error:
            told = f"{file}: {name} is {shown(values[name])}; {needed} is needed"
            raise ValueError(told) from error
    start = values.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {shown(start)}, whose start changed the base's weights: "
            "on the published base the adapter computes something else; convert it with PEFT "
            "(save_pretrained with path_initial_model_for_weight_conversion), or merge it there"
        )
    found = [
        f"{name} {shown(values[name])}"
        for name, neutral in _NOT_SUPPORTED.items()
        if values.get(name) and values[name] != neutral
    ]
    if found:
        raise ValueError(f"{file}: {', '.join(found)} is not supported; train it without, or merge")
    return values
