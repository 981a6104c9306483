"""An exported pi07 planner plans as the planner does, without the model's code.

Guarantees, on Paddle's predictor and on onnxruntime: equal tokens and texts at batch sizes that the
export has not seen, with and without metadata, for plans that end early. `paddle-vl export` writes
the folder of a checkpoint; a program has no control flow; a process without the model's code gives
the same.
"""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.cli.main import main
from paddle_vl.export import load
from tests.single_card_tests.export.test_exported_pi07 import MODEL_CODE
from tests.single_card_tests.families.pi07.test_planner import batch, planner
from tests.support.exports import (
    HAS_ONNX,
    RUNTIMES,
    host_waits,
    operations,
    output_without_model_code,
)

# Minutes; the policy is exported by default.
pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def made():
    """Weights that write other tokens for every observation, some plans with an early end."""
    found = planner(dataset_names=["a", "b"])
    paddle.seed(11)
    for parameter in found.model.parameters():
        if parameter.ndim == 2:
            parameter.set_value(paddle.randn(parameter.shape) * parameter.shape[0] ** -0.5)
    found.eval()
    return found


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("planner")
    made.save_pretrained(root / "checkpoint")
    arguments = ["--model", str(root / "checkpoint"), "--output", str(root / "export")]
    assert main(["export", *arguments, *(["--onnx"] if HAS_ONNX else [])]) == 0
    return root / "export"


@pytest.fixture(scope="module", params=RUNTIMES)
def exported(folder, request):
    return load(folder, request.param)


def batch_of(size: int, **changes) -> dict:
    rows, found = np.arange(size) % 2, batch(next_memory=None, response=None)
    random = np.random.default_rng(size)
    for name, value in found.items():
        found[name] = [value[i] for i in rows] if isinstance(value, list) else value[rows]
    found["prompt"] = [f"{text}{i}" for i, text in enumerate(found["prompt"])]
    found["camera0"] = random.uniform(0, 1, found["camera0"].shape).astype(np.float32)
    return found | changes


METADATA = {"speed": [3, 4], "speed_is_pad": [False, True]}


def model_tokens(made, inputs: dict, eos_id: int) -> list:
    return [ids.tolist() for ids in made.model.generate(inputs, 2, eos_id)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tokens_are_those_of_the_planner(made, exported, size):
    wanted = []
    for given in ({}, METADATA if size == 2 else {}):
        inputs = made.inputs.observation_inputs(batch_of(size, **given))
        wanted.append(model_tokens(made, inputs, 1))
        assert [ids.tolist() for ids in exported.generate(inputs)] == wanted[-1]
    assert (wanted[0] != wanted[1]) == (size == 2), "metadata must matter"
    assert exported.plan(batch_of(size)) == made.plan(batch_of(size))


def test_plans_end_at_eos_as_the_planners(made, exported, monkeypatch):
    inputs = made.inputs.observation_inputs(batch_of(2))
    memory = made.model.generate(inputs, 2, 1)[0]
    eos_id = int(memory[0, 3])
    wanted = model_tokens(made, inputs, eos_id)
    assert wanted[0][0][4:] == [0] * (len(wanted[0][0]) - 4)
    monkeypatch.setattr(exported, "_rules", exported._rules._replace(eos_id=eos_id))
    assert [ids.tolist() for ids in exported.generate(inputs)] == wanted


def test_a_process_without_the_models_code_gives_the_same_plan(made, folder, tmp_path):
    given = batch_of(2)
    arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    np.savez(tmp_path / "batch.npz", **arrays)
    words = {name: value for name, value in given.items() if name not in arrays}
    (tmp_path / "words.json").write_text(json.dumps(words))
    script = f"""
import json
import numpy as np
from paddle_vl.export import load
batch = dict(np.load("batch.npz")) | json.load(open("words.json"))
print(json.dumps(load({str(folder)!r}).plan(batch)))
"""
    found = output_without_model_code("pi07", MODEL_CODE, script, tmp_path)
    assert found == list(made.plan(given))


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("images", {}),
        ("prefill", {}),
        ("decode", {"slice of place": 1, "set_value_with_tensor_ of place": 2 * 3}),
    ],
)
def test_a_planners_program_has_no_control_flow_and_no_host_operation(folder, name, waits):
    file = folder / f"{name}.json"
    assert {"matmul", "softmax"} <= set(operations(file))
    assert host_waits(file) == waits


def test_the_manifest_names_the_checkpoint(folder):
    files = sorted(path.name for path in folder.glob("*.pdiparams"))
    assert files == ["decoder.pdiparams", "images.pdiparams"]
    manifest = json.loads((folder / "export.json").read_text())
    assert manifest["model_type"] == "pi07_high_level"
    assert manifest["source"]["folder"] == "checkpoint"
    assert {"model.safetensors", "config.json"} <= set(manifest["source"]["files"])
    assert manifest["programs"]["decode"]["inputs"]["input_ids"] == [[-1, -1], "int64"]
