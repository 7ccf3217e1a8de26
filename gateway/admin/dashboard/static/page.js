// The page: receives a snapshot a second and draws it, unless the page is paused or hidden.
import { ActDialog } from "./act_dialog.js";
import { request } from "./api.js";
import { append, asColumns, ownColumns } from "./columns.js";
import { drawModels } from "./models.js";
import { Plot, spark } from "./plot.js";
import { explain } from "./query.js";
import { clock, dollars, el, moment, number, percent, plural, rate, seconds, setClass, setText, svg } from "./render.js";
import { SiteTable } from "./site_table.js";
import { drawTraining } from "./training.js";

const LATE_S = 3.5, REFRESH_MS = 30000;
const $ = (id) => document.getElementById(id);

const TILES = [
  { title: "Output tokens/s", name: "output_per_s", text: (t) => rate(t.output_per_s) },
  { title: "Input tokens/s", name: "input_per_s", text: (t) => rate(t.input_per_s) },
  { title: "In flight", name: "in_flight", text: (t) => number(t.in_flight) },
  { title: "Queued", name: "queued", text: (t) => number(t.queued) },
  { title: "First token p95, worst", name: "ttft_p95_s", text: (t) => seconds(t.ttft_p95_s), extra: (t) => t.ttft_site, level: (t) => over(t.ttft_p95_s, 10, 30) },
  { title: "Errors/min", name: "errors_per_min", text: (t) => number(t.errors_per_min), extra: (t) => `of ${number(t.ended_per_min)}`, level: (t) => over(t.errors_per_min / (t.ended_per_min || 1), 0.01, 0.05) },
  { title: "Token headroom", name: "headroom", text: (t) => percent(t.headroom), level: (t) => (t.headroom == null ? "" : over(1 - t.headroom, 0.8, 0.95)) },
];

const TOTALS = TILES.map(({ name }) => name);

const page = { minutes: 15, updatedMs: 0, paused: false };
const dialog = new ActDialog();
const table = new SiteTable($("site-table"), $("filter"), (site, verb) => dialog.open(site, verb));
const plots = [new Plot($("served"), "areas", "Output tokens served per second by cloud"), new Plot($("load"), "lines", "Outstanding token load by site, as a part of its capacity")];

function over(value, warn, bad) {
  if (value == null) return "";
  return value >= bad ? "bad" : value >= warn ? "warn" : "";
}

// ---- drawing

function draw() {
  if (page.paused || document.hidden || !page.snapshot) return;
  const { snapshot, columns } = page;
  drawBanner();
  document.title = { calm: "Mico", degraded: "▲ Mico: degraded", critical: "▲▲ Mico: critical" }[snapshot.banner.level];
  setText($("replica"), `Seen from ${snapshot.replica}; queries of ${snapshot.replicas.join(", ")}.`);
  drawTiles(snapshot.totals, columns);
  drawPlots();
  table.show(snapshot.sites, snapshot.events);
  setText($("pools"), poolsText(snapshot.pools));
  drawEvents(snapshot.events);
  drawRoutes(snapshot);
  drawModelRoutes(snapshot.model_routes);
}

function drawBanner() {
  const { snapshot, updatedMs, paused } = page;
  const silent = updatedMs ? (performance.now() - updatedMs) / 1000 : 0, late = silent > LATE_S;
  const since = `no update for ${Math.round(silent)} s`, at = snapshot && clock(snapshot.at);
  document.body.classList.toggle("late-page", late);
  setClass($("feed"), late ? "feed late" : "feed");
  setText($("feed"), late ? since : paused ? "paused" : snapshot ? `live, ${at}` : "connecting");
  if (!snapshot) return;
  const text = late ? `STALE: ${since}. What follows is as of ${at}.` : snapshot.banner.text;
  setText($("banner"), text);
  setClass($("banner"), `banner ${late ? "late" : snapshot.banner.level}`);
  // Announced when more than its figures changed.
  const wording = text.replace(/\d+/g, "");
  if (page.announced !== wording) setText($("status"), text);
  page.announced = wording;
}

function drawTiles(totals, columns) {
  const list = $("tiles");
  if (!list.firstChild) {
    list.append(...TILES.map(({ title }) => el("li", {}, el("div", { className: "what" }, title), el("div", { className: "value" }, el("span"), el("small")), svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }))));
  }
  TILES.forEach((tile, i) => {
    const item = list.children[i];
    setClass(item, tile.level?.(totals) ?? "");
    setText(item.children[1].firstChild, tile.text(totals));
    const more = item.children[1].lastChild;
    setText(more, (more.title = tile.extra?.(totals) ?? ""));
    spark(item.children[2], columns[tile.name]);
  });
}

