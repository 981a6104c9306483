"""The command line.

Guarantees: --help and a refused setting load few modules; --help explains every setting, those of
every run first; a user error is one message and exit code 1, a bug keeps its traceback; train,
evaluate and generate work together on a run folder; an interrupted training exits with 128 + the
signal's number.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

import paddle_vl
from paddle_vl.cli import train as train_command
from paddle_vl.cli.main import main
from paddle_vl.config import families as registered
from paddle_vl.config.family_settings import settings_help

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trained(run_file):
    """The run folder after `paddle-vl train`."""
    assert main(["train", str(run_file)]) == 0
    return run_file.with_name("out")


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "paddle_vl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_rank_log_has_file_names_that_are_not_utf8(tmp_path):
    run = os.fsdecode(b"no-\xff.yaml")
    assert run_module("train", run, PADDLE_VL_RANK_LOG=str(tmp_path / "log")).returncode == 1
    assert r"configuration no-\udcff.yaml cannot be read" in (tmp_path / "log").read_text()


def test_help_loads_no_paddle_and_has_examples():
    program = (
        "import sys\nfrom paddle_vl.cli.main import COMMANDS, main\n"
        "names = [command.run.__name__.replace('_', '-') for command in COMMANDS]\n"
        "for given in [[], *([name] for name in names)]:\n"
        "    try:\n        main([*given, '--help'])\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        "assert 'paddle' not in sys.modules and 'numpy' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    helps = result.stdout.split("usage: ")[1:]
    assert len(helps) == 20
    assert all("example" in text for text in helps)


@pytest.mark.parametrize(
    ("arguments", "most", "absent"),
    [
        (["--help"], 190, {"pydantic", "yaml"}),
        (["train", "configs/quickstart/digits.yaml", "something=wrong"], 400, set()),
        (["train", "configs/pi07/tiny_cpu.yaml", "--set", "something=wrong"], 400, set()),
    ],
)
def test_a_command_that_does_nothing_loads_few_modules(arguments, most, absent):
    program = (
        "import sys\nfrom paddle_vl.cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    *_, line = result.stderr.splitlines()
    assert len(line.split()) <= most
    assert not {"paddle", "numpy", *absent} & {*line.split()}


def test_train_help_explains_every_setting(capsys, monkeypatch):
    # Other tests register a family.
    own = [entry for entry in registered.families() if entry.recipe.startswith("paddle_vl.")]
    monkeypatch.setattr(registered, "_FAMILIES", own)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Undefined" not in text
    assert "data.drops.subgoal_drop_prob (0.75)" in text
    at = 0
    for title, _, described in settings_help():
        at = text.index(f"{title} (default):", at)
        for name, (default, description) in described.items():
            at = text.index(f"{name} ({default}) {description}", at)


def test_wrong_arguments_exit_with_2(capsys):
    for arguments in ([], ["fly"], ["evaluate", "m"], ["generate", "--model", "m", "--prompt"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit):
        main(["evaluate", "m", "--data", "d", "--batch-size", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"paddle-vl {paddle_vl.__version__}\n"


@pytest.fixture
def policy_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"type": "pi07_low_level"}')
    return tmp_path


_GENERATE = "generate nowhere --prompt x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train none.yaml", "configuration none.yaml cannot be read: No such file"),
        ("evaluate nowhere --data d", "nowhere is neither a model folder"),
        (_GENERATE, "nowhere is neither"),
        # Before the model is read.
        (f"{_GENERATE} --temperature -1", "temperature is -1.0; sampling needs one above 0"),
        (f"{_GENERATE} --temperature 0 --top-k 3", "--temperature 0 does not sample, so top_k has"),
        (f"{_GENERATE} --top-p 1.5", "top_p is 1.5"),
        (f"{_GENERATE} --max-new-tokens 0", "max_new_tokens is 0"),
        (f"{_GENERATE} --greedy --top-k 3", "--greedy does not sample, so top_k has no effect"),
        (
            "generate {policy} --prompt x",
            "{policy} is a pi07 policy, which acts and answers no questions",
        ),
        (
            "evaluate {policy} --data d --limit 3 --show 1",
            "{policy} is a pi07 policy, of which losses are printed: leave --limit, --show out",
        ),
    ],
)
def test_user_errors_are_one_message(line, message, policy_folder, capsys):
    line, message = (text.format(policy=policy_folder) for text in (line, message))
    assert main(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert "Traceback" not in captured.err


def test_bugs_keep_their_traceback_and_an_interrupt_ends_with_130(monkeypatch, capsys):
    def read_run(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "read_run", read_run)
    assert main(["train", "x.yaml"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(train_command, "read_run", lambda options: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):
        main(["train", "x.yaml"])


def test_setting_error_exits_1_and_debug_shows_the_traceback(run_file):
    arguments = ("train", str(run_file), "train.learing_rate=1")
    plain = run_module(*arguments, PADDLE_VL_DEBUG="0")
    assert plain.returncode == 1
    assert "error: command line: train.learing_rate is not a setting" in plain.stderr
    assert "Traceback" not in plain.stderr
    debug = run_module(*arguments, PADDLE_VL_DEBUG="1")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def test_evaluate_prints_loss_and_exact_answers_by_task_and_of_the_first_samples(
    trained, run_file, tmp_path, capsys
):
    data, out = str(run_file.with_name("test.jsonl")), tmp_path / "answers.jsonl"
    assert main(
        ["evaluate", str(trained), "--data", data, "--max-new-tokens", "4", "--batch-size", "2",
         "--show", "3", "--predictions", str(out)]
    ) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert sum(" -> " in line for line in text.splitlines()) == 3
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    # 5 conversations; one has two answers.
    assert len(answers) == 6
    assert answers[0] == {
        "sample": f"{data}:1", "task": "colour", "prompt": "Which colour?", "expected": "red",
        "answer": answers[0]["answer"], "is_exact": answers[0]["answer"] == "red",
        "images": [str(run_file.parent / "images" / "0.png")],
    }  # fmt: skip
    assert [a["prompt"] for a in answers if a["task"] == "chat"][-1] == "Sure?"
    exact = sum(answer["is_exact"] for answer in answers)
    assert f"({exact} of 6)" in text
    assert "loss per answer token: " in text
    assert "chat" in text
    arguments = ["evaluate", str(trained), "--data", data, "--max-new-tokens", "1", "--limit", "1"]
    assert main(arguments) == 0
    assert "of 1)" in capsys.readouterr().out


def test_evaluation_loss_is_that_of_the_training(run_file, tmp_path, capsys):
    data = run_file.with_name("test.jsonl")
    overrides = [f"train.output_dir={tmp_path}", f"data.eval=[{data}]", "train.max_steps=1"]
    assert main(["train", str(run_file), *overrides]) == 0
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert main(["evaluate", str(tmp_path), "--data", str(data), "--max-new-tokens", "1"]) == 0
    assert f"loss per answer token: {line['eval_loss']:.4f}" in capsys.readouterr().out


def test_generate_prints_the_same_answer_at_once_as_it_streams(trained, run_file, capsys):
    image = str(run_file.parent / "images" / "0.png")
    common = ["generate", "--model", str(trained), "--image", image, "--prompt", "Which colour?"]
    common += ["--max-new-tokens", "12"]
    answers = {}
    for name, options in {
        "greedy": [],
        "drawn": ["--temperature", "3", "--top-k", "0", "--top-p", "1", "--seed", "1"],
        "drawn otherwise": ["--temperature", "3", "--top-k", "0", "--seed", "2"],
        "top k of 1": ["--top-k", "1"],
        "temperature of 0": ["--temperature", "0"],
        "without repetition": ["--repetition-penalty", "1e9"],
    }.items():
        assert main([*common, *options]) == 0
        answers[name] = capsys.readouterr().out
        assert main([*common, *options, "--no-stream"]) == 0
        assert capsys.readouterr().out == answers[name]
    assert answers["top k of 1"] == answers["temperature of 0"] == answers["greedy"]
    assert len(set(answers.values())) == 4
    # Images without tags come first.
    assert main([*common[:6], "<image>Which colour?", *common[7:]]) == 0
    assert capsys.readouterr().out == answers["greedy"]
    assert main([*common[:6], "<image> and <image>?"]) == 1
    assert "2 image place(s)" in capsys.readouterr().err


def test_generate_follows_the_models_own_settings_unless_told_otherwise(
    trained, run_file, tmp_path, capsys
):
    folder = tmp_path / "model"
    shutil.copytree(trained / "final", folder)
    common = ["generate", "--model", str(folder), "--prompt", "Which colour?"]
    common += ["--max-new-tokens", "12"]
    assert main(common) == 0
    greedy = capsys.readouterr().out
    settings = {"do_sample": True, "temperature": 3.0, "top_k": 0, "seed": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert main(common) == 0
    assert capsys.readouterr().out != greedy
    assert main([*common, "--greedy"]) == 0
    assert capsys.readouterr().out == greedy


def test_stopped_training_exits_with_the_signal(run_file, tmp_path, monkeypatch):
    from paddle_vl.train import trainer as trainer_module
    from paddle_vl.train.stop_signals import StopSignals

    plain, note, is_noted = trainer_module.train_step, StopSignals._note, Event()

    def noted(*arguments):
        note(*arguments)
        is_noted.set()

    def step_with_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        # A thread looks for signals; a step may be shorter than its interval.
        assert is_noted.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(StopSignals, "_note", noted)
    monkeypatch.setattr(trainer_module, "train_step", step_with_signal)
    assert main(["train", str(run_file), f"train.output_dir={tmp_path}"]) == 143
    assert (tmp_path / "checkpoint-1").is_dir()
