/** The views of a run: its steps, and the norms of arrays over steps. */

import { chart, plain } from "view/charts";
import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import {
  errorMessage,
  factList,
  formatNumber,
  formatSeconds,
  formatSize,
  formatTime,
  formatWhole,
  h,
  plural,
  table,
} from "view/dom";

const REFRESH_MS = 3000;
const STYLES = { committed: "good", foreign: "good", uncommitted: "warning", other: "muted" };
const MOST_FOUND = 50;
const OLDER_STEPS = 1000; // that are read at a time

/**
 * Show a run.
 * @param {{tab: string, policy: string, link: Function, go: Function}} page
 * @param {HTMLElement} main
 * @param {AbortSignal} signal
 */
export async function showRun(page, main, signal) {
  const tabs = { steps: "Steps", norms: "Norms" };
  const tab = Object.hasOwn(tabs, page.tab) ? page.tab : "steps";
  const body = h("div");
  main.replaceChildren(
    h("h1", { class: "name" }, page.view.location),
    h(
      "nav",
      { class: "tabs", "aria-label": "Views of the run" },
      Object.entries(tabs).map(([name, title]) =>
        h("a", { href: page.link({ tab: name }), "aria-current": name === tab ? "page" : null }, title),
      ),
    ),
    body,
  );
  await (tab === "steps" ? showSteps : showNorms)(page, body, signal);
}

async function showSteps(page, body, signal) {
  const shown = h("div");
  const message = h("div", { role: "status" });
  let { policy, along } = page;
  let last = "";
  let newest = 0;
  let count = 0;
  const showOlder = (run) => {
    count = run.steps.length + Math.min(run.older, OLDER_STEPS);
    refresh();
  };
  const refresh = async () => {
    newest += 1;
    const number = newest;
    const run = await loadDocument("run", { ...(policy && { policy }), ...(count && { last: count }) }, signal);
    const text = JSON.stringify([run, along]);
    if (text === last || number !== newest) return; // a later request is on its way
    last = text;
    const known = new Set();
    for (const one of run.steps)
      if (!isReport() || (await isInReport("checkpoint", { at: one.name }))) known.add(one.name);
    const focused = document.activeElement?.getAttribute("href");
    shown.replaceChildren(...stepParts(run, page, known, along, () => showOlder(run)));
    if (focused) [...shown.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  };
  const select = h(
    "select",
    {
      change: () => {
        along = select.value;
        page.replace({ tab: "steps", policy, along });
        refresh();
      },
    },
    ["step", "time"].map((name) => h("option", { value: name, selected: name === along }, name)),
  );
  const form = h(
    "form",
    { class: "bar" },
    h("label", {}, "Charts by", select),
    h(
      "label",
      { class: "grow" },
      "Policy",
      h("input", {
        name: "policy",
        value: policy,
        placeholder: "latest_n=3,best_n=1:loss:min",
        spellcheck: "false",
        class: "name",
      }),
    ),
    h("button", { type: "submit" }, "Show what it keeps"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = new FormData(form).get("policy").trim();
    const before = policy;
    policy = wanted;
    refresh().then(
      () => {
        message.replaceChildren();
        page.replace({ tab: "steps", policy, along });
      },
      (error) => {
        policy = before;
        message.replaceChildren(errorMessage(error));
      },
    );
  });
  body.replaceChildren(isReport() ? h("div", { class: "bar" }, form.firstChild) : form, message, shown);
  await refresh();
  if (!isReport()) keepRefreshing(refresh, message, signal);
}

/** Refresh while the page is visible, until the user looks at something else. */
async function keepRefreshing(refresh, message, signal) {
  let failed = false;
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
    if (document.hidden || signal.aborted) continue;
    try {
      await refresh();
      if (failed) message.replaceChildren();
      failed = false;
    } catch (error) {
      failed = true;
      if (!signal.aborted) message.replaceChildren(errorMessage(error));
    }
  }
}

function stepParts(run, page, known, along, showOlder) {
  const sizes = run.steps.reduce((sum, one) => sum + (one.nbytes ?? 0), 0);
  return [
    factList([
      ["steps", formatWhole(run.steps.length)],
      ["older steps", run.older ? olderSteps(run, showOlder) : null],
      ["size", formatSize(sizes)],
      ["owner", run.owner ?? "none"],
    ]),
    ...run.leftovers.map((name) =>
      h("p", { class: "warning" }, `Unfinished: ${name}, of a save or deletion that is running or failed`),
    ),
    run.steps.length === 0 ? h("p", { class: "muted" }, "No step was saved yet.") : "",
    stepTable(run, page, known),
    ...charts(run, along),
  ];
}

