"""`paddle-vl serve` as a process, with a model, asked by several clients of the `openai` package.

Guarantees: greedy answers of clients at once, streamed and not, with images and without, of the
model and of adapters over it that `model` names, are those of `generate` with each; a schema is
kept by the model; SIGTERM ends a stream that does not end with a reason, and the process with 0.
Heavy: with 64 clients, some of which leave or send what is no request, no answer is lost or
another's, memory stays, and at the end nothing is open.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import openai
import psutil
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.config.schema import LoRAConfig
from tests.single_card_tests.serving.test_openai_server import JSON_SCHEMA
from tests.support.openai_server import (
    WAIT_S,
    asked,
    model_folder,
    png,
    template_processor,
    uri,
)

ANSWER = 12
# With images of several sizes, and without.
QUESTIONS = [asked(uri(png(side))) for side in (16, 32, 64)] + [
    [{"role": "user", "content": text}] for text in ("What?", "digit 1 2 3", "weather in Bern")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


ADAPTERS = {"doors": ["q_proj", "down_proj"], "gates": ["visual.*.linear_fc1", "v_proj"]}


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Folders of adapters that change answers, by their names."""
    made = {}
    for seed, (name, targets) in enumerate(ADAPTERS.items()):
        model, rng = (
            Qwen3VLForConditionalGeneration.from_pretrained(folder),
            np.random.default_rng(seed),
        )
        model.add_lora(LoRAConfig(target_modules=targets, r=4, lora_alpha=8))
        model.materialize_all()
        for item in model.stored_parameters():
            if ".lora_" in item.key:
                drawn = rng.normal(scale=0.5, size=item.parameter.shape).astype(np.float32)
                item.parameter.set_value(item.parameter.numpy() + drawn)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_adapter(made[name])
    return made


