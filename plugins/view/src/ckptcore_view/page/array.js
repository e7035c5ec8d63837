/** The panel of one array: facts, statistics, elements, shards and chunks. */

import { drawBoxes } from "view/boxes";
import { elementsChart, histogramChart } from "view/charts";
import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import { errorMessage, factList, formatNumber, formatSize, formatWhole, h, plural, sizeCell, table } from "view/dom";

const READ_AT_ONCE = 64e6;
const LEFT_OUT =
  "This report was made without reading this array: choose it with --arrays, or use `ckptcore view` without --out.";
const NO_ELEMENTS = "Elements are in this report for its newest step only.";

/**
 * Show an array.
 * @param {string} at the place of its tree.
 * @param {number} leaf
 * @param {HTMLElement} panel
 * @param {AbortSignal} signal stops reads when the user looks at something else.
 */
export async function showArray(at, leaf, panel, signal) {
  panel.replaceChildren(h("p", { class: "muted" }, "Loading …"));
  try {
    const array = await loadOnce("array", { at, leaf });
    if (signal.aborted) return;
    const parts = [
      h("h2", { class: "name" }, array.path),
      factList([
        ["type", `${array.dtype}[${array.shape.join(", ")}]`],
        ["kind", array.kind === "array" ? null : array.kind],
        ["elements", formatWhole(array.elements)],
        ["size", formatSize(array.nbytes)],
        ["same bytes as", array.tied.join(", ")],
        ["framework", array.framework],
        ["sharding", array.sharded],
        ["saved by ranks", array.ranks?.join(", ")],
        ...Object.entries(array.notes),
      ]),
    ];
    const statistics = h("section");
    const elements = h("section");
    panel.replaceChildren(...parts, statistics, elements, shardsSection(array), chunksSection(array));
    await showStatistics(at, leaf, array, statistics, signal);
    await showElements(at, leaf, array, elements, signal);
  } catch (error) {
    if (!signal.aborted) panel.replaceChildren(errorMessage(error));
  }
}

async function showStatistics(at, leaf, array, section, signal) {
  const parameters = { at, leaf };
  if (isReport() && !(await isInReport("statistics", parameters))) {
    section.replaceChildren(h("p", { class: "muted" }, LEFT_OUT));
    return;
  }
  if (array.nbytes > READ_AT_ONCE && !isReport()) {
    const button = h("button", { type: "button" }, `Read all ${formatSize(array.nbytes)} for statistics`);
    section.replaceChildren(button);
    await new Promise((resolve) => button.addEventListener("click", resolve, { once: true, signal }));
  }
  section.replaceChildren(h("p", { class: "muted", role: "status" }, "Reading the array …"));
  try {
    const found = await loadDocument("statistics", parameters, signal);
    section.replaceChildren(h("h3", {}, "Statistics"), ...statisticsParts(found, array.dtype));
  } catch (error) {
    if (!signal.aborted) section.replaceChildren(errorMessage(error));
  }
}

function statisticsParts(found, dtype) {
  if (!found.numbers) return [h("p", { class: "muted" }, "The elements are not numbers.")];
  const odd = (count) => (count ? h("strong", { class: "warning" }, formatWhole(count)) : null);
  return [
    factList([
      ["of", dtype.startsWith("complex") ? "absolute values" : null],
      ["minimum", formatNumber(found.minimum)],
      ["maximum", formatNumber(found.maximum)],
      ["mean", formatNumber(found.mean)],
      ["standard deviation", formatNumber(found.deviation)],
      ["norm", formatNumber(found.norm)],
      ["zeros", formatWhole(found.zeros)],
      ["NaN", odd(found.nan)],
      ["infinite", odd(found.infinite)],
    ]),
    found.histogram && histogramChart(found.histogram),
  ].filter(Boolean);
}

