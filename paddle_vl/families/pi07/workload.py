"""A run's workload for a profile: synthetic demonstrations, and other numbers of cameras."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_vl.config.families import FamilyEntry
from paddle_vl.families.pi07.gemma import base_config
from paddle_vl.families.pi07.settings import PI07Run


def with_synthetic_data(
    family: FamilyEntry, config: PI07Run, _: Path, num_samples: int, shapes: Mapping[str, int]
) -> PI07Run:
    """The run with `data.synthetic_samples`; these have all cameras, and goal images for those
    named so. Of the shapes only `cameras` may be given."""
    for name in shapes:
        if name != "cameras":
            raise ValueError(
                f"--{name.replace('_', '-')} shapes made-up conversations; a policy's images "
                "and texts have the sizes of its configuration"
            )
    values = config.model_dump()
    values["data"] |= {"train": [], "synthetic_samples": num_samples}
    values["data"]["dataset_mixture"] = None
    changed = type(config).model_validate(values)
    if not shapes:
        return changed
    return with_cameras(family, changed, shapes["cameras"], keeps_names=False)


def with_cameras(
    family: FamilyEntry, config: PI07Run, num_cameras: int, keeps_names: bool = True
) -> PI07Run:
    """The run without some cameras, or with more like the first, which samples may lack: then they
    are black, as OpenTau's slots without a camera are.

    Args:
        keeps_names: False for cameras that no sample lacks, named `camera0`....
    """
    values, model = config.model_dump(), config.model
    given, folder = model.policy.given, model.pretrained
    config_class = family.model_class().config_class
    base = base_config(config_class, model.config, None if folder is None else Path(folder))
    base = base.to_dict()
    features = given.get("input_features") or base["input_features"]
    seen = _cameras_of(features, num_cameras, keeps_names)
    values["model"]["policy"]["input_features"] = seen
    if keeps_names and (added := len(seen.keys() - features.keys())):
        lacking = given.get("empty_cameras") or base["empty_cameras"]
        values["model"]["policy"]["empty_cameras"] = lacking + added
    return type(config).model_validate(values)


def _cameras_of(features: Mapping[str, Any], num_cameras: int, keeps_names: bool) -> dict[str, Any]:
    """Features with that many cameras, all like the first, under their names or `camera0`...."""
    cameras = [name for name, feature in features.items() if feature["type"] == "VISUAL"]
    if not cameras or num_cameras < 1:
        raise ValueError(
            f"--cameras {num_cameras}: the policy's input_features have {len(cameras)} cameras, "
            "and at least 1 is needed of both"
        )
    numbered = (f"camera{i}" for i in range(num_cameras + len(cameras)))
    kept = cameras if keeps_names else []
    names = [*kept, *(name for name in numbered if name not in kept)][:num_cameras]
    others = {name: feature for name, feature in features.items() if name not in cameras}
    return {name: features[cameras[0]] for name in names} | others
