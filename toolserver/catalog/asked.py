"""What a description of an image says: its own labels, an MCP registry's server.json, an entry of a Docker MCP catalog.

A description never grants anything. What it gives without granting (a name, a command, variables) is taken as a default; what
it asks for is told, with the option that grants it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

PREFIX = "io.toolcrib."
REGISTRY_NAME = "io.modelcontextprotocol.server.name"
MAX_FILE_BYTES = 8 << 20
_GRANTS = {"workspace": "--workspace", "egress": "--egress", "memory-mb": "--memory-mb", "scope": "--scope"}
_PLACEHOLDER = re.compile(r"\{\{.*?\}\}|\$\{?[A-Za-z_]|\{[A-Za-z_][A-Za-z0-9_]*\}")


class DescriptionProblem(Exception):  # noqa: N818 - reads as what it names
    """The description can't be used. The message is a sentence for the operator."""


@dataclass
class Asked:
    """`fields` as ToolEntry has them, all of them harmless. `asks`: what else is wanted, each with the option that grants it.

    `secrets`: variables that have to come from `--secret`; `required`: those of them without which it will not work.
    """

    name: str | None = None
    arguments: list[str] = field(default_factory=list)  # after the image's own entrypoint
    fields: dict[str, Any] = field(default_factory=dict)
    asks: list[str] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)
    unset: list[str] = field(default_factory=list)  # variables without which it will not work


def of_labels(labels: Mapping[str, str]) -> Asked:
    """Of an image's own labels; those that are not known are passed over."""
    asked = Asked()
    told = {key.removeprefix(PREFIX): value for key, value in labels.items() if key.startswith(PREFIX)}
    name = told.get("name") or labels.get(REGISTRY_NAME, "").rpartition("/")[2]
    asked.name = plain_name(name) if name else None
    for key, option in _GRANTS.items():
        if (value := told.get(key, "").strip()) and value not in ("none", "session"):
            asked.asks.append(f"{key} {value}: grant it with {option} {value}")
    for secret in told.get("secrets", "").replace(",", " ").split():
        asked.secrets[secret] = ""
    return asked


def read_file(text: str, name: str | None) -> Asked:
    """Of a server.json or a Docker MCP catalog; `name` picks an entry of the latter. Raises DescriptionProblem."""
    try:
        told = json.loads(text) if text.lstrip().startswith(("{", "[")) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as problem:
        raise DescriptionProblem(f"it is neither JSON nor YAML: {str(problem).splitlines()[0]}") from problem
    if isinstance(told, dict) and isinstance(told.get("server"), dict):
        told = told["server"]  # as the registry's own API wraps it
    if not isinstance(told, dict):
        raise DescriptionProblem("it holds no object: a server.json or an entry of a Docker MCP catalog is wanted")
    if "packages" in told or "remotes" in told:
        return _of_server_json(told)
    if isinstance(told.get("registry"), dict):
        return _of_catalog(told["registry"], name)
    if "image" in told or told.get("type") in ("server", "remote", "poci"):
        return _of_catalog_entry(str(told.get("name") or name or "") or None, told)
    if len(told) == 1 and isinstance(only := next(iter(told.values())), dict) and "image" in only:
        return _of_catalog_entry(str(next(iter(told))), only)
    raise DescriptionProblem(
        "it is no server.json (which has packages) and no Docker MCP catalog (which has registry, or an image)"
    )


