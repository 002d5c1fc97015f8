/** The chat page of `edge serve`: conversations with its models, kept in this browser. */
import { Chat, joulesText, saidOf } from "./chat/chat.js";
import { element, icon, iconButton } from "./chat/dom.js";
import { answer, call, certaintyOf, onKeyNeeded, transcribe } from "./http.js";
import { makeMicrophone } from "./microphone.js";
import { forgetChat, keepChat, keepLast, keepSettings, readChat, readChats, readLast, readSettings, titleOf } from "./store.js";

const find = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const [side, list, status, models, settings] = ["side", "chats", "status", "model", "settings"].map(find);
const MODEL = "edge model"; // that was chosen last
const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;
const WATCH = 2000; // ms between looks at the server's memory, while it answers
const DOWNLOADED = 60000; // ms after which a file is no longer read: some browsers begin late

/** @type {import("./store.js").Kept} */
let current = blank();
let chosen = readSettings();
/** @type {Set<string>} models that see */
let seeing = new Set();
let budget = 0; // joules of an answer, as the server was started; 0: no limit
let peaks = 0; // answers whose peak of memory was shown

const chat = new Chat({
  list: find("turns"), live: find("live"), form: find("ask"), changed, answersCalls: true,
  answer: (turns, signal) => answer(turns, signal, models.value, chosen, meter),
});
let hearing = ""; // the model that hears; empty: none
const microphone = makeMicrophone(find("ask"), find("said"), (wav, signal) => transcribe(wav, hearing, signal));

// ---- conversations ----------------------------------------------------------------------------------------------

function blank() {
  return { id: crypto.randomUUID?.() ?? String(Date.now()), model: "", changed: 0, turns: [] };
}

function changed() {
  current = { ...current, model: models.value, changed: Date.now(), turns: chat.turns };
  if (chat.turns.length) keepChat(current);
  else forgetChat(current.id);
  point();
  drawChats();
  if (chat.busy) watch();
}

/** Have reloads, and visits without a conversation's address, open the current one. */
function point() {
  keepLast(current.id);
  history.replaceState(null, "", current.turns.length ? `#${current.id}` : location.pathname);
}

function drawChats() {
  find("title").textContent = titleOf(current);
  document.title = `${titleOf(current)} · edge`;
  list.replaceChildren(
    ...readChats().map((each) => {
      const title = titleOf(each);
      const open = element("button", { type: "button", className: "chat", textContent: title, title, onclick: () => openChat(each.id) });
      if (each.id === current.id) open.ariaCurrent = "page";
      return element("li", {}, [
        open,
        iconButton("save", `Export ${title}`, () => download([each], title)),
        iconButton("remove", `Delete ${title}`, () => remove([each])),
      ]);
    }),
  );
}

/** @param {string} [id] of a conversation; without one, a new one begins */
async function openChat(id) {
  await chat.hold(async () => {
    await chat.stop();
    current = (id && readChat(id)) || blank();
    point();
    chat.show(current.turns);
    if ([...models.options].some(({ value }) => value === current.model)) models.value = current.model;
    chosenModel();
    drawChats();
    toggleSide(false);
    chat.composer.focus();
  });
}

/** @param {import("./store.js").Kept[]} chats */
async function remove(chats) {
  const what = chats.length === 1 ? `“${titleOf(chats[0])}”` : `all ${chats.length} conversations`;
  find("confirm-title").textContent = `Delete ${what}?`;
  if ((await closed(find("confirm"))) !== "delete") return;
  const ours = chats.some(({ id }) => id === current.id);
  await chat.hold(async () => {
    if (ours) await chat.stop();
    for (const { id } of chats) forgetChat(id);
    if (ours) await openChat();
    else drawChats();
  });
}

