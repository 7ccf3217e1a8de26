// The dialog for an operator's act: shows the predicted effect before the act is sent.
import { request } from "./api.js";
import { el, percent, plural, seconds } from "./render.js";

const VERBS = { drain: "Drain", pause: "Pause", resume: "Resume", weight: "Weight", "pin-off": "Take a model off", unpin: "Put a model back" };
const EFFECTS = {
  drain: "No new queries; what runs there finishes.",
  pause: "No new queries; what still runs after that time moves to other sites.",
  resume: "It takes queries again.",
  weight: "It is given more or less than its usual part.",
  "pin-off": "No new queries for one model.",
  unpin: "It takes queries for that model again.",
};
const $ = (id) => document.getElementById(id);

export class ActDialog {
  constructor() {
    this.dialog = $("act");
    this.error = this.dialog.querySelector(".error");
    $("no").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("submit", (event) => this.send(event));
    for (const id of ["weight", "model", "within", "until"]) $(id).addEventListener("input", () => this.preview());
  }

  open(site, verb) {
    this.site = site;
    this.error.textContent = "";
    $("act-title").textContent = site.name;
    $("reason").value = "";
    $("until").value = "0";
    $("verbs").replaceChildren($("verbs").firstElementChild, ...Object.keys(VERBS).filter((each) => this.allows(each)).map((each) => this.radio(each, each === verb)));
    this.select(verb);
    this.dialog.showModal();
    $("reason").focus();
  }

  allows(verb) {
    const onHold = this.site.state === "draining" || this.site.state === "paused";
    if (verb === "resume") return onHold;
    return verb === "unpin" ? this.site.pinned_off.length > 0 : true;
  }

  radio(verb, checked) {
    const input = el("input", { type: "radio", name: "verb", value: verb, checked });
    input.addEventListener("change", () => this.select(verb));
    return el("label", {}, input, VERBS[verb]);
  }

  // The stream has no names of models: a site may serve a thousand.
  async models(verb) {
    if (verb === "unpin") return this.site.pinned_off;
    const { sites } = verb === "pin-off" ? await request("overview") : { sites: [] };
    const served = sites.find((site) => site.name === this.site.name)?.models ?? [];
    return served.filter((model) => !this.site.pinned_off.includes(model));
  }

  // Answers may come in any order: what was asked before is not shown any more.
  async select(verb) {
    const chosen = (this.chosen = {});
    this.verb = verb;
    this.asked = null;
    $("preview").replaceChildren();
    for (const part of this.dialog.querySelectorAll("[data-for]")) {
      part.hidden = !part.dataset.for.split(" ").includes(verb);
      // What is hidden is not checked: a form with a wrong field that nobody sees is never sent.
      part.querySelector("input, select").disabled = part.hidden;
    }
    $("yes").textContent = VERBS[verb];
    $("yes").disabled = true;
    const models = await this.models(verb).catch(() => []); // the preview tells why
    if (chosen !== this.chosen) return;
    $("yes").disabled = false;
    $("model").replaceChildren(...models.map((model) => el("option", {}, model)));
    this.preview();
  }

  body(more) {
    const body = { reason: $("reason").value, ...more };
    if (this.verb === "weight") body.weight = $("weight").value === "" ? null : Number($("weight").value);
    if (this.verb === "pin-off" || this.verb === "unpin") body.model = $("model").value;
    if (this.verb === "pause") body.within_s = Number($("within").value);
    if (!["resume", "unpin"].includes(this.verb)) body.for_s = Number($("until").value);
    return body;
  }

  post(more) {
    return request(`sites/${encodeURIComponent(this.site.name)}/${this.verb}`, { method: "POST", body: this.body(more) });
  }

  async preview() {
    const asked = (this.asked = {});
    try {
      const { preview } = await this.post({ dry_run: true });
      if (asked === this.asked) this.show(preview);
    } catch (error) {
      if (asked === this.asked) $("preview").replaceChildren(el("p", { className: "risk" }, error.message));
    }
  }

  show(preview) {
    const lines = [EFFECTS[this.verb], preview.text[0].toUpperCase() + preview.text.slice(1)];
    if (["drain", "pause"].includes(this.verb) && preview.left) {
      lines.push(`${plural(preview.left, "query is", "queries are")} left there` + (preview.empty_in_s ? `, empty in ${seconds(preview.empty_in_s)}.` : "."));
    }
    const moved = preview.shares.filter((share) => share.before !== share.after).slice(0, 5);
    if (moved.length) lines.push("Expected share: " + moved.map((s) => `${s.site} ${percent(s.before)} → ${percent(s.after)}`).join(", ") + ".");
    $("preview").replaceChildren(...preview.warnings.map((text) => el("p", { className: "risk" }, text)), ...lines.map((text) => el("p", {}, text)));
    $("yes").classList.toggle("risky", preview.warnings.length > 0);
  }

  async send(event) {
    event.preventDefault();
    $("yes").disabled = true;
    try {
      await this.post({});
      this.dialog.close();
    } catch (error) {
      this.error.textContent = error.message;
    } finally {
      $("yes").disabled = false;
    }
  }
}
