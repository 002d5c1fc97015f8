/** Converts KV rows between the device's layout and the module's. */

export const TILE = 16; // rows

/** @typedef {{rows: number, keys: number, values: number, keyScales: number, valueScales: number, changed: number}} Place */
/** Rows that are read together. at: offsets of their keys, values and scales in the buffer for reading. */
/** @typedef {{arena: Arena, rows: Int32Array, pairs: Int32Array, at: number[]}} Part */

/** An arena of KV rows on the device and in the module's memory, which orders the values of keys differently. */
export class Arena {
  /** @param {any} form see readPrograms @param {number} staged rows that are read at once: they lie behind those of the arena */
  constructor(form, staged) {
    const { head, bytes, reflected } = form;
    this.form = form;
    this.most = staged;
    this.per = reflected ? 2 : 1; // values of an element: two of 4 bits, the first in the low half
    this.size = reflected ? 1 : bytes / head; // bytes of an element
    this.stored = (bytes / this.size) * this.per; // values of a row on the device, with padding
    this.values = /** @type {any} */ ({ 1: Uint8Array, 2: Uint16Array, 4: Uint32Array })[this.size];
    /** Bytes of a row: key, value, scales. */
    this.bytes = 2 * bytes + (form.scaled ? 8 : 0);
    /** For each value of a tile of keys on the device, its index in the module's tile; -1: padding. */
    this.order = new Int32Array(TILE * this.stored).fill(-1);
    for (let row = 0; row < TILE; row++) {
      for (let value = 0; value < head; value++) {
        const there = this.there(value);
        const element = Math.floor(there / this.per) * TILE + row;
        this.order[this.#own(value) + row * this.unit] = element * this.per + (there % this.per);
      }
    }
  }

  /** Values of 16 bytes. */
  get unit() {
    return (16 / this.size) * this.per;
  }

  /** The index of a key's value in the module's keys. @param {number} value */
  there(value) {
    const half = this.form.interleaved / 2;
    return value < half ? 2 * value : value < 2 * half ? 2 * (value - half) + 1 : value;
  }

  /** The index of a value in the first row of a tile on the device. @param {number} value */
  #own(value) {
    return Math.floor(value / this.unit) * TILE * this.unit + (value % this.unit);
  }

