"""A policy behind the server.

Guarantees: a client's observation, in any of its forms, gives the actions of the policy itself;
requests in one batch get the answers that each gets alone, whatever their company (exported
programs: `test_exported_pi07`); past frames and known actions are those of the policy; what is
wrong with an observation is refused by name before it joins a batch. (`paddle-vl serve-policy`:
`tests/routes`.)
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import check_policy_server
from paddle_vl.cli.main import main
from paddle_vl.families.policy.demonstrations.sample import Stream, sample_rng
from paddle_vl.families.policy.images import letterbox
from paddle_vl.serving import openpi, vla_eval
from paddle_vl.serving.msgpack_numpy import OPENPI, VLA_EVAL
from paddle_vl.serving.policy import _TEXTS, PolicyActor, open_policy
from tests.single_card_tests.families.pi07.test_policy import golden_policy
from tests.support.pi07_golden import character_tokenizer

STATE = np.array([0.1, -0.2, 0.3, 0.4, -0.5])
SIDE = (40, 60, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folder of a policy that sees one frame of two cameras."""
    policy = golden_policy(n_obs_steps=1, dataset_names=["a", "b"], max_delay=3)
    policy.tokenizer, policy.action_tokenizer = character_tokenizer(), None
    policy.save_pretrained(folder := tmp_path_factory.mktemp("served") / "saved")
    return folder


@pytest.fixture(scope="module")
def policy(saved):
    return open_policy(saved, "paddle")


def actor_of(policy, protocol=openpi, seed=0, **keys) -> PolicyActor:
    keys.setdefault("values", {"dataset_index": 1})
    return PolicyActor(policy, protocol.usual_keys, **keys, seed=seed)


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIDE, dtype=np.uint8)


def observation(seed: int = 0, **changes) -> dict:
    """An observation as openpi's clients send it."""
    found = {
        "observation/image": picture(seed),
        "observation/wrist_image": picture(seed + 50),
        "observation/state": STATE + seed / 10,
        "prompt": f"reach the mark {seed}",
    }
    found |= {key.replace("__", "/"): value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not None}


def answer(actor: PolicyActor, *requests) -> list:
    """The answers of requests that run together."""
    assert len({request.layout for request in requests}) == 1
    return [found["actions"] for found in actor.run([request.item for request in requests])]


def noise_of(policy, number: int, seed: int = 0) -> np.ndarray:
    shape = (1, policy.config.chunk_size, policy.config.max_action_dim)
    return sample_rng(seed, Stream.FLOW, number).standard_normal(shape, dtype=np.float32)


def pixels(image: np.ndarray) -> np.ndarray:
    """`[1, 3, H, W]` as the policy takes it."""
    return letterbox(image.transpose(2, 0, 1).astype(np.float32) / np.float32(255), (56, 56))[None]


def test_every_form_of_an_observation_gives_the_policys_actions(policy):
    raw = {
        "camera0": pixels(picture(0)),
        "camera1": pixels(picture(50)),
        "state": STATE[None].astype(np.float32),
        "prompt": ["reach the mark 0"],
        "dataset_index": np.array([1]),
    }
    wanted = policy.sample_actions(raw, noise_of(policy, 7))[0]
    first, second = picture(0), picture(50)
    own = {"camera0": first, "camera1": second, "state": STATE, "prompt": "reach the mark 0"}
    floats = {
        "camera0": first.transpose(2, 0, 1).astype(np.float32) / np.float32(255),
        "camera1": second[None],
        "state": STATE[None].tolist(),
        "dataset_index": np.int64(1),
        "speed": None,
    }
    nested = {
        "images": {"front": first, "camera1": second},
        "states": STATE,
        "task_description": "reach the mark 0",
        "fps": 20,
    }
    mapped = {"features": {"camera0": "images/front"}, "ignored": ["fps"]}
    for actor, given in [
        (actor_of(policy), observation()),
        (actor_of(policy), own),
        (actor_of(policy, values={"dataset_index": 0}), own | floats),
        (actor_of(policy, vla_eval, **mapped), nested),
    ]:
        (found,) = answer(actor, actor.request(given, 7))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    # Numbers of the metadata need no `_is_pad`; another seed or number is another chunk.
    actor = actor_of(policy, seed=1)
    others = [actor.request(own, 7), actor.request(own, 8), actor.request(own | {"speed": 3}, 7)]
    for request in others:
        assert np.abs(answer(actor, request)[0] - wanted).max() > 1e-3
    quick = policy.sample_actions(
        raw | {"speed": [3], "speed_is_pad": [False]}, noise_of(policy, 7, 1)
    )
    np.testing.assert_allclose(answer(actor, others[2])[0], quick[0], rtol=0, atol=1e-6)


