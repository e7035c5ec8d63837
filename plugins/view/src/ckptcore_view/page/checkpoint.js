/** The views of a checkpoint: its tree or checkpointables, files, timeline, differences and origin. */

import { showArray } from "view/array";
import { chart, plain } from "view/charts";
import { showDifferences } from "view/differences";
import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import { factList, formatNumber, formatSeconds, formatSize, formatTime, formatWhole, h, plural, table } from "view/dom";
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
    ...(found.kind === "tree" && (page.view.other || page.view.kind === "run") && { differences: "Differences" }),
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
    ["parameters", totals && formatWhole(totals.parameters)],
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

async function showTree(_, page, body, signal) {
  const rows = await loadOnce("tree", { at: page.at });
  if (signal.aborted) return;
  const panel = h("div");
  const back = h("button", { type: "button", class: "back" }, "← Tree");
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
  back.addEventListener("click", () => split.classList.remove("chosen"));
  panel.append(h("p", { class: "muted" }, "Choose an array to look at it."));
  split.append(h("div", { class: "left" }, tree.element), h("div", { class: "panel" }, back, panel));
  body.replaceChildren(split);
  tree.draw();
  if (page.leaf !== null) {
    tree.show(page.leaf);
    show(page.leaf);
  }
}

async function showParts(found, page, body) {
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
        formatSize(one.nbytes),
        one.processes === null || one.processes === undefined
          ? ""
          : `${plural(one.processes, "process", "processes")} separately`,
      ];
    }),
  );
  const headings = ["name", "layout", "#arrays", "#parameters", "#size", "saved by"];
  const reasons = Object.entries(found.unreadable).map(([name, reason]) =>
    h("p", { class: "warning" }, `${name} cannot be read: ${reason}`),
  );
  const deleted =
    found.deleted.length > 0 && h("p", { class: "muted" }, `Deleted or lost: ${found.deleted.join(", ")}`);
  body.replaceChildren(table(headings, rows, "Checkpointables"), ...reasons, deleted || "");
}

function showFiles({ files, problems: wrong }, _, body) {
  const known = new Map(wrong);
  const rows = files.files.map(([key, size, checksummed]) => [
    h("span", { class: "name" }, key),
    formatSize(size),
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
  const label = (event, number) => `${event.phase}${ranks.size > 1 ? ` (rank ${event.rank})` : ""}${"​".repeat(number)}`;
  const labels = timeline.map((event, number) => plain(label(event, number)));
  const speed = (event) => (event.nbytes && event.seconds ? `${formatSize(event.nbytes / event.seconds)}/s` : "");
  const trace = {
    type: "bar",
    orientation: "h",
    y: labels,
    base: timeline.map((event) => event.began * 1000),
    x: timeline.map((event) => Math.max(event.seconds * 1000, 0.001)),
    text: timeline.map((event) =>
      plain(
        [formatSeconds(event.seconds), formatSize(event.nbytes), speed(event), event.error].filter(Boolean).join(", "),
      ),
    ),
    textposition: "none",
    hovertemplate: "%{y}: %{text}<extra></extra>",
    marker: { color: timeline.map((event) => (event.error ? "#b0564a" : "#4c8dd6")) },
  };
  const layout = {
    height: 80 + labels.length * 24,
    yaxis: { autorange: "reversed", type: "category" },
    xaxis: { title: { text: "ms since the save began" } },
  };
  const rows = timeline.map((event) => [
    event.phase,
    event.rank,
    formatSeconds(event.began),
    formatSeconds(event.seconds),
    formatSize(event.nbytes),
    speed(event),
    event.error ?? "",
  ]);
  const data = { headings: ["phase", "#rank", "#began", "#took", "#bytes", "#speed", "error"], rows };
  body.replaceChildren(
    chart("Phases of the save", `${plural(timeline.length, "phase")} over time.`, [trace], layout, data),
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
