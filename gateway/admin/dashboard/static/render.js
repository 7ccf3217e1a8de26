// Elements, and figures as text. Nothing here parses text as HTML.

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Sets an element's text if it changed: a table of a hundred sites is redrawn every second.
export function setText(element, text) {
  if (!element.firstChild) element.append("");
  if (element.firstChild.data !== text) element.firstChild.data = text;
}

export function setClass(element, className) {
  if (element.className !== className) element.className = className;
}

const NUMBERS = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
const TIMES = [false, true].map((full) => new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: full ? "2-digit" : undefined, hour12: false }));
const DAYS = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

export function number(value, digits = 0) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (Math.abs(value) >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return NUMBERS[digits].format(value);
}

// To the cent; small amounts to two figures.
export function dollars(value) {
  if (value == null) return "–";
  return "$" + (value === 0 || Math.abs(value) >= 0.1 ? value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : Number(value.toPrecision(2)).toLocaleString("en", { maximumFractionDigits: 9 }));
}

export function plural(value, one, many = one + "s") {
  return `${number(value)} ${value === 1 ? one : many}`;
}

export function rate(value) {
  return value == null ? "–" : number(value, value < 10 ? 1 : 0);
}

export function percent(value) {
  return value == null ? "–" : Math.round(value * 100) + "\u00a0%";
}

export function seconds(value) {
  if (!value) return value === 0 ? "0 s" : "–";
  if (value < 0.0995) return (value * 1000).toFixed(value < 0.00995 ? 1 : 0) + " ms";
  if (value < 100) return value.toFixed(value < 10 ? 2 : 1) + " s";
  return Math.round(value / 60) + " min";
}

export function clock(unix, withSeconds = true) {
  return TIMES[Number(withSeconds)].format(unix * 1000);
}

// A time of day, with the day where that is not today.
export function moment(unix, withSeconds = true) {
  const [day, today] = [unix * 1000, Date.now()].map((time) => DAYS.format(time));
  return (day === today ? "" : `${day}, `) + clock(unix, withSeconds);
}
