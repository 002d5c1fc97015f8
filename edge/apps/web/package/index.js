/**
 * A language model in a web page, on the device, within a memory bound.
 *
 *     const session = await Edge.open("./", { onProgress: console.log });
 *     for await (const piece of session.stream("Why is the sky blue?")) document.body.append(piece);
 *
 * The types, with their documentation, are in index.d.ts.
 */
import { fetchManifest } from "./manifest.js";
import { EdgeError } from "./module.js";
import { forget, storageName, storedBytes } from "./store.js";

export { EdgeError };
export { listenTo } from "./microphone.js";

const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 };

/**
 * What is sent to the worker of schemas: those of zod and others become JSON by the interface that they share, Standard JSON
 * Schema, wherever they are.
 * @param {any} value @param {object[]} [outer] objects that contain it @returns {any}
 */
function asJson(value, outer = []) {
  const made = value?.["~standard"]?.jsonSchema?.input({ target: "draft-2020-12" });
  if (made || typeof value !== "object" || !value) return made ?? value;
  if (outer.includes(value)) throw new EdgeError("bad-argument", "a schema or tool contains itself, which JSON cannot: use $ref");
  const within = [...outer, value];
  if (Array.isArray(value)) return value.map((each) => asJson(each, within));
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, asJson(each, within)]));
}

/** A worker. Each call has one answer, and may have events before it. */
class Remote {
  #worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  /** @type {Map<number, {resolve: (value: any) => void, reject: (error: Error) => void, tell: (event: any) => void}>} */
  #open = new Map();
  #next = 1;
  /** @type {EdgeError | null} */
  #ended = null;

  constructor() {
    this.#worker.addEventListener("message", ({ data: { id, result, error, event } }) => {
      const call = this.#open.get(id);
      if (!call) return;
      if (event) return call.tell(event);
      this.#open.delete(id);
      if (error) call.reject(new EdgeError(error.code, error.message));
      else call.resolve(result);
    });
    this.#worker.addEventListener("error", (event) => {
      event.preventDefault?.();
      this.end(new EdgeError("failed", `the engine stopped (${event.message || "its worker cannot be loaded"}): open the model again`));
    });
  }

  /** @param {string} call @param {any} [values] @param {(event: any) => void} [tell] @returns {Promise<any>} */
  call(call, values, tell = () => {}) {
    if (this.#ended) return Promise.reject(this.#ended);
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#open.set(id, { resolve, reject, tell });
      this.#worker.postMessage({ id, call, values });
    });
  }

  /** @param {EdgeError} why */
  end(why) {
    this.#ended ??= why;
    this.#worker.terminate();
    for (const { reject } of this.#open.values()) reject(this.#ended);
    this.#open.clear();
  }
}

export class Session {
  /** @type {Remote} */
  #remote;
  /** @type {{memory: WebAssembly.Memory, cancelled: number} | null} */
  #shared;
  #busy = false;

  /** @param {Remote} remote @param {any} opened */
  constructor(remote, { info, shared }) {
    this.#remote = remote;
    this.#shared = shared;
    this.info = info;
    /** @type {any} */
    this.report = null;
  }

