// The table of sites: one row for each, updated in place, sortable by any column.
import { el, moment, number, percent, rate, seconds, setClass, setText } from "./render.js";

const DAY_S = 86400, FILL_TURNS = 5;
const COLUMNS = [
  { title: "Site", key: (s) => s.name, type: "name" },
  { title: "State", key: (s) => s.state, type: "state" },
  { title: "Token load", key: (s) => s.load ?? -1, type: "bar" },
  { title: "Weight → share", key: (s) => s.share, text: (s) => `${number(s.weight)} → ${percent(s.share)}` },
  { title: "Out tok/s", key: (s) => s.output_per_s, text: (s) => rate(s.output_per_s) },
  { title: "In tok/s", key: (s) => s.input_per_s, text: (s) => rate(s.input_per_s) },
  { title: "From cache", key: (s) => s.cached_share ?? -1, text: (s) => percent(s.cached_share) },
  { title: "Running", key: (s) => s.running, text: (s) => `${s.running}/${s.slots}` },
  { title: "Queued", key: (s) => s.pending, text: (s) => number(s.pending) },
  { title: "TTFT p95", key: (s) => s.ttft_p95_s ?? -1, text: (s) => seconds(s.ttft_p95_s) },
  { title: "Token p95", key: (s) => s.itl_p95_s ?? -1, text: (s) => seconds(s.itl_p95_s) },
  { title: "KV used", key: (s) => s.kv_used ?? -1, text: (s) => percent(s.kv_used) },
  { title: "Err/min", key: (s) => s.errors_per_min, text: (s) => number(s.errors_per_min) },
  { title: "Report", key: (s) => s.report_age_s, text: (s) => seconds(s.report_age_s), keep: true },
  { title: "$/M in · out", key: (s) => s.output_usd_per_mtok, text: (s) => `${s.input_usd_per_mtok} · ${s.output_usd_per_mtok}`, keep: true },
];

function deviceLine(device) {
  if (device.lost) return `${device.device}: lost, starts again`;
  const used = percent(device.kv_tokens ? 1 - device.kv_free_tokens / device.kv_tokens : null);
  return `${device.device}: ${device.running}/${device.slots} running, ${device.pending} queued, KV ${used}, ${rate(device.tokens_per_s)} tok/s`;
}

export class SiteTable {
  constructor(table, filter, act) {
    this.body = table.tBodies[0];
    this.head = table.tHead;
    this.filter = filter;
    this.act = act;
    this.rows = new Map();
    this.turn = 0;
    this.visibility = new IntersectionObserver((changes) => changes.forEach((c) => (c.target.isVisible = c.isIntersecting)), { rootMargin: "200px" });
    this.order = { column: 0, down: false };
    Object.assign(this, { sites: [], events: [] });
    this.buildHead();
    filter.addEventListener("input", () => this.show(this.sites));
  }

