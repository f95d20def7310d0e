"""The interleaved run: every system answers every prompt, in an order that turns by one each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspine_local.bench.simulation import SimulatedEngine
from dspine_local.bench.systems import Answer, System, Task
from dspine_local.engine import Engine
from dspine_local.evaluation.prompts import Prompt
from dspine_local.progress import Report


@dataclass(frozen=True)
class Measurement:
    """One answer of one system; ``task`` is the prompt's index."""

    system: str
    task: int
    repetition: int
    answer: Answer


def make_tasks(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[Task]:
    """The prompts as chats of one message: the first of their turns.

    Raises:
        ValueError: Two are the same, or one does not fit the context with its answer.
    """
    seen: dict[str, int] = {}
    tasks = []
    for number, prompt in enumerate(prompts, start=1):
        text = prompt.turns[0]
        first = seen.setdefault(text, number)
        if first != number:
            raise ValueError(
                f"prompts {first} and {number} are the same ({text[:40]!r}), expected different ones: a repeated one "
                "counts double, and is easy for whoever remembers its answer"
            )
        tokens = tuple(engine.tokenizer.encode_chat([{"role": "user", "content": text}]))
        if len(tokens) + max_tokens > engine.n_ctx:
            raise ValueError(
                f"prompt {number} ({text[:40]!r}) has {len(tokens)} tokens, with {max_tokens} of the answer more than "
                f"the context of {engine.n_ctx}: give a larger -c or a smaller -n"
            )
        tasks.append(Task(prompt.category, text, tokens))
    return tasks


def schedule(n_systems: int, n_tasks: int, n_repetitions: int) -> list[tuple[int, int, int]]:
    """Repetition, task and system of every answer: all systems answer a task before the next one comes.

    The order turns by one from task to task and from repetition to repetition, so that each system is first, second
    and last about equally often, and for each prompt.
    """
    return [
        (repetition, task, (repetition + task + turn) % n_systems)
        for repetition in range(n_repetitions)
        for task in range(n_tasks)
        for turn in range(n_systems)
    ]


def run_systems(
    systems: Sequence[System],
    tasks: Sequence[Task],
    *,
    n_repetitions: int,
    max_tokens: int,
    simulated: SimulatedEngine | None = None,
    report: Report = lambda _done, _total, _label: None,
) -> list[Measurement]:
    """Measure, after one answer of each system that does not count.

    Args:
        simulated: The engine that has to find each answer before.
    """
    order = schedule(len(systems), len(tasks), n_repetitions)
    n_before = len(systems) + (len(tasks) if simulated is not None else 0)
    n_done = 0

    def step(label: str) -> None:
        nonlocal n_done
        n_done += 1
        report(n_done, n_before + len(order), label)

    if simulated is not None:
        for task in tasks:
            simulated.learn(task.tokens, max_tokens)
            step("finding the answers")
    for system in systems:
        system.answer(tasks[0])
        step("warming up")
    measurements = []
    for repetition, index, turn in order:
        system = systems[turn]
        measurements.append(Measurement(system.name, index, repetition, system.answer(tasks[index])))
        step(f"{tasks[index].category}, {system.name}")
    return measurements
