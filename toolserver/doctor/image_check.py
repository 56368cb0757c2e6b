"""`toolserver tools check`: an added image tried as sessions would use it, each point with what was found and what to do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from toolserver.catalog.image import Tool
from toolserver.catalog.offered import Judged, changes, judge, pin
from toolserver.doctor.trial import alone, started, trial, trial_spec, workspace_of
from toolserver.doctor.trial import read_secrets as secrets_of
from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.images.engine import ImageFacts
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.tool_sandbox import ToolSandbox
from toolserver.settings import Settings
from toolserver.store.tool_images import Approval
from toolserver.telemetry.logs import HIDDEN
from toolserver.tool_entry import ToolEntry

LARGE_BYTES, SLOW_S, HEAVY_SHARE = 1 << 30, 5.0, 0.5
ANSWER_S, EOF_S = 10.0, 5.0
_NO_SUCH_TOOL = "toolcrib.no-such-tool"
_SECRET_NAME = re.compile(r"token|secret|passw|api_?key|credential|private_?key", re.IGNORECASE)
_READ_ONLY = re.compile(r"read-only file ?system|EROFS", re.IGNORECASE)
State = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    state: State
    name: str
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        told = {"state": self.state, "name": self.name, "found": self.found}
        return {**told, "advice": self.advice} if self.advice else told


def check_image(
    settings: Settings, name: str, entry: ToolEntry, facts: ImageFacts, approval: Approval | None = None
) -> list[Finding]:
    """All points, in order; those after a failure to start are left out. `approval`: what is to be as it was. Blocks.

    Raises SecretMissing, and RuntimeUnavailable when the engine itself is away.
    """
    report = _of_facts(facts, approval)
    secrets_of(entry)
    with alone(settings.state_dir):
        asyncio.run(_Trial(settings, name, entry, facts, approval=approval, report=report).run())
    return report


def _of_facts(facts: ImageFacts, approval: Approval | None) -> list[Finding]:
    size = f"{facts.size_bytes / (1 << 20):.0f} MiB"
    report = [
        Finding("pass", "size", size)
        if facts.size_bytes < LARGE_BYTES
        else Finding("warn", "size", size, "Stand on a slim base image, and leave build tools out.")
    ]
    odd = sorted(variable for variable in facts.env_names if _SECRET_NAME.search(variable))
    report.append(
        Finding(
            "warn",
            "secrets in the image",
            ", ".join(odd),
            "Whoever has the image has them. Take them as --secret instead.",
        )
        if odd
        else Finding("pass", "secrets in the image", "none seen")
    )
    if approval is not None and approval.digest != facts.digest:
        report.append(
            Finding(
                "warn",
                "digest",
                "not what was approved",
                "Sessions go on with the approved one. See: toolserver tools approve.",
            )
        )
    return report


class _Trial:
    def __init__(
        self,
        settings: Settings,
        name: str,
        entry: ToolEntry,
        facts: ImageFacts,
        *,
        approval: Approval | None,
        report: list[Finding],
    ) -> None:
        self._settings, self._name, self._entry, self._facts = settings, name, entry, facts
        self._approval, self._report = approval, report

    async def run(self) -> None:
        async with trial(self._settings) as runtime:
            await runtime.check()
            if self._entry.kind == "cli":
                await self._command(runtime)
                return
            try:
                async with self._sandbox(runtime) as sandbox:
                    await self._server(runtime, sandbox)
            except RuntimeUnavailable as problem:
                advice = "It runs as user 10001 on a read-only root, with /tmp to write, no capability and no network."
                self._add("fail", "starts under hardening", str(problem), advice)
                return
            await self._end_of_input(runtime)

    def _add(self, state: State, name: str, found: str, advice: str = "") -> None:
        self._report.append(Finding(state, name, found, "" if state == "pass" else advice))

    @asynccontextmanager
    async def _sandbox(self, runtime: DockerRuntime) -> AsyncIterator[ToolSandbox]:
        begun = time.monotonic()
        async with started(runtime, self._settings, self._name, self._entry, self._facts.digest) as sandbox:
            took = time.monotonic() - begun
            self._add("pass", "starts under hardening", "up to its list of tools")
            self._add(
                "pass" if took < SLOW_S else "warn",
                "time to start",
                f"{took:.1f} s",
                "Each session waits so long at its first call. Import less, or start it eagerly.",
            )
            yield sandbox
        end = sandbox.end
        tail = end.log_tail if end is not None else ""
        self._add(
            "warn" if _READ_ONLY.search(tail) else "pass",
            "writes to the read-only root",
            "it tried" if _READ_ONLY.search(tail) else "none seen",
            "Write to /tmp, or to /workspace with --workspace rw.",
        )
        if self._entry.secrets:
            self._shows_secrets(sandbox, tail)

    def _shows_secrets(self, sandbox: ToolSandbox, tail: str) -> None:
        values = secrets_of(self._entry).values()
        shown = HIDDEN in str(sandbox.listed) or any(value in tail for value in values)
        advice = "Its tools or its log show a secret that it was given. They are blotted out; better it did not."
        self._add(
            "warn" if shown else "pass", "keeps its secrets", "it shows them" if shown else "as far as seen", advice
        )

    async def _server(self, runtime: DockerRuntime, sandbox: ToolSandbox) -> None:
        self._add("pass", "protocol", f"MCP {sandbox.era}")
        await self._memory(runtime, sandbox)
        judged = judge(self._name, self._entry, sandbox.listed)
        self._tools(judged)
        self._pinned(sandbox.listed)
        self._noise(sandbox)
        await self._stable(sandbox)
        await self._unknown_tool(sandbox)
        await self._bad_arguments(sandbox, judged.tools)
        await self._cancellation(sandbox)

    async def _memory(self, runtime: DockerRuntime, sandbox: ToolSandbox) -> None:
        handle = sandbox.client.sandbox.handle
        told: dict[str, Any] = await runtime.engine.call(
            lambda client: client.stats(handle, stream=False, one_shot=True)
        )
        used = (told.get("memory_stats") or {}).get("usage")
        if not isinstance(used, int):
            return
        limit = sandbox.client.sandbox.spec.limits.memory_mb
        found = f"{used / (1 << 20):.0f} of {limit} MiB once it has started"
        heavy = used > HEAVY_SHARE * (limit << 20)
        self._add("warn" if heavy else "pass", "memory", found, "Give it more with --memory-mb, or import less.")

    def _tools(self, judged: Judged) -> None:
        if not judged.tools:
            self._add("fail", "tools", "none that can be had", "Offer at least one, with a name and an inputSchema.")
        else:
            self._add("pass", "tools", f"{len(judged.tools)}: {', '.join(tool.name for tool in judged.tools[:8])}")
        for name, why in judged.refused.items():
            self._add("fail", f"tool {name[:60]}", why, "It is not offered so.")
        for name, whys in judged.warnings.items():
            self._add(
                "warn",
                f"tool {name[:60]}",
                "; ".join(whys),
                "A model may be misled. Read it with care, or give --describe.",
            )
        short = [tool.name for tool in judged.tools if len(tool.description) < 20]
        self._add(
            "warn" if short else "pass",
            "descriptions",
            f"very short: {', '.join(short[:5])}" if short else "each says something",
            "Say what the tool does, when to use it and what comes back: it is all that a model knows.",
        )
        mute = [tool.name for tool in judged.tools if _without_words(tool)]
        self._add(
            "warn" if mute else "pass",
            "arguments",
            f"without a description: {', '.join(mute[:5])}" if mute else "described",
            "Give each property of the inputSchema a description.",
        )

    def _pinned(self, listed: list[dict[str, Any]]) -> None:
        if self._approval is None:
            return
        same = pin(listed) == pin(self._approval.listed)
        told = {what: names for what, names in changes(self._approval.listed, listed).items() if names}
        found = "as approved" if same else "; ".join(f"{what} {', '.join(names[:5])}" for what, names in told.items())
        self._add(
            "pass" if same else "fail",
            "list of tools",
            found,
            f"See the difference: toolserver tools approve {self._name}",
        )

    def _noise(self, sandbox: ToolSandbox) -> None:
        lines = sandbox.client.garbage_lines
        first = sandbox.client.noise[0].decode("utf-8", "replace")[:80] if sandbox.client.noise else ""
        self._add(
            "warn" if lines else "pass",
            "stdout",
            f"{lines} lines that are no message, such as {first!r}" if lines else "messages alone",
            "Write logs to stderr.",
        )

    async def _stable(self, sandbox: ToolSandbox) -> None:
        alive = await sandbox.answers()
        self._add(
            "pass" if alive else "fail",
            "answers ping",
            "yes" if alive else "no",
            "A sandbox that does not is replaced.",
        )
        again = await sandbox.list_tools(ANSWER_S)
        same = pin(again) == pin(sandbox.listed)
        self._add(
            "pass" if same else "fail",
            "same list each time",
            "yes" if same else "no",
            "A list that changes counts as a changed image each time, and is not offered.",
        )

    async def _call(self, sandbox: ToolSandbox, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Whether it was refused, and how."""
        try:
            result = await sandbox.client.request("tools/call", {"name": name, "arguments": arguments}, ANSWER_S)
        except RpcError as no:
            return True, f"refused with {no.code}"
        return (True, "isError") if result.get("isError") is True else (False, "taken as a success")

    async def _try(self, sandbox: ToolSandbox, point: str, tool: str, arguments: dict[str, Any], advice: str) -> None:
        try:
            refused, how = await self._call(sandbox, tool, arguments)
        except TimeoutError:
            self._add("fail", point, f"no answer within {ANSWER_S:g} s", advice)
        except SandboxGone:
            self._add("fail", point, "it ended", advice)
        else:
            self._add("pass" if refused else "warn", point, how, advice)

    async def _unknown_tool(self, sandbox: ToolSandbox) -> None:
        await self._try(sandbox, "unknown tool", _NO_SUCH_TOOL, {}, "Answer with an error, and go on.")

    async def _bad_arguments(self, sandbox: ToolSandbox, tools: list[Tool]) -> None:
        wanting = [tool for tool in tools if tool.input_schema.get("required")]
        wanting.sort(key=lambda tool: tool.annotations.get("readOnlyHint") is not True)
        if not wanting:
            self._add("pass", "bad arguments", "no tool has required ones")
            return
        advice = "Check arguments before doing anything; say in the error what was wanted."
        await self._try(sandbox, "bad arguments", wanting[0].own_name, {}, advice)

    async def _cancellation(self, sandbox: ToolSandbox) -> None:
        try:
            await sandbox.client.notify("notifications/cancelled", {"requestId": 987_654_321, "reason": "a check"})
            fine = await sandbox.answers()
        except SandboxGone:
            fine = False
        self._add(
            "pass" if fine else "fail",
            "cancellation",
            "bears one of a call that has ended" if fine else "it ended or hangs after one",
            "Pass over cancellations of what is not running.",
        )

    async def _end_of_input(self, runtime: DockerRuntime) -> None:
        spec = trial_spec(runtime, self._settings, self._name, self._entry, self._facts.digest)
        async with workspace_of(runtime, spec):
            sandbox = await runtime.run(spec, secrets_of(self._entry))
            begun = time.monotonic()
            try:
                await sandbox.end_input()
                async with asyncio.timeout(EOF_S):
                    while (await sandbox.receive_both())[0]:
                        pass
            except TimeoutError:
                found, state = f"not within {EOF_S:g} s: it is killed", "warn"
            except SandboxGone:
                found, state = "yes", "pass"
            else:
                found, state = f"after {time.monotonic() - begun:.1f} s", "pass"
            finally:
                await sandbox.remove()
        advice = "End when stdin ends: that is how a client of MCP on stdio says goodbye."
        self._add("pass" if state == "pass" else "warn", "ends with its input", found, advice)

    async def _command(self, runtime: DockerRuntime) -> None:
        """Of a command-line image: that its program begins."""
        spec = trial_spec(runtime, self._settings, self._name, self._entry, self._facts.digest)
        async with workspace_of(runtime, spec):
            try:
                sandbox = await runtime.run(spec, secrets_of(self._entry))
            except RuntimeUnavailable as problem:
                self._add("fail", "starts under hardening", str(problem))
                return
            try:
                await sandbox.end_input()
                async with asyncio.timeout(EOF_S):
                    while (await sandbox.receive_both())[0]:
                        pass
            except (TimeoutError, SandboxGone):
                pass
            finally:
                end = await sandbox.remove()
        self._add("pass", "starts under hardening", f"without arguments it ended with exit code {end.exit_code}")


def _without_words(tool: Tool) -> bool:
    properties = tool.input_schema.get("properties")
    return isinstance(properties, dict) and any(
        isinstance(one, dict) and not one.get("description") and "$ref" not in one for one in properties.values()
    )
