/** Charts as SVG: lines, bars and heat maps. Colours are those of the style sheet. Each has its data as a table. */

import { formatNumber, formatTime, h, svg, table } from "view/dom";

const SERIES = 8;
const MARGIN = { left: 56, right: 16, top: 22, bottom: 34 };
const HEAT_HEIGHT = 400;
const CHARACTER = 6.3; // pixels of text in a chart, about
const SECOND = 1000;
const TIME_STEPS = [1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 604800].map(
  (one) => one * SECOND,
);

let drawings = 0; // names of clipping areas are those of the page

/** Return the class of the n-th of several things, which gives it a colour. */
export function series(number) {
  return `series-${number % SERIES}`;
}

/**
 * Create a figure with lines.
 * @param {string} title
 * @param {string} description what the chart shows, for those who cannot see it.
 * @param {{name: string, x: number[], y: (number | null)[], colour?: number, faint?: boolean}[]} lines
 * @param {object} [options]
 * @param {"number" | "time"} [options.x] what the x axis has: numbers, or milliseconds since the epoch.
 * @param {string} [options.xTitle]
 * @param {(value: number) => string} [options.format] of the y axis.
 * @param {boolean} [options.log] a logarithmic y axis.
 * @param {boolean} [options.fromZero] the y axis begins at zero.
 * @param {{x: number, y: number, text: string, isBelow: boolean}[]} [options.marks] points with a text.
 * @param {{x: number, from?: number, text: string, number: number}[]} [options.events] vertical lines with a text.
 * @param {number} [options.height] in pixels.
 * @param {{headings: string[], rows: any[][]}} [options.data] the data as a table.
 */
export function lineChart(title, description, lines, options = {}) {
  const named = lines.filter((line) => !line.faint);
  const keys =
    named.length > 1 &&
    h(
      "ul",
      { class: "keys" },
      named.map((line) => h("li", {}, h("span", { class: `key ${series(line.colour ?? 0)}` }), line.name)),
    );
  let range = null;
  const reset = h("button", { type: "button", class: "small", hidden: true, click: () => zoom(null) }, "Reset zoom");
  const plot = responsive(`${title}. ${description}`, options.height ?? 240, (width, height, area) =>
    drawLines(area, lines, options, width, height, range, zoom),
  );
  function zoom(wanted) {
    range = wanted;
    reset.hidden = wanted === null;
    plot.redraw();
  }
  return figure(title, [keys, reset], plot.element, options.data);
}

/** Create a figure: a title with controls, a drawing, and its data as a table. */
export function figure(title, controls, drawing, data = undefined) {
  return h(
    "figure",
    {},
    h("div", { class: "head" }, h("figcaption", {}, title), controls),
    drawing,
    data && h("details", {}, h("summary", {}, "Data"), table(data.headings, data.rows, title)),
  );
}

/** Create an element that draws itself again if its width changes. */
function responsive(label, height, draw) {
  const area = h("div", { class: "chart plot-container", role: "img", "aria-label": label });
  area.style.height = `${height}px`;
  let last = 0;
  const redraw = () => {
    if (area.clientWidth) draw(area.clientWidth, height, area);
  };
  new ResizeObserver(() => {
    if (area.clientWidth === last) return;
    last = area.clientWidth;
    redraw();
  }).observe(area);
  return { element: area, redraw };
}

function drawLines(area, lines, options, width, height, range, zoom) {
  const isTime = options.x === "time";
  const isShown = (value) => Number.isFinite(value) && (!options.log || value > 0);
  const xs = lines.flatMap((line) => line.x.filter((_, at) => isShown(line.y[at])));
  const inRange = (x) => range === null || (x >= range[0] && x <= range[1]);
  const ys = lines.flatMap((line) => line.y.filter((value, at) => isShown(value) && inRange(line.x[at])));
  if (xs.length === 0) {
    area.replaceChildren(h("p", { class: "muted" }, options.log ? "No value is above zero." : "No value is a number."));
    return;
  }
  const x = scale(range ?? padded(...extent(xs), 0), MARGIN.left, width - MARGIN.right, { time: isTime });
  const [low, high] = extent(ys.length > 0 ? ys : [0, 1]);
  const marks = options.marks ?? []; // their texts need room
  const [below, above] = [true, false].map((side) => (marks.some((one) => one.isBelow === side) ? 0.16 : 0.06));
  const bottom = options.fromZero ? Math.min(0, low) : low;
  const yRange = options.log
    ? [low / (high / low) ** below / 1.05, high * (high / low) ** (above / 2) * 1.05]
    : [padded(bottom, high, below)[0], padded(bottom, high, above)[1]];
  const y = scale(yRange, height - MARGIN.bottom, MARGIN.top, { log: options.log });
  const format = options.format ?? formatNumber;
  drawings += 1;
  const clip = `clip-${drawings}`;
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  const selected = svg("rect", { class: "selection", y: MARGIN.top, height: y.size, visibility: "hidden" });
  const tip = h("div", { class: "tip", hidden: true });
  const drawing = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}` },
    svg("clipPath", { id: clip }, svg("rect", { x: MARGIN.left - 5, y: 0, width: x.size + 10, height })),
    axes(x, y, width, height, { format, isTime, title: options.xTitle }),
    drawEvents(options.events ?? [], x, height, width),
    selected,
    svg(
      "g",
      { "clip-path": `url(#${clip})` },
      lines.map((line) => drawLine(line, x, y, isShown)),
      marks.filter((one) => isShown(one.y) && inRange(one.x)).map((one) => drawMark(one, x, y, width)),
    ),
    cursor,
  );
  area.replaceChildren(drawing, tip);
  followPointer({ drawing, cursor, selected, tip, lines, x, width, format, isTime, isShown, zoom });
}

