"""Requests and errors of OpenAI's interface, with the further names of vLLM.

A field that is not known, or asks for what is not there, is refused by its name; null asks for
nothing.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from paddle_vl.files.names import Foreign, without_foreign

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refusal in OpenAI's form.

    Attributes:
        status: of HTTP.
        retry_after: seconds, for the header of that name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
        self._param, self._code = param, code

    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self._param, "code": self._code}
        return {"error": error}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class _StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False  # Of lengths; not done.


class _JsonSchema(_Fields):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class _ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


_NEVER = -100
_Id = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Text = Annotated[str, Field(min_length=1)]
# Texts, or a single one.
_Texts = Annotated[
    list[_Text], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]


class _StructuredOutputs(_Fields):
    """vLLM's names of forms."""

    json_: dict[str, Any] | None = Field(alias="json", default=None)
    regex: _Text | None = None
    choice: list[_Text] | None = Field(min_length=1, default=None)


def _never(bias: dict[str, float]) -> dict[str, float]:
    if any(value != _NEVER for value in bias.values()):
        raise ValueError(f"there is no logit_bias but {_NEVER}, for tokens that are never chosen")
    return bias


class _AnyRequest(_Fields):
    model: str | None = None
    max_tokens: int | None = Field(ge=1, default=None)
    temperature: float | None = Field(ge=0, le=2, default=None)
    top_p: float | None = Field(gt=0, le=1, default=None)
    n: int = Field(ge=1, le=32, default=1)
    stop: _Texts = Field(max_length=16, default_factory=list)
    seed: int | None = Field(ge=-(2**63), lt=2**63, default=None)
    presence_penalty: float = Field(ge=-2, le=2, default=0.0)
    frequency_penalty: float = Field(ge=-2, le=2, default=0.0)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logit_bias: Annotated[dict[_Id, float], AfterValidator(_never)] = Field(default_factory=dict)
    # vLLM's.
    return_token_ids: bool = False
    top_k: int | None = Field(ge=-1, default=None)
    min_p: float = Field(ge=0, le=1, default=0.0)
    repetition_penalty: float | None = Field(gt=0, le=100, default=None)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(max_length=64, default_factory=list)
    structured_outputs: _StructuredOutputs | None = None

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Tokens that are never chosen."""
        return tuple(map(int, self.logit_bias))


class ChatRequest(_AnyRequest):
    """Of `/v1/chat/completions`; messages and tools are read as those of data are."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(ge=1, default=None)
    logprobs: bool = False
    top_logprobs: int = Field(ge=0, le=20, default=0)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens that are given beside each; None without log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs 'logprobs': true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers keep; None for any text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.json_schema is None:
            param = "response_format.json_schema"
            raise ApiError(400, f"{param} is missing", param)
        return form.json_schema.schema_


class CompletionRequest(_AnyRequest):
    """Of `/v1/completions`: texts, or lists of token ids, that answers continue."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(ge=0, le=20, default=None)

    @property
    def limit(self) -> int:
        """The most tokens of an answer; OpenAI's default."""
        return self.max_tokens or 16

    @property
    def num_logprobs(self) -> int | None:
        """As of a chat."""
        return self.logprobs


class AdapterRequest(_Fields):
    """Of vLLM's `/v1/load_lora_adapter`."""

    lora_name: _Text
    lora_path: _Text
    load_inplace: bool = False


class WeightsRequest(_Fields):
    """Of SGLang's `/update_weights_from_disk`."""

    model_path: _Text
    flush_cache: Literal[True] = True


Request = TypeVar("Request", bound=_Fields)
# They ask for nothing that changes an answer.
_INERT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_FORMS = Foreign("give 'response_format', or 'structured_outputs' as in vLLM")
# Known fields that ask for what is not there.
_REFUSED = {
    **dict.fromkeys(("functions", "function_call"), Foreign("give 'tools' and 'tool_choice'")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), _FORMS),
    "best_of": Foreign("ask for 'n' answers", (1,)),
    "echo": Foreign("the prompt is not repeated"),
    # lmms-eval sends OpenAI's default to every model with "o1" or "o3" in its name.
    "reasoning_effort": Foreign("say it to the template, in 'chat_template_kwargs'", ("medium",)),
    "suffix": Foreign("answers continue a prompt", ("",)),
}


def parsed(body: bytes, kind: type[Request]) -> Request:
    """The request of a body.

    Raises:
        ApiError: of status 400: it is no JSON object, or a field is unknown or out of range.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
        if not isinstance(given, dict):
            raise ValueError(f"it is a {type(given).__name__}, not an object")
        given = {
            key: value for key, value in given.items() if value is not None and key not in _INERT
        }
        return kind.model_validate(without_foreign(given, _REFUSED, "this server"))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        names = ".".join(str(each) for each in found["loc"])
        reason = f"{names}: {found['msg']}"
        if found["type"] == "extra_forbidden":
            reason = f"Unrecognized request argument supplied: {names}"
        raise ApiError(400, reason, names) from None
    except ValueError as error:
        reason = f"We could not parse the JSON body of your request: {error}"
        raise ApiError(400, reason) from error
