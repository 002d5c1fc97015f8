// Runs a module of a site in Node, as tests ask on stdin: a line of JSON for every call, and one for its answer.
//
//     node --experimental-wasm-relaxed-simd node_session.mjs MODULE MODEL INITIAL MAXIMUM THREADS
//
// INITIAL, MAXIMUM: pages of memory. THREADS: workers to start beside this thread.
import fs from 'node:fs';
import readline from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { isMainThread, Worker, workerData } from 'node:worker_threads';
import { fileURLToPath } from 'node:url';

import { Engine } from '../../edge/apps/web/package/module.js';

const state = { saved: [], loaded: new Uint8Array(), file: null };
const RESIDENT = 24; // where the header has the bytes before a table

function instantiate(module, memory) {
  const env = {
    memory,
    write: (from, size) => state.saved.push(new Uint8Array(memory.buffer).slice(from >>> 0, (from >>> 0) + size)),
    read: (to, size) => {
      const bytes = state.loaded.subarray(0, size);
      new Uint8Array(memory.buffer).set(bytes, to >>> 0);
      state.loaded = state.loaded.subarray(size);
      return bytes.length;
    },
    row: (at, to, size) => {
      const bytes = new Uint8Array(size >>> 0), count = fs.readSync(state.file, bytes, 0, bytes.length, at);
      new Uint8Array(memory.buffer).set(bytes, to >>> 0);
      return count;
    },
    now: () => performance.now() / 1000,
    random: () => crypto.getRandomValues(new Int32Array(1))[0],
  };
  return new WebAssembly.Instance(module, { env }).exports;
}

class Session {
  constructor(module, memory) {
    this.module = module;
    this.memory = memory;
    this.engine = instantiate(module, memory);
    this.package = new Engine(module, memory); // which the package makes
    this.package.exports = this.engine;
    this.workers = [];
  }

  bytes(address, count) {
    return new Uint8Array(this.memory.buffer, address >>> 0, count);
  }

  text(address) {
    const from = address >>> 0, all = new Uint8Array(this.memory.buffer);
    return new TextDecoder().decode(all.slice(from, all.indexOf(0, from)));
  }

  check(status) {
    if (status < 0) throw { status: Number(status), message: this.text(this.engine.web_message()) };
    return Number(status);
  }

  // Calls `work` with the address of these bytes.
  with(bytes, work) {
    const address = this.engine.web_take(bytes.length || 1) >>> 0;
    if (!address) throw { status: -4, message: 'web_take found no memory' };
    this.bytes(address, bytes.length).set(bytes);
    try {
      return work(address, bytes.length);
    } finally {
      this.engine.web_give(address, bytes.length || 1);
    }
  }

  async threads(count) {
    for (let number = 1; number <= count; number++) {
      const stack = this.engine.web_stack(number);
      if (!stack) throw { status: -4, message: 'web_stack found no memory' };
      const data = { module: this.module, memory: this.memory, number, stack };
      this.workers.push(new Worker(fileURLToPath(import.meta.url), { workerData: data }));
    }
    while (this.engine.web_threads() < count) await sleep(1);
    return count;
  }

  open(path) {
    const whole = fs.readFileSync(path), resident = whole.length < RESIDENT + 8 ? 0 : Number(whole.readBigUInt64LE(RESIDENT));
    const file = resident > 0 && resident < whole.length ? whole.subarray(0, resident) : whole;
    state.file = fs.openSync(path);
    const address = this.engine.web_take(file.length || 1) >>> 0;
    if (!address) throw { status: -4, message: 'web_take found no memory for model.edge' };
    this.bytes(address, file.length).set(file);
    const status = this.engine.web_open(address, file.length);
    if (status) this.engine.web_give(address, file.length || 1);
    else this.file = [address, file.length];
    return this.check(status);
  }

  close() {
    const status = this.check(this.engine.web_close());
    this.engine.web_give(...this.file);
    return status;
  }

  info() {
    return this.package.info;
  }

  use() {
    return this.package.use;
  }

  begin(options) {
    this.package.begin(options);
  }

  set(options) {
    this.package.set(options);
  }

