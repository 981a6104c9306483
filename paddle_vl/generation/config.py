"""HF's generation settings, and the file `generation_config.json`."""

import difflib
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from paddle_vl.files.names import Foreign, without_foreign
from paddle_vl.files.stored_settings import Number, SavedConfig, checked

FILE_NAME = "generation_config.json"
# Keys of HF's files that do not change the generated tokens. `max_length` includes the prompt;
# here `max_new_tokens` is the limit.
_INERT_KEYS = frozenset(
    """
    _from_model_config assistant_confidence_threshold assistant_early_exit
    assistant_ensemble_weight assistant_lookbehind bos_token_id cache_config cache_implementation
    compile_config continuous_batching_config decoder_start_token_id disable_compile early_stopping
    is_assistant length_penalty low_memory max_cache_len max_length max_matching_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
    output_logits output_scores remove_invalid_values renormalize_logits
    return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache
    use_mtp
    """.split()
)
_LEAVE_OUT = "it is not supported; leave it out"
_UNSUPPORTED = """
    bad_words_ids begin_suppress_tokens constraints dola_layers exponential_decay_length_penalty
    force_words_ids forced_bos_token_id forced_eos_token_id max_time min_p penalty_alpha
    prompt_lookup_num_tokens sequence_bias suppress_tokens token_healing top_h watermarking_config
    """.split()
_OFF_AT_0 = (
    "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff no_repeat_ngram_size"
).split()
_OFF_AT_1 = "encoder_repetition_penalty guidance_scale num_beam_groups num_beams typical_p".split()
_ON_LOGITS = Foreign("on_logits= is called with the logits of every step")
_STOPS = Foreign("name end tokens as eos_token_id, or leave the loop over model.stream()")
# Settings of HF's files and arguments of its `generate` that are not here.
_FOREIGN = {
    **dict.fromkeys((*_INERT_KEYS, *_UNSUPPORTED), Foreign(_LEAVE_OUT)),
    **dict.fromkeys(_OFF_AT_0, Foreign(_LEAVE_OUT, (None, 0))),
    **dict.fromkeys(_OFF_AT_1, Foreign(_LEAVE_OUT, (None, 1))),
    "assistant_model": Foreign("one model generates; leave it out"),
    "inputs": Foreign("give input_ids"),
    "logits_processor": Foreign("the rules are settings such as repetition_penalty; leave it out"),
    "max_length": Foreign("it counts the prompt too: give max_new_tokens"),
    "min_length": Foreign("it counts the prompt too: give min_new_tokens", (None, 0)),
    "num_return_sequences": Foreign(
        "repeat the prompt in the batch; every row draws for itself", (None, 1)
    ),
    "output_attentions": Foreign("attention keeps no weights in any kernel; leave it out"),
    "output_hidden_states": Foreign(
        "call the model on the whole sequence, with hooks on its layers"
    ),
    "output_logits": _ON_LOGITS,
    "output_scores": _ON_LOGITS,
    "past_key_values": Foreign("keys and values live as long as one call: give the whole prompt"),
    "return_dict_in_generate": Foreign(
        "the new tokens are returned, and on_logits= gets the logits"
    ),
    "stop_strings": _STOPS,
    "stopping_criteria": _STOPS,
    "streamer": Foreign("generate() takes it; a stream is iterated over"),
    "use_cache": Foreign(_LEAVE_OUT, (None, False, True)),
}
# What None means in a call, as in HF: the rule is off.
_OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
_LARGEST_INT64, _LARGEST_FLOAT32 = 2**63 - 1, 3.4e38


def _token_ids(value: Any) -> Any:
    ids = value if isinstance(value, list | tuple) else () if value is None else [value]
    if not all(type(each) is int and 0 <= each <= _LARGEST_INT64 for each in ids):
        raise ValueError("it must be a token id of at least 0, or a list of them")
    return tuple(value) if isinstance(value, list) else value


