/** The chat page: one conversation with the model of this site, which survives a reload. */
import { Chat, joulesText, saidOf } from "./chat/chat.js";
import { element } from "./chat/dom.js";
import { forgetChat, keepChat, readChat } from "./chats.js";
import { Edge } from "./edge/index.js";
import { makeListening } from "./listening.js";

const find = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const [status, progress, anew, about, panel] = ["status", "progress", "new", "about", "panel"].map(find);
const MOST_TOKENS = 1000; // of an answer
const READY_WAIT = 30000; // ms, for a service worker that neither fails nor is ready
const WORDS = 0.75; // per token, in English

/** @type {import("./edge/index.js").Session | null} */
let session = null;
/** @type {import("./chat/chat.js").Turn[]} that the session has, questions and answers */
let held = [];
let system = ""; // instructions before them

const chat = new Chat({ list: find("turns"), live: find("live"), form: find("ask"), answer, changed });

// ---- the conversation -------------------------------------------------------------------------------------------

/** @param {import("./chat/chat.js").Turn[]} turns @param {AbortSignal} signal */
async function* answer(turns, signal) {
  const opened = /** @type {import("./edge/index.js").Session} */ (session);
  const { content, images } = turns[turns.length - 1];
  await align(opened, turns.slice(0, -1));
  let said = "";
  await showAll(opened, images);
  for await (const text of opened.stream(content, { signal, maxTokens: MOST_TOKENS })) {
    said += text;
    meter(opened.report);
    yield { text };
  }
  meter(opened.report);
  held = [...turns, { role: "assistant", content: said }];
  const finish = opened.report?.finish;
  if (!said && finish === "eos") yield { note: "No answer" };
  else if (finish !== "eos") yield { note: finish === "length" ? `Stopped after ${MOST_TOKENS} tokens` : `Stopped: ${finish}` };
}

/** @param {import("./edge/index.js").Session} session @param {string[]} [images] data URLs */
async function showAll(session, images = []) {
  for (const url of images) await session.image(await (await fetch(url)).blob());
}

/** Append the turns that the session lacks, and rewind those that it should not have.
 * @param {import("./edge/index.js").Session} session @param {import("./chat/chat.js").Turn[]} turns */
async function align(session, turns) {
  let same = 0;
  while (same < turns.length && sameTurn(held[same], turns[same])) same++;
  same -= same % 2;
  if (held.length > same) {
    const taken = await session.rewind((held.length - same) / 2).then(() => true, () => false);
    if (!taken) {
      await begin(session); // rows were evicted: run all turns again
      same = 0;
    }
  }
  held = turns.slice(0, same);
  for (; held.length < turns.length; held = turns.slice(0, held.length + 2)) {
    await showAll(session, turns[held.length].images);
    await session.past(turns[held.length].content, turns[held.length + 1].content);
  }
}

/** @param {import("./chat/chat.js").Turn | undefined} one @param {import("./chat/chat.js").Turn} other */
function sameTurn(one, other) {
  return one?.content === other.content && String(one.images ?? "") === String(other.images ?? "");
}

async function changed() {
  anew.disabled = !chat.turns.length;
  if (session && !chat.busy && chat.turns.length) await remember(session);
}

/** @param {string} [instructions] before the new conversation */
async function startAnew(instructions = system) {
  await chat.hold(async () => {
    await chat.stop();
    chat.show([]);
    anew.disabled = true;
    const before = system;
    try {
      system = instructions;
      if (session) await begin(session);
      await (session && system ? remember(session) : forgetChat().catch(() => {}));
    } catch (error) {
      system = before; // the template takes no instructions, or they are too long
      if (session) await begin(session);
      chat.note(saidOf(error), true);
    }
  });
  chat.composer.focus();
}

/** A conversation without turns, after the instructions. @param {import("./edge/index.js").Session} session */
async function begin(session) {
  held = [];
  await session.rewind();
  if (system) await session.system(system);
}

// ---- its cost ---------------------------------------------------------------------------------------------------

