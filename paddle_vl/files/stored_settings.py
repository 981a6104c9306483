"""Classes whose values pydantic checks, and its errors in this package's words.

Configuration files, states and manifests are `@checked` dataclasses; a run's settings are
pydantic models, see `paddle_vl.config.section`. Nothing is converted: `true` or `2.0` in place of
an integer is an error.
"""

import ast
import dataclasses
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, GetPydanticSchema, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, ErrorDetails, core_schema
from typing_extensions import dataclass_transform

from paddle_vl.files.text_file import read_json_object, shown, write_text

T = TypeVar("T")
F = TypeVar("F", bound="SavedConfig")
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
# Entries of a config.json that tell how weights were quantized: HF's, an older one of
# compressed-tensors, and MLX's.
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
UNQUANTIZED = (
    "quantized weights are neither trained nor run here: load the model that they were made from, "
    "on the hub mostly the name without its last part, such as -FP8, -AWQ, -GPTQ-Int4 or -bnb-4bit"
)

# pydantic's words, the longer ones first.
_WORDS = {
    "Input should": "it must",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid string": "a text",
    "a valid number": "a number",
    "a valid dictionary": "an object",
    "a valid tuple": "a list",
    "a valid list": "a list",
}


def _as_given(value: Any, check: Callable[[Any], float]) -> Any:
    check(value)
    return value


def _part_schema(kind: Any, handler: Callable[[Any], Any]) -> core_schema.CoreSchema:
    def read(value: Any) -> Any:
        value = {} if value is None else value
        if not isinstance(value, Mapping | kind):
            raise ValueError("a section with settings is needed")
        return kind(**value) if isinstance(value, Mapping) else value

    return core_schema.no_info_before_validator_function(read, handler(kind))


# A finite number; an integer stays one, so that a file is written as it was read.
Number = Annotated[float, WrapValidator(_as_given)]
# Of things, such as samples or tokens; exact as a float too.
Count = Annotated[int, Field(ge=0, le=1 << 53)]
# A list or tuple, given as either.
Listed = Annotated[T, Field(strict=False)]
# A checked dataclass, given as one or as its object in a file; null for all defaults.
Part = Annotated[T, GetPydanticSchema(_part_schema)]


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, Field))
def checked(cls: type[T]) -> type[T]:
    """Decorator: a frozen dataclass whose values fit its annotations.

    The docstring below a field is its description. `__post_init__` checks the fields together; its
    ValueError says what is wrong and what to do.

    Raises:
        ValueError: (the constructor) fields are unknown, missing or do not fit; names each.
    """
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    made: Any = dataclass(cls, frozen=True, config=config)
    check = made.__init__

    @wraps(check)
    def init(self: Any, *args: Any, **values: Any) -> None:
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise ValueError(explained(error)) from None

    # Those of pydantic's constructor name types that exist for type checkers only.
    init.__annotations__ = {}
    del init.__wrapped__
    made.__init__ = init
    return made


class SavedConfig(ABC):
    """Base of configurations that are a JSON file of a model folder.

    Attributes:
        file_name: of the file.
        what: the file holds, for messages.
    """

    file_name: ClassVar[str]
    what: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_dict(cls: type[F], values: dict[str, Any]) -> F:
        """From the content of the file.

        Raises:
            ValueError: values do not fit.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""

    @classmethod
    def from_pretrained(cls: type[F], path: str | Path) -> F:
        """Read the file of a model folder, or a JSON file.

        Raises:
            RuntimeError: the file cannot be read, or is damaged.
            ValueError: its values do not fit, or it is another model's; names the file.
        """
        file, values = cls.read_file(Path(path))
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def read_file(cls, path: Path) -> tuple[Path, dict[str, Any]]:
        """The file of a folder, or the file itself, and its content."""
        file = path / cls.file_name if path.is_dir() else path
        return file, read_json_object(file, cls.what)

    def save_pretrained(self, path: str | Path, **more: Any) -> None:
        """Write the file, with further entries, into a folder."""
        text = json.dumps({**self.to_dict(), **more}, indent=2) + "\n"
        write_text(Path(path) / self.file_name, text)


def read_section(cls: type[T], values: Any, where: str) -> T:
    """A checked dataclass from a section of a file, whose keys are its fields.

    Raises:
        ValueError: keys are missing or unknown, or values do not fit; names each.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {shown(values)}; it must be an object")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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


def known_values(
    cls: Any, values: Mapping[str, Any], inert: frozenset[str], whose: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a file that are fields of a dataclass, and those without effect.

    Args:
        inert: keys without effect, beside those of a field.
        whose: who does not know a key, for the message: "this model".

    Raises:
        ValueError: there are other keys, names them; or the model's weights are quantized.
    """
    for name in _QUANTIZATION:
        if how := values.get(name):
            how = (isinstance(how, Mapping) and how.get("quant_method")) or how
            raise ValueError(f"{whose}: {name} is {shown(how)}; {UNQUANTIZED}")
    names, inert = {field.name for field in dataclasses.fields(cls)}, inert | {*_QUANTIZATION}
    if unknown := sorted(values.keys() - names - inert):
        raise ValueError(f"{whose} does not know the keys {unknown}: correct or remove them")
    known = {name: value for name, value in values.items() if name in names}
    return known, {name: value for name, value in values.items() if name not in names}


def descriptions(cls: Any) -> dict[str, str | None]:
    """The docstrings below the fields of a checked dataclass or a section of settings, and of its
    bases. pydantic's own reading of them would be half of a command's start."""
    described: dict[str, str | None] = {}
    for base in reversed(cls.__mro__):
        if (fields := base.__dict__.get("__pydantic_fields__")) is not None:
            described |= {
                name: each.description or described.get(name) for name, each in fields.items()
            }
            described |= _docstrings(base.__module__).get(base.__name__, {})
    return described


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of each class of a module."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if not isinstance(node, ast.ClassDef):
            continue
        for pair in pairwise(node.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found.setdefault(node.name, {})[name] = " ".join(text.split())
    return found


def explained(error: ValidationError) -> str:
    """Everything that an error found: each value with its name, and what it must be."""
    return "; ".join(_problem(item) for item in error.errors(include_url=False))


def needed(item: ErrorDetails) -> str:
    """What a value must be, as "it must be a whole number"."""
    text = item["msg"].removeprefix("Value error, ")
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def _problem(item: ErrorDetails) -> str:
    keys = [key for key in item["loc"] if key != "[key]"]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    outer, _, name = path.lstrip(".").rpartition(".")
    place = f"{outer}: " if outer else ""
    if "[key]" in item["loc"]:
        return f"{outer} has {shown(item['input'])}; {needed(item)}"
    if item["type"] == "missing":
        return f"{place}{name} is missing"
    if item["type"] == "unexpected_keyword_argument":
        return f"{place}{name!r} is unknown, with the value {shown(item['input'])}"
    if item["type"] == "value_error" and isinstance(item["input"], Mapping | ArgsKwargs):
        # Of several fields together, or of the fields of a part.
        return f"{place}{f'{name}: ' if name else ''}{needed(item)}"
    return f"{place}{name} is {shown(item['input'])}; {needed(item)}"
