"""Runs in the environment of one rival: `python drive.py MODULE IMAGE QUICK`. Prints its figures as one line of JSON.

Only the standard library, and the module's class `Rival`: `create() -> handle`, `run(handle, code) -> text`,
`close(handle)`, `container(handle) -> id or None`, `finish()`. The same work for all of them, `print(1+1)`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

CODE = "print(1+1)"
SESSIONS = 8


class Loop:
    """An event loop in a thread of its own, for rivals that are asynchronous."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(180)


def milliseconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1000


def checked(rival: Any, handle: Any) -> None:
    if "2" not in (said := rival.run(handle, CODE)):
        raise RuntimeError(f"not the result of {CODE}: {said[-300:]!r}")


def measure(rival: Any, quick: bool) -> dict[str, float | None]:
    def whole(_: int = 0) -> None:
        handle = rival.create()
        try:
            checked(rival, handle)
        finally:
            rival.close(handle)

    def first() -> float:
        begun = time.perf_counter()
        handle = rival.create()
        try:
            checked(rival, handle)
            return (time.perf_counter() - begun) * 1000
        finally:
            rival.close(handle)

    whole()  # what is done once, such as imports
    cold = statistics.median(first() for _ in range(2 if quick else 5))
    handle = rival.create()
    try:
        for _ in range(5):
            checked(rival, handle)
        warm = statistics.median(milliseconds(lambda: checked(rival, handle)) for _ in range(20 if quick else 100))
        time.sleep(1)
        memory = idle_mib(rival.container(handle))
    finally:
        rival.close(handle)
    count = 4 if quick else 12
    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(whole, range(count)))
    created = count / (time.perf_counter() - begun)
    return {
        "cold_ms": cold,
        "warm_ms": warm,
        "calls_per_s": throughput(rival, 2.0 if quick else 6.0),
        "created_per_s": created,
        "idle_mib": memory,
    }


def throughput(rival: Any, seconds: float) -> float:
    """Calls a second of 8 sessions with a thread each."""
    with ThreadPoolExecutor(SESSIONS) as pool:
        starts = [pool.submit(rival.create) for _ in range(SESSIONS)]
        wait(starts)
        handles = [start.result() for start in starts if start.exception() is None]
        try:
            for start in starts:
                start.result()  # raises what one of them raised
            list(pool.map(lambda handle: checked(rival, handle), handles))

            def work(handle: Any) -> int:
                done, until = 0, time.monotonic() + seconds
                while time.monotonic() < until:
                    checked(rival, handle)
                    done += 1
                return done

            begun = time.monotonic()
            return sum(pool.map(work, handles)) / (time.monotonic() - begun)
        finally:
            list(pool.map(rival.close, handles))


def idle_mib(container: str | None) -> float | None:
    """Of the container's cgroup, without inactive file pages."""
    if container is None:
        return None
    docker = importlib.import_module("docker")  # not every rival's environment has it
    usage = docker.from_env().api.stats(container, stream=False)["memory_stats"]
    inactive = usage["stats"].get("total_inactive_file", usage["stats"].get("inactive_file", 0))
    return float(usage["usage"] - inactive) / (1 << 20)


def main() -> None:
    module, image, quick = sys.argv[1:4]
    rival = importlib.import_module(module).Rival(image)
    try:
        figures = measure(rival, quick == "quick")
    finally:
        rival.finish()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
