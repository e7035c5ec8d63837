/** The tree of a checkpoint: a grid of which only the visible rows are in the page, because it may have 100,000. */

import { formatCount, formatSize, formatWhole, h, plural } from "view/dom";

const ROW = 28;
const SPARE = 10;
const FIRST_ROWS = 60;

const spelledPaths = new WeakMap();
const joined = new WeakMap();

export class Tree {
  /**
   * @param {object} rows the columns of the document "tree".
   * @param {(row: number) => void} choose called with a leaf that the user chooses.
   */
  constructor(rows, choose) {
    this.rows = rows;
    this.choose = choose;
    this.isOpen = new Uint8Array(rows.names.length);
    this.matches = null;
    this.sorting = null;
    this.active = 0;
    this.chosen = -1;
    this.openFirst();
    this.count = h("span", { class: "muted", role: "status" });
    this.inner = h("div", { class: "rows", role: "presentation" });
    this.grid = h("div", { class: "grid", role: "treegrid", tabindex: 0, "aria-label": "Tree" }, this.inner);
    this.grid.addEventListener("keydown", (event) => this.press(event));
    const search = h("input", { type: "search", placeholder: "Search names", "aria-label": "Search names" });
    search.addEventListener("input", () => this.search(search.value));
    const columns = { name: null, type: "type", elements: "parameters", size: "nbytes" };
    this.heads = Object.entries(columns).map(([title, column]) => this.head(title, column));
    this.scroller = h("div", { class: "tree" }, h("div", { class: "row heads" }, this.heads), this.grid);
    this.scroller.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.element = h(
      "div",
      {},
      h("div", { class: "bar" }, h("span", { class: "bar grow" }, search), this.count),
      this.scroller,
    );
    this.list();
  }

  /** Create the heading of a column, which sorts the rows inside each container. Names stay in the order of the tree. */
  head(title, column) {
    const isNumber = column === "parameters" || column === "nbytes";
    const press = () => {
      this.sorting = column;
      for (const one of this.heads) one.firstChild.setAttribute("aria-pressed", String(one.firstChild === button));
      this.list();
    };
    const button = h(
      "button",
      { type: "button", class: "sort", "aria-pressed": String(column === null), click: press },
      title,
    );
    return h("span", { class: isNumber ? `number ${title}` : null }, button);
  }

  /** Open as many levels as fit into the first rows. */
  openFirst() {
    const { depths, stops } = this.rows;
    let level = [0];
    let shown = 1;
    while (level.length > 0) {
      const next = level.flatMap((row) => this.childrenOf(row));
      shown += next.length;
      if (shown > FIRST_ROWS && depths[level[0]] > 0) break;
      for (const row of level) this.isOpen[row] = 1;
      level = next.filter((row) => stops[row] > row + 1);
    }
  }

  childrenOf(row) {
    const found = [];
    for (let child = row + 1; child < this.rows.stops[row]; child = this.rows.stops[child]) found.push(child);
    return found;
  }

  /** Return the rows directly below a row, in the order that was chosen. */
  sortedChildrenOf(row) {
    const found = this.childrenOf(row);
    if (this.sorting === null) return found;
    const { types, type } = this.rows;
    if (this.sorting === "type") return found.sort((a, b) => types[type[a]].localeCompare(types[type[b]]));
    return found.sort((a, b) => this.rows[this.sorting][b] - this.rows[this.sorting][a]);
  }

  /** Make the list of rows that are not folded away. */
  list() {
    const { names, depths } = this.rows;
    const visible = [];
    const waiting = names.length > 0 ? [0] : [];
    let [widest, widestType] = [0, 0];
    while (waiting.length > 0) {
      const row = waiting.pop();
      if (this.matches !== null && !this.matches[row]) continue;
      visible.push(row);
      widest = Math.max(widest, names[row].length + depths[row] * 2);
      widestType = Math.max(widestType, this.kindOf(row).length);
      if (this.isOpen[row]) for (const child of this.sortedChildrenOf(row).reverse()) waiting.push(child);
    }
    this.visible = visible;
    this.grid.parentElement?.style.setProperty("--characters", Math.min(widest + 3, 120));
    this.grid.parentElement?.style.setProperty("--type-characters", Math.min(widestType, 24));
    this.grid.setAttribute("aria-rowcount", visible.length);
    this.inner.style.height = `${visible.length * ROW}px`;
    if (!visible.includes(this.active)) this.active = visible[0] ?? 0;
    this.draw();
  }

