"""The page in a real browser: Chromium without a window, driven through WebDriver, against a real stack.

Nothing is installed here. Without a browser the tests are skipped, unless REQUIRE_BROWSER is set, as in CI.
With SCREENSHOTS=DIR pictures of the page are left there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from specwire import Rule, SamplingParams, embedded
from specwire.completion import Stage, Timing
from specwire.http import page
from specwire.http.answers import fates
from tests.support.fronts import Fronted, fronted
from tests.support.rounds import received_chunks

PATIENCE_S = 60.0
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--no-proxy-server", "--window-size=1280,1000"),
    "--blink-settings=primaryHoverType=2,primaryPointerType=4",  # a mouse
)


@pytest.fixture(scope="module")
def here() -> Iterator[Fronted]:
    """Drafts from the text beside those of the model."""
    options = {"speculative_config": '{"method": "ngram"}'}
    with fronted("embedded", "embedded", coordinator_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        missing = "no chromium and chromedriver on the PATH (Debian: chromium, chromium-driver)"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    options = Options()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        started = webdriver.Chrome(options, Service(driver))
        try:
            yield started
        finally:
            started.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")
        driver.get(url + "/")
        self.until(lambda: "connecting" not in self.text("#model"))

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).get_property("textContent"))

    def until(self, condition: Any) -> None:
        WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: condition())

    def fill(self, selector: str, value: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(value)

    @property
    def state(self) -> str:
        return str(self.one("body").get_attribute("data-state"))

    def tops(self, lane: str) -> list[int]:
        """Of a lane's tokens that stay, within its text, once the others have passed."""
        script = """
            const [text, done] = [document.querySelector(arguments[0]), arguments[1]];
            const top = (element) => Math.round(element.getClientRects()[0].top);
            Promise.all(document.getAnimations().map((each) => each.finished)).then(() =>
              done([...text.querySelectorAll(".token:not(.rejected)")].map((e) => top(e) - top(text))));
        """
        found: list[int] = self.driver.execute_async_script(script, f"#lane-{lane} .text")
        return found

    def finished(self) -> None:
        self.until(lambda: self.state != "running")
        assert self.state == "done", self.text("#status")

    def tokens(self, lane: str, fate: str = "") -> list[str]:
        """Texts of a lane's tokens, all that stay or those of one fate."""
        which = f'[data-fate="{fate}"]' if fate else ":not(.rejected)"
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.driver.execute_script(script, f"#lane-{lane} .text .token{which}")
        return found

    def nodes(self) -> list[tuple[str, str, int]]:
        """The tree that is drawn, depth first: text, fate and depth of each node."""
        script = (
            "const depth = (e) => e.id === 'tree' ? -1 : (e.localName === 'ul') + depth(e.parentElement);"
            "return [...document.querySelectorAll('#tree .node')].map("
            "(e) => [e.textContent, e.parentElement.dataset.fate ?? '', depth(e) + 1])"
        )
        return [(text, fate, depth) for text, fate, depth in self.driver.execute_script(script)]

    def point_at(self, selector: str) -> None:
        ActionChains(self.driver).move_to_element(self.one(selector)).perform()

    def record(self, lane: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text(f"#record-{lane}"))
        return found

    def picture(self, name: str) -> None:
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            size = "return document.documentElement.scrollHeight"
            height = self.driver.execute_script(size)
            width = self.driver.execute_script("return innerWidth")
            view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
            self.driver.save_screenshot(str(Path(folder, f"{name}.png")))
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def assert_no_complaints(self) -> None:
        assert [entry["message"] for entry in self.driver.get_log("browser")] == []


