/** Panels of a run, which other distributions add: text, stacked bars and a table, from data alone. */

import { figure, series } from "view/charts";
import { formatSeconds, h, table } from "view/dom";

/**
 * Create the sections of panels. Members that are missing are left out.
 * @param {{title: string, error?: string, lines?: string[], bars?: object, table?: object}[]} panels
 */
export function panelSections(panels) {
  return panels.map((panel) =>
    h(
      "section",
      {},
      h("h2", {}, panel.title),
      panel.error && h("p", { class: "warning" }, panel.error),
      (panel.lines ?? []).map((line) => h("p", {}, line)),
      panel.bars && stackedBars(panel.bars),
      panel.table && table(panel.table.headings, panel.table.rows, panel.title),
    ),
  );
}

/**
 * Create a figure with one bar for each row. Its parts are seconds, and the longest bar has the whole width.
 * @param {{title: string, parts: string[], rows: {name: string, seconds: number[]}[]}} bars
 */
function stackedBars({ title, parts, rows }) {
  const sum = (row) => row.seconds.reduce((total, one) => total + one, 0);
  const longest = Math.max(...rows.map(sum), 1e-9);
  const keys = h(
    "ul",
    { class: "keys" },
    parts.map((part, number) => h("li", {}, h("span", { class: `key ${series(number)}` }), part)),
  );
  const drawing = h(
    "ul",
    { class: "phases stacked plot-container" },
    rows.map((row) =>
      h(
        "li",
        {},
        h("span", { class: "label" }, row.name),
        h(
          "span",
          { class: "track" },
          row.seconds.map((seconds, number) => {
            const text = `${parts[number]}: ${formatSeconds(seconds)}`;
            const bar = h("span", { class: `bar-part ${series(number)}`, title: text });
            bar.style.width = `${(seconds / longest) * 100}%`;
            return bar;
          }),
        ),
        h("span", { class: "number" }, formatSeconds(sum(row))),
      ),
    ),
  );
  const data = {
    headings: ["", ...parts.map((part) => `#${part}`)],
    rows: rows.map((row) => [row.name, ...row.seconds.map(formatSeconds)]),
  };
  return figure(title, keys, drawing, data);
}
