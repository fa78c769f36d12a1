// Curves: every metric with its meaning and normal range; a point links to its rows and tokens.
"use strict";

const HEAD = ["val/reward/task", "reward/task", "kl/rollout", "policy/entropy", "length/mean", "optim/grad_norm", "ledger/weight/used"];

/** The steps with values outside of the normal range, as in Entry.is_beyond of glossary.py. */
function beyond(name) {
  const entry = RUN.glossary[name];
  if (!entry) return [];
  const [steps, values] = RUN.metrics[name];
  if (entry.alive && values.length > 1 && values.every((value) => value === 0)) return steps;
  const [others, bases] = RUN.metrics[entry.baseline] || [[], []];
  const known = new Map(others.map((step, at) => [step, bases[at]]));
  const top = (step) => (entry.high === null ? Infinity : entry.high + (known.get(step) ?? 0) * (1 + entry.high));
  return steps.filter((step, at) => values[at] > top(step) || (entry.low !== null && values[at] < entry.low));
}

/** The recorded rollout that a point belongs to, and the steps that it covers. */
function placeOf(name, step) {
  const steps = RUN.metrics[name][0];
  const from = steps[steps.indexOf(step) - 1] ?? -Infinity;
  const recorded = RUN.rollouts.find((line) => line.step_indices.some((stepIndex) => stepIndex > from && stepIndex <= step));
  const distance = (line) => Math.min(...line.step_indices.map((stepIndex) => Math.abs(stepIndex - step)));
  const [nearest] = [...RUN.rollouts].sort((one, other) => distance(one) - distance(other));
  return { from, recorded, nearest };
}

const recordedAt = (name, step) => placeOf(name, step).recorded !== undefined;

/** A name with line breaks allowed after its slashes. */
const breakable = (name) => visible(name).split("/").flatMap((part, at) => (at ? ["/", h("wbr"), part] : [part]));

function card(name) {
  const [steps, values] = RUN.metrics[name];
  const entry = RUN.glossary[name];
  const off = beyond(name);
  const value = number(values[values.length - 1], { class: "number last" });
  const open = (step) => go("metric", { name, step });
  const peak = off.length ? off.reduce((one, other) => (Math.abs(values[steps.indexOf(other)]) > Math.abs(values[steps.indexOf(one)]) ? other : one)) : steps[steps.length - 1];
  const plot = chart(name, { pick: open });
  plot.addEventListener("cursor", (event) => {
    const at = event.detail;
    value.textContent = figure(at === null || at === undefined ? values[values.length - 1] : values[at]);
    where.textContent = at === null || at === undefined ? "" : `step ${steps[at]}`;
  });
  plot.addEventListener("mouseleave", () => { value.textContent = figure(values[values.length - 1]); where.textContent = ""; });
  const where = h("span", { class: "quiet small" });
  const { low, high, level } = rangeOf(values);
  return h("article", { class: "card metric", "data-metric": name },
    h("header", {}, h("h3", {}, h("a", { href: link("metric", { name, step: peak }) }, breakable(name))),
      h("span", { class: "reading" }, where, value, h("span", { class: "quiet small" }, entry ? entry.unit : ""))),
    plot,
    h("p", { class: "small quiet range" }, level ? "level" : `${figure(low)} to ${figure(high)}`),
    entry ? h("p", { class: "small quiet" }, entry.meaning) : null,
    off.length ? h("p", { class: "small off" }, h("a", { href: link("metric", { name, step: peak }) }, `${off.length} of ${steps.length} points beyond what is normal`)) : null);
}

