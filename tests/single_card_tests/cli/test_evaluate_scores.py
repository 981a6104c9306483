"""Scores of `paddle-vl evaluate`.

Guarantees: files are scored with the metrics that are asked for, and benchmarks as described, with
all settings beside the scores; wrong options are refused before answers are made.
"""

import json

import pytest

from paddle_vl.cli.main import main


def test_evaluate_scores_with_metrics_and_runs_benchmarks(run_file, tmp_path, capsys):
    assert main(["train", str(run_file), "train.max_steps=1"]) == 0
    trained = run_file.with_name("out")
    data, out = str(run_file.with_name("test.jsonl")), tmp_path / "scores.json"
    options = ["--json", str(out), "--batch-size", "2"]
    metrics = ["--metrics", "anls", "exact_match", "--max-new-tokens", "4"]
    assert main(["evaluate", str(trained), "--data", data, *metrics, *options]) == 0
    text, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "loss per answer token: " in text
    assert "max_new_tokens: 4" in text
    groups, scores = written["scores"], written["scores"]["all answers"]
    assert scores.keys() == {"answers", "anls", "exact_match"}
    assert sum(each["answers"] for each in groups.values()) == 2 * scores["answers"] == 12
    assert written["settings"]["metrics"] == metrics[1:3]
    rows = [json.loads(line) for line in run_file.with_name("test.jsonl").read_text().splitlines()]
    asked = [
        {"ask": "Which colour?", "image": str(run_file.parent / row["images"][0]), "right": "red"}
        for row in rows[:3]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    suite, answers = tmp_path / "suite.yaml", tmp_path / "answers.jsonl"
    suite.write_text(
        f"name: Colours\npath: {tmp_path / 'rows.jsonl'}\nimages: [image]\n"
        "prompt: '{{ ask }}'\n"
        "references: right\nmetrics: [anls]\nmax_pixels: 4096\n"
        "generation: {max_new_tokens: 3, do_sample: true, temperature: 2.0, eos_token_id: 0}\n"
    )
    arguments = ["evaluate", str(trained), "--suite", str(suite), *options]
    assert main([*arguments, "--predictions", str(answers)]) == 0
    text, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "loss" not in text
    assert list(written["scores"]) == ["all answers"]
    settings = written["settings"]
    assert (settings["suite"], settings["max_pixels"]) == (str(suite), 4096)
    # Also those that come from the model's folder, or from nowhere.
    generation = settings["generation"]
    assert (generation["temperature"], generation["top_k"]) == (2.0, 50)
    assert generation["eos_token_id"] == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["Which colour?"] * 3
    mean = sum(line["scores"]["anls"] for line in lines) / 3
    assert written["scores"]["all answers"] == {"answers": 3, "anls": pytest.approx(mean)}
    assert main([*arguments, "--max-new-tokens", "4"]) == 1
    assert "suite.yaml says it: leave --max-new-tokens out" in capsys.readouterr().err
    assert main(["evaluate", str(trained), "--data", data, "--metrics", "blue"]) == 1
    assert "there is no metric 'blue': use one of" in capsys.readouterr().err
