"""The page of `hf-muon report` in a browser, wide and narrow, light and dark."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.diagnostics.pages import KINDS, report, write


@pytest.fixture
def browser():
    """Yield a Chromium: HF_MUON_CHROMIUM, one beside python or on the path, or playwright's own."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    paths = (shutil.which(name, path=path) for name in ("chromium", "chromium-browser", "google-chrome"))
    named = os.environ.get("HF_MUON_CHROMIUM") or next(filter(None, paths), None)
    with playwright.sync_playwright() as driver:
        if named is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("no browser: tests/get_chromium has found none (HF_MUON_CHROMIUM may name one)")
        opened = driver.chromium.launch(executable_path=named, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


# The words and tables of each figure that its tool bar covers.
COVERED = """Array.from(document.querySelectorAll("figure")).flatMap(figure => {
  const bar = figure.querySelector(".modebar").getBoundingClientRect()
  const parts = figure.querySelectorAll("h2, .note, text, .heatmaplayer")
  return Array.from(parts).filter(part => {
    const box = part.getBoundingClientRect()
    return box.left < bar.right && bar.left < box.right && box.top < bar.bottom && bar.top < box.bottom
  }).map(part => part.textContent)
})"""
WIDTH = "document.documentElement.scrollWidth"


def box(locator):
    """Return left, right, top and bottom."""
    found = locator.bounding_box()
    return found["x"], found["x"] + found["width"], found["y"], found["y"] + found["height"]


def luminance(element, key):
    colour = element.evaluate(f"e => getComputedStyle(e).{key}")
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.promise("report")
def test_in_a_browser(browser, tmp_path):
    """Look at the charts of one run, and at two runs side by side, wide and narrow, light and dark."""
    for name in "ab":
        write(tmp_path / name, steps=range(10, 110, 10))
    assert report(tmp_path / "a").exit_code == 0
    assert report(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html").exit_code == 0
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    complaints, requests = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "a" / "muon_report.html").as_uri())
    assert page.title() == "Muon: a"
    page.set_default_timeout(20_000)
    page.wait_for_function("document.querySelector('.main-svg').clientWidth <= 600")
    figures = {title: page.locator("figure").nth(i) for i, title in enumerate(page.locator("h2").all_inner_texts()[1:])}
    assert page.locator("figure").count() == len(figures) == 12
    for figure in figures.values():  # the page draws every line inside its chart
        figure.locator(".main-svg").first.wait_for()
        left, right, top, bottom = box(figure)
        assert right - left > 300
        assert bottom - top > 50
        for line in figure.locator(".scatterlayer path.js-line").all():
            first, last, *_ = box(line)
            assert left <= first < last <= right + 1
            assert last - first > 0.7 * (right - left - 100)
    left, right, top, bottom = box(figures["Loss"].locator(".nsewdrag").first)
    page.mouse.move(right - 3, (top + bottom) / 2)
    figures["Loss"].locator(".hoverlayer text").first.wait_for()
    words = " ".join(figures["Loss"].locator(".hoverlayer text").all_text_contents())
    assert "100" in words
    assert "0.1" in words
    assert figures["Update RMS by kind"].locator(".legendtext").all_text_contents() == list(KINDS)
    # The band of what is usual lies inside of the axes.
    chart = figures["Relative update by kind"]
    *_, top, bottom = box(chart.locator(".nsewdrag").first)
    *_, highest, lowest = box(chart.locator(".shapelayer path"))
    assert top <= highest < lowest <= bottom
    cells = figures["Relative update by layer and kind"].locator(".heatmap-label text").all_text_contents()
    assert list(map(float, cells)) == [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    assert complaints == []
    assert [url for url in requests if not url.startswith("file:")] == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate(WIDTH) <= 380  # on a phone, the page cuts nothing off
    for width, scheme in ((420, "dark"), (1200, "light")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("document.querySelectorAll('.main-svg').length > 10")
        assert page.evaluate(WIDTH) <= width
        figures = "document.querySelectorAll('figure').length"
        page.wait_for_function(f"document.querySelectorAll('.modebar').length == {figures}")
        assert page.evaluate(COVERED) == []
        # Panels stand side by side on equal axes; a narrow page scrolls them inside of the figure.
        figure = page.locator("figure", has_text="Relative update by kind")
        one, other = (box(figure.locator(f".nsewdrag[data-subplot={axes}]")) for axes in ("xy", "x2y2"))
        assert one[2:] == other[2:]
        assert other[0] > one[0] + 100
        # Words differ from their ground as WCAG asks for, 4.5 to 1.
        ground = luminance(page.locator("body"), "backgroundColor")
        for selector in ("h1", "h2", "li", "th", "td", ".note"):
            darker, brighter = sorted((luminance(page.locator(selector).first, "color"), ground))
            assert (brighter + 0.05) / (darker + 0.05) > 4.5, selector
