"""Settings of robot datasets and of their mixture, under OpenTau's names. Read without Paddle and
NumPy.

OpenTau's settings that another setting of a run stands for, or that nothing here needs, are refused
with the reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paddle_vl.config.section import FilePath, Section

ResampleStrategy = Literal["nearest", "linear"]
_Ratio = Annotated[float, Field(ge=0, lt=1)]
_Dim = Annotated[int, Field(ge=0)]
_Indices = Annotated[list[_Dim], Field(min_length=1)] | None


def _number_of(key: Any) -> Any:
    """A key of YAML or JSON, which is a text."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _refused(reason: str) -> BeforeValidator:
    def refuse(value: Any) -> None:
        if value is not None:
            raise ValueError(reason)

    return BeforeValidator(refuse)


def _set(name: str) -> BeforeValidator:
    return _refused(f"set {name} instead, which holds for the whole run")


class RobotDatasetConfig(Section):
    """One LeRobot dataset of a mixture."""

    repo_id: Annotated[str, Field(min_length=1)] | None = None
    """name of the dataset on a hub (org/name), which is downloaded unless root is set"""
    root: FilePath | None = None
    """folder of the dataset, with meta/info.json"""
    revision: str | None = None
    """branch, tag or commit on the hub"""
    episodes: list[int] | None = None
    """numbers of the episodes to use; default: all"""
    excluded_episodes: list[int] = Field(default=[])
    """numbers of episodes to leave out of these"""
    data_features_name_mapping: dict[str, str] = Field(default={})
    """the dataset's columns by standard names: camera0, camera1, ..., state, actions, prompt,
    response, memory, mistake, success; default: its colour cameras in their order,
    observation.state, action, task, and columns of the same names"""
    robot_type: str | None = None
    """robot type; default: that of the dataset's info.json"""
    control_mode: str | None = None
    """control mode; default: that of the dataset's info.json"""
    fps: Annotated[float, Field(gt=0)] | None = None
    """true frames per second of a dataset whose info.json declares another rate"""
    tolerance_s: Annotated[float, Field(gt=0)] | None = None
    """as the mixture's, of this dataset"""
    skip_timestamp_check: bool | None = None
    """as the mixture's, of this dataset"""
    val_split_ratio: _Ratio | None = None
    """as the mixture's, of this dataset"""
    prompt_substitutions: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default={})
    """texts by task; in training one of them, drawn anew each time, replaces the task"""
    state_index: _Indices = None
    """dims of the state column to use, in this order"""
    action_index: _Indices = None
    """dims of the action column to use, in this order"""
    use_delta_joint_actions: bool = False
    """actions are differences to the state at the start of their chunk, in the dims of
    delta_action_state_map; whoever acts with the policy adds that state"""
    delta_action_state_map: dict[Annotated[_Dim, BeforeValidator(_number_of)], _Dim] = Field(
        default={}
    )
    """dim of the state column to subtract, by dim of the action column"""
    stats: FilePath | None = None
    """file of statistics in the form of meta/stats.json; default: those of the dataset"""

    vqa: Annotated[Any, _refused("pi07 learns from demonstrations only; leave it out")] = None
    image_transforms: Annotated[
        Any, _refused("images of all datasets are changed alike: set data.image_transforms")
    ] = None
    video_backend: Annotated[Any, _refused("videos are read by PyAV; remove it")] = None
    use_imagenet_stats: Annotated[
        Any, _refused("pi07 does not normalise images by statistics; remove it")
    ] = None

    def problems(self, where: str) -> Iterator[str]:
        """Messages about settings that contradict each other."""
        if self.repo_id is None and self.root is None:
            yield f"{where} has neither repo_id nor root: name the dataset or its folder"
        if self.root is not None and self.revision is not None:
            yield (
                f"{where} has revision {self.revision!r}, which the folder in root has not: remove "
                "it, or name the dataset in repo_id alone"
            )
        if self.use_delta_joint_actions != bool(self.delta_action_state_map):
            yield (
                f"{where} has use_delta_joint_actions {self.use_delta_joint_actions} and "
                f"delta_action_state_map {self.delta_action_state_map}: set both, or neither"
            )
        for name in ("state_index", "action_index"):
            if len(set(found := getattr(self, name) or [])) < len(found):
                yield f"{where}.{name} is {found}; name each dim once"

    @property
    def label(self) -> str:
        """The dataset in messages."""
        return str(self.root or self.repo_id)


