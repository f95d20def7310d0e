"""Text to tokens and back, and chats to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from dspine_local.server.chat_prompt import render
from dspine_local.server.errors import invalid
from dspine_local.server.routes.common import ERRORS, State, in_thread
from dspine_local.server.schemas import ChatFields, DetokenizeRequest, TokenizeRequest
from dspine_local.server.state import ServerState
from dspine_local.tokenizer import Tokenizer

router = APIRouter(responses=ERRORS)


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, state: State) -> dict[str, Any]:
    """Tokens of a text; with ``with_pieces`` their texts, or bytes where they are no text."""
    tokenizer = state.engine.tokenizer
    tokens = await in_thread(lambda: _tokens(request, tokenizer))
    _check_known(tokens, state)
    if not request.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer.piece(token, special=True))} for token in tokens]}


@router.post("/detokenize")
async def detokenize(request: DetokenizeRequest, state: State) -> dict[str, Any]:
    """Text of tokens, special ones included."""
    _check_known(request.tokens, state)
    pieces = [state.engine.tokenizer.piece(token, special=True) for token in request.tokens]
    return {"content": b"".join(pieces).decode("utf-8", errors="replace")}


@router.post("/apply-template")
async def apply_template(request: ChatFields, state: State) -> dict[str, Any]:
    """The prompt that a chat becomes."""
    prompt = await in_thread(lambda: render(request, state.engine.tokenizer))
    return {"prompt": prompt.text}


def _tokens(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    parts = request.content if isinstance(request.content, list) else [request.content]
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            tokens.append(part)
            continue
        tokens += tokenizer.encode_plain(
            part,
            add_special=request.add_special is True and i == 0,
            parse_special=request.parse_special is not False,
        )
    return tokens


def _check_known(tokens: Sequence[int], state: ServerState) -> None:
    n_vocab = state.engine.target.n_vocab
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise invalid(f"token {token} is outside the vocabulary of {n_vocab}")


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