function drawLine(line, x, y, isShown) {
  let path = "";
  let isDown = false;
  line.x.forEach((at, number) => {
    const value = line.y[number];
    if (!isShown(value)) {
      isDown = false;
      return;
    }
    path += `${isDown ? "L" : "M"}${round(x.at(at))},${round(y.at(value))}`;
    isDown = true;
  });
  const colour = series(line.colour ?? 0);
  const points = line.x.length <= 60 && !line.faint;
  return svg(
    "g",
    { class: line.faint ? `line faint ${colour}` : `line ${colour}` },
    svg("path", { d: path }),
    points &&
      line.x.map((at, number) =>
        isShown(line.y[number]) ? svg("circle", { cx: x.at(at), cy: y.at(line.y[number]), r: 2.5 }) : null,
      ),
  );
}

/** A ring around a point, and its text above or below, where the lines leave room. */
function drawMark(mark, x, y, width) {
  const [left, top] = [x.at(mark.x), y.at(mark.y)];
  const half = (mark.text.length * CHARACTER) / 2 + 4;
  const middle = Math.min(Math.max(left, MARGIN.left + half), width - MARGIN.right - half);
  return svg(
    "g",
    { class: "mark" },
    svg("circle", { cx: left, cy: top, r: 6 }),
    svg("text", { x: middle, y: mark.isBelow ? top + 20 : top - 12, "text-anchor": "middle" }, mark.text),
  );
}

/** Lines from top to bottom, with their text above the plot, or only their number if texts would overlap. */
function drawEvents(events, x, height, width) {
  let free = MARGIN.left;
  const shown = events.filter((event) => event.x >= x.range[0] && event.x <= x.range[1]);
  return shown.map((event, number) => {
    const left = x.at(event.x);
    const next = number + 1 < shown.length ? x.at(shown[number + 1].x) : width;
    const length = event.text.length * CHARACTER + 8;
    const end = left + length < next ? "start" : left - length > free ? "end" : "";
    free = left + (end === "start" ? length : 12);
    return svg(
      "g",
      { class: "event" },
      event.from !== undefined && drawBand(Math.max(x.at(event.from), MARGIN.left), left, height),
      svg("line", { x1: left, x2: left, y1: MARGIN.top - 6, y2: height - MARGIN.bottom }),
      svg(
        "text",
        { x: end === "end" ? left + 3 : left - 3, y: MARGIN.top - 10, "text-anchor": end || "start" },
        end ? event.text : `${event.number}`,
      ),
    );
  });
}

function drawBand(left, right, height) {
  return svg("rect", { x: left, y: MARGIN.top, width: right - left, height: height - MARGIN.top - MARGIN.bottom });
}

function axes(x, y, width, height, { format, isTime, title }) {
  const bottom = height - MARGIN.bottom;
  const ticks = x.ticks(Math.max(2, Math.floor(width / (isTime ? 110 : 64))));
  return svg(
    "g",
    { class: "axes" },
    y.ticks(Math.max(2, Math.floor(y.size / 36))).map((value) => {
      const top = round(y.at(value));
      return [
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: top, y2: top }),
        svg(
          "text",
          { x: MARGIN.left - 8, y: top, "text-anchor": "end", "dominant-baseline": "central" },
          format(value),
        ),
      ];
    }),
    ticks.map((value) =>
      svg(
        "text",
        { x: x.at(value), y: bottom + 16, "text-anchor": "middle" },
        isTime ? timeText(value, x.range) : formatNumber(value),
      ),
    ),
    svg("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    title && svg("text", { class: "title", x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, title),
  );
}

function timeText(value, [first, last]) {
  const text = formatTime(value);
  return last - first > 2 * 86400 * SECOND ? text.slice(5, 10) : text.slice(11, last - first > 600 * SECOND ? 16 : 19);
}

