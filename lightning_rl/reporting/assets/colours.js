// Colours: color modes of tokens, the value of each token, and the scale of a rollout.
"use strict";

const MODES = [
  { key: "none", label: "speaker", kind: "plain", about: "who wrote it: the policy, or its environment" },
  { key: "trainer", label: "trainer log-prob", kind: "fall", least: 1, about: "log-probability under the policy that trains",
    needs: (page, pass) => page.trainer(pass), of: (page, pass) => page.trainer(pass) },
  { key: "engine", label: "engine log-prob", kind: "fall", least: 1, about: "log-probability when it was drawn",
    needs: (page) => page.get("rollout_logprobs"), of: (page) => page.get("rollout_logprobs") },
  { key: "difference", label: "trainer − engine", kind: "signed", least: 0.01, about: "their difference; 0 where both are one policy",
    needs: (page, pass) => page.trainer(pass) && page.get("rollout_logprobs"),
    of: (page, pass) => gaps(page.trainer(pass), page.get("rollout_logprobs")) },
  { key: "ratio", label: "ratio", kind: "signed", least: 0.01, about: "log of the importance ratio to the policy before the update",
    needs: (page, pass) => page.trainer(pass), of: (page, pass) => gaps(page.trainer(pass), page.old(pass)), shown: Math.exp },
  { key: "clip", label: "clip", kind: "named", about: "whether the loss’s clip took its gradient",
    needs: (page, pass) => page.get(`${pass}/clipped`) && page.trainer(pass),
    of: (page, pass) => clipOf(page, pass), names: ["", "clipped above", "clipped below"] },
  { key: "advantage", label: "advantage", kind: "signed", about: "what multiplies its loss",
    needs: (page) => page.get("advantages"), of: (page) => page.get("advantages") },
  { key: "entropy", label: "entropy", kind: "rise", least: 0.1, about: "of the policy before the token, in nats",
    needs: (page, pass) => page.get(`${pass}/entropy`), of: (page, pass) => page.get(`${pass}/entropy`) },
  { key: "taken", label: "mask, and by whom", kind: "named", about: "which stage took the token out of training",
    needs: (page, pass) => page.get(`${pass}/taken`), of: (page, pass) => page.get(`${pass}/taken`), names: (page) => page.stages },
  { key: "gradient", label: "gradient", kind: "signed", about: "of the loss with respect to its log-probability",
    needs: (page, pass) => page.get(`${pass}/gradient`), of: (page, pass) => page.get(`${pass}/gradient`) },
  { key: "reference", label: "trainer − reference", kind: "signed", least: 0.01, about: "distance from the reference policy",
    needs: (page, pass) => page.trainer(pass) && page.get("ref_logprobs"),
    of: (page, pass) => gaps(page.trainer(pass), page.get("ref_logprobs")) },
];

function gaps(one, other) {
  const result = new Float64Array(one.length);
  for (let at = 0; at < one.length; at++) result[at] = one[at] - other[at];
  return result;
}

/** Of each token 0, 1 if the clip took it above the old policy, 2 below. */
function clipOf(page, pass) {
  const [list, trainer, old] = [page.get(`${pass}/clipped`), page.trainer(pass), page.old(pass)];
  if (!list || !trainer) return undefined;
  return page.once(`clip ${pass}`, () => list.map((cut, at) => (cut ? (trainer[at] >= old[at] ? 1 : 2) : 0)));
}

/** The modes that a rollout has numbers for. */
const modesOf = (page, pass) => MODES.filter((mode) => !mode.needs || mode.needs(page, pass));

/** A mode on a rollout: the background of each token, and its legend. */
function painter(page, pass, key) {
  const mode = modesOf(page, pass).find((known) => known.key === key) || MODES[0];
  const values = mode.of ? page.once(`${mode.key} ${pass}`, () => mode.of(page, pass)) : null;
  const masks = page.get("valid");
  if (mode.kind === "plain") return { mode, paint: () => "", legend: h("span", {}) };
  if (mode.kind === "named") {
    const names = typeof mode.names === "function" ? mode.names(page) : mode.names;
    const used = new Set(values);
    const legend = h("span", { class: "keys" }, names.flatMap((name, at) => (used.has(at) && name
      ? [h("span", { class: "key" }, h("i", { style: `background:${stageColour(at)}` }), visible(name))] : [])));
    if (!legend.childElementCount) legend.append(mode.key === "clip" ? "no token was clipped" : "every token trains");
    return { mode, paint: (at) => (values[at] ? stageColour(values[at]) : ""), legend };
  }
  const most = page.once(`most ${mode.key} ${pass}`, () => usual(values, masks));
  const bound = Math.max(most, mode.least || 0); // rounding alone has no colour
  const colour = (value, share) => {
    const mix = Math.round(72 * Math.min(1, share));
    const hue = mode.kind === "fall" ? "--fall" : mode.kind === "rise" ? "--rise" : value > 0 ? "--plus" : "--minus";
    return mix ? `color-mix(in oklab, var(${hue}) ${mix}%, transparent)` : "";
  };
  const paint = (at) => (masks[at] && bound > 0 && Number.isFinite(values[at]) ? colour(values[at], Math.abs(values[at]) / bound) : "");
  const edge = mode.shown || ((value) => value);
  const ends = mode.kind === "signed" ? [-bound, bound] : mode.kind === "fall" ? [0, -bound] : [0, bound];
  const stops = [0, 0.25, 0.5, 0.75, 1].map((part) => {
    const value = ends[0] + part * (ends[1] - ends[0]);
    return colour(value, bound ? Math.abs(value) / bound : 0) || "transparent";
  });
  const legend = h("span", { class: "scale" }, number(edge(ends[0])),
    h("i", { style: `background:linear-gradient(to right, ${stops.join(", ")})` }), number(edge(ends[1])));
  return { mode, paint, legend };
}

/** The size that one valid number in a hundred is beyond. */
function usual(values, masks) {
  const sizes = new Float32Array(values.length);
  let count = 0;
  for (let at = 0; at < values.length; at++)
    if (masks[at] && Number.isFinite(values[at])) sizes[count++] = Math.abs(values[at]);
  const sorted = sizes.subarray(0, count).sort();
  return count ? sorted[Math.floor(0.99 * (count - 1))] || sorted[count - 1] : 0;
}

/** A colour for a stage that takes tokens. */
const stageColour = (at) => `color-mix(in oklab, hsl(${(at * 137.5 + 25) % 360} 65% 55%) 55%, transparent)`;
