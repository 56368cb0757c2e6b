"""The interpreter that runs user code: a process of its own, started as `python3 -I interpreter.py FD BEGAN`.

It gets cells over the private descriptor FD and answers there; the worker's protocol stream is out of its reach. User
code runs in this very process and can break all of it: so everything used between cells is bound early, and what a cell
may have replaced or closed is put back before the next.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, at several times its cost
import builtins
import fcntl
import io
import json
import operator
import os
import signal
import struct
import sys
import types
from collections.abc import Callable

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))
from sandbox_images.base.annotations import Any  # noqa: E402 - the folder is put on the path just above
from sandbox_images.workspace.cell import CellRunner  # noqa: E402
from sandbox_images.workspace.display import Displays  # noqa: E402
from sandbox_images.workspace.startup.sitecustomize import show_told  # noqa: E402

del sys.path[0]

HEADER = struct.Struct(">II")  # bytes of JSON, bytes of data after it
MAX_DATA_BYTES = 16 << 20
SIGINT, BLOCK, SET_MASK = int(signal.SIGINT), int(signal.SIG_BLOCK), int(signal.SIG_SETMASK)
INTERRUPT = frozenset((SIGINT,))
USUAL_HANDLERS = {"ProxyHandler", "UnknownHandler", "HTTPHandler", "HTTPSHandler", "HTTPDefaultErrorHandler", "HTTPRedirectHandler",
                  "FTPHandler", "FileHandler", "DataHandler", "HTTPErrorProcessor"}  # fmt: skip


class Control:
    """The private channel to the worker. Reads block; a frame is never cut by an interrupt."""

    def __init__(self, fd: int, began: int) -> None:
        # high up, where a loop that closes descriptors seldom comes
        high = max(3, min(os.sysconf("SC_OPEN_MAX"), 1024) - 9)
        self.fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
        self._began = fcntl.fcntl(began, fcntl.F_DUPFD_CLOEXEC, high)
        os.close(fd)
        os.close(began)
        self._owner = os.getpid()
        self._read, self._write, self._getpid = os.read, os.write, os.getpid
        self._mask, self._encode, self._decode = (
            _signal.pthread_sigmask,
            json.JSONEncoder().encode,
            json.JSONDecoder().decode,
        )
        self.nonce = ""

    @property
    def ours(self) -> bool:
        """False in a process that user code has forked."""
        return self._getpid() == self._owner

    def send(self, kind: str, fields: dict[str, Any], data: bytes = b"") -> None:
        if not self.ours:
            return
        head = self._encode({"kind": kind, "nonce": self.nonce, **fields}).encode()
        frame = memoryview(HEADER.pack(len(head), len(data)) + head + data)
        before = self._mask(BLOCK, INTERRUPT)
        try:
            while frame:
                frame = frame[self._write(self.fd, frame) :]
        finally:
            self._mask(SET_MASK, before)

    def begin(self) -> None:
        """Say that the code begins to run. Raises OSError when that can't be said: then it must not run."""
        self._write(self._began, b".")

    def receive(self) -> dict[str, Any]:
        """Raises EOFError when the worker is gone."""
        head_bytes, data_bytes = HEADER.unpack(self._exactly(HEADER.size))
        message: dict[str, Any] = self._decode(self._exactly(head_bytes).decode())
        self._exactly(data_bytes)
        return message

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            data = self._read(self.fd, min(count, 1 << 20))
            if not data:
                raise EOFError
            parts.append(data)
            count -= len(data)
        return b"".join(parts)


class Surroundings:
    """What a cell may replace or close, and how it is put back."""

    def __init__(self) -> None:
        self._streams: dict[str, io.TextIOWrapper] = {}
        high = max(3, min(os.sysconf("SC_OPEN_MAX"), 1024) - 6)
        self._copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for fd in (0, 1, 2)]
        self._fstat, self._dup2 = os.fstat, os.dup2
        self._marks = [self._mark(fd) for fd in (0, 1, 2)]
        self._builtins = dict(builtins.__dict__)
        self._modules = {name: module for name, module in sys.modules.items() if name != "__main__"}
        self._is, self._all, self._map = operator.is_, all, map

    def _mark(self, fd: int) -> tuple[int, int] | None:
        try:
            info = self._fstat(fd)
        except OSError:
            return None
        return info.st_dev, info.st_ino

    def _restore_descriptors(self) -> None:
        for fd, (copy, mark) in enumerate(zip(self._copies, self._marks, strict=True)):
            if self._mark(fd) != mark:
                self._dup2(copy, fd)

    def _same(self, now: dict[str, Any], before: dict[str, Any]) -> bool:
        """Whether each name still means the very same thing."""
        return self._all(self._map(self._is, self._map(now.get, before), before.values()))

    def restore(self) -> list[str]:
        """Put everything back; notes on what user code had replaced."""
        self._restore_descriptors()
        changed: list[str] = []
        if not self._same(builtins.__dict__, self._builtins):
            changed = [name for name, value in self._builtins.items() if builtins.__dict__.get(name) is not value]
        for name in changed:
            builtins.__dict__[name] = self._builtins[name]
        for name, module in () if self._same(sys.modules, self._modules) else self._modules.items():
            now = sys.modules.get(name, module)
            if now is not module and not (isinstance(now, types.ModuleType) and getattr(now, "__spec__", None)):
                sys.modules[name] = module
                changed.append(f"sys.modules[{name!r}]")
        for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            self._restore_stream(name, fd)
        return [f"{', '.join(sorted(changed))} had been replaced and was put back."] if changed else []

    def _restore_stream(self, name: str, fd: int) -> None:
        stream = self._streams.get(name)
        if stream is None or stream.closed:
            mode, errors = ("r", "strict") if fd == 0 else ("w", "backslashreplace" if fd == 2 else "strict")
            raw = open(fd, mode + "b", closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=fd > 0)
            self._streams[name] = stream
        sys.__dict__[name] = stream
        sys.__dict__[f"__{name}__"] = stream

    def flush(self) -> None:
        """Write out what the streams hold, also when user code has closed their descriptors."""
        self._restore_descriptors()
        for name in ("stdout", "stderr"):
            for stream in (sys.__dict__.get(name), self._streams.get(name)):
                try:
                    stream.flush()  # type: ignore[union-attr]
                except Exception:
                    continue


