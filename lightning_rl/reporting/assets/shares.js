// Shares: how much each token or row adds to a metric, for those metrics that are figures over tokens or rows.
"use strict";

/** For a metric: what it is a figure of, how the figure is made, and the value of each token or row. */
function sharesOf(metric, page, from, to) {
  const steps = page.steps.map((step, number) => number).filter((n) => page.steps[n].step_index > from && page.steps[n].step_index <= to);
  const parts = steps.length ? steps : page.steps.map((step, number) => number);
  const values = [];
  const rule = RULES.find((known) => known.fits(metric));
  if (!rule) return null;
  if (rule.row) {
    for (const sample of page.samples) {
      const value = rule.row(page, metric, sample);
      if (value !== null && value !== undefined) values.push({ sample, at: null, value, pass: 0 });
    }
    return finish(metric, rule, values);
  }
  const passes = new Map(); // of each pass the minibatches that belong to the point
  for (const step of parts) {
    const pass = Math.floor(step / Math.max(1, page.minibatches));
    passes.set(pass, (passes.get(pass) || new Set()).add(step % Math.max(1, page.minibatches)));
  }
  if (rule.whole) passes.clear(); // known before the first step, of all tokens
  if (!passes.size) passes.set(0, null);
  const valid = page.get("valid");
  for (const [pass, minibatches] of passes) {
    const value = rule.token(page, pass, metric);
    if (!value) return null;
    for (const sample of page.samples) {
      if (minibatches && !minibatches.has(sample.minibatch)) continue;
      for (let at = sample.start; at < sample.end; at++)
        if (valid[at]) values.push({ sample, at, pass, value: value(at) });
    }
  }
  return finish(metric, rule, values);
}

function finish(metric, rule, values) {
  let total = 0;
  let [sum, largest] = [0, -Infinity];
  for (const each of values) {
    total += Math.abs(each.value);
    sum += each.value;
    largest = Math.max(largest, each.value);
  }
  for (const each of values) each.share = total > 0 ? Math.abs(each.value) / total : 0;
  const result = rule.how === "sum" ? sum : rule.how === "max" ? largest : values.length ? sum / values.length : null;
  return { unit: rule.row ? "row" : "token", how: rule.how, what: rule.what, colour: rule.colour, values, result };
}

const between = (one, other, of) => (page, pass) => {
  const [a, b] = [one(page, pass), other(page, pass)];
  return a && b ? (at) => of(a[at] - b[at]) : null;
};
const taken = (page, pass, stage) => {
  const [list, number] = [page.get(`${pass}/taken`), page.stages.indexOf(stage)];
  return list ? (at) => Number(number > 0 && list[at] === number) : null;
};
const clip = (kind) => (page, pass) => { const list = clipOf(page, pass); return list && ((at) => Number(list[at] === kind)); };
const is = (...names) => (metric) => names.includes(metric);

const RULES = [
  { fits: is("kl/rollout"), how: "mean", colour: "difference", what: "exp(d) − 1 − d, d = trainer − engine",
    token: between((p, n) => p.trainer(n), (p) => p.get("rollout_logprobs"), divergence) },
  { fits: is("kl/old"), how: "mean", colour: "ratio", what: "exp(d) − 1 − d, d = trainer − old",
    token: between((p, n) => p.trainer(n), (p, n) => p.old(n), divergence) },
  { fits: is("kl/ref"), how: "mean", colour: "reference", what: "trainer − reference",
    token: between((p, n) => p.trainer(n), (p) => p.get("ref_logprobs"), (d) => d) },
  { fits: is("policy/entropy"), how: "mean", colour: "entropy", what: "entropy",
    token: (page, pass) => { const list = page.get(`${pass}/entropy`); return list && ((at) => list[at]); } },
  { fits: is("policy/ratio_max", "policy/ess"), how: "max", colour: "ratio", what: "ratio to the old policy",
    token: between((p, n) => p.trainer(n), (p, n) => p.old(n), (d) => Math.exp(Math.min(20, Math.max(-20, d)))) },
  { fits: is("policy/clip_fraction_high"), how: "mean", colour: "clip", what: "clipped above", token: clip(1) },
  { fits: is("policy/clip_fraction_low"), how: "mean", colour: "clip", what: "clipped below", token: clip(2) },
  { fits: is("advantage/mean", "advantage/max", "advantage/std"), whole: true, how: "mean", colour: "advantage", what: "advantage",
    token: (page) => { const list = page.get("advantages"); return list && ((at) => list[at]); } },
  { fits: is("staleness/mean", "staleness/max"), whole: true, how: "mean", colour: "taken", what: "rollouts since it was drawn",
    token: (page) => { const list = page.get("version"); return (at) => page.rollout - list[at]; } },
  { fits: is("value/error"), how: "mean", colour: "none", what: "distance of the critic from its target",
    token: (page, pass) => {
      const [values, target] = [page.get(`${pass}/values`), page.get("returns")];
      return values && target ? (at) => Math.abs(values[at] - target[at]) : null;
    } },
  { fits: (metric) => metric === "optim/grad_norm" || metric.startsWith("loss/"), how: "sum", colour: "gradient",
    what: "size of the loss’s gradient with respect to its log-probability",
    token: (page, pass) => { const list = page.get(`${pass}/gradient`); return list && ((at) => Math.abs(list[at])); } },
  { fits: (metric) => /\/rejected(_tokens)?$/.test(metric), how: "mean", colour: "taken", what: "taken by this correction",
    token: (page, pass, metric) => {
      const kind = metric.endsWith("_tokens") ? "token_mask" : "sequence_mask";
      return taken(page, pass, `${metric.split("/")[0]}.${kind}`);
    } },
  { fits: is("reward/task", "reward/shaped", "reward/missing"), how: "mean", colour: "advantage", what: "reward",
    row: (page, metric, sample) => sample.reward },
  { fits: (metric) => /^reward\/[^/]+$/.test(metric), how: "mean", colour: "advantage", what: "reward",
    row: (page, metric, sample) => (sample.reward === null ? null : sample.rewards[metric.slice(7)]) },
  { fits: is("length/mean", "length/max"), how: "mean", colour: "none", what: "tokens drawn",
    row: (page, metric, sample) => sample.drawn },
  { fits: is("length/truncated"), how: "mean", colour: "none", what: "truncated by a limit",
    row: (page, metric, sample) => Number(sample.finish === "length" || sample.finish === "turns") },
];
