"""Images of others on a Docker engine: what they may want, what they may lack, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.foreign_images import ForeignImages, foreign_images
from toolserver.errors import ImageUnusable, RuntimeUnavailable, runtime_unavailable
from toolserver.runtime import docker_sidecar
from toolserver.runtime.base import Limits, Sandbox, SandboxSpec
from toolserver.runtime.docker_engine import DockerEngine
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings

LIMITS = Limits(memory_mb=128, cpus=1, pids=32, disk_mb=16)
LOOK = (
    "import json, os, sys; line = sys.stdin.readline(); print(json.dumps({'line': line, 'args': sys.argv[1:], 'cwd': os.getcwd(), "
    "'uid': os.getuid(), 'env': dict(os.environ), 'first': open('/proc/1/cmdline').read(), "
    "'groups': os.getgroups(), 'writes': [p for p in ('/', '/etc', '/tmp', '/data', '/.toolcrib/launcher') if os.access(p, os.W_OK)]}), flush=True)"
)
SECRET = "s3cr=t 'quoted' $HOME \\ ümlaut"

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def images() -> Iterator[ForeignImages]:
    with foreign_images() as made:
        yield made


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[DockerRuntime]:
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", tmp_path, RuntimeSettings())
    await runtime.open()
    yield runtime
    await runtime.sweep()
    await runtime.close()
    look = DockerEngine(None, 20)
    left = await volumes_of(look)
    look.close()
    assert not {name for name in left if name.startswith(runtime._prefix)}


def spec(reference: str, *command: str, **changes: Any) -> SandboxSpec:
    made = SandboxSpec("box", "s1", "theirs", reference, command, LIMITS, workspace="none", foreign=True)
    return replace(made, **changes)


async def said(sandbox: Sandbox) -> Any:
    text = b""
    async with asyncio.timeout(30):
        while b"\n" not in text:
            data = await sandbox.receive()
            assert data, text
            text += data
    return json.loads(text.partition(b"\n")[0])


async def volumes_of(engine: DockerEngine) -> set[str]:
    return {volume["Name"] for volume in await engine.call(lambda c: c.volumes()["Volumes"] or [])}


async def test_an_image_runs_as_it_says_with_all_that_ours_are_held_to(
    runtime: DockerRuntime, images: ForeignImages
) -> None:
    image = images.build(
        "FROM base",
        "USER root",
        f'ENTRYPOINT ["python3", "-c", {json.dumps(LOOK)}]',
        'CMD ["one", "two words"]',
        "ENV COLOUR=blue HOME=/root",
        "WORKDIR /odd place/x",
        "VOLUME /data /tmp",
        "HEALTHCHECK CMD exit 1",
        "ONBUILD RUN false",
        "LABEL toolcrib.sandbox=other toolcrib.egress=open",
    )
    before = await volumes_of(runtime.engine)
    sandbox = await runtime.start(spec(image, env={"GIVEN": "1"}), {"TOKEN": SECRET, "KEY": "k"})
    told = await runtime.engine.call(lambda client: client.inspect_container(sandbox.handle))
    about = json.dumps([told, await runtime.engine.image(image)])
    await sandbox.send(b"hello\n")
    seen = await said(sandbox)
    await sandbox.remove()
    assert seen["line"] == "hello\n"
    assert seen["args"] == ["one", "two words"]
    assert seen["cwd"] == "/odd place/x"
    assert seen["uid"] == 10001
    assert seen["env"]["COLOUR"] == "blue"
    assert seen["env"]["GIVEN"] == "1"
    assert seen["env"]["HOME"] == "/tmp"
    assert (seen["env"]["TOKEN"], seen["env"]["KEY"]) == (SECRET, "k")
    assert not {name for name in seen["env"] if name.startswith("_") or name in ("SHLVL", "OLDPWD")}
    assert seen["writes"] == ["/tmp", "/data"]
    assert seen["first"].startswith("/.toolcrib/launcher/tini\0")
    assert "s3cr" not in about
    host = told["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["ReadonlyRootfs"]) == ("none", ["ALL"], True)
    assert (host["PidsLimit"], host["Memory"], host["LogConfig"]["Type"]) == (32, 128 << 20, "none")
    assert told["Config"]["User"] == "10001:10001"
    assert told["Config"]["Healthcheck"] == {"Test": ["NONE"]}
    assert told["Config"]["Labels"]["toolcrib.sandbox"] == "box"
    assert {(m["Type"], m["Destination"], m["RW"]) for m in told["Mounts"]} >= {
        ("volume", "/.toolcrib/launcher", False)
    }
    mine = [name for name in await volumes_of(runtime.engine) - before if name.startswith(runtime._prefix)]
    assert mine == [await runtime._launcher.volume()]
    mounted = {mount["Name"] for mount in told["Mounts"] if mount["Type"] == "volume"}
    # beside the launcher one for /tmp, which a tmpfs hides: it goes with the container
    assert len(mounted) <= 2
    assert not mounted - set(mine) & await volumes_of(runtime.engine)


async def test_secrets_stand_not_in_the_environment_of_the_first_process(
    runtime: DockerRuntime, images: ForeignImages
) -> None:
    image = images.build("FROM base", 'CMD ["cat", "/proc/1/environ", "/proc/1/cmdline"]')
    sandbox = await runtime.start(spec(image), {"TOKEN": "s3cr3t"})
    text = b""
    while data := await sandbox.receive():
        text += data
    await sandbox.remove()
    assert b"HOME=/tmp" in text
    assert b"s3cr3t" not in text
    assert b"TOKEN" not in text


async def test_an_image_of_one_static_program_needs_no_shell(runtime: DockerRuntime, images: ForeignImages) -> None:
    image = images.build("FROM base AS b", "FROM scratch", "COPY --from=b /bin/busybox /cat", 'ENTRYPOINT ["/cat"]')
    sandbox = await runtime.start(spec(image))
    await sandbox.send(b'"hello"\n')
    assert await said(sandbox) == "hello"
    await sandbox.remove()


async def test_a_command_in_shell_form_and_one_of_the_operator(runtime: DockerRuntime, images: ForeignImages) -> None:
    image = images.build("FROM base", 'ENTRYPOINT echo \\"$HOME\\"; sleep 100', "WORKDIR /")
    sandbox = await runtime.start(spec(image))
    assert await said(sandbox) == "/tmp"
    await sandbox.remove()
    sandbox = await runtime.start(spec(image, "pwd", "--", working_dir="/usr"))
    assert (await sandbox.receive()).strip() == b"/usr"
    await sandbox.remove()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['CMD ["no-such-program", "x"]'], "There is no program 'no-such-program' in it"),
        (['ENTRYPOINT ["/opt/none"]'], "There is no program '/opt/none' in it"),
        (['ENTRYPOINT ["/etc"]'], "'/etc' is no program"),
        (["USER root", "RUN echo hello > /x && chmod 755 /x", 'CMD ["/x"]'], "exec format error"),
        (["USER root", r"RUN printf '#!/no/ruby\n' > /x && chmod 755 /x", 'CMD ["/x"]'], "a script for '/no/ruby'"),
        (["USER root", "RUN cp /bin/true /x && chmod 700 /x", 'CMD ["/x"]'], "may not be run by the sandbox's user"),
        (
            [
                "USER root",
                r"RUN head -c 18 /bin/true > /x && printf '\001\002rest' >> /x && chmod 755 /x",
                'CMD ["/x"]',
            ],
            "another processor",
        ),
        (["CMD []", "ENTRYPOINT []"], "names no command"),
        (["VOLUME /a /b /c /d /e /f /g /h /i", 'CMD ["true"]'], "declares 9 volumes"),
        (["USER root", "RUN touch /file", "WORKDIR /file", 'CMD ["true"]'], "can't be run"),
    ],
    ids=[
        "no-program",
        "no-path",
        "folder",
        "text",
        "no-interpreter",
        "not-ours",
        "processor",
        "none",
        "volumes",
        "workdir",
    ],
)
async def test_what_an_image_lacks_is_named_and_nothing_is_left(
    runtime: DockerRuntime, images: ForeignImages, lines: list[str], told: str
) -> None:
    if any("WORKDIR /file" in line for line in lines):
        image = images.build("FROM base", "USER root", "RUN touch /file", 'CMD ["true"]')
        wanted = spec(image, working_dir="/file")
    else:
        wanted = spec(images.build("FROM base", *lines))
    with pytest.raises(RuntimeUnavailable, match="theirs") as caught:
        await runtime.start(wanted, {"TOKEN": "s3cr3t"})
    assert told in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert not (await runtime.inventory()).sandboxes


async def test_an_image_that_is_not_there_is_not_pulled(runtime: DockerRuntime) -> None:
    with pytest.raises(ImageUnusable, match=r"docker pull.*toolserver tools add"):
        await runtime.start(spec("example.invalid/nobody/none:1"))


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("exit 7", "exited"),
        ('exec python3 -c "x = bytearray(300 << 20)"', "oom"),
        ('python3 -c "x = bytearray(300 << 20)"; exit 3', "oom"),
        ("while :; do echo flood >&2; done & exit 7", "exited"),
    ],
    ids=["at-once", "memory", "memory-of-a-child", "flood"],
)
async def test_how_it_ended_is_told(runtime: DockerRuntime, images: ForeignImages, program: str, cause: str) -> None:
    image = images.build("FROM base", "WORKDIR /")
    sandbox = await runtime.start(spec(image, "sh", "-c", program))
    async with asyncio.timeout(60):
        assert await sandbox.receive() == b""
    end = await sandbox.remove()
    assert end.cause == cause


async def test_one_that_ignores_all_is_killed_and_its_children_with_it(
    runtime: DockerRuntime, images: ForeignImages
) -> None:
    image = images.build("FROM base", "WORKDIR /")
    stubborn = "trap '' TERM; (while :; do echo flood >&2; sleep 0.01; done) & setsid sleep 1000 & echo '1'; while :; do sleep 100; done"
    sandbox = await runtime.start(spec(image, "sh", "-c", stubborn))
    assert await said(sandbox) == 1
    end = await sandbox.remove()
    assert end.cause == "killed"
    assert not (await runtime.inventory()).sandboxes


async def test_zombies_are_reaped_and_processes_bounded(runtime: DockerRuntime, images: ForeignImages) -> None:
    image = images.build("FROM base", "WORKDIR /")
    code = (
        "import os, time, json\n"
        "for _ in range(60):\n"
        "    if os.fork() == 0:\n"
        "        os._exit(0) if os.fork() else os._exit(0)\n"
        "    os.wait()\n"
        "time.sleep(0.3)\n"
        "left = [p for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/stat').read().split()[2] == 'Z']\n"
        "made = 0\n"
        "try:\n"
        "    while made < 100:\n"
        "        if os.fork() == 0: time.sleep(1000)\n"
        "        made += 1\n"
        "except OSError: pass\n"
        "print(json.dumps([left, made]), flush=True); time.sleep(1000)\n"
    )
    sandbox = await runtime.start(spec(image, "python3", "-c", code))
    zombies, made = await said(sandbox)
    await sandbox.remove()
    assert zombies == []
    assert made < 32


async def test_it_is_attached_again_by_a_later_server(
    runtime: DockerRuntime, images: ForeignImages, tmp_path: Path
) -> None:
    image = images.build("FROM base", "WORKDIR /")
    sandbox = await runtime.start(spec(image, "cat"), {"TOKEN": "t"})
    await sandbox.release()
    later = DockerRuntime(runtime._server_id, tmp_path, RuntimeSettings())
    await later.open()
    again = await later.attach(sandbox.spec, sandbox.handle)
    await again.send(b"1\n")
    assert await said(again) == 1
    other = await later.start(spec(image, "cat", sandbox_id="box2"))  # beside one that has the launcher in use
    await other.send(b"2\n")
    assert await said(other) == 2
    await again.release()
    await later.close()
    assert (await runtime.inventory()).running == {"box"}


async def test_the_launcher_is_made_again_when_somebody_removed_it(
    runtime: DockerRuntime, images: ForeignImages
) -> None:
    image = images.build("FROM base", "WORKDIR /")
    await (await runtime.start(spec(image, "cat"))).remove()
    volume = await runtime._launcher.volume()
    await runtime.engine.call(lambda client: client.remove_volume(volume))
    with pytest.raises(RuntimeUnavailable) as caught:
        await runtime.start(spec(image, "cat", sandbox_id="second"))
    assert "/var/" not in runtime_unavailable(caught.value).message
    await (await runtime.start(spec(image, "cat", sandbox_id="third"))).remove()


FORWARDER = (
    "import os, socket, sys, threading\n"
    "door = '/.toolcrib/egress/' + sys.argv[1]\n"
    "if not os.path.exists(door):\n"
    "    sys.exit('there is no such door')\n"
    "listener = socket.create_server(('127.0.0.1', 3128))\n"
    "print('ready', flush=True)\n"
    "while True:\n"
    "    link, _ = listener.accept()\n"
    "    link.sendall(open(door, 'rb').read()); link.close()\n"
)
ASK = (
    "import json, socket, sys\n"
    "out = {}\n"
    "for place in (('127.0.0.1', 3128), ('1.1.1.1', 80)):\n"
    "    try:\n"
    "        with socket.create_connection(place, 5) as link: out[place[0]] = link.recv(99).decode()\n"
    "    except OSError as no: out[place[0]] = type(no).__name__\n"
    "names = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]\n"
    "print(json.dumps([out, names]), flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def way_out(images: ForeignImages, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image in place of the egress image, whose doors are plain files; the name of a door."""
    place = "/opt/toolcrib/sandbox_images/base"
    image = images.build(
        "FROM base",
        "USER root",
        f"RUN mkdir -p {place}",
        f"RUN printf %s {base64.b64encode(FORWARDER.encode()).decode()} | base64 -d > {place}/forwarder.py",
    )
    monkeypatch.setattr(
        docker_sidecar,
        "sidecar_spec",
        lambda spec, made=docker_sidecar.sidecar_spec: replace(made(spec), reference=image),
    )
    return "0123456789abcdef" * 2


