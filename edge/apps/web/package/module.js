/**
 * A WebAssembly module of edge, with its exports (web.h) as methods. It uses no API of pages, so that Node can load it.
 */

/** @typedef {(memory: WebAssembly.Memory, address: number, size: number) => number} Transfer */
/** @typedef {(from: number, size: number) => number} Scaled web_scale with an adapter's scale */
/**
 * A GPU: env.gpu and env.adapt of web.h.
 * @typedef {{run: (memory: WebAssembly.Memory, job: number) => Promise<number>,
 *   adapt: (memory: WebAssembly.Memory, at: number, from: number, size: number, scaled: Scaled) => number}} Device
 */

import { CODES, FORMS, HEARING, INFO, NAMES, OPTIONS, ROLES, SEGMENT, USAGE } from "./abi.js";

/** @typedef {import("./abi.js").Fields} Fields */
const { promising, Suspending } = /** @type {any} */ (WebAssembly); // JavaScript promise integration

const ALL = 0xffffffff; // turns
const FAILED = -7;

export class EdgeError extends Error {
  /**
   * @param {string} code
   * @param {string} message one line that says what was wrong and what to do
   */
  constructor(code, message) {
    super(message);
    this.name = "EdgeError";
    this.code = code;
  }
}

/**
 * A module's instance for one thread.
 *
 * @param {WebAssembly.Module} module
 * @param {WebAssembly.Memory} memory
 * @param {{write: Transfer, read: Transfer, row: (to: Uint8Array, at: number) => number, gpu?: Device, scale?: (from: number, size: number, scale: number) => number}} [host] which only the
 * first thread needs
 */
export async function instantiate(module, memory, host) {
  const env = {
    memory,
    now: () => performance.now() / 1000,
    random: () => crypto.getRandomValues(new Int32Array(1))[0],
    write: (/** @type {number} */ from, /** @type {number} */ size) => host?.write(memory, from >>> 0, size >>> 0) ?? -1,
    read: (/** @type {number} */ to, /** @type {number} */ size) => host?.read(memory, to >>> 0, size >>> 0) ?? 0,
    row: (/** @type {number} */ at, /** @type {number} */ to, /** @type {number} */ size) => {
      const bytes = new Uint8Array(size >>> 0); // since not every file can be read into shared memory
      const count = host?.row(bytes, at) ?? 0;
      new Uint8Array(memory.buffer).set(bytes, to >>> 0);
      return count;
    },
    gpu: host?.gpu ? new Suspending((/** @type {number} */ job) => host.gpu?.run(memory, job >>> 0)) : () => -1,
    adapt: (/** @type {number} */ at, /** @type {number} */ piece, /** @type {number} */ size, /** @type {number} */ scale) =>
      host?.gpu?.adapt(memory, at, piece >>> 0, size >>> 0, (...values) => (scale !== 1 && host.scale?.(...values, scale)) || 1) ?? 1,
  };
  const instance = await WebAssembly.instantiate(module, { env });
  return /** @type {any} */ (instance.exports);
}

/** The bytes of a saved conversation while a module writes or reads them. */
class State {
  at = 0;

  /** @param {Uint8Array} [bytes] */
  constructor(bytes = new Uint8Array(0)) {
    this.bytes = bytes;
  }

  /** @param {WebAssembly.Memory} memory @param {number} from @param {number} size */
  write(memory, from, size) {
    if (size > this.bytes.length - this.at) return -1;
    this.bytes.set(new Uint8Array(memory.buffer, from, size), this.at);
    this.at += size;
    return size;
  }

  /** @param {WebAssembly.Memory} memory @param {number} to @param {number} size */
  read(memory, to, size) {
    const bytes = this.bytes.subarray(this.at, this.at + size);
    new Uint8Array(memory.buffer).set(bytes, to);
    this.at += bytes.length;
    return bytes.length;
  }
}

/** The model and the session of a module. */
export class Engine {
  /** @type {State} */
  #state = new State();
  /** @type {[number, number] | null} */
  #file = null;
  /** @type {[number, number] | null} ears.edge */
  #ears = null;
  /** @type {(to: Uint8Array, at: number) => number} */
  #row = () => 0;

