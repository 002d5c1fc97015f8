/** The chat page: one conversation with the model of this site, which survives a reload. */
import { forgetChat, keepChat, readChat } from "./chats.js";
import { Edge } from "./edge/index.js";

const find = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const [turns, status, progress, text, send, anew, about, panel] = [
  "turns", "status", "progress", "text", "send", "new", "about", "panel",
].map(find);
const MOST_TOKENS = 1000; // of an answer
const READY_WAIT = 3000; // ms, for the service worker
const COPIED = 1500; // ms that a button says so
const WORDS = 0.75; // of a token, in English

/** @type {import("./edge/index.js").Session | null} */
let session = null;
/** @type {{mine: string, answer: string}[]} what was said */
let chat = [];
let system = ""; // instructions before it
/** @type {AbortController | null} of the answer that is being generated */
let answering = null;
/** @type {{mine: string, item: HTMLElement}[]} sent, but not answered yet */
const waiting = [];

// ---- the conversation -------------------------------------------------------------------------------------------

/** @param {string} kind @param {string} [said] */
function show(kind, said = "") {
  const item = document.createElement("li");
  item.className = kind;
  item.append(Object.assign(document.createElement("div"), { className: "said" }));
  if (said) write(item, said);
  if (kind === "theirs") item.append(copyButton(item));
  turns.append(item);
  turns.scrollTop = turns.scrollHeight;
  return item;
}

/** Text with its code blocks, and with `code` and **bold** words. @param {HTMLElement} item @param {string} said */
function write(item, said) {
  /** @type {any} */ (item.firstElementChild).replaceChildren(
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

/** Copies an answer as it was written, with its marks. @param {HTMLElement} item */
function copyButton(item) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", ariaLabel: "Copy the answer" });
  button.onclick = async () => {
    const theirs = [...turns.querySelectorAll(".theirs")];
    await navigator.clipboard.writeText(chat[theirs.indexOf(item)]?.answer ?? item.innerText);
    button.ariaLabel = "Copied";
    setTimeout(() => (button.ariaLabel = "Copy the answer"), COPIED);
  };
  return button;
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
    const finish = session.report?.finish;
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
  chat = [];
  turns.replaceChildren();
  anew.disabled = true;
  if (session) await begin(session);
  await (session && system ? remember(session) : forgetChat().catch(() => {}));
  text.focus();
}

/** A conversation without turns, after the instructions. @param {import("./edge/index.js").Session} session */
async function begin(session) {
  await session.rewind();
  if (system) await session.system(system);
}

// ---- what it costs ----------------------------------------------------------------------------------------------

/** @param {any} report */
function meter(report) {
  if (!report?.memory) return;
  const { bytes, bound } = report.memory;
  find("speed").textContent = report.tokensPerSecond ? report.tokensPerSecond.toFixed(0) : "–";
  find("memory").textContent = `${mib(bytes)} of ${mib(bound)}`;
  find("joules").textContent = report.joules === undefined ? "–" : report.joules.toFixed(report.joules < 100 ? 1 : 0);
  find("bar").firstElementChild.style.width = `${(100 * bytes) / bound}%`;
}

/** @param {number} bytes */
function mib(bytes) {
  return Math.round(bytes / 2 ** 20);
}

// ---- what stays -------------------------------------------------------------------------------------------------

/** @param {import("./edge/index.js").Session} session */
async function remember(session) {
  const state = await session.save();
  await keepChat({ chat, system, report: session.report }, state).catch(() => {});
}

/** @param {import("./edge/index.js").Session} session @param {any} last */
async function restore(session, last) {
  try {
    await session.load(last.state ?? new Uint8Array(0));
    meter(last.report);
  } catch {
    await begin(session); // the state is of another version of this site
    for (const { mine, answer } of last.chat) await session.past(mine, answer);
  }
}

// ---- the model, and its instructions ----------------------------------------------------------------------------

/** @param {import("./edge/index.js").Info} info */
function describe({ name, license, policy, capacity, threads, isolated, stored, bytes }) {
  const words = `${Number((capacity * WORDS).toPrecision(2)).toLocaleString("en")} words`;
  const facts = {
    Model: license ? `${name} (${license})` : name,
    Remembers: policy === "full" ? `about ${words}: then a chat is full` : `about the last ${words} of a chat`,
    Memory: `at most ${mib(bytes.bound)} MiB, of which the model takes ${mib(bytes.weights)}`,
    Processor: threads > 1 ? `${threads} threads` : `one thread${isolated ? "" : ": the page is not isolated"}`,
    Storage: stored ? "the model and this chat stay on this device, and work offline" : "none: the model is fetched at each visit",
  };
  find("facts").replaceChildren(
    ...Object.entries(facts).flatMap(([term, said]) => [
      Object.assign(document.createElement("dt"), { textContent: term }),
      Object.assign(document.createElement("dd"), { textContent: said }),
    ]),
  );
}

about.addEventListener("click", () => {
  find("system").value = system;
  find("save").textContent = chat.length || answering ? "Save and start a new chat" : "Save";
  panel.returnValue = "";
  panel.showModal();
});
panel.addEventListener("close", async () => {
  const said = find("system").value.trim();
  if (panel.returnValue !== "save" || said === system) return;
  const before = system;
  system = said;
  try {
    await startAnew();
  } catch (error) {
    system = before; // the model's template has no place for them, or they are too long
    if (session) await begin(session);
    show("note bad", said_of(error));
  }
});

// ---- the beginning ----------------------------------------------------------------------------------------------

/** @param {any} error */
function said_of(error) {
  const said = String(error?.message ?? error);
  return /^https?:/.test(said) ? said : said.charAt(0).toUpperCase() + said.slice(1);
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
  progress.hidden = step === "ready";
  progress.value = loaded / total;
  status.textContent = step === "download" ? `Downloading ${mib(loaded)} of ${mib(total)} MiB` : "Loading";
}

async function open() {
  status.className = "";
  status.textContent = "Starting";
  try {
    const opened = await Edge.open("./", { onProgress });
    const { name, stored: kept, bytes } = opened.info;
    find("name").textContent = name;
    document.title = name;
    meter({ memory: { bytes: bytes.now, bound: bytes.bound } });
    describe(opened.info);
    const last = await readChat().catch(() => null);
    if (last && last.chat.length === chat.length) await restore(opened, last);
    status.textContent = `On this device${kept ? "" : " · not stored"}`;
    session = opened;
    about.disabled = false;
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
send.disabled = false;

await register();
const last = await readChat().catch(() => null);
for (const { mine, answer } of last?.chat ?? []) {
  show("mine", mine);
  show("theirs", answer);
}
chat = last?.chat ?? [];
system = last?.system ?? "";
anew.disabled = !chat.length;
await open();
