// Flow: the signal ledger as a stream from sampled data to the gradient.
"use strict";

const UNITS = ["sequences", "tokens", "weight"];
const ORDER = [/\.keep_groups$/, /^aborted$/, /\.exclude$/, /^excluded$/, /^unscored$/, /\.reward_mask$/, /^zero_advantage$/, /\.sequence_mask$/, /\.token_mask$/, /\.token_weight$/, /^clip$/, /^not known$/];
const ABOUT = [
  [/\.keep_groups$/, "samples of groups that the callback filters"], [/^aborted$/, "samples that the engine or the environment gave up"],
  [/\.?excluded?$/, "rows that left training"], [/^unscored$/, "rows without a reward"], [/\.reward_mask$/, "rows that the callback takes out of the reward"],
  [/^zero_advantage$/, "advantage of 0: groups whose rewards are all equal"], [/\.sequence_mask$/, "rows that the callback rejects"],
  [/\.token_mask$/, "tokens that the callback rejects"], [/\.token_weight$/, "weight that the callback takes"], [/^clip$/, "tokens whose loss has no gradient, such as beyond the clip"],
  [/^environment$/, "what an environment wrote: read, not trained"], [/^not known$/, "tokens without a gradient, for a reason that is not recorded"],
];
const aboutStage = (stage) => (ABOUT.find(([pattern]) => pattern.test(stage)) || [null, ""])[1];
const rankOf = (stage) => { const at = ORDER.findIndex((pattern) => pattern.test(stage)); return at < 0 ? ORDER.length : at; };

/** Shares by stage of a unit at a step, from the ledger's metrics. */
function ledgerAt(unit, step) {
  const stages = [];
  for (const [name, [steps, values]] of Object.entries(RUN.metrics)) {
    const head = `ledger/${unit}/`;
    if (!name.startsWith(head)) continue;
    const at = steps.indexOf(step);
    if (at >= 0 && !["used", "sampled"].includes(name.slice(head.length))) stages.push([name.slice(head.length), values[at]]);
  }
  const valueOf = (name) => { const known = RUN.metrics[`ledger/${unit}/${name}`]; return known ? known[1][known[0].indexOf(step)] : undefined; };
  return { stages: stages.sort((one, other) => rankOf(one[0]) - rankOf(other[0])), used: valueOf("used"), sampled: valueOf("sampled") };
}

/** The same for a recorded rollout, counted from the stage of each token. */
function countedOf(page, unit) {
  const [taken, action] = [page.get("0/taken"), page.get("action")];
  const counts = new Map();
  let all = 0;
  for (const sample of page.samples) {
    const left = new Map();
    for (let at = sample.start; at < sample.end; at++) {
      if (!action[at]) continue;
      left.set(taken[at], (left.get(taken[at]) || 0) + 1);
    }
    if (unit === "tokens") for (const [stage, count] of left) { counts.set(stage, (counts.get(stage) || 0) + count); all += count; }
    else {
      const stage = left.has(0) || !left.size ? 0 : Math.max(...left.keys());
      counts.set(stage, (counts.get(stage) || 0) + 1);
      all += 1;
    }
  }
  const stages = [...counts].filter(([stage]) => stage).map(([stage, count]) => [page.stages[stage], count / all]);
  return { stages: stages.sort((one, other) => rankOf(one[0]) - rankOf(other[0])), used: (counts.get(0) || 0) / Math.max(1, all), sampled: all };
}

