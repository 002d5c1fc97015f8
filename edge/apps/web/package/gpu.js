/**
 * The passes of a model on the page's GPU (WebGPU), by programs that `edge export --gpu` wrote: gpu.bin.
 *
 * The KV rows are in the module's memory, and the device has a copy. Before a pass the device gets the tiles that the module
 * has changed; after it the module gets the new rows. So the module can run any pass itself, such as one in which the device
 * is lost, and it evicts, rotates and saves rows as without a GPU.
 */

import { STATE, TOP } from "./programs.js";
import { Race } from "./race.js";
import { Arena, placeOf, TILE } from "./rows.js";

const ALIGNMENT = 256; // bytes, of offsets of uniforms
const WORK = 2048; // dispatches times tokens of a submission: drivers reset a GPU that is busy for seconds
const PATIENCE = 30000; // ms for a pass …
const FIRST = 300000; // … and for the first ones, in which drivers compile
const GRACE = 200; // ms after an error, until a loss of the device is reported
const LEFT = -1; // answer of env.gpu: the module runs all passes from now on, and may draft

/** Bits of WebGPU's usages, a stage, and a mode of mapping. */
const [MAP_READ, COPY_SRC, COPY_DST, UNIFORM, STORAGE, COMPUTE, READ] = [1, 4, 8, 64, 128, 4, 1];
const LIMITS = { maxStorageBufferBindingSize: 2 ** 27, maxBufferSize: 2 ** 28 }; // guaranteed by every device

/** @typedef {{name: string, pipeline: any, layout: any}} Kernel */
/** @typedef {import("./rows.js").Part} Part */
/** @typedef {import("./rows.js").Place} Place */
/** @typedef {{pipeline: any, group: any, x: number, y: number, per: number}} Step */

/** Why this browser cannot use a GPU; null if it may. @returns {string | null} */
export function whyNone() {
  if (!("Suspending" in WebAssembly)) return "this browser's WebAssembly cannot wait for a GPU";
  return "gpu" in navigator ? null : "this browser has no WebGPU";
}

/** A device with kernels and buffers. It refuses passes until `open` has ended, and after `fail`. */
export class Gpu {
  /** Passes by the GPU and by the module. */
  passes = { gpu: 0, cpu: 0 };
  /** Why it refuses passes; null: it runs them. @type {string | null} */
  why = "the GPU is being prepared";
  /** The result of a race; null: there was none. @type {string | null} */
  raced = null;
  #failed = false;
  /** @type {any} */
  #device = null;
  /** @type {any[]} by their numbers */
  #buffers = [];
  /** @type {any} the buffer for reading */
  #mapped = null;
  /** @type {Arena[]} */
  #arenas = [];
  /** @type {Record<string, Step[]>} */
  #recorded = {};
  /** Ends the wait for the device. @type {(error: Error) => void} */
  #abandon = () => {};
  /** Positions as the device has them. */
  #sent;
  /** Whether the device has normals. */
  #reflects = false;
  /** @type {Race | null} */
  #race;
  #verdicts;
  #adapter = "";

  /** @param {any} programs see readPrograms @param {import("./race.js").Verdicts | null} verdicts of earlier races; null: no race */
  constructor(programs, verdicts) {
    this.programs = programs;
    this.#verdicts = verdicts;
    this.#race = verdicts && new Race();
    this.#sent = new Int32Array(programs.positions);
  }

