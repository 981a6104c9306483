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
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Characters of a template, and of any text that it makes.
MAX_TEMPLATE, MAX_TEXT = 1 << 20, 1 << 24
MAX_STEPS, MAX_SECONDS = 1 << 20, 10.0
# Far more than any result that is meant, less than what hurts a machine.
_MAX_GROWTH, _MAX_NUMBER, _MAX_BITS, _MAX_INDENT = 1 << 28, 1 << 20, 128, 64
_CHARACTERS_PER_STEP = 1 << 8

_GROWING_METHODS = frozenset(
    "center expandtabs format format_map join ljust lstrip replace rjust rstrip strip translate "
    "zfill".split()
)
_GROWING_FILTERS = frozenset(
    "batch center format indent join replace round slice sum trim truncate wordwrap".split()
)
# Their time grows with the square of a long word.
_SLOW_FILTERS, _MAX_SLOW = ("urlize", "wordwrap"), 1 << 16
_HUGE_FIELD = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")


class TemplateLimitError(TemplateError):
    """A template that needs more time or memory than a chat can."""


class Rendered(NamedTuple):
    """A text, and start and end of its generation blocks; None if the template has no marks."""

    text: str
    spans: list[tuple[int, int]] | None


class SandboxedTemplate:
    """A template, compiled once; it can be rendered by several threads at a time."""

    def __init__(self, source: str, now: datetime):
        """Compile.

        Args:
            now: what `strftime_now` shows.

        Raises:
            jinja2.TemplateError: broken syntax, or more characters or digits than are compiled.
        """
        if len(source) > MAX_TEMPLATE:
            raise TemplateLimitError(
                f"the template has {len(source)} characters; at most {MAX_TEMPLATE} are compiled"
            )
        self._environment = _Environment(now)
        try:
            self._template = self._environment.from_string(source)
        except (RecursionError, SyntaxError) as error:  # Of Python, whose code a template becomes.
            raise TemplateLimitError("the template is nested too deep to be compiled") from error
        except ValueError as error:  # A number of more than 4300 digits.
            raise TemplateLimitError(f"a number in it is too long: {error}") from error

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
                progress.charge(progress.length)
        except RecursionError as error:
            raise TemplateLimitError("the template calls itself without an end") from error
        text = "".join(chunks)
        if any(text[start:end] != marked for start, end, marked in progress.marks):
            raise TemplateError("a generation block is inside a macro, so its place is unknown")
        spans = [(start, end) for start, end, _ in progress.marks]
        return Rendered(text, spans if self._environment.has_marks else None)


class _Progress(threading.local):
    """What the rendering in this thread has used, and its generation blocks."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        self.steps = self.length = 0
        self.deadline = time.monotonic() + MAX_SECONDS
        self.marks: list[tuple[int, int, str]] = []

    def charge(self, length: int = 0, steps: int = 1) -> None:
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
        progress.marks.append((progress.length, progress.length + len(text), text))
        return text


class _Counting(NodeTransformer):
    """Makes calls of the environment out of what else runs or grows without one."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _call("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        parts = list(node.iter_child_nodes())
        is_target = getattr(node, "ctx", "load") != "load"
        constant = all(isinstance(part, nodes.Const) for part in parts)
        return node if is_target or constant else _call("bounded", node)

    visit_Dict = visit_Tuple = visit_List  # noqa: N815


