"""Results as JSON, with llama-server's and OpenAI's field names."""

from __future__ import annotations

import codecs
import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dspine_local.generation import Chunk, Generation
from dspine_local.options import GenerationOptions
from dspine_local.stats import GenerationStats
from dspine_local.tokenizer import Tokenizer

Json = dict[str, Any]

_LOWEST = -9999.0  # JSON has no minus infinity


def new_id(prefix: str) -> str:
    """An id as OpenAI's look."""
    return f"{prefix}-{secrets.token_hex(16)}"


def envelope(kind: str, model: str, answer_id: str, created: int) -> Json:
    """What every OpenAI object begins with."""
    return {"id": answer_id, "object": kind, "created": created, "model": model, "system_fingerprint": "dspine-local"}


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def timings(stats: GenerationStats) -> Json:
    """llama-server's ``timings``; the draft's fields only when there were drafts."""
    prompt_n = stats.prompt_tokens - stats.reused_tokens
    prompt_ms = stats.prefill_s * 1e3
    predicted_ms = (stats.draft_s + stats.verify_s + stats.commit_s + stats.other_s) * 1e3
    out: Json = {
        "cache_n": stats.reused_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": stats.generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, stats.generated),
        "predicted_per_second": _ratio(stats.generated * 1e3, predicted_ms),
    }
    if stats.drafted:
        out |= {
            "draft_n": stats.drafted,
            "draft_n_accepted": stats.accepted,
            "acceptance_length": stats.acceptance_length,
        }
    return out


def usage(generations: Sequence[Generation], n_prompts: int = 1) -> Json:
    """OpenAI's ``usage`` of all answers; the choices of a prompt count it once."""
    n_choices = len(generations) // n_prompts
    prompt = sum(len(generation.prompt_tokens) for generation in generations[::n_choices])
    completion = sum(len(generation.tokens) for generation in generations)
    cached = sum(generation.stats.reused_tokens for generation in generations[::n_choices] if generation.stats)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stop_type(generation: Generation) -> str:
    """llama-server's: none, eos, word or limit."""
    if generation.finish_reason == "length":
        return "limit"
    if generation.finish_reason != "stop":
        return "none"
    return "word" if generation.stop_text is not None else "eos"


def probabilities(chunk: Chunk, tokenizer: Tokenizer, *, post_sampling: bool = False) -> list[Json]:
    """Log-probabilities of the chunk's tokens: llama-server's and OpenAI's fields are the same.

    ``post_sampling``: probabilities instead, as llama-server gives them behind the samplers.
    """
    describe, top = (_with_prob, "top_probs") if post_sampling else (_with_logprob, "top_logprobs")
    return [
        {
            **describe(token, entry.logprob, tokenizer),
            top: [describe(other, logprob, tokenizer) for other, logprob in entry.top],
        }
        for token, entry in zip(chunk.tokens, chunk.logprobs, strict=False)
    ]


def legacy_logprobs(entries: Sequence[Json], offset: int) -> Json:
    """The ``logprobs`` of OpenAI's old completions."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets,
        "content": list(entries),
    }


class Provenance:
    """Tells of each token of an answer where it came from, with its text at whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, chunk: Chunk) -> list[Json]:
        """The chunk's tokens: id, text, and whether each was drafted and accepted."""
        return [
            {"id": token, "text": self._decoder.decode(self._tokenizer.piece(token)), "drafted": i < chunk.n_accepted}
            for i, token in enumerate(chunk.tokens)
        ]


def settings(options: GenerationOptions, *, stream: bool) -> Json:
    """llama-server's ``generation_settings``."""
    sampling = asdict(options.sampling)
    sampling["logit_bias"] = [{"token": token, "bias": max(bias, -1e9)} for token, bias in options.sampling.logit_bias]
    sampling["samplers"] = list(options.sampling.samplers)
    sampling["dry_sequence_breakers"] = list(options.sampling.dry_sequence_breakers)
    return {
        **sampling,
        "n_predict": options.max_tokens,
        "max_tokens": options.max_tokens,
        "stop": list(options.stop),
        "n_probs": options.n_probs or 0,
        "post_sampling_probs": options.post_sampling_probs,
        "stream": stream,
        "cache_prompt": options.cache_prompt,
        "n_draft": options.n_draft,
    }


def event(data: Json) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n".encode("utf-8", "replace")


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def lines(items: Sequence[Json]) -> Iterator[bytes]:
    """Several events."""
    return map(event, items)


def _with_logprob(token: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {**_token(token, tokenizer), "logprob": max(logprob, _LOWEST)}


def _with_prob(token: int, logprob: float, tokenizer: Tokenizer) -> Json:
    return {**_token(token, tokenizer), "prob": math.exp(logprob)}


def _token(token: int, tokenizer: Tokenizer) -> Json:
    piece = tokenizer.piece(token, special=True)
    return {"id": token, "token": piece.decode("utf-8", errors="replace"), "bytes": list(piece)}


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
