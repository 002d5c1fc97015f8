/**
 * A bundle's model in this device's storage (the origin private file system), fetched piece by piece.
 *
 * The manifest has the SHA-256 of each piece, which is checked after download and after reading from storage. So an interrupted
 * download continues, and a damaged piece is fetched again. One tab downloads while others wait. For workers only, since
 * others have no synchronous handles.
 */
import { digest } from "./manifest.js";
import { EdgeError } from "./module.js";

const FOLDER = "edge";
const TRIES = 5; // for a piece, or without progress
const WAIT = 250; // ms before the second try; doubled each time

/**
 * @typedef {{url: string, name: string, bytes: number, resident: number, piece: number, pieces: string[]}} Source
 * url: of model.edge. name: in storage. pieces: SHA-256 of pieces of `piece` bytes. resident: bytes that the engine keeps in
 * memory; it reads the others from storage.
 * @typedef {{length: number, set: (bytes: Uint8Array, at: number) => void}} Target
 */

/**
 * A model's name in storage, which all sites of a host share: by its address and its own name.
 *
 * @param {string} url
 * @param {string} sha256
 */
export async function storageName(url, sha256) {
  const site = (await digest(new TextEncoder().encode(url))).slice(0, 16);
  return `${site}-${sha256}`;
}

/**
 * Writes the resident part of the model to `target`, from storage or from the network.
 *
 * @param {Source} source
 * @param {Target} target in memory that may be shared, or of a GPU
 * @param {(step: "download" | "load", loaded: number) => void} tell
 * @param {AbortSignal} signal
 * @returns {Promise<{stored: boolean, file: Stored | null}>} whether the model is in storage now; and its file, if the
 * engine reads the rest from there
 */
export async function loadModel(source, target, tell, signal) {
  const work = async () => {
    const file = await openFile(source);
    try {
      const missing = await loadStored(source, target, file, tell, signal);
      if (missing.length) await download(source, target, file, missing, tell, signal);
    } finally {
      file.close();
    }
    if (source.resident === source.bytes) return { stored: file.stored, file: null };
    const rest = file.stored ? await openFile(source, { reads: true }) : file;
    if (rest.size < source.bytes) {
      throw new EdgeError("no-memory", "this browser has no room to store the model, whose embeddings are read from there");
    }
    return { stored: true, file: rest };
  };
  if (!navigator.locks) return work();
  return navigator.locks.request(`edge ${source.name}`, { signal }, work);
}

/** @typedef {Awaited<ReturnType<typeof openFile>>} Stored */

/**
 * The file in storage; null without storage: in an old browser, a private window, or without space.
 *
 * @param {{name: string}} source
 * @param {{reads?: boolean}} [use] reads: other tabs may read it, too, but none writes
 */
async function openFile(source, { reads = false } = {}) {
  /** @type {any} */
  let handle = null;
  try {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
    const file = /** @type {any} */ (await folder.getFileHandle(source.name, { create: true }));
    const open = (/** @type {string} */ mode) => file.createSyncAccessHandle({ mode });
    handle = reads ? await open("read-only") : await open("readwrite").catch(() => open("read-only"));
  } catch {
    handle = null;
  }
  return {
    get stored() {
      return handle !== null;
    },
    get size() {
      return handle ? handle.getSize() : 0;
    },
    /** @param {Uint8Array} to @param {number} at */
    read: (to, at) => (handle ? handle.read(to, { at }) : 0),
    /** @param {Uint8Array} from @param {number} at */
    write(from, at) {
      try {
        if (handle && handle.write(from, { at }) !== from.length) throw new Error("no space");
      } catch {
        this.close(); // the model stays only in memory
        handle = null;
      }
    },
    truncate() {
      handle?.truncate(0);
    },
    close() {
      if (!handle) return;
      try {
        handle.flush();
      } catch {
        // another tab has it open for reading
      }
      handle.close();
    },
  };
}

/**
 * Reads the stored pieces. Returns the numbers of missing or damaged ones.
 *
 * @param {Source} source
 * @param {Target} target
 * @param {Stored} file
 * @param {(step: "download" | "load", loaded: number) => void} tell
 * @param {AbortSignal} signal
 */
async function loadStored(source, target, file, tell, signal) {
  const missing = [];
  const buffer = new Uint8Array(source.piece); // one for all pieces: browsers may free buffers late
  let loaded = 0;
  for (let number = 0; number < source.pieces.length; number++) {
    signal.throwIfAborted();
    const [start, end] = bounds(source, number);
    const bytes = buffer.subarray(0, end - start);
    if (file.size >= end && file.read(bytes, start) === bytes.length && (await digest(bytes)) === source.pieces[number]) {
      put(target, bytes, start);
      loaded += bytes.length;
      tell("load", loaded);
    } else {
      missing.push(number);
    }
  }
  return missing;
}

