"""Serve the page of runs with Bokeh's server, and the trace of their last steps for Perfetto.

One loop follows the runs; every reader has a document of its own. With a token, a reader enters it
once, and a cookie derived from it is valid as long as the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bokeh import __version__
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.embed import file_html
from bokeh.resources import INLINE
from bokeh.server.auth_provider import AuthProvider, NullAuth
from bokeh.server.server import Server
from bokeh.server.views.auth_request_handler import AuthRequestHandler
from tornado.ioloop import IOLoop
from tornado.web import HTTPError, RequestHandler, authenticated

from roadtrain.dashboard.drawing import Panels, fill
from roadtrain.dashboard.watch import RunWatch
from roadtrain.errors import ConfigError
from roadtrain.planner.trace_events import trace_events
from roadtrain.storage.direct import replace_file
from roadtrain.transport.tcp import Address

REFRESH_MS = 250
DRAWN_S = 2.0  # a page that was opened so long ago has been sent
SCRIPTS = ("bokeh", "bokeh-widgets")  # the parts of Bokeh's JavaScript that the page needs
COOKIE = "roadtrain-show"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, DRAWN_MS, END_S = 1280, 5000, 60.0
HEAD, ROWS = 640, 19  # pixels of a picture above the tables, and of a row of them
LOGIN = """<!doctype html><title>roadtrain show</title><form method="post">
<label>Token <input type="password" name="token" autocomplete="off" autofocus></label>
<button>Show</button></form>"""


def trace(runs: Sequence[RunWatch]) -> dict[str, Any]:
    """Return the last steps of the runs in the format of Chrome. Intervals of a lane that
    overlap are shown in rows of their own."""
    slices = []
    for run in runs:
        for process, intervals in run.by_process().items():
            ends: dict[str, list[float]] = {}
            for interval in sorted(intervals, key=lambda interval: (interval.begin, -interval.end)):
                rows = ends.setdefault(interval.lane, [])
                row = next((i for i, end in enumerate(rows) if end <= interval.begin), len(rows))
                rows[row : row + 1] = [interval.end]
                lane = f"{interval.lane} ({row + 1})" if row else interval.lane
                name = f"{run.name}: {process}" if len(runs) > 1 else process
                args = {"bytes": interval.nbytes}
                slices.append((name, lane, interval.stage, interval.begin, interval.end, args))
    return trace_events(slices)


class TraceHandler(AuthRequestHandler):
    """Answers with the trace of the last steps as a file."""

    def initialize(self, runs: Sequence[RunWatch], hosts: Sequence[str]) -> None:
        self.runs, self.hosts = runs, hosts

    @authenticated
    def get(self) -> None:
        if self.hosts and self.request.host not in self.hosts:
            raise HTTPError(403)  # a page of another site has given its name our address
        name = "-".join(Path(run.name).name for run in self.runs)
        self.set_header("Content-Type", "application/json")
        self.set_header("Content-Disposition", f'attachment; filename="{name}.trace.json"')
        self.write(json.dumps(trace(self.runs)))


class LoginHandler(RequestHandler):
    """Sets the cookie of readers who enter the token."""

    def initialize(self, token: bytes, cookie: str) -> None:
        self.token, self.cookie = token, cookie

    def get(self) -> None:
        self.write(LOGIN)

    def post(self) -> None:
        entered = self.get_body_argument("token", "").strip().encode()
        if not hmac.compare_digest(entered, self.token):
            raise HTTPError(403)
        self.set_cookie(COOKIE, self.cookie, httponly=True, samesite="Strict")
        self.redirect("/")


class TokenProvider(AuthProvider):
    """Lets in readers who have the cookie."""

    def __init__(self, cookie: str) -> None:
        self._cookie = cookie.encode()
        super().__init__()

    @property
    def get_user(self) -> Any:
        def user(handler: RequestHandler) -> str | None:
            found = (handler.get_cookie(COOKIE) or "").encode()
            return "reader" if hmac.compare_digest(found, self._cookie) else None

        return user

    @property
    def login_url(self) -> str:
        return "/login"


async def serve(
    runs: Sequence[RunWatch],
    new: Callable[[], Panels],
    theme: str,
    where: Address,
    token: bytes | None,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM. `new`: makes the panels of a reader. Raises
    ConfigError if the address is in use."""
    for name in ("bokeh", "tornado.access"):  # readers come and go; that is no news
        logging.getLogger(name).setLevel(logging.ERROR)
    host, port = where
    scripts = [f"static/js/{name}.min.js?v={__version__}" for name in SCRIPTS]
    ready: list[Panels] = []  # for the next page, which then opens at once
    opened = -math.inf

    def open_page(document: Document) -> None:
        panels = ready.pop() if ready else new()
        nonlocal opened
        opened = time.monotonic()
        panels.update()
        fill(document, panels, theme or _asked_theme(document), scripts)
        document.add_periodic_callback(panels.update, REFRESH_MS)

    names: list[str] = []  # the names of this server, by which pages may reach it without a token
    patterns: list[Any] = [(r"/trace\.json", TraceHandler, {"runs": runs, "hosts": names})]
    auth: AuthProvider = NullAuth()
    if token is not None:
        cookie = hmac.digest(token, b"roadtrain show", "sha256").hex()
        auth = TokenProvider(cookie)
        patterns.append(("/login", LoginHandler, {"token": token, "cookie": cookie}))
    try:
        server = Server(
            Application(FunctionHandler(open_page)),
            IOLoop.current(),
            address=host,
            port=port,
            extra_patterns=patterns,
            auth_provider=auth,
            allow_websocket_origin=None if token is None else ["*"],
        )
    except OSError as cause:
        raise ConfigError(
            f"cannot serve at {host}:{port}: {cause.strerror}", hint="choose another --port"
        ) from cause
    if token is None:
        names += [f"localhost:{server.port}", f"{host}:{server.port}"]
        server._tornado._websocket_origins.update(names)
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    server.start()
    print(f"{' '.join(run.name for run in runs)}: http://{host}:{server.port}/ (Ctrl-C ends)")
    while not over.is_set():
        for run in runs:
            run.refresh()
        if not ready and time.monotonic() - opened > DRAWN_S:
            ready.append(new())
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), REFRESH_MS / 1e3)
    server.stop()


def _asked_theme(document: Document) -> str:
    theme = document.session_context.request.arguments.get("theme", [b""])[0].decode()
    return theme if theme in ("light", "dark") else ""


def browser() -> str:
    """Return the path of a browser. Raises ConfigError if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise ConfigError(
            f"a picture needs a browser, and none of {', '.join(BROWSERS)} is installed",
            hint="apt-get install chromium",
        )
    return found


def write_picture(panels: Panels, path: Path, theme: str) -> None:
    """Write a PNG of the page, with Chromium without a window and without a network. Raises
    ConfigError if there is no browser, or if it fails."""
    document = Document()
    fill(document, panels, theme)
    rows = max(div.text.count("<tr>") for div in panels.texts.values())
    height = HEAD + panels.figures["timeline"].height + ROWS * rows
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
            subprocess.run(command, capture_output=True, timeout=END_S, check=True)
            replace_file(path, png.read_bytes(), "writing")
        except (subprocess.SubprocessError, FileNotFoundError) as cause:
            raise ConfigError(f"{command[0]} has drawn no picture: {cause}") from cause
