"""Continuous batching.

Guarantees: an answer is that of the request alone, greedy or drawn, whatever joins and leaves
beside it, bit for bit where steps have one shape; all memory comes back, also from cancelled and
failed requests; bounds hold: tokens of prompts in a step, tokens that wait, blocks, encoded images;
requests begin in their order; each row has its own adapter, equal to a merged model; a request that
fails fails alone; a step reads the chosen ids and nothing else.
"""

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.vlm.answering.batched import BatchedModel
from paddle_vl.generation.sampling import Sampling
from paddle_vl.serving.engine import Engine, EngineFull, EngineSettings, Request
from paddle_vl.testing.qwen3_5 import tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import EXPERTS, patches, token_rows
from tests.support.gpu_stubs.pretended import implementation
from tests.support.tiny import tiny_model

PIXELS, GRID = patches([[1, 4, 4], [1, 2, 4]])
VIDEO, VIDEO_GRID = patches([[2, 2, 4]], seed=3)
# Two images, text, the second image again, a video, text of one token.
PROMPTS = [
    (
        token_rows([1, ("image", 4), 2, ("image", 2), 3]),
        {"pixel_values": PIXELS, "image_grid_thw": GRID},
    ),
    (token_rows([5, 6, 7, 8, 9, 10, 11, 12, 13]), {}),
    (
        token_rows([4, ("image", 2), 6]),
        {"pixel_values": PIXELS[16:], "image_grid_thw": GRID[1:]},
    ),
    (
        token_rows([1, ("video", 2), 3, ("video", 2), 8]),
        {"pixel_values_videos": VIDEO, "video_grid_thw": VIDEO_GRID},
    ),
    (token_rows([7]), {}),
]
SMALL: dict[str, Any] = {
    "max_num_seqs": 3, "max_num_batched_tokens": 4, "kv_cache_tokens": 80, "block_size": 4,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {
    "temperature": 1.3, "seed": 7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3,
}  # fmt: skip


@pytest.fixture
def start():
    """Makes running engines, which the test's end closes."""
    engines = []

    def started(model, adapters=None, **settings) -> Engine:
        engines.append(Engine(model, EngineSettings(**(SMALL | settings)), adapters))
        engines[-1].start()
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def request(number: int, max_tokens: int = 6, adapter: str | None = None, **sampling) -> Request:
    ids, visual = PROMPTS[number]
    return Request(ids[0], Sampling(max_tokens, **sampling), visual, adapter)


def tokens(handle) -> list[int]:
    return [event.token_id for event in handle]


def alone(model, number: int, max_tokens: int = 6, **sampling: Any) -> list[int]:
    ids, visual = PROMPTS[number]
    settings = {"do_sample": sampling["temperature"] > 0, **sampling}
    settings = settings if settings["do_sample"] else {}
    return model.generate(ids, **visual, max_new_tokens=max_tokens, **settings)[0].tolist()


def check_all_is_back(engine: Engine) -> None:
    # The last event comes before the step has ended.
    engine.close()
    stats = engine.stats()
    assert [stats[name] for name in ("running", "waiting", "kv_blocks_used")] == [0, 0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("build", [tiny_model, partial(tiny_model, **EXPERTS), tiny_qwen3_5])
def test_answers_are_those_of_each_request_alone(start, build, sampling):
    """More requests than rows; two come when others are half done."""
    model = build()
    lengths = [9, 3, 6, 1, 7]
    wanted = [alone(model, i, n, **sampling) for i, n in enumerate(lengths)]
    engine = start(model)
    handles = [engine.submit(request(i, lengths[i], **sampling)) for i in range(3)]
    begun = iter(handles[0])
    first = next(begun).token_id
    handles += [engine.submit(request(i, lengths[i], **sampling)) for i in (3, 4)]
    found = [[first, *(event.token_id for event in begun)], *map(tokens, handles[1:])]
    assert found == wanted
    check_all_is_back(engine)
    # The second image of the first prompt is that of the third.
    assert engine.stats()["image_cache_hits"] == 1


def test_keys_are_not_read_before_they_are_written(start, monkeypatch):
    """Their memory is not cleared."""
    model, empty = tiny_model(), paddle.empty
    wanted = [alone(model, number, **GREEDY) for number in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(paddle, "empty", lambda *args: paddle.full_like(empty(*args), np.nan))
        engine = start(model, batch_invariant=True)
    handles = [engine.submit(request(number, **GREEDY)) for number in range(3)]
    assert [tokens(handle) for handle in handles] == wanted


def test_no_bit_depends_on_what_runs_beside(start):
    """Log-probabilities are compared as they are."""
    engine = start(tiny_model(), batch_invariant=True)
    settings: dict[str, Any] = {"logprobs": 2, "temperature": 1.0, "seed": 3}
    single = [list(engine.submit(request(i, **settings))) for i in range(5)]
    handles = [engine.submit(request(i, **settings)) for i in range(5)]
    assert [list(handle) for handle in handles] == single


def test_cancelled_requests_leave_and_the_others_do_not_notice(start):
    model = tiny_model()
    wanted = alone(model, 0, **GREEDY)
    engine = start(model, max_num_seqs=2)
    running = engine.submit(request(1, 50, **GREEDY))
    other = engine.submit(request(0, **GREEDY))
    waiting = engine.submit(request(2, 50, **GREEDY))
    waiting.cancel()
    events = iter(running)
    next(events)
    running.cancel()
    assert [event.finish_reason for event in events][-1] == "cancelled"
    assert [event.finish_reason for event in waiting] == ["cancelled"]
    assert tokens(other) == wanted
    check_all_is_back(engine)


def test_requests_begin_in_their_order_and_too_many_are_refused():
    """With memory for one of them; a short one at the end does not overtake."""
    engine = Engine(tiny_model(), EngineSettings(**(SMALL | {"max_waiting_tokens": 60})))
    room = engine.stats()["kv_blocks_total"] * SMALL["block_size"]
    with pytest.raises(ValueError, match=rf"prompt has 1 tokens and max_tokens is {room + 1}, but"):
        engine.submit(request(4, room + 1))
    # Before the engine starts, all of them wait; the first may be any size.
    engine.submit(request(4, room, **GREEDY))
    with pytest.raises(EngineFull, match="at most 60 may") as refused:
        engine.submit(request(1, 30, **GREEDY))
    assert 1 <= refused.value.retry_after <= 60
    engine = Engine(tiny_model(), EngineSettings(**SMALL))
    ended, handles = [], [engine.submit(request(4, n, **GREEDY)) for n in (room, room, 2)]

    def follow(number: int) -> None:
        tokens(handles[number])
        ended.append(number)

    threads = [threading.Thread(target=follow, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    engine.start()
    for thread in threads:
        thread.join()
    assert ended == [0, 1, 2]
    engine.close()


def test_long_prompts_run_in_parts_beside_running_answers(start):
    """By the rows that the first layer sees."""
    model, rows, long = tiny_model(), [], token_rows([5] * 30)[0]
    layer: Any = model.decoder_layers[0]
    layer.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[0]))
    engine = start(model)
    answer = iter(engine.submit(request(4, 40, **GREEDY)))
    next(answer)
    handle = engine.submit(Request(long, Sampling(2, temperature=0.0)))
    tokens(handle)
    parts = [number for number, count in enumerate(rows) if count == 4]
    assert len(parts) == 7
    assert max(rows) == 4
    # A token of the answer between any two parts.
    assert np.diff(parts).tolist() == [2] * 6
    assert len(list(answer)) == 39


def test_encoded_images_are_kept_up_to_a_bound(start):
    model, runs = tiny_model(), []
    model.visual.register_forward_post_hook(lambda *_: runs.append(1))
    # Of the three, the image of 4 tokens has 768 bytes with its levels, the others 384.
    engine = start(model, image_cache_bytes=768)
    for number in (2, 2, 0, 2):
        tokens(engine.submit(request(number, 1, **GREEDY)))
        assert engine.stats()["image_cache_bytes"] <= 768
    assert len(runs) == 3
    assert engine.stats()["image_cache_hits"] == 2


ADAPTERS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": ["q_proj", "v_proj", "gate_proj", "o_proj"], "r": 4},
    "tower": {"target_modules": ["visual.*.linear_fc1", "k_proj"], "r": 3, "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "down_proj", "visual.*.qkv"], "r": 2, "use_dora": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        model, rng = tiny_model(), np.random.default_rng(seed)
        model.add_lora(LoRAConfig(lora_alpha=8, **settings))
        model.materialize_all()
        for item in model.stored_parameters():
            if ".lora_" in item.key:
                drawn = rng.normal(scale=0.3, size=item.parameter.shape).astype(np.float32)
                item.parameter.set_value(item.parameter.numpy() + drawn)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_adapter(made[name])
    return made


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_rows_with_adapters_answer_as_merged_models(start, folders, sampling):
    """All in one batch, with equal images, whose features differ."""
    wanted, names = {}, [None, *folders]
    for name in names:
        model = tiny_model() if name is None else merged(folders[name])
        wanted[name] = [alone(model, i, **sampling) for i in (0, 2)]
    assert len({str(each) for each in wanted.values()}) == 4
    engine = start(tiny_model(), folders, max_num_seqs=8, kv_cache_tokens=320)
    handles = {n: [engine.submit(request(i, adapter=n, **sampling)) for i in (0, 2)] for n in names}
    assert {name: list(map(tokens, each)) for name, each in handles.items()} == wanted
    # The base and "text" share the features of two images, which "tower" and "dora" have anew.
    assert engine.stats()["image_cache_misses"] == 6


def merged(folder) -> Any:
    model = tiny_model()
    model.load_adapter(folder)
    model.materialize_all()
    model.merge_lora()
    return model


def test_an_adapter_is_replaced_behind_what_runs(start, folders, tmp_path):
    """Its images too, as its tower encodes them."""
    engine = start(tiny_model(), {"own": folders["text"]}, max_num_seqs=1, kv_cache_tokens=320)
    wanted = {name: alone(merged(folder), 0, **GREEDY) for name, folder in folders.items()}
    assert len({str(each) for each in wanted.values()}) == 3
    before = None
    for name in ("tower", "dora", "text", "tower"):
        engine.change(partial(BatchedModel.load_adapter, name="own", folder=folders[name]))
        if before is not None:
            events, own = before
            assert [each.token_id for each in events] == own[1:]
        assert tokens(engine.submit(request(0, adapter="own", **GREEDY))) == wanted[name]
        events = iter(engine.submit(request(0, adapter="own", **GREEDY)))
        assert next(events).token_id == wanted[name][0], "it has begun"
        before = events, wanted[name]
    with pytest.raises((ValueError, RuntimeError)):
        engine.change(partial(BatchedModel.load_adapter, name="own", folder=tmp_path))
    assert tokens(engine.submit(request(0, adapter="own", **GREEDY))) == wanted["tower"]
    with pytest.raises(ValueError, match="the model has the adapters own, which are of"):
        engine.change(partial(BatchedModel.load_weights, folder=tmp_path))
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.change(lambda model: None)


def test_weights_are_replaced_with_the_images_that_they_have_encoded(start, folders, tmp_path):
    other = merged(folders["tower"])
    other.save_pretrained(tmp_path)
    engine = start(tiny_model())
    first, wanted = (alone(model, 0, **GREEDY) for model in (tiny_model(), other))
    assert tokens(engine.submit(request(0, **GREEDY))) == first != wanted
    engine.change(partial(BatchedModel.load_weights, folder=tmp_path))
    assert tokens(engine.submit(request(0, **GREEDY))) == wanted


def test_adapters_that_cannot_differ_by_row_are_refused(tmp_path, folders):
    model = tiny_model()
    model.add_lora(LoRAConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.materialize_all()
    model.save_adapter(tmp_path)
    settings = EngineSettings(**SMALL)
    with pytest.raises(ValueError, match="trains lm_head, .*merge this adapter"):
        Engine(tiny_model(), settings, {"head": tmp_path})
    with pytest.raises(ValueError, match="the model has an adapter, so it is no base"):
        Engine(model, settings)
    engine = Engine(tiny_model(), settings, folders)
    with pytest.raises(ValueError, match="no adapter dore: there is text, tower, dora"):
        engine.submit(request(0, adapter="dore"))


def test_a_grammar_chooses_what_may_follow_and_its_failure_ends_one_request(start):
    model = tiny_model()
    wanted = alone(model, 1, **GREEDY)

    def even(ids: list[int]) -> np.ndarray | None:
        return None if len(ids) == 1 else np.arange(64) % 2 == 0

    def broken(ids: list[int]) -> np.ndarray:
        return np.zeros(64, bool) if len(ids) == 2 else np.ones(64, bool)

    engine = start(model)
    handles = [
        engine.submit(request(1, **GREEDY)),
        engine.submit(request(1, allowed=even, **GREEDY)),
        engine.submit(request(1, allowed=broken, **GREEDY)),
    ]
    assert tokens(handles[0]) == wanted
    found = tokens(handles[1])
    assert not any(token % 2 for token in [found[0], *found[2:]])
    with pytest.raises(RuntimeError, match="failed at this request: the grammar allows no token"):
        tokens(handles[2])
    check_all_is_back(engine)


def test_a_request_that_fails_fails_alone(start, monkeypatch):
    model = tiny_model()
    wanted = alone(model, 1, **GREEDY)
    engine = start(model)
    encode = model.encode_items

    def failing(patches_of, grid):
        if len(grid) and grid[0, 0] == 2:
            raise MemoryError("no room for a video")
        return encode(patches_of, grid)

    monkeypatch.setattr(model, "encode_items", failing)
    handles = [engine.submit(request(i, **GREEDY)) for i in (3, 1)]
    with pytest.raises(RuntimeError, match="no room for a video"):
        tokens(handles[0])
    assert tokens(handles[1]) == wanted
    check_all_is_back(engine)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": np.array([1, 64])}, "outside the model's vocabulary of 64"),
        ({"input_ids": np.array([[1]])}, "one prompt"),
        ({"visual": {"pixel_values": PIXELS}}, "pixel_values without image_grid_thw"),
        ({"visual": {"pixel_values": PIXELS[1:], "image_grid_thw": GRID}}, "23 patches but"),
        ({"visual": {"pixel_values": PIXELS[:16], "image_grid_thw": GRID[:1]}}, "image"),
    ],
)
def test_wrong_requests_are_refused_at_once(changed, message):
    engine = Engine(tiny_model(), EngineSettings(**SMALL))
    given = request(0)
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**(vars(given) | changed)))


def test_close_lets_answers_end_in_time_and_cancels_the_rest(start):
    model = tiny_model()
    for seconds, wanted in ((60.0, "length"), (0.0, "cancelled")):
        engine = start(model)
        handle = engine.submit(request(4, 20, **GREEDY))
        engine.close(seconds)
        assert [event.finish_reason for event in handle][-1] == wanted
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(request(4))


def test_a_step_reads_the_chosen_ids_and_nothing_else(start, monkeypatch):
    model = tiny_model()
    engine = start(model)
    reads, plain = [], paddle.Tensor.numpy
    begun, go = threading.Event(), threading.Event()

    def held(ids: list[int]) -> None:
        # All rows have begun: from here on there are steps of answers only.
        if len(ids) == 2:
            begun.set()
            assert go.wait(60)

    def counted(self, *arguments):
        reads.append(list(self.shape))
        return plain(self, *arguments)

    def refuse(*_):
        raise AssertionError("host read")

    handles = [engine.submit(request(i, **DRAWN)) for i in (1, 2)]
    handles.append(engine.submit(request(4, 6, allowed=held, **DRAWN)))
    assert begun.wait(60)
    monkeypatch.setattr(paddle.Tensor, "numpy", counted)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(paddle.Tensor, name, refuse)
    go.set()
    for handle in handles:
        tokens(handle)
    assert set(map(str, reads)) <= {"[1]", "[2]", "[3]"}
    assert len(reads) <= 8


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_steps_on_a_gpu_are_one_call_of_flash_attention_per_layer(start, gpu):
    model = tiny_model()
    wanted = [alone(model, i, **GREEDY) for i in (1, 2)]
    with implementation(gpu) as calls:
        engine = start(model, max_num_batched_tokens=64)
        handles = [engine.submit(request(i, **GREEDY)) for i in (1, 2)]
        assert list(map(tokens, handles)) == wanted
        engine.close()
    # Keys of both rows side by side, one query of each.
    both = [call for call in calls if call.shapes[0][0] == 2]
    assert {call.name for call in both} == {
        "flash_attn_unpadded" if gpu == "a100" else both[0].name
    }
    assert len(both) % 3 == 0


def test_an_idle_engine_takes_no_time_and_gives_free_memory_back_once(start, monkeypatch):
    calls: list[float] = []
    monkeypatch.setattr("paddle_vl.serving.engine.release_free_memory", lambda: calls.append(0.0))
    monkeypatch.setattr("paddle_vl.serving.engine._IDLE_S", 0.02)
    engine = start(tiny_model())
    for number in (1, 2):
        tokens(engine.submit(request(1, temperature=0.0)))
        deadline = time.monotonic() + 20
        while len(calls) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        steps = engine.stats()["steps"]
        time.sleep(0.2)
        # Before the first request the engine may have been idle, too.
        assert number <= len(calls) <= number + 1
        assert engine.stats()["steps"] == steps