class Interpreter:
    def __init__(self, control: Control) -> None:
        self.control = control
        self.displays = Displays(self._send_display)
        builtins.display = self.displays.display  # type: ignore[attr-defined]
        self.surroundings = Surroundings()
        self.surroundings.restore()
        os.register_at_fork(before=self.surroundings.flush)
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        self._own_main, sys.modules["__main__"] = sys.modules["__main__"], main
        self.runner = CellRunner(main.__dict__, HERE)
        self._default, self._signal = signal.default_int_handler, _signal.signal

    def _send_display(self, mime: str, data: bytes, where: str) -> None:
        if len(data) > MAX_DATA_BYTES:
            text = f"[{mime} of {len(data)} bytes is too large to show: write it to a file]"
            self.control.send("display", {"mime": "text/plain", "where": where}, text.encode())
        else:
            self.control.send("display", {"mime": mime, "where": where}, data)

    def serve(self) -> None:
        handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "bind": self._bind,
            "run": self._run,
            "reap": self._reap,
        }
        self.control.send("ready", {})
        while True:
            message = self.control.receive()
            if message["kind"] == "exit":
                return
            handlers[message["kind"]](message)

    def _bind(self, message: dict[str, Any]) -> None:
        for name in message["gone"]:
            os.environ.pop(name, None)
        os.environ.update(message["env"])
        _forget_opener()
        show_told(os.environ)

    def _run(self, message: dict[str, Any]) -> None:
        self.control.nonce = message["nonce"]
        notes = self.surroundings.restore()
        self.control.begin()
        self._signal(SIGINT, self._default)
        try:
            outcome = self.runner.run(message["code"], message["cell"], self.displays)
        except KeyboardInterrupt:
            outcome = {"status": "interrupted"}
        finally:
            self._quiet()
        if not self.control.ours:
            self._end_forked_child(outcome)
        self.surroundings.flush()
        self.control.send("done", {**outcome, "notes": notes})

    def _quiet(self) -> None:
        """No interrupt from here on: it came too late to stop anything."""
        while True:
            try:
                self._signal(SIGINT, lambda _signum, _frame: None)
                return
            except KeyboardInterrupt:
                continue

    def _end_forked_child(self, outcome: dict[str, Any]) -> None:
        """A child that user code forked has run off the end of the cell: it must not go on as a second interpreter."""
        error = outcome.get("error")
        if error:
            sys.stderr.write(error["traceback"] + "\n")
        self.surroundings.flush()
        os._exit(1 if error else int(outcome.get("code") or 0) & 0xFF)

    def _reap(self, _message: dict[str, Any]) -> None:
        """Left-over children were ended: take their zombies away, and tell the Popen objects that wait for them."""
        ended: dict[int, int] = {}
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            pass
        subprocess = sys.modules.get("subprocess")
        if subprocess is not None and ended:
            import gc  # noqa: PLC0415 - seldom needed

            for thing in gc.get_objects():
                if type(thing) is subprocess.Popen and thing.returncode is None and thing.pid in ended:
                    thing.returncode = ended[thing.pid]
        self.control.send("reaped", {})


def _forget_opener() -> None:
    """What urlopen made for itself of an earlier environment knows other proxies; one that code has installed stays."""
    try:
        request: Any = sys.modules.get("urllib.request")
        if request is not None and {type(one).__name__ for one in request._opener.handlers} <= USUAL_HANDLERS:  # noqa: SLF001
            request._opener = None  # noqa: SLF001 - there is no other way
    except Exception:
        return  # there is none, or code has put something else there


def main() -> None:
    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    control = Control(int(sys.argv[1]), int(sys.argv[2]))
    workspace = os.getcwd()
    sys.argv = [""]
    sys.path.append(workspace)  # after the standard library: a workspace's json.py must not take its place
    try:
        Interpreter(control).serve()
    except (EOFError, OSError):
        os._exit(0)  # the worker is gone, or user code has closed the channel


if __name__ == "__main__":
    main()
