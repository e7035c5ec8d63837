/** The views of a checkpoint: its tree or checkpointables, files, timeline, differences and origin. */

import { showArray } from "view/array";
import { figure } from "view/charts";
import { showDifferences } from "view/differences";
import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import {
  cell,
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
import { summaryParts } from "view/summary";
import { Tree } from "view/tree";

/**
 * Show a checkpoint.
 * @param {{view: object, at: string, tab: string, leaf: number | null, link: Function, go: Function}} page
 * @param {HTMLElement} main
 * @param {AbortSignal} signal
 */
export async function showCheckpoint(page, main, signal) {
  const found = await loadDocument("checkpoint", { at: page.at }, signal);
  const tabs = {
    ...(found.kind === "tree" && { tree: "Tree" }),
    ...(found.kind === "checkpointables" && { parts: "Checkpointables" }),
    ...(found.files?.count > 0 && { files: "Files" }),
    ...(found.timeline.length > 0 && { timeline: "Timeline" }),
    ...(found.kind === "tree" && (page.view.other || page.run !== null) && { differences: "Differences" }),
    origin: "Origin",
  };
  const tab = Object.hasOwn(tabs, page.tab) ? page.tab : Object.keys(tabs)[0];
  const body = h("div");
  main.replaceChildren(
    h("h1", { class: "name" }, found.location),
    summary(found),
    problems(found),
    h(
      "nav",
      { class: "tabs", "aria-label": "Views of the checkpoint" },
      Object.entries(tabs).map(([name, title]) =>
        h("a", { href: page.link({ at: page.at, tab: name }), "aria-current": name === tab ? "page" : null }, title),
      ),
    ),
    body,
  );
  const show = {
    tree: showTree,
    parts: showParts,
    files: showFiles,
    timeline: showTimeline,
    differences: showDifferences,
    origin: showOrigin,
  };
  await show[tab](found, page, body, signal);
}

function summary(found) {
  const totals = found.totals;
  return factList([
    ["layout", found.layout],
    ["written by", found.writer],
    ["created", formatTime(found.created)],
    ["arrays", totals && formatWhole(totals.arrays)],
    ["values", totals?.values ? formatWhole(totals.values) : null],
    ["parameters", totals && elementsOf(found, "parameters")],
    ["optimizer states", totals && elementsOf(found, "optimizer")],
    ["other elements", totals && elementsOf(found, "other")],
    ["size", totals ? formatSize(totals.nbytes) : null],
    [
      "files",
      found.files?.count
        ? `${formatWhole(found.files.count)}${found.files.nbytes === null ? "" : `, ${formatSize(found.files.nbytes)}`}`
        : null,
    ],
    ...Object.entries(found.metrics).map(([name, value]) => [name, formatNumber(value)]),
  ]);
}

function elementsOf({ summary: { roles } }, role) {
  return roles[role] ? formatWhole(roles[role][1]) : null;
}

function problems({ problems: found, problem_count: count }) {
  if (count === 0) return "";
  return h(
    "div",
    { class: "message bad", role: "alert" },
    h("strong", {}, `Damaged: ${plural(count, "problem")}. `),
    "Run `ckptcore verify` for details.",
    h(
      "ul",
      {},
      found.slice(0, 10).map(([, message]) => h("li", {}, message)),
    ),
  );
}

async function showTree(found, page, body, signal) {
  const rows = await loadOnce("tree", { at: page.at });
  if (signal.aborted) return;
  const panel = h("div");
  const back = h("button", { type: "button", class: "small back" }, "← Tree and summary");
  const split = h("div", { class: "split" });
  let looking = new AbortController();
  signal.addEventListener("abort", () => looking.abort());
  const show = (leaf) => {
    looking.abort();
    looking = new AbortController();
    split.classList.add("chosen");
    showArray(page.at, leaf, panel, looking.signal);
  };
  const tree = new Tree(rows, (row) => {
    const leaf = rows.leaves[row];
    if (row in rows.values) return;
    page.replace({ at: page.at, tab: "tree", leaf });
    show(leaf);
  });
  back.addEventListener("click", () => {
    looking.abort();
    split.classList.remove("chosen");
    tree.unchoose();
    page.replace({ at: page.at, tab: "tree" });
    panel.replaceChildren(...summaryParts(found, page, signal));
  });
  panel.append(h("p", { class: "muted" }, "Choose an array to look at it."), ...summaryParts(found, page, signal));
  split.append(h("div", { class: "left" }, tree.element), h("div", { class: "panel" }, back, panel));
  body.replaceChildren(split);
  tree.draw();
  if (page.leaf !== null) {
    tree.show(page.leaf);
    show(page.leaf);
  }
}

async function showParts(found, page, body, signal) {
  const rows = await Promise.all(
    found.checkpointables.map(async (one) => {
      const places = one.places.map((place) => (page.at ? `${page.at}/${place}` : place));
      const known = await Promise.all(places.map((place) => !isReport() || isInReport("checkpoint", { at: place })));
      const links = places.map((place, number) => {
        // The directory of a process is NAME.rank_N.
        const rank = /\.rank_(\d+)$/.exec(one.places[number].slice(one.name.length))?.[1];
        const name = rank === undefined ? one.name : `${number ? "" : `${one.name}, `}rank ${rank}`;
        return known[number] ? h("a", { href: page.link({ at: place }) }, name) : name;
      });
      return [
        h(
          "span",
          { class: "name" },
          links.flatMap((link, number) => (number ? [", ", link] : [link])),
        ),
        one.kind === "files" ? "files" : one.layout,
        one.kind === "files" ? "" : formatWhole(one.arrays),
        one.kind === "files" ? "" : formatWhole(one.parameters),
        sizeCell(one.nbytes),
        one.processes === null || one.processes === undefined
          ? ""
          : `${plural(one.processes, "process", "processes")} separately`,
      ];
    }),
  );
  const headings = ["name", "layout", "~#arrays", "~#elements", "#size", "saved by"];
  const reasons = Object.entries(found.unreadable).map(([name, reason]) =>
    h("p", { class: "warning" }, `${name} cannot be read: ${reason}`),
  );
  const deleted =
    found.deleted.length > 0 && h("p", { class: "muted" }, `Deleted or lost: ${found.deleted.join(", ")}`);
  const parts = h("div", { class: "summary" }, summaryParts(found, page, signal));
  body.replaceChildren(table(headings, rows, "Checkpointables"), ...reasons, deleted || "", parts);
}

function showFiles({ files, problems: wrong }, _, body) {
  const known = new Map(wrong);
  const rows = files.files.map(([key, size, checksummed]) => [
    h("span", { class: "name" }, key),
    sizeCell(size),
    size === null ? "" : checksummed ? "yes" : "no",
    known.has(key) ? h("span", { class: "bad" }, known.get(key)) : "",
  ]);
  const missing = files.count - files.files.length;
  body.replaceChildren(
    table(["file", "#size", "checksums", "problem"], rows, "Files"),
    missing > 0 ? h("p", { class: "muted" }, `and ${plural(missing, "more file")}`) : "",
  );
}

function showTimeline({ timeline }, _, body) {
  const ranks = new Set(timeline.map((event) => event.rank));
  const speed = (event) => (event.nbytes && event.seconds ? `${formatSize(event.nbytes / event.seconds)}/s` : "");
  const end = Math.max(...timeline.map((event) => event.began + event.seconds), 1e-9);
  const bars = timeline.map((event) => {
    const bar = h("span", { class: event.error ? "bar-part bad-part" : "bar-part" });
    bar.style.marginLeft = `${(event.began / end) * 100}%`;
    bar.style.width = `${Math.max((event.seconds / end) * 100, 0.3)}%`;
    const text = [formatSeconds(event.seconds), formatSize(event.nbytes), speed(event), event.error].filter(Boolean);
    return h(
      "li",
      {},
      h("span", { class: "label" }, ranks.size > 1 ? `${event.phase} (rank ${event.rank})` : event.phase),
      h("span", { class: "track" }, bar),
      h("span", { class: "number" }, text.join(", ")),
    );
  });
  const rows = timeline.map((event) => [
    event.phase,
    event.rank,
    cell(formatSeconds(event.began), event.began),
    cell(formatSeconds(event.seconds), event.seconds),
    sizeCell(event.nbytes),
    speed(event),
    event.error ?? "",
  ]);
  const data = { headings: ["phase", "#rank", "#began", "#took", "#bytes", "speed", "error"], rows };
  const drawing = h("ul", { class: "phases plot-container" }, bars);
  body.replaceChildren(
    figure("Phases of the save", h("span", { class: "muted" }, `${formatSeconds(end)} in all`), drawing, data),
  );
}

function showOrigin(found, _, body) {
  body.replaceChildren(
    factList([
      ["location", found.location],
      ["written by", found.writer],
      ["created", found.created],
      ["save id", found.save_id],
      ["digest", found.digest && h("code", {}, found.digest)],
      ["bases", found.bases?.join(", ")],
    ]),
    found.custom ? h("section", {}, h("h2", {}, "Metadata"), h("pre", { tabindex: 0 }, found.custom)) : "",
  );
}
