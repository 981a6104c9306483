"""Rows of any files as one file of canonical rows.

Guarantees: rows of every golden format, file and mixture give the same rows and samples from the
new file as from the sources; bytes become files named by their content; nothing that is there is
lost, and a failure leaves no file; bad rows stop it with their place, or are counted.
"""

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from check_formats import CONTROL_TOKENS
from paddle_vl.cli.main import main
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.formats.dialects import FORMATS
from paddle_vl.data.formats.keys import BOX_TOKENS, RowSettings
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.rows.convert import convert_rows
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.families.qwen3_vl import chat_builders
from tests.single_card_tests.families.qwen3_vl.chat_builders import question, write_jsonl

GOLDEN = Path(__file__).parents[3] / "golden" / "formats"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.jsonl"))
_EXPECTED = json.loads((GOLDEN / "containers/expected.json").read_text(encoding="utf-8"))
SAME_ROWS, REFUSED = _EXPECTED["same_rows"], _EXPECTED["refused"]
PROCESSOR = chat_builders.tiny_processor()
MARKED = RowSettings(boxes="markers", special_tokens=tuple(BOX_TOKENS))


def convert(path, output, settings=MARKED, **options):
    """Convert one source; the rows of the new file."""
    sources = [RowSourceConfig(path=str(path), format=options.pop("format", None))]
    convert_rows(sources, output, settings, seed=0, **options)
    return read(output)


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def picture(kind="PNG"):
    file = BytesIO()
    chat_builders.random_image(16, 8).save(file, kind)
    return file.getvalue()


def uri(content):
    return "data:image/any;base64," + base64.b64encode(content).decode()


def form(row, folder, settings, format=None):
    """The canonical form and the extras of a row, with the content of its images and videos."""
    found = RowReader(settings, format)(row, folder)

    def content(source):
        if hasattr(source, "files"):
            return [content(frame) for frame in source.files]
        return source if isinstance(source, bytes) else Path(source).read_bytes()

    for part in (part for message in found.messages for part in message["content"]):
        for kind in {"image", "video"} & part.keys():
            part[kind] = content(part[kind])
    return found.to_dict(), found.extras


@pytest.mark.parametrize("boxes", ["json", "markers"])
def test_golden_rows_stay_what_they_are(tmp_path, boxes):
    for folder in ("containers/media", "media"):
        shutil.copytree(GOLDEN / folder, tmp_path / "in/media", dirs_exist_ok=True)
    for name in ("clip.mp4", "media/clip.mp4"):
        (tmp_path / "in" / name).write_bytes(b"\0\0\0\x20ftypisom")
    settings = RowSettings(boxes=boxes, control_tokens=CONTROL_TOKENS)
    number = 0
    for folder in FOLDERS:
        rows, expected = (read(GOLDEN / folder / f"{name}.jsonl") for name in ("rows", "expected"))
        for row, wanted in zip(rows, expected, strict=True):
            number, name = number + 1, wanted.get("format", folder)
            format = name if name in FORMATS else None
            file = write_jsonl(tmp_path / f"in/{number}.jsonl", [row])
            output = tmp_path / f"a/b/{number}.jsonl"
            if "canonical" in wanted:
                (line,) = convert(file, output, settings, format=format)
                assert form(line, output.parent, MARKED) == form(row, file.parent, settings, format)
                assert convert(output, output.with_name(f"{number}-2.jsonl")) == [line]
            elif wanted["refused"] != "remote":
                with pytest.raises(ValueError):  # noqa: PT011
                    convert(file, output, settings, format=format)
                assert not output.exists()
    assert number == 103


def samples(entries, folder, **settings):
    """All arrays of a data set's samples, without the numbers of their sources."""
    data = VLDataConfig(processor="unused", cache=str(folder), **settings)
    opened = open_conversations([*map(str, entries)], data, PROCESSOR, 5)
    found = (opened[number] for number in range(len(opened)))
    return [
        {key: (a.shape, a.tobytes()) for key, a in sample.items() if "source" not in key}
        for sample in found
    ]


@pytest.mark.parametrize(
    "arguments", ['{"city": null}', '{"city": [{"of": null}]}', {"city": None}]
)
def test_nulls_of_json_texts_stay(tmp_path, arguments):
    """Of optional arguments, and defaults of functions; in objects tables fill them in."""
    city = {"type": "string", "default": None}
    tool = {"name": "tide", "parameters": {"type": "object", "properties": {"city": city}}}
    call = {"role": "assistant", "tool_calls": [{"name": "tide", "arguments": arguments}]}
    row = question("tide?")
    row["messages"][1:1] = [call, {"role": "tool", "content": "1"}]
    for row["tools"] in ([tool], json.dumps([tool])):
        file = write_jsonl(tmp_path / "in.jsonl", [row])
        (line,) = convert(file, tmp_path / "out.jsonl", overwrite=True)
        assert form(line, tmp_path, MARKED) == form(row, tmp_path, MARKED)


@pytest.mark.parametrize("name", [*SAME_ROWS, "alpaca.csv", "alpaca.tsv", *REFUSED])
def test_golden_files_give_the_same_samples_or_leave_nothing(tmp_path, name):
    shutil.copytree(GOLDEN / "containers", tmp_path / "in")
    file, output = tmp_path / "in" / name, tmp_path / "out/rows.jsonl"
    if name in REFUSED:
        with pytest.raises((ValueError, RuntimeError)):
            convert(file, output)
        assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]
    else:
        assert len(convert(file, output)) == len(found := samples([output], tmp_path)) > 0
        assert found == samples([file], tmp_path)


