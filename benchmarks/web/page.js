// Engines that share this page, and runs of them one after another. benchmarks/web.py calls the functions of `bench`.

/**
 * An engine, as edge.js, wllama.js and onnx.js open it.
 * @typedef {object} Engine
 * @property {string} version
 * @property {(prompt: {text: string, ids: number[]}, tokens: number, onPiece: () => void) => Promise<object>} run
 *   Greedily answers the prompt, whose ids those of its text are, from an empty KV cache, and does not end early. The
 *   object has `tokens`, those of the answer, its `text` or `ids`, and what else the engine tells.
 * @property {() => Promise<void>} close
 */

/** @type {Map<string, Engine>} */
const engines = new Map();
let times = [];

globalThis.bench = {
  /** seconds until an engine can answer. settings: what its file reads. */
  async open(name, settings) {
    const began = performance.now();
    const { open } = await import(`./${name}.js`);
    const engine = await open(settings);
    engines.set(name, engine);
    return { seconds: (performance.now() - began) / 1e3, version: engine.version };
  },

  /** first: seconds from the call to the first token. decode: tok/s of the others, as this page sees them. */
  async run(name, prompt, tokens) {
    times = [];
    const began = performance.now();
    const own = await engines.get(name).run(prompt, tokens, () => times.push(performance.now()));
    const decode = ((own.tokens - 1) * 1e3) / (times.at(-1) - times[0]);
    return { ...own, first: (times[0] - began) / 1e3, decode };
  },

  /** Pieces of the answer that is being written, and of those the speed of some, in tok/s. */
  progress: () => times.length,
  speed: (from, to) => ((to - 1 - from) * 1e3) / (times[to - 1] - times[from]),

  async close(name) {
    await engines.get(name).close();
    engines.delete(name);
  },
};
