"""Headless Chromium, without a driver, that shows a page in a frame of a given width.

A script beside the frame measures the page.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

FRAME = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">\
<style>body { margin: 0 }</style>
<iframe style="border: 0; width: %dpx; height: %dpx" srcdoc="%s"></iframe>
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const images = [...page.images];
  document.body.dataset.found = JSON.stringify({
    width: page.documentElement.clientWidth,
    needed: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    images: images.length,
    missing: images.filter(image => !image.complete || !image.naturalWidth).map(image => image.alt),
    outside: performance.getEntriesByType("resource").map(entry => entry.name)\
.filter(name => !name.startsWith("data:")),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
  });
});
</script>"""


def visit(page: str, width: int, folder: Path, *flags: str, height: int = 900) -> dict[str, Any]:
    """Return what the browser found; its `console` has the lines that were written there."""
    assert CHROMIUM is not None
    file = folder / f"frame-{width}.html"
    file.write_text(FRAME % (width, height, html.escape(page)))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        *flags,
    ]
    command += [
        f"--window-size={max(width, 600)},{height}",
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, f"Chromium did not come to the end of the page: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(found[1])) | {"console": console}
