"""`paddle-vl evaluate --suite` at a server.

Guarantees: answers and scores are those of the model itself, also where the server is full and has
a token; an error names the row and loses no answer that was written; what a server cannot be asked
is refused before.
"""

import json
from urllib.request import Request, urlopen

import pytest

from paddle_vl.cli.main import build_parser, main
from paddle_vl.cli.serve import served_model
from tests.support.openai_server import model_folder, png, serving

SIDES = (16, 32, 64, 16, 64, 32)
# Without room for the image of a side of 256.
LIMITS = ["--max-model-len", "120", "--served-model-name", "tiny"]


def suite_of(folder, sides, more: str = "", right=()):
    """A description; the first rows have these right answers."""
    rows = []
    for number, side in enumerate(sides):
        image = folder / f"{number}.png"
        image.write_bytes(png(side))
        ask, answer = f"What digit is <image> {number}?", [*right, *map(str, range(9))][number]
        row = {"ask": ask, "image": str(image), "right": answer, "size": str(side)}
        rows.append({**row, "box": [0, 0, side, side - 1]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = folder / "suite.yaml"
    suite.write_text(
        f"name: Digits\npath: {folder / 'rows.jsonl'}\nimages: [image]\nprompt: '{{{{ ask }}}}'\n"
        f"crop: box\nreferences: right\nmetrics: [anls]\ngroups: [size]\n"
        f"generation: {{max_new_tokens: 9{more}}}\n"
    )
    return suite


def evaluated(folder, model, suite, *options):
    """The exit code, the content of `--json`, and the lines of the predictions."""
    scores, answers = folder / "scores.json", folder / "answers.jsonl"
    out = ["--json", str(scores), "--predictions", str(answers)]
    code = main(["evaluate", str(model), "--suite", str(suite), *out, *options])
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return code, json.loads(scores.read_text()) if code == 0 else {}, lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def test_answers_and_scores_are_those_of_the_model(folder, tmp_path, capsys):
    served = served_model(build_parser().parse_args(["serve", "--model", str(folder), *LIMITS]))
    served.engine.start()
    _, _, lines = evaluated(tmp_path, folder, suite_of(tmp_path, SIDES))
    answers = [line["answer"] for line in lines]
    assert len({*answers}) > 2
    suite, key = (
        suite_of(tmp_path, SIDES, right=[each or "7" for each in answers[:4]]),
        tmp_path / "key",
    )
    key.write_text("secret\n")
    _, wanted, wanted_lines = evaluated(tmp_path, folder, suite)
    assert 0 < wanted["scores"]["all answers"]["anls"] < 1
    with serving(served, token="secret", max_requests=1) as address:
        at = ["--endpoint", f"{address}/v1", "--api-key-file", str(key)]
        code, found, lines = evaluated(tmp_path, "tiny", suite, *at, "--batch-size", "3")
        assert (code, lines) == (0, wanted_lines)
        assert found["scores"] == wanted["scores"]
        settings = found["settings"]
        assert (settings["model"], settings["endpoint"]) == ("tiny", f"{address}/v1")
        sent = {"max_tokens": 9, "repetition_penalty": 1.0, "temperature": 0.0}
        assert settings["generation"] == sent
        # It was full, and said so.
        metrics = Request(f"{address}/metrics", headers={"Authorization": "Bearer secret"})
        assert 'paddle_vl_requests_total{outcome="rejected"}' in urlopen(metrics).read().decode()
        suite = suite_of(tmp_path, [16, 32, 256, 16])
        capsys.readouterr()
        code, _, lines = evaluated(tmp_path, "tiny", suite, *at, "--batch-size", "1")
        told = capsys.readouterr().err
        assert (code, [line["sample"][-1] for line in lines]) == (1, ["1", "2"])
        assert "rows.jsonl:3: no answer of http" in told
        assert "maximum context length is 120" in told


def test_what_a_server_is_not_asked_is_refused(tmp_path, capsys):
    suite, at = str(suite_of(tmp_path, [16], ", min_new_tokens: 2")), ["--endpoint", "http://x/v1"]
    data = ["--data", str(tmp_path / "rows.jsonl")]
    for options, told in (
        (["--suite", suite, *at], "generation.min_new_tokens: no request to a server has it"),
        ([*data, *at], "--endpoint is asked a benchmark: give --suite"),
        (["--suite", suite, *at, "--base", "b"], "served with what it needs: leave --base out"),
        ([*data, "--api-key-file", "k"], "no server is asked: leave --api-key-file out"),
    ):
        assert main(["evaluate", "tiny", *options]) == 1
        assert told in capsys.readouterr().err
