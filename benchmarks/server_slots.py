"""Tokens per second of a server with one slot and with several, plain and drafting, in one run.

    python benchmarks/server_slots.py -m target.gguf -md drafter.gguf [--slots 4] [--draft K]

Every setting answers the same prompts with as many streaming clients as it has slots; settings take turns, so that what
else the machine does hits all of them. The figure that counts is the ratio to one slot.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue

import httpx
from common import print_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from server_rig import RunningServer, serving

from dspine_local import Engine

PROMPTS = [
    f"Write {thing}."
    for thing in (
        "a short story about a lighthouse",
        "a recipe for bread",
        "three facts about the moon",
        "a letter to a friend",
        "a Python function that reverses a string",
        "an explanation of rainbows",
        "a dialogue between a cat and a dog",
        "a list of ten animals",
    )
]


def tokens_per_second(server: RunningServer, n_clients: int, n_tokens: int) -> float:
    """Of all clients together, prompts included."""
    prompts: SimpleQueue[str] = SimpleQueue()
    for prompt in PROMPTS:
        prompts.put(prompt)
    done: list[int] = []

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=600) as http:
            while True:
                try:
                    prompt = prompts.get_nowait()
                except Empty:
                    return
                body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": n_tokens}
                answer = http.post("/v1/chat/completions", json={**body, "cache_prompt": False}).json()
                done.append(answer["usage"]["completion_tokens"])

    begin = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--model-draft", required=True)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--draft", type=int, help="tokens drafted per round (default: chosen by measurement)")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=0)
    args = parser.parse_args()
    engines = {
        (n_slots, drafter is not None): Engine(
            args.model,
            drafter,
            n_ctx=1024 * n_slots,
            n_parallel=n_slots,
            n_threads=args.threads,
            n_draft=args.draft if drafter else None,
        )
        for n_slots in (1, args.slots)
        for drafter in (None, args.model_draft)
    }
    speeds: dict[tuple[int, bool], list[float]] = {key: [] for key in engines}
    drafted = dict.fromkeys(engines, 0)
    for _ in range(args.rounds):
        for key, engine in engines.items():
            with serving(engine, model_path=args.model) as server:
                speeds[key].append(tokens_per_second(server, key[0], args.tokens))
                drafted[key] += server.state.metrics.n_drafts
    print_environment()
    for drafting in (False, True):
        one, several = (sorted(speeds[n, drafting])[args.rounds // 2] for n in (1, args.slots))
        line = {"drafting": drafting, "one_slot": round(one, 1), f"{args.slots}_slots": round(several, 1)}
        line |= {
            "ratio": round(several / one, 2),
            "rounds_with_a_draft": [drafted[n, drafting] for n in (1, args.slots)],
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