def plain_name(text: str) -> str:
    """A name for an added image, made of a text: small letters, digits and `-`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = re.sub(r"^[^a-z]+", "", name)
    return name[:41].rstrip("-") or "tool"


def name_of_reference(reference: str) -> str:
    last = reference.partition("@")[0].rsplit("/", 1)[-1].partition(":")[0]
    return plain_name(last)


# -- MCP registry


def _of_server_json(told: dict[str, Any]) -> Asked:
    packages = [_camel(one) for one in told.get("packages") or () if isinstance(one, dict)]
    ours = [one for one in packages if one.get("registryType") in ("oci", "docker")]
    if not ours:
        kinds = sorted({str(one.get("registryType")) for one in packages})
        what = f"its packages are of the kind {', '.join(kinds)}" if kinds else "it is a remote server"
        raise DescriptionProblem(
            f"{what}; only container images (oci) can be added: put it into an image, see toolserver tools new"
        )
    package = next((one for one in ours if _transport(one) == "stdio"), None)
    if package is None:
        raise DescriptionProblem(
            f"its image speaks {_transport(ours[0])}; only images that speak MCP on stdio can be added"
        )
    asked = Asked(name=plain_name(str(told.get("name", "")).rpartition("/")[2]))
    asked.fields["image"] = _image_of(package)
    asked.arguments = _arguments(package.get("packageArguments"), asked)
    _runtime_arguments(package.get("runtimeArguments"), asked)
    for one in package.get("environmentVariables") or ():
        _variable(_camel(one) if isinstance(one, dict) else {}, asked)
    return asked


def _camel(told: dict[str, Any]) -> dict[str, Any]:
    """Earlier versions of the format have snake_case."""
    return {re.sub(r"_([a-z])", lambda found: found[1].upper(), key): value for key, value in told.items()}


def _transport(package: dict[str, Any]) -> str:
    transport = package.get("transport")
    return str(transport.get("type", "stdio")) if isinstance(transport, dict) else "stdio"


def _image_of(package: dict[str, Any]) -> str:
    identifier = str(package.get("identifier") or package.get("name") or "")
    base = str(package.get("registryBaseUrl") or "").partition("://")[2].strip("/")
    first = identifier.partition("/")[0]
    if base and "." not in first and ":" not in first and base != "docker.io":
        identifier = f"{base}/{identifier}"
    version = str(package.get("version") or "")
    tagged = "@" in identifier or ":" in identifier.rsplit("/", 1)[-1]
    return f"{identifier}:{version}" if version and not tagged else identifier


def _arguments(told: Any, asked: Asked) -> list[str]:
    command: list[str] = []
    for one in told if isinstance(told, list) else ():
        value = one.get("value", one.get("default"))
        if value is None:
            if one.get("isRequired"):
                asked.asks.append(
                    f"argument {one.get('name') or one.get('valueHint')}: give the whole command with --command"
                )
            continue
        if one.get("type") == "named":
            command.append(str(one.get("name")))
        command.append(str(value))
    return command


def _runtime_arguments(told: Any, asked: Asked) -> None:
    """Options for `docker run`: variables are taken as such, all else is refused by name."""
    for one in told if isinstance(told, list) else ():
        name, value = str(one.get("name", "")), str(one.get("value", ""))
        if one.get("type") == "named" and name in ("-e", "--env") and "=" in value:
            variable, _, given = value.partition("=")
            secret = any(isinstance(v, dict) and v.get("isSecret") for v in (one.get("variables") or {}).values())
            required = any(isinstance(v, dict) and v.get("isRequired") for v in (one.get("variables") or {}).values())
            part = {
                "name": variable,
                "isSecret": secret,
                "isRequired": required,
                "description": one.get("description", ""),
            }
            _variable({**part, **({} if _PLACEHOLDER.search(given) else {"value": given})}, asked)
        elif name not in ("-i", "--interactive", "--rm", "--init", ""):
            asked.asks.append(f"{name} {value}".strip() + ": an option of docker run, which no image is granted")


def _variable(one: dict[str, Any], asked: Asked) -> None:
    name = str(one.get("name", ""))
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return
    if one.get("isSecret"):
        asked.secrets[name] = str(one.get("description") or "")[:200]
        asked.required |= {name} if one.get("isRequired") else set()
        return
    value = one.get("value", one.get("default"))
    if value is not None and not _PLACEHOLDER.search(str(value)):
        asked.fields.setdefault("env", {})[name] = str(value)
    elif one.get("isRequired"):
        asked.unset.append(name)


# -- Docker MCP catalog


def _of_catalog(registry: dict[str, Any], name: str | None) -> Asked:
    known = {str(key): one for key, one in registry.items() if isinstance(one, dict)}
    if name is None and len(known) == 1:
        name = next(iter(known))
    if name not in known:
        shown = ", ".join(sorted(known)[:20]) or "none"
        raise DescriptionProblem(f"choose an entry of the catalog with --name; it has {shown}")
    return _of_catalog_entry(name, known[name])


def _of_catalog_entry(name: str | None, told: dict[str, Any]) -> Asked:
    if told.get("type") == "remote" or told.get("remote") or told.get("sseEndpoint"):
        raise DescriptionProblem("it is a remote server; only images that speak MCP on stdio can be added")
    if told.get("type") == "poci" or not isinstance(told.get("image"), str):
        raise DescriptionProblem("it names no image of an MCP server; a command-line image is added with --kind cli")
    asked = Asked(name=plain_name(name) if name else None)
    asked.fields["image"] = told["image"]
    command = [str(one) for one in told.get("command") or ()]
    if any(_PLACEHOLDER.search(one) for one in command):
        asked.asks.append(f"command {json.dumps(command)}: it has places to fill in, give it with --command")
    else:
        asked.arguments = command
    for one in told.get("secrets") or ():
        if isinstance(one, dict) and isinstance(one.get("env"), str):
            asked.secrets[one["env"]] = str(one.get("name") or "")[:200]
            asked.required.add(one["env"])
    for one in told.get("env") or ():
        _variable({**one, "isRequired": True} if isinstance(one, dict) else {}, asked)
    hosts = [str(host) for host in told.get("allowHosts") or ()]
    if hosts:
        asked.asks.append(f"egress {','.join(hosts)}: grant it with --egress {','.join(hosts)}")
    elif not told.get("disableNetwork"):
        asked.asks.append(
            "egress open: it is not said to do without a network; grant it with --egress open, or better host:port"
        )
    for volume in told.get("volumes") or ():
        asked.asks.append(
            f"volume {volume}: no image is granted a folder of the host; --workspace ro or rw gives it the session's files"
        )
    for key in ("user", "extraHosts"):
        if told.get(key):
            asked.asks.append(f"{key} {told[key]}: no image is granted that")
    return asked
