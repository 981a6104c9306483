"""An exported policy and an exported planner: raw observations to raw actions, and to texts.

Neither imports the model's code. Shapes: B batch, c cameras, V = c * B videos of F frames,
camera-major, S goal images, G of them of a sample, L prefix tokens, n new tokens, C steps of a
chunk (policy) or capacity of the buffers (planner), A action values.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import paddle
from paddle import Tensor
from pydantic import Field

from paddle_vl.export.folder import AnyProgram, ExportFolder
from paddle_vl.export.program import by_layer, with_room
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.policy.acting import (
    BOS,
    ActingPolicy,
    Plan,
    WritingRules,
    plan_of,
    write_plan,
)
from paddle_vl.families.policy.model_inputs import EOS, PlannerInputs, PolicyInputs
from paddle_vl.families.policy.normalize import (
    STATISTICS_FILE,
    load_statistics,
    new_normalizers,
)
from paddle_vl.families.policy.tokenizers import PromptTokenizer
from paddle_vl.files.stored_settings import checked

_TokenId = Annotated[int, Field(ge=0)]


@checked
class PolicySizes:
    """What the runtime must know of a policy: groups of its statistics."""

    num_groups: Annotated[int, Field(ge=1, le=1 << 16)]


@checked
class PlannerSizes(PolicySizes):
    """What the runtime must know of a planner: with the ids of a label and of padding."""

    response_label: list[_TokenId]
    pad_id: _TokenId


class ExportedPI07Policy(ActingPolicy):
    """The programs of a policy; `sample_actions`, `select_action` and `reset` are the policy's.

    Attributes:
        num_steps: Euler steps of a chunk; the configuration's, may be set.
    """

    def __init__(self, folder: ExportFolder):
        self.config = PI07Config.from_pretrained(folder.path)
        self.tokenizer = PromptTokenizer.from_pretrained(folder.path)
        num_groups = folder.sizes(PolicySizes).num_groups
        self.normalizers = new_normalizers(self.config, num_groups)
        load_statistics(self.normalizers, folder.path / STATISTICS_FILE)
        self.num_steps = self.config.num_steps
        self._prefix, self._actions = folder.program("prefix"), folder.program("actions")
        self.begin(self.config)

    @property
    def inputs(self) -> PolicyInputs:
        return PolicyInputs(self.config, self.tokenizer, None, self.normalizers)

    def sample_chunk(
        self,
        inputs: Mapping[str, Any],
        noise: np.ndarray | Tensor | None,
        delay: int,
        action_prefix: np.ndarray | None,
    ) -> np.ndarray:
        shape = [len(inputs["state"]), self.config.chunk_size, self.config.max_action_dim]
        if noise is None:
            noise = paddle.randn(shape, dtype="float32")
        if list(noise.shape) != shape:
            raise ValueError(f"noise has shape {list(noise.shape)}; {shape} is needed")
        if action_prefix is None:
            action_prefix = np.zeros(shape, dtype=np.float32)
        pad_BL, *keys_values = self._prefix(_only(prefix_inputs(inputs), self._prefix))
        given = {
            "noise": noise,
            "num_steps": np.array([self.num_steps], dtype=np.int64),
            "delay": np.array([delay], dtype=np.int64),
            "action_prefix": action_prefix,
            "pad_masks": pad_BL,
            "group_index": inputs["group_index"],
            **by_layer(keys_values),
        }
        (chunk_BCA,) = self._actions(_only(given, self._actions))
        return chunk_BCA.numpy()


def prefix_inputs(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The prefix program's inputs from those of the model, see `PolicyInputs.observed`."""
    videos, state, goals = inputs["videos"], inputs["state"], inputs["subgoal_images"]
    batch, cameras = len(state), len(videos)
    video_VFCHW = np.concatenate(videos)
    history_BF = inputs.get("obs_history_is_pad")
    # Without a history the past is padding; the current frame never is.
    frame_is_pad = np.ones(videos[0].shape[:2], bool) if history_BF is None else history_BF
    goal_masks = inputs["subgoal_img_masks"]
    has_goal = any(mask.any() for mask in goal_masks)
    stills_SCHW = np.concatenate(goals) if has_goal else video_VFCHW[:0, 0]
    num_goals = len(goals) if has_goal else 0
    rows_GB = np.arange(num_goals * batch).reshape(num_goals, batch) + len(video_VFCHW)
    masks_GB = np.array(goal_masks[:num_goals], dtype=bool).reshape(num_goals, batch)
    return {
        "videos": video_VFCHW,
        "frame_is_pad": np.concatenate([frame_is_pad] * cameras),
        "stills": stills_SCHW,
        "subgoal_rows": np.ascontiguousarray(rows_GB.T),
        "vid_masks": np.stack(inputs["vid_masks"], axis=1),
        "subgoal_masks": np.ascontiguousarray(masks_GB.T),
        "state": state,
        "history_is_pad": np.ones(state.shape[:2], bool) if history_BF is None else history_BF,
        "group_index": inputs["group_index"],
        **_texts(inputs, ("lang", "response", "metadata")),
    }


