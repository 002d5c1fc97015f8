/** The chat page: one conversation with the model of this site, which survives a reload. */
import { Edge } from "./edge/index.js";

const find = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const [turns, status, progress, text, send, anew] = ["turns", "status", "progress", "text", "send", "new"].map(find);
const MOST_TOKENS = 1000; // of an answer
const SAMPLES = 120; // of the memory's line
const READY_WAIT = 3000; // ms, for the service worker

/** @type {import("./edge/index.js").Session | null} */
let session = null;
/** @type {{mine: string, answer: string}[]} what was said */
let chat = [];
/** @type {AbortController | null} of the answer that is being generated */
let answering = null;
/** @type {{mine: string, item: HTMLElement}[]} sent, but not answered yet */
const waiting = [];
/** @type {number[]} */
const samples = [];

// ---- the conversation -------------------------------------------------------------------------------------------

/** @param {string} kind @param {string} [said] */
function show(kind, said = "") {
  const item = document.createElement("li");
  item.className = kind;
  if (said) write(item, said);
  turns.append(item);
  turns.scrollTop = turns.scrollHeight;
  return item;
}

/** Text with its code blocks, and with `code` and **bold** words. @param {HTMLElement} item @param {string} said */
function write(item, said) {
  item.replaceChildren(
    ...said.split(/^```[^\n]*\n?/m).flatMap((part, index) => {
      if (!part.trim()) return [];
      const block = document.createElement(index % 2 ? "pre" : "p");
      if (index % 2) block.append(Object.assign(document.createElement("code"), { textContent: part.trimEnd() }));
      else block.append(...part.trim().split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map(inline));
      return [block];
    }),
  );
}

/** @param {string} part */
function inline(part) {
  const [mark] = /^(\*\*|`)/.exec(part) ?? [""];
  if (!mark || part.length <= 2 * mark.length) return part;
  const textContent = part.slice(mark.length, -mark.length);
  return Object.assign(document.createElement(mark === "`" ? "code" : "strong"), { textContent });
}

/** @param {string} mine */
async function ask(mine) {
  const item = show("mine", mine);
  item.classList.add("waiting");
  waiting.push({ mine, item });
  await answerAll();
}

async function answerAll() {
  while (session && !answering && waiting.length) {
    const { mine, item } = /** @type {any} */ (waiting.shift());
    item.classList.remove("waiting");
    await answer(session, mine);
  }
}

/** @param {import("./edge/index.js").Session} session @param {string} mine */
async function answer(session, mine) {
  answering = new AbortController();
  const item = show("theirs");
  item.ariaBusy = "true"; // it is read aloud when it is whole
  send.textContent = "■";
  send.ariaLabel = "Stop";
  anew.disabled = false;
  let said = "";
  try {
    let drawn = 0;
    const draw = () => {
      drawn = 0;
      const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
      write(item, said);
      if (follows) turns.scrollTop = turns.scrollHeight;
      meter(session.report);
    };
    for await (const piece of session.stream(mine, { signal: answering.signal, maxTokens: MOST_TOKENS })) {
      said += piece;
      drawn ||= requestAnimationFrame(draw); // several tokens at once
    }
    cancelAnimationFrame(drawn);
    draw();
    const { finish } = session.report;
    if (!said && finish === "eos") show("note", "No answer");
    else if (finish !== "eos") show("note", finish === "length" ? `Stopped after ${MOST_TOKENS} tokens` : `Stopped: ${finish}`);
    chat.push({ mine, answer: said });
    item.ariaBusy = "false";
    await remember(session);
  } catch (error) {
    show("note bad", said_of(error));
  } finally {
    item.ariaBusy = "false";
    answering = null;
    send.textContent = "↑";
    send.ariaLabel = "Send";
  }
}

async function startAnew() {
  answering?.abort();
  while (answering) await new Promise((done) => setTimeout(done, 20));
  await session?.rewind();
  chat = [];
  turns.replaceChildren();
  anew.disabled = true;
  await forget();
  text.focus();
}

// ---- what it costs ----------------------------------------------------------------------------------------------

/** @param {any} report */
function meter(report) {
  if (!report?.memory) return;
  const mb = (/** @type {number} */ bytes) => Math.round(bytes / 1e6);
  const { bytes, bound } = report.memory;
  find("speed").textContent = report.tokensPerSecond ? report.tokensPerSecond.toFixed(0) : "–";
  find("memory").textContent = `${mb(bytes)} of ${mb(bound)}`;
  find("joules").textContent = report.joules.toFixed(1);
  samples.push(bytes / bound);
  if (samples.length > SAMPLES) samples.shift();
  const points = samples.map((each, at) => `${((at + 1) * 100) / samples.length},${24 - 24 * each}`);
  find("line").firstElementChild.setAttribute("d", `M0,${24 - 24 * samples[0]}L${points.join("L")}`);
}

// ---- what stays -------------------------------------------------------------------------------------------------

/** A database with one chat: what was said, and the KV rows. @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest} work */
async function stored(mode, work) {
  const opened = indexedDB.open(`edge ${location.pathname}`, 1);
  opened.onupgradeneeded = () => opened.result.createObjectStore("chats");
  const database = await finished(opened);
  try {
    return await finished(work(database.transaction("chats", mode).objectStore("chats")));
  } finally {
    database.close();
  }
}

/** @param {IDBRequest} request @returns {Promise<any>} */
function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @param {import("./edge/index.js").Session} session */
async function remember(session) {
  const state = await session.save();
  await stored("readwrite", (store) => store.put({ chat, state }, "last")).catch(() => {});
}

const forget = () => stored("readwrite", (store) => store.delete("last")).catch(() => {});

/** @param {import("./edge/index.js").Session} session @param {any} last */
async function restore(session, last) {
  try {
    await session.load(last.state);
  } catch {
    for (const { mine, answer } of last.chat) await session.past(mine, answer); // of another version of this site
  }
}

// ---- the beginning ----------------------------------------------------------------------------------------------

/** @param {any} error */
function said_of(error) {
  const said = String(error?.message ?? error);
  return said.charAt(0).toUpperCase() + said.slice(1);
}

/** The service worker keeps the page for visits offline, and sets the headers that a server may not set. */
async function register() {
  const workers = navigator.serviceWorker;
  const late = new Promise((done) => setTimeout(done, READY_WAIT));
  const claimed = new Promise((done) => workers?.addEventListener("controllerchange", done, { once: true }));
  const registration = await workers?.register("sw.js").catch(() => null);
  if (!registration) return;
  // At the first visit it is there before the engine is fetched, which it keeps for visits without a network.
  if (!workers.controller && !registration.active) await Promise.race([claimed, late]);
  if (crossOriginIsolated || !workers.controller || sessionStorage.getItem("reloaded")) return;
  sessionStorage.setItem("reloaded", "1");
  location.reload();
  await new Promise(() => {});
}

/** @param {any} change */
function onProgress({ step, loaded, total }) {
  const mb = (/** @type {number} */ bytes) => (bytes / 1e6).toFixed(0);
  progress.hidden = step === "ready";
  progress.value = loaded / total;
  status.textContent = step === "download" ? `Downloading ${mb(loaded)} of ${mb(total)} MB` : "Loading";
}

async function open() {
  status.className = "";
  status.textContent = "Starting";
  try {
    const opened = await Edge.open("./", { onProgress });
    const { name, threads, isolated, capacity, stored: kept } = opened.info;
    find("name").textContent = name;
    document.title = name;
    const last = await stored("readonly", (store) => store.get("last")).catch(() => null);
    if (last && last.chat.length === chat.length) await restore(opened, last);
    const lanes = threads > 1 ? `${threads} threads` : isolated ? "one thread" : "one thread: the page is not isolated";
    status.textContent = `On this device · ${lanes} · ${capacity} rows${kept ? "" : " · not stored"}`;
    session = opened;
    if (kept) navigator.storage?.persist?.();
    await answerAll();
  } catch (error) {
    progress.hidden = true;
    status.className = "bad";
    status.textContent = said_of(error);
    const again = Object.assign(document.createElement("button"), { type: "button", className: "again", textContent: "Try again" });
    again.onclick = () => (again.remove(), open());
    status.append(" ", again);
  }
}

find("ask").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  const mine = text.value.trim();
  if (mine) {
    text.value = "";
    ask(mine);
  } else if (answering) {
    answering.abort();
  }
});
send.addEventListener("click", (/** @type {Event} */ event) => {
  if (!answering) return;
  event.preventDefault();
  answering.abort();
});
text.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
addEventListener("keydown", (event) => event.key === "Escape" && answering?.abort());
anew.addEventListener("click", startAnew);

await register();
const last = await stored("readonly", (store) => store.get("last")).catch(() => null);
for (const { mine, answer } of last?.chat ?? []) {
  show("mine", mine);
  show("theirs", answer);
}
chat = last?.chat ?? [];
anew.disabled = !chat.length;
await open();
