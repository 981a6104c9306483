"""The Python that the pages show for Qwen3-VL.

Guarantees: docs/models.md makes a small model folder, whose export ends answers likewise; the
examples of docs/models.md and of the README's "Generate and export" run on such a folder as they
are written; the commands that fetch a model name no host.
"""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paddle_vl import GenerationConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from paddle_vl.config.families import family_of_folder
from paddle_vl.families.vlm.answering.chat import Chat
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits
from tests.single_card_tests.families.qwen3_vl.chat_builders import assistant, user

ROOT = Path(__file__).parents[2]


def run_python(page: str, section: str) -> dict:
    """Run the first Python block of a section; its names."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(section)[2]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"{page} has no Python there"
    names: dict = {}
    exec(compile(found[1], page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of docs/models.md, section "Small models"."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_python("docs/models.md", "## Small models")
    return folder / "small" / "model"


def test_a_small_model_and_its_processor_are_a_checkpoint(made, tmp_path):
    model = Qwen3VLForConditionalGeneration.from_pretrained(made)
    processor = Qwen3VLProcessor.from_pretrained(made)
    check_processor_fits(model.config, processor)
    assert model.generation_config.eos_token_ids == processor.eos_token_ids
    for text in ("The left hinge.", "an unknown alphabet: \u00e4\u4e16\U0001f600"):
        assert processor.decode(processor.tokenizer.encode(text)) == text
    # Words of the texts are single tokens.
    assert len(processor.tokenizer.encode("hinge")) < len("hinge")
    # An export of it ends answers likewise.
    family_of_folder(made).ask("export", made, None).save_files(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path) == GenerationConfig.from_pretrained(made)
    again = Qwen3VLProcessor.from_texts(["a"], 300)
    assert again.tokenizer.to_json() == Qwen3VLProcessor.from_texts(["a"], 300).tokenizer.to_json()


@pytest.fixture
def digits(made, tmp_path, monkeypatch):
    """A working folder with the files of the quickstart that the examples name."""
    monkeypatch.chdir(tmp_path)
    Path("runs/digits/run").mkdir(parents=True)
    Path("runs/digits/run/final").symlink_to(made)
    Path("runs/digits/data/images").mkdir(parents=True)
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(picture).save("runs/digits/data/images/0000.png")


def printed_names(page: str, section: str) -> dict:
    """Names of an example that prints an answer of at most 8 tokens."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = run_python(page, section)
    assert printed.getvalue().startswith("['")
    assert names["ids"].shape[1] <= 8
    return names


@pytest.mark.usefixtures("digits")
def test_the_readmes_example_runs_as_it_is_written():
    printed_names("README.md", "### 5. Generate and export")


@pytest.mark.usefixtures("digits")
def test_the_example_from_python_runs_as_it_is_written(tmp_path):
    names = printed_names("docs/models.md", "# From Python")
    assert names["model"].lm_head.weight.grad is not None
    labels = names["batch"]["labels"]
    processor = names["processor"]
    assert labels[labels != -100].tolist() == [
        *processor.tokenizer.encode("7"),
        *processor.eos_token_ids[:1],
    ]
    assert (tmp_path / "copy" / "generation_config.json").is_file()


def test_an_answer_that_has_begun_is_continued_with_its_spaces(made):
    model, processor = (
        kind.from_pretrained(made) for kind in (Qwen3VLForConditionalGeneration, Qwen3VLProcessor)
    )
    tokens = processor.tokenizer.encode(" hinge.")

    class Answering:
        """Gives the tokens, and keeps the prompt."""

        generation_config = model.generation_config

        def stream(self, input_ids, **batch):
            self.prompt = processor.decode(input_ids[0], skip_special_tokens=False)
            return (np.array([token]) for token in tokens)

    given, chat = Answering(), [user("What?"), assistant("The left")]
    assert Chat(given, processor).ask(chat) == " hinge."
    assert given.prompt.endswith("<|im_start|>assistant\nThe left")
    assert Chat(given, processor).ask(chat[:1]) == "hinge."


def test_the_commands_that_fetch_a_model_name_no_host():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "paddle-vl download" in line or "Qwen/" in line]
    assert len(lines) >= 2
    assert not any("://" in line for line in lines)
