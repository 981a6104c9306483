"""Old import paths of what has moved: they work for one release, with a warning.

The finder stands behind Python's own, so that it is asked only for modules that do not exist.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_QWEN, _PI07, _VLM = (f"paddle_vl.families.{name}" for name in ("qwen3_vl", "pi07", "vlm"))
_POLICY = "paddle_vl.families.policy"
_EXPORT, _NN, _PARALLEL = (f"paddle_vl.{name}" for name in ("export", "nn", "parallel"))
# New home of each module, or of a package with all its modules; "A and B" for one that was divided.
_MODULES = {
    f"{_QWEN}.inputs": f"{_VLM}.inputs",
    **{
        f"{_QWEN}.{name}": f"{_VLM}.{name}"
        for name in (
            *("chat", "colocated", "evaluation", "generate", "moe"),
            *("objective", "pipeline", "pretrained", "processor_fit", "settings"),
        )
    },
    f"{_QWEN}.adapter": f"paddle_vl.families.adapter and {_VLM}.adapter",
    **{f"{home}.answers": f"{_VLM}.chat" for home in (_QWEN, _VLM)},
    f"{_QWEN}.decoder": f"{_QWEN}.model and {_VLM}.layers",
    f"{_QWEN}.flops": f"{_VLM}.flops",
    f"{_QWEN}.text_config": f"{_QWEN}.config",
    **{f"{_QWEN}.{name}": f"{_VLM}.layers" for name in ("embedding", "vision_tower")},
    **{f"{_QWEN}.{name}": f"{_EXPORT}.qwen3_vl.{name}" for name in ("exported", "programs")},
    **{f"{_PI07}.{name}": f"{_EXPORT}.pi07.{name}" for name in ("exported", "programs")},
    f"{_VLM}.cache": f"{_NN}.key_value_cache",
    f"{_NN}.norm": f"{_NN}.operations",
    f"{_NN}.rotary": f"{_NN}.attention",
    f"{_PI07}.base_policy": f"{_PI07}.policy",
    f"{_PI07}.decoder_layers": f"{_PI07}.decoder",
    f"{_PI07}.colocated": f"{_PI07}.pipeline",
    f"{_PI07}.engine_config": f"{_PI07}.config",
    f"{_PI07}.layers": f"{_PI07}.decoder and {_PI07}.prefix",
    f"{_PI07}.policy_files": f"{_PI07}.checkpoint_map",
    f"{_PI07}.policy_model": f"{_PI07}.flow",
    f"{_PI07}.prefix_layout": f"{_PI07}.prefix",
    f"{_EXPORT}.pi07.exporting": f"{_EXPORT}.pi07.programs",
    f"{_EXPORT}.pi07.program_attention": f"{_EXPORT}.pi07.programs",
    f"{_POLICY}.collate": f"{_POLICY}.model_inputs",
    f"{_POLICY}.discrete_actions": f"{_POLICY}.tokenizers",
    f"{_POLICY}.planning": f"{_POLICY}.acting",
    f"{_POLICY}.prompt": f"{_POLICY}.tokenizers and {_POLICY}.model_inputs",
    f"{_POLICY}.demonstrations.statistics": f"{_POLICY}.normalize",
    f"{_POLICY}.demonstrations.training_set": f"{_POLICY}.demonstrations.sample",
    f"{_PI07}.demonstrations.line": f"{_POLICY}.demonstrations.dataset",
    f"{_PI07}.demonstrations": f"{_POLICY}.demonstrations",
    **{
        f"{_PI07}.inputs.{name}": f"{_POLICY}.normalize"
        for name in ("normalizers", "statistics_checks")
    },
    f"{_PI07}.inputs": _POLICY,
    f"{_POLICY}.settings": f"{_POLICY}.features",
    f"{_POLICY}.normalizers": f"{_POLICY}.normalize",
    f"{_PARALLEL}.colocated.leaves": f"{_PARALLEL}.colocated.runner",
    f"{_PARALLEL}.colocated.store": f"{_PARALLEL}.colocated.runner",
    f"{_PARALLEL}.gloo_fleet.messages": f"{_PARALLEL}.gloo_fleet.process_group",
    f"{_PARALLEL}.pipeline.engine": f"{_PARALLEL}.pipeline.runner",
    f"{_PARALLEL}.sharding.fleet_buffers": f"{_PARALLEL}.sharding.fleet_optimizer",
}
# New name of each class, in its new module.
_NAMES = {
    "PretrainedQwen3VL": "PretrainedVLModel",
    "Qwen3VLDataConfig": "VLDataConfig",
    "Qwen3VLEncoder": "VisualEncoder",
    "Qwen3VLFlops": "VLFlops",
    "Qwen3VLModelConfig": "VLModelConfig",
    "Qwen3VLOutput": "VLOutput",
    "Qwen3VLParallelConfig": "VLParallelConfig",
    "Qwen3VLRun": "VLRun",
    "Qwen3VLStage": "VLStage",
    "SelfAttention": "VLSelfAttention",
}


class _Moved(ModuleType):
    """A module under its old path: the new one's names, some under their old name."""

    def __init__(self, name: str, home: str):
        super().__init__(name)
        # Not the new package's path: its modules would be loaded a second time under the old name.
        self.__path__: list[str] = []
        self._homes = [import_module(each) for each in home.split(" and ")]

    def __getattr__(self, name: str) -> Any:
        name = _NAMES.get(name, name)
        has_it = [home for home in self._homes if hasattr(home, name)]
        return getattr((has_it or self._homes)[0], name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        home = _home(fullname)
        if home is None:
            return None
        warnings.warn(
            f"{fullname} is now {home}: the old path goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Moved(spec.name, str(_home(spec.name)))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the new module has run."""


def _home(path: str) -> str | None:
    for old, new in _MODULES.items():
        if path == old or path.startswith(f"{old}."):
            return new + path.removeprefix(old)
    return None


def install() -> None:
    """Let imports of old paths find the new ones."""
    sys.meta_path.append(_Finder())
