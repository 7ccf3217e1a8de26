// Plots as inline SVG: spark lines, stacked areas, lines against a limit. Each plot has a table of its values.
import { clock, el, number, percent, rate, setText, svg } from "./render.js";

const HEIGHT = 210, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 2", "6 2 1 2"];
const NAMED_LINES = 8;

export function spark(svgElement, values) {
  const sampled = buckets(values, 90), known = sampled.filter((value) => value != null);
  if (known.length < 2) return svgElement.replaceChildren();
  const low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9);
  const points = sampled.map((value, i) => (value == null ? null : [(i / (sampled.length - 1)) * 100, 27 - ((value - low) / (high - low)) * 24]));
  const line = path(points);
  if (!svgElement.firstChild) {
    svgElement.append(svg("path", { class: "spark-area" }), svg("path", { class: "spark" }));
  }
  const drawn = points.filter(Boolean);
  svgElement.firstChild.setAttribute("d", `M${drawn[0][0]} 30${line.replaceAll("M", "L")}L${drawn.at(-1)[0]} 30Z`);
  svgElement.lastChild.setAttribute("d", line);
}

// `kind` is "areas" (stacked rates) or "lines" (parts of a limit).
export class Plot {
  constructor(figure, kind, what) {
    this.kind = kind;
    this.what = what;
    this.format = kind === "areas" ? rate : percent;
    this.colours = new Map();
    this.box = el("div", { className: "plot" });
    this.svg = svg("svg", { role: "img", tabindex: "0", "aria-label": what });
    this.tip = el("div", { className: "tip", hidden: true });
    this.legend = el("ul", { className: "legend" });
    this.table = el("table");
    this.details = el("details", {}, el("summary", {}, "The same as a table"), el("div", { className: "scroll" }, this.table));
    this.box.append(this.svg, this.tip);
    figure.append(this.box, this.legend, this.details);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    this.details.addEventListener("toggle", () => this.fillTable());
    new ResizeObserver(([{ contentRect }]) => this.draw((this.width = contentRect.width))).observe(this.box);
  }

  show(at, series, minutes) {
    const key = `${minutes} ${at.length} ${at.at(-1)} ${Object.keys(series).length}`;
    if (key === this.key || document.hidden) return;
    this.key = key;
    Object.assign(this, { at, series, minutes });
    this.draw();
  }

  draw() {
    if (!this.at || !this.width || document.hidden) return;
    const end = this.at.at(-1) ?? Date.now() / 1000;
    Object.assign(this, { end, start: end - this.minutes * 60 });
    const names = Object.keys(this.series).sort();
    for (const name of names) if (!this.colours.has(name)) this.colours.set(name, this.colours.size);
    const parts = svg("g");
    const high = this.kind === "areas" ? this.areas(parts, names) : this.lines(parts, names);
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren(this.scales(high), parts, cursor);
    this.cursor = cursor;
    this.describe(names);
    if (this.pointed != null) this.point(this.pointed);
    if (this.details.open) this.fillTable();
  }

  x(time) {
    return LEFT + ((time - this.start) / (this.end - this.start)) * (this.width - LEFT - RIGHT);
  }

  y(value, high) {
    return HEIGHT - BOTTOM - (value / high) * (HEIGHT - TOP - BOTTOM);
  }

  // Equal steps of about three pixels, each with its range of samples.
  steps() {
    const count = Math.max(20, Math.round((this.width - LEFT - RIGHT) / 3));
    const size = Math.max((this.end - this.start) / count, this.minutes > 15 ? 60 : 1);
    const found = [];
    for (let i = 0; i < this.at.length; ) {
      const slot = Math.floor(this.at[i] / size);
      const from = i;
      while (i < this.at.length && Math.floor(this.at[i] / size) === slot) i++;
      if (this.at[i - 1] >= this.start) found.push({ x: this.x(this.at[i - 1]), from, to: i, slot });
    }
    return found;
  }

