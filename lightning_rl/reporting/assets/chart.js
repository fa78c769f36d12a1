// Chart: a metric over its steps, with the normal range; drawn when it comes into view.
"use strict";

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The least and the largest value, and whether they differ by no more than rounding in float32. */
function rangeOf(values) {
  const low = values.reduce((one, other) => Math.min(one, other));
  const high = values.reduce((one, other) => Math.max(one, other));
  const size = Math.max(Math.abs(low), Math.abs(high));
  return { low, high, size, level: high - low <= Math.max(1e-12, 1e-6 * size) };
}

function chart(name, { height = 130, marked = null, pick = null, axes = false } = {}) {
  const [steps, values] = RUN.metrics[name];
  const entry = RUN.glossary[name];
  const { size, level } = rangeOf(values);
  const margin = 0.1 * (size > 1e-12 ? size : 1);
  const holder = h("div", { class: "chart", style: `min-height:${height}px` }); // nothing moves when it is drawn
  const [line, band, quiet, accent] = ["--accent", "--band", "--line", "--mark"].map(colourOf);
  const axis = { stroke: colourOf("--quiet"), grid: { stroke: quiet, width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 46 };
  const shade = (plot) => {
    if (!entry || entry.high === null) return;
    const { ctx, bbox } = plot;
    const edge = (value, other) => (value === null ? other : Math.min(Math.max(plot.valToPos(value, "y", true), bbox.top), bbox.top + bbox.height));
    const [top, bottom] = [edge(entry.high, bbox.top), edge(entry.low, bbox.top + bbox.height)];
    ctx.fillStyle = band;
    ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
  };
  const dots = (plot) => {
    const { ctx, bbox } = plot;
    if (marked !== null && steps.includes(marked)) {
      ctx.fillStyle = accent;
      ctx.beginPath();
      ctx.arc(plot.valToPos(marked, "x", true), plot.valToPos(values[steps.indexOf(marked)], "y", true), 5 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
    if (!axes) return;
    ctx.fillStyle = line;
    for (const each of RUN.rollouts)
      for (const stepIndex of each.step_indices.slice(-1)) {
        const x = plot.valToPos(stepIndex, "x", true);
        if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(x - devicePixelRatio, bbox.top + bbox.height - 5 * devicePixelRatio, 2 * devicePixelRatio, 5 * devicePixelRatio);
      }
  };
  const draw = () => {
    const width = Math.max(160, holder.clientWidth);
    const options = {
      width, height, legend: { show: false }, padding: [8, 8, axes ? 0 : 4, axes ? 4 : 2],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7, fill: accent } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => (level ? [low - margin, high + margin] : uPlot.rangeNum(low, high, 0.08, true)) } },
      axes: axes ? [{ ...axis, size: 28 }, { ...axis, values: (plot, splits) => splits.map(figure) }] : [{ show: false }, { show: false }],
      series: [{}, { stroke: line, width: 1.6, points: { show: steps.length < 40, size: 4, fill: line, stroke: line } }],
      hooks: { drawClear: [shade], draw: [dots], setCursor: [(plot) => holder.dispatchEvent(new CustomEvent("cursor", { detail: plot.cursor.idx }))] },
    };
    holder.replaceChildren();
    const plot = new uPlot(options, [steps, values], holder);
    if (pick) plot.over.addEventListener("click", () => plot.cursor.idx !== null && plot.cursor.idx !== undefined && pick(steps[plot.cursor.idx]));
  };
  holder.draw = draw;
  SEEN.observe(holder);
  return holder;
}

/** Draws charts when they come into view, and again when their width changes. */
const SEEN = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    SEEN.unobserve(target);
    WIDTHS.observe(target);
  }
}, { rootMargin: "200px" });
const WIDTHS = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.drawn === target.clientWidth || !target.isConnected) continue;
    target.drawn = target.clientWidth;
    target.draw();
  }
});