/** Show the values at the pointer, and zoom into a range of x that is drawn with it. */
function followPointer({ drawing, cursor, selected, tip, lines, x, width, format, isTime, isShown, zoom }) {
  const all = [...new Set(lines.flatMap((line) => line.x.filter((_, at) => isShown(line.y[at]))))].sort(
    (a, b) => a - b,
  );
  let began = null;
  const position = (event) => event.clientX - drawing.getBoundingClientRect().left;
  drawing.addEventListener("pointermove", (event) => {
    const at = position(event);
    if (began !== null && Math.abs(at - began) > 6) {
      selected.setAttribute("x", Math.min(at, began));
      selected.setAttribute("width", Math.abs(at - began));
      selected.setAttribute("visibility", "visible");
    }
    const nearest = all.reduce((best, one) => (Math.abs(x.at(one) - at) < Math.abs(x.at(best) - at) ? one : best));
    const values = lines.map((line) => [line, line.y[line.x.indexOf(nearest)]]).filter(([, value]) => isShown(value));
    cursor.setAttribute("x1", x.at(nearest));
    cursor.setAttribute("x2", x.at(nearest));
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(
      h("strong", {}, isTime ? formatTime(nearest) : formatNumber(nearest)),
      ...values.map(([line, value]) =>
        h("div", {}, h("span", { class: `key ${series(line.colour ?? 0)}` }), `${line.name}: ${format(value)}`),
      ),
    );
    tip.hidden = false;
    const isLeft = x.at(nearest) > width / 2;
    tip.style.left = isLeft ? "" : `${x.at(nearest) + 10}px`;
    tip.style.right = isLeft ? `${width - x.at(nearest) + 10}px` : "";
  });
  drawing.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  });
  drawing.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") began = position(event);
  });
  drawing.addEventListener("pointerup", (event) => {
    const ended = position(event);
    if (began !== null && Math.abs(ended - began) > 6) zoom([began, ended].map(x.value).sort((a, b) => a - b));
    began = null;
  });
  drawing.addEventListener("dblclick", () => zoom(null));
}

/** A histogram of the elements of an array. */
export function histogramChart({ start, stop, counts }) {
  const width = (stop - start) / counts.length;
  const edges = counts.map((_, bin) => start + bin * width);
  const range = (bin) => `${formatNumber(edges[bin])} to ${formatNumber(edges[bin] + width)}`;
  const rows = counts.map((count, bin) => [range(bin), count.toLocaleString("en")]).filter((_, bin) => counts[bin]);
  const log = Math.max(...counts) > 200 * Math.min(...counts.filter((count) => count));
  const plot = responsive(
    `Histogram. ${counts.length} bins from ${formatNumber(start)} to ${formatNumber(stop)}.`,
    180,
    (pixels, height, area) => {
      const x = scale([start, stop], MARGIN.left, pixels - MARGIN.right, {});
      const most = Math.max(...counts);
      const y = scale(log ? [0.7, most * 1.2] : [0, most * 1.05], height - MARGIN.bottom, 8, { log });
      const base = height - MARGIN.bottom;
      area.replaceChildren(
        svg(
          "svg",
          { width: pixels, height, viewBox: `0 0 ${pixels} ${height}` },
          axes(x, y, pixels, height, { format: compact, title: log ? "elements, logarithmic" : "elements" }),
          svg(
            "g",
            { class: `bars ${series(0)}` },
            counts.map((count, bin) => {
              if (count === 0) return null;
              const [left, right, top] = [x.at(edges[bin]), x.at(edges[bin] + width), y.at(count)];
              return svg(
                "rect",
                {
                  x: round(left),
                  y: round(top),
                  width: Math.max(1, right - left - 0.5),
                  height: Math.max(0, base - top),
                },
                svg("title", {}, `${range(bin)}: ${count.toLocaleString("en")}`),
              );
            }),
          ),
        ),
      );
    },
  );
  return figure("Histogram", [], plot.element, { headings: ["elements from, to", "#count"], rows });
}

function compact(value) {
  return value >= 10000 ? `${formatNumber(value / 1000)}k` : formatNumber(value);
}

