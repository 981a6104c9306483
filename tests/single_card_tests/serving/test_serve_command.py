"""`paddle-vl serve` as a process, with a model, asked by several clients of the `openai` package.

Guarantees: greedy answers of clients at once, streamed and not, with images and without, are those
of `generate`; a schema is kept by the model; SIGTERM ends a stream that does not end with a reason,
and the process with 0.
"""

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.testing import tiny_qwen3_vl_config
from tests.single_card_tests.serving.test_openai_server import JSON_SCHEMA
from tests.support.openai_server import WAIT_S, asked, png, template_processor, uri

ANSWER = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    processor = template_processor(folder)
    values = tiny_qwen3_vl_config(vocab_size=448, initializer_range=1.0).to_dict()
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    values |= {name: getattr(processor, name) for name in ids}
    Qwen3VLForConditionalGeneration.from_config(Qwen3VLConfig.from_dict(values)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def process(folder):
    command = [
        sys.executable, "-m", "paddle_vl", "serve", str(folder), "--port", "0", "--grace", "0.5",
        "--served-model-name", "tiny", "--kv-cache-tokens", "8192",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def client(process):
    for line in process.stderr:
        if found := re.search(r"tiny: (http://127\.0\.0\.1:\d+/v1)$", line):
            return openai.OpenAI(base_url=found[1], api_key="x", max_retries=0, timeout=WAIT_S)
    pytest.fail("the server did not start")


def test_clients_at_once_get_the_answers_of_generate(folder, client):
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    processor = template_processor(folder)
    texts = ["What?", "digit 1 2 3", "weather in Bern"]
    # Same images of different sizes, and none.
    questions = [asked(uri(png(side))) for side in (16, 32, 64)]
    questions += [[{"role": "user", "content": text}] for text in texts]
    wanted = []
    for messages in questions:
        parts = messages[0]["content"]
        is_text = isinstance(parts, str)
        text = parts if is_text else f"<image>{parts[1]['text']}"
        inputs = processor(messages=[{"role": "user", "content": text}],
                           images=[] if is_text else [png(16 << len(wanted))])  # fmt: skip
        ids = model.generate(**inputs, max_new_tokens=ANSWER, do_sample=False)[0]
        ends = [place for place, each in enumerate(ids) if each in processor.eos_token_ids]
        wanted.append(processor.decode(ids[: ends[0]] if ends else ids))

    def ask(number: int) -> str:
        settings = {"model": "tiny", "messages": questions[number % 6], "max_tokens": ANSWER}
        create = client.chat.completions.create
        if number < 6:
            return create(temperature=0, **settings).choices[0].message.content
        stream = create(temperature=0, stream=True, **settings)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(12) as clients:
        assert [*clients.map(ask, range(12))] == wanted * 2
    assert len(set(wanted)) > 3


def test_a_model_keeps_a_schema(client):
    settings = {"model": "tiny", "messages": asked(uri(png())), "seed": 3, "max_tokens": 60}
    create = client.chat.completions.create
    choice = create(response_format=JSON_SCHEMA, **settings).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["digit"] in range(10)


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
