"""`paddle-vl download` and `upload`, and names of models in settings and options.

Guarantees: a command takes a name where it takes a model's folder; ranks get the folder that was
found before they started; what only resuming needs is not uploaded; --private is never public.
"""

import argparse
import json
from pathlib import Path

import pytest
import yaml

from paddle_vl.checkpoint.adapter_files import base_folder
from paddle_vl.cli.hubs import read_run
from paddle_vl.cli.main import main
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.hub_server import local_hub

hub = pytest.fixture(local_hub)


def test_download_prints_the_folder_or_copies_it(hub, tmp_path, capsys):
    assert main(["download", "org/tiny", "--hub", "modelscope"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "ms/models/org--tiny/snapshots/master")
    out = tmp_path / "model"
    assert main(["download", "org/tiny", "--revision", "main", "--out", str(out)]) == 0
    assert (out / "config.json").read_bytes() == hub.files["config.json"]
    assert not (out / "config.json").is_symlink()
    assert capsys.readouterr().out.strip() == str(out)
    for arguments, told in (
        (["org/tiny", "--out", str(out)], "exists already: name a new folder"),
        ([str(out)], "is a local path: write org/name"),
    ):
        assert main(["download", *arguments]) == 1
        assert told in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    for name in ("config.json", "trainer_state.json", "optimizer-00001-of-00001.safetensors"):
        (made / name).write_text("{}")
    (made / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return made


def test_upload_commits_the_model_and_not_the_optimizer(hub, folder, capsys):
    assert main(["upload", str(folder), "org/new", "--private", "--revision", "v1"]) == 0
    names = ("config.json", "model.safetensors")
    assert hub.committed == {name: (folder / name).read_bytes() for name in names}
    assert capsys.readouterr().out == f"{hub.address}/org/new/commit/1\n"
    assert [each.split()[1] for each in hub.requests if each.startswith("POST")] == [
        "/api/repos/create",
        "/api/models/org/new/branch/v1",
        "/api/models/org/new/preupload/v1",
        "/org/new.git/info/lfs/objects/batch",
        "/api/models/org/new/commit/v1",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["org/new", "--private"], "is public already: make it private there"),
        (["ms://org/new"], "is no model on Hugging Face: write hf://org/name; other hubs"),
        (["hf://datasets/org/new"], "is no model on Hugging Face"),
        (["./new"], "is no model on Hugging Face"),
    ],
)
def test_uploads_that_are_refused_say_why(hub, arguments, told, folder, capsys):
    hub.is_private = False
    assert main(["upload", str(folder), *arguments]) == 1
    assert told in capsys.readouterr().err
    assert not hub.committed


def test_ranks_get_the_folder_that_was_found_before_they_started(hub, tmp_path):
    file = write_tiny_run(tmp_path / "run")
    settings = yaml.safe_load(file.read_text())
    processor = Path(settings["data"]["processor"])
    hub.files = {each.name: each.read_bytes() for each in processor.iterdir()}
    settings["data"]["processor"] = "ms://org/tiny"
    file.write_text(yaml.safe_dump(settings))
    run = argparse.Namespace(config=str(file), overrides=[])
    config = read_run(run)
    assert config.data.processor.endswith("models/org--tiny/snapshots/master")
    assert run.overrides == [f"data.processor={json.dumps(config.data.processor)}"]
    hub.sent.clear()
    assert read_run(run) == config
    assert hub.sent == []
    run.overrides = ["data.processor=org/none"]
    with pytest.raises(RuntimeError, match=r"data.processor: model org/none on huggingface: there"):
        read_run(run)


@pytest.mark.parametrize(
    "command",
    ["evaluate --data d", "generate --prompt x", "export --output o", "merge --output o"],
)
def test_commands_take_the_name_of_a_model(hub, command, capsys):
    assert main([*command.split(), "--model", "org/none"]) == 1
    assert "model org/none on huggingface: there is none" in capsys.readouterr().err


def test_the_base_of_adapters_may_be_on_a_hub(hub, tmp_path):
    values = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "org/tiny"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert (base_folder(tmp_path) / "config.json").read_bytes() == hub.files["config.json"]
