/** The module against the page's GPU: which one generates tokens sooner, and what earlier visits have found. */
import { digest } from "./manifest.js";
import { keepNote, readNote, storageName } from "./store.js";

const RACED = 8; // tokens that each engine generates before the slower one is left

/** Which engine was faster, in words, and whether the GPU is left. @typedef {{raced: string, lost: boolean}} Verdict */
/** @typedef {{recall: (adapter: string) => Promise<Verdict | null>, keep: (adapter: string, verdict: Verdict) => Promise<void>}} Verdicts */

/** Which engine generates tokens sooner: some are left to the module first, then some to the GPU. */
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

  /** Before a pass. cpu: the module is to run it. lost: the GPU is left. raced: which engine is faster. @param {number} count tokens @param {boolean} ready */
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
 * What races have found, in storage: for these programs, a browser, its threads, and an adapter.
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
