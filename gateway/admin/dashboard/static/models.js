// The models of one site: which are on its devices, wait in host memory or sleep, and what they share.
import { request } from "./api.js";
import { el, number, plural, setText } from "./render.js";

const SHOWN = 50, PLACES = ["base", "on the device", "waking", "in host memory", "asleep"];
const size = (bytes) => (bytes ? (bytes < 1e9 ? `${number(bytes / 1e6, 1)} MB` : `${number(bytes / 1e9, 2)} GB`) : "–");

function place({ parent, state, in_host }) {
  if (state !== "ready") return PLACES[state === "waking" ? 2 : 4];
  return PLACES[parent ? (in_host ? 3 : 1) : 0];
}

export async function drawModels(section, sites) {
  const choice = section.querySelector("select"), names = sites.filter((site) => site.model_count > 1).map((site) => site.name);
  section.hidden = !names.length;
  if (section.hidden) return;
  if (choice.key !== (choice.key = names.join())) {
    const before = choice.value;
    choice.replaceChildren(...names.map((name) => el("option", { selected: name === before }, name)));
    choice.onchange = () => drawModels(section, sites);
  }
  const site = choice.value, { models, memory } = await request(`models?site=${encodeURIComponent(site)}`);
  if (site !== choice.value) return; // another was chosen meanwhile
  const placed = models.map((model) => [model, place(model)]).sort((a, b) => PLACES.indexOf(a[1]) - PLACES.indexOf(b[1]));
  const counts = PLACES.slice(1).map((each) => [placed.filter(([, at]) => at === each).length, each]);
  const bytes = [["base", memory.base_bytes], ["slots for adapters", memory.slots_bytes], ["other parts of variants", memory.own_bytes], ["in host memory", memory.host_bytes]];
  const told = (pairs) => pairs.filter(([, value]) => value).map(([name, value]) => `${name} ${size(value)}`).join(", ");
  const more = models.length > SHOWN ? `${plural(models.length - SHOWN, "more model", "more models")}: mico models show ${site}` : "";
  setText(section.querySelector("p"), [counts.filter(([n]) => n).map(([n, at]) => `${n} ${at}`).join(", "), told(bytes), more].filter(Boolean).join(" · "));
  section.querySelector("tbody").replaceChildren(...placed.slice(0, SHOWN).map(([model, at]) => row(model, at, memory)));
}

function row({ id, parent, own_bytes, shared_bytes, sharing_models, shared_with }, at, { base_bytes }) {
  const more = sharing_models - shared_with.length, others = shared_with.join(", ") + (more > 0 ? ` and ${more} more` : "");
  const cells = [id, parent ?? "–", at, size(parent ? own_bytes : base_bytes), sharing_models ? `${size(shared_bytes)} with ${others}` : "–"];
  return el("tr", {}, ...cells.map((text, i) => el("td", { className: i === 3 ? "n" : "" }, text)));
}
