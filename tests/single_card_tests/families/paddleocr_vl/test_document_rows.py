"""Rows of documents: those of ERNIEKit and PaddleFormers, tasks by name, checks of answers."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from paddle_vl.cli.main import main
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor
from tests.single_card_tests.train.tiny_run import write_records
from tests.support.document_run import ANSWERS, SPOTTED, make_processor, write_document_run

PROCESSOR = make_processor()
TABLE = ANSWERS["table"]
HTML = '<table><tr><td colspan="2">red</td></tr><tr><td>12</td><td></td></tr></table>'


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (16, 16), "white").save(tmp_path / name)
    return tmp_path


def opened(folder: Path, rows: list[dict], processor=PROCESSOR, **settings):
    write_records(folder / "rows.jsonl", rows)
    data = VLDataConfig(train=[str(folder / "rows.jsonl")], **settings)
    return open_conversations(data.train, data, processor, seed=0)


def texts(folder: Path, row: dict, **settings) -> str:
    """The sample's text, its answers marked."""
    (sample,) = opened(folder, [row], **settings)
    marks = ["" if label == -100 else "~" for label in sample["labels"]]
    pieces = map(PROCESSOR.tokenizer.backend.id_to_token, sample["input_ids"].tolist())
    text = "".join(mark + piece for mark, piece in zip(marks, pieces, strict=True))
    return text.replace("\u2581", " ").replace("<0x0A>", "\n")


def asked(question: str, answer: str, *images: str, **more) -> dict:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [*images], **more}


def ernie(question: str, answer: str, *images: str) -> dict:
    return {
        "image_info": [{"image_url": name, "matched_text_index": 0} for name in images],
        "text_info": [
            {"text": question, "tag": "mask"},
            {"text": answer, "tag": "no_mask"},
        ],
    }


@pytest.mark.parametrize("images", [("a.png",), ("a.png", "b.png"), ()])
@pytest.mark.parametrize("recognised", [True, False])
def test_rows_of_erniekit_and_paddleformers_are_one_sample(folder, images, recognised):
    rows = {
        "messages": asked("<image>" * len(images) + "OCR:", "red", *images),
        "erniekit": ernie("OCR:", "red", *images),
    }
    settings = [{} if recognised else {"format": name} for name in rows]
    one, other = (
        texts(folder, row, **given) for row, given in zip(rows.values(), settings, strict=True)
    )
    assert one == other
    place = "<|IMAGE_START|>" + "<|IMAGE_PLACEHOLDER|>" * 4 + "<|IMAGE_END|>"
    head = f"<|begin_of_sentence|>User: {place * len(images)}OCR:\nAssistant:\n"
    assert one.replace("~", "") == f"{head}red</s>"
    assert one.startswith(head)
    assert one.endswith("~</s>")


@pytest.mark.parametrize(
    "row",
    [
        {"task": "table", "image": "a.png", "answer": TABLE},
        {"task": "table", "image": "a.png", "query": "", "response": TABLE},
        asked("<image>", TABLE, "a.png", task="table"),
        asked("<image>Table Recognition:", TABLE, "a.png", task="table"),
        asked("<image>Table Recognition:", TABLE, "a.png", task="invoices"),
        ernie("", TABLE, "a.png") | {"task": "table"},
    ],
)
def test_a_task_is_asked_by_its_name(folder, row):
    assert "<|IMAGE_END|>Table Recognition:\n" in texts(folder, row)


