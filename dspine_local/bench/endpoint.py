"""Other servers that answer OpenAI's chat completions, llama-server above all: its answers tell their own timings."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from dspine_local.bench.systems import Answer, Task, is_mode
from dspine_local.checks import OptionError
from dspine_local.errors import BackendError

TIMEOUT_S = 3600.0  # of one answer: a large model on a small machine takes its time
CONNECT_TIMEOUT_S = 10.0

# Measured servers run on this machine or beside it: a proxy of the environment would only be in the way.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Endpoint:
    """A server at ``url``, the part before ``/v1``; ``model`` is what it calls its first model."""

    name: str
    url: str
    model: str
    max_tokens: int
    temperature: float
    seed: int
    is_ours: bool = False

    def answer(self, task: Task) -> Answer:
        """One chat of one message, not streamed.

        Raises:
            BackendError: The server cannot be reached, refuses, or answers something else than a completion.
        """
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": task.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": False,
            "cache_prompt": False,  # llama-server's
        }
        start = perf_counter()
        found = _call(self.name, f"{self.url}/v1/chat/completions", TIMEOUT_S, request)
        return parse_completion(self.name, found, wall_s=perf_counter() - start)


def parse_endpoint(text: str) -> tuple[str, str]:
    """Name and URL of ``name=http://host:port``; a URL alone is called by its host and port.

    Raises:
        OptionError: No HTTP URL.
    """
    name, is_named, url = text.partition("=")
    if not is_named or "://" in name:
        name, url = "", text
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise OptionError("endpoints", text, "NAME=URL, such as llama-server=http://127.0.0.1:8081")
    return name.strip() or parts.netloc, url.rstrip("/").removesuffix("/v1")


def parse_endpoints(texts: Sequence[str]) -> dict[str, str]:
    """URLs by name.

    Raises:
        OptionError: No HTTP URL, or a name that another endpoint or a mode of ours has.
    """
    urls: dict[str, str] = {}
    for name, url in map(parse_endpoint, texts):
        if name in urls or is_mode(name):
            raise OptionError("endpoints", name, "a name that no other endpoint and no mode has")
        urls[name] = url
    return urls


def connect(name: str, url: str, *, max_tokens: int, temperature: float, seed: int) -> Endpoint:
    """The endpoint, once it has told its model.

    Raises:
        BackendError: It cannot be reached, or has no models.
    """
    found = _call(name, f"{url}/v1/models", CONNECT_TIMEOUT_S)
    try:
        model = found["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        model = None
    if not isinstance(model, str):
        raise BackendError(f"the endpoint '{name}' at {url} names no model, expected an answer of OpenAI's /v1/models")
    return Endpoint(name, url, model, max_tokens, temperature, seed)


def parse_completion(name: str, found: Mapping[str, Any], *, wall_s: float) -> Answer:
    """A completion as an answer: by its ``timings``, or by the wall time and its ``usage``.

    Raises:
        BackendError: It has no text, or tells neither.
    """
    try:
        message = found["choices"][0]["message"]
        text = "".join(message.get(key) or "" for key in ("reasoning_content", "content"))
        timings = found.get("timings")
        if timings is None:
            n_tokens = _count(found["usage"]["completion_tokens"])
            return Answer(text, n_tokens, n_timed=n_tokens, timed_s=wall_s, clock="wall")
        n_tokens = _count(timings["predicted_n"])
        n_timed = max(0, n_tokens - 1)  # the prompt's decode gives the first, before the server's clock starts
        n_rounds = n_timed - _count(timings["draft_n_accepted"]) if "draft_n_accepted" in timings else n_timed
        return Answer(
            text,
            n_tokens,
            n_timed,
            timed_s=_milliseconds(timings["predicted_ms"]),
            clock="timings",
            prefill_s=_milliseconds(timings["prompt_ms"]) if "prompt_ms" in timings else None,
            n_rounds=max(0, n_rounds),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise BackendError(
            f"the endpoint '{name}' gave an answer that could not be read ({error!r}), expected a chat completion with "
            "timings or usage"
        ) from error


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _milliseconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time")
    return value / 1e3


def _call(name: str, url: str, timeout_s: float, content: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A GET, or a POST with JSON; the JSON object that comes back."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - parse_endpoint
    try:
        with _opener.open(request, timeout=timeout_s) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace")
        raise BackendError(f"the endpoint '{name}' refused {url} with status {error.code}: {said}") from error
    except OSError as error:
        raise BackendError(f"the endpoint '{name}' at {url} failed: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise BackendError(f"the endpoint '{name}' at {url} answered no JSON: {error}") from error
    if not isinstance(found, dict):
        raise BackendError(f"the endpoint '{name}' at {url} answered no JSON object")
    return found