def test_a_run_shows_every_token_by_its_fate(here: Fronted, chromium: webdriver.Chrome) -> None:
    shown = Page(chromium, here.url)
    shown.fill("#prompt", "class Queue:")
    shown.fill("#max-tokens", "32")
    shown.one("#keep").click()
    shown.one("#run").click()
    shown.finished()
    done = here.stack.client.generate(
        "class Queue:", SamplingParams(max_tokens=32, temperature=0.7, seed=7, rule=Rule.GUMBEL)
    )
    assert "".join(shown.tokens("on")) == done.text
    counts = shown.record("on")["speculation"]
    assert len(shown.tokens("on", "accepted")) == counts["num_accepted_tokens"] > 0
    sources = [e.text for e in chromium.find_elements(By.CSS_SELECTOR, "#sources li")]
    assert sources == [
        f"{each['source']} {each['num_accepted_tokens']} of {each['num_draft_tokens']}"
        for each in counts["by_source"]
    ]
    assert len(shown.tokens("on", "recovered")) == len(shown.tokens("on", "rejected")) > 0
    own = sum(len(shown.tokens("on", fate)) for fate in ("recovered", "bonus", "plain"))
    assert own == counts["num_rounds"] == int(shown.text("#rounds"))
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#strip > div")) == counts["num_rounds"]
    assert len(chromium.find_elements(By.CSS_SELECTOR, "#positions .column")) == 4
    rate = 100 * counts["num_accepted_tokens"] / counts["num_draft_tokens"]
    assert abs(int(shown.text("#rate").rstrip(" %")) - rate) <= 0.5
    assert float(shown.text("#mean-length")) == pytest.approx(32 / counts["num_rounds"], abs=0.005)
    stages = [e.text for e in chromium.find_elements(By.CSS_SELECTOR, "#stage-times dt")]
    assert stages == [stage.replace("_", " ") for stage in Stage]
    check_bar(shown)
    shown.picture("run-light")
    shown.assert_no_complaints()


def check_bar(shown: Page) -> None:
    """The stages' bar is full, each with its share of the total, and no two have one colour."""
    found = shown.driver.execute_script(
        "return [...document.querySelectorAll('#stages i')].map((e) => "
        "[e.dataset.stage, e.getBoundingClientRect().width, getComputedStyle(e).backgroundColor])"
    )
    timing = shown.record("on")["timing"]
    full = shown.driver.execute_script(
        "return document.querySelector('#stages').getBoundingClientRect().width"
    )
    assert sum(width for _, width, _ in found) == pytest.approx(full, abs=0.5)
    for stage, width, _ in found:
        assert width / full == pytest.approx(timing[f"{stage}_ms"] / timing["total_ms"], abs=0.02)
    assert len({colour for *_, colour in found}) == len(Stage)


def replay(shown: Page, *, button: str = "#run", why_plain: str = "") -> None:
    """Run the page on the rounds of `tests/support/rounds.py` instead of the front's answer."""
    chunks = received_chunks(report_progress=True)
    events: list[Any] = [{"choices": [{"text": chunk.text, "specwire": fates(chunk)}]} for chunk in chunks]
    counts = chunks[-1].speculation
    assert counts is not None
    timing = asdict(Timing(total_ms=90, draft_ms=45, verify_ms=45))
    counts = replace(counts, why_plain=why_plain)
    events.append({"choices": [], "specwire": [{"speculation": counts.to_dict(), "timing": timing}]})
    lines = [*(json.dumps(event) for event in events), "[DONE]"]
    stream = "".join(f"data: {line}\n\n" for line in lines)
    shown.driver.execute_script("window.fetch = async () => new Response(arguments[0])", stream)
    shown.one("#keep").click()
    shown.one(button).click()
    shown.finished()


def test_rounds_and_tokens_tell_where_they_are_from(here: Fronted, chromium: webdriver.Chrome) -> None:
    shown = Page(chromium, here.url)
    replay(shown)
    check_tree(shown)
    check_sources(shown)
    check_card(shown)
    shown.assert_no_complaints()


def check_tree(shown: Page) -> None:
    """With the path that was kept; the latest round at first, another one by the pointer, and by keys."""
    assert shown.text("#tree-title") == "Round 3: no guesses"
    assert shown.nodes() == [("…", "", 0), ("(", "plain", 1)]
    shown.point_at("#lane-on .token")
    assert shown.text("#tree-title") == "Round 1: 5 guesses of small, 2 kept"
    assert shown.nodes() == [
        ("…", "", 0),
        ("·return", "accepted", 1),
        ("·self", "dropped", 2),
        (".items", "dropped", 3),
        ("·n", "accepted", 2),
        ("⏎", "bonus", 3),
        ("·if", "dropped", 1),
    ]
    pointed = [token.text for token in shown.driver.find_elements(By.CSS_SELECTOR, ".pointed")]
    assert [text.strip() for text in pointed] == ["return", "n", ""], "the tokens that the round emitted"
    shown.picture("tree")
    shown.one("#tree-after").send_keys(Keys.ENTER)
    assert shown.text("#tree-title") == "Round 2: 2 guesses of ngram, 1 kept"
    assert shown.nodes() == [
        ("…", "", 0),
        ("def", "accepted", 1),
        ("·pop", "recovered", 2),
        ("·push", "rejected", 2),
    ]


