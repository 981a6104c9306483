"""Runs whose answers a server samples.

Guarantees: our own server gives the answers of the trained weights after every update, of a whole
model and of an adapter, with the log-probabilities of its sampler; without token ids the texts are
learned where the run asks for it; a server that fails is asked again, and one that does not fit is
refused by its address, its model and the remedy.
"""

import json
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from paddle_vl.cli.main import build_parser
from paddle_vl.cli.serve import served_model
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.families.vlm.grpo.endpoint import RolloutServer
from paddle_vl.families.vlm.grpo.endpoint_settings import RolloutConfig
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.generation.sampling import Sampling
from tests.single_card_tests.train.tiny_run import write_records
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import arrays_of, metrics_of
from tests.support.openai_server import serving
from tests.support.sampled_runs import SAMPLED, write_sampled_run

GAP = "sampling/sampling_logp_difference"
LORA = "model.lora={r: 2, target_modules: [all-linear]}"
STEPS = ("train.max_steps=3", "grpo.num_iterations=1", "grpo.steps_per_generation=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    run_file = write_sampled_run(tmp_path_factory.mktemp("sampled"))
    # A server has all of a model in one folder.
    shutil.copytree(run_file.with_name("processor"), run_file.with_name("base"), dirs_exist_ok=True)
    return run_file


@contextmanager
def own_server(data, folder, *options):
    """The address of `paddle-vl serve` of the base model in a thread, and the model."""
    command = ["serve", "--model", str(data.with_name("base")), "--served-model-name", "policy"]
    command += ["--kv-cache-tokens", "4096", "--allowed-weights-path", str(folder)]
    served = served_model(build_parser().parse_args([*command, *options]))
    served.engine.start()
    with serving(served) as address:
        yield f"{address}/v1", served


def rollout(address, model="policy", more=""):
    return f"train.rollout={{endpoint: '{address}', model: {model}{more}}}"


PROCESSED = ("--logprobs-mode", "processed_logprobs")


@pytest.mark.parametrize("more", [[], [LORA, "train.learning_rate=0.5"]], ids=["model", "adapter"])
def test_answers_of_the_own_server_are_those_of_the_trained_weights(data, tmp_path, more):
    name = "letters" if more else "policy"
    with own_server(data, tmp_path, *PROCESSED) as (address, served):
        build(data, tmp_path, *SAMPLED, *STEPS, *more, rollout(address, name)).run()
        assert list(served.adapters) == ["letters"] * len(more[:1])
    lines = metrics_of(tmp_path)
    # The temperature is 0.9, and updates are large.
    assert [line[f"{GAP}/max"] < 1e-4 for line in lines] == [True] * 3
    assert lines[-1]["completions"] == 3 * 2 * 2
    stem = "adapter_model" if more else "model"
    sent, final = (arrays_of(tmp_path / name, [stem]) for name in ("rollout_weights", "final"))
    assert sent.keys() == final.keys()
    # The last update is not sampled from.
    assert any(not np.array_equal(sent[key], final[key]) for key in sent)
    samples = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    answers = [each for line in samples for each in json.loads(line)["answer"].splitlines()]
    assert len({*answers}) > 3


def test_log_probabilities_before_the_temperature_end_the_run(data, tmp_path):
    far = pytest.raises(ValueError, match=r"differ from the trainer's by .* nats")
    with own_server(data, tmp_path) as (address, _), far:
        build(data, tmp_path, *SAMPLED, *STEPS, rollout(address), "grpo.temperature=0.2").run()


QUESTION = [{"role": "user", "content": "Which colour?"}]
CHOICE = {"index": 0, "message": {"content": "red"}, "finish_reason": "stop"}


@contextmanager
def stand_in(length, *statuses, choice=CHOICE, loaded=b""):
    """The address of a server that answers with these statuses in turn and then well, and what it
    was asked.

    Args:
        length: tokens that it counts in a prompt.
        loaded: what it says of an adapter.
    """
    asked, left = [], [*statuses]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            status = left.pop(0) if left else 200
            choices = [choice | {"index": i} for i in range(body.get("n", 0))]
            answer = {"choices": choices, "usage": {"prompt_tokens": length}}
            self.send_response(status)
            self.end_headers()
            said = json.dumps(answer if status == 200 else {"error": "full"}).encode()
            self.wfile.write(loaded if "lora" in self.path else said)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def texts(data):
    """Settings of prompts without images, and the tokens of each."""
    file = data.with_name("texts.jsonl")
    write_records(file, [{"messages": QUESTION, "solution": "red"}] * 24)
    processor = VLProcessor.from_pretrained(data.with_name("base"))
    (ids,) = processor.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=True)
    # Answers are equal, but each is learned.
    return [f"data.train=[{file}]", "grpo.beta=0.04"], len(ids)