  /**
   * Throws an Error of one line if the device cannot run the programs.
   *
   * @param {boolean} software whether an adapter that runs on the CPU will do
   * @param {(target: {length: number, set: (bytes: Uint8Array, at: number) => void}) => Promise<any>} load the weights
   */
  async open(software, load) {
    try {
      await this.#open(software);
      const compiled = this.#compile();
      compiled.catch(() => {}); // it is awaited after the weights
      await load({ length: Infinity, set: (bytes, at) => this.#put(bytes, at) });
      this.#record(await compiled);
      for (const pass of ["STEP", "CHUNK", "LAST"]) this.#submit(pass, 1); // without tokens, since the tables are zero
      await this.#wait(this.#device.queue.onSubmittedWorkDone(), FIRST);
      for (const what of ["the browser refuses a program", "the GPU has too little memory"]) {
        const error = await this.#device.popErrorScope();
        if (error) throw new Error(`${what}: ${error.message}`);
      }
      if (!this.#failed) this.why = null;
    } catch (error) {
      this.fail(/** @type {any} */ (error).message);
    }
    if (this.why) throw new Error(this.why);
  }

  /** Stops using the GPU for good. @param {string} why */
  fail(why) {
    if (this.#failed) return;
    this.#failed = true;
    this.why = why.split("\n")[0];
    this.#abandon(new Error(this.why));
    this.#device?.destroy();
    this.#recorded = {};
    this.#buffers = [];
  }

  /** @param {boolean} software */
  async #open(software) {
    const adapter = await /** @type {any} */ (navigator).gpu.requestAdapter({ powerPreference: "high-performance" });
    if (!adapter) throw new Error("the browser has no GPU here");
    if (!software && (adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter)) {
      throw new Error("the only GPU is a software adapter, which runs on the CPU");
    }
    const { vendor, architecture, device: model, description } = adapter.info ?? {};
    this.#adapter = [vendor, architecture, model, description].join();
    const verdict = await this.#verdicts?.recall(this.#adapter);
    if (verdict) {
      this.raced = verdict.raced.replace("(measured)", "(measured on an earlier visit)");
      this.#race = null;
      if (verdict.lost) throw new Error(this.raced);
    }
    const largest = (/** @type {{size: number}[]} */ all) => Math.max(...all.map(({ size }) => size));
    const { parts, buffers, chunk, vocab } = this.programs;
    const needed = { maxStorageBufferBindingSize: largest(parts), maxBufferSize: largest(buffers) };
    /** @type {Record<string, number>} */
    const requiredLimits = {};
    for (const [name, bytes] of Object.entries(needed)) {
      if (adapter.limits[name] < bytes) throw new Error(`the GPU's ${name} is ${adapter.limits[name]}: the model needs ${bytes}`);
      if (bytes > LIMITS[/** @type {"maxBufferSize"} */ (name)]) requiredLimits[name] = bytes;
    }
    const device = (this.#device = await adapter.requestDevice({ requiredLimits }));
    device.lost.then((/** @type {any} */ { message }) => this.fail(`the GPU is lost: ${message || "unknown reason"}`));
    device.addEventListener("uncapturederror", (/** @type {any} */ { error }) => this.fail(`the GPU failed: ${error.message}`));
    for (const kind of ["out-of-memory", "validation"]) device.pushErrorScope(kind);
    this.#buffers = buffers.map((/** @type {any} */ { size }) => this.#buffer(size, STORAGE | COPY_DST | COPY_SRC));
    this.#arenas = this.programs.arenas.map((/** @type {any} */ each) => new Arena(each, this.programs.staged));
    const rows = this.#arenas.reduce((sum, { form, bytes }) => sum + (form.heads.length * chunk + TILE) * bytes, 0);
    this.#mapped = this.#buffer(4 * vocab + rows, MAP_READ | COPY_DST);
  }

  /** @param {number} size @param {number} usage */
  #buffer(size, usage) {
    return this.#device.createBuffer({ size, usage });
  }

  /** @param {number} buffer @param {number} at bytes @param {ArrayBufferView} data */
  #write(buffer, at, data) {
    this.#device.queue.writeBuffer(this.#buffers[buffer], at, data);
  }

  /** Writes bytes of the file of weights to their buffers. @param {Uint8Array} bytes @param {number} at */
  #put(bytes, at) {
    if (this.#failed) throw new Error(this.why ?? "");
    this.programs.buffers.forEach((/** @type {any} */ { size, weights, loaded }, /** @type {number} */ number) => {
      const [from, to] = [Math.max(at, weights), Math.min(at + bytes.length, weights + size)];
      if (loaded && from < to) this.#write(number, from - weights, bytes.subarray(from - at, to - at));
    });
  }

  /** @returns {Promise<Kernel[]>} */
  #compile() {
    const device = this.#device;
    return Promise.all(this.programs.kernels.map(async (/** @type {any} */ { name, source, parts, written }) => {
      const of = (/** @type {number} */ part) => ((written >> part) & 1 ? "storage" : "read-only-storage");
      const kinds = Array.from({ length: parts + 1 }, (_, each) => (each < parts ? of(each) : "uniform"));
      const layout = device.createBindGroupLayout({
        entries: kinds.map((type, binding) => ({ binding, visibility: COMPUTE, buffer: { type } })),
      });
      const pipeline = await device.createComputePipelineAsync({
        layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module: device.createShaderModule({ code: source }), entryPoint: name },
      });
      return { name, pipeline, layout };
    }));
  }

