// Compare: samples of one prompt in two rollouts, side by side.
"use strict";

async function viewCompare(params) {
  if (RUN.rollouts.length < 2) return h("p", { class: "quiet" }, "Two recorded rollouts are needed to compare them.");
  const numbers = RUN.rollouts.map((line) => line.rollout);
  const [left, right] = [params.get("left") === null ? numbers[0] : numberOf(params, "left", numbers), numberOf(params, "right", numbers)];
  const pages = [await pageOf(left), await pageOf(right)];
  const prompts = pages.map((page) => new Map(page.samples.map((sample) => [sample.prompt[1], sample])));
  const shared = [...prompts[0].keys()].filter((key) => prompts[1].has(key));
  const set = (changes) => go("compare", { left, right, prompt: params.get("prompt"), colour: params.get("colour"), ...changes });
  const name = (page, sample) => { const text = visible(page.promptOf(sample)); return text.length > 60 ? `${text.slice(0, 59)}…` : text; };
  const key = shared.includes(params.get("prompt")) ? params.get("prompt") : shared[0];
  const panel = h("aside", { class: "panel", "aria-live": "polite", "aria-label": "Token", hidden: true });
  const sides = pages.map((page, side) => {
    const samples = page.samples.filter((sample) => (key ? sample.prompt[1] === key : sample.group === page.samples[0]?.group));
    const painted = painter(page, 0, params.get("colour") || "none");
    const rewards = samples.map((sample) => sample.reward).filter((reward) => reward !== null);
    const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    const column = h("section", { class: "stack", "data-side": side }, h("header", { class: "bar" }, h("h2", {}, `Rollout ${page.rollout}`), h("span", { class: "legend" }, painted.legend, h("span", { class: "quiet" }, "mean reward ", number(mean)))),
      key || !samples.length ? null : promptBlock(page, samples[0]), samples.map((sample) => sampleCard(page, 0, sample, painted)));
    selectable(column, panel, () => page, () => 0);
    return column;
  });
  return h("div", { class: "stack" },
    h("div", { class: "bar controls" }, stepper("left rollout", numbers, left, (value) => set({ left: value })), stepper("right rollout", numbers, right, (value) => set({ right: value })),
      shared.length ? choice("Prompt", shared.map((each) => [each, name(pages[0], prompts[0].get(each))]), key, (value) => set({ prompt: value })) : null,
      choice("Colour", modesOf(pages[0], 0).map((mode) => [mode.key, mode.label]), params.get("colour") || "none", (value) => set({ colour: value }))),
    shared.length ? promptBlock(pages[0], prompts[0].get(key)) : h("p", { class: "notice" }, "These rollouts share no prompt; shown is the first group of each."),
    h("div", { class: "withpanel" }, h("div", { class: "halves" }, sides), panel));
}
