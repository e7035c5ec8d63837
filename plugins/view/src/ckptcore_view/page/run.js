/** The views of a run: its metrics, events, norms and steps; and the runs of a folder. */

import { lineChart, smoothed } from "view/charts";
import { isInReport, isReport, loadDocument } from "view/documents";
import {
  cell,
  errorMessage,
  factList,
  formatNumber,
  formatSeconds,
  formatSize,
  formatTime,
  formatWhole,
  h,
  plural,
  sizeCell,
  table,
} from "view/dom";
import { axisOf, eventList, groupsOf, metricCharts, metricOf, metricsOf, saveCharts } from "view/metrics";
import { normsSection, showNorms } from "view/norms";
import { panelSections } from "view/panels";

const REFRESH_MS = 3000;
const REFRESH_RUNS_MS = 20_000; // the roots of the steps of all runs are read again
const OLDER_STEPS = 1000; // that are read at a time
const MOST_METRICS = 4; // columns of the table of steps
const STYLES = { committed: "muted", foreign: "muted", uncommitted: "warning", other: "muted" };
const SMOOTHING = [0, 0.5, 0.8, 0.9, 0.95, 0.99];

/**
 * Show a run.
 * @param {{tab: string, policy: string, link: Function, go: Function}} page
 * @param {HTMLElement} main
 * @param {AbortSignal} signal
 */
export async function showRun(page, main, signal) {
  const tabs = { steps: "Overview", norms: "Norms" };
  const tab = Object.hasOwn(tabs, page.tab) ? page.tab : "steps";
  const body = h("div");
  main.replaceChildren(
    h("h1", { class: "name" }, page.run ? `${page.view.location}/${page.run}` : page.view.location),
    h(
      "nav",
      { class: "tabs", "aria-label": "Views of the run" },
      Object.entries(tabs).map(([name, title]) =>
        h("a", { href: page.link({ at: page.at, tab: name }), "aria-current": name === tab ? "page" : null }, title),
      ),
    ),
    body,
  );
  await (tab === "steps" ? showOverview : showNorms)(page, body, signal);
}

/** Show all runs of a folder: their losses in one chart, and a table. */
export async function showRuns(page, main, signal) {
  const body = h("div");
  main.replaceChildren(h("h1", { class: "name" }, page.view.location), body);
  await keepShowing(page, body, signal, {
    name: "runs",
    parameters: () => (page.policy ? { policy: page.policy } : {}),
    parts: async (found, look) => {
      for (const run of found.runs) page.view.children[run.name] = run.kind; // a run may be new
      return [[runsChart(found.runs, look)], [runsTable(found.runs, page)]];
    },
  });
}

async function showOverview(page, body, signal) {
  let count = 0;
  await keepShowing(page, body, signal, {
    name: "run",
    parameters: (policy) => ({ ...page.runParameters, ...(policy && { policy }), ...(count && { last: count }) }),
    parts: async (run, look, refresh) => {
      const known = new Set();
      for (const one of run.steps)
        if (!isReport() || (await isInReport("checkpoint", { at: page.within(one.name) }))) known.add(one.name);
      const showOlder = () => {
        count = run.steps.length + Math.min(run.older, OLDER_STEPS);
        refresh();
      };
      const [first, ...others] = metricCharts(run, look);
      const charts = [
        runFacts(run, showOlder),
        first ?? "",
        run.steps.length === 0 ? h("p", { class: "muted" }, "No step was saved yet.") : "",
        eventList(run),
        panelSections(run.panels),
        await normsSection(page, run, look, signal),
        others.length > 0 ? h("div", { class: "charts" }, others) : "",
      ];
      return [charts.flat(), [...stepSection(run, page, known), savesSection(run, look.along)]];
    },
  });
}

/**
 * Show a document and controls of its charts, and show it again when it changes.
 * @param {{name: string, parameters: Function, parts: Function}} shows the document, and the function that makes
 *   elements of it: those above the form for a policy, and those below.
 */
