"""Programs of an exported policy, of tensors alone.

`prefix`: from pictures, texts and states to the keys and values that the expert reads; `step`: one
Euler step of the actions; `actions`: all steps, their number is an input.

Each is a layer whose forward is traced by `paddle.jit.to_static`. All blocks of the prefix are laid
out; those that a batch does not need are padding.

Shapes: B batch, c cameras, V = c * B videos of F frames, camera-major, S goal images, L prefix
tokens, C steps of a chunk, A action values, K key heads, H head width.
"""

import paddle
from paddle import Tensor, nn

from paddle_vl.export.pi07.program_attention import ProgramView, shared_by_steps
from paddle_vl.export.pi07.program_inputs import (
    TEXTS,
    flat,
    group_specs,
    key_value_specs,
    pairs,
    spec,
    text_fields,
    text_specs,
)
from paddle_vl.export.pi07.program_prefix import policy_prefix
from paddle_vl.families.pi07.flow import GivenActions, PI07LowLevelFlowMatching


class PrefixProgram(nn.Layer):
    """Observations to `pad_masks` `[B, L]` and each layer's keys and values `[B, L, K, H]`."""

    def __init__(self, model: PI07LowLevelFlowMatching):
        super().__init__()
        self.config = model.config
        self.prefix, self.decoder = model.prefix, model.decoder
        self._prefix_view = model.prefix_view

    def forward(
        self,
        videos: Tensor,
        frame_is_pad: list[Tensor],
        stills: Tensor,
        subgoal_rows: Tensor,
        vid_masks: Tensor,
        subgoal_masks: Tensor,
        texts: list[Tensor],
        state: Tensor,
        history_is_pad: Tensor,
        group_index: list[Tensor],
    ) -> list[Tensor]:
        batch = {
            "videos": videos,
            "frame_is_pad": frame_is_pad[0] if frame_is_pad else None,
            "vid_masks": vid_masks,
            "subgoal_img_masks": subgoal_masks,
            "state": state,
            "obs_history_is_pad": history_is_pad,
            "group_index": group_index[0] if group_index else None,
            **text_fields(TEXTS, texts),
        }
        prefix = policy_prefix(self.prefix, batch, stills, subgoal_rows)
        text = self.config.vlm_config.gemma3_config.text_config
        view = ProgramView(self._prefix_view(prefix), text)
        cache = self.decoder(prefix.embs, prefix_view=view, keep=True).cache
        return [prefix.pad_masks, *flat(cache)]

    def input_spec(self) -> list:
        """Its inputs. Without a history there is no `frame_is_pad`, without groups no index."""
        config = self.config
        vision = config.vlm_config.gemma3_config.vision_config
        image = [3, vision.image_size, vision.image_size]
        looks_back = config.n_obs_steps > 1
        return [
            spec("videos", [None, None if looks_back else 1, *image], "float32"),
            [spec("frame_is_pad", [None, None], "bool")] if looks_back else [],
            spec("stills", [None, *image], "float32"),
            spec("subgoal_rows", [None, None], "int64"),
            spec("vid_masks", [None, None], "bool"),
            spec("subgoal_masks", [None, None], "bool"),
            text_specs(TEXTS),
            spec("state", [None, None, config.max_state_dim], "float32"),
            spec("history_is_pad", [None, None], "bool"),
            group_specs(config),
        ]


class StepProgram(nn.Layer):
    """One Euler step: noisy actions to the actions one step later, `[B, C, A]`."""

    def __init__(self, model: PI07LowLevelFlowMatching):
        super().__init__()
        self.config = model.config
        self.model = model

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        step: Tensor,
        delay: Tensor,
        action_prefix: Tensor,
        pad_masks: Tensor,
        group_index: list[Tensor],
        keys_values: list[Tensor],
    ) -> Tensor:
        given = GivenActions(action_prefix, action_prefix.shape[0], self.config.chunk_size, delay)
        own = self.model.chunk_view(pad_masks).own
        view, cache = shared_by_steps(own, pairs(keys_values), self.config)
        group = group_index[0] if group_index else None
        return self.model.euler_step(x, time, step, given, view, cache, group)

    def input_spec(self) -> list:
        """Its inputs; `delay` is the number of known steps, the first of `action_prefix`."""
        chunk = [None, self.config.chunk_size, self.config.max_action_dim]
        return [
            spec("x", chunk, "float32"),
            spec("time", [1], "float32"),
            spec("step", [1], "float32"),
            spec("delay", [1], "int64"),
            spec("action_prefix", chunk, "float32"),
            spec("pad_masks", [None, None], "bool"),
            group_specs(self.config),
            key_value_specs(self.config.vlm_config.gemma3_config),
        ]


class ActionsProgram(nn.Layer):
    """All Euler steps, from noise to actions `[B, C, A]`."""

    def __init__(self, model: PI07LowLevelFlowMatching):
        super().__init__()
        self.config = model.config
        self.model = model

    def forward(
        self,
        noise: Tensor,
        num_steps: Tensor,
        delay: Tensor,
        action_prefix: Tensor,
        pad_masks: Tensor,
        group_index: list[Tensor],
        keys_values: list[Tensor],
    ) -> Tensor:
        given = GivenActions(action_prefix, action_prefix.shape[0], self.config.chunk_size, delay)
        own = self.model.chunk_view(pad_masks).own
        view, cache = shared_by_steps(own, pairs(keys_values), self.config)
        group = group_index[0] if group_index else None
        # As `flow.times`, in float32.
        step = (-1.0 / num_steps.astype("float64")).astype("float32")
        last, time, x = -step / 2, paddle.ones_like(step), noise
        while time >= last:
            x = self.model.euler_step(x, time, step, given, view, cache, group)
            time = time + step
        return given.put(x)

    def input_spec(self) -> list:
        """Its inputs, as of a step."""
        chunk = [None, self.config.chunk_size, self.config.max_action_dim]
        return [
            spec("noise", chunk, "float32"),
            spec("num_steps", [1], "int64"),
            spec("delay", [1], "int64"),
            spec("action_prefix", chunk, "float32"),
            spec("pad_masks", [None, None], "bool"),
            group_specs(self.config),
            key_value_specs(self.config.vlm_config.gemma3_config),
        ]
