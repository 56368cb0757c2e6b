"""The Chromium process: where it is, how it is started, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sandbox_images.base import cgroup
from sandbox_images.base.door import PROXY
from sandbox_images.browser.devtools import DevTools, OnEvent

PROGRAM = "/usr/lib/chromium/chromium-headless-shell"  # where Debian has it
PROFILE = Path("/tmp/browser")  # in memory, bounded, the sandbox's own
WIDTH, HEIGHT = 1280, 800
_OFF = (
    "AutofillServerCommunication,BackForwardCache,CertificateTransparencyComponentUpdater,HttpsUpgrades,"
    "HttpsFirstBalancedModeAutoEnable,MediaRouter,OptimizationHints,PaintHolding,Prerender2,PushMessaging,"
    "SpareRendererForSitePerProcess,Translate,WebOTP"
)
FLAGS = (
    "--no-sandbox",  # see docs/decisions/browser.md: its own needs namespaces, which ours does not give
    "--remote-debugging-pipe",
    f"--window-size={WIDTH},{HEIGHT}",
    f"--user-data-dir={PROFILE}",
    # the only way out
    f"--proxy-server={PROXY}",
    "--proxy-bypass-list=<-loopback>",
    "--disable-quic",
    "--dns-prefetch-disable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    # nothing that no page asked for
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--disable-field-trial-config",
    f"--disable-features={_OFF}",
    "--no-pings",
    "--password-store=basic",
    # no devices, no desktop
    "--disable-gpu",
    "--disable-3d-apis",
    "--disable-notifications",
    "--disable-speech-api",
    "--disable-print-preview",
    "--mute-audio",
    "--deny-permission-prompts",
    "--hide-scrollbars",
    # within the sandbox's memory
    "--renderer-process-limit=4",
    "--js-flags=--max-old-space-size=256",
    "--disk-cache-size=4194304",
    "--media-cache-size=1048576",
)
_STARTER = Path(__file__).with_name("start_chromium.py")


class Chromium:
    """One running browser. Call `kill` at the end, whatever happened."""

    def __init__(self, process: Process, devtools: DevTools) -> None:
        self._process, self.devtools = process, devtools
        self._counters = cgroup.Counters()

    @property
    def runs(self) -> bool:
        return self._process.returncode is None and self.devtools.is_open

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process for want of memory since the start or the last question."""
        happened = self._counters.out_of_memory()
        self._counters = cgroup.Counters()
        return happened

    async def kill(self) -> None:
        self.devtools.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.to_thread(shutil.rmtree, PROFILE, ignore_errors=True)


def installed() -> bool:
    return os.access(PROGRAM, os.X_OK)


def _empty_profile() -> None:
    shutil.rmtree(PROFILE, ignore_errors=True)
    PROFILE.mkdir(mode=0o700)


async def start(on_event: OnEvent, on_gone: Callable[[], None]) -> Chromium:
    """Raises OSError."""
    await asyncio.to_thread(_empty_profile)
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_STARTER), str(commands), str(answers), PROGRAM, *FLAGS),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            pass_fds=(commands, answers),
            start_new_session=True,
            env={"HOME": str(PROFILE), "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TZ": os.environ.get("TZ", "UTC")},
            cwd=PROFILE,
        )
    except OSError:
        os.close(to_browser)
        os.close(from_browser)
        raise
    finally:
        os.close(commands)
        os.close(answers)
    return Chromium(process, DevTools(from_browser, to_browser, on_event, on_gone))
