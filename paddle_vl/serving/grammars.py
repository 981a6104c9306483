"""Answers that keep a grammar: JSON, a schema, a regular expression, calls of tools; by llguidance.

A grammar gives the tokens that may follow an answer so far. An opened reasoning is left free, and
the grammar holds behind it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from paddle_vl.data.formats.tool_schemas import SCHEMAS_BY_NAME, VALUES
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer
from paddle_vl.serving.answer_parts import CALL, CALL_END, THINK_END

# Models that are held to JSON may write space without end.
_SPACE = {"whitespace_pattern": r"[ \n\r\t]{1,20}"}
# Formats of texts that llguidance 1.9 holds answers to; others it refuses.
_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
# Tokens among which the end of the reasoning is looked for.
_LAST = 16


class Grammars:
    """Grammars for one tokenizer, in llguidance's Lark.

    Args:
        vocab: V of the model, at least that of the tokenizer.
        end_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab: int, end_ids: Sequence[int]):
        self._tokenizer, self._vocab, self._end_ids = tokenizer, vocab, [*end_ids]
        self._lock = Lock()

    @cached_property
    def _guide(self) -> Any:
        from llguidance import LLTokenizer

        text = self._tokenizer.to_json()
        return LLTokenizer(text, n_vocab=self._vocab, eos_token=self._end_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        with self._lock:
            return self._guide.decode_bytes([token_id])

    def compiled(self, rules: str, after_reasoning: bool) -> "Constraint":
        """The constraint of rules from `root` on.

        Raises:
            ValueError: the rules are broken, or too much.
        """
        from llguidance import LLMatcher, LLParserLimits

        start = r"NL? root" + "\n" + r"NL: /\n{1,2}/" if after_reasoning else "root"
        with self._lock:
            guide = self._guide
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(guide, f"start: {start}\n{rules}", log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:500])
        return Constraint(matcher, self._vocab, self._tokenizer if after_reasoning else None)

    def calls(self, tools: Mapping[str, Any], several: bool) -> str:
        """The rules of calls of tools, at least one, as JSON under every template.

        Args:
            tools: the schemas of the arguments by name.
            several: whether more calls may follow.
        """
        begin, end = self._mark(CALL), self._mark(CALL_END)
        more = ' ("\\n" call)*' if several else ""
        rules = [f"root: call{more}", f'call: {begin} "\\n" body "\\n" {end}']
        rules.append("body: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
        for i, (name, schema) in enumerate(tools.items()):
            head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules += [f'tool_{i}: {head} arguments_{i} "}}"']
            rules += [json_rule({"type": "object", **(schema or {})}, f"arguments_{i}")]
        return "\n".join(rules)

    def _mark(self, text: str) -> str:
        """A mark in Lark: a text, or the token that it is in this tokenizer."""
        token_id = self._tokenizer.backend.token_to_id(text)
        return json.dumps(text) if token_id is None else text


def json_rule(schema: Any, name: str = "root") -> str:
    """The rule of JSON values of a schema; its own `x-guidance` says how they are written."""
    if isinstance(schema, Mapping):
        own = schema.get("x-guidance")
        if own is None or (
            isinstance(own, Mapping) and own.get("whitespace_flexible") is not False
        ):
            own = {**_SPACE, **(own or {})}
        schema = {**_saying(schema), "x-guidance": own}
    return f"{name}: %json {json.dumps(schema)}"


def _saying(schema: Any) -> Any:
    """A schema without what says nothing in JSON Schema and llguidance refuses: formats that are
    not known, and that names of properties are texts, as zod writes it."""
    if isinstance(schema, list):
        return [*map(_saying, schema)]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, each in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(each, Mapping):
            found[key] = {name: _saying(one) for name, one in each.items()}
        elif key in VALUES:
            found[key] = each
        elif key == "format" and isinstance(each, str) and each not in _FORMATS:
            continue
        elif key != "propertyNames" or each != {"type": "string"}:
            found[key] = _saying(each)
    return found


def choice_rule(texts: Sequence[str]) -> str:
    """The rule of one of some texts."""
    return "root: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def regex_rule(pattern: str) -> str:
    """The rule of a regular expression."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", pattern)
    return f"root: /{escaped}/"


class Constraint:
    """The tokens that may follow one answer; called with all its ids before each further one.

    Args:
        reasoning: the tokenizer, if the answer begins with reasoning.
    """

    def __init__(self, matcher: Any, vocab: int, reasoning: TextTokenizer | None):
        self._matcher, self._vocab, self._reasoning = matcher, vocab, reasoning
        self._num_read = 0

    def copy(self) -> "Constraint":
        """For another answer; only before the first call."""
        return Constraint(self._matcher.deep_copy(), self._vocab, self._reasoning)

    def __call__(self, ids: list[int]) -> np.ndarray | None:
        """Bool `[V]`; None for all."""
        if self._reasoning is not None:
            self._num_read = len(ids)
            if THINK_END not in self._reasoning.decode(ids[-_LAST:], skip_special_tokens=False):
                return None
            self._reasoning = None
        for token_id in ids[self._num_read :]:
            self._matcher.consume_token(token_id)
        self._num_read = len(ids)
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar cannot go on: {self._matcher.get_error()[:200]}")
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(mask, count=self._vocab, bitorder="little").astype(bool)