function drawPlots() {
  const columns = page.minutes === 15 ? page.columns : page.history;
  if (!columns) return;
  plots[0].show(columns.at, columns.clouds, page.minutes);
  plots[1].show(columns.at, columns.load, page.minutes);
}

function drawEvents(events) {
  const key = [new Date().getDate(), ...events.map((event) => event.at)].join();
  if (drawEvents.key === key) return;
  drawEvents.key = key;
  $("events").replaceChildren(...events.map((event) =>
    el("li", { className: `${event.kind}${event.bad ? " badly" : ""}` },
      el("time", { dateTime: new Date(event.at * 1000).toISOString() }, moment(event.at)),
      el("span", { className: "kind" }, event.bad ? `▲ ${event.kind}` : event.kind),
      el("span", {}, el("b", {}, event.site), ` ${event.text}`, event.who ? el("small", { className: "dim" }, ` by ${event.who}`) : null))));
  if (!events.length) $("events").append(el("li", { className: "empty" }, "Nothing has happened yet."));
}

function drawRoutes({ routes, quality }) {
  fill("routes", routes.map(({ reason, site, attempts }) => [reason, site, number(attempts)]), "No query ended in the last 5 minutes.");
  setText($("quality"), quality
    ? `${plural(quality.answers, "answer")}: ${percent(quality.under_p50)} under the p50 (50\u00a0% is right), ${percent(quality.under_p90)} under the p90 (90\u00a0% is right); half of the p50s off by less than ${number(quality.error_p50_tokens)} tokens. Answers whose max_tokens is not above their p90 are left out. Forecast by ${quality.source.replaceAll(":", ", ")}.`
    : "No answer to compare with.");
}

// Targets of model routes; a shadow's figures stand beside those of the answers that it copied.
function drawModelRoutes(targets) {
  $("model-routes-section").hidden = !targets.length;
  const beside = (text, value, user) => (user == null ? text(value) : `${text(value)} beside ${text(user)}`);
  fill("model-routes", targets.map((each) => [
    each.route,
    each.is_shadow ? `${each.model} (shadow)` : each.model,
    number(each.queries) + (each.skipped ? `, ${number(each.skipped)} skipped` : ""),
    each.is_shadow ? "–" : percent(each.share),
    each.failed ? `▲ ${number(each.failed)}` : "0",
    beside(number, each.tokens_p50, each.user_tokens_p50),
    beside(seconds, each.seconds_p50, each.user_seconds_p50),
  ]), "No name stands for a model.");
}

// Fill a table if it changed; cells take the classes of their column heads.
function fill(id, cells, none) {
  const { tBodies: [body], tHead: { rows: [{ cells: heads }] } } = $(id), key = JSON.stringify(cells);
  if (body.key === key) return;
  body.key = key;
  const empty = el("tr", {}, el("td", { colSpan: heads.length, className: "empty" }, none));
  body.replaceChildren(...cells.map((row) => el("tr", {}, ...row.map((text, i) => el("td", { className: heads[i].className }, text)))), ...(cells.length ? [] : [empty]));
}

function poolsText(pools) {
  const resizing = pools.filter((pool) => pool.machines !== pool.desired);
  return resizing.length ? "Machines asked for: " + resizing.map((pool) => `${pool.name} ${pool.machines} → ${pool.desired}`).join(", ") : "";
}

function drawSpending({ today, month }) {
  const spent = new Map(today.map((each) => [each.name, each.usd + each.idle_usd]));
  fill("spending", month.filter((each) => each.name).map(({ name, usd, idle_usd, cheapest_usd, dearest_usd }) => [name, dollars(spent.get(name) ?? 0), dollars(usd + idle_usd), dollars(idle_usd), dollars(cheapest_usd), dollars(dearest_usd)]), "Nothing was spent this month.");
}

const usedShare = ({ amount, in_use }) => (amount ? in_use / amount : 1);

function quotaCells(quota) {
  const { scope, subject, kind, amount, in_use } = quota;
  const text = kind === "usd_per_month" ? dollars : number;
  return [`${scope} ${subject}`, kind.replaceAll("_", " "), `${text(in_use)} of ${text(amount)}`, percent(usedShare(quota))];
}

