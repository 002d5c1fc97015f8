/**
 * Measures the model of this folder in this browser, and offers the result for download: the document that kit.c prints
 * on other machines, for `edge profile --read`. Values unknown to a page are null or 0.
 */
import { Edge } from "./edge/index.js";

const WARM_UP = 32;
const WARM_UP_ANSWER = 4;
const LEAST_TOKENS = 4;
const THREADS_PROMPT = 128;
const THREADS_S = 2; // of answers with fewer threads
const WINDOWS = 5; // of a long run, at least
const WINDOW_S = 60;
const MARGIN = 1.3; // longer contexts are slower than those measured so far
const CEILING_PAGES = 2048; // 128 MiB of memory that is read, by all threads together

/** @param {string} id @returns {any} */
const part = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;
const began = seconds();

/** @type {any} */
let kit;
/** @type {any} */
let session;
let threads = 0;
let rows = 0; // KV rows in use
let peak = 0; // bytes of the engine's memory
/** @type {Int32Array} */
let ids;
/** @type {{seconds: number, what: string}[]} */
const marks = [];

/** @param {string} what @param {number} share */
function say(what, share) {
  part("status").textContent = what;
  part("progress").value = share;
}

/** @param {string} what */
const mark = (what) => marks.push({ seconds: seconds() - began, what });

/** @param {number[]} values */
function spread(values) {
  if (!values.length) throw new Error("nothing was measured: the model ended its answer at once");
  const sorted = values.toSorted((one, other) => one - other);
  const quantile = (/** @type {number} */ share) => {
    const at = share * (sorted.length - 1);
    const low = Math.floor(at);
    return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
  };
  return { p10: quantile(0.1), p50: quantile(0.5), p90: quantile(0.9), count: sorted.length };
}

/** Another session. @param {number} [count] threads; default: the plan's, as far as the device has cores */
async function open(count) {
  await session?.close();
  const started = seconds();
  session = await Edge.open("./", { threads: count, engine: "cpu", onProgress: ({ step, loaded, total }) => say(`${step}: ${Math.round((100 * loaded) / total)} %`, 0) });
  rows = 0;
  return seconds() - started;
}

/**
 * Runs token ids and draws an answer, greedily and without drafts. first: seconds to its first token; times: of each
 * further token, fewer than `most` once they took `limit` seconds.
 * @param {Int32Array} prompt @param {number} most @param {number} [limit]
 */
async function run(prompt, most, limit = Infinity) {
  const stop = new AbortController();
  const options = { role: "ids", temperature: 0, speculate: 1, ignoreEos: true, maxTokens: most + 1, signal: stop.signal };
  /** @type {number[]} */
  const times = [];
  let seen = { tokens: 1, seconds: 0 };
  const note = () => {
    const report = session.report;
    // A token without text comes with the next one, and pages that are not isolated have a coarse clock.
    const count = report.tokens - seen.tokens;
    const each = (report.seconds - seen.seconds) / count;
    if (count > 0 && each > 0) {
      times.push(...Array(count).fill(each));
      seen = { tokens: report.tokens, seconds: report.seconds };
    }
    peak = Math.max(peak, report.memory?.bytes ?? 0);
    if (times.length >= LEAST_TOKENS && seen.seconds > limit) stop.abort();
  };
  for await (const _ of session.stream(prompt, options)) note();
  note();
  rows = session.report.rows;
  return { first: session.report.promptSeconds, times: times.slice(0, most) };
}

async function speeds() {
  const { prompt, settings } = kit;
  const first = [];
  const times = [];
  const started = seconds();
  await run(ids.slice(0, Math.min(WARM_UP, prompt)), WARM_UP_ANSWER);
  let answering = 0;
  for (let count = 0; count < settings.repetitions; count++) {
    if (count && (seconds() - started) * (1 + 1 / count) > settings.speed_s) break;
    say(`prompt and answer ${count + 1} of ${settings.repetitions}`, 0.1 + (0.2 * count) / settings.repetitions);
    await session.rewind();
    mark("prompt");
    const ran = await run(ids.slice(0, prompt), settings.answer, settings.speed_s);
    first.push(ran.first);
    times.push(...ran.times);
    answering += ran.times.reduce((sum, each) => sum + each, 0);
  }
  const prompting = first.reduce((sum, each) => sum + each, 0);
  return {
    prompts: first.length, tokens: times.length, answering_s: answering, others: null,
    // A page reads neither joules nor CPU time: the estimate assumes that all threads are busy.
    prompt_joules: 0, answer_joules: 0, prompt_cpu_s: prompting * threads, answer_cpu_s: answering * threads,
    ttft: spread(first), token: spread(times),
  };
}

