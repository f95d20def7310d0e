"""Second stage: what the target thought at every position. One float16 file per data shard, mapped when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dspine_local import _native
from dspine_local.errors import ModelFormatError
from dspine_local.files import need_regular
from dspine_local.train.data import Conversation, Report, complete_shards, read_shard, save_rows, shard_named
from dspine_local.train.shards import claim, read_json, write_json, write_whole
from dspine_local.train.torch_target import FLOAT16_MAX, TorchTarget, is_supported
from dspine_local.train.weights import TargetWeights

SCALES_FILE = "scales.json"
MIN_CONTEXT = 1024


@dataclass(frozen=True)
class Row:
    """A sequence and its features: float16 [n_tokens, n_taps * D] and the teacher's final hidden states [.., D]."""

    sequence: Conversation
    taps: npt.NDArray[np.float16]
    hidden: npt.NDArray[np.float16]


def feature_path(folder: Path, data_shard: Path) -> Path:
    """Where the features of a data shard are."""
    return folder / f"{data_shard.stem}.npy"


def default_taps(n_layers: int, n_taps: int = 5) -> list[int]:
    """Layer outputs spread over the target, from its second to its third last."""
    last = max(1, n_layers - 3)
    return sorted({round(1 + i * (last - 1) / max(1, n_taps - 1)) for i in range(n_taps)})


