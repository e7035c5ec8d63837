/** Charts, drawn by plotly.js, which is loaded with the first one. Each has its data as a table, for everyone. */

import { decompress, isReport } from "view/documents";
import { errorMessage, formatNumber, h, table } from "view/dom";

const COLOURS = ["#4c8dd6", "#d97b29", "#3f9e63", "#c65b8e", "#8a6fd1", "#9a7d2e", "#2f9aa0", "#b0564a"];
const SETTINGS = {
  displaylogo: false,
  responsive: true,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // the default ones can send data to a server
};

const drawn = new Set();
let loading = null;

/** Return a colour that is readable below dark text, for the n-th of several things. */
export function colour(number) {
  return COLOURS[number % COLOURS.length];
}

/**
 * Create a figure with a chart.
 * @param {string} title
 * @param {string} description what the chart shows, for those who cannot see it.
 * @param {object[]} traces of plotly.js.
 * @param {object} layout of plotly.js.
 * @param {{headings: string[], rows: any[][]}} [data] the data as a table.
 */
export function chart(title, description, traces, layout, data = undefined) {
  const area = h("div", { class: "chart", role: "group", "aria-label": `${title}. ${description}` });
  area.style.minHeight = `${layout.height ?? 240}px`;
  draw(area, traces, layout).catch((error) => area.replaceChildren(errorMessage(error)));
  return h(
    "figure",
    {},
    h("figcaption", {}, title),
    area,
    data && h("details", {}, h("summary", {}, "Data"), table(data.headings, data.rows, title)),
  );
}

/** Draw all charts again, in the present colours. */
export function redrawCharts() {
  for (const one of drawn) {
    if (one.area.isConnected) globalThis.Plotly.react(one.area, one.traces, styled(one.layout), SETTINGS);
    else drawn.delete(one);
  }
}

async function draw(area, traces, layout) {
  loading ??= loadLibrary();
  await loading;
  await new Promise(requestAnimationFrame); // the element is then in the page, and has a width
  await globalThis.Plotly.newPlot(area, traces, styled(layout), SETTINGS);
  drawn.add({ area, traces, layout });
}

async function loadLibrary() {
  const script = document.createElement("script");
  if (isReport()) {
    script.textContent = await decompress("charts");
    document.head.append(script);
    return;
  }
  script.src = "plotly.min.js";
  await new Promise((resolve, reject) => {
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("The charting library cannot be loaded.")));
    document.head.append(script);
  });
}

function styled(layout) {
  const text = present("--text");
  const axis = { gridcolor: present("--border"), zerolinecolor: present("--border"), linecolor: present("--border") };
  return {
    height: 240,
    margin: { l: 64, r: 16, t: 8, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: present("--surface"), bordercolor: present("--border"), font: { color: text } },
    legend: { orientation: "h", y: 1.12 },
    colorway: COLOURS,
    ...layout,
    xaxis: { ...axis, automargin: true, ...layout.xaxis },
    yaxis: { ...axis, automargin: true, ...layout.yaxis },
    ...(layout.yaxis2 && { yaxis2: { ...axis, automargin: true, ...layout.yaxis2 } }),
  };
}

/** Return the present value of a colour of the style sheet. */
function present(name) {
  const probe = h("span", { style: `color: var(${name})` });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Names come from a checkpoint, and plotly.js reads some HTML in text: escape it. */
export function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** A histogram of the elements of an array. */
export function histogramChart({ start, stop, counts }) {
  const width = (stop - start) / counts.length;
  const edges = counts.map((_, bin) => start + bin * width);
  const range = (bin) => `${formatNumber(edges[bin])} to ${formatNumber(edges[bin] + width)}`;
  const trace = {
    type: "bar",
    x: edges.map((edge) => edge + width / 2),
    y: counts,
    width: counts.map(() => width),
    text: counts.map((_, bin) => range(bin)),
    textposition: "none",
    hovertemplate: "%{text}: %{y:,}<extra></extra>",
    marker: { color: COLOURS[0] },
  };
  const rows = counts.map((count, bin) => [range(bin), count.toLocaleString("en")]).filter((_, bin) => counts[bin]);
  const logarithmic = Math.max(...counts) > 200 * Math.min(...counts.filter((count) => count));
  return chart(
    "Histogram",
    `${counts.length} bins from ${formatNumber(start)} to ${formatNumber(stop)}.`,
    [trace],
    {
      bargap: 0,
      xaxis: { title: { text: "element" } },
      yaxis: { title: { text: "count" }, ...(logarithmic && { type: "log" }) },
    },
    { headings: ["elements from, to", "#count"], rows },
  );
}

/** Elements of a slice: a heat map for two axes, a line for one. Complex elements are shown by their sizes. */
export function elementsChart({ index, shape, rows, complex }) {
  const numbers = rows.map((row) => row.map((element) => (typeof element === "number" ? element : null)));
  const title = `${complex ? "Absolute values of elements" : "Elements"} ${index}`;
  if (shape.length < 2) {
    const trace = { type: "scatter", mode: numbers[0].length > 60 ? "lines" : "lines+markers", y: numbers[0] };
    const layout = { xaxis: { title: { text: "position" } }, showlegend: false };
    const data = {
      headings: ["#position", "#element"],
      rows: rows[0].slice(0, 500).map((one, at) => [at, formatNumber(one)]),
    };
    return chart(title, "A line through the elements.", [trace], layout, data);
  }
  const largest = Math.max(...numbers.flat().map((number) => Math.abs(number ?? 0)), Number.MIN_VALUE);
  const trace = {
    type: "heatmap",
    z: numbers,
    zmin: -largest,
    zmax: largest,
    colorscale: [
      [0, "#2166ac"],
      [0.5, "#f7f7f7"],
      [1, "#b2182b"],
    ],
    colorbar: { thickness: 12, outlinewidth: 0 },
    hovertemplate: "row %{y}, column %{x}: %{z:.6g}<extra></extra>",
    hoverongaps: false,
  };
  const layout = {
    height: Math.max(200, Math.min(460, 80 + shape[0] * 8)),
    yaxis: { autorange: "reversed", title: { text: "row" } },
    xaxis: { title: { text: "column" } },
  };
  const shown = rows.slice(0, 20).map((row, at) => [at, ...row.slice(0, 12).map(formatNumber)]);
  const headings = ["#row", ...rows[0].slice(0, 12).map((_, at) => `#${at}`)];
  return chart(title, `${shape[0]} rows and ${shape[1]} columns, blue below zero, red above.`, [trace], layout, {
    headings,
    rows: shown,
  });
}
