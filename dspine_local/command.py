"""The command's first lines, which import nothing large: from here on Ctrl-C ends it quietly, whatever it is doing."""

from __future__ import annotations

import os
import sys
from types import TracebackType

FAILED, INTERRUPTED, TERMINATED = 1, 130, 143


class Loading:
    """A block of imports. Ctrl-C there ends the process at once.

    An exception inside an import would leave the modules half made, and extension modules turn it into other errors.
    """

    def __enter__(self) -> None:
        import signal

        self._replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._replaced:
            try:
                signal.signal(signal.SIGINT, _end)
            except ValueError:  # not the main thread, which is the one that is interrupted
                self._replaced = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import signal

        if self._replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    """The command ``dspine-local``; its exit code."""
    try:
        with Loading():
            from dspine_local import cli

            cli.load_commands()
        import signal

        # As Ctrl-C does, `kill` and the stop of a container leave nothing half-written.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        code = cli.main()
        # Nothing is left to be done: a late Ctrl-C may end the interpreter's own end.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        _end()
    except ImportError as error:
        print(f"dspine-local: {error}", file=sys.stderr)
        return FAILED
    return code


def _end(*_: object) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)