async function keepShowing(page, body, signal, { name, parameters, parts }) {
  const [above, below] = [h("div"), h("div")];
  const message = h("div", { role: "status" });
  let { policy } = page;
  let look = { along: page.along, log: page.log, smoothing: page.smoothing };
  let last = "";
  let newest = 0;
  const address = () => ({
    at: page.at,
    tab: page.tab,
    policy,
    along: look.along === "step" ? "" : look.along,
    log: look.log ? "1" : "",
    smoothing: look.smoothing ? `${look.smoothing}` : "",
  });
  const refresh = async () => {
    newest += 1;
    const number = newest;
    const found = await loadDocument(name, parameters(policy), signal);
    const text = JSON.stringify([found, look]);
    if (text === last || number !== newest) return; // a later request is on its way
    const made = await parts(found, look, refresh);
    if (number !== newest || signal.aborted) return;
    last = text;
    const focused = document.activeElement?.getAttribute("href");
    above.replaceChildren(...made[0]);
    below.replaceChildren(...made[1]);
    if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  };
  const change = (values) => {
    look = { ...look, ...values };
    page.replace(address());
    refresh();
  };
  const select = (title, choices, chosen, changed) =>
    h(
      "label",
      {},
      title,
      h(
        "select",
        { change: (event) => changed(event.target.value) },
        choices.map(([value, label]) => h("option", { value, selected: value === String(chosen) }, label)),
      ),
    );
  const smoothing = select(
    "Smoothing",
    SMOOTHING.map((one) => [String(one), one ? String(one) : "none"]),
    look.smoothing,
    (value) => change({ smoothing: Number(value) }),
  );
  const log = h("input", { type: "checkbox", checked: look.log, change: () => change({ log: log.checked }) });
  const controls = h(
    "div",
    { class: "bar" },
    select(
      "Charts by",
      [
        ["step", "step"],
        ["time", "time"],
      ],
      look.along,
      (along) => change({ along }),
    ),
    h("label", {}, log, "log axis"),
    smoothing,
  );
  const form = h(
    "form",
    { class: "bar" },
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
    const before = policy;
    policy = new FormData(form).get("policy").trim();
    refresh().then(
      () => {
        message.replaceChildren();
        page.replace(address());
      },
      (error) => {
        policy = before;
        message.replaceChildren(errorMessage(error));
      },
    );
  });
  body.replaceChildren(controls, above, isReport() || name === "runs" ? "" : form, message, below);
  await refresh();
  if (!isReport()) keepRefreshing(refresh, message, signal, name === "runs" ? REFRESH_RUNS_MS : REFRESH_MS);
}

/** Refresh while the page is visible, until the user looks at something else. */
async function keepRefreshing(refresh, message, signal, pause) {
  let failed = false;
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, pause));
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

