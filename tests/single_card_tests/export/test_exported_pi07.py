"""An exported pi07 policy acts as the policy does, without the model's code.

Guarantees, on Paddle's predictor and on onnxruntime: equal actions at shapes that the export has
not seen, for every set of optional fields, batch size, delay, number of frames and of steps; the
golden rollout; groups with projections of their own and both attention implementations. A process
without the model's code gives the same; a program has no control flow but the loop over the steps.
"""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl import PI07LowLevelPolicy
from paddle_vl.export import load
from paddle_vl.export.pi07.programs import policy_to_export
from paddle_vl.export.writing import export_model
from paddle_vl.families.pi07.prefix import presence_of
from paddle_vl.families.policy.model_inputs import as_arrays
from tests.single_card_tests.families.pi07.test_policy import golden_policy, observation, raw_batch
from tests.single_card_tests.serving.test_policy_actor import actor_of, check_batches
from tests.support.exports import (
    HAS_ONNX,
    RUNTIMES,
    host_waits,
    operations,
    output_without_model_code,
)
from tests.support.pi07_golden import (
    CharacterTokenizer,
    case,
    character_tokenizer,
    group_statistics,
    policy_config,
    under,
)

MODEL_CODE = (*("checkpoint_map", "decoder", "flow", "planner", "policy", "prefix", "vision"),)
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def written(policy: PI07LowLevelPolicy, out: Path) -> Path:
    """An export of a policy with a tokenizer that can be saved."""
    policy.tokenizer, policy.action_tokenizer = character_tokenizer(), None
    policy.eval()
    export_model(policy_to_export(policy), Path("golden"), out, onnx=HAS_ONNX)
    return out


@pytest.fixture(scope="module")
def policy() -> PI07LowLevelPolicy:
    return golden_policy(dataset_names=["a", "b"], max_delay=3)


@pytest.fixture(scope="module")
def folder(policy, tmp_path_factory) -> Path:
    return written(policy, tmp_path_factory.mktemp("export") / "out")


@pytest.fixture(scope="module", params=RUNTIMES)
def exported(folder, request):
    return load(folder, request.param)


def golden_inputs(config) -> dict:
    """Inputs of the golden sampling case, their texts padded to the lengths of this policy."""
    found = under(case("01_all_fields")[1], "in.")
    for one in ("video", "vid_mask", "subgoal_image", "subgoal_img_mask"):
        found[f"{one}s"] = [found.pop(f"{one}{i}") for i in range(2)]
    lengths = {"lang": "prompt", "response": "response", "metadata": "metadata"}
    for name, setting in lengths.items():
        for kind in ("tokens", "masks"):
            short = found[f"{name}_{kind}"]
            missing = getattr(config, f"{setting}_max_length") - short.shape[1]
            found[f"{name}_{kind}"] = np.pad(short, ((0, 0), (0, missing)))
    return found | {"group_index": np.zeros(len(found["state"]), np.int64)}


def test_the_golden_actions(exported):
    inputs, wanted = golden_inputs(exported.config), case("10_sample_all_fields")[1]["out.actions"]
    found = exported.sample_chunk(inputs, inputs["noise"], 0, None)
    np.testing.assert_allclose(found, wanted, **TOLERANCE)


def test_the_golden_rollout(exported, monkeypatch):
    tensors = case("18_policy_level")[1]
    monkeypatch.setattr(exported, "tokenizer", CharacterTokenizer())
    exported.begin(policy_config())
    for step in range(4):
        if step == 3:
            exported.action_queue.clear()
        found = exported.select_action(observation(step), tensors["rollout.noise"])
        np.testing.assert_allclose(found, tensors[f"rollout.step{step}.out.action"], **TOLERANCE)
    exported.begin(exported.config)


def test_behind_a_server_a_batch_gives_what_each_request_gets_alone(exported, policy):
    check_batches(actor_of(exported), actor_of(policy))


@pytest.mark.heavy
def test_another_policy_is_exported_too(tmp_path):
    """One frame, a state and an action projection for each group, and `sdpa` attention."""
    changes = {"n_obs_steps": 1, "per_group_projection": True, "dataset_names": ["a", "b"]}
    config = policy_config(**changes).changed(attention_implementation="sdpa")
    paddle.seed(1)
    policy = PI07LowLevelPolicy(config, CharacterTokenizer(), statistics=group_statistics())
    assert policy.model.decoder.attention_implementation == "sdpa"
    projector = policy.model.prefix.video_encoder.projector
    projector.mm_input_projection_weight.set_value(
        paddle.randn(projector.mm_input_projection_weight.shape)
    )
    folder = written(policy, tmp_path / "out")
    batch, noise = batch_of(3)
    for name in ("state", "camera0", "camera1"):
        batch[name] = batch[name][:, -1:]
    batch.pop("obs_history_is_pad")
    for index in ([0, 1, 1], [1, 0, 1]):
        batch["dataset_index"] = index
        wanted = policy.sample_actions(batch, noise)
        for runtime in ("paddle", "onnxruntime") if HAS_ONNX else ("paddle",):
            found = load(folder, runtime).sample_actions(batch, noise)
            np.testing.assert_allclose(found, wanted, **TOLERANCE)


