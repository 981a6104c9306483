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
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
PROMPTS = ("OCR:", "Table Recognition:")
SIZES_HW = ((96, 150), (220, 64))
TOLERANCE = 1e-5
Questions = Sequence[tuple[str, str]]


def environment(folder: Path) -> Path:
    """The interpreter of PaddleX's environment; makes it if it is not there."""
    import PIL

    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for packages in (*PACKAGES, (f"pillow=={PIL.__version__}",)):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def answer_in_paddlex(folder: Path, questions: Questions, num_tokens: int) -> Iterator[Any]:
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
        tokens = predictor.infer.generate(dict(inputs), max_new_tokens=num_tokens)[0].numpy()
        ids = np.concatenate([inputs["input_ids"].numpy(), tokens[:, :-1]], axis=1)
        images = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
        with paddle.no_grad():
            mask = paddle.ones(ids.shape, dtype="int64")
            found = predictor.infer(paddle.to_tensor(ids), mask, return_dict=True, **images)
        yield inputs["input_ids"].numpy()[0], found.logits.numpy()[0], tokens[0]


def answer_here(folder: Path, questions: Questions, num_tokens: int) -> Iterator[Any]:
    """The same of this package."""
    import paddle

    from paddle_vl.config.families import family_of_folder
    from paddle_vl.generation.config import GenerationConfig

    chat = family_of_folder(folder).ask("chat", folder, None, {})
    chat.model.eval()
    settings = chat.model.generation_config or GenerationConfig()
    settings = settings.with_ends_of(chat.processor.generation_config)
    settings = settings.updated(max_new_tokens=num_tokens)
    for image, prompt in questions:
        messages = [{"role": "user", "content": f"<image>{prompt}"}]
        inputs = chat.processor(messages=messages, images=[image])
        tokens = np.array([*chat.model.stream(**inputs, generation_config=settings)])[:, 0]
        ids = np.concatenate([inputs["input_ids"], tokens[None, :-1]], axis=1)
        images = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
        with paddle.no_grad():
            found = chat.model(input_ids=ids, **images)
        yield inputs["input_ids"][0], found.logits.numpy()[0], tokens


def check(folder: Path, questions: Questions, python: Path, num_tokens: int) -> Iterator[str]:
    """A line for each question; begins with "refused" or "differs" if PaddleX does not agree."""
    with tempfile.TemporaryDirectory() as work:
        given, out = Path(work) / "questions.json", Path(work) / "answers.npz"
        given.write_text(json.dumps(questions))
        command = [python, __file__, folder, "--max-new-tokens", str(num_tokens)]
        run = subprocess.run(
            [*command, "--inside", given, out], capture_output=True, text=True, check=False
        )
        if run.returncode:
            yield f"refused: {_reason(run.stdout + run.stderr)}"
            return
        theirs = dict(np.load(out))
    try:
        answers = list(answer_here(folder, questions, num_tokens))
    except (RuntimeError, ValueError) as error:
        yield f"differs: PaddleX answers, and this package refuses: {error}"
        return
    for number, own in enumerate(answers):
        ids, logits, tokens = (theirs[f"{name}{number}"] for name in ("ids", "logits", "tokens"))
        image, prompt = questions[number]
        about = f"{Path(image).name}, {prompt!r}, {len(ids)} ids, {len(tokens)} tokens"
        if not np.array_equal(ids, own[0]):
            yield f"differs: {about}: the prompt has other ids here, {len(own[0])} of them"
        elif not np.array_equal(tokens, own[2]):
            yield f"differs: {about}: here the answer is {own[2].tolist()}, not {tokens.tolist()}"
        else:
            worst = float(np.abs(logits - own[1]).max())
            verdict = "equal" if worst <= TOLERANCE else "differs"
            yield f"{verdict}: {about}: logits differ by {worst:.1e} at most"


def _reason(output: str) -> str:
    """The last error in what PaddleX printed, with what stands beside it."""
    lines = [line.strip() for line in output.splitlines() if line.strip(" ^~")]
    errors = [n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = (errors or [len(lines) - 1])[-1]
    # An error without a message is told by the line that raised it.
    first = last if ":" in lines[last] else last - 1
    return " ".join(lines[max(first, 0) : last + 2])


def made_up_pictures(folder: Path) -> list[str]:
    """Pictures of some sizes in colour; their files."""
    from PIL import Image

    rng = np.random.default_rng(0)
    files = [folder / f"{height}x{width}.png" for height, width in SIZES_HW]
    for file, (height, width) in zip(files, SIZES_HW, strict=True):
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height)).save(file)
    return [str(file) for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a model folder")
    parser.add_argument(
        "--environment", type=Path, metavar="DIR", help="of PaddleX; made if absent"
    )
    parser.add_argument("--python", type=Path, help="interpreter of such an environment")
    parser.add_argument("--image", action="append", help="a picture; may be repeated")
    parser.add_argument("--prompt", action="append", help="a question; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="of an answer (default 24)")
    # The process of PaddleX.
    parser.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_tokens = options.max_new_tokens
    if options.inside:
        given, out = options.inside
        found = answer_in_paddlex(options.folders[0], json.loads(given.read_text()), num_tokens)
        names = ("ids", "logits", "tokens")
        arrays = {
            f"{name}{number}": array
            for number, answer in enumerate(found)
            for name, array in zip(names, answer, strict=True)
        }
        np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
        return 0

    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime()
    is_right = True
    with tempfile.TemporaryDirectory() as work:
        python = options.python or environment(options.environment or Path(work) / "paddlex")
        images = options.image or made_up_pictures(Path(work))
        questions = [(image, prompt) for image in images for prompt in options.prompt or PROMPTS]
        for folder in options.folders:
            print(folder)
            for line in check(folder, questions, python, num_tokens):
                print(f"  {line}", flush=True)
                is_right &= line.startswith("equal")
    print("PaddleX agrees" if is_right else "PaddleX does not agree")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
