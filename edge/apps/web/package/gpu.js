/**
 * The passes of a model on the page's GPU (WebGPU), by programs that `edge export --gpu` wrote: gpu.bin.
 *
 * The KV rows are in the module's memory, and the device has a copy. Before a pass the device gets the tiles that the module
 * has changed; after it the module gets the new rows. Fixed states of recurrent layers are large: they come with one of some
 * steps and at the end of an answer, and the module can run the tokens between again. So it can run any pass itself, such as
 * one in which the device is lost, and it evicts, rotates and saves rows as without a GPU.
 */

import { anglesOf, layerInputs, startOf, storeStates, takeLogits, takeTokens, takeTop, words } from "./exchange.js";
import { TOP } from "./programs.js";
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
/** @typedef {import("./exchange.js").States} States */
/** @typedef {import("./rows.js").Part} Part */
/** @typedef {import("./rows.js").Place} Place */
/**
 * matrices: the step runs only if an adapter changes one of them (adapted), or none.
 * @typedef {{
 *   pipeline: any, group: any, x: number, y: number, per: number, matrices: number[], adapted: boolean
 * }} Step
 */

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
  /** Those of #recorded that run with this adapter. @type {Record<string, Step[]>} */
  #steps = {};
  /** For each matrix that may have an adapter: 1: it has one. @type {Uint8Array} */
  #changed;
  /** An adapter's part that came before the device was ready. @type {Uint8Array | null} */
  #waiting = null;
  /** Ends the wait for the device. @type {(error: Error) => void} */
  #abandon = () => {};
  /** Positions as the device has them. */
  #sent;
  /** States that the device has written since the module got them; null: there are none. @type {States | null} */
  #newer = null;
  /** Whether the device has normals. */
  #reflects = false;
  /** @type {Race | null} */
  #race;
  #verdicts;
  #adapter = "";

  /**
   * @param {any} programs see readPrograms
   * @param {import("./race.js").Verdicts | null} verdicts of earlier races; null: no race
   */
  constructor(programs, verdicts) {
    this.programs = programs;
    this.#verdicts = verdicts;
    this.#race = verdicts && new Race();
    this.#sent = new Int32Array(programs.positions);
    this.#changed = new Uint8Array(programs.adapted.length);
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
      await load({ length: Infinity, set: (bytes, at) => this.#put(bytes, at, "weights") });
      this.#record(await compiled);
      for (const pass of ["STEP", "CHUNK", "LAST"]) this.#submit(pass, 1); // without tokens, since the tables are zero
      await this.#wait(this.#device.queue.onSubmittedWorkDone(), FIRST);
      for (const what of ["the browser refuses a program", "the GPU has too little memory"]) {
        const error = await this.#device.popErrorScope();
        if (error) throw new Error(`${what}: ${error.message}`);
      }
      if (!this.#failed && this.#waiting) this.#put(this.#waiting, 0, "lora");
      this.#waiting = null;
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
    this.#recorded = this.#steps = {};
    this.#buffers = [];
    this.#waiting = null;
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
    const { parts, buffers, chunk, vocab, states } = this.programs;
    const needed = { maxStorageBufferBindingSize: largest(parts), maxBufferSize: largest(buffers) };
    /** @type {Record<string, number>} */
    const requiredLimits = {};
    for (const [name, bytes] of Object.entries(needed)) {
      const most = adapter.limits[name];
      if (most < bytes) throw new Error(`the GPU's ${name} is ${most}: the model needs ${bytes}`);
      if (bytes > LIMITS[/** @type {"maxBufferSize"} */ (name)]) requiredLimits[name] = bytes;
    }
    const device = (this.#device = await adapter.requestDevice({ requiredLimits }));
    device.lost.then((/** @type {any} */ { message }) => this.fail(`the GPU is lost: ${message || "unknown reason"}`));
    device.addEventListener("uncapturederror", (/** @type {any} */ { error }) => {
      this.fail(`the GPU failed: ${error.message}`);
    });
    for (const kind of ["out-of-memory", "validation"]) device.pushErrorScope(kind);
    this.#buffers = buffers.map((/** @type {any} */ { size }) => this.#buffer(size, STORAGE | COPY_DST | COPY_SRC));
    this.#arenas = this.programs.arenas.map((/** @type {any} */ each) => new Arena(each, this.programs.staged));
    const rows = this.#arenas.reduce((sum, { form, bytes }) => sum + (form.heads.length * chunk + TILE) * bytes, 0);
    this.#mapped = this.#buffer(4 * vocab + rows + (buffers[states]?.size ?? 0), MAP_READ | COPY_DST);
  }

  /** @param {number} size @param {number} usage */
  #buffer(size, usage) {
    return this.#device.createBuffer({ size, usage });
  }

  /** @param {number} buffer @param {number} at bytes @param {ArrayBufferView} data */
  #write(buffer, at, data) {
    this.#device.queue.writeBuffer(this.#buffers[buffer], at, data);
  }

  /**
   * Writes bytes of weights, or of an adapter's part, to their buffers.
   * @param {Uint8Array} bytes
   * @param {number} at
   * @param {"weights" | "lora"} content
   */
  #put(bytes, at, content) {
    if (this.#failed) throw new Error(this.why ?? "");
    this.programs.buffers.forEach((/** @type {any} */ { size, [content]: place }, /** @type {number} */ number) => {
      const [from, to] = [Math.max(at, place), Math.min(at + bytes.length, place + size)];
      if (from < to) this.#write(number, from - place, bytes.subarray(from - at, to - at));
    });
  }

  /**
   * Takes bytes of an adapter's part for the GPU, whose first have the flags of all matrices; size 0: removes the adapter.
   * Returns 0 if a value overflows with this scale, otherwise 1: env.adapt of web.h.
   *
   * @param {WebAssembly.Memory} memory @param {number} at of the part @param {number} from address @param {number} size
   * @param {(from: number, size: number) => number} scaled multiplies values in memory
   */
  adapt(memory, at, from, size, scaled) {
    const { adapted, lora } = this.programs;
    let finite = 1;
    for (const { first, end } of adapted) {
      const [begin, stop] = [Math.max(at, first), Math.min(at + size, end)];
      if (begin < stop) finite &= scaled(from + begin - at, stop - begin);
    }
    const piece = new Uint8Array(memory.buffer, from, size).slice();
    if (!at) {
      this.#choose(size ? piece.subarray(0, adapted.length) : new Uint8Array(adapted.length));
      this.#race &&= new Race(); // since the times of both engines change
    }
    if (this.why === null) this.#put(piece, at, "lora");
    else if (!size) this.#waiting = null;
    else if (!this.#failed) (this.#waiting ??= new Uint8Array(lora)).set(piece, at);
    return finite;
  }

  /** Chooses the steps of an adapter that changes these matrices. @param {Uint8Array} changed */
  #choose(changed) {
    this.#changed = changed;
    this.#steps = Object.fromEntries(Object.entries(this.#recorded).map(([pass, steps]) => [pass,
      steps.filter(({ matrices, adapted }) => (
        !matrices.length || matrices.some((each) => changed[each]) === adapted
      ))]));
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
      this.#recorded[pass] = dispatches.map(({ kernel, parts, scalars, groups, per, matrices, adapted }, at) => {
        const [x, y] = groups;
        numbers.set([...scalars, x - 1], (at * ALIGNMENT) / 4);
        const { pipeline, layout } = kernels[kernel];
        const resources = parts.map((/** @type {number} */ part) => {
          const { buffer, offset, size } = places[part];
          return { buffer: this.#buffers[buffer], offset, size };
        });
        resources.push({ buffer: uniform, offset: at * ALIGNMENT, size: ALIGNMENT });
        const entries = resources.map(
          (/** @type {any} */ resource, /** @type {number} */ binding) => ({ binding, resource }),
        );
        const group = this.#device.createBindGroup({ layout, entries });
        return { pipeline, group, x, y, per, matrices, adapted: adapted === 1 };
      });
      this.#device.queue.writeBuffer(uniform, 0, numbers);
    }
    this.#choose(this.#changed);
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
      banned, chosen, normals, inputs, vectors, padded, at, values, changed, behind, settles, ...rest] =
      new Uint32Array(memory.buffer, job, 36);
    const states = { at, values, behind };
    const rows = most || count;
    const turn = this.#race?.turn(count, this.why === null);
    if (turn?.raced) {
      this.raced = turn.raced;
      this.#race = null;
      if (!this.#changed.includes(1)) await this.#verdicts?.keep(this.#adapter, { raced: turn.raced, lost: turn.lost });
    }
    if (turn?.cpu || turn?.lost) await this.settle(memory);
    if (turn?.lost) this.fail(turn.raced);
    if (this.why !== null || turn?.cpu) {
      this.passes.cpu++;
      return this.#failed ? LEFT : 0;
    }
    try {
      const places = this.#arenas.map((_, at) => placeOf(rest.slice(6 * at, 6 * at + 6)));
      this.#arenas.forEach((arena, at) => this.#upload(memory, arena, places[at]));
      if (normals && !this.#reflects) this.#sendNormals(memory, normals);
      if (inputs) this.#write(this.programs.layer_inputs, 0, layerInputs(memory, this.programs, inputs, vectors, padded));
      const stale = new Uint8Array(memory.buffer, changed, 1);
      if (values && stale[0]) this.#write(this.programs.states, 0, new Float32Array(memory.buffer, at, values));
      stale[0] = 0;
      this.#prepare(memory, {
        tokens, count, rows, position, angles, stride, temperatures, starts, lengths, positions, bans, banned,
      });
      for (let step = 0; step < most; step++) for (const pass of ["STEP", "PICKED"]) this.#submit(pass, 1);
      if (!most) this.#submit(count === 1 ? "STEP" : "CHUNK", count);
      if (count > 1) this.#submit("LAST", 1);
      if (picks && !most) this.#submit("TOP", 1);
      const { all_heads } = this.programs;
      const own = { starts: words(memory, starts, all_heads), lengths: words(memory, lengths, all_heads) };
      const parts = this.#arenas.flatMap((arena) => arena.appended(own, rows));
      const { programs } = this;
      const wanted = most ? [programs.tokens, 4 * programs.chunk, 4 * most]
        : picks ? [programs.found, programs.top_at, 8 * TOP]
        : [programs.logits, 0, 4 * programs.vocab];
      const found = await this.#read(wanted, parts, settles ? 4 * values : 0);
      if (most) takeTokens(new Int32Array(found, 0, most), new Int32Array(memory.buffer, chosen, most));
      else {
        const into = new Float32Array(memory.buffer, logits, programs.vocab);
        if (picks) takeTop(new Uint32Array(found, 0, 2 * TOP), into);
        else takeLogits(new Float32Array(found, 0, programs.vocab), into);
      }
      for (const part of parts) part.arena.store(memory, places[this.#arenas.indexOf(part.arena)], part, found);
      if (settles && values) storeStates(memory, states, found);
      this.#newer = settles || !values ? null : states;
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

  /** Gives the module the states that only the device has. @param {WebAssembly.Memory} memory */
  async settle(memory) {
    const states = this.#newer;
    this.#newer = null;
    if (!states || this.#failed || !new Uint32Array(memory.buffer, states.behind, 1)[0]) return;
    try {
      storeStates(memory, states, await this.#read([this.programs.states, 0, 4 * states.values], [], 0));
      this.#mapped.unmap();
    } catch (error) {
      this.fail(/** @type {any} */ (error).message);
    }
  }

  /**
   * Sends the tiles of rows that the module has changed.
   * @param {WebAssembly.Memory} memory
   * @param {Arena} arena
   * @param {Place} place
   */
  #upload(memory, arena, place) {
    const changed = new Uint8Array(memory.buffer, place.changed, place.rows / TILE);
    for (let first = changed.indexOf(1); first >= 0; first = changed.indexOf(1, first)) {
      let end = first;
      while (end < changed.length && changed[end]) changed[end++] = 0;
      for (const [buffer, at, data] of arena.load(memory, place, first, end)) this.#write(buffer, at, data);
      first = end;
    }
  }

  /**
   * Sends tokens, and the tables that kernels read.
   * @param {WebAssembly.Memory} memory
   * @param {Record<string, number>} job
   */
  #prepare(memory, job) {
    const { tokens, count, rows, position, angles, stride } = job;
    const { temperatures, starts, lengths, positions, bans, banned } = job;
    const { programs } = this;
    const { tables } = programs;
    this.#write(tables, 0, startOf(memory, programs, { count, position, starts, lengths, bans, banned }));
    for (let kind = 0; kind < programs.kinds && programs.pairs_rotated; kind++) {
      const at = programs.angles + kind * programs.angle_rows * 2 * programs.pairs_rotated;
      this.#write(tables, 4 * at, anglesOf(memory, programs, angles + 4 * kind * stride, rows));
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

  /** @param {string} pass @param {number} tokens */
  #submit(pass, tokens) {
    const steps = this.#steps[pass];
    const most = Math.max(1, Math.floor(WORK / tokens));
    for (let at = 0; at < steps.length; at += most) {
      const encoder = this.#device.createCommandEncoder();
      encode(encoder, steps.slice(at, at + most), tokens);
      this.#device.queue.submit([encoder.finish()]);
    }
  }

  /**
   * Waits for `work`; throws if the device is lost or does not answer in time.
   * @param {Promise<any>} work
   * @param {number} patience ms
   */
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
   * Reads bytes of a buffer, rows, and fixed states, which come last. Valid until the buffer is unmapped.
   *
   * @param {number[]} what a buffer, an offset, bytes @param {Part[]} parts @param {number} fixed bytes of the states
   * @returns {Promise<ArrayBuffer>}
   */
  async #read([from, offset, bytes], parts, fixed) {
    const { queue } = this.#device;
    const read = this.#mapped;
    let at = bytes;
    let encoder = this.#device.createCommandEncoder();
    encoder.copyBufferToBuffer(this.#buffers[from], offset, read, 0, bytes);
    for (const part of parts) {
      const { pairs, mover } = part.arena.form;
      this.#write(pairs, 0, part.pairs);
      encode(encoder, this.#steps[mover], part.rows.length);
      for (const [buffer, from, size] of part.arena.staged(part.rows.length)) {
        part.at.push(at);
        encoder.copyBufferToBuffer(this.#buffers[buffer], from, read, at, size);
        at += size;
      }
      queue.submit([encoder.finish()]); // before the pairs of the next part are written
      encoder = this.#device.createCommandEncoder();
    }
    if (fixed) encoder.copyBufferToBuffer(this.#buffers[this.programs.states], 0, read, at, fixed);
    queue.submit([encoder.finish()]);
    await this.#wait(read.mapAsync(READ, 0, at + fixed), PATIENCE);
    return read.getMappedRange(0, at + fixed);
  }
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