/** @param {any} report */
function meter(report) {
  if (!report?.memory) return;
  const { bytes, bound } = report.memory;
  find("speed").textContent = report.tokensPerSecond ? report.tokensPerSecond.toFixed(0) : "–";
  find("memory").textContent = `${mib(bytes)} of ${mib(bound)}`;
  find("joules").textContent = report.joules === undefined ? "–" : joulesText(report.joules);
  find("bar").firstElementChild.style.width = `${(100 * bytes) / bound}%`;
}

/** @param {number} bytes */
function mib(bytes) {
  return Math.round(bytes / 2 ** 20);
}

// ---- storage ----------------------------------------------------------------------------------------------------

/** @param {import("./edge/index.js").Session} session */
async function remember(session) {
  const state = await session.save();
  await keepChat({ turns: chat.turns, system, report: session.report }, state).catch(() => {});
}

/** @param {import("./edge/index.js").Session} session @param {any} last */
async function restore(session, last) {
  try {
    await session.load(last.state ?? new Uint8Array(0));
    held = last.turns.filter((/** @type {any} */ { failed }) => !failed);
    meter(last.report);
  } catch {
    await begin(session); // the state is of another version of this site: the next answer runs all turns
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
      element("dt", { textContent: term }),
      element("dd", { textContent: said }),
    ]),
  );
}

about.addEventListener("click", () => {
  find("system").value = system;
  find("save").textContent = chat.turns.length || chat.busy ? "Save and start a new chat" : "Save";
  panel.returnValue = "";
  panel.showModal();
});
panel.addEventListener("close", () => {
  const said = find("system").value.trim();
  if (panel.returnValue === "save" && said !== system) startAnew(said);
});

// ---- the beginning ----------------------------------------------------------------------------------------------

/** The service worker stores the page for visits offline, and sets headers that the server may lack. */
async function register() {
  const workers = navigator.serviceWorker;
  const late = new Promise((done) => setTimeout(done, READY_WAIT));
  const claimed = new Promise((done) => workers?.addEventListener("controllerchange", done, { once: true }));
  const registration = await workers?.register("sw.js").catch(() => null);
  if (!registration) return;
  // On the first visit it must be ready before the engine is fetched, so that it can store the engine, too.
  const coming = registration.installing ?? registration.waiting;
  const failed = new Promise((done) => coming?.addEventListener("statechange", ({ target }) => {
    if (/** @type {ServiceWorker} */ (target).state === "redundant") done(null);
  }));
  if (coming && !workers.controller && !registration.active) await Promise.race([claimed, failed, late]);
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

/** The page of a model that hears has no chat. @param {import("./edge/index.js").Session} opened @param {boolean} kept */
function listen(opened, kept) {
  document.body.classList.add("hears");
  for (const each of [anew, about, find("meters")]) each.hidden = true;
  makeListening(opened, find("ask"), find("said"));
  status.textContent = `On this device${kept ? "" : " · not stored"}`;
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
    if (opened.info.hears) {
      listen(opened, kept);
      return;
    }
    const last = await readChat().catch(() => null);
    if (last && last.turns.length === chat.turns.length) await restore(opened, last);
    status.textContent = `On this device${kept ? "" : " · not stored"}`;
    session = opened;
    chat.composer.pictures.enable(opened.info.sees);
    if (opened.info.sees) await opened.keepEyes().catch(() => {}); // later pictures fetch it
    chat.ready = true;
    about.disabled = false;
    if (kept) navigator.storage?.persist?.();
    await chat.run();
  } catch (error) {
    progress.hidden = true;
    status.className = "bad";
    status.textContent = saidOf(error);
    status.append(" ", element("button", { type: "button", className: "again", textContent: "Try again", onclick: open }));
  }
}

anew.addEventListener("click", () => startAnew());

await register();
const last = await readChat().catch(() => null);
chat.show(last?.turns ?? []);
system = last?.system ?? "";
anew.disabled = !chat.turns.length;
await open();
