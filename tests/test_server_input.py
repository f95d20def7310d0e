"""Wrong requests: the right code, a JSON error, and a server that goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_rig import RunningServer, open_engine, serving

pytestmark = pytest.mark.native

HUGE = 10**30
USER = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("slots")
    with serving(open_engine(tiny_pair), slot_save_path=folder, max_body_bytes=1 << 20) as running:
        yield running


def send(server: RunningServer, path: str, content: bytes, method: str = "POST", **headers: str) -> tuple[int, Any]:
    response = server.client.request(method, path, content=content, headers=headers)
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert error["message"]
    assert error["type"]
    return response.status_code, error


def still_answers(server: RunningServer) -> None:
    assert server.post("/completion", prompt="A", n_predict=2)["tokens_predicted"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {}),
        ("/completion", {"prompt": None}),
        ("/completion", {"prompt": 5}),
        ("/completion", {"prompt": []}),
        ("/completion", {"prompt": [[]]}),
        ("/completion", {"prompt": [1.5]}),
        ("/completion", {"prompt": [-1]}),
        ("/completion", {"prompt": [10**6]}),
        ("/completion", {"prompt": [HUGE]}),
        ("/completion", {"prompt": [True]}),
        ("/completion", {"prompt": ["a"] * 1000}),
        ("/completion", {"prompt": {"text": "x"}}),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["AAAA"]}}),
        ("/completion", {"prompt": [{"prompt_string": "x", "multimodal_data": ["AAAA"]}]}),
        ("/completion", {"prompt": "x", "n_predict": HUGE}),
        ("/completion", {"prompt": "x", "n_predict": -2}),
        ("/completion", {"prompt": "x", "n_predict": "4"}),
        ("/completion", {"prompt": "x", "n_probs": -1}),
        ("/completion", {"prompt": "x", "temperature": -1}),
        ("/completion", {"prompt": "x", "temperature": "hot"}),
        ("/completion", {"prompt": "x", "temperature": 1e300}),
        ("/completion", {"prompt": "x", "top_k": HUGE}),
        ("/completion", {"prompt": "x", "top_p": -0.5}),
        ("/completion", {"prompt": "x", "repeat_penalty": 0}),
        ("/completion", {"prompt": "x", "repeat_last_n": -5}),
        ("/completion", {"prompt": "x", "min_keep": -1}),
        ("/completion", {"prompt": "x", "samplers": ["mystery"]}),
        ("/completion", {"prompt": "x", "samplers": "q"}),
        ("/completion", {"prompt": "x", "samplers": ["top_k"] * 1000}),
        ("/completion", {"prompt": "x", "dry_sequence_breakers": [""]}),
        ("/completion", {"prompt": "x", "logit_bias": [[1]]}),
        ("/completion", {"prompt": "x", "logit_bias": [[HUGE, 1]]}),
        ("/completion", {"prompt": "x", "logit_bias": {"1": "a lot"}}),
        ("/completion", {"prompt": "x", "logit_bias": [[1, True]]}),
        ("/completion", {"prompt": "x", "logit_bias": [[1, 10**400]]}),
        ("/completion", {"prompt": "x", "logit_bias": {"1": 1e39}}),
        ("/completion", {"prompt": "x", "n_predict": 4.5}),
        ("/completion", {"prompt": "x", "stop": ["a"] * 1000}),
        ("/completion", {"prompt": "x", "grammar": "root ::= ("}),
        ("/completion", {"prompt": "x", "grammar": "x ::= y"}),
        ("/completion", {"prompt": "x", "grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}),
        ("/completion", {"prompt": "x", "grammar": 'root ::= "a"{100000}'}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "mystery"}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "string", "maxLength": 10**9}}),
        ("/completion", {"prompt": "x", "json_schema": {"$ref": "https://127.0.0.1/x"}}),
        ("/completion", {"prompt": "x", "json_schema": {"$ref": "#/a/b"}}),
        ("/completion", {"prompt": "x", "json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}),
        ("/completion", {"prompt": "x", "json_schema": {"$ref": "#"}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "integer", "minimum": 10**400}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "array", "minItems": 3, "maxItems": 1}}),
        ("/completion", {"prompt": "x", "json_schema": {"properties": {"": {"type": "string"}}}}),
        ("/completion", {"prompt": "x", "json_schema": {"properties": {"a": False}}}),
        ("/completion", {"prompt": "x", "json_schema": {"properties": []}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "char"}}),
        ("/completion", {"prompt": "x", "json_schema": {"anyOf": []}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "string", "pattern": '^"$'}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "string", "pattern": "^a$|^b$"}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "string", "pattern": "^\\p{L}$"}}),
        ("/completion", {"prompt": "x", "json_schema": {"$ref": "#/type/0", "type": "string"}}),
        ("/completion", {"prompt": "x", "json_schema": {"type": "string", "pattern": "^(((["}}),
        ("/completion", {"prompt": "x", "json_schema": {}, "grammar": 'root ::= "a"'}),
        ("/completion", {"prompt": "x", "n": 0}),
        ("/completion", {"prompt": "x", "n": 10**6}),
        ("/completion", {"prompt": "x", "id_slot": 7}),
        ("/completion", {"prompt": "x", "n_draft": 1000}),
        ("/completion", {"prompt": {"prompt_string": 5}}),
        ("/v1/completions", {"prompt": "x", "logprobs": -2}),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": ["a"]}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 21, "logprobs": True}),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}),
        ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": "perhaps"}),
        ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function"}}),
        ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "xml"}}),
        ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}),
        ("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {"messages": []}}),
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"content": ["a", 10**6]}),
        ("/tokenize", {"content": ["a", None]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/apply-template", {"messages": [{}]}),
    ],
)
def test_wrong_values(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    code, error = send(server, path, json.dumps(body).encode(), **{"content-type": "application/json"})
    assert (code, error["type"]) == (400, "invalid_request_error")
    assert server.is_idle()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "logit_bias": {"\\udfff": 1}}',
        b'{"prompt": "x", "logit_bias": [[1, 1e999]]}',
        b'{"prompt": ["\\ud800"]}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1e999}',
        b'{"prompt": ' + b"[" * 50000 + b"]" * 50000 + b"}",
        b'{"prompt": "x", "json_schema": ' + b'{"items":' * 20000 + b"{}" + b"}" * 20000 + b"}",
        b'{"prompt": "x", "model": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "Application/X-WWW-Form-Urlencoded", "text/plain"])
def test_bodies_that_are_no_request(server: RunningServer, content: bytes, kind: str) -> None:
    for path in ("/completion", "/v1/completions"):
        code, _ = send(server, path, content, **{"content-type": kind})
        assert code == 400
    still_answers(server)


def test_surrogates_anywhere_in_a_chat(server: RunningServer) -> None:
    for part in (
        b'{"role": "\\ud800", "content": "x"}',
        b'{"role": "user", "content": "\\ud800"}',
        b'{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}',
        b'{"role": "user", "content": [{"type": "\\ud800"}]}',
    ):
        assert send(server, "/v1/chat/completions", b'{"messages": [' + part + b"]}")[0] == 400
    still_answers(server)


def test_odd_but_right_values(server: RunningServer) -> None:
    """Null is the default, unknown fields are ignored, numbers at their limits work."""
    nulls = dict.fromkeys(("temperature", "stop", "n", "seed", "grammar", "stream", "logit_bias", "model"))
    server.post("/completion", prompt="x", n_predict=1, user="me", store=False, **nulls)
    server.post("/completion", prompt="x", n_predict=1, seed=2**63, top_k=2**31 - 1, repeat_last_n=-1)
    assert server.post("/completion", prompt="x", n_predict=2.0, seed=1.0, top_k=3.0)["tokens_predicted"] == 2
    assert server.post("/completion", prompt="x", n_predict=1, stop="")["stop_type"] == "limit"
    assert server.post("/completion", prompt="x", n_predict=1, stop=["", "zz"])["generation_settings"]["stop"] == ["zz"]
    server.post("/completion", prompt={"prompt_string": "x"}, n_predict=1)
    server.post("/apply-template", messages=USER, chat_template_kwargs={"self": 1, "template": "x", "variables": 2})
    assert server.post("/completion", prompt="x", n_predict=0)["tokens_predicted"] == 0
    server.post("/completion", prompt="x", n_predict=1, logit_bias=[[1, False], ["ab", -1.5], {"token": 2, "bias": 1}])
    server.post("/completion", prompt="x", n_predict=1, samplers="kt", dry_multiplier=1, dry_sequence_breakers=["a"])
    assert server.post("/completion", prompt="x", n_predict=2**31 - 1, stop=["a", "b", "e", " "])["stop"] is True
    server.post("/v1/chat/completions", messages=USER, max_tokens=1, response_format={"type": "text"}, tools=[])


def test_long_bodies(server: RunningServer) -> None:
    ten = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    assert send(server, "/completion", ten)[0] == 413

    def pieces() -> Iterator[bytes]:  # without a length in front
        for _ in range(200):
            yield b" " * 65536

    response = server.client.post("/completion", content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == 413
    assert send(server, "/completion", json.dumps({"prompt": "word " * 100_000}).encode())[0] == 400
    still_answers(server)


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert send(server, "/v1/embeddings", b"{}")[0] == 404
    assert send(server, "/web/../../pyproject.toml", b"", "GET")[0] == 404
    assert send(server, "/web/%2e%2e/%2e%2e/app.py", b"", "GET")[0] == 404
    assert send(server, "/completion", b"", "GET")[0] == 405
    assert send(server, "/health", b"", "DELETE")[0] == 405
    assert server.client.head("/completion").status_code == 405
    for path in ("/health", "/v1/models", "/"):
        head, get = server.client.head(path), server.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]


def test_any_content_type_is_json(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded; charset=utf-8", "application/octet-stream"):
        body = {"content": b'{"prompt": "x", "n_predict": 1}', "headers": {"Content-Type": kind}}
        assert server.client.post("/completion", **body).status_code == 200  # type: ignore[arg-type]


PLAIN_NAMES = ["../x", "..", ".", "", "a/b", "/etc/passwd", "a\\b", "C:x", ".hidden", "a*", "~", "end.", "end ", None]
ODD_NAMES = ["a\x00b", "a\nb", "x" * 300, "..%2fx", "\u2215etc", "\u202egpj"]


@pytest.mark.parametrize("name", [*PLAIN_NAMES, *ODD_NAMES])
@pytest.mark.parametrize("action", ["save", "restore"])
def test_slot_files_stay_in_their_folder(server: RunningServer, name: str | None, action: str) -> None:
    folder = server.state.options.slot_save_path
    assert folder is not None
    before = sorted(folder.parent.rglob("*"))
    response = server.client.post("/slots/0", params={"action": action}, json={"filename": name})
    if response.status_code == 200:  # a strange name, but inside
        assert action == "save"
        assert (folder / str(name)).is_file()
        (folder / str(name)).unlink()
    else:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert sorted(folder.parent.rglob("*")) == before


def test_slot_files_that_are_links_or_damaged(server: RunningServer, tmp_path: Path) -> None:
    folder = server.state.options.slot_save_path
    assert folder is not None
    still_answers(server)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"precious")
    (folder / "link.bin").symlink_to(outside)
    try:
        for action in ("save", "restore"):
            server.post(f"/slots/0?action={action}", expect=400, filename="link.bin")
        assert outside.read_bytes() == b"precious"
    finally:
        (folder / "link.bin").unlink()
    (folder / "nested").mkdir()
    for action in ("save", "restore"):
        server.post(f"/slots/0?action={action}", expect=400, filename="nested")
    (folder / "noise.bin").write_bytes(b"noise" * 100)
    assert "noise.bin" in server.post("/slots/1?action=restore", expect=400, filename="noise.bin")["error"]["message"]
    for path in ("/slots/9?action=erase", "/slots/-1?action=erase", "/slots/0?action=burn", "/slots/0", "/slots/x"):
        server.post(path, expect=400)
    still_answers(server)


def test_keys(tiny_pair: tuple[Path, Path]) -> None:
    with serving(open_engine(tiny_pair), api_keys=("first", "zweiter-Schlüssel")) as running:
        client = running.client
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"x-api-key": "firs"}):
            response = client.post("/completion", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        for key in ({"authorization": "Bearer first"}, {"x-api-key": "first"}, {"x-api-key": "zweiter-Schlüssel"}):
            headers = {name: value.encode() for name, value in key.items()}
            assert client.get("/props", headers=headers).status_code == 200
        for path in ("/health", "/v1/health", "/models", "/v1/models"):  # as llama-server's
            assert client.get(path).status_code == 200
        assert client.get("/").status_code == 200
        assert client.get("/nothing").status_code == 401


def test_other_web_pages_are_kept_out(server: RunningServer) -> None:
    """No CORS; a page elsewhere can neither send a request nor rename itself to this machine."""
    here = server.url.removeprefix("http://")
    body = b'{"prompt": "x", "n_predict": 1}'
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert send(server, "/completion", body, origin=origin)[0] == 403
    assert send(server, "/completion", body, host="evil.example:80")[0] == 403
    for headers in ({"origin": server.url}, {"host": f"localhost:{here.split(':')[1]}"}, {"host": "[::1]:80"}):
        response = server.client.post("/completion", content=body, headers=headers)
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers


def test_noise_on_the_wire(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for noise in (b"\x00" * 100, b"GET\r\n\r\n", b"POST /completion HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(noise)
            connection.recv(100)
    still_answers(server)
