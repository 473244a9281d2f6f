"""Pictures of the HTTP page after a race: on a wide screen and on a phone, light and dark.

    python -m benchmarks.pictures                    into docs/pictures (make pictures)
    python -m benchmarks.pictures --least-pass-ms 0 --out DIR    where draft and target share the processors

Needs Chromium and its driver (`make system`). Each picture is what a screen shows once the race is over; on
the wide one a token was chosen, whose card has the guesses of its round.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

SCREENS = {"wide": (1400, 1000), "phone": (390, 844)}
SCHEMES = ("light", "dark")
NUM_TOKENS = 96
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server")
_POINTER, _FINGER = "primaryHoverType=2,primaryPointerType=4", "primaryHoverType=1,primaryPointerType=2"
"""What Chromium takes for the device's hand: there is neither without a window."""
_PATIENCE_S = 120.0


@contextmanager
def browser(screen: str) -> Iterator[webdriver.Chrome]:
    """Chromium without a window, on such a screen, with a profile of its own."""
    hand = _FINGER if screen == "phone" else _POINTER
    options = Options()
    options.binary_location = shutil.which("chromium") or "google-chrome"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--blink-settings={hand}", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def show_as(driver: webdriver.Chrome, screen: str, scheme: str) -> None:
    """A screen of this size and colour scheme."""
    width, height = SCREENS[screen]
    view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": screen == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def race(driver: webdriver.Chrome, url: str) -> None:
    """Race, and choose a token near the end, of a round that accepted some."""
    driver.get(url)
    wait = WebDriverWait(driver, _PATIENCE_S, poll_frequency=0.1)
    wait.until(lambda _: "connecting" not in driver.find_element(By.ID, "model").text)
    driver.execute_script("document.getElementById('max-tokens').value = arguments[0]", NUM_TOKENS)
    driver.find_element(By.ID, "race").click()
    wait.until(lambda _: driver.find_element(By.TAG_NAME, "body").get_attribute("data-state") == "done")


def choose_token(driver: webdriver.Chrome) -> None:
    """One whose round kept some guesses and refused another."""
    driver.execute_script(
        "const text = lanes.on.find('.text'); text.scrollTop = 0;"
        "const span = text.querySelectorAll('.token[data-fate=recovered]')[3]; span.click()"
    )


def save(picture: bytes, path: Path) -> None:
    """As a PNG with a palette, a third of the size; the rare colours of small squares stay what they are."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def take(url: str, out: Path) -> None:
    """All pictures, as `page-SCREEN-SCHEME.png`."""
    for screen in SCREENS:
        with browser(screen) as driver:
            for scheme in SCHEMES:
                show_as(driver, screen, scheme)
                race(driver, url)
                if screen == "wide":
                    choose_token(driver)
                save(driver.get_screenshot_as_png(), out / f"page-{screen}-{scheme}.png")


def main() -> None:
    """Serve the embedded pair, and take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--least-pass-ms", type=float, default=30.0, help="pace of the target")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    config = UpConfig(
        address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        least_pass_ms=given.least_pass_ms,
        log_level="error",
    )
    given.out.mkdir(parents=True, exist_ok=True)
    with Stack(config) as stack:
        assert stack.http is not None
        take(f"http://{stack.http.address}/", given.out)


if __name__ == "__main__":
    main()
