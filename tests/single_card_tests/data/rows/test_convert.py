"""Rows of any files as one file of canonical rows.

Guarantees: rows of every golden format, file and mixture give the same canonical rows and samples
from the new file as from the sources; bytes become files named by their content; nothing that is
there is lost, and a failed conversion leaves no file; bad rows stop it with their place, or are
counted, and a full disk is no bad row.
"""

import base64
import json
import os
import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from check_formats import CONTROL_TOKENS
from paddle_vl.cli.main import main
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.formats.recognise import FORMATS
from paddle_vl.data.formats.row_settings import BOX_TOKENS, RowSettings
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.rows.convert import convert_rows
from paddle_vl.families.vlm.inputs.conversation import RowReader
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "formats"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/expected.jsonl"))
CONTAINERS = json.loads((GOLDEN / "containers/expected.json").read_text(encoding="utf-8"))
MARKED = RowSettings(boxes="markers", special_tokens=tuple(BOX_TOKENS))


def convert(path, output, settings=MARKED, **options):
    """Convert one source; the rows of the new file."""
    named = {key: options.pop(key) for key in ("format", "columns") if key in options}
    sources = [RowSourceConfig(path=str(path), **named)]
    convert_rows(sources, output, settings, seed=0, **options)
    return read(output)


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def picture(kind="PNG", seed=0):
    file = BytesIO()
    random_image(16, 8, seed).save(file, kind)
    return file.getvalue()


def uri(content):
    return "data:image/any;base64," + base64.b64encode(content).decode()


def form(row, folder, settings, format=None):
    """The canonical form and the extras of a row, with the content of its images and videos."""
    found = RowReader(settings, format)(row, folder).row

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
    shutil.copytree(GOLDEN / "media", tmp_path / "in/media")
    shutil.copy(GOLDEN / "containers/media/c.png", tmp_path / "in/media")
    for name in ("clip.mp4", "media/clip.mp4"):
        (tmp_path / "in" / name).write_bytes(b"\0\0\0\x20ftypisom")
    settings = RowSettings(boxes=boxes, control_tokens=CONTROL_TOKENS)
    number = 0
    for folder in FOLDERS:
        rows, expected = (read(GOLDEN / folder / f"{name}.jsonl") for name in ("rows", "expected"))
        for row, wanted in zip(rows, expected, strict=True):
            name = wanted.get("format", folder)
            format = name if name in FORMATS else None
            number += 1
            file = write_jsonl(tmp_path / f"in/{number}.jsonl", [row])
            output = tmp_path / f"a/b/{number}.jsonl"
            if "canonical" in wanted:
                (line,) = convert(file, output, settings, format=format)
                assert form(line, output.parent, MARKED) == form(row, file.parent, settings, format)
                # Its rows are canonical already.
                assert convert(output, output.with_name(f"{number}-2.jsonl")) == [line]
            elif wanted["refused"] != "remote":
                with pytest.raises(ValueError):  # noqa: PT011
                    convert(file, output, settings, format=format)
                assert not output.exists()
    assert number == 103


def samples(entries, folder, **settings):
    data = VLDataConfig(
        processor="unused", cache=str(folder / "cache"), special_tokens=["box"], **settings
    )
    (folder / "cache").mkdir(exist_ok=True)
    opened = open_conversations([str(each) for each in entries], data, tiny_processor(), 5)
    return [opened[number] for number in range(len(opened))]


def assert_same(found, wanted):
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.mark.parametrize("name", [*CONTAINERS["same_rows"], "alpaca.csv", "alpaca.tsv"])
def test_golden_files_give_the_same_samples(tmp_path, name):
    shutil.copytree(GOLDEN / "containers", tmp_path / "in")
    convert(tmp_path / "in" / name, tmp_path / "out/rows.jsonl")
    wanted = samples([tmp_path / "in" / name], tmp_path)
    assert_same(samples([tmp_path / "out/rows.jsonl"], tmp_path), wanted)


@pytest.mark.parametrize("name", CONTAINERS["refused"])
def test_golden_files_that_are_refused_leave_nothing(tmp_path, name):
    shutil.copytree(GOLDEN / "containers", tmp_path / "in")
    with pytest.raises((ValueError, RuntimeError)):
        convert(tmp_path / "in" / name, tmp_path / "out/rows.jsonl")
    assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]


