"""A picture of the page of a run, made by Chromium without a window and without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE

from roadtrain.errors import ConfigError
from roadtrain.storage.direct import replace_file

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, DRAWN_MS, END_S = 1280, 5000, 60.0


def browser() -> str:
    """Return the path of a browser. Raises ConfigError if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise ConfigError(
            f"a picture needs a browser, and none of {', '.join(BROWSERS)} is installed",
            hint="apt-get install chromium",
        )
    return found


def picture(document: Document, path: Path, height: int) -> None:
    """Write a PNG of a document. Raises ConfigError if there is no browser, or if it fails."""
    page = file_html(
        document,
        INLINE,
        template=document.template,
        template_variables=document.template_variables,
    )
    with TemporaryDirectory(prefix="roadtrain-show-") as folder:
        html, png = Path(folder, "page.html"), Path(folder, "page.png")
        html.write_text(page, encoding="utf-8")
        command = [
            browser(),
            "--headless=new",
            "--no-sandbox",  # the page is our own, and root has no sandbox
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--window-size={WIDTH},{height}",
            f"--virtual-time-budget={DRAWN_MS}",
            f"--screenshot={png}",
            html.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=END_S, check=False)
        except subprocess.TimeoutExpired as cause:
            raise ConfigError(f"{command[0]} has not drawn the page in {END_S:.0f} s") from cause
        if not png.is_file():
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"{command[0]} drew no picture (exit code {done.returncode}): {last}")
        replace_file(path, png.read_bytes(), "writing")