async def put_door(runtime: DockerRuntime, images: ForeignImages, door: str) -> None:
    """Into the volume of the doors, as the proxy of the server has it."""
    image = images.build("FROM base", "USER root", f"RUN mkdir /doors && echo through > /doors/{door}")
    labels = {"toolcrib.server": runtime._server_id, "toolcrib.role": "doors"}
    await runtime.engine.call(lambda client: client.create_volume(runtime._doors, labels=labels))
    host = {"Mounts": [{"Type": "volume", "Source": runtime._doors, "Target": "/doors"}]}
    made = await runtime.engine.create({"Image": image, "Cmd": ["true"], "HostConfig": host}, f"{runtime._prefix}-x")
    await runtime.engine.call(lambda client: client.remove_container(made))


async def test_the_way_out_of_an_image_is_a_container_beside_it(
    runtime: DockerRuntime, images: ForeignImages, way_out: str
) -> None:
    image = images.build("FROM base", "WORKDIR /")
    await put_door(runtime, images, way_out)
    try:
        sandbox = await runtime.start(spec(image, "python3", "-c", ASK, door=way_out))
        out, interfaces = await said(sandbox)
        assert out == {"127.0.0.1": "through\n", "1.1.1.1": "OSError"}
        assert interfaces == ["lo"]
        found = await runtime.inventory()
        assert found.sandboxes == found.running == {"box"}
        mine = {"label": f"toolcrib.server={runtime._server_id}"}
        listed = await runtime.engine.call(lambda client: client.containers(all=True, filters=mine))
        beside = [one for one in listed if one["Labels"].get("toolcrib.role") == "egress"]
        assert len(listed) == 2
        told = (await runtime.engine.call(lambda client: client.inspect_container(beside[0]["Id"])))["HostConfig"]
        assert (told["NetworkMode"], told["CapDrop"], told["ReadonlyRootfs"]) == ("none", ["ALL"], True)
        await sandbox.release()
        again = await runtime.attach(sandbox.spec, sandbox.handle)
        await again.remove()
        assert not await runtime.engine.call(lambda client: client.containers(all=True, filters=mine))
        left = await runtime.start(spec(image, "cat", door=way_out, sandbox_id="box2"))
        assert await runtime.sweep() == 1
        await left.remove()
        with pytest.raises(RuntimeUnavailable, match="no such door"):
            await runtime.start(spec(image, "cat", door="f" * 32))
        assert not await runtime.engine.call(lambda client: client.containers(all=True, filters=mine))
    finally:
        await runtime.sweep()
        await runtime.engine.call(lambda client: client.remove_volume(runtime._doors))