/** @param {import("./store.js").Kept[]} chats @param {string} title */
function download(chats, title) {
  const href = URL.createObjectURL(new Blob([JSON.stringify(chats, null, 2)], { type: "application/json" }));
  element("a", { href, download: `${title.replace(/[^\p{L}\p{N} -]/gu, "").trim().slice(0, 40) || "edge"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), DOWNLOADED);
}

/** @param {boolean} open */
function toggleSide(open) {
  side.classList.toggle("open", open);
  find("open-side").ariaExpanded = String(open);
  if (open) find("new").focus();
}

// ---- what it costs ----------------------------------------------------------------------------------------------

/** @param {{speed?: number, usage?: any}} figures */
function meter({ speed, usage }) {
  if (speed) find("speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
  const cost = usage?.edge;
  if (!cost) return;
  bar("joules", cost.joules, joulesText, Number(chosen.energy) || budget);
  find("certainty").textContent = certaintyOf(cost);
  if (!cost.memory) return;
  peaks++;
  memory(cost.memory.peak, cost.memory.budget);
}

/** @param {number} bytes @param {number} bound */
function memory(bytes, bound) {
  bar("memory", bytes, (each) => String(Math.round(each / 2 ** 20)), bound);
}

/** A figure, and a bar against its bound if there is one.
 * @param {string} name @param {number} value @param {(value: number) => string} say @param {number} bound */
function bar(name, value, say, bound) {
  find(name).textContent = bound ? `${say(value)} of ${say(bound)}` : say(value);
  find(`${name}-bar`).hidden = !bound;
  if (bound) find(`${name}-bar`).firstElementChild.style.width = `${Math.min(100, (100 * value) / bound)}%`;
}

/** The server's memory, now and while it answers. */
async function watch() {
  const before = peaks;
  const props = await call("props").then((response) => response.json(), () => null);
  budget = props?.edge?.budgets?.energy ?? 0;
  if (props?.edge?.memory && peaks === before) memory(props.edge.memory.resident, props.edge.memory.budget);
  if (chat.busy) setTimeout(watch, WATCH);
}

// ---- settings ---------------------------------------------------------------------------------------------------

function openSettings() {
  const form = settings.querySelector("form");
  for (const field of form.querySelectorAll("[name]")) field.value = chosen[field.name] ?? "";
  closed(settings).then((how) => {
    if (how !== "save") return;
    chosen = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]));
    keepSettings(chosen);
  });
}

/** @param {SubmitEvent} event */
function checkTools(event) {
  const { value: how } = /** @type {HTMLButtonElement} */ (event.submitter);
  const tools = find("tools").value.trim();
  if (how !== "save" || !tools) return;
  try {
    if (!Array.isArray(JSON.parse(tools))) throw new Error("a list is expected: [{…}, …]");
  } catch (error) {
    event.preventDefault();
    find("tools").setCustomValidity(saidOf(error));
    find("tools").reportValidity();
  }
}

/** The key that the server wants; null if there is none. @param {boolean} wrong @returns {Promise<string | null>} */
async function askForKey(wrong) {
  find("key-wrong").textContent = wrong ? "That key is wrong." : "";
  find("key-text").value = "";
  return (await closed(find("key"))) === "save" ? find("key-text").value.trim() || null : null;
}

/** By which button a dialog was closed. @param {HTMLDialogElement} dialog @returns {Promise<string>} */
function closed(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

/** Offer pictures where the model sees. */
function chosenModel() {
  chat.composer.pictures.enable(seeing.has(models.value));
}

// ---- the beginning ----------------------------------------------------------------------------------------------

async function connect() {
  status.className = "";
  status.textContent = "Connecting";
  try {
    const { data } = await (await call("v1/models")).json();
    const chatting = data.filter((/** @type {any} */ each) => each.chat_template);
    models.hidden = !chatting.length;
    if (models.hidden) throw new Error("no model here has a chat template: serve one that has, or use /v1/completions");
    const before = current.model || localStorage.getItem(MODEL);
    models.replaceChildren(...chatting.map((/** @type {any} */ { id }) => new Option(id, id, false, id === before)));
    seeing = new Set(chatting.filter((/** @type {any} */ each) => each.architecture?.input_modalities.includes("image")).map((/** @type {any} */ each) => each.id));
    chosenModel();
    hearing = data.find((/** @type {any} */ each) => each.architecture?.input_modalities.includes("audio"))?.id ?? "";
    await microphone.enable(hearing !== "");
    models.disabled = chatting.length < 2;
    status.textContent = LOOPBACK.test(location.hostname) ? "On this machine" : `On ${location.host}`;
    chat.ready = true;
    watch();
    await chat.run();
  } catch (error) {
    status.className = "bad";
    status.textContent = `${saidOf(error)} `;
    status.append(element("button", { type: "button", className: "again", textContent: "Try again", onclick: connect }));
  }
}

onKeyNeeded(askForKey);
find("open-side").append(icon("menu"));
find("open-settings").append(icon("settings"));
find("open-side").onclick = () => toggleSide(!side.classList.contains("open"));
find("open-settings").onclick = openSettings;
find("new").onclick = () => openChat();
find("export-all").onclick = () => download(readChats(), "edge conversations");
find("delete-all").onclick = () => remove(readChats());
find("tools").oninput = () => find("tools").setCustomValidity("");
settings.querySelector("form").onsubmit = checkTools;
models.onchange = () => {
  localStorage.setItem(MODEL, models.value);
  chosenModel();
};
document.querySelector("main")?.addEventListener("pointerdown", (event) => {
  if (!(/** @type {Element} */ (event.target).closest("#open-side"))) toggleSide(false);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !side.classList.contains("open")) return;
  event.stopPropagation(); // it would stop an answer
  toggleSide(false);
  find("open-side").focus();
}, true);
addEventListener("storage", drawChats); // another tab's conversations

const kept = readChat(location.hash.slice(1)) ?? readLast();
if (kept) current = kept;
chat.show(current.turns);
drawChats();
await connect();