TEXTS = ["go", np.array("go"), np.array(["go"]), np.str_("go"), b"go", np.array(b"go"), ["go"]]


@pytest.mark.parametrize("name", _TEXTS)
def test_a_text_may_have_numpys_forms(name, policy):
    """openpi's own server takes `prompt.item()` of what is no str."""
    for actor, dialect in ((actor_of(policy), OPENPI), (actor_of(policy, vla_eval), VLA_EVAL)):
        images = {"camera0": picture(0), "camera1": picture(1)}
        for text in TEXTS:
            given = {**images, "state": STATE, "prompt": "go", name: text}
            assert actor.observe(dialect.unpack(dialect.pack(given)))[name] == ["go"]
    for text in (np.array(["a", "b"]), b"\xff", np.array("\ud800"), np.array(3), "a" * 70_000):
        with pytest.raises(
            ValueError, match=f"'{name}' (is .*a text is needed|has more than 65536)"
        ):
            actor.observe({**images, "state": STATE, "prompt": "go", name: text})


def check_batches(actor: PolicyActor, itself: PolicyActor) -> None:
    """Requests of a batch get what each gets alone, and what the policy itself gives."""
    actor.warm_up([1, 2])
    given = [observation(seed, response="go " * seed) for seed in (1, 2, 3)]
    requests = [actor.request(each, number) for number, each in enumerate(given)]
    together = answer(actor, *requests)
    backwards = answer(actor, *requests[::-1])[::-1]
    for number, each in enumerate(given):
        (alone,) = answer(actor, requests[number])
        np.testing.assert_allclose(together[number], alone, rtol=0, atol=1e-6)
        np.testing.assert_allclose(backwards[number], alone, rtol=0, atol=1e-6)
        (of_policy,) = answer(itself, itself.request(each, number))
        np.testing.assert_allclose(alone, of_policy, rtol=0, atol=1e-5)


def test_a_batch_gives_what_each_request_gets_alone(policy):
    check_batches(actor_of(policy), actor_of(policy))


def test_requests_of_other_fields_or_delays_are_in_other_batches(policy):
    actor = actor_of(policy)
    known = {"prefix_action": np.zeros((3, 7)), "delay": 2}
    goals = {"subgoal0": picture(1), "subgoal1": picture(2)}
    changes = [{}, {"response": "go"}, {"quality": 3}, goals, known, known | {"delay": 3}]
    layouts = [actor.request(observation(3, **change), 0).layout for change in changes]
    assert len({*layouts}) == len(layouts)
    assert layouts[0] == actor.request(observation(4), 9).layout


def test_known_actions_begin_the_chunk(policy):
    actor = actor_of(policy)
    assert actor.extensions()["real_time_chunking"]["max_delay"] == 3
    known = np.random.default_rng(5).normal(size=(3, 7)).astype(np.float32)
    given = observation(prefix_action=known, delay=2)
    (chunk,) = answer(actor, actor.request(given, 0))
    np.testing.assert_allclose(chunk[:2], known[:2], rtol=0, atol=1e-5)
    (free,) = answer(actor, actor.request(observation(), 0))
    assert np.abs(chunk[2:] - free[2:]).max() > 1e-3


def test_past_frames_are_those_of_select_action():
    policy = golden_policy()
    policy.tokenizer = character_tokenizer()
    actor = actor_of(policy, vla_eval)
    history = actor.new_history()
    assert history is not None
    steps = [
        {"camera0": picture(step), "camera1": picture(step + 50), "state": STATE + step / 10}
        for step in range(policy.config.n_obs_steps)
    ]
    words = {"prompt": "reach"}
    for number, step in enumerate(steps):
        raw = {"camera0": pixels(step["camera0"]), "camera1": pixels(step["camera1"])}
        raw |= {"state": step["state"][None].astype(np.float32), "prompt": ["reach"]}
        policy.action_queue.clear()
        policy.select_action(raw | {"dataset_index": [1]}, noise_of(policy, number))
        wanted = np.concatenate(policy.action_queue)
        if number == 1:
            actor.observe(step | words, history)
            continue
        (found,) = answer(actor, actor.request(step | words, number, history))
        np.testing.assert_allclose(found[1:], wanted, rtol=0, atol=1e-6)
    # A client may send all frames itself.
    frames = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
    (found,) = answer(actor, actor.request(frames | words, number))
    np.testing.assert_allclose(found[1:], wanted, rtol=0, atol=1e-6)


