"""The proxy as a process: its descriptors, its bound of open files, its end."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

from sandbox_images.egress.control import serve
from sandbox_images.egress.vetting import Outside


def run(outside: Outside) -> int:
    """Never returns an unfinished thread: a name that is still being resolved does not hold the process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what a library prints is no message
    asyncio.run(serve(outside, stdin, stdout))
    sys.stderr.flush()
    os._exit(0)
