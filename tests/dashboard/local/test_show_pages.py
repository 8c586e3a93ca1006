"""`roadtrain show` in Chromium: every panel of a real run, light and dark, live, and with a server
that has stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import encode

from roadtrain import cli
from roadtrain.config.job import load_job
from roadtrain.servers.trace import Stages
from roadtrain.training.timeline import TimelineLine
from roadtrain.training.train import train
from roadtrain.transport.address import write_token
from tests.support.browser import (
    browser,
    column,
    needs_browser,
    open_page,
    problems,
    shown,
    text,
    wait_drawn,
    wait_for,
)
from tests.support.large_run import write_large_run
from tests.support.processes import HostProcess
from tests.support.small_job import small_job, write_small_job
from tests.support.warm_python import warm_python

pytestmark = [needs_browser, pytest.mark.slow]
pytest.importorskip("bokeh", reason="no bokeh: pip install bokeh")
wheel = pytest.importorskip(
    "selenium.webdriver.common.actions.wheel_input", reason="no selenium: pip install selenium"
)
transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # the bar leaves a thread running

MORE = """
[optimizer]
lr = 1e-2
warmup_steps = 4
clip_norm = 1.0
[store]
files = ["{run}/ssd0", "{run}/ssd1"]
[budget]
host = "60MiB"
"""
SCREENSHOT = Path(__file__).parents[3] / "docs" / "guides" / "dashboard.png"
PANELS = ("loss", "grad_norm", "tokens_per_s", "lr")


def write_job(home: Path) -> Path:
    return write_small_job(home, 12, MORE, layers=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run on two directories."""
    path = write_job(tmp_path_factory.mktemp("finished"))
    job = load_job(path)
    train(job, lambda line: None)
    return job.run_dir


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(window: Any) -> Any:
    """A window without messages of earlier tests."""
    window.get("about:blank")
    problems(window)
    return window


def lanes_of(page: Any) -> list[str]:
    script = (
        "return [...Bokeh.documents[0].get_model_by_name('timeline')"
        ".left[0].major_label_overrides.values()]"
    )
    return list(page.execute_script(script))


def background(page: Any) -> str:
    script = "return getComputedStyle(document.body).backgroundColor"
    return str(page.execute_script(script))


def plot_colors(page: Any) -> tuple[str, str]:
    """The color of a title, and that of the middle pixel of a drawn figure."""
    script = """
    const find = (node) => [...node.querySelectorAll("*")].flatMap(
        (child) => [child, ...(child.shadowRoot ? find(child.shadowRoot) : [])])
    const canvas = find(document).find((node) => node.tagName == "CANVAS" && node.width > 100)
    const pixel = canvas.getContext("2d").getImageData(5, 5, 1, 1).data
    const title = Bokeh.index.find_one_by_id(
        Bokeh.documents[0].get_model_by_name("loss").title.id)
    return [title.visuals.text.get_text_color(), [...pixel].slice(0, 3)]
    """
    color, pixel = page.execute_script(script)
    return color, f"rgb({', '.join(map(str, pixel))})"


def test_every_panel_of_a_finished_run(run: Path, page: Any) -> None:
    with shown(run, "--endurance-tbw", "300") as url:
        open_page(page, url)
        top = text(page, "top")
        assert "limited by" in top and "finished: step 12 of 12" in top and "alert" not in top
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert column(page, "loss", "y") == [line["loss"] for line in metrics]
        assert column(page, "lr", "y") == [line["lr"] for line in metrics]
        assert column(page, "grad_norm", "x") == list(range(1, 13))
        rates = [line["tokens"] / line["seconds"] for line in metrics]
        assert column(page, "tokens_per_s", "y") == pytest.approx(rates)
        lanes = {lane.partition(" (")[0] for lane in lanes_of(page)}
        assert lanes == {
            "cpu of worker 0",
            "worker 0",
            *("server 0", "server 1", "disk of server 0", "disk of server 1"),
        }
        stages = column(page, "timeline", "stage")
        assert {"Forward", "Backward", "Push", "Update", "Write", "Commit"} <= {*stages}
        assert column(page, "timeline", "GB/s")[stages.index("Write")] > 0
        memory = text(page, "memory")
        for words in ("host buffers", "whole process", "disk, with free space", "60.0 MiB"):
            assert words in memory
        assert text(page, "rates").count("not measured") == 2
        state = text(page, "state")
        assert "step 12" in state and "training is exact" in state and "spare hosts" in state
        assert "of 300 TBW" in text(page, "wear")
        assert not problems(page)
        assert page.execute_script("return document.querySelectorAll('.bk-Figure').length") == 5


