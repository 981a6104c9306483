"""Requests and errors of OpenAI's interface, with the further names of vLLM.

A field that is not known, or asks for what is not there, is refused by its name; null asks for
nothing.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from paddle_vl.files.names import Foreign

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refusal in OpenAI's form.

    Attributes:
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
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self._param, "code": self._code}
        return {"error": error}


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class StreamOptions(_Fields):
    """What a stream has beside the answer. Obfuscation of lengths is accepted and not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(_Fields):
    """A named schema."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema", default_factory=lambda: {"type": "object"})
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(_Fields):
    """The form that an answer keeps."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Fields):
    """vLLM's names of forms; one of them."""

    json_: dict[str, Any] | bool | None = Field(alias="json", default=None)
    regex: str | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(min_length=1, default=None)


_Stop = Annotated[str, Field(min_length=1, max_length=200)]


class AnyRequest(_Fields):
    """What requests of chats and of texts have in common."""

    model: str | None = None
    max_tokens: int | None = Field(ge=1, default=None)
    temperature: float | None = Field(ge=0, le=2, default=None)
    top_p: float | None = Field(gt=0, le=1, default=None)
    n: int = Field(ge=1, le=32, default=1)
    stop: _Stop | list[_Stop] = Field(max_length=16, default_factory=list)
    seed: int | None = Field(ge=-(2**63), le=2**63 - 1, default=None)
    presence_penalty: float = Field(ge=-2, le=2, default=0.0)
    frequency_penalty: float = Field(ge=-2, le=2, default=0.0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    # vLLM's.
    top_k: int | None = Field(ge=-1, default=None)
    min_p: float = Field(ge=0, le=1, default=0.0)
    repetition_penalty: float | None = Field(gt=0, le=100, default=None)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(max_length=64, default_factory=list)
    structured_outputs: StructuredOutputs | None = None
    # They ask for nothing that changes an answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(AnyRequest):
    """Of `/v1/chat/completions`; messages are read as rows of data are."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(ge=1, default=None)
    logprobs: bool = False
    top_logprobs: int | None = Field(ge=0, le=20, default=None)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(AnyRequest):
    """Of `/v1/completions`: texts, or lists of token ids, that answers continue."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(ge=0, le=20, default=None)

    @property
    def limit(self) -> int:
        """The most tokens of an answer; OpenAI's default."""
        return self.max_tokens or 16


Request = TypeVar("Request", bound=AnyRequest)
_FUNCTIONS = Foreign("give 'tools' and 'tool_choice'")
_FORMS = Foreign("give 'response_format', or 'structured_outputs' as in vLLM")
# Known fields that ask for what is not there, and the values of them that do not.
_REFUSED = {
    **dict.fromkeys(("functions", "function_call"), _FUNCTIONS),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FORMS),
    "audio": Foreign("answers are text"),
    "best_of": Foreign("ask for 'n' answers", (1,)),
    "echo": Foreign("the prompt is not repeated", (False,)),
    "logit_bias": Foreign("it is not supported", ({},)),
    "modalities": Foreign("answers are text", (["text"],)),
    "prediction": Foreign("it is not supported"),
    "reasoning_effort": Foreign("say it to the template, in 'chat_template_kwargs'"),
    "suffix": Foreign("answers continue a prompt", ("",)),
    "web_search_options": Foreign("nothing is searched"),
}


def parsed(body: bytes, kind: type[Request]) -> Request:
    """The request of a body.

    Raises:
        ApiError: of status 400: it is no JSON object, or a field is unknown or out of range.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = f"We could not parse the JSON body of your request: {error}"
        raise ApiError(400, reason) from error
    if not isinstance(given, dict):
        raise ApiError(400, f"the body is a {type(given).__name__}; a JSON object is needed")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() & _REFUSED:
        remedy, harmless = _REFUSED[name]
        if given.pop(name) not in harmless:
            raise ApiError(400, f"{name}: {remedy}", name, "unsupported_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        names = [str(each) for each in found["loc"]]
        if found["type"] == "extra_forbidden" and len(names) == 1:
            message = f"Unrecognized request argument supplied: {names[0]}"
            raise ApiError(400, message, names[0], "unknown_parameter") from None
        raise ApiError(400, f"{'.'.join(names)}: {found['msg']}", ".".join(names)) from None
