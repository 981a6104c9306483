"""The sandbox that chat templates run in: HF's Jinja dialect, with bounds on time and memory.

A checkpoint's template is untrusted code, and Jinja's sandbox only hides Python from it. Here every
pass of a loop, call, filter and piece of text is counted against a budget of the rendering, and an
operation whose result may be much larger than its operands is measured before it runs. All of this
happens inside the interpreter of the template, so that it holds in any thread or process, without
a process for each rendering; what no count can see is bounded by a deadline between two steps.

Source: the environment of `apply_chat_template` of HF transformers 5.23. Differs: the limits;
`strftime_now` shows one moment for a whole run; `lipsum` and the filter `random` are refused.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Characters of a template, and of any text that it makes.
MAX_TEMPLATE = 1 << 20
MAX_TEXT = 1 << 24
MAX_STEPS = 1 << 20
MAX_SECONDS = 10.0
# Larger than any result that is meant, smaller than what hurts a machine.
_MAX_GROWTH = 1 << 28
_MAX_NUMBER = 1 << 20
_MAX_BITS = 128
_MAX_INDENT = 64
_CHARACTERS_PER_STEP = 1 << 8

_GROWING_METHODS = frozenset(
    "center expandtabs format format_map join ljust replace rjust translate zfill".split()
)
_GROWING_FILTERS = frozenset(
    "batch center format indent join replace round slice sum truncate wordwrap".split()
)
_HUGE_FIELD = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")


class TemplateLimitError(TemplateError):
    """A template that needs more time or memory than a chat can."""


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: the text.
        spans: start and end character of every generation block; None if there is no such mark in
            the template.
    """

    text: str
    spans: list[tuple[int, int]] | None


class SandboxedTemplate:
    """A template, compiled once; it can be rendered by several threads at a time."""

    def __init__(self, source: str, now: datetime):
        """Compile.

        Args:
            now: what `strftime_now` shows.

        Raises:
            jinja2.TemplateError: broken syntax, or more than `MAX_TEMPLATE` characters.
        """
        if len(source) > MAX_TEMPLATE:
            raise TemplateLimitError(
                f"the template has {len(source)} characters; at most {MAX_TEMPLATE} are compiled"
            )
        self._environment = _Environment(now)
        try:
            self._template = self._environment.from_string(source)
        except RecursionError as error:
            raise TemplateLimitError("the template is nested too deep to be compiled") from error

    def render(self, variables: Mapping[str, Any]) -> Rendered:
        """Render with these variables, plain JSON values.

        Raises:
            TemplateLimitError: the rendering exceeds a limit.
            Exception: whatever the template's own code raises.
        """
        progress = self._environment.progress
        progress.start()
        chunks = []
        try:
            for chunk in self._template.generate(variables):
                chunks.append(chunk)
                progress.length += len(chunk)
                progress.charge(1, progress.length)
        except RecursionError as error:
            raise TemplateLimitError("the template calls itself without an end") from error
        text, spans = "".join(chunks), progress.spans
        for start, end, marked in spans:
            if text[start:end] != marked:
                raise TemplateError("a generation block is inside a macro, so its place is unknown")
        has_marks = self._environment.has_marks
        return Rendered(text, [(start, end) for start, end, _ in spans] if has_marks else None)


class _Progress(threading.local):
    """What the rendering in this thread has used, and its generation blocks."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps = self.length = 0
        self.deadline = time.monotonic() + MAX_SECONDS
        self.spans: list[tuple[int, int, str]] = []

    def charge(self, steps: int, length: int = 0) -> None:
        """Count steps, and check the length of a text before it is made."""
        self.steps += steps
        if length > MAX_TEXT:
            raise TemplateLimitError(f"the template makes a text beyond {MAX_TEXT} characters")
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"the template needs more than {MAX_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the template runs longer than {MAX_SECONDS:.0f} seconds")


class _GenerationTag(Extension):
    """`{% generation %}`: the text in it is the model's."""

    tags = {"generation"}  # noqa: RUF012
    environment: "_Environment"

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        progress = self.environment.progress
        progress.spans.append((progress.length, progress.length + len(text), text))
        return text


