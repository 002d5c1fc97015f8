/** manifest.json, which has the hashes of all other files. */
import { EdgeError } from "./module.js";

/**
 * The manifest of a site, checked: `web.sha256` is the SHA-256 of its text without this hash.
 *
 * @param {string} folder its address, which ends with /
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function fetchManifest(folder, signal) {
  const address = new URL("manifest.json", folder).href;
  const text = new TextDecoder().decode(await fetchBytes(address, signal));
  let manifest;
  try {
    manifest = JSON.parse(text);
  } catch {
    throw new EdgeError("bad-file", `${address} is damaged: upload the site again`);
  }
  if (!manifest?.web?.modules) throw new EdgeError("bad-file", `${address} is not a site's: edge export --device web makes one`);
  const { sha256 } = manifest.web;
  if ((await digest(new TextEncoder().encode(text.replace(sha256, "")))) !== sha256) {
    throw new EdgeError("bad-file", `${address} is damaged: upload the site again`);
  }
  return manifest;
}

/**
 * A file of the site, checked.
 *
 * @param {string} folder
 * @param {any} manifest
 * @param {string} name
 * @param {AbortSignal} [signal]
 */
export async function fetchFile(folder, manifest, name, signal) {
  const address = new URL(name, folder).href;
  for (const cache of /** @type {RequestCache[]} */ (["default", "reload"])) {
    const bytes = await fetchBytes(address, signal, cache);
    if ((await digest(bytes)) === manifest.files[name]?.sha256) return bytes;
  } // a stale copy in the browser's cache is fetched again
  throw new EdgeError("bad-file", `${address} is damaged: upload the site again`);
}

/** @param {string} address @param {AbortSignal} [signal] @param {RequestCache} [cache] */
export async function fetchBytes(address, signal, cache = "no-cache") {
  /** @type {Response} */
  let response;
  try {
    response = await fetch(address, { signal: signal ?? null, cache });
    if (response.ok) return new Uint8Array(await response.arrayBuffer());
  } catch {
    signal?.throwIfAborted();
    throw new EdgeError("network", `${address} cannot be fetched: check the connection`);
  }
  throw new EdgeError("network", `${address} cannot be fetched: the server says ${response.status}`);
}

/** SHA-256 in hexadecimal digits. @param {Uint8Array} bytes */
export async function digest(bytes) {
  if (!globalThis.crypto?.subtle) {
    throw new EdgeError("unsupported", "browsers check and store a model on secure pages only: use https, or localhost");
  }
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {any} */ (bytes)));
  return Array.from(hash, (each) => each.toString(16).padStart(2, "0")).join("");
}