def batch_of(size: int, **changes) -> tuple[dict, np.ndarray]:
    """A raw observation of that many samples with changed entries, and noise; None removes one."""
    raw, drawn = raw_batch()
    rows = np.arange(size) % 2
    found = {
        name: [value[i] for i in rows] if isinstance(value, list) else np.asarray(value)[rows]
        for name, value in raw.items()
        if not isinstance(value, str)
    }
    found["state"] = found["state"] + np.arange(size, dtype=np.float32)[:, None, None] / 16
    found |= changes
    noise = np.random.default_rng(size).normal(size=(size, *drawn["noise"].shape[1:]))
    return {k: v for k, v in found.items() if v is not None}, noise.astype(np.float32)


NO_METADATA = dict.fromkeys(
    ("speed", "quality", "mistake", "fps", "robot_type", "control_mode"), None
)
NO_GOALS = {"subgoal0": None, "subgoal1": None, "subgoal_is_pad": None}
PRESENCES = {
    "all": {},
    "none": {"response": None, **NO_METADATA, **NO_GOALS},
    "response": {**NO_METADATA, **NO_GOALS},
    "metadata": {"response": None, **NO_GOALS},
    "subgoals": {"response": None, **NO_METADATA},
    "all but the response": {"response": None},
    "goals that are padding": {"subgoal_is_pad": np.ones(2, bool)},
}


def test_actions_are_those_of_the_policy(policy, exported):
    chunks = []
    for given in PRESENCES.values():
        batch, noise = batch_of(2, **given)
        chunks.append(exported.sample_actions(batch, noise))
        np.testing.assert_allclose(chunks[-1], policy.sample_actions(batch, noise), **TOLERANCE)
    # Every field changes them, but for goals that are padding.
    for i, one in enumerate(chunks[:-1]):
        assert all(np.abs(one - other).max() > 1e-3 for other in chunks[:i]), i


def test_a_prefix_has_few_tokens_that_no_sample_needs(policy, exported, monkeypatch):
    """Their labels and a token of each text, but neither padded texts nor goal images."""
    seen = {}

    def kept(inputs):
        seen["found"] = program(inputs)
        return seen["found"]

    program = exported._prefix
    kept.inputs = program.inputs
    monkeypatch.setattr(exported, "_prefix", kept)
    batch, noise = batch_of(2, **PRESENCES["none"])
    exported.sample_actions(batch, noise)
    inputs = as_arrays(policy.inputs.observed(batch)[0])
    length = policy.model.tokens.length(inputs, presence_of(inputs), training=False)
    labels = sum(len(ids) for ids in policy.model.tokens.label_ids.values())
    assert seen["found"][0].shape[1] <= length + labels + 2


@pytest.mark.parametrize(("size", "delay", "steps"), [(1, 0, 1), (1, 2, 10), (5, 0, 3), (5, 2, 7)])
def test_batches_delays_and_steps_are_free(policy, exported, size, delay, steps, monkeypatch):
    for one in (policy.model.config, exported):
        monkeypatch.setitem(vars(one), "num_steps", steps)
    batch, noise = batch_of(size)
    known = np.random.default_rng(3).normal(size=(size, delay, 7)).astype(np.float32)
    given = {"delay": delay, "action_prefix": known if delay else None}
    found = exported.sample_actions(batch, noise, **given)
    np.testing.assert_allclose(found, policy.sample_actions(batch, noise, **given), **TOLERANCE)
    if delay:
        np.testing.assert_allclose(found[:, :delay], known, **TOLERANCE)
    with pytest.raises(ValueError, match=rf"noise has shape .*; \[{size}, 6, 7\] is needed"):
        exported.sample_actions(batch, np.concatenate([noise] * 2))


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("with_history", [False, True])
def test_the_number_of_frames_is_free(policy, exported, frames, with_history):
    batch, noise = batch_of(2)
    for name in ("state", "camera0", "camera1", "obs_history_is_pad"):
        if name in batch:
            batch[name] = batch[name][:, -frames:]
    if not with_history:
        batch.pop("obs_history_is_pad", None)
    found = exported.sample_actions(batch, noise)
    np.testing.assert_allclose(found, policy.sample_actions(batch, noise), **TOLERANCE)


def test_a_process_without_the_models_code_gives_the_same_actions(policy, folder, tmp_path):
    batch, noise = batch_of(2)
    words = {k: v for k, v in batch.items() if isinstance(v, list)}
    np.savez(tmp_path / "batch.npz", noise=noise, **{k: batch[k] for k in batch if k not in words})
    (tmp_path / "words.json").write_text(json.dumps(words))
    script = f"""
import json
import numpy as np
from paddle_vl.export import load
batch = dict(np.load("batch.npz")) | json.load(open("words.json"))
noise = batch.pop("noise")
print(json.dumps(load({str(folder)!r}).sample_actions(batch, noise).tolist()))
"""
    found = output_without_model_code("pi07", MODEL_CODE, script, tmp_path)
    np.testing.assert_allclose(np.array(found), policy.sample_actions(batch, noise), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "waits"), [("prefix", {}), ("step", {}), ("actions", {"while": 1})]
)
def test_the_loop_over_the_steps_is_the_only_control_flow(folder, name, waits):
    # The expert's weights are stored once.
    files = sorted(path.name for path in folder.glob("*.pdiparams"))
    assert files == ["expert.pdiparams", "prefix.pdiparams"]
    file = folder / f"{name}.json"
    assert {"matmul", "softmax"} <= set(operations(file))
    assert host_waits(file) == waits