@pytest.mark.parametrize(
    ("entries", "options", "strategy"),
    [
        (["talks#4", "short"], [], "concat"),
        (["renamed%50,talks"], ["--format", "alpaca"], "concat"),
        (["talks", "short"], ["--mix-strategy", "all_exhausted"], "interleave_over"),
    ],
)
def test_mixtures_give_the_same_samples(tmp_path, entries, options, strategy):
    shutil.copytree(GOLDEN / "mixtures", tmp_path / "in")
    info, output = str(tmp_path / "in/dataset_info.json"), tmp_path / "out.jsonl"
    arguments = [*entries, str(output), "--dataset-info", info, "--seed", "5", *options]
    assert main(["convert-data", *arguments]) == 0
    wanted = samples(entries, tmp_path, dataset_info=info, mix_strategy=strategy)
    assert_same(samples([output], tmp_path), wanted)


def test_bytes_become_files_named_by_their_content(tmp_path):
    video = b"\0\0\0\x20ftypisom"
    parts = [
        {"type": "image", "image": uri(picture("JPEG"))},
        {"type": "video", "video": uri(video)},
    ]
    frames = {"type": "video", "video": [uri(picture()), uri(picture())]}
    rows = [question([*parts, frames], n=1), question("<image>x", images=[uri(picture())])]
    first, second = convert(write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out/a.jsonl")
    jpg, mp4, both = (part[part["type"]] for part in first["messages"][0]["content"])
    (png,) = {*both}
    assert second["messages"][0]["content"][0] == {"type": "image", "image": png}
    assert [Path(each).suffix for each in (jpg, mp4, png)] == [".jpg", ".mp4", ".png"]
    assert (tmp_path / "out" / png).read_bytes() == picture()
    assert (tmp_path / "out" / mp4).read_bytes() == video
    assert len(list((tmp_path / "out/media").iterdir())) == 3
    (tmp_path / "out" / png).write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="other content than its name says"):
        convert(tmp_path / "in.jsonl", tmp_path / "out/b.jsonl")


def test_bytes_among_extras_are_kept(tmp_path):
    row = {"question": "a", "answer": "b", "raw": b"\xff", "list": [{"x": b"\xff"}]}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (written,) = convert(tmp_path / "a.parquet", tmp_path / "a.jsonl")
    assert written["list"] == [{"x": written["raw"]}]
    assert (tmp_path / written["raw"]).read_bytes() == b"\xff"


def test_paths_lead_to_the_same_files_through_links(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep/er")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/blob").write_bytes(picture())
    (tmp_path / "in/a.png").symlink_to("blob")
    row = question("<image>x<image>", images=["a.png", "https://example.com/b.png"])
    (written,) = convert(write_jsonl(tmp_path / "in/a.jsonl", [row]), tmp_path / "link/a.jsonl")
    path, address = (p["image"] for p in written["messages"][0]["content"] if "image" in p)
    assert path == "../../in/a.png"
    assert os.path.samefile(tmp_path / "link" / path, tmp_path / "in/blob")
    assert address == "https://example.com/b.png"


BAD = [question("<image>x", images=["none.png"]), question(), {"a": 1}, question("x", answer="")]


def test_bad_rows_stop_it_or_are_counted(tmp_path, capsys):
    file, output = write_jsonl(tmp_path / "in.jsonl", BAD), tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(BadSampleError, match=r"in\.jsonl:1: .*none\.png does not exist"):
        convert(file, output, overwrite=True)
    with pytest.raises(ValueError, match="exists: name another file"):
        convert(file, output, on_bad_sample="skip")
    assert output.read_text() == "mine"
    assert main(["convert-data", str(file), str(output), "--skip-bad", "--overwrite"]) == 0
    assert len(read(output)) == 1
    told = capsys.readouterr().out
    assert [kind for kind in ("missing_image", "missing_key", "empty_answer") if kind in told]
    with pytest.raises(ValueError, match="all 2 rows are bad"):
        convert(write_jsonl(file, BAD[2:]), output, on_bad_sample="skip", overwrite=True)
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out.jsonl"]


def test_a_file_that_cannot_be_written_is_no_bad_row(tmp_path):
    (tmp_path / "media").write_text("no folder")
    file = write_jsonl(tmp_path / "in.jsonl", [question("<image>x", image=uri(picture()))])
    with pytest.raises(RuntimeError, match="media.* cannot be written"):
        convert(file, tmp_path / "out.jsonl", on_bad_sample="skip")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--columns", "{"], "--columns is no JSON"), (["--format", "gpt"], "query_response"),
        (["--columns", '{"q": "query", "a": "response"}', "--format", "alpaca"], "alpaca"),
        (["--mix-strategy", "some"], "no mix strategy"), (["--weights", "1,2"], "2 probabilities"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, arguments, named):
    file = write_jsonl(tmp_path / "in.jsonl", [{"q": "a", "a": "b"}])
    output = tmp_path / "out.jsonl"
    assert main(["convert-data", str(file), str(output), *arguments]) == 1
    assert named in capsys.readouterr().err
    right = ["--columns", '{"q": "query", "a": "response"}']
    assert main(["convert-data", str(file), str(output), *right]) == 0
