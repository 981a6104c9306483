"""`paddle-vl download` and `upload`, and names of models in settings and options.

Guarantees: a command takes a name wherever it takes a model's folder; ranks get the folder that was
found before they started; what resuming alone needs is not uploaded; --private is never public.
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
from tests.support.hub_server import COMMIT, local_hub

hub = pytest.fixture(local_hub)


def test_download_prints_the_folder(hub, tmp_path, capsys):
    assert main(["download", "org/tiny"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"hf/models--org--tiny/snapshots/{COMMIT}")
    assert main(["download", "org/tiny", "--hub", "modelscope"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "ms/models/org--tiny/snapshots/master")


def test_download_copies_files_instead_of_links(hub, tmp_path, capsys):
    out = tmp_path / "model"
    assert main(["download", "hf://org/tiny", "--revision", "main", "--out", str(out)]) == 0
    assert (out / "config.json").read_bytes() == hub.files["config.json"]
    assert not (out / "config.json").is_symlink()
    assert main(["download", "hf://org/tiny", "--out", str(out)]) == 1
    assert "exists already: name a new folder" in capsys.readouterr().err
    assert main(["download", str(out)]) == 1
    assert "is a local path: write org/name" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    for name in ("config.json", "trainer_state.json", "optimizer-00001-of-00001.safetensors"):
        (made / name).write_text("{}")
    (made / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return made


def test_upload_commits_the_model_and_not_the_optimizer(hub, folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main(["upload", str(folder), "org/new", "--private", "--revision", "v1"]) == 0
    assert hub.committed == {
        "config.json": b"{}",
        "model.safetensors": (folder / "model.safetensors").read_bytes(),
    }
    assert capsys.readouterr().out == f"{hub.address}/org/new/commit/{COMMIT}\n"
    assert any(path.endswith("/branch/v1") for _, path, _ in hub.requests)
    assert any("commit/v1" in path for _, path, _ in hub.requests)


def test_upload_asks_as_huggingface_hub_does(hub, folder):
    assert main(["upload", str(folder), "org/new"]) == 0
    asked = [path for method, path, status in hub.requests if status == 200 and method == "POST"]
    assert asked == [
        "/api/repos/create",
        "/api/models/org/new/preupload/main",
        "/org/new.git/info/lfs/objects/batch",
        "/api/models/org/new/commit/main",
    ]


def test_a_private_model_is_not_uploaded_to_a_public_repository(hub, folder, capsys):
    hub.is_private = False
    assert main(["upload", str(folder), "org/new", "--private"]) == 1
    assert "is public already" in capsys.readouterr().err
    assert not hub.committed


@pytest.mark.parametrize("name", ["ms://org/new", "hf://datasets/org/new", "./new"])
def test_upload_elsewhere_says_what_to_do(name, folder, capsys):
    assert main(["upload", str(folder), name]) == 1
    assert "is no model on Hugging Face: write hf://org/name; other hubs" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, hub):
    """A tiny run whose model and processor lie on the hub."""
    file = write_tiny_run(tmp_path / "run")
    settings = yaml.safe_load(file.read_text())
    processor = Path(settings["data"]["processor"])
    hub.files = {file.name: file.read_bytes() for file in processor.iterdir()}
    settings["data"]["processor"] = "ms://org/tiny"
    file.write_text(yaml.safe_dump(settings))
    return argparse.Namespace(config=str(file), overrides=[])


def test_ranks_get_the_folder_that_was_found_before_they_started(run, hub):
    config = read_run(run)
    assert config.data.processor.endswith("models/org--tiny/snapshots/master")
    assert run.overrides == [f"data.processor={json.dumps(config.data.processor)}"]
    hub.requests.clear()
    assert read_run(run) == config
    assert hub.requests == []


def test_a_name_that_is_not_found_is_reported_with_its_setting(run):
    run.overrides = ["data.processor=org/none"]
    with pytest.raises(RuntimeError, match=r"data.processor: model org/none on huggingface: there"):
        read_run(run)


@pytest.mark.parametrize(
    ("command", "rest"),
    [("evaluate", ["--data", "d"]), ("generate", ["--prompt", "x"]), ("export", ["--output", "o"]),
     ("merge", ["--output", "o"])],
)  # fmt: skip
def test_commands_take_the_name_of_a_model(hub, command, rest, capsys):
    assert main([command, "--model", "org/none", *rest]) == 1
    assert "model org/none on huggingface: there is none" in capsys.readouterr().err


def test_the_base_of_adapters_may_be_on_a_hub(hub, tmp_path):
    values = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "org/tiny"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert (base_folder(tmp_path) / "config.json").read_bytes() == hub.files["config.json"]
