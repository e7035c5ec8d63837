/** Boxes of an array, such as shards and chunks, drawn to scale along the two axes that have the most of them. */

import { series } from "view/charts";
import { h, svg, table } from "view/dom";

const WIDTH = 600;
const MOST_ROWS = 200;

/**
 * Create a drawing.
 * @param {string} title
 * @param {number[]} shape of the array, in elements.
 * @param {{from: number[], to: number[], label: string, colour: number}[]} boxes
 * @param {string} heading of the labels in the table.
 */
export function drawBoxes(title, shape, boxes, heading) {
  const [rows, columns] = chosenAxes(shape, boxes);
  const slab = boxes.filter((box) =>
    shape.every((_, axis) => axis === rows || axis === columns || box.from[axis] === 0),
  );
  const tall = rows === null ? 1 : shape[rows] || 1;
  const wide = columns === null ? 1 : shape[columns] || 1;
  const height = rows === null ? 48 : Math.round(WIDTH * Math.min(0.5, Math.max(0.12, tall / wide)));
  const drawing = svg(
    "svg",
    {
      class: "boxes",
      viewBox: `0 0 ${WIDTH} ${height}`,
      role: "img",
      "aria-label": `${title}: ${boxes.length} boxes.`,
    },
    slab.map((box) => {
      const [left, right] = span(box, columns, wide, WIDTH);
      const [top, bottom] = span(box, rows, tall, height);
      const fits = right - left > box.label.length * 7 + 4 && bottom - top > 14;
      return svg(
        "g",
        {},
        svg("rect", { x: left, y: top, width: right - left, height: bottom - top, class: series(box.colour) }),
        svg("title", {}, `${rangeText(box)}: ${box.label}`),
        fits && svg("text", { x: (left + right) / 2, y: (top + bottom) / 2 }, box.label),
      );
    }),
  );
  const data = boxes.slice(0, MOST_ROWS).map((box) => [rangeText(box), box.label]);
  return h(
    "figure",
    {},
    h("figcaption", {}, title),
    drawing,
    h("p", { class: "muted" }, axesText(rows, columns, slab.length, boxes.length)),
    h("details", {}, h("summary", {}, "Data"), table(["range", heading], data, title)),
  );
}

function span(box, axis, extent, pixels) {
  if (axis === null) return [0, pixels];
  return [(Math.min(box.from[axis], extent) / extent) * pixels, (Math.min(box.to[axis], extent) / extent) * pixels];
}

/** Return the two axes with the most different boxes, the first one as rows. An array of one axis has columns only. */
function chosenAxes(shape, boxes) {
  if (shape.length === 0) return [null, null];
  if (shape.length === 1) return [null, 0];
  const parts = shape.map((_, axis) => new Set(boxes.map((box) => box.from[axis])).size);
  const order = shape.map((_, axis) => axis).sort((a, b) => parts[b] - parts[a] || b - a);
  return order.slice(0, 2).sort((a, b) => a - b);
}

function axesText(rows, columns, drawn, all) {
  const axes = [rows === null ? null : `down: axis ${rows}`, columns === null ? null : `across: axis ${columns}`];
  const text = axes.filter((axis) => axis !== null).join(", ");
  return drawn === all ? text : `${text}; ${drawn} of ${all} boxes, those at index 0 of the other axes`;
}

function rangeText(box) {
  return `[${box.from.map((start, axis) => `${start}:${box.to[axis]}`).join(", ")}]`;
}
