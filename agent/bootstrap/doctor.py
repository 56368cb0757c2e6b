"""`agent doctor`: tries for real what a run needs, one check after the other, and says what to do about a failure."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.bootstrap.composition import address_of, client_for
from agent.bootstrap.embedded_toolserver import Address
from agent.bootstrap.places import open_store
from agent.errors import AgentError, ModelRefused, Unreachable, UsageProblem
from agent.llm.model import FailureKind, LLMFailure, Message, Request
from agent.llm.openai_model import OpenAIModel
from agent.settings import Settings
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem, NoAnswer, ToolServerAnswer

_MODEL_S = 60.0
_PROGRAM = "print(6 * 7)"


@dataclass(frozen=True)
class Check:
    """`exit_code` is what a run would end with for this failure."""

    name: str
    ok: bool
    text: str
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def examine(settings: Settings) -> list[Check]:
    """All checks in order. Nothing is left behind: a ToolServer that is started for them ends with them."""
    checks = [
        await _check("runs folder", lambda: _runs_folder(settings)),
        await _check("model", lambda: _model(settings)),
    ]
    folder = Path(tempfile.mkdtemp(prefix="toolcrib-doctor-"))
    try:
        async with _server(settings, folder, checks) as client:
            if client is not None:
                checks.append(await _check("tools", lambda: _tools(client)))
                checks.append(await _check("sandbox", lambda: _sandbox(client)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return checks


@asynccontextmanager
async def _server(settings: Settings, folder: Path, checks: list[Check]) -> AsyncIterator[ToolServerClient | None]:
    """A client of a ToolServer that answers, else None; the check is added to `checks`."""
    try:
        async with address_of(settings, folder) as address:
            client = client_for(settings, address, run_id="doctor")
            try:
                check = await _check("ToolServer", lambda: _answers(client, settings, address))
                checks.append(check)
                yield client if check.ok else None
            finally:
                await client.close()
    except Unreachable as problem:  # an embedded one that does not start
        checks.append(Check("ToolServer", ok=False, text=problem.message, exit_code=problem.exit_code))
        yield None


async def answering(settings: Settings) -> None:
    """Raises Unreachable when a ToolServer was named and nothing answers there: known before a run is made."""
    if settings.toolserver.url is None:
        return
    client = client_for(settings, Address(settings.toolserver.url, ""), run_id="start")
    try:
        await client.ready()
    except NoAnswer as problem:
        raise Unreachable(
            f"no ToolServer answers at {settings.toolserver.url} ({problem.message}): start it with `toolserver serve`, "
            "or leave --toolserver and AGENT_TOOLSERVER__URL out, so that the run starts its own"
        ) from problem
    except ToolServerAnswer:
        return  # it is there; a run waits for one that is not ready yet
    finally:
        await client.close()


async def _check(name: str, probe: Callable[[], Awaitable[str]]) -> Check:
    try:
        return Check(name, ok=True, text=await probe())
    except AgentError as problem:
        return Check(name, ok=False, text=problem.message, exit_code=problem.exit_code)
    except ClientProblem as problem:
        return Check(name, ok=False, text=str(problem), exit_code=Unreachable.exit_code)


async def _runs_folder(settings: Settings) -> str:
    with open_store(settings) as store:
        count = len(store.runs())
    return f"{settings.runs_dir.absolute()} can be written; runs in it: {count}"


async def _model(settings: Settings) -> str:
    """Asks for one word: only an answer proves address, key and name right."""
    if not settings.llm.model:
        raise UsageProblem(
            "none is set: AGENT_LLM__MODEL names it, AGENT_LLM__BASE_URL its server, AGENT_LLM__API_KEY its key"
        )
    model = OpenAIModel.from_settings(settings)
    request = Request("doctor", (Message("user", "Answer with the one word: ready"),), max_tokens=64)
    try:
        reply = await model.complete(request, deadline_s=_MODEL_S)
    except LLMFailure as failure:
        kind = ModelRefused if failure.kind is FailureKind.REFUSED else Unreachable
        raise kind(failure.message) from failure
    finally:
        await model.close()
    return (
        f"{settings.llm.model} at {settings.llm_base_url or 'the usual address'} answers ({reply.usage.total} tokens)"
    )


async def _answers(client: ToolServerClient, settings: Settings, address: Address) -> str:
    await client.ready()
    return f"{address.url} is ready" if settings.toolserver.url else "one starts on loopback for a run and is ready"


async def _tools(client: ToolServerClient) -> str:
    return ", ".join(sorted(tool.name for tool in await client.tools()))


async def _sandbox(client: ToolServerClient) -> str:
    session = await client.create_session(labels={"purpose": "doctor"})
    try:
        outcome = await client.call(
            session.id,
            "python_execute",
            {"code": _PROGRAM},
            call_id=f"doctor-{secrets.token_hex(8)}",
            wait_s=30.0,
            deadline_s=30.0,
        )
    finally:
        await client.delete_session(session.id)
    if not any("42" in str(block.get("text")) for block in outcome.content):
        raise Unreachable("python_execute ran in a sandbox, but its output did not come back")
    return f"python_execute runs; isolation: {_isolation(session.isolation)}"


def _isolation(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_isolation(entry)}" for name, entry in value.items() if entry not in (None, [], {}))
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
