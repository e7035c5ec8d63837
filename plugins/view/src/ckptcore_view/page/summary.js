/** The summary of a checkpoint: roles, dtypes, the largest arrays, and whether there are NaN and Inf. */

import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import { errorMessage, formatSize, formatWhole, h, plural, sizeCell, table } from "view/dom";
import { pathsOf } from "view/tree";

const ROLES = { parameters: "parameters", optimizer: "optimizer states", other: "other arrays" };
const MOST_NAMED = 5;

/** Create the sections of the summary of a checkpoint. */
export function summaryParts(found, page, signal) {
  const { summary } = found;
  if (!summary || summary.largest.length === 0) return [];
  const totals = (counts) => [formatWhole(counts[0]), formatWhole(counts[1]), sizeCell(counts[2])];
  const roles = Object.keys(ROLES).filter((role) => summary.roles[role]);
  const section = (title, ...content) => h("section", {}, h("h2", {}, title), ...content);
  const counts = ["#arrays", "#elements", "#size"];
  const contents = roles.map((role) => [ROLES[role], ...totals(summary.roles[role])]);
  const dtypes = Object.entries(summary.dtypes)
    .sort(([, a], [, b]) => b[2] - a[2])
    .map(([dtype, found]) => [h("span", { class: "name" }, dtype), ...totals(found)]);
  const largest = summary.largest.map((array) => largestRow(array, found, page));
  return [
    h(
      "div",
      {},
      section("Contents", table(["role", ...counts], contents, "Contents")),
      section("Types", table(["dtype", ...counts], dtypes, "Types")),
      section("NaN and Inf", oddNumbers(found, page, signal)),
    ),
    section("Largest arrays", table(["array", "~type", "#size"], largest, "Largest arrays")),
  ];
}

function largestRow(array, found, page) {
  const at = [page.at, array.place].filter(Boolean).join("/");
  const text = array.part ? `${array.part}: ${array.path}` : array.path;
  const isOpen = found.kind === "tree" || array.place !== "";
  return [
    isOpen
      ? h("a", { class: "name", href: page.link({ at, tab: "tree", leaf: array.leaf }) }, text)
      : h("span", { class: "name" }, text),
    h("span", { class: "name" }, array.type),
    sizeCell(array.nbytes),
  ];
}

/** How many elements are NaN or infinite: known in a report that has read the arrays, else read on demand. */
function oddNumbers(found, page, signal) {
  const places =
    found.kind === "tree"
      ? [page.at]
      : found.checkpointables
          .filter((one) => one.kind === "tree" && one.places.length > 0)
          .map((one) => [page.at, one.places[0]].filter(Boolean).join("/"));
  const shown = h("p", { class: "muted", role: "status" });
  const read = async () => {
    try {
      shown.replaceChildren(...(await countOdd(places, shown, signal)));
    } catch (error) {
      if (!signal.aborted) shown.replaceChildren(errorMessage(error));
    }
  };
  if (isReport()) {
    read();
    return shown;
  }
  const nbytes = Object.values(found.summary.roles).reduce((sum, counts) => sum + counts[2], 0);
  const button = h("button", { type: "button" }, `Read all arrays, ${formatSize(nbytes)}`);
  button.addEventListener("click", () => {
    button.disabled = true;
    read();
  });
  shown.append("Not known: no array was read.");
  return h("div", {}, shown, button);
}

async function countOdd(places, status, signal) {
  let arrays = 0;
  let [unread, failed] = [0, 0];
  const odd = [];
  for (const at of places) {
    const rows = await loadOnce("tree", { at });
    for (const [row, leaf] of rows.leaves.entries()) {
      if (leaf < 0 || rows.arrays[row] === 0) continue;
      if (isReport() && !(await isInReport("statistics", { at, leaf }))) {
        unread += 1;
        continue;
      }
      if (!isReport()) status.replaceChildren(`Reading ${pathsOf(rows)[row]} …`);
      const one = await loadDocument("statistics", { at, leaf }, signal).catch(() => null);
      if (one === null) {
        failed += 1;
        continue;
      }
      arrays += 1;
      if (one.nan || one.infinite)
        odd.push(`${pathsOf(rows)[row]}: ${formatWhole(one.nan)} NaN, ${formatWhole(one.infinite)} Inf`);
    }
  }
  const rest = [
    unread > 0 && `; ${plural(unread, "array")} not read`,
    failed > 0 && `; ${plural(failed, "array")} cannot be read`,
  ]
    .filter(Boolean)
    .join("");
  if (arrays === 0) return [failed ? "Not known: no array can be read." : "Not known: the report has read no array."];
  if (odd.length === 0) return [h("span", { class: "good" }, `None in ${plural(arrays, "array")}`), `${rest}.`];
  const more = odd.length > MOST_NAMED ? ` and in ${plural(odd.length - MOST_NAMED, "more array")}` : "";
  return [h("strong", { class: "bad" }, odd.slice(0, MOST_NAMED).join("; ")), `${more}${rest}.`];
}