@checked
class GenerationConfig(SavedConfig):
    """Settings of generation, with HF's names and, except for the length, HF's defaults.

    Raises:
        ValueError: a value is out of range or has the wrong type.
    """

    # Far beyond every model's positions; a cache for more would exhaust the memory.
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 22)] = 128
    """maximum of appended tokens"""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """no end token is chosen before this many tokens"""
    do_sample: bool = False
    """sample; False takes the most likely token, without temperature, top_k and top_p"""
    temperature: Annotated[Number, Field(ge=-_LARGEST_FLOAT32, le=_LARGEST_FLOAT32)] = 1.0
    """divides the scores"""
    top_k: Annotated[int, Field(ge=0, le=_LARGEST_INT64)] = 50
    """sample among the k most likely tokens; 0 among all"""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """sample among the most likely tokens that together have this probability; 1 among all"""
    repetition_penalty: Annotated[Number, Field(gt=0, le=_LARGEST_FLOAT32)] = 1.0
    """divides positive and multiplies negative scores of tokens that occur in the prompt or the
    answer; 1 has no effect"""
    eos_token_id: Annotated[
        int | tuple[int, ...] | list[int] | None, PlainValidator(_token_ids)
    ] = None
    """end token or tokens; None for an end by length only"""
    pad_token_id: Annotated[int, Field(ge=0, le=_LARGEST_INT64)] | None = None
    """fills answers that have ended; None for the first end token"""
    seed: Annotated[int, Field(ge=0, le=_LARGEST_INT64)] | None = None
    """seed of sampling; None for a different one each time"""
    prefill_chunk_size: Annotated[int, Field(ge=1, le=_LARGEST_INT64)] | None = None
    """columns of the prompts that run at once, which bounds the memory of long prompts; None for
    all of them"""

    file_name: ClassVar[str] = FILE_NAME
    what: ClassVar[str] = "generation settings"

    def __post_init__(self):
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens "
                f"{self.max_new_tokens}: lower the first or raise the second"
            )
        if self.do_sample and self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}; sampling needs one above 0: set do_sample to "
                "false to always get the most likely token"
            )

    @property
    def eos_token_ids(self) -> list[int]:
        """The end tokens as a list."""
        ids = self.eos_token_id
        if ids is None:
            return []
        return list(ids) if isinstance(ids, tuple | list) else [ids]

    @property
    def fill_token_id(self) -> int | None:
        """The token that fills answers that have ended; None without end tokens."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return next(iter(self.eos_token_ids), None)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GenerationConfig":
        """Build from the content of HF's file; null is the default.

        Raises:
            ValueError: an unsupported way of generation (as beam search), or an unknown key.
        """
        given = {name: v for name, v in values.items() if v is not None and name not in _INERT_KEYS}
        return cls().updated(**given)

    def to_dict(self) -> dict[str, Any]:
        """The content of HF's file: settings that differ from the defaults."""
        defaults = asdict(GenerationConfig())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def updated(self, **settings: Any) -> "GenerationConfig":
        """A copy with some settings replaced; None turns a rule off.

        Settings of HF that are not here are accepted where they ask for nothing, as `num_beams=1`.

        Raises:
            ValueError: an unknown or unsupported setting, or a bad value.
        """
        names = [each.name for each in fields(self)]
        given = without_foreign(settings, _FOREIGN, "generation")
        for name in [name for name in given if name not in names]:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"{name} is not a generation setting; {hint}")
        return replace(self, **{n: _OFF.get(n) if v is None else v for n, v in given.items()})

    def with_ends_of(self, other: "GenerationConfig | None") -> "GenerationConfig":
        """A copy with the end and pad tokens of another, if this one names no end token."""
        if other is None or self.eos_token_id is not None:
            return self
        pad = other.pad_token_id if self.pad_token_id is None else self.pad_token_id
        return replace(self, eos_token_id=other.eos_token_id, pad_token_id=pad)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a ValueError for a token id outside a vocabulary of this size."""
        for name, ids in (
            ("eos_token_id", self.eos_token_ids),
            ("pad_token_id", [] if self.pad_token_id is None else [self.pad_token_id]),
        ):
            outside = [token_id for token_id in ids if token_id >= vocab_size]
            if outside:
                raise ValueError(
                    f"{name} {outside[0]} lies outside the model's vocabulary of {vocab_size}"
                )


def settings_of_call(
    given: GenerationConfig | None,
    own: GenerationConfig | None,
    overrides: dict[str, Any],
    vocab_size: int,
) -> GenerationConfig:
    """The settings of a call: overrides, then those given or else the model's own.

    End tokens of the model's own settings also end answers under given ones that name none.

    Raises:
        ValueError: a bad setting, or a token outside the vocabulary.
    """
    config = (given or own or GenerationConfig()).with_ends_of(own).updated(**overrides)
    config.check_vocabulary(vocab_size)
    return config