function stream({ stages, used, sampled }, unit) {
  const shown = stages.filter(([, share]) => Math.abs(share) >= 5e-4);
  const [width, height, top, fall] = [900, 130, 26, 46];
  const step = width / (shown.length + 2);
  const bottom = top + height + fall;
  const said = shown.map(([stage, share]) => `${stage} takes ${percent(share)}`).join(", ");
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, class: "stream", role: "img", "aria-label": `From ${unit} sampled to used: ${said}; ${percent(used)} used` });
  const fade = svg("linearGradient", { id: "fade", x1: 0, y1: 0, x2: 0, y2: 1 }, svg("stop", { offset: "35%", class: "full" }), svg("stop", { offset: "100%", class: "none" }));
  drawing.append(svg("defs", {}, fade));
  const tall = (share) => Math.max(share > 0 ? 1 : 0, share * height);
  const words = (at, name, value) => {
    const [below, above] = [svg("text", { x: step * at + 6, y: bottom + 18, class: "name" }), svg("text", { x: step * at + 6, y: 17, class: "value" })];
    const room = Math.floor(step / 6.6);
    below.textContent = name.length > room ? `${name.slice(0, room - 1)}…` : name;
    above.textContent = value;
    drawing.append(below, above);
  };
  const keep = (from, to, share) => drawing.append(svg("rect", { class: "kept", x: from, y: top, width: to - from, height: tall(share) }));
  let left = 1;
  shown.forEach(([stage, share], number) => {
    const x = step * (number + 1);
    keep(x - step, x, left);
    if (share > 0) {
      const [upper, lower] = [top + tall(left - share), top + tall(left)];
      const [inner, outer] = [x + 8, x + 8 + Math.min(Math.max(1.5, lower - upper), step * 0.7)];
      const bend = (from, to) => 0.55 * (to - from);
      drawing.append(svg("path", { class: "gone", d: `M${x} ${upper} C${x + bend(x, outer)} ${upper} ${outer} ${upper + bend(upper, bottom) * 0.6} ${outer} ${bottom} L${inner} ${bottom} C${inner} ${lower + bend(lower, bottom) * 0.6} ${x + bend(x, inner)} ${lower} ${x} ${lower} Z` }));
    }
    words(number + 1, visible(stage), `${share < 0 ? "+" : "−"}${percent(Math.abs(share))}`);
    left -= share;
  });
  keep(width - 2 * step, width, used);
  words(0, "sampled", sampled === undefined ? "100 %" : figure(sampled));
  words(shown.length + 1, "used", percent(used));
  return drawing;
}

async function viewFlow(params) {
  const logged = RUN.metrics["ledger/tokens/used"];
  const unit = UNITS.includes(params.get("unit")) ? params.get("unit") : logged ? "weight" : "tokens";
  const intro = "Share of the sampled data that reaches the gradient, and the stages that removed the rest. Each sample and token is charged once, to the first stage that removes it.";
  let content;
  let select;
  let reason = "";
  if (logged) {
    const steps = logged[0];
    const step = numberOf(params, "step", steps);
    content = ledgerAt(unit, step);
    select = stepper("step", steps, step, (next) => go("flow", { unit, step: next }));
  } else if (RUN.rollouts.length) {
    const numbers = RUN.rollouts.map((line) => line.rollout);
    const rollout = numberOf(params, "rollout", numbers);
    const page = await pageOf(rollout);
    content = countedOf(page, unit === "weight" ? "tokens" : unit);
    reason = page.reason;
    select = stepper("rollout", numbers, rollout, (next) => go("flow", { unit, rollout: next }));
  } else return h("p", { class: "quiet" }, "There is no ledger: add SignalLedger() or record rollouts.");
  const sum = content.stages.reduce((total, [, share]) => total + share, content.used);
  const units = logged ? UNITS : UNITS.slice(0, 2);
  return h("div", { class: "stack" }, h("p", {}, intro),
    h("div", { class: "bar" }, choice("Unit", units.map((name) => [name, name]), unit, (next) => go("flow", { ...Object.fromEntries(params), unit: next })), select),
    h("div", { class: "card scroll" }, stream(content, unit)),
    Math.abs(sum - 1) > 1e-3 ? h("p", { class: "small quiet" }, "This row of metrics covers a part of its rollout’s steps, so its shares need not add up to 100 %.") : null,
    reason ? h("p", { class: "notice" }, `Masks and the clip cannot be told apart: ${visible(reason)}`) : null,
    h("table", { id: "ledger" }, h("thead", {}, h("tr", {}, ["stage", "takes", "what it is"].map((text) => h("th", {}, text)))),
      h("tbody", {}, h("tr", {}, h("td", {}, "sampled"), h("td", {}, content.sampled === undefined ? "100 %" : number(content.sampled)), h("td", { class: "quiet" }, `${unit} that the engine drew`)),
        content.stages.map(([stage, share]) => h("tr", { class: Math.abs(share) < 5e-4 ? "quiet" : null }, h("td", {}, visible(stage)), h("td", {}, number(share, { title: `${share}` }), ` (${percent(share)})`), h("td", { class: "quiet" }, aboutStage(stage)))),
        h("tr", {}, h("td", {}, h("strong", {}, "used")), h("td", {}, number(content.used), ` (${percent(content.used)})`), h("td", { class: "quiet" }, "what reaches the gradient")))));
}

/** A choice out of numbers with one step back and forth. */
function stepper(label, numbers, value, change) {
  const at = numbers.indexOf(value);
  const move = (by, text, name) => h("button", { type: "button", "aria-label": name, disabled: numbers[at + by] === undefined, onclick: () => change(numbers[at + by]) }, text);
  return h("span", { class: "stepper" }, move(-1, "‹", `previous ${label}`), choice(label, numbers.map((one) => [one, String(one)]), value, (text) => change(Number(text))), move(1, "›", `next ${label}`));
}