FRAMES = np.stack([picture(1)] * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation__state": None}, r"lacks state \(under one of the keys .*observation/state"),
        ({"prompt": None, "observation__image": None}, "lacks prompt, camera0"),
        ({"observation__extra": 1}, "has 'observation/extra', and the policy reads .*--ignore"),
        ({"camera0": picture(1)}, "has 'camera0' twice, once as"),
        ({"observation__state": STATE[:4]}, r"'state' has shape \[1, 4\]; \[1 or more, 5\]"),
        ({"observation__state": STATE * np.nan}, "'state' holds NaN"),
        ({"observation__state": "left"}, "'state' is left; numbers are needed"),
        ({"prompt": 3}, "'prompt' is 3; a text is needed"),
        ({"observation__image": picture(1)[..., :2]}, r"'camera0' is uint8 \[40, 60, 2\]"),
        ({"observation__image": picture(1).astype(int)}, r"'camera0' is int64"),
        ({"observation__image": [[1]]}, "'camera0' is list; an image is an array"),
        ({"observation__image": picture(1) / 1.0}, "'camera0' has values from 0 to 255; .*divide"),
        ({"observation__image": picture(1) * np.nan}, "'camera0' has values from nan"),
        ({"observation__image": FRAMES}, r"frames are \{'state': 1, 'camera0': 2.*n_obs_steps 1"),
        ({"quality": 9}, "'quality' is 9; it must be from 1 to 5"),
        ({"speed": "fast"}, "'speed' is 'fast'; a whole number is needed"),
        ({"dataset_index": 2}, r"dataset_index is \[2\]"),
        ({"subgoal0": picture(1)}, "has subgoal0: give each camera its goal"),
        ({"delay": 1}, "one of prefix_action and delay"),
        ({"delay": 4, "prefix_action": np.zeros((4, 7))}, "max_delay allows 0 to 3"),
        ({"delay": 2, "prefix_action": np.zeros((1, 7))}, "action_prefix has only 1 steps"),
        ({"delay": 1, "prefix_action": np.zeros((1, 6))}, r"'prefix_action' has shape \[1, 6\]"),
    ],
)
def test_what_is_wrong_with_an_observation_is_named(changes, message, policy):
    with pytest.raises(ValueError, match=message):
        actor_of(policy).request(observation(**changes), 0)


def test_chunks_that_are_not_finite_are_not_sent(policy, monkeypatch):
    actor = actor_of(policy)
    requests = [actor.request(observation(seed), 0) for seed in (1, 2)]
    chunks = np.zeros((2, 4, 7), np.float32)
    chunks[1, 0, 0] = np.inf
    monkeypatch.setattr(policy, "raw_chunk", lambda inputs, noise: chunks)
    good, bad = actor.run([request.item for request in requests])
    assert (good["actions"] == 0).all()
    assert "not finite" in str(bad)


def test_what_cannot_be_served_is_refused(policy, saved, tmp_path):
    with pytest.raises(ValueError, match=r"reads no camera9; it reads state, camera0"):
        actor_of(policy, features={"camera9": "front"})
    with pytest.raises(ValueError, match="has no export.json: give a folder of paddle-vl export"):
        open_policy(saved, "onnxruntime")
    (tmp_path / "config.json").write_text('{"type": "pi07_high_level"}')
    with pytest.raises(ValueError, match="does not act"):
        open_policy(tmp_path, "paddle")


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (["--max-wait", "-1"], 2, "-1 is no number of seconds, 0 or more"),
        (["--deadline", "nan"], 2, "nan is no number of seconds, 0 or more"),
        (["--feature", "camera0"], 2, "'camera0' is not of the form NAME=..."),
        (["--value", "prompt=["], 1, 'in "--value prompt", line 1'),
        (["--chunk-size", "2"], 1, "--chunk-size is for --protocol vla-eval"),
        (
            ["--protocol", "vla-eval", "--chunk-size", "99"],
            1,
            "--chunk-size is 99, and this policy's chunks have",
        ),
    ],
)
def test_wrong_options_are_refused(given, code, message, saved, capsys, monkeypatch):
    # What is not refused would be served for ever.
    monkeypatch.setattr(PolicyActor, "warm_up", lambda *_: pytest.fail("not refused"))
    try:
        found = main(["serve-policy", str(saved), "--port", "0", *given])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert message in capsys.readouterr().err


@pytest.mark.heavy
def test_the_published_clients_get_the_policys_actions(saved, monkeypatch, capsys):
    """Installs both from PyPI."""
    monkeypatch.setattr(sys, "argv", ["check_policy_server.py", str(saved)])
    assert check_policy_server.main() == 0
    assert capsys.readouterr().out.count("the policy's, by") == 2
