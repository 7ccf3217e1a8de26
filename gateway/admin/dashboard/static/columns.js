// The newest samples, by column: their times, each total, and by name those of clouds and sites.
const MAX_SAMPLES = 900, GROUPS = ["clouds", "load"];

// Names are of anybody's choice: without a prototype "constructor" is one like any other.
const byName = (values) => Object.assign(Object.create(null), values);

export function ownColumns(columns) {
  for (const group of GROUPS) columns[group] = byName(columns[group]);
  return columns;
}

export function asColumns({ at, totals, clouds, sites }) {
  const each = (entries) => Object.fromEntries(entries.map(([name, value]) => [name, [value]]));
  const loads = sites.filter((site) => site.load != null).map((site) => [site.name, site.load]);
  return { at: [at], ...each(Object.entries(totals)), clouds: each(Object.entries(clouds)), load: each(loads) };
}

// Append a snapshot, or the samples missed while the feed was interrupted. What is after them goes: the gateway's clock
// was set back since.
export function append(columns, later, totals) {
  while (columns.at.at(-1) > later.at[0]) for (const values of all(columns, totals)) values.pop();
  const before = columns.at.length;
  columns.at.push(...later.at);
  for (const name of totals) columns[name].push(...later[name]);
  for (const group of GROUPS) {
    const values = byName(later[group]);
    for (const name of Object.keys(values)) columns[group][name] ??= Array(before).fill(null);
    for (const name of Object.keys(columns[group])) columns[group][name].push(...(values[name] ?? Array(later.at.length).fill(null)));
  }
  if (columns.at.length > MAX_SAMPLES) trim(columns, totals);
}

function trim(columns, totals) {
  const excess = columns.at.length - MAX_SAMPLES;
  for (const values of all(columns, totals)) values.splice(0, excess);
  for (const group of GROUPS) {
    for (const name of Object.keys(columns[group])) {
      if (columns[group][name].every((value) => value == null)) delete columns[group][name];
    }
  }
}

const all = (columns, totals) => [columns.at, ...totals.map((name) => columns[name]), ...GROUPS.flatMap((group) => Object.values(columns[group]))];
