"""shell_execute, shell_read, shell_write, shell_kill."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Generator

from sandbox_images.base import processes
from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import FOLDER, Workspace, clean, explain
from sandbox_images.base.event_loop import Loop
from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.workspace.artifacts import Artifacts
from sandbox_images.workspace.calls import REFUSAL_ENDS, STOPPED, Call, Calls, Ending, ToolFailure, output_blocks
from sandbox_images.workspace.command_runner import Report
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.output import Output
from sandbox_images.workspace.quota import Quota
from sandbox_images.workspace.shell_command import Command

MAX_RUNNING, MAX_REMEMBERED = 32, 64
JOB_TEXT_BYTES = 65_536
TOO_LARGE = (
    128 + signal.SIGXFSZ,
    b"File size limit exceeded",
)  # what bash says of a child that the kernel ended for that


class Job:
    """A background command. It is `running` until its command line has ended; what that left behind may live on."""

    def __init__(self, job_id: str, command: Command, line: str) -> None:
        self.job_id, self.command, self.line = job_id, command, line
        self.started = time.monotonic()
        self.running, self.runner_alive = True, True
        self.exit_code: int | None = None
        self.signal: str | None = None
        self.cause: str | None = None
        self.waiters: list[Callable[[], None]] = []

    def over_quota(self) -> None:
        self.command.stop("disk_full")

    def wake(self) -> None:
        for waiter in self.waiters[:]:
            waiter()

    def describe(self) -> str:
        if self.running:
            return f"{self.job_id} is running."
        how = f"was ended by {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"
        why = f" It was stopped: {STOPPED[self.cause]}" if self.cause in STOPPED and self.cause != "cancelled" else ""
        rest = " Processes that it left behind still run; shell_kill ends them." if self.runner_alive else ""
        return f"{self.job_id} {how}.{why}{rest}"

    def facts(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "running": self.running, "exit_code": self.exit_code, "signal": self.signal}


class Foreground:
    """A shell_execute call while it runs."""

    def __init__(self, call: Call, command: Command) -> None:
        self.call, self.command = call, command

    def over_quota(self) -> None:
        self.command.stop("disk_full")


class ShellTools:
    def __init__(
        self, *, loop: Loop, calls: Calls, family: Family, workspace: Workspace, quota: Quota, artifacts: Artifacts
    ) -> None:
        self._loop, self._calls, self._family = loop, calls, family
        self._workspace, self._quota, self._artifacts = workspace, quota, artifacts
        self.environment: dict[str, str] = {}
        self._jobs: dict[str, Job] = {}
        self._count = 0

    # ---- shell_execute

    def execute(self, call: Call) -> None:
        arguments = call.arguments
        if arguments.get("background"):
            self._execute_in_background(call)
            return
        command = Command(
            self._loop, self._calls.new_output(call), lambda report: self._foreground_ended(running, report)
        )
        running = Foreground(call, command)
        stdin = _input_file(arguments.get("stdin") or "")
        try:
            self._launch(command, arguments, stdin, background=False)
        finally:
            os.close(stdin)
        call.stop = command.stop
        self._family.add(command.runner, lambda _status, _cpu: command.runner_gone())
        self._quota.watch(running)

    def _launch(self, command: Command, arguments: dict[str, Any], stdin: int | None, *, background: bool) -> None:
        """Raises ToolFailure, ProtocolError."""
        line = arguments["command"]
        if "\x00" in line:
            raise ToolFailure("A command line can't hold a NUL character.", "invalid", "/command")
        try:
            line.encode()
        except UnicodeEncodeError:
            raise ToolFailure(
                "The command line holds a lone surrogate, which is no text.", "invalid", "/command"
            ) from None
        cwd = self._folder(arguments.get("cwd") or ".")
        try:
            command.launch(line, self.environment, cwd, stdin, self._quota.file_size_limits(), background=background)
        except OSError as problem:
            raise ToolFailure(no_process(problem), limits_hit=limits_of(problem)) from problem
        finally:
            os.close(cwd)

    def _folder(self, path: str) -> int:
        """An open folder, for the caller to close. Raises ToolFailure."""
        try:
            folder = clean(path)
            return self._workspace.open(folder, FOLDER)
        except ProtocolError as refused:
            told = refused
        except OSError as problem:
            if problem.errno == errno.ENOTDIR:
                raise ToolFailure(f"{folder} is not a folder.", "invalid", "/cwd") from problem
            told = explain(problem, folder)
        raise ToolFailure(told.message, REFUSAL_ENDS.get(told.kind or "", "invalid"), "/cwd") from told

    def _foreground_ended(self, running: Foreground, report: Report | None) -> None:
        call, command = running.call, running.command
        command.close()
        self._quota.unwatch(running)
        if report is None:
            self._loop.start(self._runner_died(call, command))
        elif not report.adopts and not any(job.runner_alive for job in self._jobs.values()):
            self._loop.start(self._strays_end(call, command, report))
        else:
            self._calls.finish(call, self._ending(call, command, report))

    def _strays_end(self, call: Call, command: Command, report: Report) -> Generator[None, None, None]:
        """The command's orphans are the worker's."""
        report.ended += (yield from self._family.end_leftovers(None))[0]
        self._calls.finish(call, self._ending(call, command, report))

    def _runner_died(self, call: Call, command: Command) -> Generator[None, None, None]:
        """The command's supervisor was killed by the command: its processes are strays now."""
        yield from self._family.end_leftovers(None)
        end = command.stopping or "crashed"
        message = STOPPED.get(
            end, "The command killed the process that supervises it, and was ended with all its children."
        )
        self._calls.finish(
            call, Ending(end, message, signal="SIGKILL", structured={"exit_code": None, "signal": "SIGKILL"})
        )

    def _ending(self, call: Call, command: Command, report: Report) -> Ending:
        if report.status == -1:
            none = OSError(errno.EAGAIN, "")
            return Ending("failed", no_process(none), limits_hit=limits_of(none))
        exit_code, signal_name = processes.describe_end(report.status)
        shell_code = exit_code if exit_code is not None else 128 + (report.status & 0x7F)
        ending = Ending(
            structured={"exit_code": shell_code, "signal": signal_name},
            exit_code=shell_code,
            signal=signal_name,
            usage={"cpu_ms": report.cpu_ms, "memory_peak_bytes": report.peak_bytes},
        )
        if report.ended and not command.stopping:
            ending.notes.append(f"{report.ended} processes that the command left behind were ended.")
        if command.stopping is not None:
            ending.end, ending.message = command.stopping, STOPPED[command.stopping]
            ending.structured, ending.exit_code = {"exit_code": None, "signal": signal_name}, None
        elif shell_code and call.counters is not None and call.counters.out_of_memory():
            ending.end = "oom"
            ending.message = "The sandbox ran out of memory and the system killed a process of the command. Use less memory at a time."
        elif signal_name == "SIGXFSZ" or (shell_code == TOO_LARGE[0] and command.output.stderr.holds(TOO_LARGE[1])):
            ending.end = "disk_full"
            ending.message = "The command wrote more than the workspace may hold. Delete files, then try again."
            self._quota.explain(ending, "Write less, or in parts.", file_too_large=True)
        elif signal_name is not None:
            ending.end, ending.message = "crashed", f"The command was ended by {signal_name} (exit code {shell_code})."
        elif shell_code:
            ending.end, ending.message = "failed", f"The command ended with exit code {shell_code}."
            if full := self._quota.full_disks():
                ending.notes.append(f"{' and '.join(full)} has no room left: delete files there.")
        return ending

    # ---- background jobs

    def _execute_in_background(self, call: Call) -> None:
        if call.arguments.get("stdin"):
            raise ToolFailure("stdin can't be given to a background job: use shell_write.", "invalid", "/stdin")
        if sum(job.runner_alive for job in self._jobs.values()) >= MAX_RUNNING:
            raise ToolFailure(f"{MAX_RUNNING} background jobs are running already: end one with shell_kill first.")
        self._count += 1
        job_id = f"job-{self._count}"
        command = Command(self._loop, self._new_log(job_id), lambda report: self._job_ended(job, report))
        job = Job(job_id, command, call.arguments["command"])
        command.on_output = job.wake
        self._launch(command, call.arguments, None, background=True)
        self._family.add(command.runner, lambda status, _cpu: self._runner_ended(job, status))
        self._quota.watch(job)
        self._jobs[job_id] = job
        self._forget_old()
        text = f"Started in the background as {job_id}. shell_read shows its output, shell_kill ends it."
        self._calls.finish(call, Ending(content=[{"type": "text", "text": text}], structured=job.facts()))

    def _new_log(self, job_id: str) -> Output:
        return Output(JOB_TEXT_BYTES, self._artifacts.spool(job_id))

    def _forget_old(self) -> None:
        for job_id in list(self._jobs):
            if len(self._jobs) <= MAX_REMEMBERED:
                return
            if not self._jobs[job_id].runner_alive:
                del self._jobs[job_id]

    def _job_ended(self, job: Job, report: Report | None) -> None:
        """The command line itself has ended."""
        job.running = False
        job.cause = job.command.stopping
        if report is None:
            job.signal = "SIGKILL"
        else:
            job.exit_code, job.signal = processes.describe_end(report.status)
        job.command.drain()
        job.command.close_stdin()
        job.wake()

    def _runner_ended(self, job: Job, _status: int) -> None:
        """Nothing that the job started lives any more."""
        job.runner_alive = False
        job.command.runner_gone()
        job.command.close()
        job.command.output.spool.close()
        self._quota.unwatch(job)
        job.wake()

    def _job(self, call: Call) -> Job:
        job = self._jobs.get(call.arguments["job_id"])
        if job is None:
            known = ", ".join(list(self._jobs)[-10:]) or "none"
            raise ToolFailure(f"There is no background job {call.arguments['job_id'][:64]}. Known jobs: {known}.")
        return job

    def read(self, call: Call) -> None:
        job = self._job(call)
        wait_s = call.arguments.get("wait_s") or 0
        if not wait_s or not job.running or job.command.output.total:
            self._answer_read(call, job)
            return

        def settle() -> None:
            if waiter in job.waiters:
                job.waiters.remove(waiter)
                timer.cancel()

        def waiter() -> None:
            settle()
            if not call.ended:
                self._answer_read(call, job)

        def stop(end: str) -> None:
            settle()
            self._calls.finish(call, Ending(end, STOPPED[end]))

        job.waiters.append(waiter)
        timer = self._loop.call_later(wait_s, waiter)
        call.stop = stop

    def _answer_read(self, call: Call, job: Job) -> None:
        output = job.command.output
        output.limit = min(output.limit, call.max_text)
        blocks, streams, truncated = output_blocks(output)
        fresh = Output(JOB_TEXT_BYTES, output.spool)
        job.command.output = fresh
        log = {"log": output.spool.path, "log_incomplete": output.spool.incomplete} if output.spool.path else {}
        blocks.append({"type": "text", "text": f"[{job.describe()}]"})
        ending = Ending(content=blocks, structured={**streams, **job.facts(), **log})
        ending.truncated = truncated
        self._calls.finish(call, ending)

    def write(self, call: Call) -> None:
        job = self._job(call)
        if not job.running:
            raise ToolFailure(f"Nothing was written: {job.describe()}")
        data = call.arguments["input"].encode("utf-8", "surrogatepass")
        job.command.write(data, eof=bool(call.arguments.get("eof")))
        text = f"{len(data)} bytes written to {job.job_id}."
        self._calls.finish(call, Ending(content=[{"type": "text", "text": text}], structured=job.facts()))

    def kill(self, call: Call) -> None:
        job = self._job(call)

        def waiter() -> None:
            if job.runner_alive:
                return
            job.waiters.remove(waiter)
            text = [{"type": "text", "text": job.describe()}]
            self._calls.finish(call, Ending(content=text, structured=job.facts()))

        job.waiters.append(waiter)
        if job.runner_alive:
            job.command.stop("cancelled", force=bool(call.arguments.get("force")))
        waiter_is_due = not job.runner_alive
        if waiter_is_due:
            waiter()


def _input_file(text: str) -> int:
    """A descriptor that reads `text` and then ends."""
    if not text:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(fd, data) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def no_process(problem: OSError) -> str:
    if problem.errno == errno.EAGAIN:
        return (
            "No process could be started: the session's limit of processes and threads is used up. "
            "End background jobs with shell_kill, or the interpreter's threads with python_reset."
        )
    return f"No process could be started: {problem.strerror}."


def limits_of(problem: OSError) -> tuple[str, ...]:
    return ("pids",) if problem.errno == errno.EAGAIN else ()