  /** Records the dispatches of each pass, which never change. @param {Kernel[]} kernels */
  #record(kernels) {
    const { passes, parts: places } = this.programs;
    for (const [pass, dispatches] of Object.entries(/** @type {Record<string, any[]>} */ (passes))) {
      const numbers = new Int32Array((dispatches.length * ALIGNMENT) / 4);
      const uniform = this.#buffer(numbers.byteLength, UNIFORM | COPY_DST);
      this.#recorded[pass] = dispatches.map(({ kernel, parts, scalars, groups: [x, y], per }, at) => {
        numbers.set([...scalars, x - 1], (at * ALIGNMENT) / 4);
        const { pipeline, layout } = kernels[kernel];
        const resources = parts.map((/** @type {number} */ part) => {
          const { buffer, offset, size } = places[part];
          return { buffer: this.#buffers[buffer], offset, size };
        });
        resources.push({ buffer: uniform, offset: at * ALIGNMENT, size: ALIGNMENT });
        const entries = resources.map((/** @type {any} */ resource, /** @type {number} */ binding) => ({ binding, resource }));
        return { pipeline, group: this.#device.createBindGroup({ layout, entries }), x, y, per };
      });
      this.#device.queue.writeBuffer(uniform, 0, numbers);
    }
  }

  /**
   * Runs one pass, or one step for each token that it chooses: env.gpu of web.h. A refused pass leaves the module's memory
   * unchanged.
   *
   * @param {WebAssembly.Memory} memory
   * @param {number} job
   * @returns {Promise<number>}
   */
  async run(memory, job) {
    const [tokens, count, position, angles, stride, temperatures, starts, lengths, positions, logits, picks, most, bans,
      banned, chosen, normals, inputs, vectors, padded, ...rest] = new Uint32Array(memory.buffer, job, 31);
    const rows = most || count;
    const turn = this.#race?.turn(count, this.why === null);
    if (turn?.raced) {
      this.raced = turn.raced;
      await this.#verdicts?.keep(this.#adapter, { raced: turn.raced, lost: turn.lost });
      if (turn.lost) this.fail(turn.raced);
    }
    if (this.why !== null || turn?.cpu) {
      this.passes.cpu++;
      return this.#failed ? LEFT : 0;
    }
    try {
      const places = this.#arenas.map((_, at) => placeOf(rest.slice(6 * at, 6 * at + 6)));
      this.#arenas.forEach((arena, at) => this.#upload(memory, arena, places[at]));
      if (normals && !this.#reflects) this.#sendNormals(memory, normals);
      if (inputs) this.#sendInputs(memory, inputs, vectors, padded);
      this.#prepare(memory, { tokens, count, rows, position, angles, stride, temperatures, starts, lengths, positions, bans, banned });
      for (let step = 0; step < most; step++) for (const pass of ["STEP", "PICKED"]) this.#submit(pass, 1);
      if (!most) this.#submit(count === 1 ? "STEP" : "CHUNK", count);
      if (count > 1) this.#submit("LAST", 1);
      if (picks && !most) this.#submit("TOP", 1);
      const { all_heads } = this.programs;
      const own = { starts: words(memory, starts, all_heads), lengths: words(memory, lengths, all_heads) };
      const parts = this.#arenas.flatMap((arena) => arena.appended(own, rows));
      const { programs } = this;
      const wanted = most ? [programs.tokens, 4 * programs.chunk, 4 * most] : picks ? [programs.found, programs.top_at, 8 * TOP]
        : [programs.logits, 0, 4 * programs.vocab];
      const found = await this.#read(wanted, parts);
      if (most) takeTokens(new Int32Array(found, 0, most), new Int32Array(memory.buffer, chosen, most));
      else if (picks) takeTop(new Uint32Array(found, 0, 2 * TOP), new Float32Array(memory.buffer, logits, programs.vocab));
      else takeLogits(new Float32Array(found, 0, programs.vocab), new Float32Array(memory.buffer, logits, programs.vocab));
      for (const part of parts) part.arena.store(memory, places[this.#arenas.indexOf(part.arena)], part, found);
      this.#mapped.unmap();
      this.passes.gpu++;
      this.#race?.ran(rows);
      return most || 1;
    } catch (error) {
      this.fail(/** @type {any} */ (error).message);
      this.passes.cpu++;
      return LEFT;
    }
  }

  /** Sends the tiles of rows that the module has changed. @param {WebAssembly.Memory} memory @param {Arena} arena @param {Place} place */
  #upload(memory, arena, place) {
    const changed = new Uint8Array(memory.buffer, place.changed, place.rows / TILE);
    for (let first = changed.indexOf(1); first >= 0; first = changed.indexOf(1, first)) {
      let end = first;
      while (end < changed.length && changed[end]) changed[end++] = 0;
      for (const [buffer, at, data] of arena.load(memory, place, first, end)) this.#write(buffer, at, data);
      first = end;
    }
  }

  /** Sends tokens, and the tables that kernels read. @param {WebAssembly.Memory} memory @param {Record<string, number>} job */
  #prepare(memory, { tokens, count, rows, position, angles, stride, temperatures, starts, lengths, positions, bans, banned }) {
    const { programs } = this;
    const { tables, kinds, largest_head: head, all_heads: heads, pairs_rotated: pairs } = programs;
    const start = new Uint32Array(programs.angles);
    [start[STATE.COUNT], start[STATE.POSITION], start[STATE.WANTED]] = [count, position, 1];
    start[STATE.BANNED] = banned;
    start.set(words(memory, bans, banned), STATE.BANS);
    start.set(words(memory, starts, heads), programs.starts);
    start.set(words(memory, lengths, heads), programs.lengths);
    this.#write(tables, 0, start);
    for (let kind = 0; kind < kinds && pairs; kind++) {
      const all = new Float32Array(memory.buffer, angles + 4 * kind * stride, 2 * head * rows);
      const own = new Float32Array(2 * pairs * rows); // cosines, then sines, of each pair
      for (let row = 0; row < rows; row++) {
        for (let pair = 0; pair < pairs; pair++) {
          own[2 * row * pairs + pair] = all[2 * row * head + 2 * pair];
          own[(2 * row + 1) * pairs + pair] = all[(2 * row + 1) * head + 2 * pair + 1];
        }
      }
      this.#write(tables, 4 * (programs.angles + kind * programs.angle_rows * 2 * pairs), own);
    }
    if (temperatures) this.#write(tables, 4 * programs.temperatures, words(memory, temperatures, count).slice());
    this.#sendPositions(new Int32Array(memory.buffer, positions, this.#sent.length));
    this.#write(programs.tokens, 0, words(memory, tokens, count).slice());
  }

  /** Sends positions that have changed, for sliding windows. @param {Int32Array} now */
  #sendPositions(now) {
    let [first, end] = [0, now.length];
    while (first < end && now[first] === this.#sent[first]) first++;
    while (end > first && now[end - 1] === this.#sent[end - 1]) end--;
    if (first === end) return;
    this.#sent.set(now.subarray(first, end), first);
    this.#write(this.programs.tables, 4 * (this.programs.positions_at + first), this.#sent.subarray(first, end));
  }

  /** Sends the normals of the reflections of keys. @param {WebAssembly.Memory} memory @param {number} normals */
  #sendNormals(memory, normals) {
    const { tables, normals: first, largest_head: stride } = this.programs;
    for (const arena of this.#arenas) {
      const { head, heads } = arena.form;
      for (const each of heads) {
        const theirs = new Float32Array(memory.buffer, normals + 4 * each * stride, head);
        this.#write(tables, 4 * (first + each * stride), arena.normals(theirs));
      }
    }
    this.#reflects = true;
  }

  /**
   * Sends the vectors that tokens have for each layer.
   *
   * @param {WebAssembly.Memory} memory @param {number} inputs @param {number} vectors of all tokens
   * @param {number} padded values of each in the module
   */
  #sendInputs(memory, inputs, vectors, padded) {
    const { layer_inputs: buffer, input_stride: stride } = this.programs;
    const all = new Float32Array(memory.buffer, inputs, vectors * padded);
    const own = new Float32Array(vectors * stride);
    for (let each = 0; each < vectors; each++) own.set(all.subarray(each * padded, (each + 1) * padded), each * stride);
    this.#write(buffer, 0, own);
  }

  /** @param {string} pass @param {number} tokens */
  #submit(pass, tokens) {
    const steps = this.#recorded[pass];
    const most = Math.max(1, Math.floor(WORK / tokens));
    for (let at = 0; at < steps.length; at += most) {
      const encoder = this.#device.createCommandEncoder();
      encode(encoder, steps.slice(at, at + most), tokens);
      this.#device.queue.submit([encoder.finish()]);
    }
  }

  /** Waits for `work`; throws if the device is lost or does not answer in time. @param {Promise<any>} work @param {number} patience ms */
  async #wait(work, patience) {
    let timer = 0;
    try {
      await new Promise((done, failed) => {
        this.#abandon = failed; // no Promise.race with a lasting promise, which would keep all others alive
        timer = setTimeout(() => failed(new Error(`the GPU did not answer for ${patience / 1000} s`)), patience);
        work.then(done, (error) => setTimeout(() => failed(error), GRACE));
      });
    } finally {
      clearTimeout(timer);
    }
    if (this.#failed) throw new Error(this.why ?? "");
  }

  /**
   * Reads bytes of a buffer, and rows.
   *
   * @param {number[]} what a buffer, an offset, bytes
   * @param {Part[]} parts
   * @returns {Promise<ArrayBuffer>} valid until the buffer is unmapped
   */
  async #read([from, offset, bytes], parts) {
    const { queue } = this.#device;
    const read = this.#mapped;
    let at = bytes;
    let encoder = this.#device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.#buffers[from], offset, read, 0, bytes);
    for (const part of parts) {
      const { pairs, mover } = part.arena.form;
      this.#write(pairs, 0, part.pairs);
      encode(encoder, this.#recorded[mover], part.rows.length);
      for (const [buffer, from, size] of part.arena.staged(part.rows.length)) {
        part.at.push(at);
        encoder.copyBufferToBuffer(this.#buffers[buffer], from, read, at, size);
        at += size;
      }
      queue.submit([encoder.finish()]); // before the pairs of the next part are written
      encoder = this.#device.createCommandEncoder();
    }
    queue.submit([encoder.finish()]);
    await this.#wait(read.mapAsync(READ, 0, at), PATIENCE);
    return read.getMappedRange(0, at);
  }
}

