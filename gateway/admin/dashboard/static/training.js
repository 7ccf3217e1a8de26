// Jobs of fine-tuning: one row each, with the line of its loss.
import { request } from "./api.js";
import { spark } from "./plot.js";
import { el, moment, number, percent, rate, svg } from "./render.js";

export async function drawTraining(section) {
  const { data } = await request("fine_tuning?limit=5");
  section.hidden = !data.length;
  const { tBodies: [body] } = section.querySelector("table"), key = JSON.stringify(data);
  if (body.key === key) return;
  body.key = key;
  body.replaceChildren(...data.map(row));
}

function row(job) {
  const { step, total_steps, tokens_per_s, site, paused } = job.mico, losses = job.losses.map((each) => each[1]);
  const valid = job.losses.findLast((each) => each[2] != null)?.[2];
  const fell = losses.length ? `${number(losses[0], 2)} → ${number(losses.at(-1), 2)}${valid == null ? "" : `, ${number(valid, 2)} held out`}` : "–";
  const line = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": `Loss of ${job.id}: ${fell}` });
  spark(line, losses);
  const cells = [job.id, job.tenant, paused ? "paused" : job.status, site ?? "–", `${number(step)} of ${number(total_steps)}, ${percent(total_steps ? step / total_steps : 0)}`, tokens_per_s ? rate(tokens_per_s) : "–", job.estimated_finish ? moment(job.estimated_finish, false) : "–", fell];
  return el("tr", {}, ...cells.map((text, i) => el("td", { className: i > 3 ? "n" : "" }, text)), el("td", { className: "loss" }, line));
}