class FeatureReader:
    """A target that gives tapped features and final hidden states of whole sequences.

    Args:
        taps: Layer outputs to read, numbered from 0.
    Raises:
        PairingError: The target cannot be tapped there.
    """

    def __init__(self, target: Path, taps: Sequence[int], *, n_ctx: int = 1024, n_threads: int = 0) -> None:
        self.taps = list(taps)
        self._target = _native.Target(str(target), n_ctx=n_ctx, n_batch=n_ctx, n_threads=n_threads, hidden=True)
        self._target.enable_taps([tap + 1 for tap in taps])

    def read(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Tapped features [n, n_taps * D] and hidden states behind the output norm [n, D], float32."""
        self._target.truncate(0, 0)
        self._target.decode(0, list(tokens))
        taps = [self._target.taps(i, len(tokens)) for i in range(len(self.taps))]
        return np.concatenate(taps, axis=1), self._target.hidden(len(tokens))


def make_features(
    target: Path,
    data: Path,
    folder: Path,
    taps: Sequence[int],
    report: Report,
    *,
    n_threads: int = 0,
    device: str = "cpu",
    use_torch: bool | None = None,
) -> int:
    """Make the features of every data shard that has none; several processes may do so together.

    Args:
        use_torch: Compute them in PyTorch; None does so where that is possible, because it is faster.
    Returns:
        Shards with features.
    """
    reader: FeatureReader | TorchReader | None = None
    shards = complete_shards(data)
    n_vocab = TargetWeights(target).shape("token_embd.weight")[0]
    for i, shard in enumerate(shards):
        path = feature_path(folder, shard)
        report(i, len(shards), shard.stem)
        with claim(path) as mine:
            if mine and not path.exists():
                if reader is None:
                    longest = max(len(sequence.tokens) for part in shards for sequence in read_shard(part))
                    reader = _make_reader(target, taps, n_threads, device, use_torch, n_ctx=longest)
                write_whole(path, partial(_write, conversations=read_shard(shard, n_vocab), reader=reader))
        if not (folder / SCALES_FILE).exists() and path.exists():
            rms = tap_sizes(list(shard_rows(path, read_shard(shard, n_vocab), len(taps))), len(taps))
            write_json(folder / SCALES_FILE, {"taps": list(taps), "rms": rms})
    report(len(shards), len(shards), "")
    return len(shards)


def _make_reader(
    target: Path, taps: Sequence[int], n_threads: int, device: str, use_torch: bool | None, *, n_ctx: int
) -> FeatureReader | TorchReader:
    weights = TargetWeights(target)
    if use_torch or (use_torch is None and is_supported(weights)):
        if n_threads:
            torch.set_num_threads(n_threads)
        return TorchReader(TorchTarget(weights, device), taps)
    return FeatureReader(target, taps, n_ctx=max(MIN_CONTEXT, n_ctx), n_threads=n_threads)


class TorchReader:
    """The same as ``FeatureReader`` by the PyTorch forward, which does not round activations to 8 bits."""

    def __init__(self, target: TorchTarget, taps: Sequence[int]) -> None:
        self._target, self.taps = target, list(taps)

    def read(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Tapped features [n, n_taps * D] and hidden states behind the output norm [n, D], float32."""
        taps, hidden = self._target.read(torch.tensor([list(tokens)], device=self._target.device), self.taps)
        return taps[0].float().cpu().numpy(), hidden[0].float().cpu().numpy()


def _write(path: Path, conversations: Sequence[Conversation], reader: FeatureReader | TorchReader) -> None:
    parts = []
    for conversation in conversations:
        taps, hidden = reader.read(conversation.tokens)
        # The first token's activations are a thousand times the others', beyond float16 in some models.
        parts.append(np.clip(np.concatenate([taps, hidden], axis=1), -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16))
    save_rows(path, parts)


def tap_sizes(rows: Sequence[Row], n_taps: int) -> list[float]:
    """Root mean square of every tap over answer positions."""
    total, n_rows = np.zeros(n_taps), 0
    for row in rows:
        part = row.taps[row.sequence.answer_start : -1].astype(np.float64)
        total += (part.reshape(len(part), n_taps, -1) ** 2).mean(axis=2).sum(axis=0)
        n_rows += len(part)
    return [float(value) for value in np.sqrt(total / max(1, n_rows))]


def read_scales(folder: Path) -> tuple[list[int], list[float]]:
    """Taps of the features and each one's root mean square.

    Raises:
        ModelFormatError: The file says something else.
    """
    stored = read_json(folder / SCALES_FILE)
    taps, rms = stored.get("taps"), stored.get("rms")
    if not (
        isinstance(taps, list)
        and isinstance(rms, list)
        and len(taps) == len(rms) > 0
        and all(type(tap) is int for tap in taps)
        and all(isinstance(size, float) and size > 0 for size in rms)
    ):
        raise ModelFormatError(f"'{folder / SCALES_FILE}' is damaged: delete it to have it made again")
    return taps, rms


class FeatureSet:
    """Sequences with features, mapped from disk.

    Raises:
        FileNotFoundError: There are none.
    """

    def __init__(self, data: Path, folder: Path, shards: Sequence[str] | None = None) -> None:
        names = [p.stem for p in complete_shards(data) if feature_path(folder, p).exists()]
        self.shards = names if shards is None else list(shards)
        if not self.shards or not (folder / SCALES_FILE).exists():
            raise FileNotFoundError(f"no features in '{folder}', expected those of the features stage")
        self.taps, self.scales = read_scales(folder)
        self._rows: list[Row] = []
        for name in self.shards:
            rows = shard_rows(folder / f"{name}.npy", read_shard(shard_named(data, name)), len(self.taps))
            self._rows.extend(rows)

    @property
    def sequences(self) -> list[Conversation]:
        """All conversations, in the order of their numbers."""
        return [row.sequence for row in self._rows]

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Conversations with their features."""
        return [self._rows[index] for index in indices]


def shard_rows(path: Path, sequences: Sequence[Conversation], n_taps: int) -> Iterator[Row]:
    """The conversations of a shard with their features, mapped from disk.

    Raises:
        ModelFormatError: A damaged file, or the two do not belong together.
    """
    need_regular(path, "features")
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ModelFormatError(f"'{path}' is damaged ({error}): delete it to have it made again") from error
    n_tokens = sum(len(sequence.tokens) for sequence in sequences)
    if rows.ndim != 2 or rows.dtype != np.float16 or rows.shape[1] % (n_taps + 1):
        raise ModelFormatError(
            f"'{path}' holds {rows.dtype} of shape {list(rows.shape)}, expected float16 rows of {n_taps} taps and a "
            "hidden state: delete it to have it made again"
        )
    if len(rows) != n_tokens:
        raise ModelFormatError(
            f"'{path}' has {len(rows)} rows, its data has {n_tokens} tokens: delete it to have it made again"
        )
    width, first = n_taps * rows.shape[1] // (n_taps + 1), 0
    for sequence in sequences:
        part = rows[first : first + len(sequence.tokens)]
        yield Row(sequence, part[:, :width], part[:, width:])
        first += len(sequence.tokens)
