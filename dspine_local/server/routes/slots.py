"""What slots do, and their files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from dspine_local.errors import DSpineError
from dspine_local.server.errors import ApiError, from_exception, invalid
from dspine_local.server.routes.common import ERRORS, State
from dspine_local.server.schemas import SlotFileRequest
from dspine_local.server.state import ServerState

router = APIRouter(responses=ERRORS)

_MAX_NAME_BYTES = 200
_POLL_S = 0.05


@router.get("/slots")
async def slots(state: State, fail_on_no_slot: Annotated[int | None, Query()] = None) -> list[dict[str, Any]]:
    """Every slot's state; with ``?fail_on_no_slot=1`` 503 when all are busy."""
    if not state.options.endpoint_slots:
        raise ApiError(501, "this server was started without the slots endpoint")
    infos = await state.scheduler.between_rounds(state.engine.slots)
    if fail_on_no_slot and all(info.request is not None for info in infos):
        raise ApiError(503, "no slot available")
    return [
        {
            "id": info.id,
            "id_task": -1 if info.request is None else info.request,
            "n_ctx": state.engine.n_ctx,
            "speculative": state.engine.max_draft > 0,
            "is_processing": info.request is not None,
            "is_generating": info.generating and info.request is not None,
            "n_cached": info.n_cached,
            "n_prompt_tokens": info.n_prompt,
            "next_token": [{"n_decoded": info.n_generated, "has_next_token": info.request is not None}],
        }
        for info in infos
    ]


@router.post("/slots/{id_slot}")
async def slot_action(
    state: State,
    id_slot: int,
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    request: SlotFileRequest | None = None,
) -> dict[str, Any]:
    """Save a slot's tokens and both caches to a file, restore them, or erase them. Waits until the slot is idle."""
    engine = state.engine
    if not 0 <= id_slot < engine.n_slots:
        raise invalid(f"no slot {id_slot}, expected 0 to {engine.n_slots - 1}")
    if action == "erase":
        return {"id_slot": id_slot, "n_erased": await _when_idle(state, id_slot, lambda: engine.erase_slot(id_slot))}
    path = _file(state, request.filename if request is not None else None)
    begin = time.monotonic()
    work = engine.save_slot if action == "save" else engine.restore_slot
    n_tokens, n_bytes = await _when_idle(state, id_slot, lambda: work(id_slot, path))
    took_ms = (time.monotonic() - begin) * 1e3
    words = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return {
        "id_slot": id_slot,
        "filename": path.name,
        words[0]: n_tokens,
        words[1]: n_bytes,
        "timings": {f"{action}_ms": took_ms},
    }


async def _when_idle(state: ServerState, id_slot: int, action: Callable[[], Any]) -> Any:
    """Run an action on a slot that is not answering."""

    def attempt() -> tuple[bool, Any]:
        if state.engine.slots()[id_slot].request is not None:
            return False, None
        return True, action()

    while True:
        try:
            done, result = await state.scheduler.between_rounds(attempt)
        except FileNotFoundError as error:
            raise invalid("no such file of a saved slot") from error
        except (ValueError, DSpineError) as error:
            raise invalid(str(error)) from error
        except IsADirectoryError as error:
            raise invalid("filename is a folder's") from error
        except OSError as error:
            raise ApiError(500, f"the file cannot be written or read: {error.strerror}") from error
        except Exception as error:
            raise from_exception(error) from error
        if done:
            return result
        await asyncio.sleep(_POLL_S)


def _file(state: ServerState, name: str | None) -> Path:
    """A file inside the folder of saved slots, whatever the name says."""
    folder = state.options.slot_save_path
    if folder is None:
        raise ApiError(501, "this server saves no slots: start it with --slot-save-path")
    if not name:
        raise invalid("filename is missing")
    odd = any(character in '/\\:*?"<>|' or not character.isprintable() for character in name)
    if odd or name.startswith(".") or name.endswith((".", " ")) or len(name.encode("utf-8")) > _MAX_NAME_BYTES:
        raise invalid("filename is not a plain file name")
    path = folder / name
    if path.resolve().parent != folder.resolve():
        raise invalid("filename leads out of the folder of saved slots")
    return path
