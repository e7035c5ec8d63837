/** Charts of metrics over steps or time: the losses first, with a logarithmic axis, smoothing, the best step and events. */

import { lineChart, smoothed } from "view/charts";
import { formatNumber, formatSeconds, formatSize, h } from "view/dom";

const LOSS = /loss/i;

/** Return the points of each metric of a run: those that a Trainer logged, or else those of the steps. */
export function metricsOf(run, along) {
  const found = new Map();
  const names = new Set(run.steps.flatMap((one) => Object.keys(one.metrics)));
  if (along === "step") for (const [name, points] of Object.entries(run.log)) found.set(name, points);
  for (const name of names) {
    if (found.has(name)) continue;
    const points = run.steps
      .map((one) => [positionOf(one, along), metricOf(one, name)])
      .filter(([x, y]) => x !== null && typeof y === "number");
    if (points.length > 0) found.set(name, points);
  }
  return found;
}

/** Return a metric of a step. Names of metrics may be those of methods of objects. */
export function metricOf(step, name) {
  return Object.hasOwn(step.metrics, name) ? step.metrics[name] : undefined;
}

/** Return where a step is on the axis; null if its time is not known. */
function positionOf(step, along) {
  if (along !== "time") return step.step;
  const time = Date.parse(step.created ?? "");
  return Number.isNaN(time) ? null : time;
}

/** Return the metrics in groups, each for one chart: all losses together first, then the others. */
export function groupsOf(metrics) {
  const names = [...metrics.keys()];
  const losses = names.filter((name) => LOSS.test(name)).sort((a, b) => a.length - b.length);
  return [...(losses.length > 0 ? [losses] : []), ...names.filter((name) => !LOSS.test(name)).map((name) => [name])];
}

/**
 * Create the charts of the metrics of a run.
 * @param {object} run
 * @param {{along: string, log: boolean, smoothing: number}} look
 * @returns {HTMLElement[]} the losses first.
 */
export function metricCharts(run, { along, log, smoothing }) {
  const metrics = metricsOf(run, along);
  return groupsOf(metrics).map((names, number) => {
    const lines = names.flatMap((name, colour) => linesOf(name, metrics.get(name), smoothing, colour));
    const rows = tableRows(names, metrics);
    return lineChart(names.join(", "), `${names.join(", ")} over ${along === "time" ? "time" : "steps"}.`, lines, {
      ...axisOf(along),
      log: log && names.some((name) => LOSS.test(name) || /norm/i.test(name)),
      height: number === 0 ? 280 : 200,
      marks: marksOf(run, names, along),
      events: eventsOn(run, along),
      data: { headings: [along === "time" ? "time" : "#step", ...names.map((name) => `#${name}`)], rows },
    });
  });
}

/** Return the options of a chart for the axis of steps or of time. */
export function axisOf(along) {
  return along === "time" ? { x: "time", xTitle: "time" } : { xTitle: "step" };
}

function linesOf(name, points, smoothing, colour) {
  const x = points.map(([at]) => at);
  const y = points.map(([, value]) => value);
  if (smoothing === 0 || points.length <= 3) return [{ name, x, y, colour }];
  return [
    { name: `${name}, as logged`, x, y, colour, faint: true },
    { name, x, y: smoothed(y, smoothing), colour },
  ];
}

function tableRows(names, metrics) {
  const rows = new Map();
  names.forEach((name, column) => {
    for (const [x, y] of metrics.get(name)) {
      if (!rows.has(x)) rows.set(x, [x, ...names.map(() => "")]);
      rows.get(x)[column + 1] = formatNumber(y);
    }
  });
  return [...rows.values()].sort(([a], [b]) => a - b).slice(0, 2000);
}

function marksOf(run, names, along) {
  const { best } = run;
  if (best === null || !names.includes(best.metric) || typeof best.value !== "number") return [];
  const step = run.steps.find((one) => one.step === best.step);
  const x = along === "time" ? step && positionOf(step, along) : best.step;
  return x === null || x === undefined
    ? []
    : [{ x, y: best.value, text: `${bestText(best)} at step ${best.step}`, isBelow: best.mode === "min" }];
}

function bestText(best) {
  return `best ${best.metric}: ${formatNumber(best.value)}`;
}

/** Return the events of a run on the axis. */
export function eventsOn(run, along) {
  const steps = new Map(run.steps.map((one) => [one.step, one]));
  const place = (number) =>
    steps.has(number) ? positionOf(steps.get(number), along) : along === "step" ? number : null;
  return run.events
    .map((event, number) => ({
      ...eventText(event),
      x: place(event.step),
      from: place(event.after),
      number: number + 1,
    }))
    .filter((event) => event.x !== null)
    .map(({ from, ...event }) => ({ ...event, ...(from !== null && from !== undefined && { from }) }));
}

/** Return a few words for the axis, and a sentence for the list. */
export function eventText(event) {
  const { step, after } = event;
  const change = event.from && event.to && event.from !== event.to ? `${event.from} → ${event.to}` : "";
  const ended = { true: "was killed", false: "ended" }[event.killed] ?? "ended or was killed";
  const going = change ? `, in ${event.to} instead of ${event.from}` : event.to ? `, in ${event.to}` : "";
  const texts = {
    restart: [
      [event.killed && "killed", change || "restart"].filter(Boolean).join(", "),
      `The process ${ended} after step ${after}. A new process resumed${going}; the first step that it saved is ${step}.`,
    ],
    again: ["saved again", `Step ${step} was saved again: the run was set back, or the step was replaced.`],
    unfinished: [
      "unfinished",
      `A save of step ${step} began and did not end: it is running, or its process was killed.`,
    ],
    death: ["killed", `The process was killed after step ${step}, and no process has resumed the run.`],
  };
  const [text, sentence] = texts[event.kind];
  return { text, sentence };
}

/** The events of a run as a list; nothing without events. */
export function eventList(run) {
  if (run.events.length === 0) return "";
  return h(
    "section",
    {},
    h("h2", {}, "Events"),
    h(
      "ol",
      { class: "events" },
      run.events.map((event) => h("li", {}, eventText(event).sentence)),
    ),
  );
}

/** Charts of the saves of a run: how long they took, and how large they are. */
export function saveCharts(run, along) {
  const saved = run.steps.filter((one) => one.nbytes !== null && positionOf(one, along) !== null);
  if (saved.length < 2) return [];
  const x = saved.map((one) => positionOf(one, along));
  const options = { ...axisOf(along), fromZero: true, height: 180 };
  const lines = [
    { name: "duration", x, y: saved.map((one) => one.seconds), colour: 0 },
    { name: "blocked", x, y: saved.map((one) => one.blocked), colour: 1 },
  ].filter((line) => line.y.some((value) => value !== null));
  const seconds = saved.map((one) => [one.step, formatSeconds(one.seconds), formatSeconds(one.blocked)]);
  const sizes = saved.map((one) => [one.step, formatSize(one.nbytes)]);
  return [
    lines.length > 0 &&
      lineChart("Duration of saves", "Seconds of each save, and those in which the training was blocked.", lines, {
        ...options,
        format: (value) => (value === 0 ? "0" : formatSeconds(value)),
        data: { headings: ["#step", "#duration", "#blocked"], rows: seconds },
      }),
    lineChart("Size", "Bytes of each step.", [{ name: "size", x, y: saved.map((one) => one.nbytes), colour: 2 }], {
      ...options,
      format: formatSize,
      data: { headings: ["#step", "#size"], rows: sizes },
    }),
  ].filter(Boolean);
}
