"""Tools are found by name and by words."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolserver.catalog.arguments import check
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.search import MAX_RESULTS
from toolserver.catalog.session_tools import CALL_CANCEL, CALL_WAIT
from toolserver.errors import Code, ToolServerError
from toolserver.settings import Settings


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """As on a server where no optional image was built."""
    loaded = Catalog.load(Settings(state_dir=Path(tmp_path_factory.mktemp("state"))))
    return Catalog({name: image for name, image in loaded.images.items() if not image.optional})


def test_a_tool_is_found_by_its_exact_name(catalog: Catalog) -> None:
    assert catalog.find("file_read").image == "workspace"
    assert catalog.find("web_fetch", ["web"]).image == "web"


def suggestions(catalog: Catalog, name: str, images: list[str] | None = None) -> list[str]:
    with pytest.raises(ToolServerError) as raised:
        catalog.find(name, images)
    assert raised.value.code is Code.TOOL_NOT_FOUND
    assert len(raised.value.message) < 400
    found: list[str] = raised.value.extra["suggestions"]
    return found


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("python_exec", "python_execute"), ("file-read", "file_read"), ("shell_excute", "shell_execute"), ("pyhton", "python_execute"),
        ("FileRead", "file_read"), ("python", "python_execute"), ("readfile", "file_read"), ("wait", "call_wait"), ("functions.web_fetch", "web_fetch"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_near_ones(catalog: Catalog, wrong: str, meant: str) -> None:
    assert meant in suggestions(catalog, wrong)


@pytest.mark.parametrize("odd", ["", "\0", "a" * 100_000, "../x", "🦀", "_", "\ud800"])
def test_any_text_is_taken_for_a_name(catalog: Catalog, odd: str) -> None:
    assert len(suggestions(catalog, odd)) <= 5


def test_a_tool_of_an_image_that_the_session_lacks_is_not_found_nor_suggested(catalog: Catalog) -> None:
    assert "web_fetch" not in suggestions(catalog, "web_fetch", ["workspace"])


def test_tools_are_listed_by_image(catalog: Catalog) -> None:
    assert {tool.image for tool in catalog.tools(["workspace"])} == {"workspace"}
    assert catalog.tools([]) == []
    assert catalog.tools(["nope"]) == []
    names = [tool.name for tool in catalog.tools()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run python code", "python_execute"), ("shell command", "shell_execute"), ("edit a file", "file_edit"), ("editing files", "file_edit"),
        ("search the web", "web_search"), ("download a page", "web_fetch"), ("delete", "file_delete"), ("list folder", "file_list"),
    ],
)  # fmt: skip
def test_words_find_the_obvious_tool(catalog: Catalog, words: str, wanted: str) -> None:
    assert wanted in [tool.name for tool in catalog.search(words, 4)]


@pytest.mark.parametrize("odd", ["", '"*([)\\', "\0", "x" * 300_000, "🦀", "a " * 50_000, "\ud800"])
def test_any_text_can_be_searched_for(catalog: Catalog, odd: str) -> None:
    assert len(catalog.search(odd, 3)) <= 3


def test_the_number_of_results_is_bounded(catalog: Catalog) -> None:
    assert catalog.search("file", 0) == []
    assert catalog.search("file", -5) == []
    assert len(catalog.search("file", 1)) == 1
    assert len(catalog.search("file", 10**9)) <= MAX_RESULTS
    assert all(tool.image == "web" for tool in catalog.search("search file web", 10, ["web"]))


def test_session_tools_want_a_call_id_as_idempotency_keys_are(catalog: Catalog) -> None:
    for tool in (CALL_WAIT, CALL_CANCEL):
        assert tool.image == "toolserver"
        assert check(tool, {"call_id": "abc_-9" * 20}) == []
        assert check(tool, {})
        assert check(tool, {"call_id": "a.b"})
        assert check(tool, {"call_id": "a" * 129})
    assert check(CALL_WAIT, {"call_id": "a", "wait_s": 1.5}) == []
    assert check(CALL_WAIT, {"call_id": "a", "wait_s": -1})[0]["pointer"] == "/wait_s"
    assert CALL_WAIT not in catalog.tools()
