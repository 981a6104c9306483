"""Arguments of the command line.

Guarantees: options and names of other trainers are explained; a model folder has one name in all
commands; --nproc alone is data parallel and says so; warnings of Paddle about itself are hidden.
"""

import os
import warnings

import pytest

from paddle_vl.cli import train as train_command
from paddle_vl.cli.main import main
from tests.single_card_tests.train.tiny_run import write_tiny_run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--learning_rate", "1e-4"], "--learning_rate 1e-4: settings have no dashes; write "
         "train.learning_rate=1e-4"),
        (["--lr=1e-4"], "--lr=1e-4: settings have no dashes; write train.learning_rate=1e-4"),
        (["--bf16", "train.seed=1"], "settings have no dashes; write model.compute_dtype=bfloat16"),
        (["--train.num-train-epochs", "3"], "write train.num_train_epochs=3"),
        (["--data_path", "a b.jsonl"], "write data.train='a b.jsonl'"),
        (["--frobnicate", "3"], "--frobnicate 3: settings are section.name=value, see --help"),
    ],
)  # fmt: skip
def test_option_of_another_trainer_is_explained(arguments, told, capsys):
    for given in (["train", "run.yaml", *arguments], ["train", *arguments, "run.yaml"]):
        with pytest.raises(SystemExit) as caught:
            main(given)
        assert caught.value.code == 2
        message = capsys.readouterr().err
        assert "error: unrecognized argument --" in message
        assert told in message


@pytest.mark.parametrize(
    ("command", "rest"),
    [("evaluate", ["--data", "d"]), ("generate", ["--prompt", "x"]), ("chat", []),
     ("export", ["--output", "o"]), ("merge", ["--output", "o"])],
)  # fmt: skip
def test_a_model_folder_has_one_name_in_all_commands(command, rest, capsys):
    for given in (["--model", "m"], ["m"]):
        for arguments in ([*given, *rest], [*rest, "--base", "b", *given]):
            assert main([command, *arguments]) == 1
            assert capsys.readouterr().err.startswith("error: m is neither a model folder")
    if command == "merge":
        assert main(["merge", "m", "--base", "b", "o"]) == main(["merge", "--model", "m", "o"]) == 1
        assert capsys.readouterr().err.count("error: m is neither a model folder") == 2
    for arguments in (rest, ["m", "n", *rest], ["--model", "m", "n", *rest], ["m", "--x", *rest]):
        with pytest.raises(SystemExit):
            main([command, *arguments])


def test_nproc_alone_is_data_parallel_and_says_so(tmp_path, monkeypatch, capsys):
    started, run_file = [], write_tiny_run(tmp_path)
    monkeypatch.setattr(
        train_command, "launch", lambda arguments, *_, **__: started.append(arguments)
    )
    for overrides, degrees in {
        (): ["parallel.dp_degree=2"],
        ("train.seed=1",): ["parallel.dp_degree=2"],
        ("parallel.mp_degree=2",): [],
        ("parallel.dp_degree=1",): [],
    }.items():
        main(["train", str(run_file), "--nproc", "2", *overrides])
        assert started[-1] == ["train", str(run_file), *overrides, *degrees]
        told = "data parallel, parallel.dp_degree=2" in capsys.readouterr().err
        assert told == bool(degrees)


def test_warnings_of_paddle_about_itself_are_hidden_and_ours_are_not(monkeypatch):
    monkeypatch.delenv("GLOG_minloglevel", raising=False)
    modules = ["paddle.pir.patch", "paddle", "pkg_resources", "paddle_vl.data.video", "numpy"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["evaluate", "nowhere", "--data", "d"]) == 1
        for module in modules:
            warnings.warn_explicit(module, UserWarning, "file.py", 1, module=module)
    assert [str(one.message) for one in caught] == modules[3:]
    assert os.environ["GLOG_minloglevel"] == "2"  # noqa: SIM112
