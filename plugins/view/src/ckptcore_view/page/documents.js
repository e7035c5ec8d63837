/** Documents: what the page shows, as JSON, from the server or from the report that contains this page. */

const kept = new Map();
/** The version of the tree at each place: arrays have numbers within a version. */
const versions = new Map();
let embedded = null;

/**
 * Load a document.
 * @param {string} name
 * @param {Record<string, string | number>} [parameters]
 * @param {AbortSignal} [signal] stops the request; the server then stops reading.
 * @returns {Promise<any>}
 */
export async function loadDocument(name, parameters = {}, signal = undefined) {
  if (isReport()) {
    const documents = await reportDocuments();
    const named = documents[keyOf(name, parameters)];
    const found = named?.same === undefined ? named : documents[named.same]; // equal documents are in the report once
    if (found === undefined) throw new Error("This report does not contain it. Use `ckptcore view` without --out.");
    if (found.error) throw new Error(found.error);
    return found;
  }
  const sent = new URLSearchParams(parameters);
  const version = "leaf" in parameters && versions.get(parameters.of ?? parameters.at);
  if (version) sent.set("version", version);
  const response = await answer(`documents/${name}?${sent}`, signal);
  if (response.headers.get("Content-Type") !== "application/json")
    throw new Error(`The server answered ${response.status} ${response.statusText}.`);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error ?? response.statusText);
  if (found.version) versions.set(parameters.at, found.version);
  return found;
}

async function answer(address, signal) {
  try {
    return await fetch(address, { signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not answer. Has `ckptcore view` ended?");
  }
}

/** Load a document that does not change while the page is open. It is requested once. */
export function loadOnce(name, parameters) {
  const key = keyOf(name, parameters);
  if (!kept.has(key)) {
    const loading = loadDocument(name, parameters);
    loading.catch(() => kept.delete(key));
    kept.set(key, loading);
  }
  return kept.get(key);
}

/** Forget documents that were loaded once: the checkpoints may have been replaced. */
export function forgetDocuments() {
  kept.clear();
}

/** Return true if this page is a report, which has no server. */
export function isReport() {
  return document.getElementById("documents") !== null;
}

/** Return true if the report contains a document. */
export async function isInReport(name, parameters) {
  return keyOf(name, parameters) in (await reportDocuments());
}

function keyOf(name, parameters) {
  return [name, ...Object.entries(parameters).map(([key, value]) => `${key}=${value}`)].join("\n");
}

function reportDocuments() {
  embedded ??= decompress("documents").then(JSON.parse);
  return embedded;
}

/** Return the text of an element that contains Base64 of compressed text. */
async function decompress(id) {
  const encoded = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
