// Explain one query: its forecast, the candidate sites, the choice and the outcome.
import { request } from "./api.js";
import { el, moment, number, plural, seconds } from "./render.js";

// Answers may come in any order: only the query asked for last is shown.
export async function explain(id, target) {
  const asked = (target.asked = {});
  target.replaceChildren(el("p", { className: "empty" }, "Looking…"));
  try {
    const { queries } = await request(`decisions/${encodeURIComponent(id)}`);
    if (asked !== target.asked) return;
    const unknown = `Nothing is known of ${id}. Records are written within seconds of the end of an answer.`;
    target.replaceChildren(...(queries.length ? queries.map(renderQuery) : [el("p", { className: "empty" }, unknown)]));
  } catch (error) {
    if (asked === target.asked) target.replaceChildren(el("p", { className: "error" }, error.message));
  }
}

function renderQuery({ usage, attempts }) {
  const facts = {
    Query: `${usage.request_id || usage.query_id} at ${moment(usage.received_at)}, ${usage.model}${usage.asked_model ? ` by the route ${usage.asked_model}` : ""}, for ${usage.tenant}`,
    Outcome: `${usage.status}${usage.error ? `: ${usage.error}` : ""}`,
    Tokens: `${number(usage.prompt_tokens)} prompt, ${number(usage.completion_tokens)} response`,
    Forecast: usage.forecast_source ? `${number(usage.forecast_expected)} tokens expected, half under ${number(usage.forecast_p50)}, nine tenths under ${number(usage.forecast_p90)} (${usage.forecast_source.replaceAll(":", ", ")})` : "none",
    Times: `${seconds(usage.queue_s)} until decided, ${seconds(usage.first_token_s)} to the first token, ${seconds(usage.total_s)} in all`,
  };
  const list = el("dl", {}, ...Object.entries(facts).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  return el("div", { className: "query" }, list, ...attempts.map(renderAttempt));
}

function renderAttempt({ decision, ...result }, i) {
  const cells = (tag, texts) => texts.map((text, n) => el(tag, { className: n ? "n" : "" }, text));
  const head = cells("th", ["Site", "Waits", "First token", "Done", "Cached", "Price", "Figures", "Compared"]);
  const rows = decision.estimates.sort((a, b) => a.finish_s - b.finish_s).map((e) => {
    const chosen = e.site === decision.site;
    const texts = [chosen ? `✓ ${e.site}` : e.site, seconds(e.wait_s), seconds(e.first_token_s), seconds(e.finish_s), number(e.cached_tokens), `$${e.price_usd.toPrecision(2)}`, `${seconds(e.load_age_s)} old`, e.cost?.toPrecision(3) ?? ""];
    return el("tr", { className: chosen ? "chosen" : "" }, ...cells("td", texts));
  });
  const excluded = Object.entries(decision.excluded).map(([site, why]) => el("p", { className: "dim" }, `not ${site}: ${why}`));
  const expected = decision.estimates.find((e) => e.site === decision.site)?.cached_tokens ?? 0;
  const cached = `Of ${plural(result.prompt_tokens, "prompt token")} it had ${number(result.cached_tokens)} in its cache; ${number(expected)} were expected.`;
  const ended = `It ended as ${result.ended} with ${plural(result.completion_tokens, "token")}, first token after ${seconds(result.first_token_s)}. ${cached}`;
  return el("div", {},
    el("h3", {}, `Attempt ${i + 1}: ${decision.site}`),
    el("p", {}, `${decision.reason} (policy ${decision.policy}). ${ended}`),
    el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    ...excluded);
}
