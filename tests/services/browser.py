"""A real Chromium without a window, driven by Playwright."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
# It runs as root in a container and has no business on any network.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The running browser. One a module: while Playwright runs, no other event loop can in this thread."""
    if (program := next(filter(None, map(shutil.which, NAMES)), None)) is None:
        raise RuntimeError(f"none of {', '.join(NAMES)} on PATH: install Chromium, or run make test-services as root")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()
