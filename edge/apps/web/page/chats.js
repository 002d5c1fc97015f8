/**
 * The conversation that survives a reload, in IndexedDB: turns and KV rows.
 *
 * The session's state is stored in pieces. Most are unchanged since the last turn, and only the others are written.
 */
const PIECE = 1 << 18; // bytes
const STORE = "chats";
const LAST = "last"; // key of the record, with hashes of the pieces, whose keys are [LAST, 0], …

/**
 * @typedef {{turns: import("./chat/chat.js").Turn[], system?: string, report?: any, pieces?: string[]}} Chat
 */

/** The last chat with its state, if there is one. @returns {Promise<(Chat & {state: Uint8Array | null}) | null>} */
export async function readChat() {
  /** @type {any} */
  let record = null;
  /** @type {Uint8Array[]} */
  let pieces = [];
  await change("readonly", (store) => {
    store.get(LAST).onsuccess = ({ target }) => (record = /** @type {IDBRequest} */ (target).result);
    store.getAll(every()).onsuccess = ({ target }) => (pieces = /** @type {IDBRequest} */ (target).result);
  });
  if (!record?.turns) return null;
  return { ...record, state: pieces.length ? joined(pieces) : null };
}

/** @param {Chat} chat @param {Uint8Array} state */
export async function keepChat(chat, state) {
  /** @type {Uint8Array[]} */
  const pieces = [];
  for (let at = 0; at < state.length; at += PIECE) pieces.push(state.subarray(at, at + PIECE));
  const hashes = await Promise.all(pieces.map(digest));
  await change("readwrite", (store) => {
    store.get(LAST).onsuccess = ({ target }) => {
      const before = /** @type {IDBRequest} */ (target).result?.pieces ?? []; // another tab may have written them
      pieces.forEach((piece, number) => {
        if (before[number] !== hashes[number]) store.put(piece.slice(), [LAST, number]);
      });
      store.delete(every(pieces.length));
      store.put({ ...chat, pieces: hashes }, LAST);
    };
  });
}

export function forgetChat() {
  return change("readwrite", (store) => {
    store.delete(LAST);
    store.delete(every());
  });
}

/** The range of all pieces from this one on. */
function every(first = 0) {
  return IDBKeyRange.bound([LAST, first], [LAST, Infinity]);
}

/** @param {Uint8Array[]} pieces */
function joined(pieces) {
  const whole = new Uint8Array(pieces.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of pieces) {
    whole.set(each, at);
    at += each.length;
  }
  return whole;
}

/** @param {Uint8Array} bytes */
async function digest(bytes) {
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", /** @type {any} */ (bytes)));
  return String.fromCharCode(...hash);
}

/** One transaction, all or nothing. @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => void} work */
function change(mode, work) {
  return new Promise((/** @type {(value?: any) => void} */ resolve, reject) => {
    const opened = indexedDB.open(`edge ${location.pathname}`, 1);
    opened.onupgradeneeded = () => opened.result.createObjectStore(STORE);
    opened.onerror = () => reject(opened.error);
    opened.onsuccess = () => {
      const transaction = opened.result.transaction(STORE, mode);
      transaction.oncomplete = () => (opened.result.close(), resolve());
      transaction.onabort = () => (opened.result.close(), reject(transaction.error));
      work(transaction.objectStore(STORE));
    };
  });
}
