/** Conversations and settings, in this browser's storage. */
const CHAT = "edge chat ";
const OPEN = "edge open"; // the id of the conversation that was shown last
const SETTINGS = "edge settings";
const TITLE = 80; // characters

/** @typedef {{id: string, model: string, changed: number, turns: import("./chat/chat.js").Turn[]}} Kept */

/** Every conversation, the latest first. @returns {Kept[]} */
export function readChats() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(CHAT))
    .map((key) => read(key, null))
    .filter((each) => Array.isArray(each?.turns))
    .sort((a, b) => b.changed - a.changed);
}

/** @param {string} id @returns {Kept | null} */
export function readChat(id) {
  return read(CHAT + id, null);
}

/** The conversation that was shown last; null if that was a new one. @returns {Kept | null} */
export function readLast() {
  return readChat(localStorage.getItem(OPEN) ?? "");
}

/** @param {string} id */
export function keepLast(id) {
  localStorage.setItem(OPEN, id);
}

/** Throws if there is no room. @param {Kept} chat */
export function keepChat(chat) {
  try {
    localStorage.setItem(CHAT + chat.id, JSON.stringify(chat));
  } catch {
    throw new Error("this browser has no room for the conversation: export and delete others");
  }
}

/** @param {string} id */
export function forgetChat(id) {
  localStorage.removeItem(CHAT + id);
}

/** @param {Kept} chat */
export function titleOf({ turns }) {
  return (turns.find(({ role }) => role === "user")?.content ?? "").replace(/\s+/g, " ").trim().slice(0, TITLE) || "New chat";
}

/** @returns {Record<string, string>} */
export function readSettings() {
  return read(SETTINGS, {});
}

/** @param {Record<string, string>} settings */
export function keepSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

/** @param {string} key @param {any} otherwise */
function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key) ?? "null") ?? otherwise;
  } catch {
    return otherwise;
  }
}
