"""HF's generation settings, and the file `generation_config.json`."""

import difflib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import read_json_object, shown, write_text

FILE_NAME = "generation_config.json"
# Far beyond every model's positions; a cache for more would exhaust the memory.
_MOST_TOKENS = 1 << 22
# Largest float32.
_LARGEST = 3.4e38

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
# Unsupported keys, with the value at which they have no effect (None never has).
_NEUTRAL_VALUES = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_p": None,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of generation, with HF's names and, except for the length, HF's defaults.

    Attributes:
        max_new_tokens: maximum of appended tokens.
        min_new_tokens: no end token is chosen before this many tokens.
        do_sample: sample; False takes the most likely token, without temperature, top_k and top_p.
        temperature: divides the scores.
        top_k: sample among the k most likely tokens; 0 among all.
        top_p: sample among the most likely tokens that together have this probability; 1 among all.
        repetition_penalty: divides positive and multiplies negative scores of tokens that occur in
            the prompt or the answer; 1 has no effect.
        eos_token_id: end token or tokens; None for an end by length only.
        pad_token_id: fills answers that have ended; None for the first end token.
        seed: seed of sampling; None for a different one each time.
        prefill_chunk_size: columns of the prompts that run at once, which bounds the memory of
            long prompts; None for all of them.

    Raises:
        ValueError: a value is out of range or has the wrong type.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    eos_token_id: int | tuple[int, ...] | list[int] | None = None
    pad_token_id: int | None = None
    seed: int | None = None
    prefill_chunk_size: int | None = None

    def __post_init__(self):
        _check_integer("max_new_tokens", self.max_new_tokens, 1, most=_MOST_TOKENS)
        _check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens "
                f"{self.max_new_tokens}: lower the first or raise the second"
            )
        if not isinstance(self.do_sample, bool):
            raise ValueError(f"do_sample is {shown(self.do_sample)}; it must be true or false")
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if type(value) not in (int, float) or value != value or abs(value) > _LARGEST:
                raise ValueError(f"{name} is {shown(value)}; it must be a number")
        if self.do_sample and not 0 < self.temperature <= _LARGEST:
            raise ValueError(
                f"temperature is {self.temperature}; sampling needs one above 0: set do_sample to "
                "false to always get the most likely token"
            )
        _check_integer("top_k", self.top_k, 0, " (0 draws among all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and not above 1")
        if not 0 < self.repetition_penalty <= _LARGEST:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is none)"
            )
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for token_id in self.eos_token_ids:
            _check_integer("eos_token_id", token_id, 0)
        if self.pad_token_id is not None:
            _check_integer("pad_token_id", self.pad_token_id, 0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0)
        if self.prefill_chunk_size is not None:
            _check_integer("prefill_chunk_size", self.prefill_chunk_size, 1)

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
    def from_pretrained(cls, path: str | Path) -> "GenerationConfig":
        """Read `generation_config.json` of a model folder, or a JSON file.

        Raises:
            RuntimeError: the file cannot be read, or is damaged.
            ValueError: a setting is unknown, unsupported or out of range.
        """
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        values = read_json_object(path, "generation settings")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GenerationConfig":
        """Build from the content of HF's file; null is the default.

        Raises:
            ValueError: an unsupported way of generation (as beam search), or an unknown key.
        """
        values = {name: value for name, value in values.items() if value is not None}
        absent = [
            f"{name} {shown(values[name])}"
            for name, neutral in _NEUTRAL_VALUES.items()
            if name in values and values[name] != neutral
        ]
        if absent:
            raise ValueError(f"{', '.join(absent)}: not supported; remove it")
        others = _INERT_KEYS | set(_NEUTRAL_VALUES)
        return cls().updated(**{name: v for name, v in values.items() if name not in others})

    def to_dict(self) -> dict[str, Any]:
        """The content of HF's file: settings that differ from the defaults."""
        defaults = asdict(GenerationConfig())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def save_pretrained(self, path: str | Path) -> None:
        """Write `generation_config.json` into a folder."""
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        write_text(Path(path) / FILE_NAME, text)

    def updated(self, **settings: Any) -> "GenerationConfig":
        """A copy with some settings replaced.

        Raises:
            ValueError: an unknown setting, or a bad value.
        """
        names = [f.name for f in fields(self)]
        for name in settings:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise ValueError(f"{name} is not a generation setting; {hint}")
        return replace(self, **settings)

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


def _check_integer(
    name: str, value: Any, least: int, note: str = "", most: int = 2**63 - 1
) -> None:
    if type(value) is not int or value < least:
        raise ValueError(
            f"{name} is {shown(value)}; it must be an integer of at least {least}{note}"
        )
    if value > most:
        raise ValueError(f"{name} is {shown(value)}; it must be an integer of at most {most}")
