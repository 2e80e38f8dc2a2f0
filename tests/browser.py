"""Pages in a real headless Chromium: what they show, and that they ask for nothing."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")  # not longer: playwright's event loop runs as long as this is open
def chromium() -> Iterator:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright: pip install .[dev]")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("pages are tested in Chromium, which is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser_page(chromium) -> Iterator[Callable]:
    """browser_page(path or URL, width=1280, scheme="light") opens a page and returns playwright's object for it.

    Afterwards the test fails if a page wrote an error to its console, or asked for anything but itself.
    """
    wrong, contexts = [], []

    def open_page(target: Path | str, width: int = 1280, height: int = 900, scheme: str = "light"):
        url = target if isinstance(target, str) else target.absolute().as_uri()
        contexts.append(chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
        page.on(
            "request",
            lambda request: None if request.url.startswith((url, "data:")) else wrong.append(f"asks for {request.url}"),
        )
        page.goto(url)
        return page

    open_page.wrong = wrong
    yield open_page
    for context in contexts:
        context.close()
    assert not wrong
