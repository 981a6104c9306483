"""The fuzzer, and its results for every parser.

Guarantees: for any bytes a parser gives a result or a refusal, within its time, memory and folder;
the fuzzer detects each kind of fault, shows its smallest input, and repeats its results with the
same seed.
"""

import pytest

from fuzzing import campaign
from fuzzing.campaign import Limits, Tally, described, fuzz, run_all
from fuzzing.parser import PARSERS, SHARES
from tests.single_card_tests.tools.planted_faults import LARGEST

PLANTED = "tests.single_card_tests.tools.planted_faults:"
# More inputs than the planted parsers need.
EVERY_NUMBER = 250


def all_escapes(tally: Tally) -> str:
    return "\n".join(map(described, tally.escapes.values()))


@pytest.mark.parametrize("name", PARSERS)
def test_parser_gives_a_result_or_a_refusal(name):
    # At least one that is accepted and one that is refused; the long mode has more.
    tally = fuzz(name, Limits(inputs=60 if name in SHARES else 20))
    assert tally.is_whole
    assert not tally.escapes, all_escapes(tally)
    assert tally.accepted
    assert tally.refused


@pytest.mark.heavy
@pytest.mark.parametrize("name", PARSERS)
def test_parser_gives_a_result_or_a_refusal_in_the_long_mode(name):
    tally = fuzz(name, Limits(inputs=500, seed=1))
    assert tally.is_whole
    assert not tally.escapes, all_escapes(tally)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("rare_key_error", "KeyError at "),
        ("sleeping", "slow: over 0.2 s"),
        ("allocating", "memory: over 32 MiB"),
        ("dying", "died with code -6"),
        ("wandering", "outside "),
        ("foreign", "(raised outside of the package)"),
        ("nameless", "(does not name its file)"),
        ("templating", "AssertionError at "),
        ("resolving", "outside socket.getaddrinfo"),
    ],
)
def test_planted_fault_is_reported(fault, what):
    # A busy machine may delay any input.
    seconds = 0.2 if fault == "sleeping" else 5
    tally = fuzz(PLANTED + fault, Limits(EVERY_NUMBER, seconds=seconds, mebibytes=32))
    assert len(tally.escapes) == 1, all_escapes(tally)
    assert what in next(iter(tally.escapes))


def test_time_that_a_busy_machine_gives_to_others_is_no_fault_of_an_input():
    tally = fuzz(PLANTED + "crowded", Limits(EVERY_NUMBER, seconds=0.6))
    assert not tally.escapes, all_escapes(tally)
    assert tally.slowest > 0.39


def test_smallest_input_of_a_fault_is_shown():
    tally = fuzz(PLANTED + "rare_key_error", Limits(EVERY_NUMBER))
    (escape,) = tally.escapes.values()
    assert escape.files == {"number.json": b"12"}
    assert escape.count == 2
    assert "KeyError: 12" in escape.details


def test_hanging_parser_is_ended_and_the_other_inputs_are_tried(monkeypatch):
    monkeypatch.setattr(campaign, "_GRACE_SECONDS", 0.2)
    tally = fuzz(PLANTED + "hanging", Limits(EVERY_NUMBER, seconds=1))
    (escape,) = tally.escapes.values()
    assert (escape.what, escape.files) == ("slow: over 1 s", {"number.json": b"1"})
    assert tally.is_whole
    assert (tally.inputs, tally.accepted) == (LARGEST + 1, LARGEST)


def test_sound_parser_has_no_escapes_and_ends_well(capsys):
    assert run_all([PLANTED + "sound"], Limits(inputs=50)) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:4] == ["50", "100%", "0%"]


def test_escapes_give_exit_code_1_and_are_saved(tmp_path, capsys):
    assert run_all([PLANTED + "foreign"], Limits(inputs=200), tmp_path / "found") == 1
    (file,) = tmp_path.glob("found/*/number.json")
    assert int(file.read_text()) > 180
    assert "cannot reshape array" in capsys.readouterr().out


def test_same_seed_tries_the_same_inputs():
    first, again, other = (
        fuzz("generation_config", Limits(inputs=80, seed=seed)) for seed in (3, 3, 4)
    )
    assert (first.accepted, first.refused) == (again.accepted, again.refused)
    assert (first.accepted, first.refused) != (other.accepted, other.refused)


def test_parser_that_refuses_its_valid_files_is_no_success():
    with pytest.raises(RuntimeError, match="valid files are not accepted"):
        fuzz(PLANTED + "refusing_all", Limits(inputs=10))
