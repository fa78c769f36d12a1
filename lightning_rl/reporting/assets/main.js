// Main: views, their addresses within the file, the keyboard, light and dark.
"use strict";

const VIEWS = [
  ["curves", "Curves", viewCurves], ["flow", "Signal", viewFlow], ["findings", "Findings", viewFindings],
  ["rollout", "Rollouts", viewRollout], ["compare", "Compare", viewCompare], ["configuration", "Configuration", viewConfiguration],
  ["metric", null, viewMetric],
];
let KEYS = {};
let FOCUS = null;
let TURN = 0;

/** The address of a view. */
function link(view, params) {
  const known = Object.entries(params || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#${view}${known.length ? `?${new URLSearchParams(known)}` : ""}`;
}
const go = (view, params) => { location.hash = link(view, params); };
const replace = (view, params) => history.replaceState(null, "", link(view, params));

/** A number out of the address, if it is one of those that there are; the last one otherwise. */
function numberOf(params, name, numbers) {
  const asked = params.get(name) === null ? NaN : Number(params.get(name));
  return numbers.includes(asked) ? asked : numbers[numbers.length - 1];
}

async function route() {
  const [name, query] = location.hash.slice(1).split("?");
  const [view, , draw] = VIEWS.find(([known]) => known === name) || VIEWS[RUN.rollouts.length && !Object.keys(RUN.metrics).length ? 3 : 0];
  const turn = ++TURN;
  document.documentElement.dataset.turn = String(turn);
  KEYS = {};
  for (const anchor of document.querySelectorAll("#nav a")) {
    const here = anchor.dataset.view === (view === "metric" ? "curves" : view);
    anchor.toggleAttribute("aria-current", here);
    if (here) anchor.setAttribute("aria-current", "page");
  }
  const main = document.getElementById("main");
  const before = main.dataset.view;
  let content;
  try {
    content = await draw(new URLSearchParams(query || ""));
  } catch (error) {
    content = h("p", { class: "notice", role: "alert" }, `This view cannot be shown: ${error.message}`);
  }
  if (turn !== TURN) return;
  main.replaceChildren(content);
  main.dataset.view = view;
  if (before !== view) scrollTo(0, 0);
  if (FOCUS) { main.querySelector(FOCUS)?.focus({ preventScroll: true }); FOCUS = null; }
  document.documentElement.dataset.ready = String(turn);
}

function theme(next) {
  const dark = next ? next === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.textContent = dark ? "Light" : "Dark";
  button.onclick = () => { theme(dark ? "light" : "dark"); route(); };
}

/** Shows the error that ended the run. */
function sayEnd(element, { error, step, message }) {
  element.append("Ended by ", h("strong", {}, visible(error)), ` at step ${step}${message ? ": " : ""}${visible(message, true)}`);
  element.hidden = false;
}

function keyboard(event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^\d$/.test(event.key)) KEYS.digit?.((Number(event.key) + 9) % 10);
  const stepper = { "[": "previous", "]": "next" }[event.key];
  if (stepper) document.querySelector(`#main button[aria-label^="${stepper}"]:not([disabled])`)?.click();
  if (event.key === "/") { event.preventDefault(); document.querySelector("#main input[type=search]")?.focus(); }
  if (event.key === "j" || event.key === "k") {
    const cards = [...document.querySelectorAll("#main article")];
    const at = cards.indexOf(document.activeElement.closest?.("article"));
    const next = cards[Math.min(cards.length - 1, Math.max(0, at + (event.key === "j" ? 1 : -1)))];
    if (next) { next.setAttribute("tabindex", "-1"); next.focus(); next.scrollIntoView({ block: "nearest" }); }
  }
}

async function main() {
  theme();
  try {
    await readIndex();
  } catch (error) {
    document.getElementById("main").textContent = `This report cannot be read: ${error.message}`;
    return;
  }
  const facts = [];
  const rollouts = RUN.metrics.rollout;
  if (rollouts) facts.push(plural(rollouts[1][rollouts[1].length - 1] + 1, "rollout"));
  facts.push(plural(RUN.rollouts.length, "recorded rollout"), plural(RUN.findings.length, "finding"));
  document.getElementById("facts").textContent = facts.join(" · ");
  if (RUN.end) sayEnd(document.getElementById("end"), RUN.end);
  const nav = document.getElementById("nav");
  for (const [view, title] of VIEWS) if (title) nav.append(h("a", { href: link(view), "data-view": view }, title, view === "findings" && RUN.findings.length ? h("span", { class: "badge" }, String(RUN.findings.length)) : null));
  addEventListener("hashchange", route);
  addEventListener("keydown", keyboard);
  await route();
}

main();