function olderSteps(run, showOlder) {
  return isReport()
    ? formatWhole(run.older)
    : h(
        "button",
        { type: "button", click: showOlder },
        `Show ${Math.min(run.older, OLDER_STEPS)} of ${run.older} more`,
      );
}

function stepTable(run, page, known) {
  const hasPolicy = run.policy !== null;
  const metrics = [...new Set(run.steps.flatMap((one) => Object.keys(one.metrics)))];
  const rows = run.steps
    .toReversed()
    .map((one) => [
      known.has(one.name) && one.state !== "uncommitted" && one.state !== "other"
        ? h("a", { href: page.link({ at: one.name }) }, formatWhole(one.step))
        : formatWhole(one.step),
      formatTime(one.created),
      formatSize(one.nbytes),
      formatSeconds(one.seconds),
      formatSeconds(one.blocked),
      ...metrics.map((name) => formatNumber(metricOf(one, name))),
      h("span", { class: STYLES[one.state] ?? "bad" }, one.state),
      [
        one.pinned && "pinned",
        one.kept === true && `kept: ${one.reasons.join("; ")}`,
        one.kept === false && h("span", { class: "warning" }, "would be deleted"),
        one.error && h("span", { class: "bad" }, one.error),
      ]
        .filter(Boolean)
        .flatMap((note, number) => (number ? [" · ", note] : [note])),
    ]);
  const headings = [
    "#step",
    "saved",
    "#size",
    "#duration",
    "#blocked",
    ...metrics.map((name) => `#${name}`),
    "state",
    hasPolicy ? "policy, notes" : "notes",
  ];
  return rows.length > 0 ? h("section", {}, table(headings, rows, "Steps")) : "";
}

function metricOf(step, name) {
  return Object.hasOwn(step.metrics, name) ? step.metrics[name] : undefined;
}

/** Charts of the steps, along their numbers or the times at which they were saved. */
function charts(run, along) {
  const saved = run.steps.filter((one) => one.nbytes !== null);
  if (saved.length < 2) return [];
  const x = saved.map((one) => (along === "time" ? one.created : one.step));
  const axis = along === "time" ? { type: "date" } : { title: { text: "step" } };
  const line = (name, values, more = {}) => ({
    type: "scatter",
    mode: "lines+markers",
    name: plain(name),
    x,
    y: values,
    ...more,
  });
  const found = [
    chart(
      "Duration of saves",
      "Seconds of each save, and seconds during which the training was blocked.",
      [
        line(
          "duration",
          saved.map((one) => one.seconds),
        ),
        line(
          "blocked",
          saved.map((one) => one.blocked),
        ),
      ],
      { xaxis: axis, yaxis: { title: { text: "seconds" }, rangemode: "tozero" } },
      {
        headings: ["#step", "#duration", "#blocked"],
        rows: saved.map((one) => [one.step, formatSeconds(one.seconds), formatSeconds(one.blocked)]),
      },
    ),
    chart(
      "Size",
      "Bytes of each step.",
      [{ type: "bar", x, y: saved.map((one) => one.nbytes), hovertemplate: "%{x}: %{y:.3s}B<extra></extra>" }],
      { xaxis: axis, yaxis: { title: { text: "bytes" }, tickformat: ".2s" } },
      { headings: ["#step", "#size"], rows: saved.map((one) => [one.step, formatSize(one.nbytes)]) },
    ),
  ];
  for (const name of new Set(saved.flatMap((one) => Object.keys(one.metrics)))) {
    const values = saved.map((one) => (typeof metricOf(one, name) === "number" ? metricOf(one, name) : null));
    const rows = saved.map((one) => [one.step, formatNumber(metricOf(one, name))]);
    found.push(
      chart(
        name,
        "A metric over the steps.",
        [line(name, values)],
        { xaxis: axis },
        { headings: ["#step", `#${name}`], rows },
      ),
    );
  }
  return found;
}

async function showNorms(page, body, signal) {
  const run = await loadDocument("run", {}, signal);
  const steps = run.steps.filter((one) => one.state === "committed" || one.state === "foreign");
  const place = page.part ? `/${page.part}` : "";
  const newest = steps.at(-1);
  if (newest === undefined) {
    body.replaceChildren(h("p", { class: "muted" }, "No step was saved yet."));
    return;
  }
  const of = `${newest.name}${place}`;
  const first = await loadOnce("checkpoint", { at: newest.name });
  if (first.kind === "checkpointables" && !page.part) {
    const parts = first.checkpointables.filter((one) => one.kind === "tree").map((one) => one.places[0]);
    const links = parts.map((part) =>
      h("li", {}, h("a", { href: page.link({ tab: "norms", part }), class: "name" }, part)),
    );
    body.replaceChildren(h("p", {}, "Choose a checkpointable:"), h("ul", {}, links));
    return;
  }
  const rows = await loadOnce("tree", { at: of });
  if (signal.aborted) return;
  body.replaceChildren(...new Norms(rows, steps, place, of, signal).elements);
}