/**
 * @param {Source} source
 * @param {Target} target
 * @param {Stored} file
 * @param {number[]} missing
 * @param {(step: "download" | "load", loaded: number) => void} tell
 * @param {AbortSignal} signal
 */
async function download(source, target, file, missing, tell, signal) {
  const left = [...missing];
  let loaded = source.bytes - left.reduce((sum, each) => sum + bounds(source, each)[1] - bounds(source, each)[0], 0);
  /** @type {EdgeError | null} */
  let failure = null;
  for (let tries = 0; left.length && tries < TRIES; tries++) {
    if (tries) await sleep(WAIT * 2 ** (tries - 1), signal);
    try {
      // One request for neighbours; the answer is cut into pieces.
      let count = 1;
      while (count < left.length && left[count] === left[0] + count) count++;
      for await (const bytes of fetchPieces(source, left[0], left[0] + count, signal, (part) => tell("download", loaded + part))) {
        const number = left[0];
        if ((await digest(bytes)) !== source.pieces[number]) {
          throw new EdgeError("bad-file", `${source.url} is damaged at byte ${bounds(source, number)[0]}: upload the site again`);
        }
        put(target, bytes, bounds(source, number)[0]);
        file.write(bytes, bounds(source, number)[0]);
        left.shift();
        loaded += bytes.length;
        tell("download", loaded);
        tries = 0; // there is progress
        failure = null;
      }
    } catch (error) {
      signal.throwIfAborted();
      failure = error instanceof EdgeError ? error : new EdgeError("network", `${source.url} cannot be fetched: check the connection`);
      if (failure.code === "missing") break;
    }
  }
  if (left.length) throw failure ?? new EdgeError("network", `${source.url} ended early: check the connection`);
}

/**
 * Yields whole pieces from number `first` up to `last`. Each is valid until the next.
 *
 * @param {Source} source
 * @param {number} first
 * @param {number} last
 * @param {AbortSignal} signal
 * @param {(bytes: number) => void} tell bytes of the next piece so far
 */
async function* fetchPieces(source, first, last, signal, tell) {
  const from = bounds(source, first)[0];
  const to = bounds(source, last - 1)[1];
  const headers = { Range: `bytes=${from}-${to - 1}` };
  const response = await fetch(source.url, { headers, signal, cache: "no-store" });
  if (!response.ok || !response.body) {
    const code = response.status === 404 ? "missing" : "network";
    throw new EdgeError(code, `${source.url} cannot be fetched: the server says ${response.status}`);
  }
  let skip = response.status === 206 ? 0 : from; // servers without ranges send the whole file
  let number = first;
  const buffer = new Uint8Array(source.piece);
  let filled = 0;
  const reader = response.body.getReader();
  try {
    while (number < last) {
      const { done, value } = await reader.read();
      if (done) return;
      let chunk = value;
      const skipped = Math.min(skip, chunk.length);
      skip -= skipped;
      chunk = chunk.subarray(skipped);
      while (chunk.length && number < last) {
        const [start, end] = bounds(source, number);
        const count = Math.min(chunk.length, end - start - filled);
        buffer.set(chunk.subarray(0, count), filled);
        filled += count;
        chunk = chunk.subarray(count);
        if (filled < end - start) continue;
        yield buffer.subarray(0, filled);
        number++;
        filled = 0;
      }
      tell(filled);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** A short text in storage; empty if there is none. @param {string} name */
export async function readNote(name) {
  try {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER);
    return await (await (await folder.getFileHandle(name)).getFile()).text();
  } catch {
    return "";
  }
}

/** Stores a short text in place of all others of its site. @param {string} name @param {string} text */
export async function keepNote(name, text) {
  const file = await openFile({ name });
  file.truncate();
  file.write(new TextEncoder().encode(text), 0);
  file.close();
  await forget(name, { others: true });
}

/** Bytes of this model in storage. @param {string} name */
export async function storedBytes(name) {
  try {
    const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER);
    return (await (await folder.getFileHandle(name)).getFile()).size;
  } catch {
    return 0;
  }
}

/** Deletes this model, or the others of its site. @param {string} name @param {{others?: boolean}} [which] */
export async function forget(name, { others = false } = {}) {
  const [site] = name.split("-");
  try {
    const folder = /** @type {any} */ (await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER));
    for await (const each of folder.keys()) {
      if (others ? each !== name && each.startsWith(`${site}-`) : each === name) await folder.removeEntry(each);
    }
  } catch {
    // no file, or another tab uses it
  }
}

/** Writes the bytes that belong into `target`. @param {Target} target @param {Uint8Array} bytes @param {number} at */
function put(target, bytes, at) {
  if (at < target.length) target.set(bytes.subarray(0, target.length - at), at);
}

/** @param {Source} source @param {number} number @returns {[number, number]} */
function bounds(source, number) {
  return [number * source.piece, Math.min(source.bytes, (number + 1) * source.piece)];
}

/** @param {number} ms @param {AbortSignal} signal */
function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}
