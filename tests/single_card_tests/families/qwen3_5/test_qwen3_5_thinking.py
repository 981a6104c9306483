"""Rows with reasoning, through the processor's files and a run: what is learned is the answer
behind the `<think>` that its prompt ends with, as the commands ask, and answers are compared
without it.

`qwen3_5_style.jinja` is of our own, and its texts are those that HF gives with the published
one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.modeling.model import VLForConditionalGeneration
from paddle_vl.train.build import run_family
from tests.single_card_tests.train.tiny_run import MODEL_3_5, write_records, write_tiny_run
from tests.single_card_tests.train.whole_runs import build
from tests.support.tiny import GOLDEN

TEMPLATES = GOLDEN / "templates"
TOKENIZER = Tokenizer.from_file(str(TEMPLATES / "tokenizer" / "tokenizer.json"))
TALKS = json.loads((TEMPLATES / "conversations.json").read_text(encoding="utf-8"))
RECORDED = {
    case["id"]: case
    for case in map(json.loads, (TEMPLATES / "qwen3_5_style.jsonl").read_text().splitlines())
}
OFF = "data.chat_template_kwargs={enable_thinking: false}"
QUESTION = {"role": "user", "content": "2+2?"}
IN_KEY = [QUESTION, {"role": "assistant", "content": "4", "reasoning_content": "Two pairs."}]
IN_TEXT = [QUESTION, {"role": "assistant", "content": "<think>\nTwo pairs.\n</think>\n\n4"}]
PLAIN = [QUESTION, {"role": "assistant", "content": "4"}]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = write_tiny_run(tmp_path_factory.mktemp("run"), model=MODEL_3_5)
    processor = path.with_name("processor")
    for file in (TEMPLATES / "tokenizer").iterdir():
        shutil.copyfile(file, processor / file.name)
    template = TEMPLATES / "jinja" / "qwen3_5_style.jinja"
    shutil.copyfile(template, processor / "chat_template.jinja")
    return path


def settings(folder: Path, rows: list, *more: str) -> list[str]:
    write_records(folder / "rows.jsonl", [{"messages": row} for row in rows])
    vocabulary = f"model.config.text_config.vocab_size={TOKENIZER.get_vocab_size()}"
    return [f"data.train=[{folder / 'rows.jsonl'}]", vocabulary, *more]


def samples(run_file: Path, folder: Path, rows: list, *more: str) -> list[tuple[str, str]]:
    """Text and learned text of the training samples of some rows."""
    data = run_family(load_run_config(run_file, settings(folder, rows, *more))).train_data
    found = []
    for number in range(len(data)):
        ids, labels = data[number]["input_ids"], data[number]["labels"]
        text = TOKENIZER.decode(ids.tolist(), skip_special_tokens=False)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == ids.tolist()
        assert (labels[labels != -100] == ids[labels != -100]).all()
        learned = labels[labels != -100].tolist()
        found.append((text, TOKENIZER.decode(learned, skip_special_tokens=False)))
    return found


@pytest.mark.parametrize(
    ("row", "more", "learned"),
    [
        (IN_KEY, [], f"Two pairs.\n</think>\n\n4{END}"),
        (IN_TEXT, [], f"Two pairs.\n</think>\n\n4{END}"),
        # The empty block that the template adds is not learned.
        (PLAIN, [], f"4{END}"),
        (PLAIN, [OFF], f"4{END}"),
    ],
    ids=["key", "text", "none", "off"],
)
def test_an_answer_is_learned_behind_its_prompt(run_file, tmp_path, row, more, learned):
    ((text, found),) = samples(run_file, tmp_path, [row], *more)
    case = RECORDED["reasoning_alias" if row is not PLAIN else "reasoning_off"]
    assert (text, found) == (case["text"], learned)


@pytest.mark.parametrize("name", ["reasoning_history", "reasoning_in_text_history"])
def test_earlier_answers_lose_their_reasoning(run_file, tmp_path, name):
    talk = TALKS[name]["messages"]
    last = f"{talk[3].get('reasoning_content', 'Triples.')}\n</think>\n\n6{END}"
    with pytest.raises(BadSampleError, match="earlier_reasoning"):
        samples(run_file, tmp_path, [talk])
    only_last = [*talk[:1], talk[1] | {"loss": False}, *talk[2:]]
    found = samples(run_file, tmp_path, [only_last], "data.earlier_reasoning=drop")
    assert found == [(RECORDED[name]["text"], last)]
    found = samples(run_file, tmp_path, [talk], "data.earlier_reasoning=split")
    first = f"{talk[1].get('reasoning_content', 'Pairs.')}\n</think>\n\n4{END}"
    assert [learned for _, learned in found] == [first, last]


def test_the_commands_ask_without_thinking_and_compare_what_follows_it(
    run_file, tmp_path, capsys, monkeypatch
):
    out, asked = tmp_path / "out", []
    build(run_file, out, *settings(tmp_path, [IN_KEY, IN_TEXT, PLAIN], "train.max_steps=1")).run()

    def answer(model, input_ids, **given):
        asked.append(TOKENIZER.decode(input_ids[-1].tolist(), skip_special_tokens=False))
        ids = TOKENIZER.encode("Hm.\n</think>\n\n4", add_special_tokens=False).ids
        return np.array([ids] * len(input_ids))

    monkeypatch.setattr(VLForConditionalGeneration, "generate", answer)
    command = ["evaluate", str(out), "--data", str(tmp_path / "rows.jsonl")]
    assert main(command) == 0
    assert "100.00%  (3 of 3)" in capsys.readouterr().out
    # Rows with reasoning are not what such a prompt asks for.
    command[3] = str(tmp_path / "plain.jsonl")
    write_records(Path(command[3]), [{"messages": PLAIN}])
    assert main([*command, "--chat-template-kwargs", "{enable_thinking: false}"]) == 0
    assert "100.00%  (1 of 1)" in capsys.readouterr().out
    endings = [RECORDED[name]["generation_prompt"] for name in ("plain", "reasoning_off")]
    assert [text.endswith(end) for text, end in zip(asked, endings, strict=True)] == [True, True]
    with pytest.raises(SystemExit):
        main([*command, "--chat-template-kwargs", "enable_thinking"])
    assert "'enable_thinking' is no mapping like" in capsys.readouterr().err


SPECIAL = "SPECIAL"


@pytest.mark.parametrize(
    ("more", "pattern", "message"),
    [
        ([], "<think>.+</think>.+", r"rows\.jsonl:1: the prompt ends with <think>, which no"),
        ([], ".+</think>.+", None),
        ([OFF], ".+</think>.+", r"which closes the reasoning that grpo\.rewards format:\.\+<"),
        ([OFF], r"\d+", None),
        ([SPECIAL], r"\d+", "the tokenizer calls </think> a special token"),
    ],
    ids=["opened", "continued", "closed", "without", "special"],
)
def test_a_reward_of_reasoning_that_no_answer_can_have_is_refused(
    run_file, tmp_path, more, pattern, message
):
    given = [
        *("train.objective=grpo", "grpo.num_generations=2", "grpo.max_completion_length=4"),
        f"grpo.rewards=['format:{pattern}']",
        *(each for each in more if each != SPECIAL),
    ]
    if SPECIAL in more:
        folder = tmp_path / "processor"
        shutil.copytree(run_file.with_name("processor"), folder)
        values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for token in values["added_tokens"]:
            token["special"] |= token["content"] == "</think>"
        (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
        given.append(f"data.processor={folder}")
    config = load_run_config(run_file, settings(tmp_path, [[QUESTION]], *given))
    if message is None:
        assert run_family(config).samples_answers
    else:
        with pytest.raises(ValueError, match=message):
            run_family(config)


def test_a_prompt_whose_reasoning_its_template_drops_is_refused(run_file, tmp_path):
    talk = TALKS["reasoning_history"]["messages"][:3]
    given = settings(tmp_path, [talk], "train.objective=grpo", "grpo.rewards=['format:4']")
    config = load_run_config(run_file, [*given, "grpo.num_generations=2"])
    with pytest.raises(BadSampleError, match=r"rows\.jsonl:1: .*earlier_reasoning"):
        run_family(config)
