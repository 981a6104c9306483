"""Spans of answers at the borders of tokens and texts."""

import subprocess
import sys
import zipfile

import pytest
from tokenizers import Tokenizer

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.tokenizer import train_bpe
from paddle_vl.families.vlm.templates.answer_spans import marked_spans
from paddle_vl.families.vlm.templates.encoding import MediaText
from tests.single_card_tests.families.vlm.templates.template_builders import (
    answer,
    encoder,
    learned_text,
    row,
    user,
)


def test_empty_blocks_are_left_out_but_count_for_the_turns():
    assert marked_spans([(0, 0), (2, 5)], [True, True]) == [(2, 5)]
    assert marked_spans([(0, 0), (2, 5)], [True, False]) == []


@pytest.mark.parametrize(
    ("span", "learned"), [((2, 5), "lo wo"), ((3, 4), "lo"), ((4, 4), ""), ((0, 5), "helo wo")]
)
def test_a_token_that_straddles_a_border_is_learned(span, learned):
    tokenizer = Tokenizer.from_str(train_bpe(["lo lo lo", " wo wo wo"], 300, ["<x>"]).to_json())
    text = "helo wo"
    encoded = MediaText(tokenizer).encode(text, [span] if span[0] < span[1] else [], (), (), ())
    ids = [label for label in encoded.labels if label != -100]
    assert tokenizer.decode(ids) == learned


@pytest.mark.heavy
def test_published_templates_are_learned_as_their_twins_with_marks_say(tmp_path):
    """Fetches the templates of a wheel; they are not part of this project."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "trl==1.16.0"]
    subprocess.run([*command, "-d", str(tmp_path)], check=True, timeout=300)
    row_of_two = row(user("a?"), answer("b"), user("c?"), answer("d\n"))
    with zipfile.ZipFile(next(tmp_path.glob("trl-*.whl"))) as wheel:
        for name in ("qwen3_vl", "qwen2_5_vl", "qwen3_instruct_2507", "smolvlm"):
            source, twin = (
                wheel.read(f"trl/chat_templates/{name}{kind}.jinja").decode()
                for kind in ("", "_training")
            )
            plain, marked = encoder(source), encoder(twin)
            without, with_marks = plain.encode(row_of_two), marked.encode(row_of_two)
            assert without.input_ids == with_marks.input_ids, name
            # The marks have the line break behind an answer's end, too.
            assert learned_text(without) == learned_text(with_marks).replace(">\n", ">"), name
        qwen3 = wheel.read("trl/chat_templates/qwen3.jinja").decode()
        with pytest.raises(BadSampleError, match="history is rewritten"):
            encoder(qwen3).encode(row_of_two)