@pytest.fixture(scope="module")
def process(folder, adapters):
    command = [
        sys.executable, "-m", "paddle_vl", "serve", str(folder), "--port", "0", "--grace", "0.5",
        "--served-model-name", "tiny", "--max-body-mb", "1", "--kv-cache-tokens", "8192",
        "--lora-modules", *(f"{name}={path}" for name, path in adapters.items()),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def client(process):
    for line in process.stderr:
        if found := re.search(r"tiny: (http://127\.0\.0\.1:\d+/v1)$", line):
            # Its further lines must not fill the pipe.
            threading.Thread(target=lambda: [*process.stderr], daemon=True).start()
            return openai.OpenAI(base_url=found[1], api_key="x", max_retries=0, timeout=WAIT_S)
    pytest.fail("the server did not start")


def generated(folder, base=None) -> list[str]:
    """Greedy answers of `generate` to the questions."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=base)
    processor = template_processor(base or folder)
    answers = []
    for messages in QUESTIONS:
        parts = messages[0]["content"]
        is_text = isinstance(parts, str)
        text = parts if is_text else f"<image>{parts[1]['text']}"
        inputs = processor(messages=[{"role": "user", "content": text}],
                           images=[] if is_text else [png(16 << len(answers))])  # fmt: skip
        ids = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)[0]
        ends = [place for place, each in enumerate(ids) if each in processor.eos_token_ids]
        answers.append(processor.decode(ids[: ends[0]] if ends else ids))
    return answers


def test_clients_at_once_get_the_answers_of_generate(folder, adapters, client):
    wanted = {"tiny": generated(folder)}
    wanted |= {name: generated(path, folder) for name, path in adapters.items()}
    assert min(len(set(each)) for each in wanted.values()) > 3
    assert len({str(each) for each in wanted.values()}) == 3

    def ask(name: str, place: int, stream: bool) -> str:
        settings = {"model": name, "messages": QUESTIONS[place], "max_tokens": ANSWER}
        create = client.chat.completions.create
        if not stream:
            return create(temperature=0, **settings).choices[0].message.content
        chunks = create(temperature=0, stream=True, **settings)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    # Neighbours have different models.
    asked = [(name, i, stream) for i in range(6) for stream in (False, True) for name in wanted]
    with ThreadPoolExecutor(12) as clients:
        found = [*clients.map(lambda each: ask(*each), asked)]
    assert found == [wanted[name][i] for name, i, _ in asked]
    listed = {each.id: each.parent for each in client.models.list()}
    assert listed == {"tiny": None, "doors": "tiny", "gates": "tiny"}


def test_a_model_keeps_a_schema(client):
    settings = {"model": "tiny", "messages": asked(uri(png())), "seed": 3, "max_tokens": 400}
    create = client.chat.completions.create
    choice = create(response_format=JSON_SCHEMA, **settings).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["digit"] in range(10)


# Of clients that misbehave, and what they may be told.
BROKEN = asked(uri(b"no image"))
LARGE = [{"role": "user", "content": "a" * (2 << 20)}]


async def client_of_many(client, number: int, end: float, wanted: dict, came: Counter) -> None:
    """Ask until the end: short and long answers, whole and streamed, some of them left, some of
    what is no request."""
    rng = random.Random(number)
    create = client.chat.completions.create
    while time.monotonic() < end:
        (name, place), answer = rng.choice([*wanted.items()])
        kind = rng.choice("whole stream leave late bad".split())
        settings = {"model": name, "messages": QUESTIONS[place], "temperature": 0}
        try:
            if kind == "bad":
                await create(**{**settings, "messages": rng.choice([BROKEN, LARGE])})
            elif kind == "late":
                await asyncio.wait_for(create(max_tokens=500, **settings), rng.random())
            elif kind == "leave":
                async with await create(max_tokens=500, stream=True, **settings) as stream:
                    async for _ in stream:
                        if rng.random() < 0.3:
                            break
            elif kind == "stream":
                stream = await create(max_tokens=ANSWER, stream=True, **settings)
                pieces = [each.choices[0].delta.content or "" async for each in stream]
                assert "".join(pieces) == answer
            else:
                found = await create(max_tokens=ANSWER, **settings)
                assert found.choices[0].message.content == answer
            came[kind] += 1
        except asyncio.TimeoutError:
            came["left"] += 1
        except openai.APIStatusError as error:
            came[error.status_code] += 1
            if error.status_code == 429 and "retry-after" not in error.response.headers:
                came["without a time to come back"] += 1


@pytest.mark.heavy
def test_it_holds_with_64_clients(process, client):
    """PADDLE_VL_LOAD_SECONDS says for how long; 20 without it."""
    settings = {"temperature": 0, "max_tokens": ANSWER}
    create = client.chat.completions.create
    wanted = {
        (name, place): create(model=name, messages=each, **settings).choices[0].message.content
        for name in ("tiny", *ADAPTERS)
        for place, each in enumerate(QUESTIONS)
    }
    memory, came = psutil.Process(process.pid).memory_info, Counter()
    begin = memory().rss

    async def ask(seconds: float) -> None:
        address, end = str(client.base_url), time.monotonic() + seconds
        limits = httpx2.Limits(max_connections=100)
        async with httpx2.AsyncClient(limits=limits, timeout=WAIT_S) as plain:
            own = openai.AsyncOpenAI(
                base_url=address, api_key="x", max_retries=0, http_client=plain
            )
            numbers = range(64)
            await asyncio.gather(*(client_of_many(own, i, end, wanted, came) for i in numbers))

    seconds = float(os.environ.get("PADDLE_VL_LOAD_SECONDS", "20"))
    asyncio.run(ask(seconds / 2))
    half = memory().rss
    asyncio.run(ask(seconds / 2))
    print(dict(came), *(f"{each >> 20} MiB" for each in (begin, half, memory().rss)))
    assert came.keys() <= {"whole", "stream", "leave", "late", "left", 400, 413, 429}
    assert min(came[name] for name in ("whole", "stream", "leave", "left", 400, 413)) > 0
    assert memory().rss < half + (64 << 20)
    end = time.monotonic() + WAIT_S
    metrics = f"{str(client.base_url).removesuffix('/v1/')}/metrics"
    while not {"paddle_vl_open_requests 0", "paddle_vl_engine_kv_blocks_used 0"} <= set(
        httpx2.get(metrics).text.splitlines()
    ):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_signal_ends_streams_and_the_process(process, client):
    # Too long for the half second that answers have.
    form = {"structured_outputs": {"choice": ["a" * 3000]}}
    settings = {"model": "tiny", "prompt": "a", "max_tokens": 3000, "stream": True}
    stream = client.completions.create(extra_body=form, **settings)
    next(stream)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the server is stopping"):
        list(stream)
    assert process.wait(WAIT_S) == 0
