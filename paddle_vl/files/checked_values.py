"""Type and range checks for dataclasses that are read from configuration files.

The dataclass's annotations are the types. Nothing is converted: `true` or `2.0` in place of an
integer is an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from paddle_vl.files.text_file import shown

# Keys of HF's config.json that do not affect a model's numbers, written for any model by HF's base
# configuration class or its tools.
INERT_KEYS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16 use_cache
    """.split()
)


@dataclass(frozen=True)
class Range:
    """A range of allowed numbers.

    Attributes:
        least, most: bounds, both included; None for no bound.
        is_above: `least` itself is excluded.
    """

    least: float | None = None
    most: float | None = None
    is_above: bool = False

    def holds(self, value: float) -> bool:
        if self.least is not None and (
            value <= self.least if self.is_above else value < self.least
        ):
            return False
        return self.most is None or value <= self.most

    @property
    def words(self) -> str:
        """For instance ` of at least 1 and at most 1024`."""
        parts = []
        if self.least is not None:
            parts.append(f"{'above' if self.is_above else 'of at least'} {_plain(self.least)}")
        if self.most is not None:
            parts.append(f"at most {_plain(self.most)}")
        return " " + " and ".join(parts) if parts else ""


def check_values(config: Any, where: str, ranges: Mapping[str, Range] | None = None) -> None:
    """Check the values of a dataclass against its annotations and against ranges.

    Args:
        where: section of the file, for the message; empty for none.
        ranges: by field name, for numbers and for the numbers in a list.

    Raises:
        ValueError: values do not fit; the message has each of them and what it must be.
    """
    ranges, prefix = ranges or {}, f"{where}: " if where else ""
    problems = []
    for name, hint in _hints(type(config)).items():
        needed = _needed(getattr(config, name), hint, ranges.get(name, Range()))
        if needed is not None:
            problems.append(f"{name} is {shown(getattr(config, name))}; it must be {needed}")
    if problems:
        raise ValueError(prefix + "; ".join(problems))


def check_mapping(values: Any, where: str) -> dict[str, Any]:
    """A section of a file as a new dictionary, empty for null.

    Raises:
        ValueError: it is not a mapping with string keys.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{where} is {shown(values)}; a section with settings is needed")
    return dict(values)


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _needed(value: Any, hint: Any, numbers: Range) -> str | None:
    """What the value must be, for the message; None if it is right."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if value is None and NoneType in get_args(hint):
            return None
        found = [needed for kind in kinds if (needed := _needed(value, kind, numbers)) is not None]
        return None if len(found) < len(kinds) else " or ".join(dict.fromkeys(found))
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        is_right = type(value) is int and numbers.holds(value)
        return None if is_right else f"a whole number{numbers.words}"
    if hint is float:
        is_right = type(value) in (int, float) and _is_finite(value) and numbers.holds(value)
        return None if is_right else f"a finite number{numbers.words}"
    if hint is str:
        return None if isinstance(value, str) else "a text"
    if get_origin(hint) in (list, tuple):
        return _needed_list(value, get_args(hint), numbers)
    if get_origin(hint) is dict:
        return None if isinstance(value, Mapping) else "an object"
    return None


def _needed_list(value: Any, kinds: tuple[Any, ...], numbers: Range) -> str | None:
    kind = kinds[0]
    count = len(kinds) if len(kinds) > 1 and Ellipsis not in kinds else None
    is_list = isinstance(value, list | tuple) and count in (None, len(value))
    inner = [_needed(item, kind, numbers) for item in value] if is_list else []
    if is_list and not any(inner):
        return None
    of = {int: "whole numbers", float: "finite numbers", str: "texts"}.get(kind, "values")
    return f"a list of {'' if count is None else f'{count} '}{of}{numbers.words}"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer beyond the range of float.
        return False


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
