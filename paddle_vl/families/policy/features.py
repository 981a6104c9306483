"""Features of a policy's data, the files of its configuration, and settings that runs of policies
share. Read without Paddle and NumPy."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from paddle_vl.config.section import Section
from paddle_vl.files.stored_settings import Listed, checked
from paddle_vl.files.text_file import read_json_object

CURRENT_CONFIG_VERSION = 1
FeatureType = Literal["STATE", "VISUAL", "ENV", "ACTION", "REWARD"]
NormalizationMode = Literal["MEAN_STD", "MIN_MAX", "QUANTILE", "IDENTITY"]
MOST_DIMS = 1 << 16
# Files with a configuration, in order of preference; in the last two it is a section.
CONFIG_FILES = ("config.json", "train_config.json", "hf_config.json")
# A family's configuration of a policy or a planner, whose fields have OpenTau's names.
PolicyConfig = Any
_Probability = Annotated[float, Field(ge=0, le=1)]
_DIMS_OF = {"STATE": "1 dim", "ACTION": "1 dim", "VISUAL": "3 dims: channels, height, width"}


@checked
class PolicyFeature:
    """One feature of a policy's data."""

    type: FeatureType
    shape: Listed[tuple[Annotated[int, Field(ge=1, le=MOST_DIMS)], ...]]
    """(channels, height, width) of an image, (dims,) of a vector"""

    def __post_init__(self):
        dims = _DIMS_OF.get(self.type, "")
        if dims and len(self.shape) != int(dims[0]):
            raise ValueError(f"shape is {list(self.shape)}; {self.type} has {dims}")

    def to_dict(self) -> dict[str, Any]:
        """As in configuration files."""
        return {"type": self.type, "shape": list(self.shape)}


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """File and content of the configuration in a policy's folder, or of a JSON file."""
    path = Path(path)
    candidates = [path / name for name in CONFIG_FILES] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise RuntimeError(
            f"{path} has no configuration: none of {', '.join(f.name for f in candidates)}"
        )
    values = read_json_object(file, "a policy's configuration")
    if isinstance(values.get("policy"), dict):
        values = values["policy"]
    return file, values


class DropProbabilities(Section):
    """Probabilities of leaving optional fields out of a training sample; OpenTau's names and
    defaults."""

    history_state_drop_prob: _Probability = 0.3
    """probability of dropping the past: its frames become black and count as padding; the state
    stays and the policy masks it"""
    subgoal_drop_prob: _Probability = 0.75
    """probability of dropping the goal images of all cameras"""
    response_drop_prob: _Probability = 0.3
    """probability of dropping the response of a sample that keeps its goal images; without goal
    images the response stays, since it tells the policy the next step"""
    metadata_drop_all_prob: _Probability = 0.15
    """probability of dropping all metadata but fps"""
    metadata_drop_each_prob: _Probability = 0.05
    """probability of dropping each metadata field, if not all are dropped"""


def _ascending(given: list[float]) -> list[float]:
    if given[0] > given[1]:
        raise ValueError("the first of the two must be the lower one")
    return given


_Range = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_ascending)]


class ImageTransforms(Section):
    """Random changes of the images of a training sample; a camera's frames are changed alike."""

    crop: Annotated[float | None, Field(gt=0, le=1)] = None
    """share of each side that a crop at a random place keeps, which is scaled to the whole size"""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """largest rotation to either side, in degrees"""
    shift: Annotated[float, Field(ge=0, le=1)] = 0.0
    """largest shift to any side, as a share of that side's length"""
    still_cameras: list[str] = Field(default=[])
    """patterns (*, ?) of cameras that are not cropped, rotated or shifted, as those on a wrist"""
    brightness: _Range | None = None
    """range of factors of the brightness; 1 changes nothing"""
    contrast: _Range | None = None
    """range of factors of the contrast"""
    saturation: _Range | None = None
    """range of factors of the saturation"""
    hue: _Range | None = None
    """range of turns of the hue, as shares of the circle; 0 changes nothing"""
    sharpness: _Range | None = None
    """range of factors of the sharpness; 0 smooths"""
    max_transforms: Annotated[int | None, Field(ge=1)] = None
    """number of the given changes (rotation and shift are one) that an image gets, chosen at
    random; default: all"""


# What openpi and LeRobot do.
IMAGE_TRANSFORMS: dict[str, dict[str, Any]] = {
    "openpi": {
        "crop": 0.95,
        "rotation": 5.0,
        "still_cameras": ["*wrist*"],
        "brightness": [0.7, 1.3],
        "contrast": [0.6, 1.4],
        "saturation": [0.5, 1.5],
    },
    "lerobot": {
        "rotation": 5.0,
        "shift": 0.05,
        "brightness": [0.8, 1.2],
        "contrast": [0.8, 1.2],
        "saturation": [0.5, 1.5],
        "hue": [-0.05, 0.05],
        "sharpness": [0.5, 1.5],
        "max_transforms": 3,
    },
}
