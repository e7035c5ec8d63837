/** The page: its address, its heading, its colours, and which view is shown. */

import { showCheckpoint } from "view/checkpoint";
import { forgetDocuments, loadDocument } from "view/documents";
import { errorMessage, formatTime, h } from "view/dom";
import { showRun, showRuns } from "view/run";

const SCHEMES = ["light dark", "light", "dark"];
const TITLES = { "light dark": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

let showing = new AbortController();

/** Show the page, and whatever its address names from then on. */
export async function start() {
  const main = document.getElementById("main");
  setUpTheme();
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  try {
    const view = await loadDocument("view");
    addEventListener("hashchange", () => show(view, main));
    document.getElementById("made").replaceChildren(...madeBy(view));
    await show(view, main);
  } catch (error) {
    main.replaceChildren(errorMessage(error));
  }
}

async function show(view, main) {
  showing.abort();
  showing = new AbortController();
  const { signal } = showing;
  const page = pageOf(view);
  document.title = `${page.at || view.location} – ckptcore`;
  document.getElementById("trail").replaceChildren(...trail(page));
  forgetDocuments();
  try {
    await viewOf(page)(page, main, signal);
    if (!signal.aborted) main.dataset.shown = location.hash;
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(errorMessage(error));
  }
}

function viewOf(page) {
  if (page.view.kind === "runs" && page.at === "") return showRuns;
  return page.run !== null && page.at === page.run ? showRun : showCheckpoint;
}

/** Say where and when a report was made. */
function madeBy({ report }) {
  if (!report) return [];
  return [`Report of ckptcore ${report.version}, made on ${report.host} at ${formatTime(report.time)}.`];
}

/**
 * Return what the address names.
 * `link` makes an address, `go` goes there, and `replace` changes the address without showing it anew.
 */
function pageOf(view) {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const leaf = parameters.get("leaf");
  const link = (values) => `#${new URLSearchParams(Object.entries(values).filter(([, value]) => value !== ""))}`;
  const at = parameters.get("at") ?? "";
  // The place of the run that the place is in; null outside a run.
  const child = at.split("/")[0];
  const run =
    view.kind === "run" ? "" : Object.hasOwn(view.children, child) && view.children[child] === "run" ? child : null;
  return {
    view,
    at,
    run,
    /** The parameters of the document of the run. */
    runParameters: run ? { at: run } : {},
    /** Return the place of a step of the run. */
    within: (name) => (run ? `${run}/${name}` : name),
    /** The place of the step in the run, and in it. */
    inRun: run ? at.slice(run.length + 1) : at,
    tab: parameters.get("tab") ?? "",
    other: parameters.get("other") ?? "",
    policy: parameters.get("policy") ?? view.policy ?? "",
    part: parameters.get("part") ?? "",
    along: parameters.get("along") === "time" ? "time" : "step",
    log: parameters.get("log") === "1",
    smoothing: Math.min(0.99, Math.max(0, Number(parameters.get("smoothing")) || 0)),
    leaf: /^\d+$/.test(leaf ?? "") ? Number(leaf) : null,
    link,
    go: (values) => location.assign(link(values)),
    replace: (values) => history.replaceState(null, "", link(values)),
  };
}

/** Return links to the places that contain the present one. */
function trail(page) {
  const names = page.at ? page.at.split("/") : [];
  const parts = [
    h("a", { href: page.link({}) }, page.view.location.split("/").filter(Boolean).at(-1) ?? page.view.location),
  ];
  names.forEach((name, number) => {
    const at = names.slice(0, number + 1).join("/");
    parts.push(
      " › ",
      number === names.length - 1
        ? h("span", { "aria-current": "page" }, name)
        : h("a", { href: page.link({ at }) }, name),
    );
  });
  return parts;
}

function setUpTheme() {
  const button = document.getElementById("theme");
  const apply = (scheme) => {
    document.documentElement.style.colorScheme = scheme;
    button.replaceChildren(TITLES[scheme]);
  };
  let chosen = SCHEMES.includes(remembered()) ? remembered() : SCHEMES[0];
  button.addEventListener("click", () => {
    chosen = SCHEMES[(SCHEMES.indexOf(chosen) + 1) % SCHEMES.length];
    remember(chosen);
    apply(chosen);
  });
  apply(chosen);
}

/** Some browsers refuse to store anything for a file: then the choice lasts as long as the page. */
function remembered() {
  try {
    return localStorage.getItem("ckptcore-theme");
  } catch {
    return null;
  }
}

function remember(scheme) {
  try {
    localStorage.setItem("ckptcore-theme", scheme);
  } catch {
    // See `remembered`.
  }
}