def check_sources(shown: Page) -> None:
    """Tokens from the text have a dotted line below, not a colour alone; the target's own a solid one."""
    script = (
        "return [...document.querySelectorAll('#lane-on .token')].map((e) => [e.textContent, about(e), "
        "getComputedStyle(e).borderBottomStyle, getComputedStyle(e).boxShadow !== 'none'])"
    )
    assert shown.driver.execute_script(script) == [
        [" return", "accepted, a guess of small", "none", False],
        [" n", "accepted, a guess of small", "none", False],
        ["\n", "bonus, the target's own", "none", True],
        ["def", "accepted, a guess of ngram", "dotted", False],
        [" push", "rejected, a guess of ngram", "dotted", False],
        [" pop", "recovered, the target's own", "none", True],
        ["(", "plain, the target's own", "none", True],
    ]
    sources = [e.text for e in shown.driver.find_elements(By.CSS_SELECTOR, "#sources li")]
    assert sources == ["small 2 of 5", "ngram 1 of 2"]
    tiles = [shown.text(selector) for selector in ("#rounds", "#mean-length", "#kinds", "#with-guesses")]
    assert tiles == ["3", "2.00", "2 with guesses, 1 without", "2.50 with guesses"]


def check_card(shown: Page) -> None:
    """Of a token, with the stages and guesses of its round; under the pointer, by the arrow keys, and by a
    tap, which stays until it is closed."""
    first = " return · accepted, a guess of small · Round 1: 5 guesses of small, 2 kept"
    shown.point_at("#lane-on .token")
    assert shown.text("#card-title") == first
    nodes = [e.text for e in shown.driver.find_elements(By.CSS_SELECTOR, "#card .node")]
    assert nodes == ["…", "·return", "·self", ".items", "·n", "⏎", "·if"]
    widths = "return [...document.querySelectorAll('#card-stages i')].map((e) => parseFloat(e.style.width))"
    assert sum(shown.driver.execute_script(widths)) == pytest.approx(100, abs=0.1)
    shown.point_at("#title-on")
    assert not shown.one("#card").is_displayed()
    for key, text in ((Keys.ARROW_RIGHT, first), (Keys.ARROW_RIGHT, " n · "), (Keys.ARROW_LEFT, first)):
        shown.one("#lane-on .text").send_keys(key)
        assert shown.text("#card-title").startswith(text)
    shown.one("body").send_keys(Keys.ESCAPE)
    assert not shown.one("#card").is_displayed()
    shown.one('#lane-on [data-fate="recovered"]').click()
    shown.point_at("#title-on")
    assert shown.text("#card-title").startswith(" pop · recovered, the target's own · Round 2: ")
    shown.one("#card-close").click()
    assert not shown.one("#card").is_displayed()


def test_the_verdict_says_why_where_speculation_does_not_win(
    here: Fronted, chromium: webdriver.Chrome
) -> None:
    """In green where it wins, and only there."""
    script = (
        "for (const lane of [lanes.on, lanes.off]) lane.startedMs = 1;"
        "lanes.on.endedMs = 2001; lanes.off.endedMs = 1 + arguments[0]; judge(false);"
        "const colour = (e) => getComputedStyle(e).borderTopColor;"
        "return [verdict.dataset.kind, verdict.textContent, colour(verdict) === colour($('lane-on'))]"
    )
    unpaced = "Not paced: draft and target share this machine"
    even = "A round brought 2.00 tokens and took as long as 1.00 plain ones: "
    slower = "1.00 plain passes for the proposal, 1.00 for the pass with guesses."
    for why_plain, cases in (
        ("", [(3000, "faster", unpaced), (2000, "even", even), (1300, "slower", slower)]),
        ("does not pay here", [(1300, "slower", "Decoded plainly: does not pay here.")]),
    ):
        shown = Page(chromium, here.url)
        replay(shown, button="#race", why_plain=why_plain)
        for off_ms, kind, why in cases:
            found, words, is_neutral = chromium.execute_script(script, off_ms)
            assert (found, is_neutral) == (kind, kind in ("even", "slower"))
            assert f"with speculation {off_ms / 2000:.2f} × as fast" in words
            assert why in words
            assert kind != "faster" or "A round" not in words
        shown.assert_no_complaints()


