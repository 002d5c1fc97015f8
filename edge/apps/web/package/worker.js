/**
 * The engine of a session, in a worker of its own: it fetches the model, runs the module, and answers `index.js`.
 *
 * Messages to it: {id, call, values}; from it: {id, result} or {id, error}, and {id, event} meanwhile.
 */
import { Gpu, whyNone } from "./gpu.js";
import { fetchBytes, fetchFile, fetchManifest } from "./manifest.js";
import { FINISHES } from "./abi.js";
import { chooseIsa } from "./isa.js";
import { EdgeError, Engine } from "./module.js";
import { readPrograms } from "./programs.js";
import { verdictsOf } from "./race.js";
import { forget, loadModel, storageName } from "./store.js";

const PAGE = 65536;
const THREADS_WAIT = 5000; // ms
const USED_EVERY = 250; // ms between two reports of the engine's memory

/** @type {Engine} */
let engine;
/** @type {Worker[]} */
let workers = [];
let bound = 0;
/** @type {Gpu | null} */
let gpu = null;
/** @type {string | null} */
let withoutGpu = null; // why the site's programs for a GPU are not used; null: they are, or there are none
let cancelled = false; // by a message; threads see a flag in memory
/** @type {AbortController} */
let opening;
/** @type {(() => Promise<Uint8Array>) | null} */
let fetchEncoder = null; // eyes.edge or sounds.edge, if the site's model sees, or hears sounds in prompts

