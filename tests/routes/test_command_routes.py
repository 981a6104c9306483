"""The commands of README and docs other than `train`, on models that were trained as they say, and
those whose answers, actions or weights are another's."""

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file
from websockets.sync.client import connect

from paddle_vl import PI07LowLevelPolicy
from paddle_vl.export import load
from paddle_vl.families.policy.demonstrations.sample import Stream, sample_rng
from paddle_vl.serving.msgpack_numpy import OPENPI, VLA_EVAL
from tests.routes.data import DATA
from tests.routes.lines import (
    ANSWERS,
    DRAWN,
    HEAVY_ANSWERS,
    HEAVY_LINES,
    LINES,
    Answers,
    Line,
)
from tests.routes.runs import Routes, assert_equals, number_of_ranks
from tests.routes.table import RUNS, TOPOLOGIES
from tests.support.finished_runs import assert_close

IMAGE, QUESTION = f"{DATA}/images/0000.png", "Which digit is this?"
SETTINGS = {"temperature": 2.0, "seed": 2}


def with_rows(rows: Sequence[Line | Answers], heavy: Sequence[Line | Answers] = ()):
    """A test of these rows."""
    marked = [pytest.param(row, marks=pytest.mark.heavy) for row in heavy]
    return pytest.mark.parametrize("row", [*rows, *marked], ids=lambda row: ", ".join(row.promised))


def with_answers(name: str):
    return with_rows(ANSWERS[name], HEAVY_ANSWERS.get(name, ()))


@with_rows(LINES, HEAVY_LINES)
def test_a_command_prints_and_writes_what_it_should(routes: Routes, row: Line):
    path, topology = routes.new_path(), TOPOLOGIES[row.way]
    words = shlex.split(routes.filled(row.line.replace("{made}", path)))
    printed = routes.command(*words, *topology, ranks=number_of_ranks(topology))
    assert re.search(row.printed, "\n".join(printed)), printed
    for end in row.made:
        assert (routes.folder / f"{path}{end}").stat().st_size > 0, end


def generated(routes: Routes, model: str) -> str:
    asked = ("--image", IMAGE, "--prompt", QUESTION, *DRAWN.split())
    answer = routes.command("generate", model, *asked)[0].removesuffix("\n")
    assert re.search(r"\w", answer), repr(answer)
    return answer


def said(routes: Routes, model: str) -> str:
    typed = f"{IMAGE} {QUESTION}\n"
    return routes.command("chat", model, *DRAWN.split(), typed=typed)[0].removesuffix("\n")


@contextmanager
def serving(routes: Routes, model: str, *names: str) -> Iterator[str]:
    """The address of a server that calls its model, or its adapters, `digits`."""
    names = names or ("--served-model-name", "digits")
    with routes.started("serve", model, *names, "--port", "0") as server:
        yield server.wait_for(r"http://127\.0\.0\.1:\d+/v1")[0]
        server.stop()