async function curve() {
  const { contexts, settings } = kit;
  const points = [];
  const started = seconds();
  let perToken = 0;
  await session.rewind();
  rows = 0;
  for (const [at, context] of contexts.entries()) {
    const missing = context - rows;
    if (seconds() - started + perToken * missing * MARGIN > settings.curve_s) {
      return { curve: points, curve_end: `context ${context} would have taken longer than ${settings.curve_s} s` };
    }
    say(`context ${context}`, 0.3 + (0.3 * at) / contexts.length);
    mark(`context ${context}`);
    const next = contexts[at + 1] ?? Infinity;
    const most = Math.max(1, Math.min(settings.answer, next - context - 2));
    const { first, times } = await run(ids.slice(context - missing, context), most, settings.curve_s / contexts.length / 2);
    perToken = first / missing;
    points.push({ context, prefill: perToken, decode: spread(times) });
  }
  return { curve: points, curve_end: kit.curve_end };
}

async function byThreads() {
  const found = [];
  const prompt = Math.min(kit.prompt, THREADS_PROMPT);
  mark("threads");
  for (let count = 1; count < threads; count *= 2) {
    say(`${count} of ${threads} threads`, 0.6 + (0.1 * count) / threads);
    await open(count);
    await run(ids.slice(0, Math.min(WARM_UP, prompt)), WARM_UP_ANSWER);
    await session.rewind();
    const { first, times } = await run(ids.slice(0, prompt), kit.settings.answer, THREADS_S);
    found.push({ threads: count, prefill: first / prompt, decode: spread(times) });
  }
  await open();
  return { by_threads: found };
}

async function sustained() {
  const whole = kit.settings.sustained_s;
  if (!whole) return { sustained: null };
  const length = Math.min(whole / WINDOWS, WINDOW_S);
  const windows = [];
  mark("sustained");
  const started = seconds();
  const most = Math.max(1, session.info.capacity - kit.prompt - 2);
  for (let start; (start = seconds() - started) < whole - length / 2; ) {
    /** @type {number[]} */
    const kept = [];
    let spent = 0;
    while (!kept.length || seconds() - started < start + length) {
      say(`sustained, ${Math.round(seconds() - started)} of ${whole} s`, 0.7 + (0.25 * (seconds() - started)) / whole);
      await session.rewind(); // begin another answer; its prompt is not counted
      const { times } = await run(ids.slice(0, kit.prompt), most, start + length - (seconds() - started));
      kept.push(...times);
      spent += times.reduce((sum, each) => sum + each, 0);
    }
    windows.push({
      start, seconds: spent, joules: 0, cpu_s: spent * threads, others: null, celsius: null, hertz: null,
      per_token: spread(kept),
    });
  }
  return { sustained: { length, windows } };
}

async function ceilings() {
  say("memory and arithmetic at most", 0.95);
  const module = await WebAssembly.compileStreaming(fetch("ceilings.wasm"));
  const workers = Array.from({ length: threads }, () => new Worker("ceiling.js", { type: "module" }));
  const ask = (/** @type {Worker} */ worker, /** @type {any} */ message) =>
    new Promise((/** @type {(value: number) => void} */ resolve, reject) => {
      worker.onmessage = ({ data }) => resolve(data);
      worker.onerror = () => reject(new Error("a thread stopped"));
      worker.postMessage(message);
    });
  const rate = async (/** @type {string} */ work, count = threads) => {
    const length = kit.quick ? 0.3 : 1;
    const rates = await Promise.all(workers.slice(0, count).map((each) => ask(each, { work, seconds: length })));
    return rates.reduce((sum, each) => sum + each, 0);
  };
  await Promise.all(workers.map((each) => ask(each, { module, pages: Math.floor(CEILING_PAGES / threads) })));
  const found = { threads, read: await rate("read"), read_one_core: await rate("read", 1), f32: await rate("floats"), int8: null };
  for (const worker of workers) worker.terminate();
  return { ceilings: found };
}

