"""An exported Qwen3-VL behind the engine and the server.

Guarantees: requests at once, greedy and drawn, get the answers of the model alone, with
log-probabilities, stops and forms; what is cancelled or ends gives its memory back; too much is
refused, and so is what an export has not. (The answers of `paddle-vl serve`: `tests/routes`.)
"""

import gc
from typing import Any

import numpy as np
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.cli.main import main
from paddle_vl.export import load
from paddle_vl.generation.sampling import Sampling
from paddle_vl.serving.engine import Engine, EngineFull, EngineSettings, Request
from tests.support.openai_server import model_folder, png

SIDES = (16, 64, 32)
SETTINGS = EngineSettings(
    max_num_seqs=2, max_num_batched_tokens=4, kv_cache_tokens=200, block_size=4,
    max_waiting_tokens=400,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    source = model_folder(tmp_path_factory.mktemp("model"))
    out = tmp_path_factory.mktemp("export") / "out"
    assert main(["export", "--model", str(source), "--output", str(out)]) == 0
    return source, out


@pytest.fixture(scope="module")
def exported(folders):
    return load(folders[1])


@pytest.fixture
def engine(exported):
    engine = Engine(exported, SETTINGS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(exported):
    """Ids and visual inputs; the last one is text alone."""
    content = ["<image>What?"] * len(SIDES) + ["digit 1 2 3"]
    images = [[png(side)] for side in SIDES] + [[]]
    found = []
    for text, own in zip(content, images, strict=True):
        inputs = exported.processor(messages=[{"role": "user", "content": text}], images=own)
        del inputs["attention_mask"]
        found.append((inputs.pop("input_ids")[0], inputs))
    return found


def test_requests_at_once_get_the_answers_of_the_model(folders, engine, prompts):
    model = Qwen3VLForConditionalGeneration.from_pretrained(folders[0])
    greedy: dict[str, Any] = {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": 1.3, "seed": 7, "top_k": 20}
    wanted, handles = [], []
    for number, (ids, visual) in enumerate(prompts * 2):
        sampling, length = (greedy, drawn)[number // len(prompts)], 9 - number
        settings = {"do_sample": True, **drawn} if sampling is drawn else {"do_sample": False}
        answer = model.generate(ids[None], **visual, max_new_tokens=length, **settings)
        wanted.append(answer[0].tolist())
        request = Request(ids, Sampling(length, **sampling), visual)
        handles += [engine.submit(request)]
        if number == 3:
            engine.start()
    assert [[event.token_id for event in handle] for handle in handles] == wanted
    engine.close()
    stats = engine.stats()
    assert [stats[name] for name in ("running", "waiting", "kv_blocks_used")] == [0, 0, 0]


def test_rules_stops_and_bounds_hold(exported, engine, prompts):
    (ids, visual), (text, _), scores = prompts[0], prompts[-1], []
    free = exported.generate(
        ids[None], **visual, max_new_tokens=3, do_sample=False, on_logits=scores.append
    )[0].tolist()

    def submitted(*request, adapter=None, **sampling):
        ids, visual, most = request
        return engine.submit(
            Request(ids, Sampling(most, temperature=0.0, **sampling), visual, adapter)
        )

    with pytest.raises(ValueError, match="there is no adapter doors: an export has none"):
        submitted(text, {}, 3, adapter="doors")
    with pytest.raises(ValueError, match="image placeholder tokens in input_ids but"):
        submitted(text, visual, 3)
    endless, other = submitted(text, {}, 140), submitted(text, {}, 140)
    with pytest.raises(EngineFull, match="tokens of earlier requests wait, and at most 400 may"):
        submitted(text, {}, 140)
    other.cancel()
    engine.start()
    next(iter(endless))
    events = [*submitted(ids, visual, 3, logprobs=2, stop_token_ids=(free[1],))]
    assert [event.token_id for event in events] == free[: free.index(free[1]) + 1]
    assert events[-1].finish_reason == "stop"
    scores_V = scores[0][0].astype(np.float64)
    wanted_V = scores_V - np.log(np.exp(scores_V - scores_V.max()).sum()) - scores_V.max()
    assert events[0].logprob == pytest.approx(wanted_V.max(), rel=1e-4)
    mask_V = np.arange(exported.vocab_size) == 9
    only = submitted(text, {}, 2, allowed=lambda _: mask_V)
    assert [event.token_id for event in only] == [9, 9]
    endless.cancel()
    assert [*endless][-1].finish_reason == "cancelled"
    engine.close()
    gc.collect()
    assert not engine._model._decoders


def test_what_an_export_has_not_is_refused(folders, capsys):
    arguments = ["serve", "--model", str(folders[1]), "--lora-modules", "doors=x"]
    assert main([*arguments, "--dtype", "auto"]) == 1
    assert "whole prompts: leave --dtype, --lora-modules out" in capsys.readouterr().err