  end() {
    this.engine.web_end();
  }

  append(role, text) { // text: base64, or ids
    const bytes = typeof text === 'string' ? Buffer.from(text, 'base64') : new Uint8Array(Int32Array.from(text).buffer);
    const count = typeof text === 'string' ? bytes.length : text.length;
    return this.with(bytes, (at) => this.check(this.engine.web_append(role, at, count)));
  }

  next() {
    const finish = this.check(this.engine.web_next());
    const bytes = this.bytes(this.engine.web_piece(), this.engine.web_piece_length());
    return { token: this.engine.web_piece_token(), text: Buffer.from(bytes).toString('base64'), finish };
  }

  // Up to `count` pieces, or to the end of the answer.
  pieces(count) {
    const found = [];
    while (found.length < count) {
      found.push(this.next());
      if (found.at(-1).finish) break;
    }
    return found;
  }

  // After so many seconds, from another thread, whatever this one does by then.
  cancel(seconds) {
    const at = this.engine.web_cancelled() >>> 0;
    if (!seconds) return Atomics.store(new Int32Array(this.memory.buffer), at / 4, 1);
    const data = { memory: this.memory, at, seconds };
    return new Promise((resolve) => new Worker(fileURLToPath(import.meta.url), { workerData: data })
      .on('message', () => resolve(0)));
  }

  rewind(turns) {
    return this.check(this.engine.web_rewind(turns));
  }

  save() {
    const size = this.check(this.engine.web_state());
    state.saved = [];
    this.check(this.engine.web_save());
    const bytes = Buffer.concat(state.saved);
    if (bytes.length !== size) throw { message: `${bytes.length} bytes were written, not ${size}` };
    return bytes.toString('base64');
  }

  load(bytes) {
    state.loaded = Buffer.from(bytes, 'base64');
    return this.check(this.engine.web_load());
  }

  set_adapter(bytes, scale) {
    state.loaded = Buffer.from(bytes ?? '', 'base64');
    return this.check(this.engine.web_set_adapter(bytes === null ? 0 : 1, scale));
  }

  tokenize(text, special) {
    return this.with(Buffer.from(text, 'base64'), (at, size) => this.with(new Uint8Array(4 * (size + 8)), (ids) => {
      const count = this.check(this.engine.web_tokenize(at, size, special, ids, size + 8));
      return [...new Int32Array(this.memory.buffer, ids, count)];
    }));
  }

  tools(list) {
    this.package.tools(list);
  }

  choose(choice, parallel) {
    this.package.choose(choice, parallel);
  }

  calls() {
    return this.package.calls();
  }

  constrain(form) {
    this.package.constrain(form);
  }

  bias(biases) {
    this.package.bias(biases);
  }

  embed(texts, options) {
    return [...this.package.embed(texts, options)];
  }

  memory_bytes() {
    return this.memory.buffer.byteLength;
  }

  // Calls of other functions, by their names in web.h.
  raw(name, ...numbers) {
    return Number(this.engine[name](...numbers));
  }
}

async function serve([path, initial, maximum]) {
  const memory = new WebAssembly.Memory({ initial: Number(initial), maximum: Number(maximum), shared: true });
  const session = new Session(new WebAssembly.Module(fs.readFileSync(path)), memory);
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [name, ...values] = JSON.parse(line);
    let answer;
    try {
      answer = { result: (await session[name](...values)) ?? null };
    } catch (error) {
      answer = { error: error.message ?? String(error), status: error.status ?? null, code: error.code ?? null };
    }
    await new Promise((done) => process.stdout.write(JSON.stringify(answer) + '\n', done)); // a pipe takes parts of it
  }
  process.exit(0);
}

if (isMainThread) {
  serve(process.argv.slice(2));
} else if ('module' in workerData) {
  const engine = instantiate(workerData.module, workerData.memory);
  engine.__stack_pointer.value = workerData.stack;
  engine.web_thread(workerData.number);
} else {
  const { parentPort } = await import('node:worker_threads');
  parentPort.postMessage('ready');
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, workerData.seconds * 1000);
  Atomics.store(new Int32Array(workerData.memory.buffer), workerData.at / 4, 1);
}