def test_light_and_dark(run: Path, page: Any) -> None:
    with shown(run) as url:
        open_page(page, url)
        assert background(page) == "rgb(255, 255, 255)"
        assert plot_colors(page) == ("rgb(26, 28, 30)", "rgb(255, 255, 255)")
        open_page(page, url + "?theme=dark")
        assert background(page) == "rgb(21, 25, 28)"
        assert plot_colors(page) == ("rgb(230, 232, 234)", "rgb(21, 25, 28)")
        with browser(dark=True) as night:
            open_page(night, url)
            assert background(night) == "rgb(21, 25, 28)"
            assert plot_colors(night) == ("rgb(230, 232, 234)", "rgb(21, 25, 28)")
            open_page(night, url + "?theme=light")
            assert background(night) == "rgb(255, 255, 255)"
    with shown(run, "--theme", "dark") as url:
        open_page(page, url)
        assert background(page) == "rgb(21, 25, 28)"


def test_runs_are_compared(run: Path, page: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    os.makedirs(other)
    for name in ("job.toml", "metrics.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    with shown(f"{run},{other}") as url:
        open_page(page, url)
        top = text(page, "top")
        assert f"<b>{run}</b>" in top and f"<b>{other}</b>" in top
        script = "return Bokeh.documents[0].get_model_by_name('loss').renderers.length"
        assert page.execute_script(script) == 2
        assert all(lane.startswith(str(run)) for lane in lanes_of(page))


def test_the_trace_opens_in_perfetto(run: Path) -> None:
    with shown(run) as url:
        with urllib.request.urlopen(url + "trace.json") as reply:
            assert "attachment" in reply.headers["Content-Disposition"]
            trace = json.load(reply)
        names = {
            e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
        }
        assert [*names.values()] == ["worker 0"]
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {"Forward", "Backward", "Write"} <= {event["name"] for event in slices}
        # within a lane, work is one after another
        ends: dict[int, float] = {}
        for event in sorted(slices, key=lambda event: event["ts"]):
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 1.0
            ends[event["tid"]] = event["ts"] + event["dur"]
        # Rule 8: a page of another site that has given its name our address
        request = urllib.request.Request(url + "trace.json", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)


# Rule 8
def test_a_reader_needs_the_token(run: Path, page: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    write_token(token, b"a secret of the readers")
    with shown(run, "--listen", "127.0.0.1:0", "--token-file", token) as url:
        with urllib.request.urlopen(url + "trace.json") as reply:
            assert b"Token" in reply.read() and reply.url.startswith(url + "login")
        for word, lets_in in (
            ("a wrong secret of readers", False),
            ("a secret of the readers", True),
        ):
            page.get(url)
            page.find_element("name", "token").send_keys(word)
            page.find_element("tag name", "button").click()
            if lets_in:
                wait_drawn(page)
                assert "finished" in text(page, "top")
            else:
                wait_for(lambda: "403" in page.page_source)
    assert cli.main(["show", str(run), "--listen", "0.0.0.0:0"]) == 2


def test_a_picture_for_reports(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    picture = tmp_path / "run.png"
    command = [warm_python(), "-m", "roadtrain.cli", "show", str(run), "--png", str(picture)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with pytest.importorskip("PIL.Image").open(picture) as image:
        assert image.width == 1280 and image.height > 700
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["show", str(run), "--png", str(picture)]) == 2
    assert "apt-get install chromium" in capsys.readouterr().err


def test_a_run_is_followed_and_a_stopped_server_is_seen(page: Any, tmp_path: Path) -> None:
    """Rule 5: within 2 seconds."""
    token = tmp_path / "token"
    write_token(token, b"a secret of the job")
    server = HostProcess(tmp_path / "server", token=b"a secret of the job")
    path = write_job(tmp_path)
    words = ["--run.steps", "100000", "--servers.addresses", json.dumps([server.where])]
    words += ["--servers.token_file", str(token), "--store.files", "[]"]
    command = [warm_python(), "-m", "roadtrain.cli", "train", str(path), *words]
    trainer = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
        with shown(tmp_path / "run") as url:
            open_page(page, url)
            wait_for(lambda: "training" in text(page, "top") and column(page, "loss", "x"))
            first = column(page, "loss", "x")[-1]
            wait_for(lambda: column(page, "loss", "x")[-1] > first + 3)
            wait_for(lambda: f"server {server.where}" in text(page, "state"))
            wait_for(lambda: "1 worker(s)" in text(page, "state"))
            starts = ("server 0", f"link of worker 0 to server 0 ({server.where})")
            wait_for(
                lambda: all(any(lane.startswith(w) for lane in lanes_of(page)) for w in starts)
            )
            assert "link of worker 0" in text(page, "rates")
            assert "has not answered" not in text(page, "top")
            assert server.process.pid
            os.kill(server.process.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            wait_for(lambda: f"server {server.where} has not answered" in text(page, "top"), 20)
            took_s = time.monotonic() - stopped
            os.kill(server.process.pid, signal.SIGCONT)
            wait_for(lambda: "has not answered" not in text(page, "top"))
            assert took_s < 2.0
            assert not problems(page)
    finally:
        trainer.kill()
        trainer.wait()
        server.kill()


@pytest.mark.alone
def test_ten_thousand_steps_and_64_hosts_are_drawn_in_a_second(page: Any, tmp_path: Path) -> None:
    job = small_job(tmp_path, 10_000)
    write_large_run(tmp_path / "large", job, 10_000, 64)
    with shown(tmp_path / "large") as url:
        open_page(page, url)  # the browser has the scripts now
        took = []
        for _ in range(8):
            time.sleep(2.5)  # DRAWN_S of page_server.py, after which it prepares the next page
            took.append(open_page(page, url))
        took_ms = min(took)
        assert len(column(page, "loss", "x")) <= 600
        assert {0, 63} <= {int(lane.split()[3]) for lane in lanes_of(page) if "cuda" in lane}
        assert text(page, "memory").count("<tr>") == 1 + 3 * 64
        print(f"drawn in {took_ms:.0f} ms")
        assert took_ms < 1000


def test_zooming_shows_short_bars(page: Any, tmp_path: Path) -> None:
    job = small_job(tmp_path, 50)
    write_large_run(tmp_path / "large", job, 50, 64)
    with shown(tmp_path / "large") as url:
        open_page(page, url)
        lefts = column(page, "timeline", "left")
        assert len(lefts) <= 4000 and {*column(page, "timeline", "y")} == {*range(192)}

        def range_of(end: str) -> float:
            script = "return Bokeh.documents[0].get_model_by_name('timeline').x_range[arguments[0]]"
            return float(page.execute_script(script, end))

        whole_ms = range_of("end") - range_of("start")
        actions = pytest.importorskip("selenium.webdriver").ActionChains(page)
        origin = wheel.ScrollOrigin.from_viewport(640, 500)  # in the timeline
        for _ in range(3):
            actions.scroll_from_origin(origin, 0, -400)
        actions.perform()
        wait_for(lambda: range_of("end") - range_of("start") < whole_ms / 8)

        def inside() -> int:
            begin, end = range_of("start"), range_of("end")
            return sum(begin < left < end for left in column(page, "timeline", "left"))

        wait_for(lambda: inside() > 192)  # several bars in each lane
        assert min(column(page, "timeline", "left")) == min(lefts)  # the rest is still there


def test_the_screenshot_in_the_guide(
    page: Any, tmp_path: Path, pytestconfig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--screenshots`, docs/guides/dashboard.png is made anew."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    train(load_job(write_job(Path()), {"run.steps": 60, "run.dir": "runs/two-ssds"}), len)
    with shown("runs/two-ssds") as url:
        open_page(page, url)
        page.set_window_size(1280, 890)  # with the frame of the window
        wait_drawn(page)
        page.save_screenshot("page.png")
    with image.open(tmp_path / "page.png") as shot:
        drawn = shot.convert("RGB").quantize(256)
    drawn.save(tmp_path / "small.png", optimize=True)
    assert (tmp_path / "small.png").stat().st_size < 150_000
    if pytestconfig.getoption("screenshots"):
        SCREENSHOT.write_bytes((tmp_path / "small.png").read_bytes())
    assert SCREENSHOT.stat().st_size < 150_000
    with image.open(SCREENSHOT) as kept:
        alike = kept.width == drawn.width and abs(kept.height - drawn.height) < 150
    assert alike, "the panels have changed: make the screenshot anew"


@pytest.mark.alone
def test_recording_costs_less_than_a_hundredth_of_a_step(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("hidden_size = 32", "hidden_size = 256"))
    job = load_job(path, {"data.batch_size": 8})
    train(job, lambda line: None)
    lines = [json.loads(x) for x in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [json.loads(x) for x in (job.run_dir / "timeline.jsonl").read_text().splitlines()]
    step_s = sorted(line["seconds"] for line in lines)[len(lines) // 2]
    count = max(len(step["intervals"]) for step in steps)
    stages, begin = Stages(), time.thread_time()
    for _ in range(10_000):
        stages.interval("Read", "disk of server 0", time.perf_counter(), 1)
    cost_s = (time.thread_time() - begin) / 10_000 * count
    begin = time.thread_time()
    for _ in range(100):
        encode(TimelineLine(1, stages.intervals()[:count]))
    cost_s += (time.thread_time() - begin) / 100
    print(f"{count} intervals in a step of {step_s * 1e3:.0f} ms cost {cost_s * 1e3:.2f} ms")
    assert cost_s < 0.01 * step_s