@pytest.mark.parametrize(
    ("entries", "named", "strategy"),
    [
        (["renamed%50,talks#4"], "concat", "concat"),
        (["talks", "short"], "all_exhausted", "interleave_over"),
    ],
)
def test_mixtures_give_the_same_samples(tmp_path, entries, named, strategy):
    shutil.copytree(GOLDEN / "mixtures", tmp_path / "in")
    info, output = str(tmp_path / "in/dataset_info.json"), tmp_path / "out.jsonl"
    arguments = ["--dataset-info", info, "--seed", "5", "--mix-strategy", named]
    assert main(["convert-data", *entries, str(output), *arguments]) == 0
    wanted = samples(entries, tmp_path, dataset_info=info, mix_strategy=strategy)
    assert samples([output], tmp_path) == wanted != []


def test_bytes_become_files_named_by_their_content(tmp_path):
    video = b"\0\0\0\x20ftypisom"
    videos = [uri(video), [uri(picture()), uri(picture())]]
    row = question("<image><video><video>", images=[uri(picture("JPEG"))], videos=videos)
    (written,) = convert(write_jsonl(tmp_path / "in.jsonl", [row]), tmp_path / "out/a.jsonl")
    jpg, mp4, (png, same) = (part[part["type"]] for part in written["messages"][0]["content"])
    assert [Path(each).suffix for each in (jpg, mp4, png)] == [".jpg", ".mp4", ".png"]
    assert (tmp_path / "out" / png).read_bytes() == picture()
    assert (tmp_path / "out" / mp4).read_bytes() == video
    assert (same, len(list((tmp_path / "out/media").iterdir()))) == (png, 3)
    # Neither is the row's fault.
    (tmp_path / "out" / png).write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="other content than its name says"):
        convert(tmp_path / "in.jsonl", tmp_path / "out/b.jsonl", on_bad_sample="skip")
    (tmp_path / "media").write_text("no folder")
    with pytest.raises(RuntimeError, match="media.* cannot be written"):
        convert(tmp_path / "in.jsonl", tmp_path / "b.jsonl", on_bad_sample="skip")


def test_extras_are_kept(tmp_path):
    row = {"question": "a", "answer": "b", "raw": b"\xff", "list": [{"x": b"\xff"}]}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (written,) = convert(tmp_path / "a.parquet", tmp_path / "a.jsonl")
    assert written["list"] == [{"x": written["raw"]}]
    assert (tmp_path / written["raw"]).read_bytes() == b"\xff"
    file = write_jsonl(tmp_path / "b.jsonl", [{"instruction": "a", "output": "b", "query": "c"}])
    with pytest.raises(BadSampleError, match="'query' beside 'messages' .* can be hidden"):
        convert(file, tmp_path / "c.jsonl")


def test_paths_lead_to_the_same_files_through_links(tmp_path):
    for name in ("deep/er", "in"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep/er")
    (tmp_path / "in/blob").write_bytes(picture())
    (tmp_path / "in/a.png").symlink_to("blob")
    row = question("<image>x<image>", images=["a.png", "https://example.com/b.png"])
    (written,) = convert(write_jsonl(tmp_path / "in/a.jsonl", [row]), tmp_path / "link/a.jsonl")
    path, address = (p["image"] for p in written["messages"][0]["content"] if "image" in p)
    assert path == "../../in/a.png"
    assert (tmp_path / "link" / path).samefile(tmp_path / "in/blob")
    assert address == "https://example.com/b.png"


def test_bad_rows_stop_it_or_are_counted(tmp_path, capsys):
    bad = [question("<image>x", images=["none.png"]), {"a": 1}, question(answer="")]
    file = write_jsonl(tmp_path / "in.jsonl", [*bad, question()])
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(BadSampleError, match=r"in\.jsonl:1: .*none\.png does not exist"):
        convert(file, output, overwrite=True)
    with pytest.raises(ValueError, match="exists: name another file"):
        convert(file, output, on_bad_sample="skip")
    assert output.read_text() == "mine"
    assert main(["convert-data", str(file), str(output), "--skip-bad", "--overwrite"]) == 0
    assert len(read(output)) == 1
    kinds = "".join(
        f"skipped: 1 of kind {k}\n" for k in ("empty_answer", "missing_image", "missing_key")
    )
    assert capsys.readouterr().out == f"1 rows are in {output}\n{kinds}"
    with pytest.raises(ValueError, match="all 3 rows are bad"):
        convert(write_jsonl(file, bad), output, on_bad_sample="skip", overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.jsonl"]


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--columns", "{", "is no JSON"), ("--columns", '{"q": 1}', "columns: q is 1"),
        ("--format", "gpt", "'query_response'"), ("--weights", "1,2", "2 probabilities"),
        ("--columns", '{"q": "query", "a": "answer"}', None),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, option, value, named):
    files = [str(write_jsonl(tmp_path / "in.jsonl", [{"q": "a", "a": "b"}])), f"{tmp_path}/o.jsonl"]
    assert main(["convert-data", *files, option, value]) == (1 if named else 0)
    assert (named or "") in capsys.readouterr().err
