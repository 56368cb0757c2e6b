"""What makes `agent mock` a good child process: it says when it answers, and ends with who started it."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path


def tell_ready(url: str, ready_file: Path | None) -> None:
    """Print the address, and put {"url", "pid"} into `ready_file` in one step."""
    print(f"The scripted model answers at {url}", flush=True)  # noqa: T201 - the command's output
    if ready_file is not None:
        part = ready_file.with_name(f".{ready_file.name}.part")
        part.write_text(json.dumps({"url": url, "pid": os.getpid()}), "utf-8")
        part.replace(ready_file)


def end_with_standard_input() -> None:
    """From now on the process ends when its standard input closes: a parent that is killed leaves nothing behind."""

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
