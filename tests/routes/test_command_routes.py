"""The commands of README and docs other than `train`, on what the training routes made.

Guarantees: each of `table.COMMANDS` ends with 0, prints and writes what it should; `chat`, a server,
an export and adapters that are merged or served give the answers of `generate`.
"""

import base64
import re
import shlex

import numpy as np
import openai
import pytest
from websockets.sync.client import connect

from paddle_vl.export import load
from paddle_vl.serving.msgpack_numpy import OPENPI
from tests.routes.data import DATA
from tests.routes.table import ADAPTERS, CHATS, COMMANDS, EXPORTS, POLICIES, Answers, Line

IMAGE, QUESTION, LONGEST = f"{DATA}/images/0000.png", "Which digit is this?", "6"


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=[pytest.mark.heavy] * line.is_heavy) for line in COMMANDS],
    ids=lambda line: f"{line.command}: {line.family}, {line.what}",
)
def test_a_command_prints_and_writes_what_it_should(routes, line: Line):
    path = routes.new_path()
    words = [routes.filled(word.replace("{row}", path)) for word in shlex.split(line.line)]
    printed = "\n".join(routes.command(*words, ranks=line.ranks))
    print(printed[-1500:])
    assert re.search(line.printed, printed), printed
    for name in line.made:
        assert (routes.folder / name.replace("{row}", path)).stat().st_size > 0, name


def named(row: Answers) -> str:
    return f"{row.command}: {row.family}"


def generated(routes, model: str) -> str:
    asked = ("--image", IMAGE, "--prompt", QUESTION, "--max-new-tokens", LONGEST)
    return routes.command("generate", str(model), *asked)[0].removesuffix("\n")


def asked_of(address: str, model: str, folder) -> str:
    client = openai.OpenAI(base_url=address, api_key="x", max_retries=0, timeout=120)
    picture = base64.b64encode((folder / IMAGE).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": QUESTION},
    ]
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=int(LONGEST),
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("row", CHATS, ids=named)
def test_chat_and_a_server_give_the_answers_of_generate(routes, row: Answers):
    model = str(routes.one_device(row.run))
    wanted = generated(routes, model)
    print(repr(wanted))
    typed = f"{IMAGE} {QUESTION}\n"
    said = routes.command("chat", model, "--max-new-tokens", LONGEST, typed=typed)[0]
    assert said.removesuffix("\n") == wanted
    with routes.serving("serve", model, "--served-model-name", "digits") as address:
        assert asked_of(address, "digits", routes.folder) == wanted


@pytest.mark.parametrize("row", ADAPTERS, ids=named)
def test_merged_and_served_adapters_give_the_answers_of_adapters(routes, row: Answers):
    adapters, base = routes.one_device(row.run), routes.one_device("packed")
    wanted, merged = generated(routes, adapters), routes.new_path()
    routes.command("merge", str(adapters), merged)
    assert generated(routes, merged) == wanted
    with routes.serving(
        "serve", str(base), "--served-model-name", "digits", "--lora-modules", f"doors={adapters}"
    ) as address:
        assert asked_of(address, "doors", routes.folder) == wanted


@pytest.mark.parametrize("row", EXPORTS, ids=named)
def test_an_export_gives_the_answers_of_its_model(routes, row: Answers):
    model, folder = str(routes.one_device(row.run)), routes.new_path()
    wanted = generated(routes, model)
    routes.command("export", model, folder)
    question = [{"role": "user", "content": f"<image>{QUESTION}"}]
    exported = load(routes.folder / folder)
    images = [routes.folder / IMAGE]
    assert exported.ask(question, images, max_new_tokens=int(LONGEST)) == wanted


def observation() -> dict:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (56, 56, 3)).astype(np.uint8)
    state = np.zeros(4, np.float32)
    return {"prompt": "move to the mark", "state": state, "camera0": image, "camera1": image}


@pytest.mark.parametrize("row", POLICIES, ids=named)
def test_a_served_policy_and_its_export_act(routes, row: Answers):
    model, folder = str(routes.one_device(row.run)), routes.new_path()
    routes.command("export", model, folder)
    actions = []
    for served in (model, folder):
        with routes.serving("serve-policy", served) as address, connect(address) as client:
            client.recv()
            client.send(OPENPI.pack(observation()))
            actions.append(OPENPI.unpack(client.recv())["actions"])
    assert actions[0].shape == (8, 4)
    np.testing.assert_allclose(actions[1], actions[0], rtol=1e-4, atol=1e-5)
