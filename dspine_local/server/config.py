"""What a server is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dspine_local.options import SamplingOptions

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_PING_S = 30


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of the server; those of the models are ``EngineOptions``.

    Args:
        model_path: Path of the target, told by ``/props``.
        drafter_path: Path of the drafter, None without one.
        aliases: Names that requests may call the model by, the first one is told; ``"*"`` allows any. None: its file
            name.
        api_keys: Any of these must come with a request; empty asks for none.
        slot_save_path: Folder of saved slots; None refuses to save and restore.
        loopback: Only this machine can reach the server: other host names in requests are then refused (web pages
            that rename themselves to it).
        endpoint_slots: Answer ``/slots``.
        endpoint_metrics: Answer ``/metrics``.
        max_body_bytes: Longer requests are refused.
        ping_interval_s: Seconds of silence after which a stream sends a comment; -1 never.
        n_predict: Tokens of an answer at most, for requests that do not say; -1 until the context is full.
        sampling: Defaults of requests that do not say.
    """

    model_path: str
    drafter_path: str | None = None
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    slot_save_path: Path | None = None
    loopback: bool = True
    endpoint_slots: bool = True
    endpoint_metrics: bool = True
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    ping_interval_s: int = DEFAULT_PING_S
    n_predict: int = -1
    sampling: SamplingOptions = field(default_factory=SamplingOptions)

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes = {self.max_body_bytes}, expected at least 1")
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            raise ValueError(f"slot_save_path = '{self.slot_save_path}', expected a folder that exists")
        if "" in self.api_keys:
            raise ValueError("an API key is empty, expected at least one character")

    @property
    def model_name(self) -> str:
        """The name under which the model is listed."""
        return next((name for name in self.aliases if name != "*"), Path(self.model_path).name)

    def knows_model(self, name: str) -> bool:
        """Whether a request may call the model so."""
        path = Path(self.model_path)
        return "*" in self.aliases or name in {*self.aliases, self.model_name, path.name, path.stem, str(path)}
