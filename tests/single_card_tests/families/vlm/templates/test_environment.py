"""The sandbox of chat templates: HF's dialect, and limits that no template passes."""

import json
import pickle
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
LIMIT = 1000
BIG = "{% set big = 'a' * 900 %}"
NEST = "{% set n = namespace(x=1) %}{% for i in range(12) %}"
# Harmless: each makes a few thousand characters or steps, more than the lowered limits. What is
# measured before it is made prints its length alone.
GROWING = [
    *VALUES["refused_with_lowered_limits"]["templates"],
    "{{ 'a'.center(2000) | length }}",
    "{{ 'a' | center(2000) | length }}",
    "{{ '{:>2000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 2000) }}",
    "{{ '%*d' % (2000, 1) }}",
    BIG + "{{ big.replace('a', big[:9]) | length }}",
    BIG + "{{ big | replace('a', big[:9]) | length }}",
    BIG + "{{ big.join(range(9) | map('string') | list) | length }}",
    BIG + "{% set x %}{% for i in range(9) %}{{ big }}{% endfor %}{% endset %}",
    BIG + "{% for i in range(9) %}{{ big }}{% endfor %}",
    BIG + "{{ big.strip('b' * 900) | length }}",
    BIG + "{{ big | trim('b' * 900) | length }}",
    BIG + "{{ big | wordwrap(1) | length }}",
    "{{ ('www.a.com' ~ '(' * 90 ~ ')' * 90) | urlize | length }}",
    "{{ [1] | batch(2000, 'x') | list | length }}",
    "{{ 1.5 | round(2000, 'ceil') }}",
    "{{ messages | tojson(indent=2000) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(12) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(12) %}{% set n.s = n.s + n.s %}{% endfor %}",
    NEST + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    NEST + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    NEST + "{% set n.x = [1] | batch(3, n.x) | list %}{% endfor %}{{ n.x }}",
    NEST + "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(10) }}",
    "{% for x in [1] recursive %}{{ loop(range(9)) if loop.depth < 5 }}{% endfor %}",
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


@pytest.mark.parametrize("template", GROWING)
def test_a_template_that_exceeds_a_limit_is_stopped(template: str, monkeypatch):
    for name in ("MAX_TEXT", "MAX_STEPS", "_MAX_NUMBER"):
        monkeypatch.setattr(environment, name, LIMIT)
    monkeypatch.setattr(environment, "_MAX_SLOW", LIMIT // 10)
    monkeypatch.setattr(environment, "_MAX_GROWTH", 8 * LIMIT)
    with pytest.raises(TemplateLimitError):
        render(template)


def test_a_rendering_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(environment, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateLimitError, match="seconds"):
        render("{% for i in range(3) %}{% endfor %}")


def test_a_template_beyond_a_mebibyte_or_nested_too_deep_is_not_compiled():
    deep = "(" * 5000 + "1" + ")" * 5000
    # Python compiles no code with so many parentheses, which each of the names gets.
    for source in (
        "x" * (environment.MAX_TEMPLATE + 1),
        f"{{{{ {deep}",
        f"{{{{ x{'.y' * 250} }}}}",
    ):
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