  /**
   * The index, in half-bytes, of a 4-bit value in the module's row. There the low halves have the first half of each 32 values,
   * or of the last 16; on the device a byte has two neighbours. @param {number} value
   */
  #half(value) {
    const width = value < this.form.head - (this.form.head % 32) ? 16 : 8;
    const rest = value % (2 * width);
    return value - rest + (rest % width) * 2 + Math.floor(rest / width);
  }

  /** @param {any} from @param {number} at @returns {number} */
  #get(from, at) {
    return this.per === 1 ? from[at] : (from[at >> 1] >> (4 * (at & 1))) & 15;
  }

  /** @param {any} to @param {number} at @param {number} value */
  #put(to, at, value) {
    if (this.per === 1) to[at] = value;
    else to[at >> 1] = (to[at >> 1] & (0xf0 >> (4 * (at & 1)))) | (value << (4 * (at & 1)));
  }

  /**
   * The scale word of each row on the device. For 4 bits, the module has two halves, scale and minimum, in tiles of 16 scales
   * and 16 minima.
   *
   * @param {ArrayBuffer | SharedArrayBuffer} buffer @param {number} address @param {number} rows
   */
  #scales(buffer, address, rows) {
    if (this.per === 1) {
      const words = new Uint32Array(buffer, address, rows);
      return {
        get: (/** @type {number} */ row) => words[row],
        put: (/** @type {number} */ row, /** @type {number} */ word) => void (words[row] = word),
      };
    }
    const halves = new Uint16Array(buffer, address, 2 * rows);
    const at = (/** @type {number} */ row) => row + row - (row % TILE);
    return {
      get: (/** @type {number} */ row) => halves[at(row)] | (halves[at(row) + TILE] << 16),
      put: (/** @type {number} */ row, /** @type {number} */ word) => {
        halves[at(row)] = word;
        halves[at(row) + TILE] = word >>> 16;
      },
    };
  }

  /** Normals of the reflections of a head's keys, as the device has them. @param {Float32Array} theirs */
  normals(theirs) {
    return theirs.map((_, value) => theirs[this.there(value)]);
  }

  /**
   * Writes of the tiles from `first` up to `end`: for each a buffer, an offset, and the data.
   *
   * @param {WebAssembly.Memory} memory
   * @param {Place} place
   * @param {number} first
   * @param {number} end
   * @returns {[number, number, ArrayBufferView][]}
   */
  load({ buffer }, place, first, end) {
    const { head, bytes, scaled, buffers } = this.form;
    const [rows, own] = [(end - first) * TILE, (head / this.per) * this.size];
    const keys = new this.values(buffer, place.keys + first * TILE * own, (rows * head) / this.per);
    const ordered = new this.values((rows * bytes) / this.size);
    for (let tile = 0; tile < end - first; tile++) {
      for (let each = 0; each < this.order.length; each++) {
        if (this.order[each] < 0) continue;
        this.#put(ordered, tile * TILE * this.stored + each, this.#get(keys, tile * TILE * head + this.order[each]));
      }
    }
    const [values, padded] = [new Uint8Array(buffer, place.values + first * TILE * own, rows * own), new Uint8Array(rows * bytes)];
    for (let row = 0; row < rows; row++) {
      if (this.per === 1) padded.set(values.subarray(row * own, (row + 1) * own), row * bytes);
      for (let value = 0; this.per === 2 && value < head; value++) {
        this.#put(padded, row * this.stored + value, this.#get(values, row * head + this.#half(value)));
      }
    }
    /** @type {[number, number, ArrayBufferView][]} */
    const found = [
      [buffers[0], first * TILE * bytes, ordered],
      [buffers[1], first * TILE * bytes, padded],
    ];
    if (scaled) {
      const scales = new Uint32Array(2 * rows);
      [place.keyScales, place.valueScales].forEach((address, kind) => {
        const own = this.#scales(buffer, address + 4 * first * TILE, rows);
        for (let row = 0; row < rows; row++) scales[2 * row + kind] = own.get(row);
      });
      found.push([buffers[2], 8 * first * TILE, scales]);
    }
    return found;
  }

  /** The rows that a pass has appended. @param {{starts: Uint32Array, lengths: Uint32Array}} heads @param {number} count @returns {Part[]} */
  appended({ starts, lengths }, count) {
    const all = this.form.heads.flatMap((/** @type {number} */ head) =>
      Array.from({ length: count }, (_, token) => starts[head] + lengths[head] + token));
    const parts = [];
    for (let from = 0; from < all.length; from += this.most) {
      const rows = Int32Array.from(all.slice(from, from + this.most));
      const pairs = new Int32Array(2 * rows.length);
      rows.forEach((row, at) => pairs.set([row, this.form.rows + at], 2 * at));
      parts.push({ arena: this, rows, pairs, at: [] });
    }
    return parts;
  }

  /** Places of staged rows: for each a buffer, an offset, and bytes. @param {number} count @returns {[number, number, number][]} */
  staged(count) {
    const { rows, bytes, buffers } = this.form;
    const tiles = Math.ceil(count / TILE) * TILE;
    const sizes = [[bytes, tiles], [bytes, count], [8, count]];
    return buffers.map((/** @type {number} */ buffer, /** @type {number} */ each) => {
      const [size, number] = sizes[each];
      return [buffer, size * rows, size * number];
    });
  }

  /** Writes rows that were read into the module's memory. @param {WebAssembly.Memory} memory @param {Place} place @param {Part} part @param {ArrayBuffer} found */
  store({ buffer }, place, { rows, at }, found) {
    const { head, bytes, scaled } = this.form;
    const own = (head / this.per) * this.size;
    const keys = new this.values(buffer, place.keys, (place.rows * head) / this.per);
    const values = new Uint8Array(buffer, place.values, place.rows * own);
    const tiles = Math.ceil(rows.length / TILE) * TILE;
    const readKeys = new this.values(found, at[0], (tiles * bytes) / this.size);
    const readValues = new Uint8Array(found, at[1], rows.length * bytes);
    rows.forEach((row, number) => {
      const target = Math.floor(row / TILE) * TILE * head + (row % TILE) * this.per;
      const source = Math.floor(number / TILE) * TILE * this.stored + (number % TILE) * this.unit;
      for (let value = 0; value < head; value++) {
        const first = this.#own(value);
        this.#put(keys, target + this.order[first], this.#get(readKeys, source + first));
      }
      if (this.per === 1) values.set(readValues.subarray(number * bytes, number * bytes + own), row * own);
      for (let value = 0; this.per === 2 && value < head; value++) {
        this.#put(values, row * head + this.#half(value), this.#get(readValues, number * this.stored + value));
      }
    });
    if (!scaled) return;
    const scales = new Uint32Array(found, at[2], 2 * rows.length);
    [place.keyScales, place.valueScales].forEach((address, kind) => {
      const own = this.#scales(buffer, address, place.rows);
      rows.forEach((row, number) => own.put(row, scales[2 * number + kind]));
    });
  }
}

/** @param {number[]} told @returns {Place} */
export function placeOf([rows, keys, values, keyScales, valueScales, changed]) {
  return { rows, keys, values, keyScales, valueScales, changed };
}
