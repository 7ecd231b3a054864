"""Makes the pictures of docs/dashboard.md: python -m scripts.dashboard_pictures

A cluster has five faults at once: a trainer that is slow, a worker that is slow, too few workers, a
worker that is lost, and a dispatcher that was away. Another one has 1,000 workers and a million
splits. They need what the tests of tests/dashboard need.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from forebay import service
from forebay.service.processes import free_port
from tests import forks
from tests.cluster import WorkerProcess
from tests.dashboard.test_pages import written
from tests.stock import DispatcherProcess, ServerProcess

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "images"
COLORS = 64
WIDTH, PHONE = 1100, 320
PATIENCE_MS = 90_000
AWAY_S = 10.0

TRAINER = """
import sys, time
from forebay import service
target, dataset_id, job, step_s = sys.argv[1:]
print("reads", flush=True)
for _ in service.read(target, dataset_id, processing_mode="distributed_epoch", job_name=job):
    time.sleep(float(step_s))
"""


def augmented(split: int) -> Iterator[int]:
    time.sleep(0.3 if "IS_SLOW" in os.environ else 0.02)
    yield split


def tokenized(split: int) -> Iterator[int]:
    time.sleep(0.001)
    yield split


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    expect.set_options(timeout=PATIENCE_MS)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        faults(browser, pathlib.Path(folder))
        large(browser, pathlib.Path(folder))
        browser.close()


def faults(browser: Browser, folder: pathlib.Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    page = browser.new_page(viewport={"width": WIDTH, "height": 800})
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(
            DispatcherProcess(
                folder / "j", http_port=port, load_window_ms=6_000, client_timeout_ms=6_000
            )
        )
        how = {"processes": 1, "heartbeat_interval_ms": 500}
        target, address = dispatcher.target, dispatcher.address
        stack.enter_context(WorkerProcess(address, {"IS_SLOW": "1"}, **how))
        lost = stack.enter_context(WorkerProcess(address, **how))
        for _ in range(2):
            stack.enter_context(WorkerProcess(address, **how))
        for job, function, step_s in (("resnet", augmented, 0.0), ("gpt", tokenized, 0.02)):
            dataset_id = service.register_dataset(target, function, splits=range(120_000))
            command = ["-c", TRAINER, target, dataset_id, job, str(step_s)]
            trainer = ServerProcess(forks.Fork(command))
            stack.callback(trainer.kill)
            trainer.first_line()
        page.goto(url)
        expect(page.locator(".findings")).to_contain_text("of job resnet it makes")
        dispatcher.kill()
        time.sleep(AWAY_S)
        dispatcher.restart()
        expect(page.locator(".findings")).to_contain_text("in term 2")
        lost.kill()
        for said in ("it was given up", "of job resnet it makes", "they are what is slow"):
            expect(page.locator(".findings")).to_contain_text(said)
        expect(page.locator(".findings")).to_contain_text("more worker")
        page.wait_for_timeout(20_000)  # until there is something to see over the run
        take(page, "overview")
        page.get_by_role("link", name="resnet", exact=True).click()
        page.emulate_media(color_scheme="dark")
        expect(page.locator("figure.map")).to_be_visible()
        page.wait_for_timeout(5_000)
        take(page, "job")
        page.set_viewport_size({"width": PHONE, "height": 700})
        page.goto(url)
        take(page, "phone", height=1_400)
        page.set_viewport_size({"width": WIDTH, "height": 640})
        page.emulate_media(color_scheme="light")
        page.goto(f"{url}/past?at=200")
        take(page, "past")


def large(browser: Browser, folder: pathlib.Path) -> None:
    port, job_id = free_port(), written(folder / "large")
    page = browser.new_page(viewport={"width": WIDTH, "height": 640})
    patient = {"worker_timeout_ms": 600_000, "reconnect_grace_ms": 600_000}
    with DispatcherProcess(folder / "large", http_port=port, client_timeout_ms=600_000, **patient):
        page.goto(f"http://127.0.0.1:{port}/jobs/{job_id}?worker=10.0.2.7:5051")
        shown = page.locator("figure.map")
        save(shown.screenshot(), "splits")
    page.close()


def take(page: Page, name: str, height: int = 0) -> None:
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}  # type: ignore[index]
    page.wait_for_timeout(500)
    save(page.screenshot(full_page=True, clip=clip if height else None), name)  # type: ignore[arg-type]


def save(picture: bytes, name: str) -> None:
    """In few colors: a page has few."""
    path = FOLDER / f"dashboard-{name}.png"
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    few = whole.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