class _Environment(ImmutableSandboxedEnvironment):
    """HF's dialect, in which everything that may take long is counted."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self, now: datetime):
        self.progress = _Progress()
        self.has_marks = False
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.optimized = False  # Long chains of constants take seconds, which nothing counts.
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
        return _Counting().visit(super()._parse(source, name, filename))

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values; each is a step."""
        for value in values:
            self.progress.charge()
            yield value

    def joined(self, values: Iterable[Any]) -> str:
        """The values as one text."""
        texts = [str(value) for value in values]
        length = sum(map(len, texts))
        self.progress.charge(length, 1 + length // _CHARACTERS_PER_STEP)
        return "".join(texts)

    def bounded(self, value: Any) -> Any:
        """A container whose text is not larger by far than what it was made of."""
        parts, left = 0, [value]
        while left:
            part = left.pop()
            parts += 1
            if parts > _MAX_NUMBER or isinstance(part, Namespace):
                raise TemplateLimitError("the template nests values too often")
            if isinstance(part, Mapping):
                left.extend(part.values())
            elif isinstance(part, list | tuple):
                left.extend(part)
        self.progress.charge(0, 1 + parts // _CHARACTERS_PER_STEP)
        return value

    # Macros and set blocks join their output with this.
    concat = joined  # pyright: ignore[reportAssignmentType]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function of the template; the signature is Jinja's."""
        __self.progress.charge()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes) and name in _GROWING_METHODS:
            args = __self._measured(name, (owner, *args), kwargs)[1:]
        elif isinstance(__obj, LoopContext) and args:
            args = (__self.counted(args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.bounded(result) if isinstance(result, list | tuple | dict) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Measure the result of an operation, then compute it."""
        if isinstance(left, int) and isinstance(right, int):
            bits, factor = left.bit_length(), right if operator == "**" else 1
            if operator in ("*", "**") and bits * factor + right.bit_length() > _MAX_BITS:
                raise TemplateLimitError(f"the template makes a number beyond {_MAX_BITS} bits")
        elif operator == "+":
            length = _size(left) + _size(right)
            self.progress.charge(length, 1 + length // _CHARACTERS_PER_STEP)
        elif hasattr(left, "__len__") or hasattr(right, "__len__"):
            self._measured("format" if operator == "%" else operator, (left, right), {})
        return super().call_binop(context, operator, left, right)

    def _counted_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            head, values = args[:takes_context], args[takes_context:]
            if name in _SLOW_FILTERS and sum(map(_size, values[:1])) > _MAX_SLOW:
                raise TemplateLimitError(f"the template uses {name} on a text that is too long")
            if name in _GROWING_FILTERS:
                values = self._measured(name, values, kwargs)
            self.progress.charge(0, 1 + sum(map(_size, values[:1])) // _CHARACTERS_PER_STEP)
            result = function(*head, *values, **kwargs)
            return self.bounded(result) if isinstance(result, list | tuple | dict) else result

        return counted

    def _measured(self, name: str, values: Iterable[Any], named: Mapping[str, Any]) -> tuple:
        """Operands, whose result may have the product of their sizes; iterators as lists."""
        values = tuple(list(each) if isinstance(each, Iterator) else each for each in values)
        operands = (*values, *named.values())
        size = math.prod(max(1, _weight(each)) for each in operands)
        is_huge = size > _MAX_GROWTH or (
            "format" in name and isinstance(values[0], str) and _HUGE_FIELD.search(values[0])
        )
        if is_huge or any(isinstance(each, int) and abs(each) > _MAX_NUMBER for each in operands):
            raise TemplateLimitError(f"the template uses {name} for a result that is too large")
        self.progress.charge(0, 1 + size // (_CHARACTERS_PER_STEP << 6))
        return values


class _PublicNamespace(Namespace):
    """`namespace()` without names that begin with `_`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(
                "Chat templates cannot store underscore-prefixed attributes on a namespace, but "
                f"got {name!r}. Please rename the attribute."
            )
        if isinstance(value, Namespace):
            raise TemplateLimitError("the template nests namespaces")
        super().__setitem__(name, value)


class _DictMaker:
    """`dict` that can be called, and no class to climb from."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _refuse(message: str, *_: Any, **__: Any) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_INDENT:
        raise TemplateLimitError(f"the template indents JSON by more than {_MAX_INDENT}")
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _call(method: str, argument: nodes.Node) -> nodes.Call:
    """The call of a method of the environment, as a node of the template."""
    line = argument.lineno
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, [argument], [], None, None, lineno=line)


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _weight(value: Any) -> int:
    """A number, or characters or elements of a value; of a container those of its elements."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str | bytes | range) or not hasattr(value, "__len__"):
        return _size(value)
    # Only those of a format are numbers of characters.
    counts = isinstance(value, Mapping | tuple)
    parts = value.values() if isinstance(value, Mapping) else value
    return sum(abs(each) if counts and isinstance(each, int) else _size(each) for each in parts)
