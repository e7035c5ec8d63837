/** Elements of the page, and numbers as text. Names of a checkpoint may be hostile: they only become text nodes. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an HTML element.
 * @param {string} tag
 * @param {Record<string, any>} [properties] attributes; functions are listeners of events.
 * @param {...any} children nodes, text, or arrays of them; null and false are left out.
 * @returns {HTMLElement}
 */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Create an SVG element. See `h`. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Show a message for an error. */
export function errorMessage(error) {
  return h("p", { class: "message bad", role: "alert" }, error.message ?? String(error));
}

/**
 * Create a list of facts. Facts without a value are left out.
 * @param {Array<[string, any]>} facts
 */
export function factList(facts) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    known.map(([name, value]) => h("div", {}, h("dt", {}, name), " ", h("dd", {}, value))),
  );
}

/**
 * Create a table. Columns whose heading begins with "#" have numbers; a "~" before hides a column on a phone. The
 * buttons of the headings sort the rows.
 * @param {string[]} headings
 * @param {any[][]} rows nodes or text, or `cell`s with a value to sort by.
 * @param {string} label describes the table.
 */
export function table(headings, rows, label) {
  const columns = headings.map((heading, column) => ({
    title: heading.replace(/^~?#?/, ""),
    isNumber: /^~?#/.test(heading),
    class: [
      /^~?#/.test(heading) && "number",
      heading.startsWith("~") && "minor",
      !/^~?#/.test(heading) && column === 0 && "first",
      !/^~?#/.test(heading) && column > 0 && column === headings.length - 1 && "wrap",
    ]
      .filter(Boolean)
      .join(" "),
  }));
  const lines = rows.map((row) => ({
    row,
    element: h(
      "tr",
      {},
      row.map((one, column) =>
        h("td", { class: columns[column].class || null }, one?.node ?? (one?.isCell ? "" : one) ?? ""),
      ),
    ),
  }));
  const body = h(
    "tbody",
    {},
    lines.map((line) => line.element),
  );
  const heads = columns.map((column, number) => {
    const isSortable = rows.length > 1 && column.title !== "";
    const button = h("button", { type: "button", class: "sort", click: () => sort(number) }, column.title);
    return h("th", { class: column.class || null, scope: "col" }, isSortable ? button : column.title);
  });
  function sort(number) {
    const { isNumber } = columns[number];
    const before = heads[number].getAttribute("aria-sort");
    const isDescending = before === null ? isNumber : before === "ascending";
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[number].setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    const keyed = lines.map((line) => [sortKey(line.row[number], isNumber), line.element]);
    keyed.sort(([a], [b]) => (isDescending ? compareKeys(b, a) : compareKeys(a, b)));
    body.append(...keyed.map(([, element]) => element));
  }
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), body),
  );
}

/** A cell of a table that is sorted by a value: a size is shown in MB and sorted by its bytes. */
export function cell(node, value) {
  return { node, value, isCell: true };
}

function sortKey(content, isNumber) {
  const value = content?.isCell ? content.value : (content?.textContent ?? content);
  if (!isNumber) return value ?? "";
  return typeof value === "number" ? value : Number.parseFloat(String(value ?? "").replaceAll(",", ""));
}

function compareKeys(a, b) {
  if (typeof a === "number" && typeof b === "number")
    return (Number.isNaN(a) ? -Infinity : a) - (Number.isNaN(b) ? -Infinity : b) || 0;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Bytes in decimal units with three digits, as the command line shows them: "1.02 kB". */
export function formatSize(nbytes) {
  if (nbytes === null || nbytes === undefined) return "";
  return formatUnits(nbytes, ["B", "kB", "MB", "GB", "TB", "PB", "EB"], " ");
}

/** A count with three digits: "1.02M". */
export function formatCount(count) {
  return formatUnits(count, ["", "k", "M", "B", "T", "P", "E"], "");
}

function formatUnits(amount, units, space) {
  let unit = 0;
  while (amount >= 999.5 && unit < units.length - 1) {
    amount /= 1000;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0;
  return `${amount.toFixed(digits)}${space}${units[unit]}`;
}

/** A whole number with separators: "1,234". */
export function formatWhole(number) {
  return typeof number === "number" ? number.toLocaleString("en") : String(number);
}

/** A whole number, or any other with six digits. Text stands for numbers that JSON cannot represent. */
export function formatNumber(number) {
  if (typeof number !== "number") return number === null || number === undefined ? "" : String(number);
  if (Number.isSafeInteger(number)) return String(number);
  return String(Number(number.toPrecision(6)));
}

/** Seconds: "1.2 ms", "3.4 s", "5 min". */
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** A time in ISO 8601, in the time zone of the browser: "2026-11-27 18:53:54". */
export function formatTime(time) {
  const date = new Date(time ?? "");
  return Number.isNaN(date.getTime()) ? (time ?? "") : date.toLocaleString("sv");
}

/** The size of something as a cell of a table. */
export function sizeCell(nbytes) {
  return cell(formatSize(nbytes), nbytes ?? -1);
}

/** A number and its noun: "1 array", "2 arrays". */
export function plural(count, noun, several = `${noun}s`) {
  return `${formatWhole(count)} ${count === 1 ? noun : several}`;
}