  /** Put the rows that can be seen into the page. */
  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - SPARE);
    const last = Math.min(
      this.visible.length,
      Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / ROW) + SPARE,
    );
    const drawn = [];
    for (let at = first; at < last; at += 1) drawn.push(this.drawRow(at));
    this.inner.replaceChildren(...drawn);
    this.grid.setAttribute("aria-activedescendant", `row-${this.active}`);
  }

  drawRow(at) {
    const row = this.visible[at];
    const { names, depths, stops, parameters, nbytes, arrays } = this.rows;
    const hasChildren = stops[row] > row + 1;
    const text = this.kindOf(row);
    const element = h(
      "div",
      {
        class: row === this.active ? "row active" : "row",
        id: `row-${row}`,
        role: "row",
        "aria-level": depths[row] + 1,
        "aria-rowindex": at + 1,
        "aria-expanded": hasChildren ? String(this.isOpen[row] === 1) : null,
        "aria-selected": String(row === this.chosen),
        click: () => this.act(row),
      },
      h(
        "span",
        {
          class: "name",
          role: "gridcell",
          pointerenter: (event) => event.currentTarget.setAttribute("title", pathsOf(this.rows)[row]),
        },
        h("span", { class: "twist", "aria-hidden": "true" }, hasChildren ? (this.isOpen[row] ? "▾" : "▸") : ""),
        names[row],
      ),
      h("span", { class: "muted", role: "gridcell", title: text }, text),
      h(
        "span",
        { class: "number elements", role: "gridcell", title: `${formatWhole(parameters[row])} elements` },
        arrays[row] > 0 && formatCount(parameters[row]),
      ),
      h(
        "span",
        { class: "number", role: "gridcell", title: `${formatWhole(nbytes[row])} bytes` },
        arrays[row] > 0 && formatSize(nbytes[row]),
      ),
    );
    element.style.top = `${at * ROW}px`;
    element.style.setProperty("--depth", depths[row]);
    return element;
  }

  /** Return the type of a row, and its value or what it contains. */
  kindOf(row) {
    const { leaves, types, type, arrays, values, tied } = this.rows;
    const isLeaf = leaves[row] >= 0;
    const shared = tied[leaves[row]];
    const detail = values[row] ?? (shared === undefined ? null : `= ${shared}`);
    const kind = [types[type[row]], !isLeaf && arrays[row] > 0 && plural(arrays[row], "array"), detail];
    return kind.filter(Boolean).join(isLeaf ? " " : ", ");
  }

  /** Open or close a row, or choose a leaf. */
  act(row) {
    this.active = row;
    if (this.rows.leaves[row] >= 0) {
      this.chosen = row;
      this.draw();
      this.choose(row);
      return;
    }
    this.isOpen[row] = this.isOpen[row] ? 0 : 1;
    this.list();
  }

  /** Choose no row. */
  unchoose() {
    this.chosen = -1;
    this.draw();
  }

  /** Choose the leaf with a number, and open the rows above it. */
  show(leaf) {
    const row = this.rows.leaves.indexOf(leaf);
    if (row < 0) return;
    for (let above = 0; above < row; ) {
      if (this.rows.stops[above] > row) {
        this.isOpen[above] = 1;
        above += 1;
      } else above = this.rows.stops[above];
    }
    this.chosen = row;
    this.active = row;
    this.list();
    this.scrollToActive();
  }

  press(event) {
    const at = this.visible.indexOf(this.active);
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW) - 1);
    const isOpen = this.isOpen[this.active] === 1;
    const hasChildren = this.rows.stops[this.active] > this.active + 1;
    const moves = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: this.visible.length - 1,
    };
    if (event.key in moves) {
      this.active = this.visible[Math.min(Math.max(moves[event.key], 0), this.visible.length - 1)];
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") this.act(this.active);
    else if (event.key === "ArrowRight" && hasChildren && !isOpen) this.act(this.active);
    else if (event.key === "ArrowRight" && hasChildren) this.active = this.visible[at + 1] ?? this.active;
    else if (event.key === "ArrowLeft" && hasChildren && isOpen) this.act(this.active);
    else if (event.key === "ArrowLeft") this.active = this.parentOf(this.active);
    else return;
    event.preventDefault();
    this.draw();
    this.scrollToActive();
  }

  parentOf(row) {
    for (let above = row - 1; above >= 0; above -= 1) if (this.rows.depths[above] < this.rows.depths[row]) return above;
    return 0;
  }

  scrollToActive() {
    const top = this.visible.indexOf(this.active) * ROW;
    const height = this.scroller.clientHeight - ROW; // without the headings, which stay at the top
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW > this.scroller.scrollTop + height) this.scroller.scrollTop = top + ROW - height;
    this.draw();
  }

  /** Show only leaves whose path has each of the words, and the rows that contain them. */
  search(text) {
    if (text.trim() === "") {
      this.matches = null;
      this.count.replaceChildren();
      this.list();
      return;
    }
    const { depths, leaves } = this.rows;
    const isWanted = searchPaths(this.rows, text);
    this.matches = new Uint8Array(leaves.length);
    const above = [];
    let found = 0;
    for (let row = 0; row < leaves.length; row += 1) {
      above.length = depths[row];
      above.push(row);
      if (leaves[row] < 0 || !isWanted(row)) continue;
      found += 1;
      for (let depth = above.length - 1; depth >= 0 && !this.matches[above[depth]]; depth -= 1) {
        this.matches[above[depth]] = 1;
        this.isOpen[above[depth]] = 1;
      }
    }
    this.count.replaceChildren(found === 0 ? "nothing found" : `${formatWhole(found)} found`);
    this.scroller.scrollTop = 0;
    this.list();
  }
}