const calls = {
  /** @param {{url: string, options: any}} request @param {(event: any) => void} tell */
  async open({ url, options }, tell) {
    opening = new AbortController();
    const manifest = await fetchManifest(url, opening.signal);
    const { web } = manifest;
    const isa = options.isa ?? chooseIsa(Object.keys(web.modules));
    if (!web.modules[isa]) throw new EdgeError("bad-argument", `isa ${isa}: choose ${Object.keys(web.modules).join(", ")}`);
    bound = web.memory.maximum * PAGE;
    if (options.memory !== undefined && options.memory < bound) {
      const mib = (/** @type {number} */ bytes) => `${Math.ceil(bytes / 2 ** 20)} MiB`;
      throw new EdgeError("no-memory", `needs ${mib(bound)}, memory is ${mib(options.memory)}: export with --memory`);
    }
    const total = web.bytes + (web.ears?.bytes ?? 0);
    const file = new URL(web.model, url).href;
    const source = { ...web, url: file, name: await storageName(file, manifest.files[web.model].sha256) };
    const memory = makeMemory(web.memory);
    const module = await compile(url, manifest, web.modules[isa], opening.signal);
    const prepare = await chooseGpu(url, manifest, options, opening.signal);
    engine = await Engine.make(module, memory, gpu);
    const isolated = globalThis.crossOriginIsolated === true;
    const count = Math.min(options.threads ?? navigator.hardwareConcurrency ?? 1, manifest.plan.threads);
    const several = isolated && count > 1; // the encoder of a model that hears has threads of its own
    const started = several ? await startThreads(web.ears ? 2 * count - 1 : count) : 1;
    const threads = web.ears ? Math.ceil(started / 2) : started;
    const address = engine.reserve(web.resident);
    const { stored, file: rest } = await loadModel(
      source, new Uint8Array(memory.buffer, address, web.resident),
      (step, loaded) => tell({ step, loaded, total }), opening.signal,
    );
    if (rest) engine.reads((to, at) => rest.read(to, at));
    if (web.ears) {
      const ears = { ...web.ears, url: new URL(web.ears.model, url).href };
      ears.name = await storageName(ears.url, manifest.files[ears.model].sha256);
      const at = engine.reserveEars(ears.bytes); // which may replace the buffer
      const target = new Uint8Array(memory.buffer, at, ears.bytes);
      await loadModel(ears, target, (step, loaded) => tell({ step, loaded: web.bytes + loaded, total }), opening.signal);
      if (stored) await forget(ears.name, { others: true });
    }
    if (stored) await forget(source.name, { others: true });
    engine.open();
    engine.begin({ threads });
    const encoder = web.eyes ?? web.sounds;
    fetchEncoder = encoder ? () => fetchFile(url, manifest, encoder, opening.signal) : null;
    const prepared = prepare((step, loaded, all) => tell({ step, loaded, total: all }));
    if (options.engine === "gpu") await prepared;
    tell({ step: "ready", loaded: total, total });
    const { weights, kv, scratch, ...info } = engine.info;
    const now = memory.buffer.byteLength;
    return {
      info: {
        ...info, hears: Boolean(web.ears), sees: Boolean(web.eyes), sounds: Boolean(web.sounds), threads, isolated, stored,
        bytes: { weights, kv, scratch, now, bound },
      },
      shared: isolated ? { memory, cancelled: engine.cancelled } : null,
    };
  },

  abort() {
    opening?.abort(new EdgeError("cancelled", "the download was cancelled"));
  },

  cancel() {
    cancelled = true;
  },

  /** @param {{text: string | Int32Array, role: any, options: any}} request @param {(event: any) => void} tell */
  async answer({ text, role, options }, tell) {
    cancelled = false;
    engine.set(options);
    const before = engine.use;
    const passes = { ...gpu?.passes };
    const began = performance.now();
    await engine.append(role, text);
    const decoder = new TextDecoder();
    /** @type {any} */
    let report = { finish: null, promptTokens: 0, tokens: 0, promptSeconds: 0, seconds: 0, tokensPerSecond: 0 };
    let first = 0;
    let looked = 0;
    for (;;) {
      const { text: bytes, token, finish, done, asked } = await engine.next();
      const now = performance.now();
      if (token >= 0) report.tokens++;
      if (!first && (token >= 0 || finish)) {
        first = now;
        report.promptSeconds = (now - began) / 1000;
        report.promptTokens = done;
      }
      report.seconds = first && (now - first) / 1000;
      report.tokensPerSecond = report.tokens > 1 ? (report.tokens - 1) / report.seconds : 0;
      if (finish || now - looked > USED_EVERY) {
        looked = now;
        const use = engine.use;
        report = {
          ...report, joules: use.joules, measured: use.measured, memory: { bytes: engine.memory.buffer.byteLength, bound },
          rows: use.rows, evicted: use.evicted - before.evicted,
          drafted: use.drafted - before.drafted, accepted: use.accepted - before.accepted, gain: use.gain || null,
          ...ranOn(passes),
        };
      }
      if (finish) report.finish = FINISHES[finish];
      tell({ piece: decoder.decode(bytes, { stream: true }), report, prompt: token < 0 && { done, asked } });
      if (finish) await gpu?.settle(engine.memory);
      if (finish) return report;
      await turn(); // a message may cancel it
      if (cancelled) new Int32Array(engine.memory.buffer, engine.cancelled, 1)[0] = 1;
    }
  },

  /** @param {{hearing: any, options: any}} request */
  listen({ hearing, options }) {
    cancelled = false;
    engine.set(options);
    engine.listen(hearing);
  },

  /** @param {Float32Array} samples none: the sound has ended @param {(event: any) => void} tell of each segment */
  async hear(samples, tell) {
    for (let at = 0; ;) {
      const { taken, segment } = engine.hear(samples.subarray(at));
      const { finish, ...found } = segment;
      at += taken;
      if (segment.text) tell(found);
      if (finish) return FINISHES[finish];
      if (at === samples.length && at) return null; // a call without any would end the sound
      await turn(); // a message may cancel it
      if (cancelled) new Int32Array(engine.memory.buffer, engine.cancelled, 1)[0] = 1;
    }
  },

  /** @param {{role: any, text: string}} request */
  append: ({ role, text }) => engine.append(role, text),
  /** @param {any} form */
  constrain: (form) => engine.constrain(form),
  /** @param {any} biases */
  bias: (biases) => engine.bias(biases),
  /** @param {any} list */
  tools: (list) => engine.tools(list),
  /** @param {{choice: string, parallel: boolean}} request */
  choose: ({ choice, parallel }) => engine.choose(choice, parallel),
  calls: () => engine.calls(),
  /** @param {number | undefined} turns */
  rewind: (turns) => engine.rewind(turns),
  save: () => engine.save(),
  /** @param {Uint8Array} state */
  load: (state) => engine.load(state),
  /** @param {{adapter: string | Uint8Array | null, scale: number}} request adapter: its address, or its bytes */
  setAdapter: async ({ adapter, scale }) =>
    engine.setAdapter(typeof adapter === "string" ? await fetchBytes(adapter) : adapter, scale),
  /** @param {{text: string, special: boolean}} request */
  tokenize: ({ text, special }) => engine.tokenize(text, special),
  /** @param {{picture: {data: Uint8Array, width: number, height: number}, tokens: number}} request */
  async image({ picture, tokens }) {
    if (!fetchEncoder) throw new EdgeError("unsupported", "this site's model sees no pictures: export it with --mmproj");
    engine.image(await fetchEncoder(), picture, tokens);
  },
  /** @param {{width: number, height: number, tokens: number}} request */
  imageTokens: ({ width, height, tokens }) => engine.imageTokens(width, height, tokens),
  /** @param {{samples: Float32Array, rate: number}} request */
  async sound({ samples, rate }) {
    if (!fetchEncoder) throw new EdgeError("unsupported", "this site's model hears no sounds: export it with --mmproj");
    engine.sound(await fetchEncoder(), samples, rate);
  },
  /** @param {{count: number, rate: number}} request */
  soundTokens: ({ count, rate }) => engine.soundTokens(count, rate),
  /** Fetches the encoder, so that the page's service worker has it without a connection, too. */
  async keepEyes() {
    await fetchEncoder?.();
  },
  /** @param {{texts: string[], options: any}} request */
  embed: ({ texts, options }) => engine.embed(texts, options),
};

