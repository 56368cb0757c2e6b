"""Small programs that run in a sandbox of any runtime: as Python for real ones, as a scripted server for the fake."""

from __future__ import annotations

import asyncio

from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.fake_pipe import FakePipe
from toolserver.runtime.fake_runtime import ScriptedServer
from toolserver.runtime.fake_server import Died
from toolserver.runtime.fake_workspace import FakeWorkspace

ECHO = """
import sys
for line in sys.stdin.buffer:
    while line:  # a pipe may take a part, as gVisor's do
        line = line[sys.stdout.buffer.write(line) :]
    sys.stdout.buffer.flush()
"""
EXIT_42 = "import sys; sys.exit(42)"
FLOOD = "import os\nwhile True: os.write(1, b'y' * 65536)"
DEAF = "import time\ntime.sleep(600)"
STDERR_FLOOD = "import os\nfor _ in range(1000): os.write(2, b'e' * 65536)\nos.write(1, b'done')"
EVERY_BYTE = "import os\nleft = bytes(range(256)) * 4096\nwhile left: left = left[os.write(1, left) :]"
UNDYING = """
import os, signal, time
for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
os.write(1, b'up')
time.sleep(600)
"""
REMEMBER = "open('/workspace/note', 'w').write('kept'); print('written', flush=True)"
RECALL = "print(open('/workspace/note').read(), flush=True)"


class _Scripted:
    def __init__(self, program: str, workspace: FakeWorkspace) -> None:
        self._program, self._workspace = program, workspace

    async def serve(self, stdin: FakePipe, stdout: FakePipe) -> None:
        if self._program == ECHO:
            while data := await stdin.read():
                await stdout.write(data)
        elif self._program == EXIT_42:
            raise Died("exited", 42)
        elif self._program == FLOOD:
            while await stdout.write(b"y" * 65536):
                pass
        elif self._program == STDERR_FLOOD:
            await stdout.write(b"done")
        elif self._program == EVERY_BYTE:
            await stdout.write(bytes(range(256)) * 4096)
        elif self._program == REMEMBER:
            self._workspace.write("note", b"kept")
            await stdout.write(b"written\n")
        elif self._program == RECALL:
            await stdout.write(self._workspace.read("note") + b"\n")
        else:
            if self._program == UNDYING:
                await stdout.write(b"up")
            await asyncio.Event().wait()


def scripted(spec: SandboxSpec, workspace: FakeWorkspace) -> ScriptedServer:
    return _Scripted(spec.command[-1], workspace)
