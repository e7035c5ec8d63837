/** The norms of arrays over the steps of a run. */

import { lineChart } from "view/charts";
import { isInReport, isReport, loadDocument, loadOnce } from "view/documents";
import { formatNumber, formatSize, formatWhole, h, plural } from "view/dom";
import { axisOf, eventsOn } from "view/metrics";
import { pathsOf, searchPaths } from "view/tree";

const MOST_FOUND = 50;
const READ_AT_ONCE = 64e6; // bytes that are read without asking again
const FIRST = 8; // arrays that are shown without a choice
const MODEL = /^(model|params|parameters|state|weights|state_dict)$/i;

/** Show the norms of a run, with a choice of arrays. */
export async function showNorms(page, body, signal) {
  const run = await loadDocument("run", page.runParameters, signal);
  const found = await treeOf(page, run);
  if (signal.aborted) return;
  if (found === null) {
    body.replaceChildren(h("p", { class: "muted" }, "No step with arrays was saved yet."));
    return;
  }
  const links =
    found.parts.length > 1 &&
    h(
      "p",
      {},
      "Checkpointable: ",
      found.parts.flatMap((part, number) => [
        number ? ", " : "",
        h(
          "a",
          {
            href: page.link({ at: page.at, tab: "norms", part }),
            class: "name",
            "aria-current": part === found.part ? "page" : null,
          },
          part,
        ),
      ]),
    );
  const norms = new Norms(run, found, signal);
  body.replaceChildren(links || "", ...norms.elements);
  if (isReport()) {
    norms.chosen = await norms.largest();
    await norms.addAll();
  }
  await norms.search("");
}

/** Create the section of the norms of the largest arrays: drawn in a report, and else read on demand. */
export async function normsSection(page, run, look, signal) {
  if (loadable(run).length < 2) return "";
  const more = h("a", { href: page.link({ at: page.at, tab: "norms", part: page.part }) }, "Choose other arrays");
  const section = h("section");
  if (isReport()) {
    const norms = await largestNorms(page, run, look, signal);
    if (norms === null) return "";
    await norms.addAll();
    section.append(norms.figure, norms.status, h("p", { class: "muted" }, more));
    return section;
  }
  const button = h("button", { type: "button" }, "Read the norms of the largest arrays");
  button.addEventListener(
    "click",
    async () => {
      button.disabled = true;
      const norms = await largestNorms(page, run, look, signal);
      if (norms === null) {
        section.replaceChildren(h("p", { class: "muted" }, "There is no array whose norms can be read."));
        return;
      }
      if (norms.nbytes > READ_AT_ONCE) {
        button.disabled = false;
        button.replaceChildren(`Read ${formatSize(norms.nbytes)} from ${plural(norms.steps.length, "step")}`);
        await new Promise((resolve) => button.addEventListener("click", resolve, { once: true, signal }));
      }
      section.replaceChildren(norms.figure, norms.status, h("p", { class: "muted" }, more));
      await norms.addAll();
    },
    { once: true },
  );
  section.append(h("div", { class: "bar" }, button, more));
  return section;
}

/** Return the norms of the largest arrays of a run, not read yet; null if there are none. */
async function largestNorms(page, run, look, signal) {
  const found = await treeOf(page, run).catch(() => null);
  if (found === null || signal.aborted) return null;
  const norms = new Norms(run, found, signal, look);
  norms.chosen = await norms.largest();
  norms.nbytes = norms.chosen.reduce((sum, row) => sum + found.rows.nbytes[row], 0) * found.steps.length;
  return norms.chosen.length > 0 ? norms : null;
}

function loadable(run) {
  return run.steps.filter((one) => one.state === "committed" || one.state === "foreign");
}

/** Return the newest tree of a run whose arrays have norms: that of a model, if there are several. */
async function treeOf(page, run) {
  const steps = loadable(run);
  const newest = steps.at(-1);
  if (newest === undefined) return null;
  const at = page.within(newest.name);
  const first = await loadOnce("checkpoint", { at });
  const trees = first.kind === "checkpointables" ? first.checkpointables.filter((one) => one.kind === "tree") : [];
  const parts = trees.filter((one) => one.places.length > 0).map((one) => one.places[0]);
  if (first.kind === "checkpointables" && parts.length === 0) return null;
  const part = parts.includes(page.part) ? page.part : (parts.find((one) => MODEL.test(one)) ?? parts[0] ?? "");
  const inside = part ? `/${part}` : "";
  const rows = await loadOnce("tree", { at: `${at}${inside}` });
  return {
    rows,
    steps,
    parts,
    part,
    of: `${at}${inside}`,
    places: steps.map((one) => `${page.within(one.name)}${inside}`),
  };
}