  areas(parts, names) {
    const steps = this.steps();
    const sums = steps.map(() => 0);
    const stacks = names.map((name) => {
      const values = this.series[name];
      return steps.map(({ from, to }, i) => {
        const low = sums[i];
        sums[i] += mean(values, from, to);
        return [low, sums[i]];
      });
    });
    const high = nice(Math.max(1, ...sums));
    stacks.forEach((stack, n) => {
      const edge = (side) => stack.map((values, i) => [steps[i].x, this.y(values[side], high)]);
      parts.append(svg("path", { class: "area", fill: this.colour(names[n]), d: between(edge(1), edge(0)) }));
    });
    return high;
  }

  lines(parts, names) {
    const steps = this.steps();
    const worst = new Map(names.map((name) => [name, peak(this.series[name], 0, this.at.length) ?? -1]));
    const ranked = [...names].sort((a, b) => worst.get(b) - worst.get(a) || (a < b ? -1 : 1));
    this.named = new Set(names.length > NAMED_LINES ? ranked.slice(0, NAMED_LINES) : names);
    const high = Math.min(20, nice(Math.max(1.2, ...worst.values())));
    this.band(parts, steps, ranked.filter((name) => !this.named.has(name)), high);
    for (const name of ranked.filter((name) => this.named.has(name)).reverse()) {
      let before = null;
      const points = steps.flatMap(({ x, from, to, slot }) => {
        const value = peak(this.series[name], from, to);
        const gap = before != null && slot - before > 3;
        if (value != null) before = slot;
        const point = value == null ? null : [x, this.y(Math.min(value, high), high)];
        return gap ? [null, point] : [point];
      });
      parts.append(svg("path", { class: "line", stroke: this.colour(name), "stroke-dasharray": this.dash(name), d: path(points) }));
    }
    parts.append(svg("line", { class: "limit", x1: LEFT, x2: this.width - RIGHT, y1: this.y(1, high), y2: this.y(1, high) }));
    return high;
  }

  // Draw all other series as one band between their minimum and maximum.
  band(parts, steps, names, high) {
    const series = names.map((name) => this.series[name]);
    const top = [], bottom = [];
    for (const { x, to } of steps) {
      let low = Infinity, highest = -Infinity;
      for (const values of series) {
        const value = values[to - 1];
        if (value == null) continue;
        if (value < low) low = value;
        if (value > highest) highest = value;
      }
      if (highest < low) continue;
      top.push([x, this.y(Math.min(highest, high), high)]);
      bottom.push([x, this.y(Math.min(low, high), high)]);
    }
    parts.append(svg("path", { class: "rest", d: between(top, bottom) }));
  }

