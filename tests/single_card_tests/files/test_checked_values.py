"""Checked classes and their messages, file names in OSErrors, and tokenizer files.

Nothing is converted, and one error lists all values that do not fit.
"""

import errno
import json
from dataclasses import asdict, field, replace
from typing import Annotated, Literal

import pytest
from pydantic import Field

from paddle_vl.files.stored_settings import (
    Count,
    Listed,
    Number,
    Part,
    checked,
    descriptions,
    read_section,
)
from paddle_vl.files.text_file import naming, shown
from paddle_vl.files.tokenizer_json import read_tokenizer


@checked
class Inner:
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """of things"""
    rate: Annotated[Number, Field(gt=0, le=1)] = 0.5

    def __post_init__(self):
        if self.count == 13:
            raise ValueError("count 13 brings bad luck: choose another")


@checked
class Settings(Inner):
    flag: bool = False
    name: str = "a"
    """of the settings"""
    sizes: Listed[list[Count]] = field(default_factory=list)
    pair: Listed[tuple[Number, Number]] = (1, 2.0)
    grid: list[list[int]] = field(default_factory=list)
    limit: int | None = None
    table: dict[Literal["a", "b"], int] | None = None
    inner: Part[Inner] = field(default_factory=Inner)
    more: dict[str, Part[Inner]] = field(default_factory=dict)


@checked
class Needy:
    needed: int


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"count": 0}, "count is 0; it must be at least 1"),
        ({"count": 1001}, "count is 1001; it must be at most 1000"),
        ({"count": True}, "count is True; it must be a whole number"),
        ({"count": "1"}, "count is '1'"),
        ({"rate": 0}, "rate is 0; it must be above 0"),
        ({"rate": float("nan")}, "rate is nan; it must be a finite number"),
        ({"rate": 10**400}, "rate is 1000"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"name": None}, "name is None; it must be a text"),
        ({"sizes": [1, True]}, r"sizes\[1\] is True; it must be a whole number"),
        ({"sizes": 3}, "sizes is 3; it must be a list"),
        ({"pair": [1.0]}, r"pair\[1\] is missing"),
        ({"grid": [[1], [2, "x"]]}, r"section: grid\[1\]\[1\] is 'x'; it must be a whole number"),
        ({"table": [1]}, r"table is \[1\]; it must be an object"),
        ({"table": {"c": 1}}, "table has 'c'; it must be 'a' or 'b'"),
        ({"table": {"a": "1"}}, "table: a is '1'; it must be a whole number"),
        ({"inner": 3}, "inner is 3; a section with settings is needed"),
        ({"inner": {"count": 13}}, "inner: count 13 brings bad luck: choose another"),
        ({"more": {"x": {"rate": 2}}}, "more: x: rate is 2; it must be at most 1"),
        ({"count": 13}, "^section: count 13 brings bad luck: choose another$"),
        ({"color": 1}, "section: 'color' is unknown, with the value 1"),
        ({"count": 0, "flag": 1}, "section: count is 0; .*; flag is 1"),
    ],
)
def test_values_that_do_not_fit_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        read_section(Settings, values, "section")


@pytest.mark.parametrize(
    ("values", "named"),
    [({}, "^section: needed is missing$"), ([], r"section is \[\]; it must be an object")],
)
def test_a_missing_key_and_what_is_no_section_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        read_section(Needy, values, "section")


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("rate", 1, 1),
        ("limit", 5, 5),
        ("table", {"a": 1}, {"a": 1}),
        ("sizes", (1, 2), [1, 2]),
        ("pair", [1, 2.5], (1, 2.5)),
        ("inner", {"count": 3}, Inner(3)),
        ("inner", None, Inner()),
    ],
)
def test_values_that_fit_are_kept_as_they_are_given(name, value, kept):
    found = getattr(read_section(Settings, {name: value}, "section"), name)
    assert found == kept
    assert type(found) is type(kept)


def test_a_checked_class_is_a_dataclass():
    changed = replace(Settings(), count=2)
    assert changed == Settings(2)
    assert asdict(changed)["inner"] == {"count": 1, "rate": 0.5}
    with pytest.raises(ValueError, match="count is 0"):
        replace(changed, count=0)
    with pytest.raises(AttributeError):
        changed.count = 3
    # Those of a base too.
    found = descriptions(Settings)
    assert (found["count"], found["name"], found["flag"]) == ("of things", "of the settings", None)


def test_long_values_are_shortened():
    assert shown("a" * 500) == "'" + "a" * 76 + "..."
    assert shown(1 << 100_000) == "a int"


def test_os_errors_name_their_file_once():
    with pytest.raises(OSError, match="some/file") as error, naming("some/file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="other") as error, naming("some/file"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "other")
    assert "some/file" not in str(error.value)


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "unk_token": "a"}
WORDS = {"type": "WordLevel", "unk_token": "[UNK]"}


def written(file, model):
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return file


@pytest.mark.parametrize(
    ("model", "text", "ids"),
    [
        (WORDS | {"vocab": {"[UNK]": 0, "a": 1}}, "\u0378", [0]),
        (WORDS | {"vocab": {"[UNK]": 0, "a": 2**24 - 1}}, "a", [2**24 - 1]),
        (BPE | {"dropout": 0.0}, "ab", [2]),
        (BPE | {"dropout": None}, "ab", [2]),
    ],
)
def test_a_tokenizer_encodes_any_text(tmp_path, model, text, ids):
    assert read_tokenizer(written(tmp_path / "tokenizer.json", model)).encode(text).ids == ids


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (WORDS | {"vocab": {"a": 1}}, r"no.* a tokenizer file: .*Missing \[UNK\].*save it again"),
        (WORDS | {"vocab": {"[UNK]": 0, "a": 2**24}}, "the id of 'a' is 16777216; at most 1677721"),
        # The same text would give other tokens each time.
        (BPE | {"dropout": 0.1}, r"has model.dropout 0\.1: .*set it to null"),
    ],
)
def test_a_tokenizer_that_would_fail_or_draw_by_chance_is_refused(tmp_path, model, told):
    with pytest.raises(RuntimeError, match=f"(?s)tokenizer.json.*{told}"):
        read_tokenizer(written(tmp_path / "tokenizer.json", model))