class Norms {
  constructor(run, { rows, steps, of, places }, signal, { along, log } = { along: "step" }) {
    Object.assign(this, { run, rows, steps, of, places, signal, along, log });
    this.lines = new Map();
    this.gaps = new Map();
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
    this.searches = 0;
    this.chosen = [];
  }

  /** Return the rows of the largest arrays whose norms can be shown. */
  async largest() {
    const { leaves, arrays, nbytes } = this.rows;
    const known = [];
    for (let row = 0; row < leaves.length; row += 1)
      if (leaves[row] >= 0 && arrays[row] > 0 && (await this.isKnown(leaves[row]))) known.push(row);
    return known.sort((a, b) => nbytes[b] - nbytes[a]).slice(0, FIRST);
  }

  /** Add the chosen arrays, one after the other. */
  async addAll() {
    for (const row of this.chosen) await this.add(row);
  }

  async isKnown(leaf) {
    return !isReport() || isInReport("statistics", { at: this.places[0], leaf, of: this.of });
  }

  async search(text) {
    this.searches += 1;
    const number = this.searches;
    const wanted = searchPaths(this.rows, text);
    const found = [];
    for (let row = 0; row < this.paths.length && found.length < MOST_FOUND; row += 1) {
      const isArray = this.rows.leaves[row] >= 0 && this.rows.arrays[row] > 0;
      if (isArray && wanted(row) && (await this.isKnown(this.rows.leaves[row]))) found.push(this.choice(row));
    }
    if (number === this.searches) this.list.replaceChildren(...found);
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

  async add(row) {
    const leaf = this.rows.leaves[row];
    const norms = [];
    const failed = [];
    this.lines.set(leaf, { name: this.paths[row], norms });
    for (const [number, step] of this.steps.entries()) {
      if (this.signal.aborted || !this.lines.has(leaf)) return;
      this.status.replaceChildren(`Reading ${this.paths[row]} of step ${step.step} …`);
      const parameters = { at: this.places[number], leaf, of: this.of };
      const found = await loadDocument("statistics", parameters, this.signal).catch((error) => {
        failed.push(`step ${step.step}: ${error.message}`);
      });
      const odd = (found?.nan ?? 0) + (found?.infinite ?? 0);
      if (odd > 0) failed.push(`step ${step.step}: ${plural(odd, "element is", "elements are")} NaN or infinite`);
      norms.push(typeof found?.norm === "number" && odd === 0 ? found.norm : null);
    }
    const more = failed.length > 1 ? ` (and ${formatWhole(failed.length - 1)} more)` : "";
    if (failed.length > 0) this.gaps.set(leaf, `${this.paths[row]} has gaps: ${failed[0]}${more}`);
    this.status.replaceChildren([...this.gaps.values()].join(". "));
    this.draw();
  }

  remove(leaf) {
    this.lines.delete(leaf);
    this.gaps.delete(leaf);
    this.draw();
  }

  draw() {
    const isTime = this.along === "time";
    const x = this.steps.map((one) => (isTime ? Date.parse(one.created ?? "") : one.step));
    const shown = [...this.lines.values()];
    const lines = shown.map(({ name, norms }, colour) => ({ name, x, y: norms, colour }));
    const rows = this.steps.map((one, at) => [one.step, ...shown.map(({ norms }) => formatNumber(norms[at]))]);
    this.figure.replaceChildren(
      lines.length > 0
        ? lineChart("Norms over steps", plural(lines.length, "line"), lines, {
            ...axisOf(this.along),
            log: this.log,
            events: eventsOn(this.run, this.along),
            height: 260,
            data: { headings: ["#step", ...shown.map(({ name }) => `#${name}`)], rows },
          })
        : "",
    );
  }
}
