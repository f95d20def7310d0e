"""The chat page in a real browser: Debian's packages chromium and chromium-driver, through selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SmolFactory
from server_rig import RunningServer, serving, wait_for

from dspine_local import Engine

selenium = pytest.importorskip("selenium")
pytestmark = [pytest.mark.browser, pytest.mark.native, pytest.mark.filterwarnings("ignore")]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver", allow_module_level=True)


@pytest.fixture(scope="module")
def server(smollm2: SmolFactory, trained_drafter: Path) -> Iterator[RunningServer]:
    engine = Engine(smollm2("q8_0"), trained_drafter, n_ctx=4096, n_parallel=2, n_draft=3)
    with serving(engine, model_path="SmolLM2-135M-Instruct.Q8_0.gguf") as running:
        yield running


@pytest.fixture
def page(server: RunningServer) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(server.url)
        wait_for(lambda: "SmolLM2" in text_of(driver, "model"))
        yield driver
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        driver.quit()


def by_id(page: Any, name: str) -> Any:
    return page.find_element("id", name)


def text_of(page: Any, name: str) -> str:
    return str(by_id(page, name).text)


def all_of(page: Any, selector: str) -> list[Any]:
    return list(page.find_elements("css selector", selector))


def set_value(page: Any, name: str, value: str) -> None:
    by_id(page, "open-settings").click()
    field = by_id(page, name)
    field.clear()
    field.send_keys(value)
    all_of(page, "#settings button")[0].click()


def ask(page: Any, text: str) -> None:
    by_id(page, "prompt").send_keys(text + "\n")


def is_done(page: Any) -> bool:
    return by_id(page, "log").get_attribute("aria-busy") == "false"


def shoot(page: Any, folder: Path, name: str) -> None:
    """A screenshot, for people who want to look: in DSPINE_SCREENSHOTS, if that is set."""
    wanted = os.environ.get("DSPINE_SCREENSHOTS")
    file = (Path(wanted) if wanted else folder) / f"{name}.png"
    assert page.save_screenshot(str(file))
    assert file.stat().st_size > 5000


def test_chat_with_provenance(page: Any, server: RunningServer, tmp_path: Path) -> None:
    set_value(page, "sampling-temperature", "0")
    set_value(page, "sampling-max_tokens", "60")
    ask(page, "Write a Python function that returns the sum of a list.")
    wait_for(lambda: is_done(page))
    answer = all_of(page, ".message.assistant")[0].text
    assert answer
    status = text_of(page, "status")
    assert "tokens/s" in status
    assert "acceptance length" in status
    shoot(page, tmp_path, "answer")
    by_id(page, "shade").click()
    drafted, sampled = all_of(page, ".tokens .drafted"), all_of(page, ".tokens .sampled")
    assert drafted
    assert sampled
    n_accepted = int(status.split("·")[-1].split()[0])
    assert len(drafted) == n_accepted
    body = {"messages": [{"role": "user", "content": "Write a Python function that returns the sum of a list."}]}
    expected = server.post("/v1/chat/completions", **body, temperature=0, max_tokens=60)
    shown = page.execute_script("return document.querySelector('.tokens').textContent")
    assert shown.strip() == expected["choices"][0]["message"]["content"].strip()
    shoot(page, tmp_path, "provenance")


def test_stop_and_what_stays(page: Any, server: RunningServer) -> None:
    ask(page, "Tell me a very long story about a fox.")
    wait_for(lambda: all_of(page, ".message.assistant") and all_of(page, ".message.assistant")[0].text)
    by_id(page, "stop").click()
    assert wait_for(server.is_idle) < 2
    wait_for(lambda: is_done(page))
    kept = all_of(page, ".message.assistant")[0].text
    assert kept
    page.refresh()
    wait_for(lambda: all_of(page, ".message.assistant"))
    assert all_of(page, ".message.assistant")[0].text == kept
    assert "Tell me a very long story" in all_of(page, "#list li")[0].text
    by_id(page, "new").click()
    assert all_of(page, ".message") == []
    all_of(page, "#list li button")[0].click()
    assert len(all_of(page, ".message")) == 2
    all_of(page, "#list li button")[1].click()
    assert all_of(page, "#list li") == []


def test_errors_are_shown(page: Any) -> None:
    set_value(page, "sampling-temperature", "-1")
    ask(page, "Hello")
    wait_for(lambda: all_of(page, ".message.error"))
    assert "temperature" in all_of(page, ".message.error")[0].text
    page.get_log("browser")  # the refused request is in the log, as it should be


def test_markup_of_the_model_is_text(page: Any) -> None:
    hostile = (
        "<img src=x onerror=alert(1)> **bold** <script>alert(2)</script> [a](javascript:alert(3)) [b](https://x.example/)"
        "\n```html\n<b>code</b>\n```\n- one\n- `two <i>`\n\n# Title <u>\n> quote"
    )
    page.execute_script(
        "const [text, done] = arguments; import('/web/markdown.js').then(m => {"
        "document.getElementById('log').replaceChildren(m.renderMarkdown(text)); window.drawn = true; });",
        hostile,
        None,
    )
    wait_for(lambda: bool(page.execute_script("return window.drawn === true")))
    assert all_of(page, "#log img, #log script, #log b, #log i, #log u") == []
    assert [link.get_attribute("href") for link in all_of(page, "#log a")] == ["https://x.example/"]
    assert all_of(page, "#log strong")[0].text == "bold"
    assert all_of(page, "#log pre code")[0].text == "<b>code</b>"
    assert len(all_of(page, "#log li")) == 2
    assert len(all_of(page, "#log blockquote, #log h2")) == 2


def test_on_a_phone_in_the_dark_with_the_keyboard(page: Any, tmp_path: Path) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    metrics = {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    set_value(page, "sampling-max_tokens", "24")
    ask(page, "Hello! Please say something kind.")
    wait_for(lambda: is_done(page))
    width = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1] <= 360
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in background[4:-1].split(",")) < 150
    assert not by_id(page, "side").is_displayed()
    by_id(page, "menu").click()
    assert by_id(page, "side").is_displayed()
    by_id(page, "menu").click()
    assert page.switch_to.active_element.get_attribute("id") in ("prompt", "menu")
    shoot(page, tmp_path, "phone")