@pytest.mark.parametrize(
    ("row", "kind", "match"),
    [
        (asked("<image>", TABLE, "a.png"), "no_task",
         "turn 1 has no text: write the prompt, or name the row's 'task': text, table, formula"),
        (asked("<image>OCR:", TABLE, "a.png", task="table"), "ambiguous",
         "names the task 'table', whose prompt is 'Table Recognition:', and asks 'OCR:'"),
        (asked("<image>Table Recognition:", "<fcel>a<nl><fcel>b<fcel>c<nl>", "a.png"), "bad_table",
         "answer in turn 2 is no table in OTSL: row 2 has 2 places and row 1 has 1"),
        (asked("<image>Read the invoice.", "<lcel><nl>", "a.png", task="table"), "bad_table",
         "is no table in OTSL"),
        (asked("<image>Table Recognition:", HTML, "a.png"), "bad_table",
         "set data.html_tables: otsl"),
        (asked("<image>Spotting:", SPOTTED.replace("750", "1001"), "a.png"), "bad_spotting",
         "is no list of spotted lines: line 1 has <.LOC_1001.>, outside of the image"),
        (asked("<image>Spotting:", SPOTTED.removesuffix("<|LOC_750|>"), "a.png"), "bad_spotting",
         "line 1 has 7 location tokens"),
        (asked("<image>OCR:", " \n", "a.png"), "empty_answer", "has no text: write what the page"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_or_left_out_and_counted(folder, row, kind, match):
    good = asked("<image>OCR:", "red", "a.png")
    with pytest.raises(BadSampleError, match=match) as error:
        opened(folder, [good, row])
    assert error.value.kind == kind
    assert str(error.value).startswith(f"{folder / 'rows.jsonl'}:2: a row of format messages")
    data = opened(folder, [good, row], on_bad_sample="skip")
    assert (len(data), dict(data.skipped)) == (1, {kind: 1})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": "tabel"}, "'task' is 'tabel'; one of text, table, formula"),
        ({"image": None}, "names the task 'table' and has no image: give its 'image'"),
    ],
)
def test_a_task_that_the_model_has_not_or_without_an_image_is_named(folder, change, told):
    row = {"task": "table", "image": "a.png", "answer": TABLE} | change
    with pytest.raises(BadSampleError, match=told):
        opened(folder, [row])


def test_answers_are_checked_where_asked_alone(folder):
    rows = [
        asked("<image>Table Recognition:", "no table", "a.png"),
        # Not a table's question, and an answer that is not learned.
        asked("<image>OCR:", "<lcel><nl>", "a.png"),
    ]
    rows += [asked("<image>Table Recognition:", "no", "a.png")]
    rows[2]["messages"][1]["loss"] = False
    rows[2]["messages"] += asked("And now?", "yes")["messages"]
    assert len(opened(folder, rows, checks=[])) == 3
    assert len(opened(folder, rows[1:], checks=["tables"])) == 2


def test_large_images_are_bad_samples_where_asked(folder, capsys):
    Image.new("RGB", (64, 64)).save(folder / "b.png")
    row = asked("<image>OCR:", "red", "b.png")
    assert opened(folder, [row])[0]["image_grid_thw"].tolist() == [[1, 4, 4]]
    data = opened(folder, [row], PROCESSOR.refusing_shrunk())
    for read in (data.__getitem__, data.lengths):
        with pytest.raises(BadSampleError, match=r"rows\.jsonl:1: image 1 .* would be shrunk"):
            read(0)
    assert data.length_settings() != opened(folder, [row]).length_settings()
    run_file = write_document_run(folder)
    write_records(folder / "large.jsonl", [row])
    shows = ["show-data", str(run_file), f"data.train=[{folder / 'large.jsonl'}]"]
    assert main(shows) == 1
    assert "would be shrunk to 256 pixels" in capsys.readouterr().err
    assert main([*shows, "data.checks=[]"]) == 0


def test_tables_of_html_are_learned_as_otsl_where_asked(folder):
    row = asked("<image>Table Recognition:", HTML, "a.png")
    found = texts(folder, row, html_tables="otsl", checks=["tables"])
    assert found.replace("~", "").endswith(f"{TABLE}</s>")
    broken = asked("<image>Table Recognition:", "<table></table>", "a.png")
    with pytest.raises(BadSampleError, match="is no table in HTML: it has no <table> with a cell"):
        opened(folder, [broken], html_tables="otsl")


def test_checks_of_tasks_are_for_models_that_have_them(folder):
    row = asked("<image>OCR:", "red", "a.png")
    with pytest.raises(ValueError, match=r"tables, otsl in data\.checks or data\.html_tables is"):
        opened(folder, [row], tiny_processor(), checks=["tables"], html_tables="otsl")
    # Rows of other models name tasks in any words.
    assert to_canonical(asked("", "red", task="table")).messages[0]["content"] == []


def test_a_run_of_documents_and_its_answers(tmp_path, capsys, monkeypatch):
    run_file, page = write_document_run(tmp_path), tmp_path / "samples.html"
    assert main(["show-data", str(run_file), "--samples", "4", "--page", str(page)]) == 0
    assert '<polygon points="0 250 500 250 500 750 0 750"/>' in page.read_text()
    assert main(["train", str(run_file), "data.packing=true"]) == 0
    final = tmp_path / "out" / "final"
    settings = json.loads((final / "preprocessor_config.json").read_text())
    assert settings["processor_class"] == "PaddleOCRVLProcessor"
    ask = ["generate", "--model", str(final), "--image", str(tmp_path / "page0.png")]
    capsys.readouterr()
    answers = []
    for question in (["--task", "table"], ["--prompt", "Table Recognition:"]):
        assert main([*ask, *question, "--max-new-tokens", "4"]) == 0
        answers.append(capsys.readouterr().out)
    lines = f"/image {tmp_path / 'page0.png'}\n/task table\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "--model", str(final), "--max-new-tokens", "4"]) == 0
    answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2] != ""
    for question, told in (
        (["--task", "photo"], "no task 'photo'; its tasks are: text, table, formula"),
        ([], "give either --prompt or --task"),
    ):
        assert main([*ask, *question]) == 1
        assert told in capsys.readouterr().err
