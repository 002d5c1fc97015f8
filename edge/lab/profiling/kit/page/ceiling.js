/** A worker that reads memory or multiplies for some seconds. */
const PAGE = 65536;

/** @type {any} */
let exports;
let memory = 0;
let bytes = 0;

/** @type {Record<string, () => number>} Each returns bytes or operations. */
const WORK = { read: () => exports.read(memory, bytes, 0), floats: () => exports.floats(0.5, 0) };

addEventListener("message", ({ data: { module, pages, work, seconds } }) => {
  if (module) {
    ({ exports } = new WebAssembly.Instance(module));
    while (!(memory = exports.take(pages)) && pages > 16) pages >>= 1; // phones may have less
    if (!memory) throw new Error("no memory");
    bytes = pages * PAGE;
    new Uint8Array(exports.memory.buffer, memory, bytes).fill(1);
    postMessage(bytes);
    return;
  }
  const began = performance.now();
  let done = 0;
  let now = began;
  while (now - began < seconds * 1000) {
    done += WORK[work]();
    now = performance.now();
  }
  postMessage((done * 1000) / (now - began));
});
