"""MCP servers of npm as they are published, called over HTTP in sandboxes of a Docker engine."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real_servers.bench import Bench, serving, state_with, text_of
from tests.unit.toolserver.crib import detail
from toolserver.telemetry.logs import HIDDEN

SECRET = 's3cr3t-"quoted" of the operator'
pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    os.environ["TOOLCRIB_TEST_TOKEN"] = SECRET
    yield state_with(
        tmp_path_factory.mktemp("added") / "state",
        everything=("--secret", "TOKEN=env:TOOLCRIB_TEST_TOKEN", "--env", "PLAIN=as it is"),
        filesystem=("--workspace", "rw"),
        memory=("--env", "MEMORY_FILE_PATH=/tmp/memory.jsonl"),
        thinking=(),
    )
    del os.environ["TOOLCRIB_TEST_TOKEN"]


@pytest.fixture
async def bench(tmp_path: Path, state: Path) -> AsyncIterator[Bench]:
    async with serving(tmp_path, state) as bench:
        yield bench


async def test_each_kind_of_content_is_handed_on_as_it_is(bench: Bench) -> None:
    session = await bench.session("everything")
    told = await bench.done(session, "echo", {"message": "grüße"})
    assert told["content"] == [{"type": "text", "text": "Echo: grüße"}]
    assert told["workspace_changed"] == []
    picture = (await bench.done(session, "get-tiny-image"))["content"][1]
    assert (picture["type"], picture["mimeType"]) == ("image", "image/png")
    assert base64.b64decode(picture["data"]).startswith(b"\x89PNG")
    weather = await bench.done(session, "get-structured-content", {"location": "Chicago"})
    assert weather["structured"] == {"temperature": 36, "conditions": "Light rain / drizzle", "humidity": 82}
    assert json.loads(text_of(weather)) == weather["structured"]
    marked = await bench.done(session, "get-annotated-message", {"messageType": "error"})
    assert marked["content"] == [
        {
            "type": "text",
            "text": "Error: Operation failed",
            "annotations": {"audience": ["user", "assistant"], "priority": 1},
        }
    ]
    links = (await bench.done(session, "get-resource-links", {"count": 2}))["content"][1:]
    assert [(link["type"], link["uri"]) for link in links] == [
        ("resource_link", "demo://resource/dynamic/blob/1"),
        ("resource_link", "demo://resource/dynamic/text/2"),
    ]
    asked = {"resourceType": "Text", "resourceId": 7}
    resource = (await bench.done(session, "get-resource-reference", asked))["content"][1]["resource"]
    assert resource["uri"] == "demo://resource/dynamic/text/7"
    assert resource["text"].startswith("Resource 7: This is a plaintext resource")
    packed = {"name": "x.gz", "data": "data:text/plain,hello", "outputType": "resource"}
    blob = (await bench.done(session, "gzip-file-as-resource", packed))["content"][0]["resource"]
    assert base64.b64decode(blob["blob"]).startswith(b"\x1f\x8b")
    told = detail(await bench.call(session, "get-sum", {"a": "x", "b": 3}), 422, "invalid_arguments")
    assert told["errors"][0]["pointer"] == "/arguments/a"
    assert await bench.text(session, "get-sum", {"a": 2, "b": 3.5}) == "The sum of 2 and 3.5 is 5.5."


async def test_a_server_offers_what_its_image_lists(bench: Bench) -> None:
    listed = (await bench.client.get("/v1/tools")).json()["tools"]
    mine = {tool["name"]: tool for tool in listed if tool["image"] == "everything"}
    assert {"echo", "get-sum", "get-tiny-image", "trigger-elicitation-request", "trigger-url-elicitation"} <= set(mine)
    assert mine["get-structured-content"]["output_schema"]["required"] == ["temperature", "conditions", "humidity"]
    assert mine["echo"]["annotations"]["readOnlyHint"] is True


async def a_fresh_one_answers(bench: Bench, session: str) -> None:
    """This SDK confirms no cancellation, and its tool works on: so the sandbox had to end, which is said."""
    told = await bench.done(session, "get-sum", {"a": 1, "b": 1})
    assert told["sandbox_reset"] is True
    assert told["content"][-1]["text"] == "The sum of 1 and 1 is 2."


async def test_progress_is_told_and_the_deadline_holds_all_the_same(bench: Bench) -> None:
    session = await bench.session("everything")
    long = "trigger-long-running-operation"
    body = {"arguments": {"duration": 0.6, "steps": 3}}
    events = await bench.client.post(
        f"/v1/sessions/{session}/tools/{long}", json=body, headers={"Accept": "text/event-stream"}
    )
    told = [
        json.loads(line[6:])
        for part in events.text.split("\n\n")
        if "event: progress" in part
        for line in part.split("\n")
        if line.startswith("data: ")
    ]
    assert [(one["progress"], one["total"]) for one in told] == [(1, 3), (2, 3), (3, 3)]
    assert "Long running operation completed. Duration: 0.6 seconds, Steps: 3." in events.text
    late = await bench.call(session, long, {"duration": 30, "steps": 300}, deadline_s=0.7)
    assert detail(late, 450, "deadline_exceeded")["type"] == "timeout"
    await a_fresh_one_answers(bench, session)


async def test_a_call_is_cancelled_by_its_caller(bench: Bench) -> None:
    session = await bench.session("everything")
    await bench.done(session, "echo", {"message": "up"})
    asked = {"duration": 60, "steps": 600}
    running = await bench.call(session, "trigger-long-running-operation", asked, key="k", wait_s=0.5)
    detail(running, 450, "still_running")
    told = (await bench.client.delete("/v1/calls/k")).json()
    assert (told["cancelled"], told["cancelled_by"]) == (True, "caller")
    await a_fresh_one_answers(bench, session)


async def test_its_user_is_asked_and_the_answer_reaches_it(bench: Bench) -> None:
    session = await bench.session("everything")

    async def asked(key: str) -> dict[str, Any]:
        told = detail(await bench.call(session, "trigger-elicitation-request", key=key), 450, "still_running")
        assert (told["type"], told["next_calling"]) == ("input_required", "call_answer")
        question: dict[str, Any] = told["elicitation"]
        return question

    async def answered(key: str, **answer: Any) -> dict[str, Any]:
        return await bench.done(session, "call_answer", {"call_id": key, **answer})

    question = await asked("yes")
    assert question["message"] == "Please provide inputs for the following fields:"
    assert question["requested_schema"]["properties"]["integer"]["maximum"] == 100
    assert await bench.text(session, "echo", {"message": "meanwhile"}) == "Echo: meanwhile"
    wrong = {"call_id": "yes", "action": "accept", "content": {"name": "Ann", "integer": 101}}
    error = detail(await bench.call(session, "call_answer", wrong), 422, "invalid_arguments")
    assert error["errors"][0]["pointer"] == "/arguments/content/integer"
    told = await answered("yes", action="accept", content={"name": "Ann", "check": True, "integer": 7})
    assert "- Name: Ann" in text_of(told)
    assert "- Favorite Integer: 7" in text_of(told)
    await asked("no")
    assert "declined" in text_of(await answered("no", action="decline"))
    await asked("away")
    assert "cancelled" in text_of(await answered("away", action="cancel"))


async def test_its_user_is_asked_to_open_a_page(bench: Bench) -> None:
    session = await bench.session("everything")
    asked = {"url": "https://example.com/consent", "message": "Please look"}
    told = detail(await bench.call(session, "trigger-url-elicitation", asked, key="u"), 450, "still_running")
    question = told["elicitation"]
    assert (question["mode"], question["url"], question["message"]) == ("url", asked["url"], "Please look")
    done = await bench.done(session, "call_answer", {"call_id": "u", "action": "accept"})
    assert "accept" in text_of(done)
    raised = await bench.call(session, "trigger-url-elicitation", {**asked, "errorPath": True})
    assert "open https://modelcontextprotocol.io first" in detail(raised, 500, "tool_failed")["message"]


async def test_a_secret_is_in_its_environment_and_in_nothing_that_is_told(bench: Bench, tmp_path: Path) -> None:
    session = await bench.session("everything")
    environment = json.loads(await bench.text(session, "get-env"))
    assert environment["PLAIN"] == "as it is"
    assert environment["TOKEN"] == HIDDEN
    assert await bench.text(session, "echo", {"message": f"<{SECRET}>"}) == f"Echo: <{HIDDEN}>"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240 - a few small ones
    assert files
    assert [path for path in files if SECRET.split(maxsplit=1)[0].encode() in path.read_bytes()] == []


async def test_files_of_the_session_are_read_and_written(bench: Bench) -> None:
    session = await bench.session("workspace", "filesystem")
    await bench.put(session, "notes/a.txt", b"one\ntwo\n")
    assert await bench.text(session, "read_text_file", {"path": "/workspace/notes/a.txt"}) == "one\ntwo\n"
    await bench.done(session, "write_file", {"path": "/workspace/b.txt", "content": "from npm"})
    assert await bench.get(session, "b.txt") == b"from npm"
    edit = {"path": "/workspace/notes/a.txt", "edits": [{"oldText": "two", "newText": "2"}]}
    assert "-two" in await bench.text(session, "edit_file", edit)
    seen = await bench.text(session, "shell_execute", {"command": "cat notes/a.txt b.txt; stat -c %u b.txt"})
    assert seen == "one\n2\nfrom npm10001\n"
    listing = await bench.text(session, "list_directory", {"path": "/workspace"})
    assert {"[FILE] b.txt", "[DIR] notes"} <= set(listing.split("\n"))
    outside = detail(await bench.call(session, "read_text_file", {"path": "/etc/passwd"}), 500, "tool_failed")
    assert "outside allowed directories" in outside["message"]
    await bench.done(session, "shell_execute", {"command": "ln -s /etc/passwd link"})
    detail(await bench.call(session, "read_text_file", {"path": "/workspace/link"}), 500, "tool_failed")


async def test_memory_is_a_sessions_own(bench: Bench) -> None:
    one, two = await bench.session("memory", "thinking"), await bench.session("memory")
    ann = {"name": "Ann", "entityType": "person", "observations": ["likes tea"]}
    made = await bench.done(one, "create_entities", {"entities": [ann]})
    assert made["structured"] == {"entities": [ann]}
    graph = (await bench.done(one, "read_graph"))["structured"]
    assert graph == {"entities": [ann], "relations": []}
    assert (await bench.done(two, "read_graph"))["structured"] == {"entities": [], "relations": []}
    found = await bench.done(one, "search_nodes", {"query": "tea"})
    assert found["structured"]["entities"] == [ann]
    thought = {"thought": "x", "nextThoughtNeeded": True, "totalThoughts": 2}
    for number in (1, 2):
        told = await bench.done(one, "sequentialthinking", {**thought, "thoughtNumber": number})
        assert told["structured"]["thoughtHistoryLength"] == number
