"""Descriptions of images: what grants nothing is taken, what grants something is told, and what can't be used is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolserver.catalog.asked import DescriptionProblem, of_labels, plain_name, read_file

SERVER: dict[str, Any] = {
    "name": "io.github.example/weather-mcp",
    "packages": [
        {"registryType": "npm", "identifier": "weather", "version": "1.0.0"},
        {
            "registryType": "oci",
            "registryBaseUrl": "https://ghcr.io",
            "identifier": "example/weather",
            "version": "1.0.2",
            "transport": {"type": "stdio"},
            "packageArguments": [
                {"type": "named", "name": "--units", "value": "metric"},
                {"type": "positional", "value": "serve"},
            ],
            "runtimeArguments": [
                {"type": "named", "name": "--mount", "value": "type=bind,source=/,target=/host"},
                {"type": "named", "name": "--privileged"},
            ],
            "environmentVariables": [
                {"name": "API_KEY", "isSecret": True, "isRequired": True, "description": "The key"},
                {"name": "MODE", "default": "fast"},
                {"name": "bad name", "value": "x"},
            ],
        },
    ],
}
CATALOG = """
registry:
  github:
    type: server
    image: ghcr.io/example/github@sha256:0123
    command: [stdio, --read-only]
    secrets:
      - {name: github.token, env: GITHUB_TOKEN}
    env:
      - {name: HOST, value: github.com}
      - {name: PATHS, value: "{{github.paths|volume}}"}
    allowHosts: ["api.github.com:443"]
    volumes: ["/var/run/docker.sock:/var/run/docker.sock"]
    user: root
  far:
    type: remote
    remote: {url: "https://example.org/mcp"}
"""


def test_a_server_json_of_a_registry() -> None:
    asked = read_file(json.dumps(SERVER), None)
    assert (asked.name, asked.fields["image"]) == ("weather-mcp", "ghcr.io/example/weather:1.0.2")
    assert asked.arguments == ["--units", "metric", "serve"]
    assert asked.fields["env"] == {"MODE": "fast"}
    assert (asked.secrets, asked.required) == ({"API_KEY": "The key"}, {"API_KEY"})
    assert len(asked.asks) == 2
    assert all("no image is granted" in ask for ask in asked.asks)
    assert set(asked.fields) == {"image", "env"}
    assert read_file(json.dumps({"server": SERVER}), None).fields == asked.fields


def test_an_entry_of_a_docker_catalog() -> None:
    asked = read_file(CATALOG, "github")
    assert asked.fields == {"image": "ghcr.io/example/github@sha256:0123", "env": {"HOST": "github.com"}}
    assert asked.arguments == ["stdio", "--read-only"]
    assert (asked.required, asked.unset) == ({"GITHUB_TOKEN"}, ["PATHS"])
    told = "\n".join(asked.asks)
    for what in ("--egress api.github.com:443", "docker.sock", "user root"):
        assert what in told


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("{", None, "neither JSON nor YAML"),
        ("[1]", None, "no object"),
        ("{}", None, "no server.json"),
        ("a: [", None, "neither JSON nor YAML"),
        ("!!python/object/apply:os.system ['true']", None, "neither JSON nor YAML"),
        ("[" * 100_000, None, "neither JSON nor YAML"),
        (CATALOG, None, "choose an entry"),
        (CATALOG, "absent", "it has far, github"),
        (CATALOG, "far", "remote server"),
        ('{"packages": [{"registryType": "npm"}]}', None, "of the kind npm"),
        ('{"remotes": [{}]}', None, "remote server"),
        ('{"packages": [{"registryType": "oci", "transport": {"type": "sse"}}]}', None, "speaks sse"),
    ],
)
def test_what_can_not_be_used_is_said(text: str, name: str | None, why: str) -> None:
    with pytest.raises(DescriptionProblem, match=why):
        read_file(text, name)


def test_labels_grant_nothing() -> None:
    asked = of_labels(
        {
            "io.toolcrib.name": "Mine!",
            "io.toolcrib.workspace": "rw",
            "io.toolcrib.egress": "open",
            "io.toolcrib.secrets": "TOKEN, OTHER",
            "io.toolcrib.privileged": "true",
        }
    )
    assert (asked.name, asked.fields, sorted(asked.secrets)) == ("mine", {}, ["OTHER", "TOKEN"])
    assert [ask.partition(":")[0] for ask in asked.asks] == ["workspace rw", "egress open"]


@pytest.mark.parametrize(
    ("text", "name"),
    [("Mine!", "mine"), ("../../etc", "etc"), ("", "tool"), ("9lives", "lives"), ("é", "tool"), ("a" * 99, "a" * 41)],
)
def test_a_name_is_made_of_any_text(text: str, name: str) -> None:
    assert plain_name(text) == name
