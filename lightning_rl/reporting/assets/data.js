// Data: the blocks of the file and of the files beside it, unpacked when they are needed.
"use strict";

const TYPES = { f4: Float32Array, f8: Float64Array, i4: Int32Array, i2: Int16Array, u1: Uint8Array };
let RUN = null;

async function inflate(base64) {
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(base64);
  else {
    const letters = atob(base64);
    bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function readIndex() {
  const buffer = await inflate(document.getElementById("index").textContent);
  RUN = JSON.parse(new TextDecoder().decode(buffer));
  RUN.findingsOf = new Map();
  for (const finding of RUN.findings) {
    const known = RUN.findingsOf.get(finding.rollout) || [];
    RUN.findingsOf.set(finding.rollout, [...known, finding]);
  }
}

/** A recorded rollout: samples with where their tokens lie, and arrays over all tokens. */
class Page {
  constructor(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    Object.assign(this, JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length))));
    this.read = {};
    this.made = new Map();
    for (const [name, [type, offset, size]] of Object.entries(this.arrays))
      this.read[name] = new TYPES[type](buffer, 4 + length + offset, size);
    this.passes = Object.keys(this.arrays).filter((name) => /^\d+\/taken$/.test(name)).length;
    this.spaced = this.texts.some((text) => text !== null) && !this.texts.some((text) => text && /^\s|\s$/.test(text));
    let prompt = 0;
    let start = 0;
    this.samples.forEach((sample, row) => {
      Object.assign(sample, { row, start, promptStart: prompt, end: start + sample.tokens });
      start += sample.tokens;
      prompt += sample.prompt[0];
    });
    this.rowOf = new Map(this.samples.map((sample) => [sample.id, sample]));
    this.findings = RUN.findingsOf.get(this.rollout) || [];
    for (const sample of this.samples)
      sample.findings = this.findings.filter((finding) => finding.samples.includes(sample.id));
  }

  /** An array over the tokens of responses; undefined if it was not recorded. */
  get(name) { return this.read[name]; }

  /** Log-probabilities of the trained policy in a pass; before any pass, of the old policy. */
  trainer(pass) { return this.get(`${pass}/logprobs`) || this.get("old_logprobs"); }

  /** The policy before the update; without a separate pass, that of the first step. */
  old(pass) { return this.get("old_logprobs") || this.trainer(pass); }

  /** The text of a token, or its number. */
  textOf(index) {
    const text = this.texts[index];
    return text === null || text === undefined || text === "" ? `⟨${this.ids[index]}⟩` : text;
  }

  responseOf(sample) {
    const parts = [];
    for (let at = sample.start; at < sample.end; at++) parts.push(this.textOf(this.read.response[at]));
    return parts.join(this.spaced ? " " : "");
  }

  promptOf(sample) {
    if (sample.text !== null) return sample.text;
    const parts = [];
    for (let at = 0; at < sample.prompt[0]; at++) parts.push(this.textOf(this.read.prompt[sample.promptStart + at]));
    return parts.join(" ");
  }

  /** The cached result of `make`. */
  once(name, make) {
    if (!this.made.has(name)) this.made.set(name, make());
    return this.made.get(name);
  }

  /** Figures of each sample that its list is sorted by. */
  figures(pass) {
    return this.once(`figures ${pass}`, () => this.measure(pass));
  }

  measure(pass) {
    const [trainer, engine, valid] = [this.trainer(pass), this.get("rollout_logprobs"), this.get("valid")];
    const [advantages, gradient] = [this.get("advantages"), this.get(`${pass}/gradient`)];
    return this.samples.map((sample) => {
      let [count, mismatch, advantage, pull] = [0, 0, 0, 0];
      for (let at = sample.start; at < sample.end; at++) {
        if (!valid[at]) continue;
        count += 1;
        if (trainer && engine) mismatch += divergence(trainer[at] - engine[at]);
        if (advantages) advantage += advantages[at];
        if (gradient) pull += Math.abs(gradient[at]);
      }
      return {
        mismatch: trainer && engine && count ? mismatch / count : null,
        advantage: advantages && count ? advantage / count : null,
        gradient: gradient ? pull : null,
      };
    });
  }
}

/** exp(d) - 1 - d, without cancellation near 0. */
const divergence = (gap) => (Math.abs(gap) < 1e-4 ? (gap * gap) / 2 + (gap * gap * gap) / 6 : Math.expm1(gap) - gap);

const PAGES = new Map();
const ARRIVALS = new Map();

/** Called by the files beside the report. */
function lightningRLPage(rollout, base64) {
  ARRIVALS.get(rollout)?.(base64);
}

/** A rollout, from the file or from beside it; the last few stay in memory. */
async function pageOf(rollout) {
  if (PAGES.has(rollout)) return PAGES.get(rollout);
  const line = RUN.rollouts.find((known) => known.rollout === rollout);
  if (!line) throw new Error(`rollout ${rollout} was not recorded`);
  const base64 = line.file ? await arrival(line) : document.getElementById(`rollout-${rollout}`).textContent;
  const page = new Page(await inflate(base64));
  PAGES.set(rollout, page);
  if (PAGES.size > 6) PAGES.delete(PAGES.keys().next().value);
  return page;
}

function arrival(line) {
  return new Promise((resolve, reject) => {
    ARRIVALS.set(line.rollout, resolve);
    const script = h("script", { src: line.file, onerror: () => reject(new Error(`expected ${line.file} beside the report`)) });
    document.head.append(script);
  });
}
