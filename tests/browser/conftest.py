"""A real headless Chromium. Where it is not installed the tests are skipped, unless they are required.

`make browser` installs it; `.ci/run` does, and sets FEDTMLE_BROWSER=required.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Page:
    """One browser tab, with the few things that the tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int, dark: bool = False) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")  # the page before stops asking its server, which may be gone
        self.complaints()
        self.driver.get(url)

    def ask(self, script: str, *arguments: object) -> object:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.ask("return document.querySelector(arguments[0]).innerText", selector))

    def complaints(self) -> list[str]:
        """What the console has: errors, violations of the page's policy, failed loads."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def overflows(self) -> bool:
        """Whether the page as a whole has to be scrolled sideways."""
        return bool(self.ask("return document.documentElement.scrollWidth > window.innerWidth"))


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("FEDTMLE_BROWSER") == "required":
            pytest.fail("chromium and chromedriver are required here: `make browser` installs them")
        pytest.skip("no chromium and chromedriver here: `make browser` installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Page(opened)
    finally:
        opened.quit()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example study of `fedtmle init`."""
    from fedtmle.studyfile.template import write_template

    folder = tmp_path_factory.mktemp("toy")
    write_template(folder, force=False)
    return folder / "study.toml"