def test_on_a_phone_verdict_and_chosen_token_are_in_view(here: Fronted, chromium: webdriver.Chrome) -> None:
    """The card is a sheet at the bottom; a token that it would cover moves up."""
    narrow = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        shown = Page(chromium, here.url)
        replay(shown, button="#race")
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()"
        verdict = chromium.execute_script(place, "#verdict")
        assert 0 <= verdict["top"] < verdict["bottom"] <= 844
        chromium.execute_script("scrollTo(0, 0)")
        chromium.execute_script("lanes.on.find('.token').click()")
        token, sheet = (chromium.execute_script(place, each) for each in (".token.chosen", "#card"))
        assert 0 <= token["top"] < token["bottom"] <= sheet["top"]
        assert (sheet["left"], sheet["right"], sheet["bottom"]) == (0, 390, 844)
        shown.assert_no_complaints()
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


CONTRASTS = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const channel = (c) => c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (e) => {
  const colour = parts(getComputedStyle(e).backgroundColor);
  return colour.length < 4 || colour[3] ? colour : behind(e.parentElement);
};
const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
const isVisible = (e) => e.getClientRects().length && getComputedStyle(e).visibility === "visible";
const isShown = (e) => isVisible(e) && !e.disabled;
return [...document.body.querySelectorAll("*")].filter((e) => hasText(e) && isShown(e)).map((e) => {
  const [dark, light] = [parts(getComputedStyle(e).color), behind(e)].map(luminance).sort((a, b) => a - b);
  return [(light + 0.05) / (dark + 0.05), e.localName, e.className, e.textContent.slice(0, 20)];
});
"""


def test_all_text_can_be_read(here: Fronted, chromium: webdriver.Chrome) -> None:
    """At least the contrast that WCAG 2 asks of text (AA), with every fate, a card and a verdict."""
    shown = Page(chromium, here.url)
    replay(shown, button="#race")
    shown.one('#lane-on [data-fate="recovered"]').click()
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for kind in ("faster", "slower", "differs"):
            chromium.execute_script("verdict.dataset.kind = arguments[0]", kind)
            found = chromium.execute_script(CONTRASTS)
            assert len(found) > 60
            assert max(ratio for ratio, *_ in found) > 10
            assert [each for each in found if each[0] < 4.5] == []
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_race_ends_with_the_same_text_and_refused_guesses_pass(
    here: Fronted, chromium: webdriver.Chrome
) -> None:
    """Here and where both run at the same time."""
    shown = Page(chromium, here.url)
    shown.fill("#max-tokens", "24")
    shown.one("#race").click()
    shown.finished()
    assert shown.tokens("on") == shown.tokens("off")
    assert len(shown.tokens("off")) == 24
    assert shown.text("#verdict").startswith("Same text, all 24 tokens")
    assert shown.tops("on") == shown.tops("off"), "what was refused has left no room behind"
    opacity = (
        "return [...document.querySelectorAll('.text .rejected')].map((e) => getComputedStyle(e).opacity)"
    )
    assert {*chromium.execute_script(opacity)} == {"0"}
    assert shown.record("off")["speculation"]["num_draft_tokens"] == 0
    assert shown.record("on")["speculation"]["num_draft_tokens"] > 0
    assert shown.record("on")["rule"] == shown.record("off")["rule"] == "gumbel"
    for lane in ("on", "off"):
        assert re.fullmatch(r"\d+\.\d\d s", shown.text(f"#lane-{lane} .clock"))
        assert re.fullmatch(r"\d+\.\d tokens/s", shown.text(f"#lane-{lane} .speed"))
    shown.picture("race-light")
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    background = "return getComputedStyle(document.body).backgroundColor"
    assert max(map(int, re.findall(r"\d+", chromium.execute_script(background))[:3])) < 64
    shown.picture("race-dark")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    shown.one("#together").click()
    shown.one("#race").click()
    shown.finished()
    assert shown.tokens("on") == shown.tokens("off")
    assert "sharing the device" in shown.text("#verdict")
    shown.assert_no_complaints()


def test_a_chat_goes_on_with_what_was_said(here: Fronted, chromium: webdriver.Chrome) -> None:
    shown = Page(chromium, here.url)
    shown.fill("#max-tokens", "10")
    shown.one("#chat").click()
    answers: list[str] = []
    for number, said in enumerate(("Add two numbers.", "Now three.")):
        shown.fill("#prompt", said)
        shown.one("#race" if number else "#run").click()
        shown.finished()
        answers.append("".join(shown.tokens("on")))
        assert shown.one("#prompt").get_property("value") == "", "the next message is to be written"
    told = shown.text("#lane-on .given")
    assert told == f"user: Add two numbers.\n\nassistant: {answers[0]}\n\nuser: Now three.\n\nassistant: "
    assert shown.tokens("on") == shown.tokens("off")
    expected = here.openai.chat.completions.create(
        model=here.model,
        messages=[
            {"role": "user", "content": "Add two numbers."},
            {"role": "assistant", "content": answers[0]},
            {"role": "user", "content": "Now three."},
        ],
        max_tokens=10,
        temperature=0.7,
        seed=7,
        extra_body={"rule": "gumbel"},
    )
    assert expected.choices[0].message.content == answers[1]
    for _ in range(2):
        shown.one("#chat").click()
    shown.fill("#prompt", "Again.")
    shown.one("#run").click()
    shown.finished()
    assert shown.text("#lane-on .given") == "user: Again.\n\nassistant: ", "a conversation of its own"
    shown.picture("chat-light")
    shown.assert_no_complaints()


def test_by_keyboard_on_a_narrow_screen(here: Fronted, chromium: webdriver.Chrome) -> None:
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        shown = Page(chromium, here.url)
        shown.fill("#max-tokens", "1000")
        shown.one("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        shown.until(lambda: len(shown.tokens("on")) > 30)
        assert chromium.execute_script("return document.documentElement.scrollWidth") <= 360
        shown.one("body").send_keys(Keys.ESCAPE)
        shown.until(lambda: shown.state == "idle")
        assert shown.text("#status") == "Stopped."
        here.stack.assert_idle_within(20)
        shown.picture("narrow")
        shown.assert_no_complaints()
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_ways_to_draft_are_shown_while_their_section_is_open(
    here: Fronted, chromium: webdriver.Chrome
) -> None:
    shown = Page(chromium, here.url)
    assert not shown.one("#ways table").is_displayed()
    here.stack.client.generate("import os", SamplingParams(max_tokens=16))  # costs are known from then on
    waits = "const real = setTimeout; setTimeout = (f, ms) => ms === 3000 ? (window.again = f) : real(f, ms)"
    chromium.execute_script(waits)
    shown.one("#ways summary").click()
    shown.until(lambda: shown.one("#ways table").is_displayed())
    names = [e.text for e in chromium.find_elements(By.CSS_SELECTOR, "#ways tbody th")]
    assert {name.removesuffix(" · now") for name in names} == {
        way.name for way in here.stack.client.get_status().ways
    }
    assert not shown.one("#ways-why").is_displayed()
    told = httpx2.get(here.url + "/ways").json()
    told |= {"why_plain": "does not pay here", "num_workers": 2}
    told["ways"] = [
        {"name": "plain", "is_chosen": True, "expected_tokens_per_s": 40.4, "measured_tokens_per_s": 50},
        {"name": "chains", "is_chosen": False, "expected_tokens_per_s": 25, "measured_tokens_per_s": 0},
    ]
    script = "window.fetch = async () => new Response(arguments[0])"
    chromium.execute_script(script, json.dumps(told))
    chromium.execute_script("again()")
    shown.until(lambda: shown.one("#ways-why").is_displayed())
    assert shown.text("#ways-why") == "Decoded plainly: does not pay here."
    assert shown.text("#ways-told").endswith(" Of the one worker that answered, of 2.")
    rows = [e.text.split("\n") for e in chromium.find_elements(By.CSS_SELECTOR, "#ways tbody tr")]
    assert rows == [["plain · now", "40 50"], ["chains", "25 –"]]
    width = "return [...document.querySelectorAll('#ways i')].map((e) => parseFloat(e.style.width))"
    assert chromium.execute_script(width) == pytest.approx([80.8, 50])
    assert [each for each in chromium.execute_script(CONTRASTS) if each[0] < 4.5] == []
    shown.picture("ways")
    shown.assert_no_complaints()


def test_what_is_refused_is_said_and_a_server_with_another_model_is_found_at_the_next_try(
    here: Fronted, chromium: webdriver.Chrome
) -> None:
    shown = Page(chromium, here.url)
    shown.fill("#max-tokens", "99999")
    shown.one("#run").click()
    shown.until(lambda: shown.state == "failed")
    assert "is over the context of 2048" in shown.text("#status")
    chromium.execute_script("model = 'gone'")  # as a page knows it that was open while the server changed
    shown.fill("#max-tokens", "8")
    shown.one("#run").click()
    shown.until(lambda: "'gone' does not exist" in shown.text("#status"))
    assert shown.state == "failed"
    shown.one("#run").click()
    shown.finished()
    assert shown.text("#model") == here.model


def test_the_page_may_load_nothing_from_elsewhere(here: Fronted) -> None:
    response = httpx2.get(here.url + "/")
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\"(?!data:)", page.html()) == []
    assert (embedded.TARGET_DIR / "config.json").exists()
