"""A request's fields as the engine's options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from dspine_local.checks import need_number
from dspine_local.grammar import schema_to_gbnf
from dspine_local.options import GenerationOptions, SamplingOptions
from dspine_local.server.config import ServerOptions
from dspine_local.server.errors import ApiError, invalid
from dspine_local.server.schemas import GenerationFields, SamplingFields
from dspine_local.tokenizer import Tokenizer

_SPECIAL = ("logit_bias", "grammar", "seed", "samplers")
_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}


def generation_options(
    request: GenerationFields,
    defaults: ServerOptions,
    tokenizer: Tokenizer,
    *,
    n_probs: int | None = None,
    grammar: str = "",
) -> GenerationOptions:
    """Options of a request.

    Args:
        grammar: Made by the server, for a response format or tools; the request must then bring none of its own.
    Raises:
        ApiError: A field cannot be served.
        ValueError: A field is out of range.
    """
    if request.mirostat:
        raise ApiError(501, "mirostat is not supported: it keeps state that drafts would have to undo")
    if request.lora:
        raise ApiError(501, "lora adapters are not supported")
    limits = (request.n_predict, request.max_completion_tokens, request.max_tokens)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return GenerationOptions(
        max_tokens=next((limit for limit in limits if limit is not None), defaults.n_predict),
        stop=[text for text in stop if text],  # interfaces send fields that were left empty
        n_draft=None if request.n_draft is None or request.n_draft < 0 else request.n_draft,
        cache_prompt=request.cache_prompt is not False,
        n_probs=n_probs,
        slot=None if request.id_slot is None or request.id_slot < 0 else request.id_slot,
        sampling=_sampling(request, defaults.sampling, tokenizer, grammar),
    )


def for_choice(options: GenerationOptions, index: int) -> GenerationOptions:
    """The options of one of several answers: a seed that was given is counted up, so that they differ."""
    if index == 0 or options.sampling.seed == SamplingOptions().seed:
        return options
    return replace(options, sampling=replace(options.sampling, seed=(options.sampling.seed + index) % 2**32))


def _sampling(
    request: SamplingFields, defaults: SamplingOptions, tokenizer: Tokenizer, grammar: str
) -> SamplingOptions:
    given: dict[str, Any] = {
        option.name: getattr(request, option.name)
        for option in fields(SamplingOptions)
        if option.name not in _SPECIAL and getattr(request, option.name) is not None
    }
    if request.seed is not None:
        given["seed"] = request.seed % 2**32
    if request.samplers is not None:
        given["samplers"] = _sampler_names(request.samplers)
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias, tokenizer)
    own = [source for source in (request.grammar, request.json_schema) if source not in (None, "")]
    if len(own) + bool(grammar) > 1:
        raise invalid("more than one of grammar, json_schema, response_format and a tool_choice that needs a grammar")
    if grammar or own:
        given["grammar"] = grammar or request.grammar or schema_to_gbnf(request.json_schema)
    return replace(defaults, **given)


def _sampler_names(samplers: Sequence[str] | str) -> list[str]:
    if not isinstance(samplers, str):
        return list(samplers)
    unknown = set(samplers) - _LETTERS.keys()
    if unknown:
        raise invalid(f"samplers has unknown letters {sorted(unknown)}, expected some of '{''.join(_LETTERS)}'")
    return [_LETTERS[letter] for letter in samplers]


def _logit_bias(entries: list[Any] | dict[str, Any], tokenizer: Tokenizer) -> list[tuple[int, float]]:
    if isinstance(entries, dict):
        pairs = [(_id_or_text(key), bias) for key, bias in entries.items()]
    else:
        pairs = [_pair(entry) for entry in entries]
    out: list[tuple[int, float]] = []
    for key, bias in pairs:
        value = -math.inf if bias is False else bias
        need_number("logit_bias", value, low=-math.inf)
        out.extend((token, float(value)) for token in _tokens(key, tokenizer))
    return out


def _id_or_text(key: str) -> int | str:
    """Keys of a JSON object are texts: digits are an id there, in a list they are digits."""
    return int(key) if key.isascii() and key.isdigit() else key


def _pair(entry: Any) -> tuple[Any, Any]:
    if isinstance(entry, list) and len(entry) == 2:
        return entry[0], entry[1]
    if isinstance(entry, dict) and {"token", "bias"} <= entry.keys():
        return entry["token"], entry["bias"]
    raise invalid("logit_bias has an entry that is not a pair of token and bias")


def _tokens(key: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if not isinstance(key, str):
        raise invalid(f"logit_bias has the token {key!r}, expected a token id or text")
    return tokenizer.encode_plain(key)