class _Environment(ImmutableSandboxedEnvironment):
    """HF's dialect; loops and `~` are rewritten so that they are counted as calls are."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self, now: datetime):
        self.progress = _Progress()
        self.has_marks = False
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = self._counted_filter(name, function)
        self.globals.update(
            dict=_DictMaker(),
            namespace=_PublicNamespace,
            lipsum=functools.partial(_refuse, "lipsum is random: the text would change each time"),
            raise_exception=_refuse,
            strftime_now=now.strftime,
        )
        self.filters["random"] = lambda *_: _refuse("the filter random changes the text each time")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _call("counted", loop.iter)
        # Innermost first: what replaces a node holds it no more.
        for concat in reversed(list(tree.find_all(nodes.Concat))):
            values = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [_call("joined", values)]
        return tree

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values; each is a step."""
        for value in values:
            self.progress.charge(1)
            yield value

    def joined(self, values: Iterable[Any]) -> str:
        """The values as one text."""
        texts = [str(value) for value in values]
        length = sum(map(len, texts))
        self.progress.charge(1 + length // _CHARACTERS_PER_STEP, length)
        return "".join(texts)

    # Macros and set blocks join their output with this.
    concat = joined  # pyright: ignore[reportAssignmentType]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function of the template; the signature is Jinja's."""
        __self.progress.charge(1)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes) and name in _GROWING_METHODS:
            args = tuple(map(_as_list, args))
            __self._check_growth(name, (owner, *args, *kwargs.values()))
        elif isinstance(__obj, jinja2.runtime.LoopContext) and args:
            args = (__self.counted(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Measure the result of an operation, then compute it."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "+" and not numbers:
            length = _weight(left, flat=True) + _weight(right, flat=True)
            self.progress.charge(1 + length // _CHARACTERS_PER_STEP, length)
        elif operator == "%" and isinstance(left, str):
            self._check_growth("format", (left, right))
        elif numbers and operator in ("*", "**"):
            bits, more = left.bit_length(), right.bit_length()
            if (bits + more if operator == "*" else bits * right) > _MAX_BITS:
                raise TemplateLimitError(f"the template makes a number beyond {_MAX_BITS} bits")
        elif operator == "*":
            length = _weight(left, flat=True) * _weight(right, flat=True)
            self.progress.charge(1, 0 if float in (type(left), type(right)) else length)
        return super().call_binop(context, operator, left, right)

    def _counted_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            head, values = args[:takes_context], args[takes_context:]
            if name in _GROWING_FILTERS:
                values = tuple(map(_as_list, values))
                self._check_growth(name, (*values, *kwargs.values()))
            length = len(values[0]) if values and hasattr(values[0], "__len__") else 0
            self.progress.charge(1 + length // _CHARACTERS_PER_STEP)
            return function(*head, *values, **kwargs)

        return counted

    def _check_growth(self, name: str, values: tuple[Any, ...]) -> None:
        """Refuse operands whose result may be huge: at most the product of their sizes."""
        size = 1
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise TemplateLimitError(f"the template calls {name} with the number {value:.3e}")
            size *= max(1, _weight(value))
        if size > _MAX_GROWTH:
            raise TemplateLimitError(f"the template calls {name} with operands that are too large")
        if "format" in name and isinstance(values[0], str) and _HUGE_FIELD.search(values[0]):
            raise TemplateLimitError("the template formats a value with a huge or a variable width")
        self.progress.charge(1 + size // (_CHARACTERS_PER_STEP << 6))


class _PublicNamespace(Namespace):
    """`namespace()` without names that begin with `_`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _check_public(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _DictMaker:
    """`dict` that can be called, and no class to climb from."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got "
            f"{name!r}. Please rename the attribute."
        )


def _refuse(message: str, *_: Any, **__: Any) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_INDENT:
        raise TemplateLimitError(f"the template indents JSON by more than {_MAX_INDENT}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _call(method: str, argument: nodes.Node) -> nodes.Call:
    """The call of a method of the environment, as a node of the template."""
    line = argument.lineno
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, [argument], [], None, None, lineno=line)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _weight(value: Any, flat: bool = False) -> int:
    """Characters or elements of a value; of a container those of its elements, unless `flat`."""
    if isinstance(value, int):
        return abs(value)
    if flat or isinstance(value, str | bytes | range) or not hasattr(value, "__len__"):
        return len(value) if hasattr(value, "__len__") else 1
    parts = value.values() if isinstance(value, Mapping) else value
    numbers = isinstance(value, Mapping | tuple)
    return sum(
        1 if isinstance(part, int) and not numbers else max(1, _weight(part, flat=True))
        for part in parts
    )
