/** The differences between two trees: structure, and on demand the elements of each array. */

import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import { errorMessage, formatNumber, formatSize, formatWhole, h, plural, sizeCell, table } from "view/dom";

const OTHER = "//other";
const FEW_ARRAYS = 20; // below whose table the worst elements are still seen

/** Show the differences between the tree at the place of the page and another one. */
export async function showDifferences(_, page, body, signal) {
  const choices = await choicesOf(page);
  const other = choices.some((choice) => choice.place === page.other) ? page.other : choices.at(-1)?.place;
  if (other === undefined) {
    const left = isReport() && page.run !== null && "This report compares its newest step with the one before only.";
    body.replaceChildren(h("p", { class: "muted" }, left || "There is nothing to compare with."));
    return;
  }
  const select = h(
    "select",
    { change: (event) => page.go({ at: page.at, tab: "differences", other: event.target.value }) },
    choices.map((choice) => h("option", { value: choice.place, selected: choice.place === other }, choice.title)),
  );
  const result = h("div", {}, h("p", { class: "muted" }, "Comparing …"));
  body.replaceChildren(h("div", { class: "bar" }, h("label", {}, "Compare with", select)), result);
  try {
    const found = await loadOnce("differences", { at: page.at, other });
    if (!signal.aborted) result.replaceChildren(structure(found), await elements(found, page.at, other, signal));
  } catch (error) {
    if (!signal.aborted) result.replaceChildren(errorMessage(error));
  }
}

/** Return the places to compare with: the other checkpoint, or the other steps of the run, oldest first. */
async function choicesOf(page) {
  const inside = page.inRun.includes("/") ? page.inRun.slice(page.inRun.indexOf("/")) : "";
  if (page.view.other) {
    const part = page.run !== null ? inside : page.at ? `/${page.at}` : "";
    if (part && !page.view.other_has_parts) return []; // it has one tree, and this is one of several
    return [{ place: `${OTHER}${part}`, title: page.view.other }];
  }
  const run = await loadDocument("run", page.runParameters);
  const own = page.inRun.split("/")[0];
  const step = run.steps.find((one) => one.name === own)?.step ?? 0;
  const others = run.steps.filter((one) => one.name !== own && (one.state === "committed" || one.state === "foreign"));
  others.sort((a, b) => Math.abs(b.step - step) - Math.abs(a.step - step) || b.step - a.step);
  const places = others.map((one) => ({ place: `${page.within(one.name)}${inside}`, title: `step ${one.step}` }));
  if (!isReport()) return places;
  const known = await Promise.all(places.map(({ place }) => isInReport("differences", { at: page.at, other: place })));
  return places.filter((_, number) => known[number]);
}

function structure(found) {
  const rows = found.differences.map((one) => [
    h("span", { class: "name" }, one.path),
    one.kind.replaceAll("_", " "),
    one.a ?? "",
    one.b ?? "",
  ]);
  const more = found.count - found.differences.length;
  return h(
    "section",
    {},
    h(
      "h2",
      {},
      found.count === 0
        ? "The same structure, types and values outside arrays"
        : `${plural(found.count, "difference")} in structure, types, and values outside arrays`,
    ),
    h("p", { class: "muted" }, `A: ${found.a}, B: ${found.b}`),
    rows.length > 0 && table(["path", "what differs", "A", "B"], rows, "Differences"),
    more > 0 && h("p", { class: "muted" }, `and ${formatWhole(more)} more`),
  );
}