/** Return the path of each row as messages spell it: `model['layers.0.weight'][0].mu`. */
export function pathsOf(rows) {
  if (!spelledPaths.has(rows)) spelledPaths.set(rows, spellPaths(rows));
  return spelledPaths.get(rows);
}

function spellPaths({ names, depths, stops, leaves, types, type }) {
  const above = [];
  return names.map((name, row) => {
    above.length = depths[row];
    const parent = above.at(-1);
    // A group of keys with a common prefix has no type. Its key goes on in the rows below.
    const isGroup = leaves[row] < 0 && types[type[row]] === "" && stops[row] > row + 1;
    const key = parent?.key === undefined ? name : `${parent.key}.${name}`;
    const before = parent?.path ?? "";
    const path = row === 0 ? "" : isGroup ? before : before + spelled(key, before);
    above.push({ path, key: isGroup && row > 0 ? key : undefined });
    return isGroup && row > 0 ? before + spelled(key, before) : path || "<root>";
  });
}

function spelled(key, before) {
  if (/^\.[\p{ID_Start}_]/u.test(key)) return before ? key : key.slice(1);
  if (/^\[.*\]$/s.test(key)) return key;
  if (/^[\p{ID_Start}_][\p{ID_Continue}]*$/u.test(key)) return before ? `/${key}` : key;
  if (key === "''") return "['']";
  const quote = key.includes("'") && !key.includes('"') ? '"' : "'";
  const text = key.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\t", "\\t").replaceAll("\r", "\\r");
  return `[${quote}${quote === "'" ? text.replaceAll("'", "\\'") : text}${quote}]`;
}

/** Return a function that tells whether the path of a row has each word of a text, however its keys are joined. */
export function searchPaths(rows, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return () => true;
  const paths = joinedPaths(rows);
  return (row) => words.every((word) => paths[row].includes(word));
}

/** Return the path of each row in lower case: its names joined by slashes, and by dots, as they are divided there. */
function joinedPaths(rows) {
  if (joined.has(rows)) return joined.get(rows);
  const parts = [];
  const paths = pathsOf(rows);
  const found = rows.names.map((name, row) => {
    parts.length = Math.max(0, rows.depths[row] - 1);
    if (rows.depths[row] > 0) parts.push(name.toLowerCase());
    return `${parts.join("/")} ${parts.join(".")} ${paths[row].toLowerCase()}`;
  });
  joined.set(rows, found);
  return found;
}
