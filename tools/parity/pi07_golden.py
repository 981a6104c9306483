"""Golden cases of pi07 and their models.

A case is `NAME.json` with `NAME.safetensors` next to it. The weights and inputs that it names may
be in any of the folders.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.reading import check_keys, fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS, engine_keys
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching

_SECTIONS = {"vlm": "vlm_config", "gemma3": "gemma3_config", "expert": "gemma_expert_config"}
_PER_CAMERA = {
    "video": "videos",
    "vid_mask": "vid_masks",
    "subgoal_image": "subgoal_images",
    "subgoal_img_mask": "subgoal_img_masks",
}


@dataclass(frozen=True)
class GoldenCase:
    """A case with its description and tensors."""

    name: str
    kind: str
    file: Path
    folders: "GoldenFolders"

    @cached_property
    def meta(self) -> dict:
        return json.loads(self.file.read_text(encoding="utf-8"))

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """The case's tensors and the inputs that it takes from another case; bfloat16 as
        float32."""
        found = {}
        if "inputs_from" in self.meta:
            found = _read(self.folders.file(self.meta["inputs_from"]))
            found = {name: value for name, value in found.items() if name.startswith("in.")}
        file = self.file.with_suffix(".safetensors")
        return found | (_read(file) if file.exists() else {})

    @property
    def is_bfloat16(self) -> bool:
        """Whether the case was computed in bfloat16."""
        return "bf16" in self.meta.get("weights_file", "")

    def inputs(self) -> dict:
        """The `in.*` tensors as model inputs, cameras in lists."""
        given: dict[str, Any] = {
            name[3:]: value for name, value in self.tensors.items() if name[:3] == "in."
        }
        for one, many in _PER_CAMERA.items():
            if f"{one}0" in given:
                given[many] = [given.pop(f"{one}{i}") for i in range(self.meta["n_cams"])]
        return given


class GoldenFolders:
    """All cases below the given folders, and the files next to them."""

    def __init__(self, folders: list[Path]):
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise ValueError(f"no such folder: {', '.join(missing)}")
        self.folders = folders
        found: dict[Path, GoldenCase] = {}
        for folder in folders:
            for file in sorted(folder.rglob("*.json")):
                kind = json.loads(file.read_text(encoding="utf-8")).get("kind")
                kind = "freeze" if file.stem == "freeze_modes" else kind
                if kind is not None:
                    found.setdefault(file.resolve(), GoldenCase(file.stem, kind, file, self))
        self.cases = list(found.values())

    def file(self, name: str) -> Path:
        """A file by name.

        Raises:
            ValueError: it is in no folder.
        """
        for folder in self.folders:
            for file in sorted(folder.rglob(name)):
                return file
        raise ValueError(f"{name} is in none of the folders {[str(f) for f in self.folders]}")

    def case(self, start: str) -> GoldenCase:
        """The case whose name begins with `start`.

        Raises:
            ValueError: it is in no folder.
        """
        for case in self.cases:
            if case.name.startswith(start):
                return case
        raise ValueError(f"no case {start}* in the folders {[str(f) for f in self.folders]}")


def model_of(case: GoldenCase, weights: str = "", **settings) -> PI07LowLevelFlowMatching:
    """The case's model with its weights.

    Args:
        weights: file that replaces the case's weights.
        settings: changes to the configuration; `vlm_...` changes its `vlm_config`.
    """
    stored = _stored_weights(case, weights)
    config = config_of(case, stored, **settings)
    model = PI07LowLevelFlowMatching(config, case.meta["config"]["indicator_token_ids"])
    fill(model, case, stored)
    return model


def fill(model, case: GoldenCase, stored: dict | None = None) -> None:
    """Load the case's weights; all must be used unless the model has no expert."""
    stored = _stored_weights(case) if stored is None else stored
    placed = model.stored_parameters()
    if model.config.vlm_config.disable_action_expert:
        stored = {item.key: stored[item.key] for item in placed}
    check_keys(case.file.parent, stored, placed, set(UNUSED_KEYS), f"the model of {case.name}")
    fill_parameters(placed, stored)


def _stored_weights(case: GoldenCase, name: str = "") -> dict:
    return engine_keys(read_header(case.folders.file(name or case.meta["weights_file"])))


def config_of(case: GoldenCase, stored: dict | None = None, **settings) -> PI07Config:
    """The case's configuration with the groups of its weights; `settings` as in `model_of`."""
    given = case.meta["config"]
    own = {k: v for k, v in given.items() if k not in _SECTIONS and k != "indicator_token_ids"}
    side = given["gemma3"]["vision_config"]["image_size"]
    vlm = given["vlm"] | {_SECTIONS[name]: given[name] for name in ("gemma3", "expert")}
    config = PI07Config.from_dict(
        own | {"vlm_config": vlm, "resize_imgs_with_padding": [side, side]}
    )
    if stored is not None and config.per_group_projection:
        groups = stored["state_proj.weight"].shape[0]
        config = config.changed(dataset_names=[f"group {i}" for i in range(groups)])
    engine = {k[4:]: v for k, v in settings.items() if k.startswith("vlm_")}
    own = {k: v for k, v in settings.items() if not k.startswith("vlm_")}
    if engine:
        own["vlm_config"] = replace(config.vlm_config, **engine)
    return config.changed(**own) if own else config


def _read(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read(must_be_finite=False) for name, tensor in read_header(file).items()}