  buildHead() {
    const cells = COLUMNS.map((column, i) => {
      const button = el("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.sortBy(i));
      return el("th", { className: i > 2 ? "n" : "" }, button);
    });
    this.head.replaceChildren(el("tr", {}, ...cells, el("th", { className: "n acting" }, "Act")));
    this.markHead();
  }

  sortBy(column) {
    const down = this.order.column === column ? !this.order.down : column > 1;
    this.order = { column, down };
    this.markHead();
    this.show(this.sites);
  }

  markHead() {
    [...this.head.rows[0].cells].forEach((cell, i) => {
      if (i === this.order.column) cell.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  show(sites, events = this.events) {
    Object.assign(this, { sites, events });
    const search = this.filter.value.trim().toLowerCase();
    this.filter.hidden = sites.length < 12 && !search; // what leaves rows out is seen
    const shown = sites.filter((s) => !search || `${s.name} ${s.cloud} ${s.region} ${s.state}`.toLowerCase().includes(search));
    const { key } = COLUMNS[this.order.column];
    const sign = this.order.down ? -1 : 1;
    shown.sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) || (a.name < b.name ? -1 : 1));
    this.turn++;
    shown.forEach((site, i) => {
      const row = this.row(site.name);
      // Invisible rows are filled in turns: they are most of the work.
      if (row.tr.isVisible !== false || row.site?.state !== site.state || (this.turn + i) % FILL_TURNS === 0) this.fill(row, site);
      if (this.body.rows[i] !== row.tr) this.body.insertBefore(row.tr, this.body.rows[i] ?? null);
    });
    while (this.body.rows.length > shown.length) this.body.lastChild.remove();
    for (const name of this.rows.keys()) if (!sites.some((site) => site.name === name)) this.rows.delete(name);
  }

  row(name) {
    if (!this.rows.has(name)) this.rows.set(name, this.buildRow(name));
    return this.rows.get(name);
  }

  buildRow(name) {
    const cells = COLUMNS.map((column) => {
      const cell = el("td", { "data-label": column.title, className: column.keep ? "n keep" : "n" });
      if (column.type === "name") {
        setClass(cell, "name keep");
        cell.append(el("span", {}, name), el("small"));
      } else if (column.type === "state") {
        setClass(cell, "keep");
        cell.append(el("span", { className: "badge" }), el("small"));
      } else if (column.type === "bar") {
        cell.append(el("span", {}, el("b"), el("small")), el("progress", { max: 1, ariaLabel: `Token load of ${name}` }));
      }
      return cell;
    });
    const first = el("button", { type: "button" });
    const more = el("button", { type: "button", ariaLabel: `More acts for ${name}`, title: "Pause, weight, models…" }, "⋯");
    const row = { tr: null, cells, first, site: null };
    first.addEventListener("click", () => this.act(row.site, row.onHold ? "resume" : "drain"));
    more.addEventListener("click", () => this.act(row.site, "pause"));
    row.tr = el("tr", {}, ...cells, el("td", { className: "keep acting" }, el("div", { className: "acts" }, first, more)));
    this.visibility.observe(row.tr);
    return row;
  }

  fill(row, site) {
    row.site = site;
    row.onHold = site.state === "draining" || site.state === "paused";
    setClass(row.tr, site.state);
    COLUMNS.forEach((column, i) => {
      if (column.text) setText(row.cells[i], column.text(site));
    });
    const pinned = site.pinned_off.length ? ` · off: ${site.pinned_off.join(", ")}` : "";
    const pool = site.pool ? ` · pool ${site.pool}` : "";
    const left = site.certificate_until && site.certificate_until - Date.now() / 1000;
    const certificate = left == null || left > DAY_S / 4 ? "" : ` · ▲ certificate ${left < 0 ? "over" : Math.ceil(left / 3600) + " h"}`;
    const more = (site.asleep ? `, ${site.asleep} asleep` : "") + (site.own_bytes ? `, ${number(site.own_bytes / 1e9, 2)} GB own` : "");
    const models = site.model_count > 1 ? ` · ${site.model_count} models${more}` : "";
    const lost = site.devices.filter((device) => device.lost).length;
    const devices = site.devices.length ? ` · ${lost ? `▲ ${lost} of ` : ""}${site.devices.length} devices${lost ? " lost" : ""}` : "";
    const trains = site.training ? ` · trains ${site.training} ${site.training > 1 ? "jobs" : "job"}` : "";
    const where = `${site.cloud} · ${site.region}${pool}${models}${trains}${pinned}${devices}${certificate}`;
    row.cells[0].title = [site.name, where, ...site.devices.map(deviceLine)].join("\n");
    setText(row.cells[0].lastChild, (row.where = where));
    setText(row.cells[1].firstChild, site.state);
    setClass(row.cells[1].firstChild, `badge ${site.state}`);
    // Events come newest first: a site's first state event led to its state.
    const since = site.state !== "ready" && this.events.find((event) => event.kind === "state" && event.site === site.name);
    setText(row.cells[1].lastChild, since ? `since ${moment(since.at, false)}` : "");
    this.fillBar(row.cells[2], site);
    setText(row.first, row.onHold ? "Resume" : "Drain");
    row.first.title = row.first.ariaLabel = `${row.first.textContent} ${site.name}`;
  }

  fillBar(bar, site) {
    const [text, progress] = bar.children;
    const load = site.load ?? 0;
    setClass(bar, "bar" + (load >= 0.9 ? " hot" : load >= 0.7 ? " warm" : ""));
    progress.value = Math.min(1, load);
    setText(text.firstChild, percent(site.load));
    setText(text.lastChild, site.load == null ? "unmeasured" : `${number(site.outstanding_tokens)} / ${number(site.capacity_tokens)}`);
  }
}