def test_texts_are_learned_where_it_is_asked_for_and_a_busy_server_is_asked_again(
    data, tmp_path, texts
):
    settings, length = texts
    with stand_in(length, 200, 503, 429) as (address, asked):
        given = rollout(address, more=", retokenize: true")
        build(data, tmp_path, *SAMPLED, *STEPS, *settings, given, "train.max_steps=1").run()
    (line,) = metrics_of(tmp_path)
    processor = VLProcessor.from_pretrained(data.with_name("base"))
    count = min(len(processor.tokenizer.encode("red")) + 1, 4)
    assert (line["completions/mean_length"], line[f"{GAP}/mean"]) == (count, 0.0)
    (path, loaded), *prompts = asked
    assert path == "/update_weights_from_disk"
    assert loaded == {"model_path": str(tmp_path / "rollout_weights")}
    assert len(prompts) == 2 + 2
    body = prompts[-1][1]
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.9, -1, 4)
    assert {*body["logit_bias"].values()} == {-100}
    # A prompt that is asked again has its seed again.
    assert len({each["seed"] for _, each in prompts}) == 2


IDS = {"token_ids": [7, 8], "logprobs": {"content": [{"token": "a", "logprob": -1.0}] * 2}}


@pytest.mark.parametrize(
    ("statuses", "counted", "choice", "message"),
    [
        (
            [404, 404],
            0,
            CHOICE,
            r"does not load .*rollout_weights: no answer of .*--allowed-weights-path",
        ),
        (
            [200, 404, 404],
            0,
            CHOICE,
            r"no answer of http://127\.0\.0\.1:\d+/v1/chat/completions: .*404",
        ),
        (
            [],
            1,
            CHOICE,
            r"v1 as policy: the server has a prompt of \d+ tokens, and the run",
        ),
        ([], 0, CHOICE, "0 token ids and 0 log-prob.*set train.rollout.retokenize=true"),
        ([], 0, CHOICE | IDS, "ended by 'stop' with token 8, which is no end of the model"),
        ([], 0, {"index": 0}, "v1 as policy: 'finish_reason'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    data, tmp_path, texts, statuses, counted, choice, message
):
    settings, length = texts
    with stand_in(length + counted, *statuses, choice=choice) as (address, asked):
        trainer = build(data, tmp_path, *SAMPLED, *STEPS, *settings, rollout(address))
        with pytest.raises(RuntimeError, match=message):
            trainer.run()
    # What is refused is not asked again.
    assert len(asked) <= 1 + 2


FORGETS = ["/reset_encoder_cache", "/reset_prefix_cache"]


@pytest.mark.parametrize(
    ("is_adapter", "statuses", "loaded", "paths"),
    [
        (False, [404], b"", ["/update_weights_from_disk", "/collective_rpc", *FORGETS]),
        (True, [], b"Success: LoRA adapter 'policy' added successfully.",
         ["/v1/load_lora_adapter", *FORGETS]),
        (True, [], b'{"success": true}', ["/v1/load_lora_adapter"]),
    ],
    ids=["model in vLLM", "adapter in vLLM", "adapter in our server"],
)  # fmt: skip
def test_vllm_forgets_what_older_weights_made_of_images_and_prompts(
    is_adapter, statuses, loaded, paths, data, tmp_path
):
    with stand_in(0, *statuses, loaded=loaded) as (address, asked):
        settings = RolloutConfig(endpoint=address, model="policy")
        processor = VLProcessor.from_pretrained(data.with_name("base"))
        RolloutServer(settings, processor, {}, 1, tmp_path).load(is_adapter)
    assert [path for path, _ in asked] == paths
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    assert [body for path, body in asked if "rpc" in path] == [call] * len(statuses)


def test_a_server_that_is_gone_is_named(data, tmp_path):
    given = rollout("http://127.0.0.1:9/v1", more=", retries: 0")
    with pytest.raises(RuntimeError, match=r"no answer of http://127\.0\.0\.1:9/update_weights"):
        build(data, tmp_path, *SAMPLED, *STEPS, given).run()


def test_what_a_server_is_not_sent_is_refused(data, tmp_path):
    settings = RolloutConfig(endpoint="http://127.0.0.1:9/v1", model="policy")
    server = RolloutServer(
        settings, VLProcessor.from_pretrained(data.with_name("base")), {}, 1, tmp_path
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    prompt = Conversation([{"role": "user", "content": []}], tools=tools)
    with pytest.raises(ValueError, match="a prompt with tools or videos is not sent to a server"):
        server.sampled([(prompt, np.zeros(1))], [[Sampling(4, seed=1)]])
