"""What tools/check_paddlex.py and tools/check_vllm.py share: questions about pictures, the answers
of this package, those of an engine in a process of its own, and the comparison of both."""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIZES_HW = ((96, 150), (220, 64))
# A picture or None, and a prompt.
Questions = Sequence[tuple[str | None, str]]
_FIELDS = ("ids", "scores", "tokens")


class Engine(NamedTuple):
    """An engine and what is compared.

    Attributes:
        script: the tool, which answers in the engine's process.
        name, prompts: of the engine, and what is asked without `--prompt`.
        answer: in the engine's process, `(folder, questions, options)` to an iterator of prompt ids
            `[L]`, scores `[L + N - 1, ...]`, and tokens `[N]`.
        scored: what the scores are, and the same of the logits `[L + N - 1, V]` and ids of prompt
            and answer `[L + N]`.
        tolerance: how far the scores may differ, by the options.
        options: names of further options, given to the engine's process.
    """

    script: str
    name: str
    prompts: Sequence[str]
    answer: Callable[[Path, Questions, argparse.Namespace], Iterable[Any]]
    scored: tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]
    tolerance: Callable[[Path, argparse.Namespace], float]
    options: Sequence[str] = ()


def answer_here(
    folder: Path, questions: Questions, num_tokens: int, adapter: Path | None = None
) -> Iterator[Any]:
    """Prompt ids, logits over prompt and answer, and greedy tokens of each question."""
    import paddle

    from paddle_vl.config.families import family_of_folder
    from paddle_vl.generation.config import GenerationConfig

    given = (adapter, folder) if adapter else (folder, None)
    chat = family_of_folder(folder).ask("chat", *given, {})
    chat.model.eval()
    settings = chat.model.generation_config or GenerationConfig()
    settings = settings.with_ends_of(chat.processor.generation_config)
    settings = settings.updated(max_new_tokens=num_tokens, do_sample=False)
    for image, prompt in questions:
        messages = [{"role": "user", "content": f"{'<image>' if image else ''}{prompt}"}]
        inputs = chat.processor(messages=messages, images=[image] if image else [])
        tokens = np.array([*chat.model.stream(**inputs, generation_config=settings)])[:, 0]
        ids = np.concatenate([inputs["input_ids"], tokens[None, :-1]], axis=1)
        images = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if image}
        with paddle.no_grad():
            found = chat.model(input_ids=ids, **images)
        yield inputs["input_ids"][0], found.logits.numpy()[0], tokens


def check(
    engine: Engine,
    folder: Path,
    questions: Questions,
    python: Path,
    options: argparse.Namespace,
) -> Iterator[str]:
    """A line for each question; begins with "refused" or "differs" if the engine does not agree."""
    adapter = getattr(options, "adapter", None)
    with tempfile.TemporaryDirectory() as work:
        given, out = Path(work) / "questions.json", Path(work) / "answers.npz"
        given.write_text(json.dumps(questions))
        more = [
            part
            for name in ("max_new_tokens", *engine.options)
            if (value := getattr(options, name)) is not None
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [python, engine.script, folder, *more, "--inside", given, out]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            yield f"refused: {_reason(run.stdout + run.stderr)}"
            return
        theirs = dict(np.load(out))
    try:
        answers = list(answer_here(folder, questions, options.max_new_tokens, adapter))
    except (RuntimeError, ValueError) as error:
        yield f"differs: {engine.name} answers, and this package refuses: {error}"
        return
    what, scored = engine.scored
    tolerance = engine.tolerance(folder, options)
    for number, (own_ids, logits, own_tokens) in enumerate(answers):
        ids, scores, tokens = (theirs[f"{name}{number}"] for name in _FIELDS)
        image, prompt = questions[number]
        asked = Path(image).name if image else "no picture"
        about = f"{asked}, {prompt!r}, {len(ids)} ids, {len(tokens)} tokens"
        if not np.array_equal(ids, own_ids):
            yield f"differs: {about}: the prompt has other ids here, {len(own_ids)} of them"
            continue
        same = 0
        while same < min(len(tokens), len(own_tokens)) and tokens[same] == own_tokens[same]:
            same += 1
        own = scored(logits, np.concatenate([ids, own_tokens]))
        # What follows another token is another answer.
        known = min(len(ids) + same - 1, len(own))
        worst = float(np.abs(scores[:known] - own[:known]).max())
        if same < max(len(tokens), len(own_tokens)):
            # Both tokens are right where their scores are within what the scores differ by.
            two = [each[same] for each in (tokens, own_tokens) if same < len(each)]
            row = logits[len(ids) + same - 1] if len(two) == 2 else None
            if row is None or abs(float(row[two[0]] - row[two[1]])) > tolerance:
                told = f"here the answer is {own_tokens.tolist()}, not {tokens.tolist()}"
                yield f"differs: {about}: {told}"
                continue
            about += f", of which {same} until two are equally likely"
        verdict = "equal" if worst <= tolerance else "differs"
        yield f"{verdict}: {about}: {what} differ by {worst:.1e} at most"


def _reason(output: str) -> str:
    """The last error in what an engine printed, with what stands beside it."""
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


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every such tool."""
    made = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    made.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a model folder")
    made.add_argument("--python", type=Path, help="interpreter of the engine's environment")
    made.add_argument("--image", action="append", help="a picture; may be repeated")
    made.add_argument("--prompt", action="append", help="a question; may be repeated")
    made.add_argument("--max-new-tokens", type=int, default=24, help="of an answer (default 24)")
    # The engine's process.
    made.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    return made


def answer_inside(engine: Engine, options: argparse.Namespace) -> int:
    """What the engine's process does: answers the questions of a file into another."""
    given, out = options.inside
    found = engine.answer(options.folders[0], json.loads(given.read_text()), options)
    arrays = {
        f"{name}{number}": np.asarray(array)
        for number, answer in enumerate(found)
        for name, array in zip(_FIELDS, answer, strict=True)
    }
    np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
    return 0


def compare(
    engine: Engine, options: argparse.Namespace, python: Path, work: Path, with_text: bool = False
) -> int:
    """Print a table of every folder; 1 if the engine refuses one or anything differs.

    Args:
        with_text: prompts are asked without a picture too.
    """
    from paddle_vl.compat import configure_cpu_runtime

    configure_cpu_runtime()
    is_right = True
    images = [*(options.image or made_up_pictures(work)), *([None] if with_text else [])]
    prompts = options.prompt or engine.prompts
    questions = [(image, prompt) for image in images for prompt in prompts]
    for folder in options.folders:
        print(folder)
        for line in check(engine, folder, questions, python, options):
            print(f"  {line}", flush=True)
            is_right &= line.startswith("equal")
    print(f"{engine.name} agrees" if is_right else f"{engine.name} does not agree")
    return int(not is_right)