  /** @param {string | Int32Array} text @param {any} [options] */
  async *stream(text, { signal, role = "user", onPrompt, ...options } = {}) {
    this.#claim();
    const answer = this.#told("answer", { text, role, options: this.#named(options) }, signal, ({ report, prompt }) => {
      this.report = report;
      if (prompt && prompt.done < prompt.asked) onPrompt?.(prompt.done, prompt.asked); // last: it may throw
    });
    try {
      for await (const { piece } of answer) if (piece) yield piece;
    } finally {
      this.#busy = false;
    }
  }

  /**
   * What a call tells, as it comes. Whoever leaves early cancels it.
   * @param {string} call @param {any} values @param {AbortSignal} [signal]
   * @param {(event: any) => void} [tell] is called at once, also then
   */
  async *#told(call, values, signal, tell = () => {}) {
    /** @type {any[]} */
    const events = [];
    let wake = () => {};
    let ended = false;
    /** @type {any} */
    let failure = null;
    const cancel = () => this.#cancel();
    signal?.addEventListener("abort", cancel, { once: true });
    const answer = this.#remote
      .call(call, values, (event) => (events.push(event), wake(), tell(event)))
      .catch((error) => (failure = error))
      .finally(() => ((ended = true), wake()));
    if (signal?.aborted) cancel();
    try {
      for (;;) {
        while (events.length) yield events.shift();
        if (ended) break;
        await new Promise((/** @type {(value?: any) => void} */ done) => ((wake = done), (ended || events.length) && done()));
      }
      if (failure) throw failure;
      return await answer;
    } finally {
      signal?.removeEventListener("abort", cancel);
      if (!ended) cancel();
      await answer;
    }
  }

  /** @param {string | Int32Array} text @param {any} [options] */
  async ask(text, options) {
    let answer = "";
    for await (const piece of this.stream(text, options)) answer += piece;
    return answer;
  }

  /** @param {string} text */
  async system(text) {
    await this.#call("append", { role: "system", text });
  }

  /** @param {string} question @param {string} answer */
  async past(question, answer) {
    await this.#call("append", { role: "user", text: question });
    await this.#call("append", { role: "assistant", text: answer });
  }

  /** @param {number} [turns] */
  rewind(turns) {
    return this.#call("rewind", turns);
  }

  /** @param {{jsonSchema?: object | string, regex?: string} | null} form */
  async constrain(form) {
    await this.#call("constrain", asJson(form));
  }

  /** @param {Record<number, number>} biases */
  bias(biases) {
    return this.#call("bias", biases);
  }

  /** @param {object[] | null} list */
  async tools(list) {
    await this.#call("tools", asJson(list));
  }

  /** @param {string} choice @param {{parallel?: boolean}} [options] */
  choose(choice, { parallel = true } = {}) {
    return this.#call("choose", { choice, parallel });
  }

  /** @returns {Promise<{id: string, name: string, arguments: any}[]>} */
  async calls() {
    const found = await this.#call("calls");
    return found.map((/** @type {any} */ call) => ({ ...call, arguments: JSON.parse(call.arguments) }));
  }

  /** @param {string} text */
  async result(text) {
    await this.#call("append", { role: "result", text });
  }

  /** @returns {Promise<Uint8Array>} */
  save() {
    return this.#call("save");
  }

  /** @param {Uint8Array} state */
  load(state) {
    return this.#call("load", state);
  }

  /** @param {string | URL | Uint8Array | null} adapter @param {{scale?: number}} [options] */
  setAdapter(adapter, { scale = 1 } = {}) {
    const given = adapter instanceof Uint8Array || adapter === null ? adapter : new URL(adapter, document.baseURI).href;
    return this.#call("setAdapter", { adapter: given, scale });
  }

  /** @param {string} text @param {boolean} [special] */
  tokenize(text, special = false) {
    return this.#call("tokenize", { text, special });
  }

  /** @param {ImageData | ImageBitmapSource} source @param {{tokens?: number}} [options] */
  async image(source, { tokens = 0 } = {}) {
    const { data, width, height } = source instanceof ImageData ? source : await pixelsOf(source);
    await this.#call("image", { picture: { data: new Uint8Array(data), width, height }, tokens });
  }

  /** @param {number} width @param {number} height @param {{tokens?: number}} [options] @returns {Promise<number>} */
  imageTokens(width, height, { tokens = 0 } = {}) {
    return this.#call("imageTokens", { width, height, tokens });
  }

  /** @param {Float32Array} samples @param {{rate: number}} options */
  async sound(samples, { rate }) {
    await this.#call("sound", { samples: samples.slice(), rate });
  }

  /** @param {number} count @param {{rate: number}} options @returns {Promise<number>} */
  soundTokens(count, { rate }) {
    return this.#call("soundTokens", { count, rate });
  }

  /** @returns {Promise<void>} */
  keepEyes() {
    return this.#call("keepEyes");
  }

  /** @param {string | string[]} text @param {any} [options] @returns {Promise<any>} */
  async embed(text, options) {
    const texts = typeof text === "string" ? [text] : text;
    /** @type {Float32Array} */
    const vectors = await this.#call("embed", { texts, options });
    const size = vectors.length / texts.length;
    return typeof text === "string" ? vectors : texts.map((_, number) => vectors.subarray(number * size, (number + 1) * size));
  }

  /**
   * @param {Float32Array | AsyncIterable<Float32Array>} sound
   * @param {any} options
   */
  async *transcribe(sound, { signal, time, energy, power, ...hearing }) {
    this.#claim();
    try {
      signal?.throwIfAborted();
      await this.#remote.call("listen", { hearing, options: this.#named({ time, energy, power }) });
      let finish = null;
      for await (const samples of pieces(sound)) {
        finish = yield* this.#told("hear", samples, signal);
        if (finish) break;
      }
      this.report = { finish };
    } finally {
      this.#busy = false;
    }
  }

  async close() {
    this.#remote.end(new EdgeError("closed", "the session is closed"));
  }

  #claim() {
    if (this.#busy) throw new EdgeError("busy", "an answer is being generated: wait for it, or cancel it");
    this.#busy = true;
  }

  /** @param {string} name @param {any} [values] */
  async #call(name, values) {
    this.#claim();
    try {
      return await this.#remote.call(name, values);
    } finally {
      this.#busy = false;
    }
  }

  #cancel() {
    if (this.#shared) {
      Atomics.store(new Int32Array(this.#shared.memory.buffer), this.#shared.cancelled / 4, 1);
    }
    this.#remote.call("cancel").catch(() => {});
  }

  /** Options as numbers; the session's own are the defaults. @param {any} options */
  #named(options) {
    return { threads: this.info.threads, ...options };
  }
}

