// Pages of text: the findings of the audit, and what made the run what it is.
"use strict";

function viewFindings(params) {
  const asked = params.get("rollout");
  const findings = RUN.findings.filter((finding) => asked === null || finding.rollout === Number(asked));
  if (!RUN.findings.length) return h("div", { class: "stack" }, h("p", {}, "The audit has found nothing, or none took part: SignalAudit() looks for quiet failures of the training signal."), notes());
  const numbers = [...new Set(RUN.findings.map((finding) => finding.rollout))];
  return h("div", { class: "stack" },
    h("div", { class: "bar" }, choice("Rollout", [["", "all"], ...numbers.map((one) => [one, String(one)])], asked || "", (value) => go("findings", { rollout: value || null })), h("span", { class: "quiet small" }, plural(findings.length, "finding"))),
    findings.map((finding) => {
      const recorded = RUN.rollouts.some((line) => line.rollout === finding.rollout);
      const rows = finding.samples.map((sample) => (recorded ? h("a", { href: link("rollout", { rollout: finding.rollout, sample, token: finding.positions[0] ?? null }) }, String(sample)) : String(sample)));
      return h("article", { class: `card finding ${finding.severity}` },
        h("header", {}, h("h3", {}, visible(finding.check)), h("span", { class: "badge" }, finding.severity), recorded ? h("a", { href: link("rollout", { rollout: finding.rollout }) }, `rollout ${finding.rollout}`) : h("span", { class: "quiet" }, `rollout ${finding.rollout}, not recorded`)),
        h("dl", { class: "facts" }, [["Who", finding.culprit], ["Expected", finding.expected], ["Observed", finding.observed], ["What to do", finding.cure]].filter(([, text]) => text).flatMap(([term, text]) => [h("dt", {}, term), h("dd", {}, visible(text))]),
          rows.length ? [h("dt", {}, "Samples"), h("dd", {}, rows.flatMap((row, at) => (at ? [", ", row] : [row])))] : null,
          finding.positions.length ? [h("dt", {}, "Positions"), h("dd", {}, finding.positions.join(", "))] : null));
    }), notes());
}

const notes = () => (RUN.notes.length ? h("section", { class: "notice" }, h("h3", {}, "What could not be read"), h("ul", {}, RUN.notes.map((note) => h("li", {}, visible(note))))) : null);

/** A value of the configuration: its class by its last name, its options below. */
function described(value) {
  if (Array.isArray(value)) return value.length ? h("ul", { class: "plain" }, value.map((item) => h("li", {}, described(item)))) : h("span", { class: "quiet" }, "none");
  if (value === null || value === undefined) return h("span", { class: "quiet" }, "none");
  if (typeof value !== "object") return h("code", {}, visible(typeof value === "number" ? String(value) : `${value}`));
  const name = value.class_path || value.name || value.partial;
  const rest = Object.entries(value.init_args || Object.fromEntries(Object.entries(value).filter(([key]) => !["class_path", "name", "partial", "init_args"].includes(key))));
  const further = value.init_args ? Object.entries(value).filter(([key]) => !["class_path", "init_args"].includes(key)) : [];
  return h("div", {}, typeof name === "string" ? h("code", { title: visible(name) }, visible(name.split(".").pop())) : null, rest.length + further.length ? table([...rest, ...further]) : null);
}

const table = (entries) => h("dl", { class: "facts tree" }, entries.flatMap(([key, value]) => [h("dt", {}, visible(key)), h("dd", {}, described(value))]));

function viewConfiguration() {
  const { versions, data, module, corrections, callbacks, trainer, ...others } = RUN.configuration;
  const part = (title, value, open) => (value && Object.keys(value).length ? h("details", { open }, h("summary", {}, h("h2", {}, title)), table(Object.entries(value))) : null);
  const print = data?.prompts?.fingerprint;
  if (!Object.keys(RUN.configuration).length) return h("div", { class: "stack" }, h("p", { class: "quiet" }, "No configuration lies beside the run."), notes());
  return h("div", { class: "stack" },
    h("dl", { class: "facts" }, print ? [h("dt", {}, "Data"), h("dd", {}, h("code", { id: "fingerprint" }, visible(String(print))), data.prompts.rows ? `, ${plural(data.prompts.rows, "row")}` : "")] : null,
      Object.entries(versions || {}).flatMap(([name, version]) => [h("dt", {}, visible(name)), h("dd", {}, h("code", {}, visible(String(version))))]), h("dt", {}, "report by"), h("dd", {}, h("code", {}, `lightning_rl ${RUN.version}`))),
    part("Module", module, true), part("Corrections", corrections, true), part("Data", data), part("Trainer", trainer), part("Callbacks", callbacks), part("Further", others), notes());
}
