/** Races between the module and the page's GPU, and the results of earlier visits. */
import { digest } from "./manifest.js";
import { keepNote, readNote, storageName } from "./store.js";

const RACED = 8; // tokens of each engine in a race

/** The faster engine, in words, and whether the GPU lost. @typedef {{raced: string, lost: boolean}} Verdict */
/** @typedef {{recall: (adapter: string) => Promise<Verdict | null>, keep: (adapter: string, verdict: Verdict) => Promise<void>}} Verdicts */

/** Times some tokens of the module, then some of the GPU. */
export class Race {
  /** Milliseconds from one step to the next. @type {{cpu: number[], gpu: number[]}} */
  #times = { cpu: [], gpu: [] };
  /** @type {{engine: "cpu" | "gpu", at: number, tokens: number} | null} the step before */
  #before = null;
  #over = false;

  /** @param {number} tokens that the GPU has chosen */
  ran(tokens) {
    if (this.#before) this.#before.tokens = tokens;
  }

  /** Called before a pass. cpu: the module runs it. lost: the GPU has lost. raced: the result, in words. @param {number} count tokens @param {boolean} ready */
  turn(count, ready) {
    if (this.#over) return {};
    const now = performance.now();
    if (this.#before && count === 1) this.#times[this.#before.engine].push((now - this.#before.at) / this.#before.tokens);
    const { cpu, gpu } = this.#times;
    const ours = ready && cpu.length >= RACED;
    this.#before = count === 1 ? { engine: ours ? "gpu" : "cpu", at: now, tokens: 1 } : null;
    if (gpu.length < RACED) return { cpu: count === 1 && !ours };
    this.#over = true;
    const [slow, fast] = [gpu, cpu].map((each) => each.slice(-RACED).sort((a, b) => a - b)[RACED >> 1]);
    const [names, times] = slow > fast ? [["CPU", "GPU"], [fast, slow]] : [["GPU", "CPU"], [slow, fast]];
    const [first, second] = times.map((each) => each.toFixed(1));
    return { lost: slow > fast, raced: `the ${names[0]} is faster: ${first} ms a token, the ${names[1]} ${second} (measured)` };
  }
}

/**
 * Verdicts in storage, by programs, browser, threads and adapter.
 *
 * @param {string} url @param {any} manifest @param {number | undefined} threads
 * @returns {Verdicts}
 */
export function verdictsOf(url, { web: { gpu: { programs } }, files }, threads) {
  const name = async (/** @type {string} */ adapter) => {
    const all = [files[programs].sha256, navigator.userAgent, globalThis.crossOriginIsolated, threads, adapter];
    return storageName(new URL(programs, url).href, await digest(new TextEncoder().encode(all.join("\n"))));
  };
  return {
    /** @param {string} adapter */
    async recall(adapter) {
      try {
        return JSON.parse(await readNote(await name(adapter)));
      } catch {
        return null; // there is none, or it is damaged
      }
    },
    /** @param {string} adapter @param {{raced: string, lost: boolean}} verdict */
    async keep(adapter, verdict) {
      await keepNote(await name(adapter), JSON.stringify(verdict));
    },
  };
}
