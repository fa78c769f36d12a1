// Elements and texts: text from a run becomes a text node, never markup.
"use strict";

/** An element with attributes and children; `on...` listens, and a string becomes text. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** The same for drawings. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** A number for a person: four digits, and all of them in the title. */
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value).replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

/** A number in an element that holds it exactly. */
function number(value, attributes) {
  const exact = value === null || value === undefined ? "" : String(value);
  return h("span", { class: "number", title: exact, "data-value": exact, ...attributes }, figure(value));
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–");

/** A text whose control characters are written out; lines end, if `lines`. */
function visible(text, lines) {
  return text.replace(/[\p{C}\u2028\u2029]/gu, (mark) => {
    if (mark === "\n" && lines) return mark;
    if (mark === "\n") return "⏎";
    if (mark === "\t") return lines ? mark : "⇥";
    return `\\u${mark.codePointAt(0).toString(16).padStart(4, "0")}`;
  });
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** A labelled choice; `options` are pairs of value and text. */
function choice(label, options, value, change) {
  const select = h("select", { onchange: () => change(select.value) });
  for (const [key, text] of options) select.append(h("option", { value: key, selected: String(key) === String(value) }, text));
  return h("label", { class: "choice" }, h("span", {}, label), select);
}