/** Elements of a slice: a heat map for two axes, a line for one. Complex elements are shown by their sizes. */
export function elementsChart({ index, shape, rows, complex }) {
  const title = `${complex ? "Absolute values of elements" : "Elements"} ${index}`;
  if (shape.length < 2) {
    const y = rows[0].map((element) => (typeof element === "number" ? element : null));
    const data = {
      headings: ["#position", "#element"],
      rows: rows[0].slice(0, 500).map((one, at) => [at, formatNumber(one)]),
    };
    const line = { name: "element", x: y.map((_, at) => at), y };
    return lineChart(title, "A line through the elements.", [line], { height: 180, xTitle: "position", data });
  }
  const numbers = rows.map((row) => row.map((element) => (typeof element === "number" ? element : null)));
  const largest = numbers.reduce(
    (most, row) => row.reduce((found, number) => Math.max(found, Math.abs(number ?? 0)), most),
    Number.MIN_VALUE,
  );
  const colours = `blue ${formatNumber(-largest)}, white 0, red ${formatNumber(largest)}`;
  const text = h(
    "p",
    { class: "muted", role: "status" },
    `${shape[0]} rows down, ${shape[1]} columns across; ${colours}`,
  );
  const picture = heatMap(numbers, largest, `${title}. ${shape[0]} rows and ${shape[1]} columns.`, (row, column) => {
    text.replaceChildren(`row ${row}, column ${column}: ${formatNumber(rows[row][column])}`);
  });
  const shown = rows.slice(0, 20).map((row, at) => [at, ...row.slice(0, 12).map(formatNumber)]);
  const headings = ["#row", ...rows[0].slice(0, 12).map((_, at) => `#${at}`)];
  return figure(title, [], h("div", { class: "plot-container" }, picture, text), { headings, rows: shown });
}

function heatMap(numbers, largest, label, look) {
  const [tall, wide] = [numbers.length, numbers[0].length];
  const canvas = h("canvas", { class: "heat", width: wide, height: tall, role: "img", "aria-label": label });
  const context = canvas.getContext("2d");
  const image = context.createImageData(wide, tall);
  numbers.forEach((row, down) => {
    row.forEach((number, across) => {
      const colour = number === null ? [0, 0, 0, 0] : diverging(number / largest);
      image.data.set(colour, (down * wide + across) * 4);
    });
  });
  context.putImageData(image, 0, 0);
  const ratio = wide / Math.min(Math.max(tall, wide / 4), wide * 4);
  canvas.style.aspectRatio = String(ratio);
  canvas.style.maxWidth = `${HEAT_HEIGHT * ratio}px`;
  canvas.addEventListener("pointermove", (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const across = Math.floor(((event.clientX - left) / width) * wide);
    const down = Math.floor(((event.clientY - top) / height) * tall);
    if (across >= 0 && across < wide && down >= 0 && down < tall) look(down, across);
  });
  return canvas;
}

/** Return red, green, blue and alpha for a number from -1 to 1: blue, white, red. */
function diverging(part) {
  const end = part < 0 ? [33, 102, 172] : [178, 24, 43];
  const share = Math.min(1, Math.abs(part));
  return [...end.map((value) => Math.round(247 + (value - 247) * share)), 255];
}

/** Map a range of values to pixels. */
function scale([first, last], start, stop, { log = false, time = false }) {
  const to = log ? Math.log : (value) => value;
  const from = log ? Math.exp : (value) => value;
  const [low, high] = [to(first), to(last)];
  const span = high - low || 1;
  return {
    range: [first, last],
    size: Math.abs(stop - start),
    at: (value) => start + ((to(value) - low) / span) * (stop - start),
    value: (pixel) => from(low + ((pixel - start) / (stop - start)) * span),
    ticks: (count) =>
      log ? logTicks(first, last, count) : time ? timeTicks(first, last, count) : ticks(first, last, count),
  };
}

function ticks(first, last, count) {
  const rough = (last - first) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999) ?? 10 * power;
  return multiples(first, last, step);
}

function timeTicks(first, last, count) {
  const rough = (last - first) / count;
  const step = TIME_STEPS.find((one) => one >= rough) ?? Math.ceil(rough / TIME_STEPS.at(-1)) * TIME_STEPS.at(-1);
  return multiples(first, last, step);
}

function multiples(first, last, step) {
  const found = [];
  for (
    let number = Math.ceil(first / step - 1e-9);
    number * step <= last + step * 1e-9 && found.length < 200;
    number += 1
  )
    found.push(Number((number * step).toPrecision(12)));
  return found;
}

/** Powers of ten, with their doubles and fives if there are few; or ticks of a linear axis within one power. */
function logTicks(first, last, count) {
  const [low, high] = [Math.floor(Math.log10(first)), Math.ceil(Math.log10(last))];
  const stride = Math.max(1, Math.ceil((high - low) / count));
  const factors = high - low <= count / 3 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = low; power <= high; power += stride)
    for (const factor of factors) {
      const value = Number(`${factor}e${power}`);
      if (value >= first && value <= last) found.push(value);
    }
  return found.length > 1 ? found : ticks(first, last, count).filter((value) => value > 0);
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function padded(low, high, share) {
  if (low === high) return [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  return [low - (high - low) * share, high + (high - low) * share];
}

function round(value) {
  return Math.round(value * 10) / 10;
}

/**
 * Return an exponential moving average, without the bias of its beginning.
 * @param {(number | null)[]} values
 * @param {number} weight of the values before, from 0 to below 1.
 */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}
