"""`paddle-vl show-data` shows what the model gets.

Guarantees: the marked text is that of the labels; the pictures of the page are those of the
processor, pixel by pixel; boxes of both spellings are drawn at their place; text of a sample cannot
become HTML; samples that do not exist are refused.
"""

import base64
import io
import json
import re

import numpy as np
from PIL import Image

from paddle_vl.cli.main import main
from paddle_vl.families.vlm.inputs.image_processor import patchify
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.training.shown_samples import unpatchify


def shown(run_file, capsys, *arguments: str) -> str:
    assert main(["show-data", str(run_file), *arguments]) == 0
    return capsys.readouterr().out


def test_the_answers_are_marked_and_nothing_else(run_file, capsys):
    text = shown(run_file, capsys, "--samples", "2")
    assert re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL) == [
        "red<|im_end|>",
        "green<|im_end|>",
        "yes<|im_end|>",
    ]
    assert "<|image_pad|>" in text
    assert "train.jsonl:2: " in text
    # Settings of an evaluation need no files of one.
    settings = ("train.eval_steps=1", "train.best={metric: loss}", "train.eval={}", "data.eval=[]")
    assert "red<|im_end|>" in shown(run_file, capsys, *settings)
    scored = "data.eval=[{path: none.jsonl, metrics: [cer]}]"
    assert "red<|im_end|>" in shown(
        run_file, capsys, scored, "train.guard={metric: cer, max_drop: 0}"
    )
    for arguments, told in ((["--first", "12"], "has 12 samples"), (["--eval"], "data.eval")):
        assert main(["show-data", str(run_file), *arguments]) == 1
        assert told in capsys.readouterr().err


def test_a_page_has_the_pictures_as_the_model_sees_them(run_file, capsys, tmp_path):
    page = tmp_path / "pages" / "samples.html"
    shown(run_file, capsys, "--samples", "1", "--first", "2", "--page", str(page))
    (source,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page.read_text())
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(source))))
    processor = VLProcessor.from_pretrained(run_file.parent / "processor")
    record = json.loads((run_file.parent / "train.jsonl").read_text().splitlines()[2])
    pixels = processor.image_processor([run_file.parent / record["images"][0]])
    wanted = unpatchify(
        pixels["pixel_values"], tuple(pixels["image_grid_thw"][0]), processor.image_processor
    )
    np.testing.assert_array_equal(found, wanted[0])


def test_frames_come_back_from_their_patches(run_file):
    settings = VLProcessor.from_pretrained(run_file.parent / "processor").video_processor
    side = settings.patch_size * settings.merge_size
    frames = np.random.default_rng(0).integers(0, 256, [4, 2 * side, 3 * side, 3], dtype=np.uint8)
    patches, grid = patchify(frames, settings)
    np.testing.assert_array_equal(unpatchify(patches, grid, settings), frames)


def test_a_box_is_drawn_and_text_stays_text(run_file, capsys, tmp_path):
    file = tmp_path / "one.jsonl"
    image = next(run_file.parent.rglob("*.png"))
    answer = '[{"bbox_2d": [100, 200, 300, 600], "label": "<script>"}, {"point_2d": [5, 6]}]'
    messages = [
        {"role": "user", "content": "<image>Where?"},
        {"role": "assistant", "content": answer},
    ]
    file.write_text(json.dumps({"messages": messages, "images": [str(image)]}))
    page = tmp_path / "samples.html"
    shown(run_file, capsys, f"data.train=[{file}]", "--page", str(page))
    html = page.read_text()
    assert '<rect x="100" y="200" width="200" height="400"/>' in html
    assert '<circle cx="5" cy="6" r="8"/>' in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