function batchCells({ id, tenant, status, request_counts: { completed, failed, total }, mico }) {
  const answered = `${number(completed)} of ${number(total)}${failed ? `, ${number(failed)} failed` : ""}`;
  return [id, tenant, status, answered, number(mico.in_flight), percent(mico.shared_prompt_share), mico.ends_at ? moment(mico.ends_at, false) : "–"];
}

async function drawRecords() {
  if (page.paused || document.hidden || !page.snapshot) return;
  const records = [
    async () => fill("batches", (await request("batches?limit=5")).data.map(batchCells), "No batch was submitted."),
    () => drawTraining($("training-section")),
    () => drawModels($("models-section"), page.snapshot.sites),
    async () => drawSpending(await request("spending")),
    async () => {
      const { quotas } = await request("quotas?limit=8");
      fill("quotas", quotas.map(quotaCells), "No tenant or key has a quota.");
    },
  ];
  for (const draw of records) {
    try {
      await draw();
    } catch {
      // It keeps no other from being drawn; the feed shows whether the gateway responds.
    }
  }
}

// ---- the feed

function listen() {
  page.feed?.close();
  const feed = (page.feed = new EventSource("/admin/stream"));
  feed.addEventListener("history", (event) => {
    const { resumed, columns } = JSON.parse(event.data);
    if (resumed && page.columns) append(page.columns, columns, TOTALS);
    else page.columns = ownColumns(columns);
  });
  feed.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    page.updatedMs = performance.now();
    if (snapshot.at !== page.columns.at.at(-1)) append(page.columns, asColumns(snapshot), TOTALS);
    const first = !page.snapshot;
    page.snapshot = snapshot;
    draw();
    if (first) drawRecords();
  });
  feed.addEventListener("error", () => {
    if (feed.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  });
}

async function loadHistory() {
  const { minutes } = page;
  if (minutes === 15) return;
  try {
    const history = await request(`history?minutes=${minutes}`);
    if (minutes === page.minutes) page.history = history;
  } catch {
    // The feed shows whether the gateway responds.
  }
}

// ---- sessions

async function connect() {
  try {
    const { who, may_act } = await request("session");
    document.body.classList.toggle("view-only", !may_act);
    if (who) listen();
    else if (!signIn.open) signIn.showModal();
  } catch {
    setTimeout(connect, 2000);
  }
}

const signIn = $("sign-in");
signIn.addEventListener("cancel", (event) => event.preventDefault());
signIn.addEventListener("submit", async (event) => {
  event.preventDefault();
  const message = signIn.querySelector(".error");
  message.textContent = "";
  try {
    await request("session", { method: "POST", body: { key: $("key").value, view_only: $("view-only").checked } });
    $("key").value = "";
    signIn.close();
    await connect();
    followHash();
  } catch (error) {
    message.textContent = error.message;
  }
});
$("leave").addEventListener("click", async () => {
  try {
    await request("session", { method: "DELETE" });
    location.reload();
  } catch (error) {
    setText($("leave").nextElementSibling, `Sign out: ${error.message}`);
  }
});

// ---- controls

for (const button of $("windows").children) {
  button.addEventListener("click", () => {
    page.minutes = Number(button.dataset.minutes);
    page.history = null; // of another window
    for (const each of $("windows").children) each.setAttribute("aria-pressed", each === button);
    loadHistory().then(drawPlots);
  });
}
$("pause").addEventListener("click", () => {
  page.paused = !page.paused;
  $("pause").setAttribute("aria-pressed", page.paused);
  setText($("pause"), page.paused ? "Go on" : "Pause");
  drawBanner();
  draw();
});
$("lookup").addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#request=${encodeURIComponent($("request-id").value.trim())}`;
  if (location.hash === hash) followHash(); // the same again: its record may be written by now
  else location.hash = hash;
});
function followHash() {
  const id = new URLSearchParams(location.hash.slice(1)).get("request");
  if (!id) return;
  $("request-id").value = id;
  explain(id, $("decision"));
}
addEventListener("hashchange", followHash);
document.addEventListener("visibilitychange", draw);
setInterval(drawBanner, 1000);
setInterval(loadHistory, REFRESH_MS);
setInterval(drawRecords, REFRESH_MS / 3);
// A page that is left is kept for "back", and its feed would hold one of the browser's six connections.
addEventListener("pagehide", () => page.feed?.close());
addEventListener("pageshow", ({ persisted }) => persisted && connect());
connect().then(() => page.feed && followHash());
