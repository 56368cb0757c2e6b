"""One call of a command-line tool: a container of its own, from its start to the body of the answer."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from toolserver.calls import failure
from toolserver.calls.answer import Answer
from toolserver.calls.conclude import answer_of
from toolserver.calls.outcome import Outcome, empty_fields
from toolserver.calls.output import MAX_STRUCTURED_BYTES
from toolserver.calls.running import RunningCall
from toolserver.calls.whole_output import WholeOutput
from toolserver.catalog.cli_template import CliTemplate, CommandLine, Unfit
from toolserver.catalog.image import Tool, ToolImage
from toolserver.errors import invalid_all
from toolserver.runtime.base import SandboxEnd
from toolserver.sandbox.command_run import CommandRun, shown
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import Stage

_UNTOLD = ("removed", "runtime_lost", "killed")  # nobody can say how the command ended, or whether


def command_line(image: ToolImage, tool: Tool, arguments: Mapping[str, Any]) -> CommandLine:
    """Of arguments that fit the tool's schema. Raises invalid_arguments."""
    try:
        return image.cli[tool.own_name].expand(arguments, tool.input_schema)
    except Unfit as no:
        raise invalid_all([{**error, "pointer": "/arguments" + error["pointer"]} for error in no.errors]) from no


async def carry_out_command(call: RunningCall, settings: CallSettings) -> Answer:
    """As carry_out, for a tool of a command-line image."""
    box = call.session.boxes[call.tool.image]
    image = box.plan.image
    template = image.cli[call.tool.own_name]
    line = command_line(image, call.tool, call.arguments)
    whole = WholeOutput(call.session, call.call_id, settings.max_text_bytes, kept=image.workspace == "rw")
    async with contextlib.AsyncExitStack() as leaving:
        with Stage("start"):
            sandbox, hidden = await leaving.enter_async_context(box.command(line.argv))
        if call.cancelled_by is not None:
            raise failure.never_ran(call.call_id, call.cancelled_by)
        begun = time.monotonic()
        most = max(settings.max_text_bytes, MAX_STRUCTURED_BYTES)
        run = CommandRun(sandbox, call.call_id, max_bytes=most, secrets=hidden, whole=whole.feed)
        call.hand_to(run)
        try:
            with Stage("sandbox"):
                await run.finish(line.stdin, call.deadline_s)
            end = await sandbox.remove()
            artifact = await whole.close()
        finally:
            call.sandbox = None
            await whole.give_up()
    if run.stopped is None and end.cause in _UNTOLD:
        raise failure.death(end, call.call_id)
    outcome = _outcome(run, end, template, settings.max_text_bytes, artifact)
    outcome.fields["usage"]["wall_ms"] = round((time.monotonic() - begun) * 1000, 3)
    return answer_of(outcome, call, None)


def _outcome(
    run: CommandRun, end: SandboxEnd, template: CliTemplate, max_text_bytes: int, artifact: dict[str, Any] | None
) -> Outcome:
    how, message = _end(run, end, template)
    with_stderr = run.stderr.total > 0 and (how != "done" or template.stderr == "always")
    total = run.stdout.total + (run.stderr.total if with_stderr else 0)
    room = max_text_bytes - (min(run.stderr.total, max_text_bytes // 4) if with_stderr else 0)
    text, kept = shown(run.stdout, room)
    content = [{"type": "text", "text": text}] if text else []
    if with_stderr:
        told, kept_of_stderr = shown(run.stderr, max(max_text_bytes // 4, max_text_bytes - run.stdout.total))
        kept += kept_of_stderr
        content.append({"type": "text", "text": f"stderr:\n{told}"})
    fields = empty_fields(content)
    if kept < total:
        fields["truncated"] = {"bytes_total": total, "bytes_kept": kept, "artifact": artifact and artifact["path"]}
    if artifact is not None:
        fields["artifacts"] = [artifact]
    if end.exit_code is not None and run.stopped is None:
        fields["exit_code"] = end.exit_code
    if how == "done" and template.output == "json" and run.stdout.total <= MAX_STRUCTURED_BYTES:
        try:
            fields["structured"] = json.loads(bytes(run.stdout.head), parse_constant=_no_json)
        except (ValueError, RecursionError) as problem:
            how, message = "failed", f"The command's output is not the JSON that it should be: {problem}"[:500]
    errors = [{"pointer": "", "message": message}] if how == "invalid" else []
    return Outcome(how, message, errors, fields)


def _end(run: CommandRun, end: SandboxEnd, template: CliTemplate) -> tuple[str, str]:
    """The outcome's end and, for all but `done`, a sentence."""
    if run.stopped is not None:
        return run.stopped, ""
    if end.cause == "oom":
        return (
            "oom",
            "The command used more memory than its sandbox has. Give it less at a time, or ask for a larger memory_mb.",
        )
    if end.exit_code is None or end.cause == "unknown":
        return "crashed", "The command was killed, or ended itself so."
    how = template.end_of(end.exit_code)
    if how == "done":
        return how, ""
    if how == "invalid":
        said = shown(run.stderr if run.stderr.total else run.stdout, 1000)[0].strip()
        return how, f"the command refuses these arguments: {said or f'exit code {end.exit_code}'}"
    return how, f"The command ended with exit code {end.exit_code}; its output says why."


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