class Norms {
  constructor(rows, steps, place, of, signal) {
    Object.assign(this, { rows, steps, place, of, signal });
    this.lines = new Map();
    this.paths = pathsOf(rows);
    this.list = h("ul", { class: "name choices" });
    this.status = h("p", { class: "muted", role: "status" });
    this.figure = h("div");
    const search = h("input", { type: "search", placeholder: "Search names", "aria-label": "Search arrays" });
    search.addEventListener("input", () => this.search(search.value));
    this.elements = [
      h(
        "p",
        { class: "muted" },
        `The norm of an array in ${plural(steps.length, "step")}. Each chosen array is read from every step.`,
      ),
      h("div", { class: "bar" }, h("span", { class: "bar grow" }, search)),
      this.list,
      this.status,
      this.figure,
    ];
    this.search("");
  }

  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let row = 0; row < this.paths.length && found.length < MOST_FOUND; row += 1) {
      const isArray = this.rows.leaves[row] >= 0 && this.rows.arrays[row] > 0;
      if (!isArray || !words.every((word) => this.paths[row].toLowerCase().includes(word))) continue;
      const leaf = this.rows.leaves[row];
      if (isReport() && !(await isInReport("statistics", this.parameters(this.steps[0], leaf)))) continue;
      found.push(this.choice(row));
    }
    this.list.replaceChildren(...found);
    if (isReport() && this.lines.size === 0) for (const item of found.slice(0, 8)) item.querySelector("input").click();
  }

  choice(row) {
    const leaf = this.rows.leaves[row];
    const box = h("input", { type: "checkbox", checked: this.lines.has(leaf) });
    box.addEventListener("change", () => (box.checked ? this.add(row) : this.remove(leaf)));
    return h(
      "li",
      {},
      h("label", {}, box, ` ${this.paths[row]} `, h("span", { class: "muted" }, formatSize(this.rows.nbytes[row]))),
    );
  }

  parameters(step, leaf) {
    return { at: `${step.name}${this.place}`, leaf, of: this.of };
  }

  async add(row) {
    const leaf = this.rows.leaves[row];
    const norms = [];
    const failed = [];
    this.lines.set(leaf, { name: this.paths[row], norms });
    for (const step of this.steps) {
      if (this.signal.aborted || !this.lines.has(leaf)) return;
      this.status.replaceChildren(`Reading ${this.paths[row]} of step ${step.step} …`);
      const found = await loadDocument("statistics", this.parameters(step, leaf), this.signal).catch((error) => {
        failed.push(`step ${step.step}: ${error.message}`);
      });
      norms.push(typeof found?.norm === "number" ? found.norm : null);
    }
    const more = failed.length > 1 ? ` (and ${formatWhole(failed.length - 1)} more)` : "";
    this.status.replaceChildren(failed.length > 0 ? `${this.paths[row]} has gaps: ${failed[0]}${more}` : "");
    this.draw();
  }

  remove(leaf) {
    this.lines.delete(leaf);
    this.draw();
  }

  draw() {
    const x = this.steps.map((one) => one.step);
    const lines = [...this.lines.values()];
    const traces = lines.map(({ name, norms }) => ({
      type: "scatter",
      mode: "lines+markers",
      name: plain(name),
      x,
      y: norms,
    }));
    const layout = {
      height: 360,
      xaxis: { title: { text: "step" } },
      yaxis: { title: { text: "norm" } },
      showlegend: true,
    };
    const rows = x.map((step, at) => [step, ...lines.map(({ norms }) => formatNumber(norms[at]))]);
    const data = { headings: ["#step", ...lines.map(({ name }) => `#${name}`)], rows };
    this.figure.replaceChildren(
      lines.length > 0 ? chart("Norms over steps", plural(lines.length, "line"), traces, layout, data) : "",
    );
  }
}

function pathsOf({ names, depths }) {
  const parts = [];
  return names.map((name, row) => {
    parts.length = Math.max(0, depths[row] - 1);
    if (depths[row] > 0) parts.push(name);
    return parts.join("/");
  });
}
