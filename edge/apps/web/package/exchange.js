/** What a pass takes from the module's memory, besides KV rows, and what it gives back: tables in, results out. */

import { STATE, TOP } from "./programs.js";

/**
 * Fixed states in the module: addresses of `values` numbers, and of how many tokens they are behind the device's.
 * @typedef {{at: number, values: number, behind: number}} States
 */

/** @param {WebAssembly.Memory} memory @param {number} address @param {number} count */
export function words(memory, address, count) {
  return new Uint32Array(memory.buffer, address, count);
}

// ---- for the device --------------------------------------------------------------------------------------------------

/**
 * The first of the tables that kernels read: up to the angles.
 * @param {WebAssembly.Memory} memory
 * @param {any} programs
 * @param {Record<string, number>} job
 */
export function startOf(memory, programs, { count, position, starts, lengths, bans, banned }) {
  const start = new Uint32Array(programs.angles);
  [start[STATE.COUNT], start[STATE.POSITION], start[STATE.WANTED]] = [count, position, 1];
  start[STATE.BANNED] = banned;
  start.set(words(memory, bans, banned), STATE.BANS);
  start.set(words(memory, starts, programs.all_heads), programs.starts);
  start.set(words(memory, lengths, programs.all_heads), programs.lengths);
  return start;
}

/**
 * The angles of rows: cosines, then sines, of each pair that is rotated.
 * @param {WebAssembly.Memory} memory
 * @param {any} programs
 * @param {number} at their address
 * @param {number} rows
 */
export function anglesOf(memory, { largest_head: head, pairs_rotated: pairs }, at, rows) {
  const all = new Float32Array(memory.buffer, at, 2 * head * rows);
  const own = new Float32Array(2 * pairs * rows);
  for (let row = 0; row < rows; row++) {
    for (let pair = 0; pair < pairs; pair++) {
      own[2 * row * pairs + pair] = all[2 * row * head + 2 * pair];
      own[(2 * row + 1) * pairs + pair] = all[(2 * row + 1) * head + 2 * pair + 1];
    }
  }
  return own;
}

/**
 * The vectors that tokens have for each layer.
 *
 * @param {WebAssembly.Memory} memory @param {any} programs @param {number} inputs @param {number} vectors of all tokens
 * @param {number} padded values of each in the module
 */
export function layerInputs(memory, { input_stride: stride }, inputs, vectors, padded) {
  const all = new Float32Array(memory.buffer, inputs, vectors * padded);
  const own = new Float32Array(vectors * stride);
  for (let each = 0; each < vectors; each++) own.set(all.subarray(each * padded, (each + 1) * padded), each * stride);
  return own;
}

// ---- from the device -------------------------------------------------------------------------------------------------

const NAN = "the GPU computed no number (NaN)";

/**
 * Copies the states, which are the last of what was read.
 * @param {WebAssembly.Memory} memory
 * @param {States} states
 * @param {ArrayBuffer} found
 */
export function storeStates({ buffer }, { at, values, behind }, found) {
  new Float32Array(buffer, at, values).set(new Float32Array(found, found.byteLength - 4 * values, values));
  new Uint32Array(buffer, behind, 1)[0] = 0;
}

/** Copies the tokens that the device has chosen. @param {Int32Array} found @param {Int32Array} into */
export function takeTokens(found, into) {
  if (found.some((token) => token < 0)) throw new Error(NAN);
  into.set(found);
}

/** @param {Float32Array} found @param {Float32Array} into */
export function takeLogits(found, into) {
  if (found.some(Number.isNaN)) throw new Error(NAN);
  into.set(found);
}

/**
 * The largest logits, as pairs of a key and an id; all others become −∞.
 * @param {Uint32Array} found
 * @param {Float32Array} into
 */
export function takeTop(found, into) {
  if (found[0] === 0xffffffff) throw new Error(NAN);
  const words = new Uint32Array(into.buffer, into.byteOffset, into.length);
  into.fill(-Infinity);
  for (let at = 0; at < 2 * Math.min(TOP, into.length); at += 2) {
    words[found[at + 1]] = found[at] >>> 31 ? found[at] ^ 0x80000000 : ~found[at];
  }
}