  /**
   * @param {WebAssembly.Module} module
   * @param {WebAssembly.Memory} memory
   */
  constructor(module, memory) {
    this.module = module;
    this.memory = memory;
    this.exports = /** @type {any} */ (null);
  }

  /**
   * @param {WebAssembly.Module} module
   * @param {WebAssembly.Memory} memory
   * @param {Device | null} [gpu]
   */
  static async make(module, memory, gpu = null) {
    const engine = new Engine(module, memory);
    engine.exports = await instantiate(module, memory, {
      write: (...all) => engine.#state.write(...all),
      read: (...all) => engine.#state.read(...all),
      row: (...all) => engine.#row(...all),
      ...(gpu && { gpu, scale: (from, size, scale) => engine.exports.web_scale(from, size, scale) }),
    });
    if (gpu) {
      const { web_append, web_next } = engine.exports;
      engine.exports = { ...engine.exports, web_append: promising(web_append), web_next: promising(web_next) };
    }
    return engine;
  }

  /** The stack of thread `number`, for its own instance. @param {number} number */
  stack(number) {
    const stack = this.exports.web_stack(number) >>> 0;
    if (!stack) throw new EdgeError("no-memory", "no memory is left for a thread's stack");
    return stack;
  }

  /** Threads that wait for work. */
  get threads() {
    return this.exports.web_threads();
  }

  /** Sets the function that reads the part of model.edge that is not in memory; it returns bytes. @param {(to: Uint8Array, at: number) => number} row */
  reads(row) {
    this.#row = row;
  }

  /** Room for the resident part of model.edge. @param {number} bytes @returns {number} its address */
  reserve(bytes) {
    this.#file = this.#room(bytes);
    return this.#file[0];
  }

  /** Room for ears.edge. @param {number} bytes @returns {number} its address */
  reserveEars(bytes) {
    this.#ears = this.#room(bytes);
    return this.#ears[0];
  }

