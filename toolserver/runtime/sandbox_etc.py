"""The /etc of bubblewrap sandboxes: made from the few files of the host that programs need, none that tells of it."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

from toolserver.runtime.bubblewrap_arguments import CERTIFICATES

_COPIED = ("localtime", "timezone", "mime.types", "magic")
_COPIED_FOR_NETWORK = ("resolv.conf", "services", "protocols")
_FONTS = b"""<?xml version="1.0"?>
<fontconfig><dir>/usr/share/fonts</dir><cachedir>/tmp/fontconfig</cachedir></fontconfig>
"""  # without any, fc-list, which matplotlib asks, complains on stderr


def make_etc(folder: Path, *, network: bool) -> None:
    """Fill an empty `folder`. Mount points for passwd and group are made too. Blocking. Raises OSError."""
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    if Path("/etc/alternatives").is_dir():  # links such as awk's, relative to nothing of the host
        shutil.copytree("/etc/alternatives", folder / "alternatives", symlinks=True)
    for name in (*_COPIED, *(_COPIED_FOR_NETWORK if network else ())):
        source = Path("/etc", name)
        if source.is_file():
            _write(folder / name, source.read_bytes())
    _write(folder / "hosts", b"127.0.0.1 localhost\n::1 localhost\n")
    _write(folder / "nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    for name in ("passwd", "group"):
        _write(folder / name, b"")
    (folder / "fonts").mkdir()
    _write(folder / "fonts" / "fonts.conf", _FONTS)
    authorities = Path(CERTIFICATES)
    if not authorities.is_file():
        authorities = Path(ssl.get_default_verify_paths().cafile or CERTIFICATES)
    if network and authorities.is_file():
        (folder / "ssl" / "certs").mkdir(parents=True)
        _write(folder / Path(CERTIFICATES).relative_to("/etc"), authorities.read_bytes())


def make_users(folder: Path, uid: int) -> None:
    """The passwd and group that `folder` shows: the sandbox user and nobody."""
    _write(folder / "passwd", f"sandbox:x:{uid}:{uid}::/tmp:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n".encode())
    _write(folder / "group", f"sandbox:x:{uid}:\nnogroup:x:65534:\n".encode())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