function viewCurves(params) {
  const names = Object.keys(RUN.metrics);
  if (!names.length) return h("div", { class: "stack" }, h("p", { class: "quiet" }, "No metrics were found beside the recordings: pass the folder of a logger as well."), notes());
  const head = HEAD.filter((name) => RUN.metrics[name]);
  const groups = new Map();
  for (const name of names) {
    const group = name.split("/")[0];
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  const beyondAll = names.filter((name) => beyond(name).length);
  const list = h("div", { class: "stack" });
  const fill = (text) => {
    const fits = (name) => name.toLowerCase().includes(text.toLowerCase());
    const sections = [];
    if (!text) sections.push(h("section", {}, h("h2", {}, "At a glance"), h("div", { class: "grid" }, head.map(card))));
    for (const [group, members] of groups) {
      const shown = members.filter(fits);
      if (shown.length) sections.push(h("details", { open: Boolean(text) || group === "kl" || group === "reward" },
        h("summary", {}, h("h2", {}, visible(group)), h("span", { class: "quiet small" }, plural(shown.length, "metric"))),
        h("div", { class: "grid" }, shown.map(card))));
    }
    list.replaceChildren(...(sections.length ? sections : [h("p", { class: "quiet" }, "No metric has this name.")]));
  };
  const box = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => fill(box.value) });
  box.value = params.get("find") || "";
  fill(box.value);
  const notice = beyondAll.length ? h("p", { class: "notice" }, h("strong", {}, `${plural(beyondAll.length, "metric")} beyond what is normal: `),
    beyondAll.slice(0, 8).flatMap((name, at) => [at ? ", " : "", h("a", { href: link("metric", { name, step: worst(name) }) }, visible(name))]),
    beyondAll.length > 8 ? ` and ${beyondAll.length - 8} more` : "") : null;
  return h("div", { class: "stack" }, h("div", { class: "bar" }, box, h("p", { class: "quiet small" }, "A click on a curve opens the point.")), notice, notes(), list);
}

/** The point furthest outside of the normal range. */
function worst(name) {
  const [steps, values] = RUN.metrics[name];
  return beyond(name).reduce((one, other) => (Math.abs(values[steps.indexOf(other)]) > Math.abs(values[steps.indexOf(one)]) ? other : one));
}

async function viewMetric(params) {
  const name = params.get("name");
  if (!RUN.metrics[name]) return h("p", {}, "This run has no such metric.");
  const [steps, values] = RUN.metrics[name];
  const step = numberOf(params, "step", steps);
  const at = steps.indexOf(step);
  const entry = RUN.glossary[name];
  const open = (other) => go("metric", { name, step: other });
  const plot = chart(name, { height: 260, marked: step, pick: open, axes: true });
  plot.setAttribute("tabindex", "0");
  plot.setAttribute("role", "slider");
  plot.setAttribute("aria-label", `${name} by step`);
  plot.setAttribute("aria-valuenow", step);
  plot.setAttribute("aria-valuetext", `step ${step}: ${figure(values[at])}`);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -at, End: steps.length - 1 - at }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const next = steps[Math.min(steps.length - 1, Math.max(0, at + move))];
    FOCUS = ".chart[role=slider]";
    open(next);
  });
  const off = beyond(name);
  const about = entry ? h("dl", { class: "facts" },
    h("dt", {}, "What it is"), h("dd", {}, entry.meaning),
    entry.population ? [h("dt", {}, "Of"), h("dd", {}, entry.population)] : null,
    entry.unit ? [h("dt", {}, "Unit"), h("dd", {}, entry.unit)] : null,
    entry.normal ? [h("dt", {}, "Normal"), h("dd", {}, entry.normal)] : null,
    off.length ? [h("dt", {}, "Beyond it"), h("dd", {}, `${off.length} of ${steps.length} points, `, h("a", { href: link("metric", { name, step: worst(name) }) }, `most at step ${worst(name)}`))] : null) : null;
  return h("div", { class: "stack" },
    h("div", { class: "bar" }, h("h2", {}, visible(name)), h("span", { class: "reading" }, h("span", { class: "quiet" }, `step ${step}`), number(values[at], { id: "point", class: "number large" }), h("span", { class: "quiet" }, entry ? entry.unit : ""))),
    h("div", { class: "card" }, plot, h("p", { class: "small quiet" }, "Marks at the bottom are recorded rollouts. Click a point, or move with the arrow keys.")),
    about, await moved(name, step));
}

