"""The fields that requests may have. Unknown ones are ignored, as clients send many; null means the default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 4.0 is what some languages write for 4."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
Int32 = Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Limit = Annotated[Integer, Field(ge=-1, le=2**31 - 1)]
Texts = Annotated[list[str], Field(max_length=256)]

MAX_CHOICES = 64
MAX_PROMPTS = 256


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _whole_characters(cls, data: Any) -> Any:
        """JSON can escape half of a surrogate pair, which is no text."""
        todo = [data]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                try:
                    value.encode("utf-8")
                except UnicodeEncodeError:
                    raise ValueError("a text has half of a surrogate pair, expected whole characters") from None
            elif isinstance(value, dict):
                todo.extend((*value.keys(), *value.values()))
            elif isinstance(value, list):
                todo.extend(value)
        return data


class SamplingFields(_Fields):
    """llama-server's sampling parameters, its names and defaults."""

    seed: Integer | None = Field(None, description="-1 draws one")
    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_last_n: Int32 | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Int32 | None = None
    dry_sequence_breakers: Texts | None = None
    samplers: list[str] | str | None = Field(None, description="names, or llama.cpp's letters")
    min_keep: Count | None = None
    logit_bias: list[Any] | dict[str, Any] | None = Field(
        None, description="pairs of token or text and bias, or an object; false never lets it be chosen"
    )
    ignore_eos: bool | None = None
    grammar: str | None = Field(None, description="GBNF")
    json_schema: dict[str, Any] | bool | None = None


class GenerationFields(SamplingFields):
    """What all three kinds of completion share."""

    model: str | None = None
    stream: bool | None = None
    stop: Texts | str | None = None
    n_predict: Limit | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    return_tokens: bool | None = None
    return_provenance: bool | None = Field(None, description="tell of every token whether it was drafted")
    n_draft: Limit | None = Field(None, description="tokens drafted per round at most; -1: the server's, 0: none")
    id_slot: Int32 | None = None
    mirostat: Int32 | None = None
    lora: list[Any] | None = None


class StreamOptions(_Fields):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class CompletionRequest(GenerationFields):
    """POST /completion."""

    prompt: str | dict[str, Any] | list[Any]
    n_cmpl: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_probs: Count | None = None
    post_sampling_probs: bool | None = None


class OpenAICompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: Count | None = None
    n_probs: Count | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int32 | None = None
    stream_options: StreamOptions | None = None


class ChatMessage(BaseModel):
    """One message; further fields reach the template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionDefinition(BaseModel):
    """A tool's function."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """One of a chat's tools."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: FunctionDefinition


class ChatFields(_Fields):
    """What a chat's prompt is made of: POST /apply-template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(GenerationFields, ChatFields):
    """POST /v1/chat/completions."""

    response_format: dict[str, Any] | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    parse_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    stream_options: StreamOptions | None = None


class TokenizeRequest(_Fields):
    """POST /tokenize."""

    content: str | list[str | Int32] = Field("", description="text, or texts and tokens")
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(_Fields):
    """POST /detokenize."""

    tokens: list[Int32] = []


class SlotFileRequest(_Fields):
    """POST /slots/{id}?action=save|restore."""

    filename: str | None = None


class ErrorBody(BaseModel):
    """The inside of an error."""

    code: int
    message: str
    type: str


class ErrorResponse(BaseModel):
    """Every error has this form; ``exceed_context_size_error`` adds ``n_prompt_tokens`` and ``n_ctx``."""

    error: ErrorBody
