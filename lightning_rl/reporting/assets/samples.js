// Samples: the groups of a rollout side by side, sorted, filtered and coloured.
"use strict";

const SORTS = [["order", "as sampled"], ["reward", "reward"], ["length", "length"], ["mismatch", "mismatch"], ["advantage", "advantage"], ["gradient", "gradient"], ["finish", "finish reason"], ["finding", "findings"]];
const AT_ONCE = 24;

/** What samples are sorted by, largest first unless it is a name. */
function keyOf(sort, page, pass) {
  const figures = page.figures(pass);
  const keys = {
    reward: (sample) => sample.reward, length: (sample) => sample.tokens, finding: (sample) => sample.findings.length,
    mismatch: (sample) => figures[sample.row].mismatch, advantage: (sample) => figures[sample.row].advantage, gradient: (sample) => figures[sample.row].gradient,
  };
  return keys[sort];
}

function ordered(samples, sort, page, pass, rising) {
  if (sort === "finish") return [...samples].sort((one, other) => one.finish.localeCompare(other.finish) || one.row - other.row);
  const key = keyOf(sort, page, pass);
  if (!key) return samples;
  const value = (sample) => key(sample) ?? -Infinity;
  return [...samples].sort((one, other) => (value(other) === value(one) ? one.row - other.row : (value(other) > value(one) ? 1 : -1) * (rising ? -1 : 1)));
}

function filtered(page, params) {
  const [finish, find, only] = [params.get("finish"), (params.get("find") || "").toLowerCase(), params.get("only")];
  const bound = (name) => (params.get(name) === null || params.get(name) === "" ? null : Number(params.get(name)));
  const [low, high] = [bound("low"), bound("high")];
  return page.samples.filter((sample) => (!finish || sample.finish === finish)
    && (only !== "finding" || sample.findings.length) && (only !== "trained" || sample.trained) && (only !== "untrained" || !sample.trained)
    && (low === null || (sample.reward !== null && sample.reward >= low)) && (high === null || (sample.reward !== null && sample.reward <= high))
    && (!find || page.promptOf(sample).toLowerCase().includes(find) || page.responseOf(sample).toLowerCase().includes(find)));
}

/** A sample: its rewards, one by one, what it was used for, and its tokens. */
function sampleCard(page, pass, sample, painted, extra) {
  const figures = page.figures(pass)[sample.row];
  const rewards = Object.entries(sample.rewards);
  const chips = h("dl", { class: "chips" },
    h("div", { class: "main" }, h("dt", {}, "reward"), h("dd", {}, sample.reward === null ? (sample.scored ? "masked" : "none") : number(sample.reward, { "data-what": "reward" }))),
    rewards.length > 1 || (rewards.length === 1 && rewards[0][1] !== sample.reward) ? rewards.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, number(value, { "data-what": `reward/${name}` })))) : null,
    h("div", {}, h("dt", {}, "advantage"), h("dd", {}, number(figures.advantage, { "data-what": "advantage" }))),
    h("div", {}, h("dt", {}, "mismatch"), h("dd", {}, number(figures.mismatch, { "data-what": "mismatch" }))),
    h("div", {}, h("dt", {}, "tokens"), h("dd", {}, number(sample.tokens, { "data-what": "tokens" }))));
  return h("article", { class: "card sample", id: `sample-${page.rollout}-${sample.id}`, "data-sample": sample.id },
    h("header", {}, h("h3", {}, `sample ${sample.id}`), page.ranks > 1 ? h("span", { class: "quiet small" }, `rank ${sample.rank}`) : null,
      sample.findings.map((finding) => h("a", { class: "badge", href: link("findings", { rollout: page.rollout }), title: visible(finding.observed) }, visible(finding.check))), extra || null,
      h("span", { class: "small finish" }, h("span", { class: "quiet" }, "finish "), sample.finish, sample.trained ? "" : ", does not train")),
    chips, tokenBlock(page, sample, painted));
}