/** The rows and tokens with the largest share of a point. */
async function moved(name, step) {
  const { from, recorded, nearest } = placeOf(name, step);
  if (!RUN.rollouts.length) return h("p", { class: "quiet" }, "No rollout was recorded, so there are no values by token.");
  if (!recorded) {
    const back = RUN.metrics[name][0].reduce((one, other) => (Math.abs(other - nearest.step_indices[nearest.step_indices.length - 1]) < Math.abs(one - nearest.step_indices[nearest.step_indices.length - 1]) ? other : one));
    return h("p", { class: "notice" }, "The rollout of this point was not recorded. ",
      recordedAt(name, back) ? h("a", { href: link("metric", { name, step: back }) }, `The nearest point with a recording is step ${back}.`) : h("a", { href: link("rollout", { rollout: nearest.rollout }) }, `The nearest is rollout ${nearest.rollout}.`));
  }
  const page = await pageOf(recorded.rollout);
  const shares = sharesOf(name, page, from, step);
  const whole = h("a", { class: "button", href: link("rollout", { rollout: page.rollout, colour: shares ? shares.colour : "none" }) }, `Open rollout ${page.rollout}`);
  if (!shares) return h("section", { class: "stack" }, h("p", { class: "quiet" }, "This metric has no values by token or row."), whole);
  const rows = new Map();
  for (const each of shares.values) {
    const known = rows.get(each.sample) || { sample: each.sample, share: 0, sum: 0, count: 0 };
    known.share += each.share;
    known.sum += each.value;
    known.count += 1;
    rows.set(each.sample, known);
  }
  const top = [...rows.values()].sort((one, other) => other.share - one.share).slice(0, 12);
  const colour = shares.colour;
  const toRow = (sample, extra) => link("rollout", { rollout: page.rollout, sample: sample.id, colour, ...extra });
  const heading = shares.unit === "row" ? "Rows that made this point" : "Rows and tokens that made this point";
  const of = shares.unit === "row" ? plural(shares.values.length, "row") : plural(shares.values.length, "token");
  const rowTable = h("table", { id: "moved-rows" }, h("caption", {}, "Rows"),
    h("thead", {}, h("tr", {}, ["sample", "reward", shares.unit === "row" ? shares.what : "mean", "share"].map((text) => h("th", {}, text)))),
    h("tbody", {}, top.map((row) => h("tr", {}, h("td", {}, h("a", { href: toRow(row.sample) }, String(row.sample.id))), h("td", {}, number(row.sample.reward)),
      h("td", {}, number(row.sum / row.count)), h("td", {}, bar(row.share))))));
  const tokens = shares.unit === "token" ? [...shares.values].sort((one, other) => other.share - one.share).slice(0, 24) : [];
  const tokenTable = tokens.length ? h("table", { id: "moved-tokens" }, h("caption", {}, "Tokens"),
    h("thead", {}, h("tr", {}, ["token", "in sample", shares.what, "share"].map((text) => h("th", {}, text)))),
    h("tbody", {}, tokens.map((each) => h("tr", {}, h("td", { class: "context" }, contextOf(page, each)),
      h("td", {}, h("a", { href: toRow(each.sample, { token: each.at - each.sample.start, pass: each.pass || null }) }, `${each.sample.id}, token ${each.at - each.sample.start}`)),
      h("td", {}, number(each.value)), h("td", {}, bar(each.share)))))) : null;
  const check = shares.how === "mean" && shares.result !== null ? [`their mean is `, number(shares.result, { id: "recomputed" })] : shares.how === "max" ? ["their largest is ", number(shares.result, { id: "recomputed" })] : [];
  return h("section", { class: "stack" }, h("div", { class: "bar" }, h("h2", {}, heading), whole),
    h("p", { class: "quiet small" }, `Rollout ${page.rollout}, ${of}`, check.length ? "; " : "", check, "."),
    h("div", { class: "columns" }, rowTable, tokenTable));
}

const bar = (share) => h("span", { class: "share", "data-value": share }, h("i", { style: `width:${Math.max(1, Math.round(60 * share))}px` }), percent(share));

/** A token between its neighbours. */
function contextOf(page, { sample, at }) {
  const gap = page.spaced ? " " : "";
  const text = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, n) => page.textOf(page.get("response")[from + n])).join(gap);
  const [before, after] = [text(Math.max(sample.start, at - 4), at), text(at + 1, Math.min(sample.end, at + 5))];
  return [h("span", { class: "quiet" }, visible(before) + gap), h("mark", {}, visible(page.textOf(page.get("response")[at]))), h("span", { class: "quiet" }, gap + visible(after))];
}
