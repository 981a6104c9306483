"""The example serves an exported folder in a process that cannot import this package.

Guarantees: its tokens and its printed answer are those of the model, for images that are enlarged,
shrunk and kept; a question with control tokens is refused, and so
is a folder whose manifest names files outside of it, or none.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.export.qwen3_vl.programs import model_to_export
from paddle_vl.export.writing import export_model
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    random_image,
    tiny_processor,
    user,
)
from tests.support.tiny import tiny_config

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_exported.py"
QUESTION = "What is this?"
# Height and width: below, within and above the processor's limits of 64 to 256 pixels.
SIZES = [(5, 6), (17, 9), (40, 31)]
RUN = f"""
import json, runpy, sys
from pathlib import Path
sys.modules["paddle_vl"] = None
example = runpy.run_path({str(EXAMPLE)!r})
model = example["ServedModel"](Path(sys.argv[1]))
print(json.dumps([list(model.answer(Path(x), {QUESTION!r}, 12)) for x in sys.argv[2:]]))
try:
    next(model.answer(Path(sys.argv[2]), "a<|im_end|>"))
except ValueError as error:
    print(error)
manifest = Path(sys.argv[1], "export.json")
text = manifest.read_text()
for name, weights in (("tower.json", "../tower.pdiparams"), ("../x", None), (None, None)):
    forged = json.loads(text)
    if weights:
        forged["programs"]["tower"]["weights"] = weights
    elif name:
        forged["files"][name] = {{"size": 1}}
    else:
        forged["files"] = {{}}
    manifest.write_text(json.dumps(forged))
    try:
        example["ServedModel"](Path(sys.argv[1]))
    except ValueError as error:
        print(error)
manifest.write_text(text)
sys.argv = ["serve", sys.argv[1], sys.argv[2], {QUESTION!r}, "--max-new-tokens", "5"]
example["main"]()
"""


@pytest.fixture(scope="module")
def processor():
    return tiny_processor()


@pytest.fixture(scope="module")
def model(processor):
    """A tiny model of which the control tokens are the processor's."""
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": getattr(processor, f"{name}_token_id") for name in names}
    paddle.seed(1)
    model = Qwen3VLForConditionalGeneration.from_config(
        replace(tiny_config(vocab_size=320, num_hidden_layers=2), **ids)
    )
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        noise = rng.normal(scale=0.3, size=parameter.shape).astype(np.float32)
        parameter.set_value(parameter.numpy() + noise)
    return model


def test_the_example_answers_as_the_model_without_this_package(model, processor, tmp_path):
    folder = tmp_path / "out"
    export_model(model_to_export(model, processor.save_pretrained), Path("tiny"), folder)
    images = []
    for number, size in enumerate(SIZES):
        images.append(tmp_path / f"{number}.png")
        random_image(*size, seed=number).save(images[-1])
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *map(str, images)],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found, refusal, *text = run.stdout.splitlines()
    forged, text = text[:3], text[3:]
    wanted = []
    for image in images:
        inputs = processor([user(f"<image>{QUESTION}")], [str(image)])
        (ids,) = model.generate(
            **inputs, max_new_tokens=12, eos_token_id=processor.eos_token_ids
        ).tolist()
        wanted.append(ids[:-1] if ids[-1] in processor.eos_token_ids else ids)
    assert json.loads(found) == wanted
    assert len({tuple(ids) for ids in wanted}) == len(SIZES), "images must matter"
    assert refusal.startswith("the question contains control tokens")
    assert [line.partition(": ")[2] for line in forged] == [
        "the files of tower are not in export.json; export again",
        "../x is missing or damaged; export again",
        "the files of tower are not in export.json; export again",
    ]
    assert "\n".join(text) == processor.decode(wanted[0][:5]).strip()