const NAN = "the GPU computed no number (NaN)";

/** Copies the tokens that the device has chosen. @param {Int32Array} found @param {Int32Array} into */
function takeTokens(found, into) {
  if (found.some((token) => token < 0)) throw new Error(NAN);
  into.set(found);
}

/** @param {Float32Array} found @param {Float32Array} into */
function takeLogits(found, into) {
  if (found.some(Number.isNaN)) throw new Error(NAN);
  into.set(found);
}

/** The largest logits, as pairs of a key and an id; all others become −∞. @param {Uint32Array} found @param {Float32Array} into */
function takeTop(found, into) {
  if (found[0] === 0xffffffff) throw new Error(NAN);
  const words = new Uint32Array(into.buffer, into.byteOffset, into.length);
  into.fill(-Infinity);
  for (let at = 0; at < 2 * Math.min(TOP, into.length); at += 2) {
    words[found[at + 1]] = found[at] >>> 31 ? found[at] ^ 0x80000000 : ~found[at];
  }
}

/** @param {WebAssembly.Memory} memory @param {number} address @param {number} count */
function words(memory, address, count) {
  return new Uint32Array(memory.buffer, address, count);
}

/** @param {any} encoder @param {Step[]} steps @param {number} tokens */
function encode(encoder, steps, tokens) {
  const pass = encoder.beginComputePass();
  for (const { pipeline, group, x, y, per } of steps) {
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(x, per ? Math.ceil(tokens / per) : y);
  }
  pass.end();
}
