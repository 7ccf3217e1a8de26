"""Scripts that tests evaluate in the page: most list what is wrong with it."""

from __future__ import annotations

import json

NAMELESS = """
[...document.querySelectorAll("button, input, select, a, svg[role=img]")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.innerText?.trim() || e.getAttribute("aria-label") || e.labels?.length || e.title))
  .map((e) => e.outerHTML.slice(0, 120))
"""
FAINT = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("main *, header *, footer *")]
    .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => !e.closest("tr.down, tr.stale"));
  return texts.filter((e) => {
    const written = getComputedStyle(e)[e.closest("svg") ? "fill" : "color"];
    const [a, b] = [light(rgb(written)), light(behind(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map((e) => e.outerHTML.slice(0, 120));
})()
"""
STATES = """
(() => {
  for (const level of ["calm", "degraded", "critical", "late"]) {
    const banner = document.querySelector("#banner").cloneNode(true);
    banner.removeAttribute("id");
    banner.className = `banner ${level}`;
    document.querySelector("main").append(banner);
  }
  for (const state of ["ready", "draining", "paused", "stale", "down", "ejected"]) {
    const badge = document.createElement("span");
    badge.className = `badge ${state}`;
    badge.textContent = state;
    document.querySelector("#sites").append(badge);
  }
  document.querySelectorAll("#tiles li").forEach((tile, i) => tile.className = ["warn", "bad"][i % 2]);
  document.querySelectorAll(".bar").forEach((bar, i) => bar.className = ["bar warm", "bar hot"][i % 2]);
})()
"""
"""Every look that a banner, a badge, a tile or a bar can have, at once; the page is paused meanwhile."""
DISORDER = """
[...document.querySelectorAll("h1, h2, h3")]
  .filter((e) => e.checkVisibility())
  .map((e) => Number(e.tagName[1]))
  .filter((level, i, all) => level > (all[i - 1] ?? 0) + 1)
  .concat([...document.querySelectorAll("table")].filter((e) => e.rows.length && !e.querySelector("th")))
  .concat([...document.querySelectorAll("img:not([alt]), [role=img]:not([aria-label])")]).length
"""
FOCUSED = """
(() => {
  const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
  const { innerText, id, className } = document.activeElement;
  return [outlineStyle !== "none" && parseFloat(outlineWidth) >= 2, innerText?.trim() || id || className];
})()
"""

WRAPPED_ROWS = """
[...document.querySelectorAll("#site-table tr")].filter(
  (row) => getComputedStyle(row).gridTemplateColumns.split(" ").length !== row.cells.length,
).length
"""


def row(site: str) -> str:
    """An expression for the table row of a site. Before a row is first painted, its `innerText` is empty."""
    name = json.dumps(site)
    rows = "[...document.querySelectorAll('#site-table tbody tr')]"
    return f"{rows}.find((r) => r.querySelector('.name span').textContent === {name})"
