// Tokens: a response piece by piece, told apart by speaker, coloured, and with all that is known of each token.
"use strict";

const CALLS = [["<tool_call>", "</tool_call>"], ["<function_call>", "</function_call>"], ["<|tool_call_begin|>", "<|tool_call_end|>"], ["[TOOL_CALLS]", "\n"], ["<|python_tag|>", "\n"]];

/** Spans of a response, cut where the speaker changes: kind, turn, first and last token. */
function spansOf(page, sample) {
  const [turns, action] = [page.get("turn"), page.get("action")];
  const spans = [];
  for (let at = sample.start; at < sample.end; at++) {
    const turn = turns ? turns[at] : Number(action[at]);
    const last = spans[spans.length - 1];
    if (last && last.turn === turn) last.end = at + 1;
    else spans.push({ turn, start: at, end: at + 1 });
  }
  for (const span of spans) span.kind = span.turn > 0 ? "policy" : span.turn < 0 ? "context" : "environment";
  return spans;
}

/** Which tokens of a span belong to a call of a tool. */
function callsIn(page, span) {
  const texts = [];
  const starts = [];
  let text = "";
  for (let at = span.start; at < span.end; at++) {
    starts.push(text.length);
    text += page.textOf(page.get("response")[at]) + (page.spaced ? " " : "");
    texts.push(at);
  }
  const called = new Set();
  for (const [open, close] of CALLS) {
    for (let from = text.indexOf(open); from >= 0; from = text.indexOf(open, from + 1)) {
      const found = text.indexOf(close, from + open.length);
      const end = found < 0 ? text.length : found + close.length;
      texts.forEach((at, n) => { if (starts[n] < end && (starts[n + 1] ?? text.length) > from) called.add(at); });
    }
  }
  return called;
}

/** The tokens of a sample as spans of text. */
function tokenBlock(page, sample, painted) {
  const block = h("div", { class: `tokens${page.spaced ? " spaced" : ""}`, "data-row": sample.row });
  const spans = spansOf(page, sample);
  const talk = page.get("turn") !== undefined;
  for (const span of spans) {
    const label = { policy: `policy, turn ${span.turn}`, environment: "environment", context: "rewritten context" }[span.kind];
    const part = h("div", { class: `span ${span.kind}` }, talk ? h("span", { class: "speaker" }, label) : null);
    const called = span.kind === "policy" ? callsIn(page, span) : new Set();
    for (let at = span.start; at < span.end; at++) {
      if (called.has(at) && !called.has(at - 1)) part.append(h("span", { class: "speaker call" }, "tool call"));
      const text = page.textOf(page.get("response")[at]);
      const piece = h("span", { class: called.has(at) ? "t call" : "t", "data-at": at }, visible(text, true));
      const colour = painted.paint(at);
      if (colour) piece.style.background = colour;
      part.append(piece);
    }
    block.append(part);
  }
  if (!sample.tokens) block.append(h("span", { class: "quiet" }, "no token"));
  return block;
}

/** Colours what is shown already. */
function repaint(root, page, painted) {
  for (const piece of root.querySelectorAll(".t")) piece.style.background = painted.paint(Number(piece.dataset.at)) || "";
}

/** All recorded values of a token. */
function tokenFacts(page, pass, sample, at) {
  const value = (name) => { const list = page.get(name); return list ? list[at] : undefined; };
  const [trainer, old] = [page.trainer(pass), page.old(pass)];
  const engine = value("rollout_logprobs");
  const place = at - sample.start;
  const stage = page.stages[value(`${pass}/taken`) || 0];
  const clipped = clipOf(page, pass);
  const turns = page.get("turn");
  const rows = [
    ["token", `${visible(page.textOf(page.get("response")[at]))}  (id ${page.ids[page.get("response")[at]]})`],
    ["sample", `${sample.id}, token ${place}`],
    ["speaker", turns ? (turns[at] > 0 ? `policy, turn ${turns[at]}` : turns[at] < 0 ? "rewritten context" : "environment") : value("action") ? "policy" : "environment"],
    ["trainer log-prob", trainer && trainer[at]], ["engine log-prob", engine],
    ["trainer − engine", trainer && engine !== undefined ? trainer[at] - engine : undefined],
    ["old log-prob", value("old_logprobs")],
    ["ratio", trainer && old ? Math.exp(trainer[at] - old[at]) : undefined],
    ["reference log-prob", value("ref_logprobs")], ["advantage", value("advantages")],
    ["entropy, nats", value(`${pass}/entropy`)], ["gradient", value(`${pass}/gradient`)], ["value", value(`${pass}/values`) ?? value("values")], ["return", value("returns")],
    ["clip", clipped ? ["not clipped", "clipped above", "clipped below"][clipped[at]] : undefined],
    ["trains", value("valid") ? (stage ? `no, taken by ${stage}` : "yes") : `no${stage ? `, taken by ${stage}` : ""}`],
    ["drawn with version", value("version") >= 0 ? `${value("version")}${page.rollout - value("version") ? `, ${page.rollout - value("version")} rollouts old` : ", that of this rollout"}` : undefined],
  ];
  return h("dl", { class: "facts tight" }, rows.filter(([, known]) => known !== undefined && known !== null)
    .flatMap(([name, known]) => [h("dt", {}, name), h("dd", { "data-fact": name }, typeof known === "number" ? number(known) : visible(String(known)))]));
}

/** Selecting tokens by pointer and keyboard within a root that holds blocks of tokens of some pages. */
function selectable(root, panel, pageFor, passOf) {
  let selected = null;
  const select = (piece, focus) => {
    if (selected) { selected.classList.remove("selected"); selected.removeAttribute("tabindex"); }
    selected = piece;
    piece.classList.add("selected");
    piece.setAttribute("tabindex", "0");
    if (focus) piece.focus({ preventScroll: false });
    const block = piece.closest(".tokens");
    const page = pageFor(block);
    panel.replaceChildren(tokenFacts(page, passOf(), page.samples[Number(block.dataset.row)], Number(piece.dataset.at)));
    panel.hidden = false;
  };
  root.addEventListener("click", (event) => { const piece = event.target.closest(".t"); if (piece) select(piece, true); });
  root.addEventListener("keydown", (event) => {
    const piece = event.target.closest?.(".t");
    if (!piece) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Escape") { panel.hidden = true; return; }
    if (by === undefined) return;
    event.preventDefault();
    const all = [...piece.closest(".tokens").querySelectorAll(".t")];
    select(all[Math.min(all.length - 1, Math.max(0, all.indexOf(piece) + by))], true);
  });
  return { select, again: () => selected && root.contains(selected) && select(selected, false) };
}
