"""Chromium without a window, driven by selenium. Both come from Debian and PyPI; nothing is
downloaded while tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import needs
from tests.support.warm_python import warm_python

needs_browser = needs("chromium", "chromedriver", apt="chromium chromium-driver")
DRAWN = (
    "return Boolean(window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle)"
    " && performance.now()"
)


@contextmanager
def browser(*, dark: bool = False) -> Iterator[Any]:
    """A window of 1280 x 1000 pixels. dark: whether its user prefers dark pages."""
    pytest.importorskip("bokeh", reason="no bokeh: pip install bokeh")
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: pip install selenium"
    )
    options = webdriver.ChromeOptions()
    for word in ("headless=new", "no-sandbox", "disable-gpu", "window-size=1280,1000"):
        options.add_argument(f"--{word}")
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def shown(*words: str | Path, warm: bool = True) -> Iterator[str]:
    """`roadtrain show` with these words; yields the address that it prints."""
    python = warm_python() if warm else sys.executable
    command = [python, "-m", "roadtrain.cli", "show", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as show:
        assert show.stdout is not None
        line = show.stdout.readline()
        try:
            assert "http" in line, line + show.stdout.read()
            yield next(word for word in line.split() if word.startswith("http"))
        finally:
            show.terminate()
            assert show.wait(30) == 0


def open_page(driver: Any, url: str, deadline_s: float = 60.0) -> float:
    """Open a page and wait until all is drawn. Returns the milliseconds since the navigation."""
    driver.get(url)
    return wait_drawn(driver, deadline_s)


def wait_drawn(driver: Any, deadline_s: float = 60.0) -> float:
    return float(wait_for(lambda: driver.execute_script(DRAWN), deadline_s))


def wait_for(ready: Callable[[], Any], deadline_s: float = 60.0) -> Any:
    until = time.monotonic() + deadline_s
    while not (found := ready()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
    return found


def text(driver: Any, name: str) -> str:
    """The HTML of a part of the page."""
    script = "return Bokeh.documents[0].get_model_by_name(arguments[0]).text"
    return str(driver.execute_script(script, name))


def column(driver: Any, name: str, key: str) -> list[Any]:
    """The values of a column of the first glyph of a figure."""
    script = (
        "return Array.from(Bokeh.documents[0].get_model_by_name(arguments[0])"
        ".renderers[0].data_source.data[arguments[1]])"
    )
    return list(driver.execute_script(script, name, key))


def problems(driver: Any) -> list[str]:
    """Errors and warnings of the browser's console."""
    entries = driver.get_log("browser")
    return [e["message"] for e in entries if e["level"] != "INFO" and "favicon" not in e["message"]]
