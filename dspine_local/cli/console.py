"""The console that commands print on."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class OutputConsole(Console):
    """Standard output; a reader that has left is the command's to handle, as everywhere else."""

    def __init__(self, *, soft_wrap: bool = False) -> None:
        super().__init__(highlight=False, soft_wrap=soft_wrap)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
