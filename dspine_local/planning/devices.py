"""How much memory this machine's devices have for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspine_local import _native
from dspine_local.planning.measure import CPU

# A device that `--vram` describes and this machine lacks.
ASSUMED = "assumed device"
MIB = 1 << 20
# For what drivers, displays and allocators take beside our buffers, and for what grows while the engine runs.
DEVICE_RESERVE = 512 * MIB
CPU_RESERVE = 256 * MIB


@dataclass(frozen=True)
class Budgets:
    """Bytes per device. ``assumed``: the device is described, not there."""

    sizes: Mapping[str, int]
    assumed: bool

    @property
    def reserve(self) -> dict[str, int]:
        """Bytes to leave free on each device."""
        return {device: CPU_RESERVE if device == CPU else DEVICE_RESERVE for device in self.sizes}


def memory_budgets(vram: int | None = None, ram: int | None = None) -> Budgets:
    """What the devices have.

    Args:
        vram: Bytes of every device beside the CPU, in place of what is free there; without one, of an assumed device.
        ram: Bytes of host memory, in place of what is available.
    """
    devices = {name: n_free for name, _, computes, n_free, _ in _native.devices() if computes}
    if vram is not None:
        devices = dict.fromkeys(devices or (ASSUMED,), vram)
    return Budgets({**devices, CPU: available_ram() if ram is None else ram}, ASSUMED in devices)


def available_ram() -> int:
    """Bytes of host memory that a new process can have: Linux's own estimate, elsewhere all there is."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return max(total for name, _, _, _, total in _native.devices() if name == CPU)
