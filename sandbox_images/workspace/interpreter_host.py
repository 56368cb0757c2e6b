"""python_execute and python_reset: the queue in front of the one interpreter, and what is told when it ends."""

from __future__ import annotations

import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress

from sandbox_images.base import cgroup, processes
from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import Workspace
from sandbox_images.base.event_loop import Loop, Timer
from sandbox_images.workspace.artifacts import Artifacts
from sandbox_images.workspace.calls import STOPPED, Call, Calls, Ending
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.interpreter_process import InterpreterProcess
from sandbox_images.workspace.notebook import Notebook
from sandbox_images.workspace.process_figures import LastPid
from sandbox_images.workspace.quota import Quota
from sandbox_images.workspace.rich_output import RichOutput
from sandbox_images.workspace.shell_tools import limits_of, no_process

INTERRUPT_GRACE_S, EXIT_GRACE_S, REAP_S = 1.0, 0.5, 1.0
MAX_ATTEMPTS = 3  # at starting a call in an interpreter that dies before it begins
GONE = "All variables and imports are gone"
FRESH = "The interpreter was restarted ({why}): variables, functions and imports of earlier calls are gone."


class Running:
    """The call that the interpreter works on."""

    def __init__(self, host: InterpreterHost, call: Call, cell: int) -> None:
        self.host, self.call, self.cell = host, call, cell
        self.nonce = os.urandom(16).hex()
        self.rich = RichOutput(call, host.artifacts, cell)
        self.stopping: str | None = None
        self.began, self.killed = False, False
        self.cpu_before, self.cpu_after = 0.0, 0.0
        self.done: dict[str, Any] | None = None
        self.peak_bytes: int | None = None
        self.ladder: Timer | None = None

    def over_quota(self) -> None:
        self.host.stop(self, "disk_full")


