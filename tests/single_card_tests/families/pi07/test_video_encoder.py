"""Encoding of videos and images to tokens.

Guarantees: the content of a padded frame has no effect and gives no NaN, also with several temporal
layers; without a mask the past is padding; later frames do not affect earlier ones; a single frame
equals an image, and so does a still frame after videos; order and age of frames matter;
past frames leave the tower behind the last layer that looks back; sizes and lengths are checked.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.vision import VideoEncoder, frame_codes, frames_in_use
from paddle_vl.nn.attention_masks import HistoryMask
from paddle_vl.nn.placement import SingleDevicePlacement
from tests.support.pi07_golden import policy_config


@pytest.fixture(scope="module")
def encoder():
    """An encoder with temporal attention in every layer, for up to 4 frames."""
    paddle.seed(0)
    made = VideoEncoder(policy_config().vlm_config.gemma3_config, 4, 1, SingleDevicePlacement())
    weight = made.projector.mm_input_projection_weight
    paddle.assign(paddle.randn(weight.shape), weight)
    return made


def video(frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((2, frames, 3, 56, 56), dtype=np.float32)


def tokens(encoder, array, pad=None) -> np.ndarray:
    pad = None if pad is None else paddle.to_tensor(np.array(pad, bool))
    return encoder(paddle.to_tensor(array), pad).numpy()


def test_padded_frames_have_no_effect(encoder):
    pad = [[1, 0, 0], [1, 1, 0]]
    first, other = video(3), video(3)
    other[:, 0] = 7.0
    other[1, 1] = -3.0
    found = tokens(encoder, first, pad)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, tokens(encoder, other, pad), atol=1e-6)
    other[0, 1] = 0.0
    assert np.abs(found[0] - tokens(encoder, other, pad)[0]).max() > 1e-4


def test_gradients_of_padded_frames_are_finite(encoder):
    encoder(paddle.to_tensor(video(3)), paddle.ones([2, 3], "bool")).sum().backward()
    grads = [p.grad for p in encoder.parameters()]
    encoder.clear_gradients()
    assert all(bool(paddle.isfinite(grad).all()) for grad in grads)


def test_without_a_mask_the_past_is_padding(encoder):
    found = tokens(encoder, video(3))
    assert (found == tokens(encoder, video(3), [[1, 1, 1]] * 2)).all()
    assert (found == tokens(encoder, video(3), [[1, 1, 0]] * 2)).all()


def test_one_frame_is_an_image(encoder):
    image = video(1)
    found = encoder(None, None, paddle.to_tensor(image[:, 0] * 2 - 1)).numpy()
    np.testing.assert_allclose(tokens(encoder, image), found, atol=1e-6)


@pytest.mark.parametrize("frames", [1, 3])
def test_stills_behind_videos_stand_alone(encoder, frames):
    stills, pad = video(1, seed=5)[:, 0] * 2 - 1, paddle.zeros([2, frames], "bool")
    videos, stills = paddle.to_tensor(video(frames)), paddle.to_tensor(stills)
    found = encoder(videos, pad, stills).numpy()
    apart = np.concatenate([encoder(videos, pad).numpy(), encoder(None, None, stills).numpy()])
    # Not bit for bit: a matrix product may round a row by its place among the rows.
    np.testing.assert_allclose(found, apart, rtol=0, atol=1e-6 * np.abs(apart).max())
    assert np.abs(found[0] - encoder(videos, pad, stills + 1.0).numpy()[0]).max() == 0


def test_past_frames_leave_behind_the_last_layer_that_looks_back(monkeypatch):
    paddle.seed(0)
    config = policy_config().vlm_config.gemma3_config
    encoder = VideoEncoder(config, 4, 2, SingleDevicePlacement())
    tower, frames = encoder.tower, []
    number = len(tower.layers)
    assert number % 2 == 1
    for layer in tower.layers:
        layer.register_forward_pre_hook(lambda _, inputs: frames.append(inputs[0].shape[0]))
    pixels, pad = paddle.to_tensor(video(3)), paddle.zeros([2, 3], "bool")
    found = encoder.pooled_rows(pixels, pad, None).numpy()
    assert frames == [6] * (number - 1) + [2]
    monkeypatch.setattr(tower, "num_layers_with_past", number)
    wanted = encoder.pooled_rows(pixels, pad, None).numpy()
    assert frames[number:] == [6] * number
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_order_of_frames_matters(encoder):
    frames = video(3)
    swapped = frames[:, [1, 0, 2]]
    real = [[0, 0, 0]] * 2
    assert np.abs(tokens(encoder, frames, real) - tokens(encoder, swapped, real)).max() > 1e-5


def test_code_of_the_current_frame_is_zero():
    codes = frame_codes(4, 32)
    assert (codes[-1] == 0).all()
    assert (codes[:-1] != 0).any(axis=1).all()
    # A frame's age matters, not the number of frames.
    np.testing.assert_array_equal(codes[1:], frame_codes(3, 32))
    with pytest.raises(ValueError, match="lower n_obs_steps"):
        frame_codes(42, 32)


def test_frames_see_those_before_them_that_are_real():
    used = frames_in_use(paddle.to_tensor(np.array([[1, 0, 1]], bool)))
    found = HistoryMask(used, copies=1).visible_BLS.numpy()[0]
    assert found.tolist() == [[False] * 3, [False, True, False], [False, True, True]]


def test_sizes_and_lengths_are_checked(encoder):
    with pytest.raises(ValueError, match="5 frames; n_obs_steps allows 4"):
        tokens(encoder, video(5))
    with pytest.raises(ValueError, match=r"\[3, 42, 56\]; the tower takes \[3, 56, 56\]"):
        tokens(encoder, video(2)[:, :, :, :42])
