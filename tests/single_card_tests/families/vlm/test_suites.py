"""Benchmarks described in YAML: those of `configs/suites` on rows with each benchmark's columns."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import load_rgb
from paddle_vl.families.vlm.evaluation.scorer import Scorer, answer_to, questions_in
from paddle_vl.families.vlm.evaluation.suite import open_suite, read_suite
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import VLDataConfig

SUITES = Path(__file__).parents[4] / "configs" / "suites"
LETTER = "Answer with the option's letter from the given choices directly"
SHORT = "Answer the question using a single word or phrase."


def picture(width: int = 64, height: int = 32) -> dict:
    data = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(data, format="PNG")
    return {"bytes": data.getvalue(), "path": None}


def mmmu(**values) -> dict:
    images = {f"image_{n}": None for n in range(1, 8)} | {"image_1": picture()}
    return {
        "id": "validation_Accounting_1", "question": "Which is <image 1>?", "options": "[]",
        "explanation": "", **images, "img_type": "['Tables']", "answer": "B",
        "topic_difficulty": "Easy", "question_type": "multiple-choice", "subfield": "Audit",
        **values,
    }  # fmt: skip


MMMU = [
    mmmu(options="['$6', '<image 2>']", image_2=picture()),
    mmmu(answer="['24', 'two dozen']", question_type="open", topic_difficulty="Hard"),
]
MMSTAR = {
    "index": 0, "question": "What is it?\nOptions: A: a door, B: a hat",
    "image": picture()["bytes"], "answer": "A", "category": "math", "l2_category": "geometry",
    "meta_info": {"source": "MMBench", "split": "val", "image_path": "a.jpg"},
}  # fmt: skip
DOCVQA = {
    "questionId": "49153", "question": "What is the total?", "question_types": ["table", "form"],
    "image": picture(), "docId": 14465, "ucsf_document_id": "x", "ucsf_document_page_no": "1",
    "answers": ["$ 975.00", "975.00"], "data_split": "val",
}  # fmt: skip
CHARTQA = {"type": "human_test", "question": "How many?", "answer": "14", "image": picture()}
REFCOCO = {
    "question_id": "1", "image": picture(64, 32), "question": "?", "answer": ["left door", "door"],
    "segmentation": [1.0], "bbox": [16.0, 8.0, 32.0, 16.0], "iscrowd": 0, "file_name": "a.jpg",
}  # fmt: skip


@pytest.fixture(scope="module")
def processor():
    return VLProcessor.from_texts(["What is it? A door."], 400)


def opened(name: str, rows: list[dict], folder: Path, processor: VLProcessor, **changes):
    """The description with its data set in a folder, and the questions of all samples."""
    suite = read_suite(SUITES / f"{name}.yaml")
    subset, split = (suite.subsets or ["default"])[0], suite.split
    (folder / subset).mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / subset / f"{split}-00000-of-00001.parquet")
    card = [{"split": split, "path": f"{subset}/{split}-*"}, {"split": "other", "path": "other-*"}]
    configs = [{"config_name": subset, "data_files": card}]
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    suite = suite.model_copy(update={"path": str(folder), **changes})
    data = open_suite(suite, processor)
    return suite, [each for number in range(len(data)) for each in questions_in(data, number)]


def shown(question) -> str:
    parts = question.prompt.messages[-1]["content"]
    return "".join(part.get("text", "[image]") for part in parts)


@pytest.mark.parametrize(
    ("name", "rows", "asked", "references", "groups", "answers", "wanted"),
    [
        (
            "mmmu", MMMU,
            [f"Which is [image]?\nA. $6\nB. [image]\n\n{LETTER}.", f"Which is [image]?\n\n{SHORT}"],
            [["B"], ["24", "two dozen"]],
            [["question_type=multiple-choice", "topic_difficulty=Easy"],
             ["question_type=open", "topic_difficulty=Hard"]],
            ["(B)", "It is 24.0"], {"mmmu": 1},
        ),
        (
            "mmstar", [MMSTAR], [f"[image]{MMSTAR['question']}\n{LETTER}"], [["A"]],
            [["category=math"]], ["B: a hat"], {"multiple_choice": 0},
        ),
        (
            "docvqa", [DOCVQA], [f"[image]What is the total?\n{SHORT}"], [["$ 975.00", "975.00"]],
            [["question_types=table", "question_types=form"]], ["975.0"], {"anls": 5 / 6},
        ),
        (
            "chartqa", [CHARTQA], [f"[image]How many?\n{SHORT}"], [["14"]],
            [["type=human_test"]], ["14.5"], {"relaxed_accuracy": 1},
        ),
        (
            "refcoco", [REFCOCO],
            [f"[image]Locate {it}, report the bbox coordinates in JSON format."
             for it in REFCOCO["answer"]],
            [["[250, 250, 750, 750]"]] * 2, [[], []],
            ['[{"bbox_2d": [250, 250, 750, 500], "label": "door"}]', "no"],
            {"box_iou": 0.25, "box_precision_0.5": 0.5, "box_precision_0.7": 0,
             "box_precision_0.9": 0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_published_benchmarks(
    name, rows, asked, references, groups, answers, wanted, tmp_path, processor
):
    suite, questions = opened(name, rows, tmp_path, processor)
    assert [shown(each) for each in questions] == asked
    assert [[*each.asked.references] for each in questions] == references
    assert [[*each.asked.groups] for each in questions] == groups
    assert processor.encode_prompts([each.prompt for each in questions])
    scorer = Scorer(suite.metrics, suite.scored_part)
    assert scorer.check(questions) == list(wanted)
    found, scored = scorer.overall([*map(answer_to, questions, answers)])
    assert found == pytest.approx(wanted)
    assert scored[0].to_dict()["scores"].keys() == wanted.keys()


def test_the_part_of_an_answer_that_is_scored(tmp_path, processor):
    extract = {"extract": r"(?i)total is (\$?[\d.]+)"}
    suite, questions = opened("docvqa", [DOCVQA], tmp_path, processor, **extract)
    scorer = Scorer(suite.metrics, suite.scored_part)
    for text, wanted in {
        "Total is 1. No, the total is 975.00 dollars": 1,
        "<think>the total is 975.00</think>The total is 3": 0,
        "975.00": 1,
    }.items():
        assert scorer.overall([answer_to(questions[0], text)])[0]["anls"] == wanted


def test_each_source_has_its_metrics_and_rows_several_answers(tmp_path, processor):
    rows = {"a": [("5", ["five", "V"])], "b": [("[0, 0, 9, 9]", []), ("[5, 5, 9, 9]", [])]}
    for name, answers in rows.items():
        lines = (json.dumps({"query": "?", "response": a, "references": r}) for a, r in answers)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    entries = [tmp_path / "a.jsonl", {"path": f"{tmp_path}/b.jsonl", "metrics": ["box", "anls"]}]
    data = VLDataConfig(eval=[each if isinstance(each, dict) else str(each) for each in entries])
    dataset = open_conversations(data.eval, data, processor, 0)
    questions = [each for number in range(3) for each in questions_in(dataset, number)]
    assert questions[0].asked.references == ["5", "five", "V"]
    scorer, answers = Scorer(["anls"]), ["five", "[0, 0, 9, 9]", "[5, 5, 9, 9]"]
    assert scorer.check(questions)[:2] == ["anls", "box_iou"]
    found, scored = scorer.overall([*map(answer_to, questions, answers)])
    # Boxes are of their source's rows, ANLS of all.
    assert (found["anls"], found["box_iou"]) == (1, 1)
    assert [len(each.scores) for each in scored] == [1, 5, 5]
    assert [each.is_exact for each in scored] == [True] * 3
    (tmp_path / "c.jsonl").write_text('{"query": "?", "response": "5", "references": "five"}')
    dataset = open_conversations([f"{tmp_path}/c.jsonl"], data, processor, 0)
    with pytest.raises(ValueError, match="c.jsonl:1 has the references 'five' for 1 answers: they"):
        questions_in(dataset, 0)


def test_groups_are_scored_without_a_second_call_of_a_function(tmp_path, processor):
    (tmp_path / "my.py").write_text(
        "def length(answer, references, row):\n    row['calls'].append(answer)\n"
        "    return len(answer)\n"
        "def count(answers, references, rows):\n    return len(answers)\n"
    )
    rows = [{"query": "?", "response": "a", "task": task, "calls": []} for task in "xyx"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = open_conversations([f"{tmp_path}/a.jsonl"], VLDataConfig(), processor, 0)
    questions = [each for number in range(3) for each in questions_in(dataset, number)]
    scores, _ = Scorer([f"{tmp_path}/my.py:{name}" for name in ("length", "count")])(
        [*map(answer_to, questions, ["a", "bb", "ccc"])]
    )
    assert scores == {
        "all answers": {"answers": 3, "length": 2, "count": 3},
        "x": {"answers": 2, "length": 2, "count": 2},
        "y": {"answers": 1, "length": 2, "count": 1},
    }
    assert [each.asked.columns["calls"] for each in questions] == [["a"], ["bb"], ["ccc"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "{{ question | lettered }}"}, "lettered needs a list of options, which 'What"),
        ({"prompt": "{{ question + 1 }}"}, "the prompt cannot be made: can only concatenate str"),
        (
            {"prompt": "{{ ask }}"},
            "the prompt cannot be made: 'ask' is undefined; it has index, que",
        ),
        ({"images": ["photo"]}, "it has no value of 'photo'; it has index, question, image, "),
        ({"references": "label"}, "no value of 'label'"),
        ({"boxes": "corners"}, "'A' is no box of four numbers"),
        ({"columns": {"index": "question"}}, "has the key 'question' and another"),
    ],
)
def test_rows_that_do_not_fit(change, message, tmp_path, processor):
    with pytest.raises(BadSampleError, match=f"val-00000-of-00001.parquet.*{message}"):
        opened("mmstar", [MMSTAR], tmp_path, processor, **change)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("prompt: x\nformat: llava", 'suite.yaml:5: format is "llava"; .*no such setting'),
        ("promt: x", "suite.yaml:4: promt is not a setting; did you mean prompt?"),
        ('prompt: "{{ x"', "suite.yaml:4: prompt is .*it is no template of Jinja"),
        ("prompt: x\nextract: (", "extract is .*no regular expression"),
        (
            "prompt: x\ngeneration: {beams: 2}",
            "suite.yaml:5: generation is .*not a generation setti",
        ),
        ("prompt: x\ngeneration: {top_p: 0.9}", "generation is .*do_sample: true alone: add it"),
    ],
)
def test_descriptions_that_are_wrong(lines, message, tmp_path):
    file = tmp_path / "suite.yaml"
    file.write_text(f"name: X\npath: x.jsonl\nreferences: answer\n{lines}\nmetrics: [anls]\n")
    with pytest.raises(ValueError, match=message):
        read_suite(file)


DOCUMENTS = Path(__file__).parents[3] / "data" / "documents"
LAYOUTS = {"omnidocbench": "OmniDocBench.json", "olmocr_bench": "table_tests.jsonl"}
TABLE = (
    "<table><thead><tr><th>Port</th><th>Ships</th></tr></thead>"
    "<tbody><tr><td>Kiel</td><td>12</td></tr></tbody></table>"
)
LANGUAGE = "page_info.page_attribute.language=english"


@pytest.mark.parametrize(
    ("name", "asked", "references", "groups", "sizes", "answers", "wanted"),
    [
        (
            "omnidocbench_text", ["[image]OCR:"] * 4,
            ["Harbours", "Ships per year.", "Second text.", "First text."],
            [LANGUAGE, "page_info.page_attribute.data_source=book"],
            [(62, 12), (112, 12), (92, 12), (92, 14)],
            ["Harbours", "Ships per  year", "Second text.", "First text"],
            # Two edits of 46 letters; none of the letters alone.
            {"ned_letters": 0, "cer": 2 / 46},
        ),
        (
            "omnidocbench_tables", ["[image]Table Recognition:"], [TABLE],
            [LANGUAGE, "layout_dets.attribute.with_span=(none)"], [(102, 28)],
            ["<fcel>Port<fcel>Ships<nl><fcel>Kiel<fcel>21<nl>"], {"teds": 5 / 6, "teds_s": 1},
        ),
        (
            "omnidocbench_formulas", ["[image]Formula Recognition:"], [r"$$a = \frac{b}{2}$$"],
            [LANGUAGE], [(72, 14)], [r"\[a=\frac{b}{2}\]"], {"formula": 0},
        ),
        (
            "omnidocbench_pages", ["[image]OCR:"] * 2,
            ["Harbours\nShips per year.", "First text.\nSecond text."],
            ["page_info.page_attribute.layout=single_column", LANGUAGE], [(160, 120)] * 2,
            ["Harbours Ships per year", "First text.\nSecond text."],
            {"ned_letters": 0, "ned": 1 / 24},
        ),
        (
            "olmocr_bench", ["[image]OCR:"] * 5, ["a_1", "a_2", "a_3", "a_4", "a_5"],
            ["type=table"], [(120, 40)] * 5,
            [TABLE, "Kie", "Port Ships Page 7", "Kiel, Port", "12"], {"olmocr": 3 / 5},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_benchmarks_of_documents(
    name, asked, references, groups, sizes, answers, wanted, processor
):
    suite = read_suite(SUITES / f"{name}.yaml")
    layout = next(each for each in LAYOUTS if name.startswith(each))
    file = DOCUMENTS / layout / LAYOUTS[layout]
    data = open_suite(suite.model_copy(update={"path": str(file)}), processor)
    questions = [each for number in range(len(data)) for each in questions_in(data, number)]
    assert [shown(each) for each in questions] == asked
    assert [each.asked.references[0] for each in questions] == references
    assert questions[0].asked.groups == groups
    assert [load_rgb(each.prompt.images[0]).size for each in questions] == sizes
    assert processor.encode_prompts([questions[0].prompt])
    found, _ = Scorer(suite.metrics).overall([*map(answer_to, questions, answers)])
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": {"layout_dets.category_type": ["seal"]}}, "no sample has what `where` asks for"),
        ({"crop": "layout_dets.order"}, "1 are no corners, x and y of two or more"),
        ({"crop": "layout_dets.box"}, r"it has no value of 'layout_dets\.box'"),
        ({"images": ["{{ page_info.file }}"]}, "a path cannot be made: .* has no attribute 'file'"),
        ({"references": "{{ text }}"}, "the reference cannot be made: 'text' is undefined"),
    ],
)
def test_descriptions_that_do_not_fit_documents(change, message, processor):
    suite = read_suite(SUITES / "omnidocbench_text.yaml")
    file = DOCUMENTS / "omnidocbench" / "OmniDocBench.json"
    with pytest.raises((ValueError, BadSampleError), match=message):
        open_suite(suite.model_copy(update={"path": str(file), **change}), processor)
