"""A page opened in headless Chromium, from a server on loopback, and what a script beside it measures there."""

import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Beside the page, in frames as wide as windows: its own policy lets no script run in it.
BESIDE = """<!doctype html><link rel="icon" href="data:,"><body>
{frames}
<pre id="found"></pre>
<script>
{script}
window.addEventListener("load", () => {{
  const frames = [...document.querySelectorAll("iframe")];
  const found = frames.map(frame => measure(frame.contentWindow, frame.contentDocument));
  document.getElementById("found").textContent = JSON.stringify(found);
  console.error("measured");
}});
</script>
"""


@dataclass(frozen=True)
class Seen:
    """What was measured in each frame, what the console said, and what was asked of the server."""

    found: list[dict]
    console: list[str]
    asked: list[str]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and notes what is asked for."""

    def __init__(self, *args, asked: list[str], **given):
        self._asked = asked
        super().__init__(*args, **given)

    def log_message(self, form, *args):
        self._asked.append(self.path)


def open_page(page: str, script: str, widths: tuple[int, ...], dark: bool = False) -> Seen:
    """Open a page in frames of some widths and call `measure(window, document)` of `script` for each; skip without."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page.html").write_text(page, encoding="utf-8")
        frames = "".join(f'<iframe src="page.html" width="{width}" height="900"></iframe>' for width in widths)
        (folder / "beside.html").write_text(BESIDE.format(frames=frames, script=script), encoding="utf-8")
        asked: list[str] = []
        handler = partial(Handler, directory=name, asked=asked)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}/beside.html"
            shown = _browse(browser, address, folder / "profile", dark)
            server.shutdown()
    found = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout, flags=re.S)
    assert found, f"{shown.stdout[-1000:]}\n{shown.stderr[-3000:]}"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return Seen(json.loads(text), re.findall(r':CONSOLE[:(]\d+\)?\] "(.*?)", source', shown.stderr), asked)


def _browse(browser: str, address: str, profile: Path, dark: bool) -> subprocess.CompletedProcess[str]:
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    words += ["--disable-background-networking", "--disable-extensions", "--window-size=1600,1000"]
    words += ["--enable-logging=stderr", "--dump-dom", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    return subprocess.run([*words, address], capture_output=True, text=True, timeout=120, check=True)
