"""Check that PaddleX reads a PaddleOCR-VL folder as this package does.

    python tools/check_paddlex.py FOLDER [MORE_FOLDERS ...] [--environment DIR]
    python tools/check_paddlex.py FOLDER --python /opt/paddlex/bin/python --image page.png

PaddleX's own code on the CPU loads each folder in a process of its own, and answers every question
about every picture (`--image`, `--prompt`; without them made-up pictures and the prompts of some
tasks). Its token ids, logits over prompt and answer, and greedy tokens are compared with this
package's. Its environment is made in DIR if there is none (from PyPI, with the Pillow of this one,
whose releases resize differently). Prints a table; the exit code is 1 if PaddleX refuses a folder
or anything differs.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine_answers import Engine, Questions, answer_inside, compare, parser

# In this order; of PaddleX without those that other models of it need.
PACKAGES = (
    ("paddlepaddle==3.3.1", "numpy<2.4", "safetensors==0.8.0"),
    ("--no-deps", "paddlex==3.7.2"),
    (
        *("PyYAML==6.0.2", "ruamel.yaml==0.19.1", "prettytable==3.18.0", "colorlog==6.12.0"),
        *("filelock==4.3.1", "chardet==7.7.0", "pydantic==2.14.4", "requests==2.34.2"),
        *("ujson==6.1.0", "packaging==26.4", "pandas==3.1.1", "huggingface_hub==2.4.0"),
        *("sentencepiece==0.2.3", "jinja2==3.1.6", "cffi==2.1.1", "regex==2026.11.19"),
        *("einops==0.8.2", "modelscope==1.40.2", "aistudio-sdk==0.3.9"),
    ),
)


def environment(folder: Path) -> Path:
    """The interpreter of PaddleX's environment; makes it if it is not there."""
    import PIL

    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (*PACKAGES, (f"pillow=={PIL.__version__}",)):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def answer_in_paddlex(
    folder: Path, questions: Questions, options: argparse.Namespace
) -> Iterator[Any]:
    """Ids, logits over prompt and answer, and tokens of each question; in PaddleX's process."""
    import paddle
    import yaml
    from paddlex import create_model  # pyright: ignore[reportMissingImports]

    file = folder / "inference.yml"
    # Without the file PaddleX is to say so.
    settings = yaml.safe_load(file.read_text()) if file.is_file() else {}
    name = settings.get("Global", {}).get("model_name", "PaddleOCR-VL-0.9B")
    # What `predict` of the class runs; it returns texts alone.
    predictor = create_model(name, model_dir=str(folder), device="cpu")._predictor
    for image, prompt in questions:
        inputs = predictor.processor.preprocess([{"image": image, "query": prompt}])
        tokens, *_ = predictor.infer.generate(dict(inputs), max_new_tokens=options.max_new_tokens)
        tokens = tokens.numpy()
        ids = np.concatenate([inputs["input_ids"].numpy(), tokens[:, :-1]], axis=1)
        images = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
        with paddle.no_grad():
            mask = paddle.ones(ids.shape, dtype="int64")
            found = predictor.infer(paddle.to_tensor(ids), mask, return_dict=True, **images)
        yield inputs["input_ids"].numpy()[0], found.logits.numpy()[0], tokens[0]


PADDLEX = Engine(
    __file__,
    "PaddleX",
    ("OCR:", "Table Recognition:"),
    answer_in_paddlex,
    ("logits", lambda logits, ids: logits),
    lambda folder, options: 1e-5,
)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--environment", type=Path, metavar="DIR", help="of PaddleX; made if absent")
    options = made.parse_args()
    if options.inside:
        return answer_inside(PADDLEX, options)
    with tempfile.TemporaryDirectory() as work:
        python = options.python or environment(options.environment or Path(work) / "paddlex")
        return compare(PADDLEX, options, python, Path(work))


if __name__ == "__main__":
    sys.exit(main())