export class Edge {
  /** @param {string | URL} url @param {any} [options] */
  static async open(url, { onProgress, signal, memory, ...options } = {}) {
    signal?.throwIfAborted();
    const remote = new Remote();
    const abort = () => remote.call("abort").catch(() => {});
    signal?.addEventListener("abort", abort, { once: true });
    try {
      const request = { url: folder(url), options: { ...options, memory: bytesOf(memory) } };
      return new Session(remote, await remote.call("open", request, (event) => onProgress?.(event)));
    } catch (error) {
      remote.end(new EdgeError("closed", "the session is closed"));
      throw signal?.aborted ? signal.reason : error;
    } finally {
      signal?.removeEventListener("abort", abort);
    }
  }

  /** @param {string | URL} url */
  static async stored(url) {
    const bytes = await Promise.all((await namesOf(url)).map(storedBytes));
    return bytes.reduce((sum, each) => sum + each, 0);
  }

  /** @param {string | URL} url */
  static async forget(url) {
    for (const name of await namesOf(url)) await forget(name);
  }
}

/**
 * Samples in the arrays that they come in; an empty one is the end.
 * @param {Float32Array | AsyncIterable<Float32Array>} sound
 */
async function* pieces(sound) {
  for await (const samples of sound instanceof Float32Array ? [sound] : sound) if (samples.length) yield samples;
  yield new Float32Array(0);
}

/** The pixels of a picture, upright. @param {ImageBitmapSource} source */
async function pixelsOf(source) {
  const bitmap = await createImageBitmap(source);
  const { width, height } = bitmap;
  const context = /** @type {OffscreenCanvasRenderingContext2D} */ (new OffscreenCanvas(width, height).getContext("2d"));
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}

/** The address of a folder. @param {string | URL} url */
function folder(url) {
  const { href } = new URL(url, document.baseURI);
  return href.endsWith("/") ? href : `${href}/`;
}

/** Names in storage of its files. @param {string | URL} url */
async function namesOf(url) {
  const { files, web } = await fetchManifest(folder(url));
  const names = [web.model, ...(web.ears ? [web.ears.model] : [])];
  return Promise.all(names.map((name) => storageName(new URL(name, folder(url)).href, files[name].sha256)));
}

/** @param {number | string | undefined} memory */
function bytesOf(memory) {
  if (memory === undefined) return undefined;
  const found = /^\s*([\d.]+)\s*([a-z]*)\s*$/i.exec(String(memory));
  const unit = UNITS[/** @type {"mib"} */ (found?.[2].toLowerCase() ?? "none")];
  const bytes = found && unit ? Number(found[1]) * unit : NaN;
  if (!(bytes > 0)) throw new EdgeError("bad-argument", `memory ${memory}: give bytes, or a text such as "256MiB"`);
  return bytes;
}