async function showElements(at, leaf, array, section, signal) {
  if (array.elements === 0) return;
  if (isReport() && !(await isInReport("elements", { at, leaf }))) {
    if (await isInReport("statistics", { at, leaf })) section.replaceChildren(h("p", { class: "muted" }, NO_ELEMENTS));
    return;
  }
  const shown = h("div");
  const input = h("input", { "aria-label": "Index of the elements, as in NumPy", spellcheck: "false", class: "name" });
  const form = h(
    "form",
    { class: "bar" },
    h("label", { class: "grow" }, "Index", input),
    h("button", { type: "submit" }, "Show"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show({ at, leaf, index: input.value });
  });
  let newest = 0;
  const show = async (parameters) => {
    newest += 1;
    const number = newest;
    const before = input.value;
    try {
      const found = await loadDocument("elements", parameters, signal);
      if (number !== newest) return;
      if (input.value === before) input.value = found.index; // not while the user types another one
      const text = () =>
        table(found.rows[0]?.map((_, column) => `${column}`) ?? [], found.rows.slice(0, 200), "Elements");
      const isEmpty = found.rows.every((row) => row.length === 0);
      const nothing = () => h("p", { class: "muted" }, "The slice has no elements.");
      shown.replaceChildren(isEmpty ? nothing() : found.numbers ? elementsChart(found) : text());
    } catch (error) {
      if (!signal.aborted && number === newest) shown.replaceChildren(errorMessage(error));
    }
  };
  section.replaceChildren(...(isReport() ? [] : [form]), shown);
  await show({ at, leaf });
}

/** The shards, drawn if there is more than one. */
function shardsSection({ shape, sharding }) {
  if (!sharding || sharding.count < 2) return "";
  const { owner, count, shards } = sharding;
  const boxes = shards.map((shard, number) => {
    const more = shard.count > shard.owners.length ? ` and ${shard.count - shard.owners.length} more` : "";
    return { from: shard.from, to: shard.to, label: `${shard.owners.join(", ")}${more}`, colour: number };
  });
  const copies = shards[0]?.count ?? 0;
  const text = [plural(count, "shard"), copies > 1 && `each on ${plural(copies, owner)}`, owner && `labels: ${owner}`];
  return h(
    "section",
    {},
    h("h3", {}, "Shards"),
    h("p", { class: "muted" }, text.filter(Boolean).join(", ")),
    drawBoxes(`Shards of the job that saved it`, shape, boxes, owner || "shard"),
  );
}

function chunksSection({ shape, chunks }) {
  const heading = h("h3", {}, "Chunks");
  if (chunks.error) return h("section", {}, heading, h("p", { class: "muted" }, chunks.error));
  if (chunks.count === 0) return "";
  const numbers = new Map(chunks.objects.map(([key], number) => [key, number]));
  const boxes = chunks.chunks.map((chunk) => ({
    from: chunk.from,
    to: chunk.to,
    label: chunk.key || chunk.stored,
    colour: numbers.get(chunk.key) ?? 0,
  }));
  const rows = chunks.chunks
    .slice(0, 200)
    .map((chunk) => [
      h("span", { class: "name" }, `[${chunk.from.map((start, axis) => `${start}:${chunk.to[axis]}`).join(", ")}]`),
      chunk.stored,
      formatWhole(chunk.start),
      sizeCell(chunk.nbytes || null),
      h("span", { class: "name" }, chunk.key),
    ]);
  return h(
    "section",
    {},
    heading,
    h(
      "p",
      { class: "muted" },
      `${chunks.is_all ? "" : "more than "}${plural(chunks.count, "chunk")} in ${plural(chunks.objects.length, "object")}`,
    ),
    chunks.count > 1 && drawBoxes("Chunks, with a colour for each object", shape, boxes, "object"),
    h(
      "details",
      {},
      h("summary", {}, "Bytes"),
      table(["range", "stored", "#offset", "#size", "object"], rows, "Chunks"),
    ),
  );
}
