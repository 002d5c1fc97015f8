/** Reads the programs for a GPU that `edge export --gpu` wrote, edge/gpu.bin: edge/apps/gpu_programs.py has their form. */

/** @type {Record<string, [number, ...[string, string, number, number][]]>} */
const STRUCTS = {
  // generated: STRUCTS
  gpu_config: [244,
    ["kernels", "Uint32", 0, 1], ["kernels_at", "Uint32", 4, 1], ["buffers", "Uint32", 8, 1],
    ["buffers_at", "Uint32", 12, 1], ["parts", "Uint32", 16, 1], ["parts_at", "Uint32", 20, 1],
    ["dispatches", "Uint32", 24, 1], ["dispatches_at", "Uint32", 28, 1], ["passes", "Uint32", 32, 1],
    ["passes_at", "Uint32", 36, 1], ["adapted", "Uint32", 40, 1], ["adapted_at", "Uint32", 44, 1],
    ["numbers", "Uint32", 48, 1], ["numbers_at", "Uint32", 52, 1], ["tables", "Uint32", 56, 1],
    ["tokens", "Uint32", 60, 1], ["logits", "Uint32", 64, 1], ["layer_inputs", "Uint32", 68, 1],
    ["found", "Uint32", 72, 1], ["states", "Uint32", 76, 1], ["keys", "Uint32", 80, 2], ["values", "Uint32", 88, 2],
    ["row_scales", "Uint32", 96, 2], ["pairs", "Uint32", 104, 2], ["rows", "Uint32", 112, 2],
    ["head", "Uint32", 120, 2], ["row_bytes", "Uint32", 128, 2], ["rotated", "Uint32", 136, 2],
    ["heads_at", "Uint32", 144, 2], ["heads", "Uint32", 152, 2], ["starts", "Uint32", 160, 1],
    ["lengths", "Uint32", 164, 1], ["angles", "Uint32", 168, 1], ["temperatures", "Uint32", 172, 1],
    ["normals", "Uint32", 176, 1], ["positions_at", "Uint32", 180, 1], ["positions", "Uint32", 184, 1],
    ["angle_rows", "Uint32", 188, 1], ["pairs_rotated", "Uint32", 192, 1], ["kinds", "Uint32", 196, 1],
    ["vocab", "Uint32", 200, 1], ["chunk", "Uint32", 204, 1], ["all_heads", "Uint32", 208, 1],
    ["largest_head", "Uint32", 212, 1], ["input_stride", "Uint32", 216, 1], ["halves", "Uint32", 220, 1],
    ["shared", "Uint32", 224, 1], ["threads", "Uint32", 228, 1], ["staged", "Uint32", 232, 1],
    ["most_moved", "Uint32", 236, 1], ["top_at", "Uint32", 240, 1]],
  gpu_kernel: [88,
    ["name", "Text", 0, 48], ["source", "Uint32", 48, 3], ["length", "Uint32", 60, 3], ["threads", "Uint32", 72, 2],
    ["parts", "Uint32", 80, 1], ["written", "Uint32", 84, 1]],
  gpu_buffer: [24,
    ["size", "BigUint64", 0, 1], ["weights", "BigUint64", 8, 1], ["loaded", "Uint32", 16, 1],
    ["reserved", "Uint32", 20, 1]],
  gpu_part: [24,
    ["buffer", "Uint32", 0, 1], ["reserved", "Uint32", 4, 1], ["offset", "BigUint64", 8, 1],
    ["size", "BigUint64", 16, 1]],
  gpu_dispatch_config: [36,
    ["kernel", "Uint32", 0, 1], ["groups", "Uint32", 4, 2], ["per", "Uint32", 12, 1], ["numbers", "Uint32", 16, 1],
    ["parts", "Uint32", 20, 1], ["scalars", "Uint32", 24, 1], ["matrices", "Uint32", 28, 1],
    ["adapted", "Uint32", 32, 1]],
  gpu_pass: [8,
    ["first", "Uint32", 0, 1], ["count", "Uint32", 4, 1]],
  gpu_adapted: [24,
    ["buffer", "Uint32", 0, 1], ["reserved", "Uint32", 4, 1], ["at", "BigUint64", 8, 1], ["size", "BigUint64", 16, 1]],
  // end
};

const PASSES = [
  // generated: PASSES
  "STEP", "CHUNK", "LAST", "PICKED", "TOP", "MOVE_KEYS", "MOVE_VALUES", "MOVE_ROWS", "RING_MOVE_KEYS",
  "RING_MOVE_VALUES", "RING_MOVE_ROWS"
  // end
];

