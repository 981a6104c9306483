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
_EXPORT, _NN, _PARALLEL = (f"paddle_vl.{name}" for name in ("export", "nn", "parallel"))
# New home of each module, or of a package with all its modules.
_MODULES = {
    f"{_QWEN}.inputs": f"{_VLM}.inputs",
    **{
        f"{_QWEN}.{name}": f"{_VLM}.{name}"
        for name in (
            *("adapter", "chat", "colocated", "evaluation", "generate", "moe"),
            *("objective", "pipeline", "pretrained", "processor_fit", "settings"),
        )
    },
    **{f"{home}.answers": f"{_VLM}.chat" for home in (_QWEN, _VLM)},
    f"{_QWEN}.decoder": f"{_QWEN}.model",
    f"{_QWEN}.text_config": f"{_QWEN}.config",
    **{f"{_QWEN}.{name}": f"{_VLM}.layers" for name in ("embedding", "vision_tower")},
    **{f"{_QWEN}.{name}": f"{_EXPORT}.qwen3_vl.{name}" for name in ("exported", "programs")},
    **{f"{_PI07}.{name}": f"{_EXPORT}.pi07.{name}" for name in ("exported", "programs")},
    f"{_NN}.norm": f"{_NN}.operations",
    f"{_NN}.rotary": f"{_NN}.attention",
    f"{_PI07}.base_policy": f"{_PI07}.policy",
    f"{_PI07}.decoder_layers": f"{_PI07}.decoder",
    f"{_PI07}.demonstrations.line": "paddle_vl.families.policy.demonstrations.dataset",
    f"{_PI07}.demonstrations": "paddle_vl.families.policy.demonstrations",
    **{
        f"{_PI07}.inputs.{name}": "paddle_vl.families.policy.normalize"
        for name in ("normalizers", "statistics_checks")
    },
    f"{_PI07}.inputs": "paddle_vl.families.policy",
    "paddle_vl.families.policy.settings": "paddle_vl.families.policy.features",
    "paddle_vl.families.policy.normalizers": "paddle_vl.families.policy.normalize",
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
    "Qwen3VLModelConfig": "VLModelConfig",
    "Qwen3VLOutput": "VLOutput",
    "Qwen3VLParallelConfig": "VLParallelConfig",
    "Qwen3VLRun": "VLRun",
    "Qwen3VLStage": "VLStage",
}


class _Moved(ModuleType):
    """A module under its old path: the new one's names, some under their old name."""

    def __init__(self, name: str, home: str):
        super().__init__(name)
        # Not the new package's path: its modules would be loaded a second time under the old name.
        self.__path__: list[str] = []
        self._home = import_module(home)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, _NAMES.get(name, name))


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