addEventListener("message", async ({ data: { id, call, values } }) => {
  try {
    const result = await /** @type {Record<string, any>} */ (calls)[call](values, (/** @type {any} */ event) => postMessage({ id, event }));
    postMessage({ id, result }, { transfer: ArrayBuffer.isView(result) ? [result.buffer] : [] });
  } catch (error) {
    const { code = "failed", message } = /** @type {any} */ (error);
    postMessage({ id, error: { code: typeof code === "string" ? code : "failed", message } });
  }
});

/**
 * Chooses whether `gpu` will run passes; returns a function that prepares it when the module is ready. Without a GPU the module
 * runs all passes; only with `options.engine` "gpu" that is an error.
 *
 * @param {string} url @param {any} manifest @param {any} options @param {AbortSignal} signal
 * @returns {Promise<(tell: (step: string, loaded: number, total: number) => void) => Promise<void>>}
 */
async function chooseGpu(url, manifest, { engine: wanted = "auto", memory, threads }, signal) {
  const { gpu: programs } = manifest.web;
  if (!["auto", "cpu", "gpu"].includes(wanted)) throw new EdgeError("bad-argument", `engine ${wanted}: choose auto, cpu, gpu`);
  if (wanted === "cpu" || (!programs && wanted === "auto")) return async () => {};
  const insists = wanted === "gpu";
  if (!programs) throw new EdgeError("unsupported", "this site has no programs for a GPU: export it with --gpu");
  withoutGpu = whyNone();
  if (memory !== undefined && memory < bound + programs.memory) withoutGpu = "memory has no room for a GPU's buffers";
  if (withoutGpu && insists) throw new EdgeError("unsupported", withoutGpu);
  if (withoutGpu) return async () => {};
  const content = await fetchFile(url, manifest, programs.programs, signal);
  const device = (gpu = new Gpu(readPrograms(content), insists ? null : verdictsOf(url, manifest, threads)));
  return async (tell) => {
    const file = new URL(programs.weights, url).href;
    const name = await storageName(file, manifest.files[programs.weights].sha256);
    const source = { ...programs, url: file, name, resident: programs.bytes };
    try {
      await device.open(insists, (target) =>
        loadModel(source, target, (step, loaded) => insists && tell(step, loaded, programs.bytes), signal));
      await forget(name, { others: true });
    } catch (error) {
      if (insists) throw new EdgeError("unsupported", /** @type {any} */ (error).message);
    }
  };
}

/** The engine that ran an answer. @param {{gpu?: number, cpu?: number}} before its passes */
function ranOn(before) {
  if (!gpu) return { engine: "cpu", engineReason: withoutGpu };
  const [ours, others] = [gpu.passes.gpu - (before.gpu ?? 0), gpu.passes.cpu - (before.cpu ?? 0)];
  return { engine: !ours ? "cpu" : others ? "both" : "gpu", engineReason: gpu.why ?? gpu.raced };
}

/** @param {{initial: number, maximum: number}} pages */
function makeMemory({ initial, maximum }) {
  try {
    return new WebAssembly.Memory({ initial, maximum, shared: true });
  } catch {
    const mib = Math.ceil((maximum * PAGE) / 2 ** 20);
    throw new EdgeError("no-memory", `this browser has no ${mib} MiB for a page: export with a smaller --memory`);
  }
}

/** @param {string} url @param {any} manifest @param {string} name @param {AbortSignal} signal */
async function compile(url, manifest, name, signal) {
  const bytes = await fetchFile(url, manifest, name, signal);
  try {
    return await WebAssembly.compile(bytes);
  } catch {
    throw new EdgeError("unsupported", `${name} is no module that this browser can run: use a newer one`);
  }
}

/** Starts all threads but this one; returns their number. @param {number} count */
async function startThreads(count) {
  for (let number = 1; number < count; number++) {
    const worker = new Worker(new URL("./thread.js", import.meta.url), { type: "module" });
    worker.postMessage({ module: engine.module, memory: engine.memory, number, stack: engine.stack(number) });
    workers.push(worker);
  }
  const until = performance.now() + THREADS_WAIT;
  while (engine.threads < count - 1 && performance.now() < until) await new Promise((done) => setTimeout(done, 2));
  return engine.threads + 1;
}

const channel = new MessageChannel();
/** @type {(() => void)[]} */
const waiting = [];
channel.port1.onmessage = () => waiting.shift()?.();

/** Resolves when all present messages have been handled, sooner than a timer. */
function turn() {
  return new Promise((/** @type {(value?: any) => void} */ done) => {
    waiting.push(done);
    channel.port2.postMessage(0);
  });
}