/** Words at the start of the buffer `tables`. */
export const STATE = {
  // generated: STATE
  COUNT: 0, ANGLE: 2, POSITION: 3, WANTED: 4, BANNED: 8, BANS: 16
  // end
};

// generated: TOP
export const TOP = 64; // logits that are read where they are enough for a draw
// end

const WGSL = 1; // among the languages of sources
const ALIGNMENT = 16; // bytes, of the flags of an adapter
const NONE = 0xffffffff; // instead of the number of a buffer

/**
 * The header, with tables as arrays, dispatches by the name of their pass, and null for missing buffers. weights, lora of a
 * buffer: the place of its content in the file of weights, and in an adapter's part for the GPU; Infinity: it is not there.
 * adapted: for each matrix the place of B in an adapter's part.
 *
 * @param {Uint8Array} bytes
 * @returns {any}
 */
export function readPrograms(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  /** @param {number} at @param {number} size */
  const text = (at, size) => new TextDecoder().decode(bytes.subarray(at, at + size)).split("\0", 1)[0];
  /** @param {string} name @param {number} at @returns {any} */
  const struct = (name, at) => {
    const [, ...fields] = STRUCTS[name];
    return Object.fromEntries(fields.map(([field, type, offset, count]) => {
      if (type === "Text") return [field, text(at + offset, count)];
      const values = Array.from({ length: count }, (_, each) => type === "Uint32"
        ? view.getUint32(at + offset + 4 * each, true) : Number(view.getBigUint64(at + offset + 8 * each, true)));
      return [field, count > 1 ? values : values[0]];
    }));
  };
  /** @param {string} name @param {number} at @param {number} count @returns {any[]} */
  const table = (name, at, count) => Array.from({ length: count }, (_, each) => struct(name, at + each * STRUCTS[name][0]));
  const head = struct("gpu_config", 0);
  /** @param {number} first @param {number} count */
  const numbers = (first, count) =>
    Array.from({ length: count }, (_, each) => view.getUint32(head.numbers_at + 4 * (first + each), true));
  const kernels = table("gpu_kernel", head.kernels_at, head.kernels);
  const dispatches = table("gpu_dispatch_config", head.dispatches_at, head.dispatches).map((each) => ({
    ...each, parts: numbers(each.numbers, each.parts), scalars: numbers(each.numbers + each.parts, each.scalars),
    matrices: numbers(each.numbers + each.parts + each.scalars, each.matrices),
  }));
  const buffers = table("gpu_buffer", head.buffers_at, head.buffers).map(({ loaded, weights, size }) =>
    ({ size, weights: loaded ? weights : Infinity, lora: Infinity }));
  const adapted = table("gpu_adapted", head.adapted_at, head.adapted);
  let lora = Math.ceil(adapted.length / ALIGNMENT) * ALIGNMENT; // bytes of an adapter's part for the GPU: flags, then buffers
  for (const { buffer } of adapted) {
    if (buffers[buffer].lora < Infinity) continue;
    buffers[buffer].lora = lora;
    lora += buffers[buffer].size;
  }
  const passes = table("gpu_pass", head.passes_at, head.passes);
  const arenas = head.keys.map((/** @type {number} */ keys, /** @type {number} */ each) => ({
    buffers: [keys, head.values[each], head.row_scales[each]].filter((number) => number !== NONE), pairs: head.pairs[each],
    scaled: head.row_scales[each] !== NONE, rows: head.rows[each], head: head.head[each], bytes: head.row_bytes[each],
    interleaved: head.halves ? head.rotated[each] : 0, heads: numbers(head.heads_at[each], head.heads[each]),
    reflected: head.normals > 0,
    mover: each ? "RING_MOVE_ROWS" : "MOVE_ROWS",
  }));
  return {
    ...head,
    kernels: kernels.map((each) => ({ ...each, source: text(each.source[WGSL], each.length[WGSL]) })),
    buffers,
    adapted: adapted.map(({ buffer, at, size }) => ({ first: buffers[buffer].lora + at, end: buffers[buffer].lora + at + size })),
    lora,
    parts: table("gpu_part", head.parts_at, head.parts),
    passes: Object.fromEntries(passes.map(({ first, count }, each) => [PASSES[each], dispatches.slice(first, first + count)])),
    arenas: arenas.filter((/** @type {any} */ each) => each.pairs !== NONE),
  };
}
