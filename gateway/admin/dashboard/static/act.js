// One act of an operator: what it would do is shown in numbers before it is done.
import { ask, el, percent, seconds, several } from "./words.js";

const VERBS = { drain: "Drain", pause: "Pause", resume: "Resume", weight: "Weight", "pin-off": "Take a model off", unpin: "Put a model back" };
const MEANS = {
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
    $("verbs").replaceChildren($("verbs").firstElementChild, ...Object.keys(VERBS).filter((each) => this.fits(each)).map((each) => this.radio(each, each === verb)));
    this.choose(verb);
    this.dialog.showModal();
    $("reason").focus();
  }

  fits(verb) {
    const held = this.site.state === "draining" || this.site.state === "paused";
    if (verb === "resume") return held;
    return verb === "unpin" ? this.site.pinned_off.length > 0 : true;
  }

  radio(verb, checked) {
    const input = el("input", { type: "radio", name: "verb", value: verb, checked });
    input.addEventListener("change", () => this.choose(verb));
    return el("label", {}, input, VERBS[verb]);
  }

  choose(verb) {
    this.verb = verb;
    for (const part of this.dialog.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(verb);
    const models = verb === "unpin" ? this.site.pinned_off : this.site.models.filter((model) => !this.site.pinned_off.includes(model));
    $("model").replaceChildren(...models.map((model) => el("option", {}, model)));
    $("yes").textContent = VERBS[verb];
    this.preview();
  }

  body(more) {
    const sent = { reason: $("reason").value, ...more };
    if (this.verb === "weight") sent.weight = Number($("weight").value);
    if (this.verb === "pin-off" || this.verb === "unpin") sent.model = $("model").value;
    if (this.verb === "pause") sent.within_s = Number($("within").value);
    if (!["resume", "unpin"].includes(this.verb)) sent.for_s = Number($("until").value);
    return sent;
  }

  post(more) {
    return ask(`sites/${encodeURIComponent(this.site.name)}/${this.verb}`, { method: "POST", body: this.body(more) });
  }

  async preview() {
    const verb = this.verb;
    try {
      const { preview } = await this.post({ dry_run: true });
      if (verb === this.verb) this.tell(preview);
    } catch (error) {
      $("preview").replaceChildren(el("p", { className: "risk" }, error.message));
    }
  }

  tell(preview) {
    const said = [MEANS[this.verb], preview.text[0].toUpperCase() + preview.text.slice(1)];
    if (["drain", "pause"].includes(this.verb) && preview.left) {
      said.push(`${several(preview.left, "query is", "queries are")} left there` + (preview.empty_in_s ? `, empty in ${seconds(preview.empty_in_s)}.` : "."));
    }
    const moved = preview.shares.filter((share) => share.before !== share.after).slice(0, 5);
    if (moved.length) said.push("Expected share: " + moved.map((s) => `${s.site} ${percent(s.before)} → ${percent(s.after)}`).join(", ") + ".");
    $("preview").replaceChildren(...preview.warnings.map((text) => el("p", { className: "risk" }, text)), ...said.map((text) => el("p", {}, text)));
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