class InterpreterHost:
    def __init__(
        self,
        *,
        loop: Loop, calls: Calls, family: Family, workspace: Workspace, quota: Quota, artifacts: Artifacts, notebook: Notebook
    ) -> None:  # fmt: skip
        self._loop, self._calls, self._family, self._workspace, self._quota = loop, calls, family, workspace, quota
        self.artifacts, self._notebook = artifacts, notebook
        self.environment: dict[str, str] = {}
        self.memory_bytes: int | None = None
        self._process: InterpreterProcess | None = None
        self._ready = False
        self._running: Running | None = None
        self._queue: deque[Call] = deque()
        self._cells, self._cells_here = 0, 0
        self._lost: str | None = None  # why the last interpreter ended, until a call has been told
        self._on_end: Callable[[int], None] | None = None
        self._reaped: Callable[[], None] | None = None
        self._last_pid, self._pid_before, self._file_limit = (
            LastPid(),
            0,
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )
        self._settling, self._attempts = False, 0

    # ---- the process

    def start(self) -> None:
        """Raises OSError when no process can be made."""
        process = InterpreterProcess(self._loop, self._on_output, self._on_frame, self._on_damage)
        self._file_limit = self._quota.file_size_limits()
        limits = {resource.RLIMIT_FSIZE: self._file_limit}
        if self.memory_bytes is not None and cgroup.oom_kills() is None:
            limits[resource.RLIMIT_DATA] = (self.memory_bytes, self.memory_bytes)  # nothing else bounds it here
        process.start(self.environment, self._workspace.fd, limits)
        self._process, self._ready, self._cells_here = process, False, 0
        self._family.add(process.pid, lambda status, _cpu: self._process_ended(process, status))

    def limit_memory(self, memory_mb: int | None) -> None:
        """For the interpreter that runs already and for those that follow."""
        self.memory_bytes = None if memory_mb is None else memory_mb << 20
        if self.memory_bytes is not None and cgroup.oom_kills() is None:
            self._limit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))

    def bind(self, environment: dict[str, str]) -> None:
        """The session's variables, for the interpreter that runs already and for those that follow."""
        before, self.environment = self.environment, environment
        changed = {name: value for name, value in environment.items() if before.get(name) != value}
        if self._process is not None:  # what code of the session has set itself stays
            self._process.send(
                {"kind": "bind", "env": changed, "gone": [name for name in before if name not in environment]}
            )

    def _limit(self, kind: int, values: tuple[int, int]) -> None:
        if self._process is None:
            return
        with suppress(OSError, ValueError):  # it has ended, or user code has lowered the bound itself
            resource.prlimit(self._process.pid, kind, values)

    def _on_output(self, name: str, data: bytes) -> None:
        output = self._running.call.output if self._running is not None else None
        if output is not None:
            output.feed(output.stdout if name == "stdout" else output.stderr, data)

    def _on_damage(self) -> None:
        """The channel is closed or damaged: this interpreter can't be used any more."""
        if self._process is not None:
            processes.send_signal(self._process.pid, signal.SIGKILL)

    def _on_frame(self, head: dict[str, Any], data: bytes) -> None:
        kind, running = head.get("kind"), self._running
        if kind == "ready":
            self._ready = True
        elif kind == "reaped" and self._reaped is not None:
            self._reaped()
        elif running is not None and head.get("nonce") == running.nonce:
            if kind == "display":
                self._process_output_first()
                running.rich.add(str(head.get("mime")), data, str(head.get("where")))
            elif kind == "done" and running.done is None and not running.killed:
                self._done(running, head)

    def _process_output_first(self) -> None:
        if self._process is not None:
            self._process.drain()

    # ---- calls

    def execute(self, call: Call) -> None:
        call.stop = lambda end: self._stop_waiting(call, end)
        self._queue.append(call)
        self._next()

    def _stop_waiting(self, call: Call, end: str) -> None:
        if call in self._queue:
            self._queue.remove(call)
            message = f"{STOPPED[end]} It was still waiting behind another Python call: nothing of it ran."
            self._calls.finish(call, Ending(end, message, state="kept"))

    def _next(self) -> None:
        while self._running is None and not self._settling and self._queue:
            call = self._queue.popleft()
            try:
                if self._process is None:
                    self.start()
            except OSError as problem:
                self._calls.finish(
                    call,
                    Ending(
                        "failed",
                        no_process(problem),
                        state="lost" if self._lost else "kept",
                        limits_hit=limits_of(problem),
                    ),
                )
                continue
            if call.tool == "python_reset":
                self._reset(call)
            else:
                self._run(call)

    def _run(self, call: Call) -> None:
        process = self._process
        assert process is not None
        self._cells += 1
        running = self._running = Running(self, call, self._cells)
        self._calls.new_output(call)
        call.stop = lambda end: self.stop(running, end)
        limit = self._quota.file_size_limits()
        if limit != self._file_limit:
            self._file_limit = limit
            self._limit(resource.RLIMIT_FSIZE, limit)
        self._quota.watch(running)
        self._pid_before = self._last_pid.read()
        running.cpu_before = process.figures.cpu_seconds() or 0.0
        process.figures.reset_peak()
        process.send({"kind": "run", "nonce": running.nonce, "cell": running.cell, "code": call.arguments["code"]})

    def _done(self, running: Running, head: dict[str, Any]) -> None:
        running.done = head
        process = self._process
        assert process is not None
        process.drain()
        running.cpu_after = process.figures.cpu_seconds() or running.cpu_before
        running.peak_bytes = process.figures.peak_bytes()
        self._note_begun(process)
        self._loop.start(self._settle(running))

    def _settle(self, running: Running) -> Generator[None, None, None]:
        """After the code has returned: end what it left behind, then answer."""
        notes: list[str] = []
        last, process = self._last_pid.read(), self._process
        # no new pid since the call began: nothing can be left over
        if process is not None and (last == 0 or last < process.pid or last != self._pid_before):
            ended, clean = yield from self._family.end_leftovers(process.pid)
            if ended:
                notes.append(f"{ended} processes that the code left behind were ended: they do not outlive their call.")
            if not clean:
                self._kill(running)
                return
            yield from self._reap()
        if self._running is running and self._process is process and process is not None and not running.killed:
            self._release(running)
            self._calls.finish(running.call, self._ending(running, notes))
            self._next()

    def _reap(self) -> Generator[None, None, None]:
        """Zombies of the interpreter hold pids: it takes them away itself."""
        process = self._process
        if process is None or not self._family.leftovers(process.pid)[1]:
            return
        state: list[bool] = []
        self._reaped = lambda: state.append(True)
        timer = self._loop.call_later(REAP_S, lambda: state.append(False))
        process.send({"kind": "reap"})
        while not state:
            yield
        timer.cancel()
        self._reaped = None

    def _release(self, running: Running) -> None:
        if running.ladder is not None:
            running.ladder.cancel()
        self._quota.unwatch(running)
        self._running = None

    def _ending(self, running: Running, notes: list[str]) -> Ending:
        done = running.done or {}
        ending = running.rich.ending(done)
        ending.state = "kept"
        fresh, self._lost = self._lost, None
        if fresh is not None:
            ending.notes.insert(0, FRESH.format(why=fresh))
        ending.notes += notes + [str(note) for note in done.get("notes") or []]
        ending.usage = {
            "cpu_ms": round((running.cpu_after - running.cpu_before) * 1000, 3),
            "memory_peak_bytes": running.peak_bytes,
        }
        if running.stopping is not None:
            ending.end = running.stopping
            ending.message = f"{STOPPED[running.stopping]} It was interrupted; the interpreter and its state are kept."
        if ending.end == "disk_full":
            self._quota.explain(ending, ending.message or "", file_too_large=done.get("file_too_large") is True)
        self._notebook.add(running.call.arguments["code"], running.cell, running.call, ending, running.rich.outputs)
        return ending

    # ---- ending early

    def stop(self, running: Running, end: str) -> None:
        """Interrupt; a second later kill."""
        if running.stopping is not None or self._process is None or self._running is not running:
            return
        running.stopping = end
        processes.send_signal(self._process.pid, signal.SIGINT)
        running.ladder = self._loop.call_later(INTERRUPT_GRACE_S, lambda: self._kill(running))

    def _kill(self, running: Running) -> None:
        if self._running is running and self._process is not None and not running.killed:
            running.killed = True
            pid = self._process.pid
            processes.kill_all(lambda: {pid, *self._family.leftovers(pid)[0]})

    def _note_begun(self, process: InterpreterProcess) -> None:
        if process.has_begun() and self._running is not None and not self._running.began:
            self._running.began, self._attempts = True, 0
            self._cells_here += 1

    def _process_ended(self, process: InterpreterProcess, status: int) -> None:
        if process is self._process:
            self._note_begun(process)
        process.close()
        if process is not self._process:
            return
        self._process = None
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(status)
            return
        self._settling = True
        processes.send_signal(-process.pid, signal.SIGKILL)  # its group, in one step: nothing in it forks on
        self._loop.start(self._after_death(status))

    def _after_death(self, status: int) -> Generator[None, None, None]:
        if not (yield from self._family.end_leftovers(None))[1]:
            self._family.end_everything()
            yield from self._family.end_leftovers(None)
        self._settling = False
        running = self._running
        code, name = processes.describe_end(status)
        how = f"killed by {name}" if name else f"it ended with exit code {code}"
        if running is not None and not running.began and running.stopping is None and self._attempts < MAX_ATTEMPTS:
            self._attempts += 1  # it was killed from elsewhere and nothing of this call ran: a fresh one takes it
            self._release(running)
            self._queue.appendleft(running.call)
            self._lost = how if self._cells_here else self._lost
        elif running is not None:
            self._release(running)
            ending = self._death(running, how, code, name)
            self._notebook.add(running.call.arguments["code"], running.cell, running.call, ending, running.rich.outputs)
            self._calls.finish(running.call, ending)
            self._lost = how if running.stopping is None else f"it had to be killed: {running.stopping}"
        elif self._cells_here:
            self._lost = how
        if self._ready or self._queue:
            with suppress(OSError):  # the next call tries again, and says why it can't
                self.start()
        self._next()

    def _death(self, running: Running, how: str, code: int | None, name: str | None) -> Ending:
        """The end of a call whose interpreter died; which one it was is read from counters, never guessed."""
        counters = running.call.counters
        if running.stopping is not None:
            end, message = (
                running.stopping,
                f"{STOPPED[running.stopping]} It did not react to an interrupt, so the interpreter was killed.",
            )
        elif running.killed:
            end, message = (
                "crashed",
                "Processes that the code kept starting could not be ended otherwise, so the interpreter was killed.",
            )
        elif name == "SIGKILL" and counters is not None and counters.out_of_memory():
            end, message = (
                "oom",
                "The sandbox ran out of memory and the system killed the interpreter. Use less memory at a time.",
            )
        else:
            end, message = "crashed", f"The interpreter died: {how}."
        message += f" {GONE}; the next call starts with a fresh interpreter."
        note = f"The interpreter's state is lost: {how}."
        facts = {"result": None, "exit_code": code, "signal": name}
        return Ending(
            end,
            message,
            structured=running.rich.structured | facts,
            state="lost",
            exit_code=code,
            signal=name,
            notes=[note],
        )

    # ---- python_reset

    def reset(self, call: Call) -> None:
        self.execute(call)

    def _reset(self, call: Call) -> None:
        """Ask it to end in order, so that open files are written out; kill it when it does not."""
        process = self._process
        assert process is not None
        self._settling = True
        timer = self._loop.call_later(EXIT_GRACE_S, lambda: processes.send_signal(process.pid, signal.SIGKILL))

        def ended(_status: int) -> None:
            timer.cancel()
            self._loop.start(self._after_reset(call))

        self._on_end = ended
        process.send({"kind": "exit"})

    def _after_reset(self, call: Call) -> Generator[None, None, None]:
        yield from self._family.end_leftovers(None)
        self._settling, self._lost = False, None
        text = "The interpreter is fresh: all variables and imports are gone, the files are still there."
        ending = Ending(content=[{"type": "text", "text": text}], state="lost")
        try:
            self.start()
        except OSError as problem:
            ending = Ending("failed", no_process(problem), state="lost", limits_hit=limits_of(problem))
        self._notebook.add_reset()
        self._calls.finish(call, ending)
        self._next()
