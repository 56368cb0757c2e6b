"""Pictures of the page, within bounds of pixels and bytes."""

from __future__ import annotations

import base64
import os
import time
from typing import Any

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.base.outcome import failed
from sandbox_images.browser.browser import Browser
from sandbox_images.browser.chromium import HEIGHT, WIDTH
from sandbox_images.browser.tab import Tab
from sandbox_images.browser.view import View

FOLDER = "screenshots"
MAX_WIDTH, MAX_HEIGHT = 2_048, 8_192  # pixels of a picture; a longer page is cut
MAX_SHOWN_BYTES = 2 << 20  # a larger picture is put into the workspace only
TIMEOUT_S = 30.0


async def take(browser: Browser, page: Tab, *, full: bool, box: dict[str, Any] | None, keep: bool) -> View:
    """Raises Ended when there is nothing to see."""
    params: dict[str, Any] = {"format": "png", "optimizeForSpeed": False}
    cut = False
    if full or box is not None:
        area = box if box is not None else {"x": 0, "y": 0, **await page.script("size")}
        width, height = min(float(area["width"]), MAX_WIDTH), min(float(area["height"]), MAX_HEIGHT)
        if width < 1 or height < 1:
            raise failed("There is nothing to see of it.")
        cut = width < area["width"] or height < area["height"]
        params |= {
            "captureBeyondViewport": True,
            "clip": {"x": area["x"], "y": area["y"], "width": width, "height": height, "scale": 1},
        }
    data = base64.b64decode((await page.ask("Page.captureScreenshot", params, TIMEOUT_S))["data"])
    view = View("A picture of the page.", facts={"width": WIDTH, "height": HEIGHT, "bytes": len(data)})
    if "clip" in params:
        view.facts |= {"width": round(params["clip"]["width"]), "height": round(params["clip"]["height"])}
    if cut:
        view.notes.append(f"It is cut at {MAX_WIDTH} x {MAX_HEIGHT} pixels.")
    if keep or len(data) > MAX_SHOWN_BYTES:
        artifact = _save(browser.downloads.workspace, data)
        view.artifacts.append(artifact)
        view.notes.append(f"It is in {artifact['path']}.")
    if len(data) > MAX_SHOWN_BYTES:
        view.notes.append(f"It has {len(data):,} bytes, too many to be shown here.")
    else:
        view.blocks.append({"type": "image", "data": base64.b64encode(data).decode(), "mimeType": "image/png"})
    return view


def _save(workspace: Workspace, data: bytes) -> dict[str, Any]:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        for number in range(1_000):
            path = f"{FOLDER}/page-{stamp}{f'-{number}' if number else ''}.png"
            try:
                descriptor = workspace.create(path, os.O_WRONLY)
            except FileExistsError:
                continue
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            return {"path": path, "bytes": len(data), "media_type": "image/png"}
    except (OSError, ProtocolError) as problem:
        raise failed(f"The picture could not be put into the workspace: {problem}.") from problem
    raise failed("The picture could not be put into the workspace: no free name.")
