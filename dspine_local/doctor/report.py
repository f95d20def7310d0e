"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from dspine_local.doctor.examine import Diagnosis, ModelGraphs

GIB = 1 << 30


def summary(diagnosis: Diagnosis) -> str:
    """Versions and machine, in two lines."""
    versions = ", ".join(f"{name} {number}" for name, number in diagnosis.versions.items())
    machine = f"{diagnosis.processor}, {diagnosis.n_cores} threads, {diagnosis.n_memory / GIB:.1f} GiB of memory"
    return f"{versions}\n{machine}; measurements are kept in '{diagnosis.cache_folder}'"


def device_table(diagnosis: Diagnosis) -> Table:
    """A row per device."""
    table = Table(title="Devices")
    table.add_column("name", no_wrap=True)
    table.add_column("description")
    for name in ("free GiB", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in diagnosis.devices:
        table.add_row(device.name, device.description, f"{device.n_free / GIB:.1f}", f"{device.n_total / GIB:.1f}")
    return table


def operation_table(diagnosis: Diagnosis) -> Table:
    """A row per operation and type, a column per device: how many nodes it would have to compute, or that it cannot."""
    names = [device.name for device in diagnosis.devices]
    table = Table(title="The drafter's operations: how many each device would run")
    table.add_column("operation", no_wrap=True)
    table.add_column("on", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for operation in diagnosis.graphs.operations:
        cells = [
            f"[red]{n} missing[/red]" if name in operation.unsupported else str(n)
            for name, n in ((name, operation.n_nodes.get(name, "")) for name in names)
        ]
        table.add_row(operation.name, operation.operand, *cells)
    return table


def graph_lines(graphs: ModelGraphs) -> Iterator[str]:
    """Where the graphs run, and in how many parts."""
    yield f"Drafter: {graphs.drafter}; on {graphs.drafter_device}, in one part."
    prompt, token = graphs.splits
    parts = f"{prompt} for a prompt, {token} for one token" if prompt >= 0 else "not told by this llama.cpp"
    target = "of the same shape" if graphs.target is None else graphs.target
    yield f"Target: {target}; parts of its graph (1: nothing moves between devices): {parts}."