/** The device, as the browser describes it. */
async function machine() {
  const { userAgentData: agent, deviceMemory, userAgent, hardwareConcurrency } = /** @type {any} */ (navigator);
  const told = (await agent?.getHighEntropyValues?.(["model", "platformVersion"]).catch(() => null)) ?? {};
  const brand = agent?.brands?.find((/** @type {any} */ { brand }) => !/not|chromium/i.test(brand)) ?? agent?.brands?.at(-1);
  const system = agent ? `${agent.platform} ${told.platformVersion ?? ""}`.trim() : userAgent.slice(0, 200);
  return {
    system: brand ? `${system}, a page in ${brand.brand} ${brand.version}` : `a page in ${system}`,
    machine: "wasm32", board: told.model || "a page", cpuinfo: "", caches: {},
    memory: (deviceMemory ?? 0) * 2 ** 30, // rounded by the browser
    fastest_cores: hardwareConcurrency ?? 1, cores: hardwareConcurrency ?? 1,
  };
}

async function measure() {
  part("progress").hidden = false;
  mark("load");
  const first = await open();
  const again = await open();
  threads = session.info.threads;
  ids = makeIds(Math.max(kit.prompt, ...kit.contexts), session.info.vocab);
  const load = { first_load_s: first, load_s: again, isa: session.info.isa, threads, capacity: session.info.capacity };
  const found = { ...(await speeds()), ...(await curve()), ...(await byThreads()), ...(await sustained()) };
  await session.close();
  return {
    kind: "edge kit result", schema: 1, kit, time: Math.floor(Date.now() / 1000), ...(await machine()), ...load, ...found,
    energy: null, peak, peak_anonymous: null, peak_swap: 0, sensor: "", trip: null, samples: [], marks, climate: [],
    ...(await ceilings()), seconds: seconds() - began,
  };
}

/** Random, and the same everywhere. @param {number} count @param {number} vocab */
function makeIds(count, vocab) {
  let state = 1n;
  return Int32Array.from({ length: count }, () => {
    state = BigInt.asUintN(64, state * 6364136223846793005n + 1442695040888963407n);
    return Number((state >> 33n) % BigInt(vocab));
  });
}

/** @param {any} found */
function show(found) {
  const rate = (/** @type {number} */ each) => `${(1 / each).toPrecision(3)} tok/s`;
  const figures = {
    Answers: rate(found.token.p50), Prompts: rate(found.ttft.p50 / kit.prompt),
    "First token": `${found.ttft.p50.toPrecision(3)} s after a prompt of ${kit.prompt} tokens`,
    Load: `${found.load_s.toPrecision(3)} s`, Memory: `${Math.ceil(peak / 2 ** 20)} MiB`,
    Threads: `${threads}${session.info.isolated ? "" : " (this page is not isolated: serve it over HTTPS, with the headers in _headers)"}`,
  };
  for (const [name, value] of Object.entries(figures)) {
    part("figures").append(Object.assign(document.createElement("dt"), { textContent: name }));
    part("figures").append(Object.assign(document.createElement("dd"), { textContent: value }));
  }
  part("result").href = URL.createObjectURL(new Blob([JSON.stringify(found, null, 1)], { type: "application/json" }));
  part("result").hidden = false;
}

part("measure").addEventListener("click", async () => {
  part("measure").disabled = true;
  const lock = await /** @type {any} */ (navigator).wakeLock?.request("screen").catch(() => null); // or a phone sleeps
  try {
    show(await measure());
    say("Measured. Nothing has left this device: save the result, and give it to edge profile --read.", 1);
  } catch (error) {
    say(`${/** @type {any} */ (error).message}. Reload the page to try again.`, 0);
  } finally {
    await lock?.release();
  }
});

try {
  kit = await (await fetch("kit.json")).json();
  const minutes = Math.max(1, Math.round((kit.settings.speed_s + kit.settings.curve_s + kit.settings.sustained_s + 10) / 60));
  part("about").textContent = `${kit.model.label} is loaded and runs for about ${minutes} min, in this page alone. Leave it in front, and the device plugged in.`;
  part("measure").disabled = false;
} catch {
  part("about").textContent = "kit.json is missing or damaged: upload the folder again.";
}
