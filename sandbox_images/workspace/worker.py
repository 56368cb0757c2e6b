"""The worker of the `workspace` image: PID 1 of its sandbox, an MCP server on stdio that also speaks `toolcrib/worker`.

    python3 -I -S worker.py [--workspace DIR]

See docs/reference/sandbox-protocol.md. It owns the protocol stream, starts and ends all other processes, and never runs
user code itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))
from sandbox_images.base import arguments, cgroup, mcp_stdio, processes  # noqa: E402 - the folder is put on the path just above
from sandbox_images.base.annotations import TYPE_CHECKING, Any  # noqa: E402
from sandbox_images.base.beneath import Workspace  # noqa: E402
from sandbox_images.base.call_memory import CallMemory, Reply  # noqa: E402
from sandbox_images.base.event_loop import Loop  # noqa: E402
from sandbox_images.base.forwarder import FOLDER, Forwarder, Ports  # noqa: E402
from sandbox_images.base.lease import Lease  # noqa: E402
from sandbox_images.base.mcp_stdio import Encoded, ProtocolError  # noqa: E402
from sandbox_images.base.pollable import pollable  # noqa: E402
from sandbox_images.workspace import environment  # noqa: E402
from sandbox_images.workspace.artifacts import Artifacts  # noqa: E402
from sandbox_images.workspace.calls import Call, Calls, Ending, Handler  # noqa: E402
from sandbox_images.workspace.family import Family  # noqa: E402
from sandbox_images.workspace.file_read import FileRead  # noqa: E402
from sandbox_images.workspace.file_search import FileSearch  # noqa: E402
from sandbox_images.workspace.file_store import FileStore  # noqa: E402
from sandbox_images.workspace.file_tools import FileTools  # noqa: E402
from sandbox_images.workspace.file_transfer import FileTransfer  # noqa: E402
from sandbox_images.workspace.interpreter_host import InterpreterHost  # noqa: E402
from sandbox_images.workspace.notebook import Notebook  # noqa: E402
from sandbox_images.workspace.protocol_stream import ProtocolStream  # noqa: E402
from sandbox_images.workspace.quota import Quota  # noqa: E402
from sandbox_images.workspace.shell_tools import ShellTools  # noqa: E402

if TYPE_CHECKING:
    from sandbox_images.workspace.snapshot_transfer import SnapshotTransfer

NAME, VERSION = "toolcrib-workspace", "1"
SNAPSHOT_METHODS = ("snapshot.scan", "snapshot.manifest", "snapshot.read", "snapshot.close", "restore.begin", "restore.manifest",
                    "restore.step", "restore.commit", "restore.close")  # fmt: skip
READ_ONLY = {"file_read", "file_list", "file_search", "shell_read"}


class Worker:
    def __init__(self, root: str) -> None:
        self.loop = Loop()
        self.family = Family()
        self.loop.on_child = self.family.ended
        self.loop.watch_children()
        workspace = Workspace(root)
        self.quota = Quota(self.loop, workspace)
        artifacts = Artifacts(workspace, self.quota)
        self._lease = Lease(self.loop.call_later, self.loop.stop)
        memory = self._memory = CallMemory(self.loop.call_later, self._lease)
        self.calls = Calls(self.loop, self.quota, artifacts, memory, self._answer_call)
        self._store = FileStore(workspace, self.quota)
        notebook = Notebook(self._store)
        self.interpreter = InterpreterHost(
            loop=self.loop,
            calls=self.calls,
            family=self.family,
            workspace=workspace,
            quota=self.quota,
            artifacts=artifacts,
            notebook=notebook,
        )
        self.interpreter.environment = environment.with_processors(environment.base_environment(), cgroup.cpus())
        with suppress(OSError):  # the first call tries again, and says why it can't
            self.interpreter.start()  # ahead of the first call: it takes the longest
        self.shell = ShellTools(
            loop=self.loop,
            calls=self.calls,
            family=self.family,
            workspace=workspace,
            quota=self.quota,
            artifacts=artifacts,
        )
        self.shell.environment = self.interpreter.environment
        files, transfer = FileTools(self._store), FileTransfer(self.loop, self.family, self._store, self.quota)
        self._snapshots: SnapshotTransfer | None = None
        search = FileSearch(self.loop, self.calls, self.family, self._store)
        with open(os.path.join(HERE, "tools.json"), encoding="utf-8") as file:
            self._tools: list[dict[str, Any]] = json.load(file)["tools"]
        self._schemas = {tool["name"]: tool["inputSchema"] for tool in self._tools}
        self._handlers: dict[str, Handler] = {
            "python_execute": self.interpreter.execute, "python_reset": self.interpreter.execute, "notebook_export": notebook.export,
            "shell_execute": self.shell.execute, "shell_read": self.shell.read, "shell_write": self.shell.write,
            "shell_kill": self.shell.kill, "file_read": FileRead(self._store).read, "file_write": files.write, "file_edit": files.edit,
            "file_list": files.list, "file_search": search.search, "file_move": files.move, "file_delete": files.delete,
        }  # fmt: skip
        self._methods: dict[str, Callable[[dict[str, Any], Reply], None]] = {
            "initialize": self._initialize, "ping": lambda _params, reply: reply({}), "tools/list": self._list_tools,
            "toolcrib/attach": memory.attach, "toolcrib/recall": memory.recall, "toolcrib/output": memory.output,
            "toolcrib/bind": self._bind, "toolcrib/egress": self._egress, "toolcrib/cancel": self._cancel, "toolcrib/peek": self._peek, "toolcrib/usage": self._usage,
            "toolcrib/file.stat": transfer.stat, "toolcrib/file.list": transfer.list, "toolcrib/file.open": transfer.open,
            "toolcrib/file.read": transfer.read, "toolcrib/file.write": transfer.write, "toolcrib/file.close": transfer.close,
            "toolcrib/file.delete": transfer.delete, "toolcrib/archive.open": transfer.open_archive,
        } | {f"toolcrib/{name}": self._on_snapshots(name) for name in SNAPSHOT_METHODS}  # fmt: skip
        # before any code of a session runs, so that nothing but the worker is the proxy
        self._forwarder = Forwarder(self.loop, Ports()) if os.path.isdir(FOLDER) else None
        self._base = self.interpreter.environment
        self._told: dict[str, str] = {}  # the session's own variables
        self._stream = ProtocolStream(self.loop, self._on_line, self.loop.stop, self._lease.heard)
        self._bound = False

    def run(self) -> None:
        """Serve until stdin ends or the lease is over."""
        self.loop.start(self._store.clear_incoming())
        self.loop.run()
        self.family.end_all()

    # ---- messages

    def _on_line(self, line: bytes) -> None:
        if not line.strip():
            return
        request_id = None
        try:
            message = mcp_stdio.decode(line)
            request_id, method, params = message.get("id"), message.get("method"), message.get("params")
            if method is None:
                return  # an answer, and we never ask
            if request_id is None:
                self._notice(method, params)
                return
            if not isinstance(request_id, (str, int)) or isinstance(request_id, bool):
                request_id = None
                raise ProtocolError(mcp_stdio.INVALID_REQUEST, "id must be a string or an integer")
            if not isinstance(params, dict):
                if params is not None:
                    raise ProtocolError(mcp_stdio.INVALID_PARAMS, "params must be an object")
                params = {}
            if method == "tools/call":
                self._call(request_id, params)
                return
            handler = self._methods.get(method) if isinstance(method, str) else None
            if handler is None:
                raise ProtocolError(mcp_stdio.METHOD_NOT_FOUND, f"unknown method {str(method)[:100]}")
            handler(params, lambda value, request_id=request_id: self._reply(request_id, value))  # type: ignore[misc]
        except ProtocolError as problem:
            self._stream.send(mcp_stdio.error(request_id, problem))
        except OSError as problem:
            self._stream.send(
                mcp_stdio.error(request_id, mcp_stdio.refused("invalid_path", f"refused: {problem.strerror}"))
            )

    def _reply(self, request_id: Any, value: dict[str, Any] | Encoded | ProtocolError) -> None:
        self._stream.send(
            mcp_stdio.error(request_id, value)
            if isinstance(value, ProtocolError)
            else mcp_stdio.result(request_id, value)
        )

    def _answer_call(self, request_id: Any, value: Encoded) -> None:
        self._stream.send(mcp_stdio.result(request_id, value))

    def _notice(self, method: Any, params: Any) -> None:
        if method == "notifications/cancelled" and isinstance(params, dict):
            self.calls.cancel_request(params.get("requestId"))

    # ---- methods

    def _initialize(self, params: dict[str, Any], reply: Reply) -> None:
        reply(mcp_stdio.initialize_result(params, NAME, VERSION, worker=True))

    def _list_tools(self, _params: dict[str, Any], reply: Reply) -> None:
        reply({"tools": self._tools})

    def _call(self, request_id: Any, params: dict[str, Any]) -> None:
        name, given = params.get("name"), params.get("arguments")
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if not isinstance(name, str) or handler is None:
            raise ProtocolError(mcp_stdio.INVALID_PARAMS, f"unknown tool {str(name)[:100]}")
        if self.calls.is_open(request_id):
            raise ProtocolError(mcp_stdio.INVALID_REQUEST, "a request with this id is still open")
        meta = (params.get("_meta") or {}).get("toolcrib/call") if isinstance(params.get("_meta") or {}, dict) else None
        meta = meta if isinstance(meta, dict) else {}
        given = {} if given is None else given
        call = Call(request_id, name, given, self.calls.admit(meta), meta, writes=name not in READ_ONLY)
        if not isinstance(given, dict):
            problems = [{"pointer": "", "message": "the arguments must be an object"}]
        else:
            problems = arguments.problems(self._schemas[name], given)
        self.calls.begin(call, _refusing(problems) if problems else handler)

    def _bind(self, params: dict[str, Any], reply: Reply) -> None:
        env, limits = params.get("env") or {}, params.get("limits") or {}
        if self._bound:
            raise ProtocolError(mcp_stdio.INVALID_REQUEST, "the sandbox is bound already")
        if not isinstance(env, dict) or not all(_is_variable(name, value) for name, value in env.items()):
            raise ProtocolError(mcp_stdio.INVALID_PARAMS, "env must map names to texts, neither with NUL")
        if not isinstance(limits, dict):
            raise ProtocolError(mcp_stdio.INVALID_PARAMS, "limits must be an object")
        self._memory.bind(params)
        self._bound = True
        disk, memory, cpus = (_limit(limits, name) for name in ("disk_mb", "memory_mb", "cpus"))
        if disk is not None:
            self.quota.limit(int(disk * (1 << 20)))
        self._base, self._told = environment.with_processors(self.interpreter.environment, cpus), env
        self.interpreter.limit_memory(None if memory is None else int(memory))
        egress = params.get("egress")
        self._open_door(egress.get("door") if isinstance(egress, dict) else None, reply)

    def _egress(self, params: dict[str, Any], reply: Reply) -> None:
        if not self._bound:
            raise ProtocolError(mcp_stdio.INVALID_REQUEST, "the sandbox is not bound yet")
        self._open_door(params.get("door"), reply)

    def _open_door(self, door: Any, reply: Reply) -> None:
        """`door` of None: there is none from now on."""
        if door is None:
            if self._forwarder is not None:
                self._forwarder.close()
            self._set_environment({})
            reply({})
            return
        if not isinstance(door, str) or not door.isalnum():
            raise ProtocolError(mcp_stdio.INVALID_PARAMS, "door must be a name of letters and digits")
        forwarder = self._forwarder
        if forwarder is None:
            raise mcp_stdio.refused("egress_unready", "the sandbox was started without a way out")

        was_open = forwarder.is_open

        def done(problem: str | None) -> None:
            if problem is not None:
                if not was_open:  # else it works again once the proxy is back
                    forwarder.close()
                    self._set_environment({})
                reply(mcp_stdio.refused("egress_unready", problem))
                return
            from sandbox_images.base.way_out import proxy_variables  # noqa: PLC0415 - most sessions have none

            self._set_environment(proxy_variables())
            reply({})

        forwarder.open(door, done)

    def _set_environment(self, way_out: dict[str, str]) -> None:
        whole = environment.with_session({**self._base, **way_out}, self._told)
        self.shell.environment = whole
        self.interpreter.bind(whole)

    def _on_snapshots(self, name: str) -> Callable[[dict[str, Any], Reply], None]:
        def answer(params: dict[str, Any], reply: Reply) -> None:
            if self._snapshots is None:
                # not at the start: most sessions have none
                from sandbox_images.workspace.snapshot_transfer import SnapshotTransfer  # noqa: PLC0415

                self._snapshots = SnapshotTransfer(self.loop, self._store)
            self._snapshots.methods[name](params, reply)

        return answer

    def _cancel(self, params: dict[str, Any], reply: Reply) -> None:
        reply({"found": self.calls.cancel(str(params.get("call_id")))})

    def _peek(self, params: dict[str, Any], reply: Reply) -> None:
        reply({"content": self.calls.peek(str(params.get("call_id"))) or []})

    def _usage(self, _params: dict[str, Any], reply: Reply) -> None:
        def work() -> Generator[None, None, None]:
            if self.quota.stale:
                yield from self.quota.refresh()
            found = self.quota.snapshot
            reply(
                {"workspace_bytes": found.bytes, "workspace_files": found.files, "memory_bytes": cgroup.memory_bytes()}
            )

        self.loop.start(work())


def _limit(limits: dict[str, Any], name: str) -> float | None:
    value = limits.get(name)
    return value if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _is_variable(name: Any, value: Any) -> bool:
    good = isinstance(name, str) and isinstance(value, str) and name and "=" not in name
    return bool(good) and "\x00" not in name + value


def _refusing(problems: list[dict[str, str]]) -> Handler:
    def refuse(_call: Call) -> Generator[None, None, Ending]:
        first = problems[0]
        return Ending(
            "invalid", f"The arguments are not right: {first['pointer']} {first['message']}.", errors=problems
        )
        yield  # a handler is a generator

    return refuse


def main() -> int:
    if not pollable(0):
        print("worker: stdin must be a pipe, a socket or a terminal", file=sys.stderr)
        return 2
    root = (
        sys.argv[2]
        if len(sys.argv) == 3 and sys.argv[1] == "--workspace"
        else os.environ.get("TOOLCRIB_WORKSPACE", "/workspace")
    )
    processes.prctl(processes.PR_SET_DUMPABLE, 0)  # else user code of the same uid could write into our descriptors
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpid() == 1:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                signum, signal.SIG_IGN
            )  # user code may send them to PID 1; the server ends a sandbox by its stdin
    Worker(root).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
