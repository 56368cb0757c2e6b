"""Searching through the providers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.web.site import Reply, Site, redirect, running_site
from tests.unit.web.stand_in_proxy import StandInProxy
from tests.unit.web.worker_process import Worker, running_worker

SEARX = {
    "query": "x",
    "results": [
        {
            "title": "First <b>hit</b>",
            "url": "https://one.example/",
            "content": "About &amp; <em>more</em>",
            "engine": "e",
        },
        {"title": "Second", "url": "https://two.example/", "content": None},
        {"title": "Third", "url": "https://three.example/"},
    ],
}
BRAVE = {
    "type": "search",
    "web": {
        "results": [
            {"title": "Brave hit", "url": "https://one.example/", "description": "a <strong>marked</strong> word"}
        ]
    },
}
KEY = "brave-key-of-the-tests"


def as_json(value: Any, **more: Any) -> Reply:
    return Reply(json.dumps(value).encode(), "application/json", **more)


@pytest.fixture(scope="module")
def engine(proxy: StandInProxy) -> Iterator[Site]:
    with running_site() as made:
        proxy.let(made.port)
        yield made


@pytest.fixture(scope="module")
def searx(engine: Site, proxy: StandInProxy) -> Iterator[Worker]:
    with running_worker(proxy, search_provider="searxng", searxng_url=engine.url("/")) as made:
        yield made


@pytest.fixture(scope="module")
def brave(engine: Site, proxy: StandInProxy) -> Iterator[Worker]:
    with running_worker(proxy, search_provider="brave", brave_url=engine.url("/brave")) as made:
        made.ask("toolcrib/bind", env={"TOOLCRIB_WEB_BRAVE_API_KEY": KEY}, limits={})
        yield made


def test_searxng_results_come_as_a_list_and_as_data(searx: Worker, engine: Site) -> None:
    engine.pages["/search"] = as_json(SEARX)
    ending = searx.call("web_search", {"query": "two words & more", "max_results": 2})
    assert ending.end == "done"
    assert ending.structured == {
        "query": "two words & more",
        "provider": "searxng",
        "results": [
            {"title": "First hit", "url": "https://one.example/", "snippet": "About & more"},
            {"title": "Second", "url": "https://two.example/", "snippet": ""},
        ],
    }
    assert ending.texts == [
        "1. [First hit](https://one.example/)\n   About & more\n\n2. [Second](https://two.example/)"
    ]
    assert "GET /search?q=two+words+%26+more&format=json " in engine.seen[-1]


def test_brave_is_asked_with_its_key_in_a_header_alone(brave: Worker, engine: Site) -> None:
    engine.pages["/brave"] = as_json(BRAVE)
    ending = brave.call("web_search", {"query": "x", "max_results": 3})
    assert ending.structured["results"] == [
        {"title": "Brave hit", "url": "https://one.example/", "snippet": "a marked word"}
    ]
    assert f"x-subscription-token: {KEY}" in engine.seen[-1].lower()
    assert "count=3" in engine.seen[-1]
    assert KEY not in engine.seen[-1].split("\r\n")[0]


def test_no_results_are_an_answer(searx: Worker, brave: Worker, engine: Site) -> None:
    engine.pages["/search"], engine.pages["/brave"] = as_json({"results": []}), as_json({"type": "search"})
    for worker in (searx, brave):
        ending = worker.call("web_search", {"query": "nothing"})
        assert ending.structured["results"] == []
        assert ending.texts == ["No results for 'nothing'."]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"{}", "application/json", status="429 Too Many Requests"), "429"),
        (Reply(b"oops", status="500 Oops"), "500 Oops"),
        (Reply(b"", status="503 Busy"), "503 Busy"),
        (Reply(b"{}", "application/json", status="401 Unauthorized"), "key"),
        (Reply(b"{}", "application/json", status="403 Forbidden"), "403"),
        (Reply(b"<html>front page</html>"), "not JSON"),
        (Reply(b"[" * 100_000, "application/json"), "not JSON"),
        (Reply(b'{"results": [', "application/json"), "not JSON"),
        (as_json({"unexpected": 1}), "unknown shape"),
        (as_json({"results": [{"title": 5, "url": "x"}], "web": {"results": [{"url": "x"}]}}), "unknown shape"),
        (as_json([1]), "unknown shape"),
        (redirect("https://elsewhere.example/"), "redirected"),
        (Reply(b"{}", "application/json", length=500), "could not be asked"),
    ],
)  # fmt: skip
def test_a_provider_that_errs_is_named_with_what_it_did(
    searx: Worker, brave: Worker, engine: Site, reply: Reply, said: str
) -> None:
    engine.pages["/search"] = engine.pages["/brave"] = reply
    for worker, name in ((searx, "searxng"), (brave, "brave")):
        ending = worker.call("web_search", {"query": "x"})
        assert ending.end == "failed"
        assert f"The search provider {name}" in ending.message
        assert said in ending.message
        assert KEY not in json.dumps(ending.result)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "TOOLSERVER_WEB__SEARCH_PROVIDER"),
        ({"search_provider": "none"}, "No search provider is configured"),
        ({"search_provider": "searxng"}, "TOOLSERVER_WEB__SEARXNG_URL"),
        ({"search_provider": "brave"}, "TOOLSERVER_WEB__BRAVE_API_KEY"),
        ({"search_provider": "altavista"}, "searxng, brave or none"),
    ],
)
def test_what_is_not_configured_is_said_with_the_setting(env: dict[str, str], said: str) -> None:
    with running_worker(None, **env) as worker:
        ending = worker.call("web_search", {"query": "x"})
    assert ending.end == "failed"
    assert said in ending.message


def test_a_provider_that_policy_refuses_is_denied(proxy: StandInProxy, canary: Site) -> None:
    with running_worker(proxy, search_provider="searxng", searxng_url=canary.url()) as worker:
        ending = worker.call("web_search", {"query": "x"})
    assert ending.end == "denied"
    assert "The search provider searxng could not be asked" in ending.message
    assert "nothing allows it" in ending.message


def test_a_providers_broken_address_is_no_fault_of_the_arguments() -> None:
    with running_worker(search_provider="searxng", searxng_url="http://user:pw@host/") as worker:
        ending = worker.call("web_search", {"query": "x"})
    assert ending.end == "failed"
    assert "errors" not in ending.outcome


@pytest.mark.parametrize(
    ("arguments", "pointer"),
    [({}, "/query"), ({"query": "  "}, "/query"), ({"query": "x" * 401}, "/query"), ({"query": 5}, "/query"), ({"query": "x", "max_results": 0}, "/max_results"),
     ({"query": "x", "max_results": True}, "/max_results"), ({"query": "x", "max_results": 21}, "/max_results")],
)  # fmt: skip
def test_bad_arguments_are_invalid(searx: Worker, arguments: dict[str, Any], pointer: str) -> None:
    ending = searx.call("web_search", arguments)
    assert ending.end == "invalid"
    assert ending.outcome["errors"][0]["pointer"] == pointer
