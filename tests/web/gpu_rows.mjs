// Takes KV rows to the device's form and back, by the Arena of rows.js: cases from stdin, results to stdout.
import { readFileSync } from "node:fs";

const { Arena } = await import(process.argv[2]);
const [KEYS, VALUES, KEY_SCALES, VALUE_SCALES] = [0, 1, 2, 3].map((part) => part << 16); // addresses
const bytes = (data) => [...new Uint8Array(data.buffer, data.byteOffset, data.byteLength)];

const found = JSON.parse(readFileSync(0, "utf8")).map(({ form, rows, first, module, device }) => {
  const arena = new Arena(form, 1024);
  const memory = new WebAssembly.Memory({ initial: 4 });
  const own = new Uint8Array(memory.buffer);
  const place = { rows, keys: KEYS, values: VALUES, keyScales: KEY_SCALES, valueScales: VALUE_SCALES, changed: 0 };
  module.forEach((part, each) => own.set(part, each << 16));
  const loaded = arena.load(memory, place, first, rows / 16).map(([, at, data]) => [at, bytes(data)]);
  const at = device.map((_, each) => device.slice(0, each).flat().length);
  own.fill(0);
  arena.store(memory, place, { rows: Int32Array.from({ length: rows }, (_, row) => row), at }, new Uint8Array(device.flat()).buffer);
  const stored = module.map((part, each) => [...own.subarray(each << 16, (each << 16) + part.length)]);
  return { loaded, stored, normals: [...arena.normals(Float32Array.from({ length: form.head }, (_, value) => value))] };
});
process.stdout.write(JSON.stringify(found));