function runFacts(run, showOlder) {
  const sizes = run.steps.reduce((sum, one) => sum + (one.nbytes ?? 0), 0);
  const times = run.steps.map((one) => one.created).filter(Boolean);
  const numbers = run.steps.map((one) => one.step);
  return factList([
    [
      "steps",
      run.steps.length > 1
        ? `${formatWhole(run.steps.length)}, from ${numbers[0]} to ${numbers.at(-1)}`
        : String(run.steps.length),
    ],
    ["older steps", run.older ? olderSteps(run, showOlder) : null],
    ["best", run.best && `step ${run.best.step}, ${run.best.metric} ${formatNumber(run.best.value)}`],
    ["saved", times.length > 0 ? `${formatTime(times[0])} to ${formatTime(times.at(-1))}` : null],
    ["size", formatSize(sizes)],
    ["owner", run.owner ?? "none: no process saves here now"],
  ]);
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

function stepSection(run, page, known) {
  if (run.steps.length === 0 && run.leftovers.length === 0) return [];
  return [
    h("h2", {}, "Steps"),
    ...run.leftovers.map((name) =>
      h("p", { class: "warning" }, `Unfinished: ${name}, of a save or deletion that is running or failed`),
    ),
    policyText(run),
    notInReport(run, page, known),
    stepTable(run, page, known),
  ];
}

/** What the policy keeps, in a sentence, and when it deletes the others. */
function policyText(run) {
  if (run.policy === null) return "";
  const kept = run.steps.filter((one) => one.kept !== false).length;
  const others = run.steps.length - kept;
  return h(
    "p",
    { class: "muted" },
    "The policy ",
    h("code", {}, run.policy),
    ` keeps ${run.policy_parts.join(", and ")}: ${formatWhole(kept)} of ${plural(run.steps.length, "step")}. `,
    others > 0 &&
      "The others stay until `ckptcore gc`, or a Checkpointer with this policy that saves another step, deletes them. ",
    others > 0 && run.is_running && "A process is saving here now.",
  );
}

function notInReport(run, page, known) {
  if (!isReport() || known.size === run.steps.length) return "";
  const missing = run.steps.filter((one) => !known.has(one.name) && isCheckpoint(one)).length;
  if (missing === 0) return "";
  return h(
    "p",
    { class: "muted" },
    `${plural(missing, "step")} cannot be opened here: ${page.view.report?.limit ?? "the report leaves out their trees"}. `,
    "Use `ckptcore view` without --out.",
  );
}

function isCheckpoint(step) {
  return step.state !== "uncommitted" && step.state !== "other";
}

function stepTable(run, page, known) {
  const all = [...new Set(run.steps.flatMap((one) => Object.keys(one.metrics)))];
  const first = (name) => (name === run.best?.metric ? 0 : /loss/i.test(name) ? 1 : 2);
  const metrics = all.sort((a, b) => first(a) - first(b)).slice(0, MOST_METRICS);
  const days = new Set(run.steps.map((one) => formatTime(one.created).slice(0, 10)));
  const isOneDay = days.size === 1; // the facts above name it
  const hasTimes = run.steps.some((one) => one.seconds !== null);
  const rows = run.steps
    .toReversed()
    .map((one) => [
      known.has(one.name) && isCheckpoint(one)
        ? cell(h("a", { href: page.link({ at: page.within(one.name) }) }, formatWhole(one.step)), one.step)
        : cell(formatWhole(one.step), one.step),
      ...metrics.map((name) => cell(formatNumber(metricOf(one, name)), metricOf(one, name))),
      ...(days.has("") ? [] : [cell(timeOf(one, isOneDay), one.created)]),
      sizeCell(one.nbytes),
      ...(hasTimes
        ? [cell(formatSeconds(one.seconds), one.seconds ?? -1), cell(formatSeconds(one.blocked), one.blocked ?? -1)]
        : []),
      h("span", { class: STYLES[one.state] ?? "bad" }, one.state),
      notesOf(one, run),
    ]);
  const headings = [
    "#step",
    ...metrics.map((name, number) => (number ? `~#${name}` : `#${name}`)),
    ...(days.has("") ? [] : ["saved"]),
    "~#size",
    ...(hasTimes ? ["~#duration", "~#blocked"] : []),
    "~state",
    run.policy === null ? "notes" : "policy, notes",
  ];
  return rows.length > 0 ? h("section", {}, table(headings, rows, "Steps")) : "";
}

function timeOf({ created }, isOneDay) {
  const text = formatTime(created);
  if (isOneDay) return h("span", { title: text }, text.slice(11));
  return h(
    "span",
    {},
    h("span", { class: "whole" }, text.slice(0, 10)),
    " ",
    h("span", { class: "whole" }, text.slice(11)),
  );
}

function notesOf(one, run) {
  const isBest = run.best?.step === one.step;
  const notes = [
    isBest && h("strong", { class: "good" }, `best ${run.best.metric}`),
    one.pinned && "pinned",
    one.kept === true && `kept: ${one.reasons.join("; ")}`,
    one.kept === false &&
      h("span", { class: run.is_running ? "warning" : "muted", title: whyDeleted(run) }, "would be deleted"),
    one.error && h("span", { class: "bad" }, one.error),
    !STYLES[one.state] && !one.error && h("span", { class: "bad" }, one.state),
  ].filter(Boolean);
  return h(
    "span",
    {},
    notes.flatMap((note, number) => (number ? [" · ", note] : [note])),
  );
}

function whyDeleted(run) {
  return `It is not ${run.policy_parts.join(", and not ")}.`;
}

function savesSection(run, along) {
  const charts = saveCharts(run, along);
  return charts.length > 0 ? h("section", {}, h("h2", {}, "Saves"), h("div", { class: "charts" }, charts)) : "";
}

function runsChart(runs, { along, log, smoothing }) {
  const loaded = runs.filter((run) => run.steps);
  const groups = loaded.map((run) => groupsOf(metricsOf(run, along))[0]?.[0]);
  const name = groups.find((one) => one !== undefined);
  const lines = loaded.flatMap((run, colour) => {
    const points = metricsOf(run, along).get(name) ?? [];
    const x = points.map(([at]) => at);
    const y = points.map(([, value]) => value);
    return points.length > 0 ? [{ name: run.name, x, y: smoothing ? smoothed(y, smoothing) : y, colour }] : [];
  });
  if (lines.length === 0) return h("p", { class: "muted" }, "No run has a metric.");
  const rows = lines.flatMap((line) => line.x.map((x, at) => [line.name, x, formatNumber(line.y[at])])).slice(0, 2000);
  return lineChart(name, `${name} of ${plural(lines.length, "run")}.`, lines, {
    ...axisOf(along),
    log,
    height: 320,
    data: { headings: ["run", along === "time" ? "#time" : "#step", `#${name}`], rows },
  });
}

function runsTable(runs, page) {
  const rows = runs.map((run) => {
    const link = h("a", { href: page.link({ at: run.name }), class: "name" }, run.name);
    if (!run.steps) return [link, run.kind === "run" ? run.error : "checkpoint", "", "", "", "", ""];
    const newest = run.steps.at(-1);
    const size = run.steps.reduce((sum, one) => sum + (one.nbytes ?? 0), 0);
    return [
      cell(link, run.name),
      run.is_running ? h("span", { class: "good" }, "running") : lastEvent(run),
      cell(formatWhole(run.steps.length + run.older), run.steps.length + run.older),
      cell(newest ? formatWhole(newest.step) : "", newest?.step ?? -1),
      cell(
        run.best ? `${run.best.metric} ${formatNumber(run.best.value)} at step ${run.best.step}` : "",
        run.best?.value,
      ),
      sizeCell(size),
      formatTime(newest?.created),
    ];
  });
  const headings = ["run", "state", "~#steps", "#newest", "best", "~#size", "~last saved"];
  return h("section", {}, h("h2", {}, plural(runs.length, "run")), table(headings, rows, "Runs"));
}

function lastEvent(run) {
  const restarts = run.events.filter((event) => event.kind === "restart").length;
  if (run.events.some((event) => event.kind === "death")) return h("span", { class: "bad" }, "killed");
  return h("span", { class: "muted" }, restarts ? `ended, ${plural(restarts, "restart")}` : "ended");
}
