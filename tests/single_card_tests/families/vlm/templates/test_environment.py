"""The sandbox of chat templates: HF's dialect, and limits that no template passes."""

import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2 import TemplateError

from paddle_vl.families.vlm.templates import environment
from paddle_vl.families.vlm.templates.environment import SandboxedTemplate, TemplateLimitError
from tests.single_card_tests.families.vlm.templates.template_builders import (
    GOLDEN,
    MARKED,
    NOW,
    renderer,
)

VALUES = json.loads((GOLDEN / "environment.json").read_text(encoding="utf-8"))
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
BIG = "{% set big = 'a' * 1000000 %}"
NEST = "{% set n = namespace(x=1) %}{% for i in range(60) %}"
EXPLODING = [
    *VALUES["not_stopped_by_the_sandbox"],
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    BIG + "{{ big.replace('a', big) }}",
    BIG + "{{ big | replace('a', big) }}",
    BIG + "{{ big.join(range(1000) | map('string') | list) }}",
    BIG + "{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    BIG + "{% for i in range(99999) %}{{ big }}{% endfor %}",
    BIG + "{{ big.strip('b' * 1000000 ~ 'a') }}",
    BIG + "{{ big | trim('b' * 1000000 ~ 'a') }}",
    BIG + "{{ big | wordwrap(1) }}",
    "{{ ('www.a.com' ~ '(' * 500000 ~ ')' * 500000) | urlize }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    NEST + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    NEST + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    NEST + "{% set n.x = [1] | batch(9, n.x) | list %}{% endfor %}{{ n.x }}",
    NEST + "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for x in [1] recursive %}{{ loop(range(999)) if loop.depth < 9 }}{% endfor %}",
]


def render(template: str, **variables: object) -> str:
    return SandboxedTemplate(template, NOW).render({"messages": VALUES["messages"], **variables})[0]


@pytest.mark.parametrize("name", VALUES["cases"])
def test_a_small_template_gives_the_text_or_the_error_of_hf(name: str):
    case = VALUES["cases"][name]
    try:
        found = {"text": render(case["template"], **TOKENS)}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    assert found == {key: case[key] for key in found}


@pytest.mark.parametrize("template", EXPLODING)
def test_a_template_that_would_not_end_or_fill_the_memory_is_stopped(template: str, monkeypatch):
    monkeypatch.setattr(environment, "MAX_STEPS", 1 << 16)
    monkeypatch.setattr(environment, "_MAX_NUMBER", 1 << 14)
    with pytest.raises(TemplateLimitError):
        render(template)


def test_slow_operations_that_are_no_steps_meet_the_deadline(monkeypatch):
    monkeypatch.setattr(environment, "MAX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TemplateLimitError, match="seconds"):
        render(
            "{% set r = range(99999) | list %}{% for i in range(99999) %}"
            "{{ 1 if -1 in r }}{% endfor %}"
        )
    assert time.monotonic() - start < 5


def test_a_template_beyond_a_mebibyte_or_nested_too_deep_is_not_compiled():
    for source in ("x" * (environment.MAX_TEMPLATE + 1), "{{ " + "(" * 5000 + "1" + ")" * 5000):
        with pytest.raises(TemplateLimitError):
            SandboxedTemplate(source, NOW)


@pytest.mark.parametrize("number", ["9" * 4301, "0x" + "f" * 4000])
def test_a_number_that_python_does_not_convert_is_refused(number):
    """`sys.int_info.default_max_str_digits` of Python 3.11 is 4300."""
    with pytest.raises(TemplateLimitError, match="a number in it is too long"):
        SandboxedTemplate("{{ " + number + " }}", NOW)


def test_what_is_random_is_refused_and_the_clock_stands():
    for source in ("{{ lipsum() }}", "{{ [1, 2] | random }}"):
        with pytest.raises(TemplateError):
            render(source)
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Jan 2026"


def test_generation_blocks_in_a_macro_are_refused_as_their_place_is_unknown():
    inside = "{% macro f() %}ab{% generation %}c{% endgeneration %}{% endmacro %}xy{{ f() }}"
    with pytest.raises(TemplateError, match="macro"):
        render(inside)


def test_threads_and_processes_render_the_same_spans():
    template = pickle.loads(pickle.dumps(renderer(MARKED)))

    def spans(length: int) -> object:
        messages = [{"role": "assistant", "content": "a" * length}] * 20
        return template.render(messages)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(spans, range(60))) == [spans(length) for length in range(60)]
