"""Tool images are read from their folders; a broken one costs only itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolserver.catalog.catalog import Catalog
from toolserver.catalog.manifest import FORBIDDEN
from toolserver.settings import Settings, WebSettings

IMAGE = """
name = "{name}"
kind = "mcp"
reference = "toolcrib/{name}"
command = ["python3", "worker.py"]
workspace = "rw"
egress = "none"
start = "eager"

[env]
GREETING = "hello"

[limits]
memory_mb = 128
"""


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The tool {name} of the tests", "inputSchema": {"type": "object"}, **more}


def folder(root: Path, name: str, *, toml: str | None = None, tools: Any = None) -> Path:
    place = root / name
    place.mkdir()
    (place / "image.toml").write_text(IMAGE.format(name=name) if toml is None else toml)
    (place / "tools.json").write_text(
        tools if isinstance(tools, str) else json.dumps({"tools": tools or [entry(f"{name}_run")]})
    )
    return place


@pytest.fixture
def conf(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    made.mkdir()
    (made / "base").mkdir()
    return made


def refused(conf: Settings, root: Path) -> str:
    """The problem of the folder `bad`; the folder `good` loads all the same."""
    folder(root, "good")
    catalog = Catalog.load(conf, root)
    assert list(catalog.images) == ["good"]
    (problem,) = catalog.problems
    assert str(root) not in problem
    return problem


def test_an_image_is_read_with_everything(conf: Settings, root: Path) -> None:
    folder(
        root,
        "one",
        tools=[entry("run", title="Run it", outputSchema={"type": "object"}, annotations={"readOnlyHint": True})],
    )
    image = Catalog.load(conf, root).images["one"]
    assert image.command == ("python3", "worker.py")
    assert (image.workspace, image.egress.mode, image.start) == ("rw", "none", "eager")
    assert image.env == {"GREETING": "hello"}
    assert image.limits.memory_mb == 128
    assert image.limits.pids is None
    assert image.tools[0].as_json() == {
        "name": "run",
        "description": "The tool run of the tests",
        "input_schema": {"type": "object"},
        "output_schema": {"type": "object"},
        "annotations": {"title": "Run it", "readOnlyHint": True},
        "image": "one",
    }


def test_a_reference_without_tag_gets_the_packages_version(conf: Settings, root: Path) -> None:
    folder(root, "one")
    folder(root, "two", toml=IMAGE.format(name="two").replace('"toolcrib/two"', '"localhost:5000/two:7"'))
    images = Catalog.load(conf, root).images
    assert images["one"].reference.startswith("toolcrib/one:")
    assert images["two"].reference == "localhost:5000/two:7"


def test_the_images_of_the_package_load_without_problem(conf: Settings) -> None:
    catalog = Catalog.load(conf)
    assert catalog.problems == ()
    assert {"python_execute", "shell_execute", "file_edit", "web_fetch", "web_search"} <= {
        tool.name for tool in catalog.tools()
    }


@pytest.mark.parametrize("key", sorted(FORBIDDEN))
def test_a_manifest_that_asks_for_less_isolation_is_refused_by_name(conf: Settings, root: Path, key: str) -> None:
    folder(root, "bad", toml=f"{key} = true\n" + IMAGE.format(name="bad"))
    problem = refused(conf, root)
    assert "bad/image.toml" in problem
    assert key in problem


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('egress = "none"', 'egress = "host"', "egress"),
        ('egress = "none"', 'network = "host"', "network"),
        ('workspace = "rw"', 'workspace = "/"', "workspace"),
        ('name = "bad"', 'name = "worse"', "must be that of its folder"),
        ('name = "bad"', "", "name: Field required"),
        ('kind = "mcp"', 'kind = "shell"', "kind"),
        ('command = ["python3", "worker.py"]', 'command = "python3 worker.py"', "command"),
        ('command = ["python3", "worker.py"]', "command = []", "command"),
        ("memory_mb = 128", "memory_mb = 1", "memory_mb"),
        ("memory_mb = 128", "privileged = true", "privileged"),
        ('GREETING = "hello"', '"A=B" = "x"', "environment variable"),
        ('GREETING = "hello"', "GREETING = 5", "GREETING"),
        ('start = "eager"', 'start = "eager"\nsurprise = 1', "surprise"),
        ('reference = "toolcrib/bad"', 'reference = "--privileged"', "reference"),
        ("[env]", "[env", "not TOML"),
    ],
)
def test_a_broken_image_file_is_refused_with_file_and_reason(
    conf: Settings, root: Path, old: str, new: str, said: str
) -> None:
    whole = IMAGE.format(name="bad")
    assert old in whole
    folder(root, "bad", toml=whole.replace(old, new))
    problem = refused(conf, root)
    assert "bad/image.toml" in problem
    assert said in problem


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("{", "not JSON"),
        ('{"tools": 5}', "list of tools"),
        ("[" * 100_000, "not JSON"),
        ([5], "tool ?"),
        ([entry("a b")], "name"),
        ([entry("run"), entry("run")], "more than once: run"),
        ([{"name": "run", "inputSchema": {"type": "object"}}], "tool run: description"),
        ([{"name": "run", "description": "x"}], "tool run: inputSchema"),
        ([entry("run", inputSchema={"type": "string"})], '"type" must be "object"'),
        (
            [entry("run", inputSchema={"type": "object", "properties": {"x": {"$ref": "#/nope"}}})],
            "tool run: inputSchema: /properties/x/$ref",
        ),
        ([entry("run", outputSchema={"type": "object", "$ref": "http://x/"})], "tool run: outputSchema"),
        ([entry("call_wait")], "tool call_wait is there already, from the server"),
        ("\xff\xfe", "not JSON"),
    ],
)
def test_a_broken_tool_file_is_refused_with_file_and_reason(conf: Settings, root: Path, tools: Any, said: str) -> None:
    folder(root, "bad", tools=tools)
    problem = refused(conf, root)
    assert "bad/tools.json" in problem
    assert said in problem


def test_a_missing_or_huge_tool_file_is_refused(conf: Settings, root: Path) -> None:
    (folder(root, "bad") / "tools.json").unlink()
    assert "can't be read" in refused(conf, root)
    (root / "bad" / "tools.json").write_text(" " * (2 << 20))
    assert "larger than" in Catalog.load(conf, root).problems[0]


def test_two_images_cannot_have_the_same_tool(conf: Settings, root: Path) -> None:
    folder(root, "aaa", tools=[entry("run")])
    folder(root, "bbb", tools=[entry("run")])
    catalog = Catalog.load(conf, root)
    assert list(catalog.images) == ["aaa"]
    assert "run is there already, from aaa" in catalog.problems[0]


def test_the_operators_web_settings_reach_the_web_image_and_the_key_is_a_secret(root: Path, tmp_path: Path) -> None:
    folder(root, "web")
    web = WebSettings(search_provider="brave", brave_api_key="brave-key-1")
    catalog = Catalog.load(Settings(state_dir=tmp_path, web=web), root)
    image = catalog.images["web"]
    assert image.env["TOOLCRIB_WEB_SEARCH_PROVIDER"] == "brave"
    assert image.secrets["TOOLCRIB_WEB_BRAVE_API_KEY"].read() == "brave-key-1"
    assert "brave-key-1" not in repr(catalog)
    assert "brave-key-1" not in repr(image.env)