def served(routes: Routes, model: str, *names: str) -> str:
    """The answer of `serving`."""
    picture = base64.b64encode((routes.folder / IMAGE).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": QUESTION},
    ]
    with (
        serving(routes, model, *names) as address,
        openai.OpenAI(base_url=address, api_key="x", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="digits",
            messages=[{"role": "user", "content": content}],
            max_tokens=6,
            extra_body={"top_k": 50},
            **SETTINGS,
        )
    return answer.choices[0].message.content


@with_answers("chats")
def test_chat_and_a_server_give_the_answers_of_generate(routes: Routes, row: Answers):
    model = str(routes.one_device(row.run))
    found = {"chat": said, "serve": served}[row.command](routes, model)
    assert found == generated(routes, model)


@with_answers("asked")
def test_a_server_is_asked_a_benchmark_with_the_answers_of_its_model(routes: Routes, row: Answers):
    def answers(*named: str) -> str:
        file = f"{routes.new_path()}.jsonl"
        suite = ("--suite", "runs/suite.yaml", "--limit", "8", "--predictions", file)
        routes.command("evaluate", *named, *suite)
        return (routes.folder / file).read_text()

    model = str(routes.one_device(row.run))
    with serving(routes, model) as address:
        found = answers("digits", "--endpoint", address)
    assert found == answers(model)
    assert found.count("\n") == 8


@with_answers("adapted")
def test_merged_and_served_adapters_are_those_of_the_run(routes: Routes, row: Answers):
    adapters = str(routes.one_device(row.run))
    if row.command.startswith("serve"):
        base = str(routes.one_device("packed"))
        found = served(routes, base, "--lora-modules", f"digits={adapters}")
        assert found == generated(routes, adapters)
        return
    checkpoint, merged = f"{adapters}/checkpoint-3", routes.new_path()
    routes.command("merge", checkpoint, merged)
    if row.run.endswith("lora"):
        assert generated(routes, merged) == generated(routes, adapters)
        return
    found, wanted = (
        load_file(routes.folder / folder / "model.safetensors")
        for folder in (merged, f"{adapters}/final")
    )
    assert_close(found, wanted)


@with_answers("exported")
def test_an_export_gives_the_answers_of_its_model(routes: Routes, row: Answers):
    model = str(routes.one_device(row.run))
    folder = f"{model}-exported"
    routes.once(f"{row.run}-exported", lambda: routes.command("export", model, folder))
    if row.command == "export":
        question = [{"role": "user", "content": f"<image>{QUESTION}"}]
        drawn = {"max_new_tokens": 6, "do_sample": True, **SETTINGS}
        found = load(routes.folder / folder).ask(question, [routes.folder / IMAGE], **drawn)
    else:
        found = served(routes, folder)
    assert found == generated(routes, model)


@with_answers("served")
def test_a_served_policy_acts_as_it_does(routes: Routes, row: Answers):
    model = folder = str(routes.one_device(row.run))
    # Of the two steps that it sees.
    image = np.random.default_rng(0).integers(0, 255, (2, 56, 56, 3)).astype(np.uint8)
    state, task = np.zeros((2, 4), np.float32), "move to the mark"
    if row.command.endswith("export"):
        folder = routes.new_path()
        routes.command("export", model, folder)
    words, number = row.command.removesuffix(" of an export").split(), 0
    with routes.started(*words, folder, "--port", "0", "--seed", "1") as server:
        address = server.wait_for(r"ws://127\.0\.0\.1:\d+")[0]
        with connect(address) as client:
            if "vla-eval" in words:
                # Its server keeps the past.
                for number in range(2):
                    seen = {"camera0": image[number], "camera1": image[number]}
                    seen = {"task_description": task, "state": state[number], "images": seen}
                    told = {"type": "observation", "payload": seen, "seq": number, "timestamp": 0}
                    client.send(VLA_EVAL.pack(told))
                    found = VLA_EVAL.unpack(client.recv())["payload"]["actions"]
            else:
                client.recv()
                seen = {"prompt": task, "state": state, "camera0": image, "camera1": image}
                client.send(OPENPI.pack(seen))
                found = OPENPI.unpack(client.recv())["actions"]
        server.stop()
    policy = PI07LowLevelPolicy.from_pretrained(routes.folder / model / "final")
    picture = image.transpose(0, 3, 1, 2)[None] / np.float32(255)
    seen = {"prompt": [task], "state": state[None], "camera0": picture, "camera1": picture}
    seen["obs_history_is_pad"] = np.zeros((1, 2), bool)
    noise = sample_rng(1, Stream.FLOW, number).standard_normal((1, 8, 8), dtype=np.float32)
    assert_close({"actions": found[None]}, {"actions": policy.sample_actions(seen, noise)})


@with_answers("precomputed")
def test_a_reference_in_advance_is_that_of_the_run(routes: Routes, row: Answers):
    run, output = routes.one_device(row.run), routes.new_path()
    routes.command("precompute-reference", f"{run}/config.yaml")
    words = routes.settings(RUNS[row.run], ())
    words += ["preference.precompute_ref_log_probs=true", f"train.output_dir={output}"]
    routes.command("train", *words)
    assert_equals(routes.folder / output, routes.folder / run)