class DatasetMixtureConfig(Section):
    """LeRobot datasets, of which samples are drawn with replacement."""

    datasets: Annotated[list[RobotDatasetConfig], Field(min_length=1)]
    """the datasets, {root: DIR, ...}; see docs/robot_data.md"""
    weights: list[Annotated[float, Field(ge=0)]] | None = None
    """share of the samples of each dataset, relative to the other weights; default: its frames"""
    action_freq: Annotated[float, Field(gt=0)] | None = None
    """actions and frames per second to which all datasets are resampled; default: their own"""
    image_resample_strategy: ResampleStrategy = "nearest"
    """images between two frames: the nearest, or both blended"""
    vector_resample_strategy: ResampleStrategy = "nearest"
    """states and actions between two frames: the nearest, or both blended"""
    val_split_ratio: _Ratio = 0.05
    """share of each dataset that is kept for evaluation, at least one of several episodes; 0 for
    none"""
    val_split_by: Literal["episode", "frame"] = "episode"
    """what the shares are drawn of; frame as in OpenTau, where frames of an episode are in both,
    so that the evaluation loss is lower than on new episodes"""
    subgoal_end_of_segment_prob: Annotated[float, Field(ge=0, le=1)] = 0.25
    """probability that the goal image is the last of the segment; otherwise it is one of the next
    four seconds in it"""
    val_enable_optional_key_dropout: bool = False
    """drop optional fields in evaluation too (data.drops)"""
    val_enable_prompt_substitution: bool = False
    """replace prompts in evaluation too"""
    require_non_empty_robot_type: bool = False
    """refuse datasets whose robot type is empty or unknown"""
    require_non_empty_control_mode: bool = False
    """refuse datasets whose control mode is empty or unknown"""
    emit_fps: bool = False
    """samples tell the policy action_freq, or the rate of their dataset"""
    tolerance_s: Annotated[float, Field(gt=0)] = 1e-4
    """most seconds by which timestamps may miss the frames' times; the nearest frame is taken"""
    skip_timestamp_check: bool = False
    """accept timestamps that do not follow one another at the dataset's rate"""
    delta_stats_max_rows: Annotated[int, Field(ge=1)] | None = None
    """most samples of which statistics of delta actions are computed; default: all"""

    n_obs_history: Annotated[Any, _set("model.policy.n_obs_steps")] = None
    history_state_drop_prob: Annotated[Any, _set("data.drops.history_state_drop_prob")] = None
    subgoal_drop_prob: Annotated[Any, _set("data.drops.subgoal_drop_prob")] = None
    response_drop_prob: Annotated[Any, _set("data.drops.response_drop_prob")] = None
    metadata_drop_all_prob: Annotated[Any, _set("data.drops.metadata_drop_all_prob")] = None
    metadata_drop_each_prob: Annotated[Any, _set("data.drops.metadata_drop_each_prob")] = None
    resolution: Annotated[Any, _set("resize_imgs_with_padding of model.config")] = None
    num_cams: Annotated[Any, _set("model.policy.input_features, which lists the cameras,")] = None
    max_state_dim: Annotated[Any, _set("max_state_dim of model.config")] = None
    max_action_dim: Annotated[Any, _set("max_action_dim of model.config")] = None
    action_chunk: Annotated[Any, _set("model.policy.chunk_size")] = None

    @property
    def has_held_out(self) -> bool:
        """Whether a part of any dataset is kept for evaluation."""
        return any(self.setting(each, "val_split_ratio") for each in self.datasets)

    def setting(self, dataset: RobotDatasetConfig, name: str) -> Any:
        """A setting of a dataset, or the mixture's if the dataset has none."""
        own = getattr(dataset, name)
        return getattr(self, name) if own is None else own

    def problems(self, train: Sequence[str], evaluation: Sequence[str]) -> Iterator[str]:
        """Messages about settings that contradict each other, or the files of data.train and
        data.eval."""
        if train:
            yield "data.train and data.dataset_mixture are set: a run has one of them"
        if evaluation and self.has_held_out:
            yield (
                "data.eval is set, and data.dataset_mixture keeps a part of its datasets for "
                "evaluation: remove data.eval, or set val_split_ratio: 0.0"
            )
        for number, dataset in enumerate(self.datasets):
            yield from dataset.problems(f"data.dataset_mixture.datasets[{number}]")
        weights = self.weights or [1.0] * len(self.datasets)
        if len(weights) != len(self.datasets) or not sum(weights):
            yield (
                f"data.dataset_mixture.weights are {weights}: give each of the "
                f"{len(self.datasets)} datasets one, and not 0 to all"
            )


def folders_among(files: Sequence[str]) -> bool:
    """Whether entries of data.train or data.eval are folders: LeRobot datasets, all or none."""
    folders = [file for file in files if Path(file).is_dir()]
    if folders and len(folders) < len(files):
        raise ValueError(
            f"{', '.join(sorted({*files} - {*folders}))} are no folders, and {', '.join(folders)} "
            "are: a run reads either JSONL files or LeRobot datasets"
        )
    return bool(folders)


def mixture_of(
    folders: Sequence[str], mapping: Mapping[str, str] | None = None
) -> DatasetMixtureConfig:
    """Datasets with equal settings, all of whose frames are used."""
    columns = dict(mapping or {})
    datasets = [RobotDatasetConfig(root=f, data_features_name_mapping=columns) for f in folders]
    return DatasetMixtureConfig(datasets=datasets, val_split_ratio=0.0)