async function elements(found, at, other, signal) {
  const cells = new Map();
  const worst = h("div");
  const conclusion = h("p");
  const inReport = new Set();
  if (isReport())
    for (const { leaf } of found.pairs) if (await isInReport("difference", { at, other, leaf })) inReport.add(leaf);
  const rows = found.pairs.map((pair) => {
    const state = h("span", { class: "muted" }, "not compared");
    const [largest, norm] = [h("span"), h("span")];
    cells.set(pair.leaf, { state, largest, norm });
    const button = h("button", { type: "button", class: "small", click: () => compare(pair, true) }, "Compare");
    return [
      h("span", { class: "name" }, pair.path),
      sizeCell(pair.nbytes),
      largest,
      norm,
      state,
      !isReport() || inReport.has(pair.leaf) ? button : "",
    ];
  });
  const compare = async (pair, isShown) => {
    const { state, largest, norm } = cells.get(pair.leaf);
    state.replaceChildren("reading …");
    try {
      const one = await loadDocument("difference", { at, other, leaf: pair.leaf }, signal);
      const same = one.differing === 0;
      state.className = same ? "good" : "";
      state.replaceChildren(same ? "the same" : `${formatWhole(one.differing)} of ${formatWhole(one.elements)} differ`);
      largest.replaceChildren(same ? "" : formatNumber(one.largest));
      norm.replaceChildren(same ? "" : formatNumber(one.norm));
      if (isShown) worst.replaceChildren(worstElements(one));
      return one;
    } catch (error) {
      state.className = "bad";
      if (!signal.aborted) state.replaceChildren(error.message);
      throw error;
    }
  };
  const nbytes = found.pairs.reduce((sum, pair) => sum + pair.nbytes, 0);
  const more = found.arrays - found.pairs.length;
  const all = h(
    "button",
    { type: "button" },
    `Compare the elements of ${plural(found.pairs.length, "array")}, ${formatSize(nbytes)} of each`,
  );
  const status = h("span", { class: "muted", role: "status" });
  const compareAll = async () => {
    all.disabled = true;
    const compared = [];
    for (const pair of found.pairs) {
      if (signal.aborted) return;
      compared.push(await compare(pair, false).catch(() => null));
      status.replaceChildren(`${compared.length} of ${found.pairs.length}`);
    }
    all.disabled = false;
    conclusion.replaceChildren(...[conclude(compared)].flat());
  };
  all.addEventListener("click", compareAll);
  if (isReport()) {
    const shown = found.pairs.filter((pair) => inReport.has(pair.leaf));
    const compared = [];
    for (const pair of shown) compared.push(await compare(pair, false).catch(() => null));
    const changed = compared.filter((one) => one?.differing > 0);
    changed.sort((a, b) => Number(b.largest) - Number(a.largest));
    if (changed.length > 0) worst.replaceChildren(worstElements(changed[0]));
    if (compared.length > 0) conclusion.replaceChildren(...[conclude(compared)].flat());
  }
  return h(
    "section",
    {},
    h("h2", {}, "Elements of arrays"),
    found.pairs.length === 0
      ? h("p", { class: "muted" }, "No array is in both with the same shape.")
      : [
          isReport() ? "" : h("div", { class: "bar" }, all, status),
          conclusion,
          found.pairs.length > FEW_ARRAYS && worst,
          table(
            ["array", "~#size", "~#largest error", "#norm of difference", "elements", "compare"],
            rows,
            "Elements of arrays",
          ),
          found.pairs.length <= FEW_ARRAYS && worst,
          more > 0 &&
            h("p", { class: "muted" }, `and ${plural(more, "more array")}: compare them with \`ckptcore diff\``),
        ],
  );
}

/** Say in a sentence how many arrays differ, and which one most. */
function conclude(compared) {
  const read = compared.filter((one) => one !== null);
  const changed = read.filter((one) => one.differing > 0).sort((a, b) => Number(b.norm) - Number(a.norm));
  if (changed.length === 0) return `None of ${plural(read.length, "array")} differs.`;
  return [
    `${changed.length} of ${plural(read.length, "array")} differ, most of all `,
    h("span", { class: "name" }, changed[0].path),
    `: the difference has the norm ${formatNumber(changed[0].norm)}.`,
  ];
}

function worstElements(one) {
  if (one.worst.length === 0) return h("p", { class: "good" }, `${one.path}: the same`);
  const rows = one.worst.map((element) => [
    h("span", { class: "name" }, `[${element.index.join(", ")}]`),
    formatNumber(element.a),
    formatNumber(element.b),
    formatNumber(element.error),
  ]);
  return h(
    "section",
    {},
    h("h2", {}, `Worst elements of ${one.path}`),
    table(["index", "#A", "#B", "#error"], rows, "Worst elements"),
  );
}
