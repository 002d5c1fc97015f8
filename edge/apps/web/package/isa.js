/** Which instruction set of WebAssembly a browser computes with. */
import { EdgeError } from "./module.js";

/**
 * The fastest instruction set on this engine, of those for which a site has modules.
 *
 * A relaxed dot product may take its second operand as signed or unsigned, and may saturate, which tells how the browser
 * computes it. Engines that compute small numbers wrongly (Node 20) get another instruction set.
 *
 * @param {string[]} isas
 * @returns {string}
 */
export function chooseIsa(isas) {
  const relaxed = probe();
  const order = relaxed === "wide" ? ["relaxed", "relaxed16", "simd"] : relaxed ? ["relaxed16", "simd"] : ["simd"];
  const found = order.find((isa) => isas.includes(isa));
  if (!WebAssembly.validate(SIMD)) {
    throw new EdgeError("unsupported", "this browser has no WebAssembly SIMD: use a newer one");
  }
  if (!found) {
    throw new EdgeError("unsupported", `this browser runs ${order.join(", ")}, and this site has ${isas.join(", ")} alone`);
  }
  return found;
}

/** "wide": the CPU has instructions for dot products in 32 bits; "narrow": in 16 bits; "": none. */
function probe() {
  if (!WebAssembly.validate(RELAXED)) return "";
  const dot = /** @type {(a: number, b: number) => number} */ (
    new WebAssembly.Instance(new WebAssembly.Module(RELAXED)).exports.dot
  );
  for (const [a, b] of [[0x817f03fe, 0x7f017f0a], [0x80ff7f01, 0x00107f7f]]) {
    let expected = a | 0; // the accumulator
    for (let at = 0; at < 32; at += 8) expected += ((a << (24 - at)) >> 24) * ((b >>> at) & 255);
    if (dot(a, b) !== (expected | 0)) return "narrow";
  }
  return dot(0x7f7f7f7f, -1) === 0x7f7f7f7f + 2 * 32767 ? "narrow" : "wide"; // saturated: products are added in 16 bits
}

/** A module with one SIMD instruction, as a function `dot(a, b)`: a plus the sum of 4 products of bytes. */
const HEAD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1, 127, 3, 2, 1, 0, 7, 7, 1, 3, 100, 111, 116, 0, 0];
const SPLATS = [32, 0, 253, 17, 32, 1, 253, 17];
const RELAXED = body([...SPLATS, 32, 0, 253, 17, 253, 147, 2, 253, 27, 0, 11]);
const SIMD = body([...SPLATS, 253, 174, 1, 253, 27, 0, 11]);

/** @param {number[]} code */
function body(code) {
  return new Uint8Array([...HEAD, 10, code.length + 3, 1, code.length + 1, 0, ...code]);
}