  /** @param {number} bytes @returns {[number, number]} */
  #room(bytes) {
    const address = this.exports.web_take(bytes) >>> 0;
    if (!address) throw new EdgeError("no-memory", "the bound of the memory has no room for the model");
    return [address, bytes];
  }

  /** Opens the model that was written to the reserved place. */
  open() {
    const [address, bytes] = /** @type {[number, number]} */ (this.#file);
    this.#check(this.exports.web_open(address, bytes));
  }

  get info() {
    return this.#read(INFO, this.exports.web_info());
  }

  get use() {
    return this.#read(USAGE, this.exports.web_use());
  }

  /** Starts the session. @param {Record<string, any>} options */
  begin(options) {
    this.#choose(options, (stops, count) => this.exports.web_begin(stops, count));
  }

  /** Other options, for the next answer. @param {Record<string, any>} options */
  set(options) {
    this.#choose(options, (stops, count) => this.exports.web_set(stops, count));
  }

  end() {
    this.exports.web_end();
  }

  /** @param {keyof typeof ROLES} role @param {string | Int32Array} text of the role ids, token ids */
  async append(role, text) {
    const isText = typeof text === "string";
    if (isText === (role === "ids")) throw new EdgeError("bad-argument", "the role ids goes with an Int32Array, the others with a text");
    const bytes = isText ? new TextEncoder().encode(text) : new Uint8Array(text.buffer, text.byteOffset, text.byteLength);
    const [address, size] = this.#take(bytes);
    try {
      this.#check(await this.exports.web_append(ROLES[role], address, isText ? bytes.length : text.length));
    } finally {
      this.exports.web_give(address, size);
    }
  }

  /**
   * The next piece of the answer: bytes are copied. `done` of `asked` tokens of its prompt have run.
   *
   * @returns {Promise<{text: Uint8Array, token: number, finish: number, done: number, asked: number}>}
   */
  async next() {
    const finish = this.#check(await this.exports.web_next());
    const from = this.exports.web_piece() >>> 0;
    const text = new Uint8Array(this.memory.buffer).slice(from, from + this.exports.web_piece_length());
    const [done, asked] = [this.exports.web_piece_done(), this.exports.web_piece_asked()];
    return { text, token: this.exports.web_piece_token(), finish, done, asked };
  }

  /** The address of the int32 that cancels an answer. */
  get cancelled() {
    return this.exports.web_cancelled() >>> 0;
  }

  /** @param {number} [turns] */
  rewind(turns = ALL) {
    this.#check(this.exports.web_rewind(turns));
  }

  /** @returns {Uint8Array} */
  save() {
    const size = this.#check(Number(this.exports.web_state()));
    try {
      this.#state = new State(new Uint8Array(size));
    } catch {
      throw new EdgeError("no-memory", "no memory is left for the conversation's state");
    }
    return this.#transfer(() => this.exports.web_save());
  }

  /** @param {Uint8Array} bytes */
  load(bytes) {
    this.#state = new State(bytes);
    this.#transfer(() => this.exports.web_check()); // a refused state leaves the conversation as it is
    this.#state = new State(bytes);
    this.#transfer(() => this.exports.web_load());
  }

  /** @param {Uint8Array | null} bytes null: none @param {number} scale */
  setAdapter(bytes, scale) {
    this.#state = new State(bytes ?? undefined);
    this.#transfer(() => this.exports.web_set_adapter(bytes ? 1 : 0, scale));
  }

  /** @param {() => number} call @returns {Uint8Array} */
  #transfer(call) {
    const { bytes } = this.#state;
    try {
      this.#check(call());
      return bytes;
    } finally {
      this.#state = new State();
    }
  }

  /** @param {{jsonSchema?: object | string, regex?: string} | null} form */
  constrain(form) {
    const { jsonSchema, regex } = form ?? {};
    const text = regex ?? (typeof jsonSchema === "object" ? JSON.stringify(jsonSchema) : jsonSchema) ?? "";
    const kind = regex !== undefined ? FORMS.regex : jsonSchema !== undefined ? FORMS.jsonSchema : FORMS.free;
    const bytes = new TextEncoder().encode(text);
    this.#lend(bytes, (address) => this.#check(this.exports.web_constrain(kind, address, bytes.length)));
  }

  /** @param {Record<number, number>} biases by token */
  bias(biases) {
    const isObject = Object.prototype.toString.call(biases) === "[object Object]"; // a Map has no entries
    if (!isObject) throw new EdgeError("bad-argument", "biases must be an object, such as { 28: -100 }");
    const pairs = Object.entries(biases), bytes = new DataView(new ArrayBuffer(8 * pairs.length));
    const wrong = pairs.find(([token]) => !/^\d{1,9}$/.test(token)); // which would become another token
    if (wrong) throw new EdgeError("bad-argument", `biases have ${JSON.stringify(wrong[0].slice(0, 40))}: their keys are the numbers of tokens`);
    pairs.forEach(([token, bias], at) => {
      bytes.setInt32(8 * at, Number(token), true);
      bytes.setFloat32(8 * at + 4, bias, true);
    });
    this.#lend(new Uint8Array(bytes.buffer), (address) => this.#check(this.exports.web_bias(address, pairs.length)));
  }

  /** @param {object[] | null} list null: none */
  tools(list) {
    const bytes = new TextEncoder().encode(list ? JSON.stringify(list) : "");
    this.#lend(bytes, (address) => this.#check(this.exports.web_tools(address, bytes.length)));
  }

  /** @param {string} choice @param {boolean} parallel */
  choose(choice, parallel) {
    const bytes = new TextEncoder().encode(`${choice}\0`);
    this.#lend(bytes, (address) => this.#check(this.exports.web_choose(address, parallel ? 1 : 0)));
  }

  /** @returns {{id: string, name: string, arguments: string}[]} */
  calls() {
    const text = (/** @type {number} */ index, /** @type {number} */ field) => {
      const from = this.exports.web_call(index, field) >>> 0;
      const memory = new Uint8Array(this.memory.buffer);
      return new TextDecoder().decode(memory.slice(from, memory.indexOf(0, from)));
    };
    const count = this.#check(this.exports.web_calls());
    return Array.from({ length: count }, (_, at) => ({ id: text(at, 0), name: text(at, 1), arguments: text(at, 2) }));
  }

  /** @param {string} text @param {boolean} special */
  tokenize(text, special) {
    const bytes = new TextEncoder().encode(text);
    const room = bytes.length + 8;
    return this.#lend(bytes, (address) =>
      this.#lend(new Uint8Array(4 * room), (ids) => {
        const count = this.#check(this.exports.web_tokenize(address, bytes.length, special ? 1 : 0, ids, room));
        return new Int32Array(this.memory.buffer, ids, count).slice();
      }),
    );
  }

  /**
   * Shows a picture before the text that comes next.
   *
   * @param {Uint8Array} eyes eyes.edge @param {{data: Uint8Array, width: number, height: number}} picture RGBA
   * @param {number} tokens the most; 0: as many as the model's own default
   */
  image(eyes, { data, width, height }, tokens) {
    this.#lend(eyes, (file) => this.#lend(data, (pixels) =>
      this.#check(this.exports.web_image(file, eyes.length, pixels, width, height, tokens))));
  }

  /** @param {number} width @param {number} height @param {number} tokens the most; 0: the model's own default */
  imageTokens(width, height, tokens) {
    return this.#check(this.exports.web_image_tokens(width, height, tokens));
  }

  /**
   * Plays a sound before the text that comes next.
   *
   * @param {Uint8Array} file sounds.edge @param {Float32Array} samples mono @param {number} rate samples per second
   */
  sound(file, samples, rate) {
    const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength);
    this.#lend(file, (at) => this.#lend(bytes, (address) =>
      this.#check(this.exports.web_sound(at, file.length, address, samples.length, rate))));
  }

  /** @param {number} count samples @param {number} rate */
  soundTokens(count, rate) {
    return this.#check(this.exports.web_sound_tokens(count, rate));
  }

  /**
   * The vectors of texts, one behind the other.
   *
   * @param {string[]} texts
   * @param {{prompt?: string, dimensions?: number, normalize?: boolean, truncate?: boolean}} options
   * @returns {Float32Array}
   */
  embed(texts, { prompt, dimensions = 0, normalize = true, truncate = false } = {}) {
    const encoded = [...texts, `${prompt}\0`].map((each) => new TextEncoder().encode(each));
    const count = texts.length;
    const bytes = new Uint8Array(8 * count + encoded.reduce((sum, each) => sum + each.length, 0));
    const numbers = new DataView(bytes.buffer); // pointers and lengths, then the texts
    const first = whole(dimensions, 0, ALL);
    const room = count * (first || this.info.dimensions);
    return this.#lend(bytes, (address) => {
      let at = 8 * count;
      const starts = encoded.map((each, number) => {
        bytes.set(each, at);
        if (number < count) {
          numbers.setUint32(4 * number, address + at, true);
          numbers.setUint32(4 * (count + number), each.length, true);
        }
        at += each.length;
        return address + at - each.length;
      });
      new Uint8Array(this.memory.buffer).set(bytes, address);
      return this.#lend(new Uint8Array(4 * room), (vectors) => {
        this.#check(this.exports.web_embed(
          address, address + 4 * count, count, prompt === undefined ? 0 : starts[count], first, normalize ? 0 : 1,
          truncate ? 1 : 0, vectors, room,
        ));
        return new Float32Array(this.memory.buffer, vectors, room).slice();
      });
    });
  }

  /** Begins a transcript. @param {Record<string, any>} options of edge_hearing */
  listen(options) {
    const { language, prompt } = options;
    const texts = new TextEncoder().encode(`${language ?? ""}\0${prompt ?? ""}\0`);
    const second = new TextEncoder().encode(`${language ?? ""}\0`).length;
    this.#write(HEARING, this.exports.web_hearing(), options);
    this.#lend(texts, (address) =>
      this.#check(this.exports.web_listen(
        this.#ears?.[0] ?? 0, this.#ears?.[1] ?? 0, language ? address : 0, prompt ? address + second : 0,
      )));
  }

  /**
   * Hears samples up to the next segment, of which there is none if its text is empty; without samples the sound has ended.
   *
   * @param {Float32Array} samples
   * @returns {{taken: number, segment: Record<string, any>}}
   */
  hear(samples) {
    const bytes = new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength);
    const taken = this.#lend(bytes, (address) => this.#check(this.exports.web_hear(address, samples.length)));
    return { taken, segment: this.#read(SEGMENT, this.exports.web_segment()) };
  }

  /** @param {Record<string, any>} options @param {(stops: number, count: number) => number} call */
  #choose(options, call) {
    this.#write(OPTIONS, this.exports.web_options(), { ...options, seeded: options.seed !== undefined });
    const stops = options.stop ?? [];
    const texts = new TextEncoder().encode(stops.map((/** @type {string} */ each) => `${each}\0`).join(""));
    this.#lend(texts, (address) => this.#check(call(address, stops.length)));
  }

  /** @param {Fields} fields @param {number} address @param {Record<string, any>} values */
  #write(fields, address, values) {
    const view = new DataView(this.memory.buffer, address >>> 0);
    for (const [name, type, at, otherwise = 0] of fields) {
      const value = values[name] ?? otherwise;
      if (type === "BigUint64") view.setBigUint64(at, BigInt(value), true);
      else if (type === "Float64") view.setFloat64(at, Number(value), true);
      else if (type === "Flag") view.setUint32(at, value ? 1 : 0, true);
      else view.setInt32(at, whole(Number(value), otherwise, type === "Int32" ? 0x7fffffff : 0xffffffff), true);
    }
  }

  /** @param {Fields} fields @param {number} address @returns {Record<string, any>} */
  #read(fields, address) {
    if (!address) this.#check(FAILED);
    const view = new DataView(this.memory.buffer, address >>> 0);
    return Object.fromEntries(fields.map(([name, type, at]) => {
      if (type === "BigUint64") return [name, Number(view.getBigUint64(at, true))];
      if (type === "Float64") return [name, view.getFloat64(at, true)];
      const number = view.getUint32(at, true);
      return [name, type === "Text" ? this.#text(number) : type === "Flag" ? number !== 0 : number];
    }));
  }

  /**
   * Calls `work` with the address of a copy of these bytes in the module's memory.
   *
   * @template T
   * @param {Uint8Array} bytes
   * @param {(address: number) => T} work
   */
  #lend(bytes, work) {
    const [address, size] = this.#take(bytes);
    try {
      return work(address);
    } finally {
      this.exports.web_give(address, size);
    }
  }

  /** A copy of these bytes in the module's memory: its address and size. @param {Uint8Array} bytes */
  #take(bytes) {
    const size = Math.max(1, bytes.length);
    const address = this.exports.web_take(size) >>> 0;
    if (!address) throw new EdgeError("no-memory", "the bound of the memory has no room for this text");
    new Uint8Array(this.memory.buffer, address, bytes.length).set(bytes);
    return [address, size];
  }

  /** @param {number} status */
  #check(status) {
    if (status >= 0) return status;
    const message = this.#text(this.exports.web_message()).replace(/edge_[a-z_.]+[a-z]|EDGE_[A-Z]+/g, (name) => NAMES[name] ?? name);
    throw new EdgeError(CODES[/** @type {-1} */ (status)] ?? "failed", message);
  }

  /** The text up to a \0, copied since decoders refuse shared memory. @param {number} address */
  #text(address) {
    const all = new Uint8Array(this.memory.buffer);
    const from = address >>> 0;
    return new TextDecoder().decode(all.slice(from, all.indexOf(0, from)));
  }
}

/** The number if it is in range, otherwise the largest, which the runtime refuses or takes as none. @param {number} value @param {number} least @param {number} largest */
function whole(value, least, largest) {
  if (least < 0 && value < 0) return least;
  return value >= least && value <= largest ? value : largest;
}
