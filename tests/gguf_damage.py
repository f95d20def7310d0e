"""Seeded damage to a GGUF file, for tests that what is damaged is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf

NUMBERS = [0, 1, 2, 3, 7, 31, 32, 33, 64, 65, 127, 4096, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]


class Damage:
    """Seeded changes of a file's bytes: one method for each kind of change."""

    KINDS = ("bits", "noise", "cut", "shift", "type", "value", "value", "shape", "shape", "swap")

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.whole = path.read_bytes()
        self.n_header = reader.data_offset
        self.fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
        self.tensors = reader.tensors

    def make(self, seed: int) -> tuple[str, bytes]:
        self.rng = random.Random(seed)
        self.data = bytearray(self.whole)
        # Most damage goes to the header: there it does most.
        self.end = len(self.data) if self.rng.random() < 0.2 else self.n_header
        kind = self.rng.choice(self.KINDS)
        getattr(self, kind)()
        return kind, bytes(self.data)

    def bits(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self.data[self.rng.randrange(self.end)] ^= 1 << self.rng.randrange(8)

    def noise(self) -> None:
        at, n = self.rng.randrange(self.end - 64), self.rng.randint(1, 64)
        self.data[at : at + n] = self.rng.randbytes(n)

    def cut(self) -> None:
        del self.data[self.rng.randrange(self.end) :]

    def shift(self) -> None:
        """Bytes taken out or put in."""
        at, n = self.rng.randrange(self.end - 64), self.rng.randint(1, 64)
        if self.rng.random() < 0.5:
            del self.data[at : at + n]
        else:
            self.data[at:at] = self.rng.randbytes(n)

    def type(self) -> None:
        self.put("<I", self.type_of(self.rng.choice(self.fields)), self.rng.randrange(15))

    def value(self) -> None:
        """A number; of an array its element type and length, of a string its length."""
        at = self.type_of(self.rng.choice(self.fields)) + 4
        self.put(self.rng.choice(["<I", "<Q"]), at, self.rng.choice(NUMBERS))

    def shape(self) -> None:
        """Another number of dimensions, dimension, type or offset of a tensor."""
        tensor = self.rng.choice(self.tensors)
        n_dims = tensor.field.offset + 8 + len(tensor.name)
        type_at = n_dims + 4 + 8 * len(tensor.shape)
        at = self.rng.choice([n_dims, n_dims + 4, type_at - 8, type_at, type_at + 4])
        self.put("<I", at, self.rng.choice([*NUMBERS, *range(40)]))

    def swap(self) -> None:
        """Two tensors of equally long names trade them."""
        one = self.rng.choice(self.tensors)
        two = self.rng.choice([t for t in self.tensors if len(t.name) == len(one.name)])
        for tensor, name in ((one, two.name), (two, one.name)):
            at = tensor.field.offset + 8
            self.data[at : at + len(name)] = name.encode()

    def type_of(self, field: gguf.ReaderField) -> int:
        return int(field.offset) + 8 + len(field.name)

    def put(self, layout: str, at: int, value: int) -> None:
        struct.pack_into(layout, self.data, at, value)