  scales(high) {
    const group = svg("g");
    const count = 4;
    for (let i = 0; i <= count; i++) {
      const value = (high * i) / count, y = this.y(value, high);
      const label = svg("text", { class: "axis", x: LEFT - 6, y: y + 4, "text-anchor": "end" });
      label.textContent = this.kind === "areas" ? number(value, 1) : percent(value);
      group.append(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }), label);
    }
    const ticks = this.width < 420 ? 3 : 5;
    for (let i = 0; i <= ticks; i++) {
      const time = this.start + ((this.end - this.start) * i) / ticks;
      const anchor = i === 0 ? "start" : i === ticks ? "end" : "middle";
      const label = svg("text", { class: "axis", x: this.x(time), y: HEIGHT - 4, "text-anchor": anchor });
      label.textContent = clock(time, false);
      group.append(label);
    }
    return group;
  }

  describe(names) {
    const shown = this.kind === "areas" ? names : names.filter((name) => this.named.has(name));
    const key = shown.join("\n");
    if (this.legendKey !== key) {
      this.legendKey = key;
      this.legend.replaceChildren(...shown.map((name) => this.legendItem(name)));
      const more = names.length - shown.length;
      if (more) this.legend.append(el("li", {}, `${more} less loaded: grey`));
    }
    shown.forEach((name, i) => setText(this.legend.children[i].querySelector("b"), this.format(this.series[name].at(-1))));
    const now = shown.map((name) => `${name} ${this.format(this.series[name].at(-1))}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.what}. Now: ${now || "nothing"}. Arrow keys move through time.`);
  }

  legendItem(name) {
    const swatch = this.kind === "areas"
      ? svg("rect", { width: 20, height: 9, rx: 2, fill: this.colour(name) })
      : svg("path", { d: "M0 5H20", stroke: this.colour(name), "stroke-width": 2, "stroke-dasharray": this.dash(name) });
    return el("li", {}, svg("svg", { viewBox: "0 0 20 9", "aria-hidden": "true" }, swatch), `${name} `, el("b"));
  }

  colour(name) {
    return `var(--s${this.colours.get(name) % 8})`;
  }

  dash(name) {
    return DASHES[this.colours.get(name) % DASHES.length];
  }

  step(event) {
    const by = { ArrowLeft: -8, ArrowRight: 8 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (!by) return;
    event.preventDefault();
    this.point(Math.min(this.width - RIGHT, Math.max(LEFT, (this.pointed ?? this.width - RIGHT) + by)));
  }

  point(x) {
    this.pointed = x;
    const shown = x != null && this.at?.length > 0 && x >= LEFT;
    this.tip.hidden = !shown;
    this.cursor?.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const time = this.start + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.end - this.start);
    const i = nearest(this.at, time);
    const values = Object.entries(this.series).map(([name, series]) => [name, series[i]]).filter(([, value]) => value != null);
    values.sort((a, b) => b[1] - a[1]);
    const cx = this.x(this.at[i]);
    this.cursor.setAttribute("x1", cx);
    this.cursor.setAttribute("x2", cx);
    this.tip.replaceChildren(el("b", {}, clock(this.at[i])), ...values.slice(0, 8).map(([name, value]) => el("div", {}, `${name}: ${this.format(value)}`)));
    this.tip.style.left = cx > this.width / 2 ? "" : `${cx + 10}px`;
    this.tip.style.right = cx > this.width / 2 ? `${this.width - cx + 10}px` : "";
  }

  fillTable() {
    if (!this.details.open || !this.at?.length) return;
    const names = Object.keys(this.series).sort().slice(0, 30);
    const rows = 15, from = nearest(this.at, this.start);
    const picked = Array.from({ length: rows }, (_, i) => from + Math.round(((this.at.length - 1 - from) * i) / (rows - 1)));
    const head = el("tr", {}, el("th", {}, "time"), ...names.map((name) => el("th", { className: "n" }, name)));
    const body = [...new Set(picked)].reverse().map((i) =>
      el("tr", {}, el("th", { scope: "row" }, clock(this.at[i])), ...names.map((name) => el("td", { className: "n" }, this.format(this.series[name][i])))));
    this.table.replaceChildren(el("caption", { className: "dim" }, this.what), el("thead", {}, head), el("tbody", {}, ...body));
  }
}

function path(points) {
  let d = "", pen = "M";
  for (const point of points) {
    if (point == null) pen = "M";
    else {
      d += pen + quarters(point[0]) + " " + quarters(point[1]);
      pen = "L";
    }
  }
  return d;
}

function between(top, bottom) {
  return top.length ? `${path(top)}L${path(bottom.reverse()).slice(1)}Z` : "";
}

// Formatting a coordinate costs more than drawing it: rounded to quarter pixels, each is formatted once.
const TEXTS = [];

function quarters(value) {
  const n = Math.round(value * 4);
  return (TEXTS[n] ??= String(n / 4));
}

function buckets(values, count) {
  if (values.length <= count) return values;
  const size = values.length / count;
  return Array.from({ length: count }, (_, i) => peak(values, Math.floor(i * size), Math.floor((i + 1) * size)));
}

function peak(values, from, to) {
  let best = null;
  for (let i = from; i < to; i++) if (values[i] != null && (best == null || values[i] > best)) best = values[i];
  return best;
}

function mean(values, from, to) {
  let sum = 0;
  for (let i = from; i < to; i++) sum += values[i] ?? 0;
  return to > from ? sum / (to - from) : 0;
}

// Return the smallest of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten that covers the value: four even ticks.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * ([1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8].find((step) => step * power >= value - 1e-9) ?? 10);
}

function nearest(sorted, time) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low > 0 && time - sorted[low - 1] < sorted[low] - time ? low - 1 : low;
}