class ExportedPI07Planner:
    """The programs of a planner with its tokenizer and the normalizer of its inputs."""

    def __init__(self, folder: ExportFolder):
        sizes = folder.sizes(PlannerSizes)
        self.config = PI07PlannerConfig.from_pretrained(folder.path)
        self.tokenizer = PromptTokenizer.from_pretrained(folder.path)
        self.normalizers = new_normalizers(self.config, sizes.num_groups)
        load_statistics(self.normalizers, folder.path / STATISTICS_FILE)
        self._images, self._prefill, self._decode = (
            folder.program(name) for name in ("images", "prefill", "decode")
        )
        self._writes_in_place = folder.runtime == "paddle"
        self._rules = WritingRules(
            self.config.memory_max_length,
            self.config.response_max_length,
            sizes.response_label,
            bos_id=self.tokenizer.token_id(BOS),
            eos_id=self.tokenizer.token_id(EOS),
            pad_id=sizes.pad_id,
        )

    @property
    def inputs(self) -> PlannerInputs:
        """Makes the programs' inputs from raw batches."""
        return PlannerInputs(self.config, self.tokenizer, self.normalizers["normalize_inputs"])

    def plan(self, batch: Mapping[str, Any]) -> Plan:
        """Greedily decoded memory and subtask for raw observations, as of the planner."""
        written = self.generate(self.inputs.observation_inputs(batch))
        return plan_of(written, self.tokenizer, self._rules.eos_id)

    def generate(self, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of memory and response, each int64 `[B, length]` as configured.

        Args:
            inputs: of `PlannerInputs.observation_inputs`.
        """
        (rows_ZMD,) = self._images({"images": np.concatenate(inputs["images"])})
        prompt = {
            "image_rows": rows_ZMD,
            "img_masks": np.stack(inputs["img_masks"], axis=1),
            **_texts(inputs, ("lang", "metadata")),
        }
        _, pad_BL, *keys_values = self._prefill(prompt)
        # Programs in ONNX return longer copies of the keys and values.
        room = self._rules.num_tokens if self._writes_in_place else 0
        reader = _Reader(self._decode, pad_BL, keys_values, room)
        return write_plan(reader, pad_BL.shape[0], self._rules)


class _Reader:
    """A prompt and the tokens after it, with their keys and values, see `TokenReader`.

    Args:
        room: free positions of the buffers; 0 if the program returns longer keys and values.
    """

    def __init__(
        self, decode: AnyProgram, pad_BL: Tensor, keys_values: Sequence[Tensor], room: int
    ):
        self._decode, self._room, self._pad_BS = decode, room, pad_BL.numpy()
        if room:
            keys_values = with_room(keys_values, room, axis=1)
        self._cache = by_layer(keys_values)
        self._logits_BV: Tensor | None = None

    def read(self, ids_Bn: np.ndarray, is_real_Bn: np.ndarray) -> None:
        place = self._pad_BS.shape[1]
        self._pad_BS = np.concatenate([self._pad_BS, is_real_Bn], axis=1)
        self._room = max(self._room - ids_Bn.shape[1], 0)
        given = {
            "input_ids": ids_Bn,
            "pad_masks": np.pad(self._pad_BS, ((0, 0), (0, self._room))),
            "place": np.array([place], dtype=np.int64),
            **self._cache,
        }
        self._logits_BV, *longer = self._decode(_only(given, self._decode))
        if longer:
            self._cache = by_layer(longer)

    def next_tokens(self) -> np.ndarray:
        assert self._logits_BV is not None, "BOS is read first"
        return self._logits_BV.argmax(axis=-1, keepdim=True).numpy()


def _texts(inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Token ids and masks, without the columns that are padding in all samples."""
    found = {}
    for name in names:
        length = max(1, int(inputs[f"{name}_masks"].sum(axis=1).max()))
        for kind in ("tokens", "masks"):
            found[f"{name}_{kind}"] = np.ascontiguousarray(inputs[f"{name}_{kind}"][:, :length])
    return found


def _only(given: Mapping[str, Any], program: AnyProgram) -> dict[str, Any]:
    """What the program takes: without groups or a history it has fewer inputs."""
    return {name: given[name] for name in program.inputs}