const promptBlock = (page, sample) => { // with the pictures of the prompt above it
  const pictures = (page.pictures?.[sample.group] || []).map((url, at) => h("img", { src: url, alt: `picture ${at + 1}` }));
  const block = h("div", { class: "prompt" }, h("span", { class: "speaker" }, "prompt"), h("span", {}, visible(page.promptOf(sample), true)));
  requestAnimationFrame(() => { block.scrollTop = block.scrollHeight; }); // the question stands at the end
  return pictures.length ? [h("div", { class: "pictures" }, pictures), block] : block;
};

async function viewRollout(params) {
  if (!RUN.rollouts.length) return h("p", { class: "quiet" }, "No rollout was recorded: add RunReport() or RolloutRecorder(folder) to the callbacks.");
  const numbers = RUN.rollouts.map((line) => line.rollout);
  const rollout = numberOf(params, "rollout", numbers);
  const page = await pageOf(rollout);
  const pass = Math.min(Number(params.get("pass") || 0), Math.max(0, page.passes - 1));
  const state = { colour: params.get("colour") || "difference", shown: AT_ONCE };
  const set = (changes) => go("rollout", { ...Object.fromEntries(params), rollout, colour: state.colour, sample: null, token: null, ...changes });
  const sort = params.get("sort") || "order";
  const grouped = params.get("flat") === null;
  let painted = painter(page, pass, state.colour);
  const chosen = filtered(page, params);
  const finishes = [...new Set(page.samples.map((sample) => sample.finish))];

  const legend = h("div", { class: "legend", "aria-live": "polite" });
  const body = h("div", { class: "stack", id: "samples" });
  const panel = h("aside", { class: "panel", "aria-live": "polite", "aria-label": "Token", hidden: true });
  const tokens = selectable(body, panel, () => page, () => pass);
  const recolour = (key, asked) => {
    state.colour = key;
    painted = painter(page, pass, key);
    legend.replaceChildren(h("span", { class: "quiet" }, `${painted.mode.label}: ${painted.mode.about}`), painted.legend);
    for (const button of modes.children) button.setAttribute("aria-pressed", String(button.dataset.mode === painted.mode.key));
    requestAnimationFrame(() => { modes.scrollLeft = modes.querySelector("[aria-pressed=true]").offsetLeft - modes.offsetLeft - 40; });
    if (!asked) return;
    repaint(body, page, painted);
    replace("rollout", { ...Object.fromEntries(params), rollout, colour: key });
  };
  const modes = h("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, modesOf(page, pass).map((mode, at) =>
    h("button", { type: "button", "data-mode": mode.key, title: `${mode.about}${at < 10 ? ` (key ${(at + 1) % 10})` : ""}`, onclick: () => recolour(mode.key, true) }, mode.label)));
  KEYS = { ...KEYS, digit: (at) => modes.children[at]?.click() };

  const parts = () => {
    if (!grouped) return ordered(chosen, sort, page, pass, params.get("rising")).map((sample) => [sample]);
    const groups = new Map();
    for (const sample of ordered(chosen, sort, page, pass, params.get("rising"))) groups.set(sample.group, [...(groups.get(sample.group) || []), sample]);
    return [...groups.values()];
  };
  const all = parts();
  const asked = params.get("sample") === null ? null : page.rowOf.get(Number(params.get("sample")));
  if (asked) {
    const at = all.findIndex((part) => part.includes(asked));
    if (at > 0) all.unshift(...all.splice(at, 1));
    else if (at < 0) all.unshift(grouped ? page.samples.filter((sample) => sample.group === asked.group) : [asked]);
  }
  const more = h("button", { type: "button", class: "button", onclick: () => fill() });
  let next = 0;
  const fill = () => {
    let count = 0;
    while (next < all.length && count < AT_ONCE) {
      const part = all[next++];
      count += part.length;
      const others = RUN.rollouts.filter((line) => line.rollout !== rollout && line.prompts.includes(part[0].prompt[1]));
      const compare = h("a", { class: "small", href: link("compare", { left: others.length ? others[others.length - 1].rollout : rollout, right: rollout, prompt: part[0].prompt[1] }) }, others.length ? "compare with another rollout" : "");
      body.append(h("section", { class: "group" }, h("header", {}, h("h3", {}, `group ${part[0].group}`), compare), promptBlock(page, part[0]),
        h("div", { class: grouped ? "side" : "side one" }, part.map((sample) => sampleCard(page, pass, sample, painted)))));
    }
    more.textContent = `Show more (${plural(all.length - next, grouped ? "group" : "sample")} left)`;
    more.hidden = next >= all.length;
  };
  fill();
  if (asked) requestAnimationFrame(() => {
    const shown = document.getElementById(`sample-${rollout}-${asked.id}`);
    shown?.classList.add("asked");
    const piece = params.get("token") === null ? null : shown?.querySelectorAll(".t")[Number(params.get("token"))];
    if (piece) tokens.select(piece, true);
    (piece || shown)?.scrollIntoView({ block: "center" });
  });
  const field = (name, label) => {
    const box = h("input", { type: "number", step: "any", value: params.get(name) || "", onchange: () => set({ [name]: box.value || null }) });
    return h("label", { class: "choice" }, h("span", {}, label), box);
  };
  const search = h("input", { type: "search", placeholder: "Find text", "aria-label": "Find text in prompts and responses", onchange: () => set({ find: search.value || null }) });
  search.value = params.get("find") || "";
  const step = page.steps[0];
  const facts = [plural(page.samples.length, "sample"), plural(new Set(page.samples.map((sample) => sample.group)).size, "group"), plural(page.samples.reduce((sum, sample) => sum + sample.tokens, 0), "token"),
    step ? `steps ${page.steps[0].step_index}–${page.steps[page.steps.length - 1].step_index}` : null, page.ranks > 1 ? plural(page.ranks, "rank") : null].filter(Boolean).join(" · ");
  const content = h("div", { class: "stack" },
    h("div", { class: "bar" }, stepper("rollout", numbers, rollout, (other) => set({ rollout: other })), h("span", { class: "quiet small" }, facts)),
    page.findings.length ? h("p", { class: "notice" }, h("a", { href: link("findings", { rollout }) }, `${plural(page.findings.length, "finding")} of the audit in this rollout`)) : null,
    page.missing_ranks ? h("p", { class: "notice" }, `${plural(page.missing_ranks, "rank")} left no recording of it.`) : null,
    page.reason ? h("p", { class: "notice" }, `The stage that masked a token is unknown, because ${visible(page.reason)}`) : null,
    h("div", { class: "bar controls" },
      choice("Sort by", SORTS, sort, (value) => set({ sort: value })),
      choice("Order", [["", "largest first"], ["1", "smallest first"]], params.get("rising") || "", (value) => set({ rising: value || null })),
      choice("Layout", [["", "groups"], ["1", "one list"]], params.get("flat") || "", (value) => set({ flat: value || null })),
      choice("Finish", [["", "any"], ...finishes.map((name) => [name, name])], params.get("finish") || "", (value) => set({ finish: value || null })),
      choice("Only", [["", "all"], ["finding", "with a finding"], ["trained", "that train"], ["untrained", "that do not train"]], params.get("only") || "", (value) => set({ only: value || null })),
      field("low", "Reward from"), field("high", "to"),
      page.passes > 1 ? choice("Pass", Array.from({ length: page.passes }, (_, n) => [n, String(n + 1)]), pass, (value) => set({ pass: value })) : null, search),
    h("div", { class: "colouring" }, modes, legend),
    h("p", { class: "small quiet" }, `${chosen.length} of ${plural(page.samples.length, "sample")}. Click a token to see its values; arrow keys move to the next.`),
    h("div", { class: "withpanel" }, h("div", {}, body, more), panel));
  recolour(painted.mode.key);
  return content;
}
