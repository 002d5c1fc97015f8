/** The back end: this server's chat completions, as a stream. */
import { joulesText } from "./chat/chat.js";

/** @typedef {import("./chat/chat.js").Turn} Turn @typedef {import("./chat/chat.js").Part} Part */

const KEY = "edge key"; // of the API, in this tab's storage

/** @type {(wrong: boolean) => Promise<string | null>} asks the user for a key; wrong: the last one was */
let askForKey = async () => null;
/** @type {Promise<string | null> | null} */
let asking = null;

/** @param {(wrong: boolean) => Promise<string | null>} ask */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** An answer with a good status. Asks for a key where the server wants one, and throws the server's own message.
 * @param {string} path @param {RequestInit} [options] @returns {Promise<Response>} */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = new Headers(key ? { Authorization: `Bearer ${key}` } : {});
  if (!(options.body instanceof FormData)) headers.set("Content-Type", "application/json"); // a form states its own
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
  });
  if (response.ok) return response;
  if (response.status === 401) {
    asking ??= askForKey(key !== null).finally(() => (asking = null));
    const given = await asking;
    if (given) {
      sessionStorage.setItem(KEY, given);
      return call(path, options);
    }
    throw new Error("this server needs its key");
  }
  const told = await response.json().catch(() => null);
  const wait = response.headers.get("Retry-After");
  const again = response.status === 429 && wait ? `; try again in ${wait} s` : "";
  throw new Error((told?.error?.message ?? `the server says ${response.status}`) + again);
}

/** @param {Turn} turn */
function message({ role, content, images, thoughts, calls, call }) {
  const shown = images?.map((url) => ({ type: "image_url", image_url: { url } }));
  if (shown) return { role, content: [...shown, ...(content ? [{ type: "text", text: content }] : [])] };
  if (role !== "assistant") return { role, content, ...(call ? { tool_call_id: call } : {}) };
  const made = calls?.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role, content, ...(thoughts ? { reasoning_content: thoughts } : {}), ...(made ? { tool_calls: made } : {}) };
}

/** What the settings add to a request; those that are empty are left to the server. @param {Record<string, string>} settings */
function wishes({ system: _, tools, energy, time, ...numbers }) {
  const wished = Object.fromEntries(Object.entries(numbers).flatMap(([name, text]) => (text ? [[name, Number(text)]] : [])));
  const budget = { ...(energy ? { energy: `${energy}J` } : {}), ...(time ? { time: `${time}s` } : {}) };
  return { ...wished, ...(tools ? { tools: JSON.parse(tools) } : {}), ...(energy || time ? { edge: budget } : {}) };
}

/**
 * @param {Turn[]} turns @param {AbortSignal} signal @param {string} model @param {Record<string, string>} settings
 * @param {(figures: {speed?: number, usage?: any}) => void} meter @returns {AsyncGenerator<Part>}
 */
export async function* answer(turns, signal, model, settings, meter) {
  const messages = [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...turns.map(message)];
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...wishes(settings) };
  let reason = "";
  let pieces = 0;
  let began = 0;
  /** @type {any} */
  let last = {};
  try {
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message ?? "the answer failed");
      last = { ...last, ...(chunk.usage ? { usage: chunk.usage } : {}), ...(chunk.timings ? { timings: chunk.timings } : {}) };
      const [choice] = chunk.choices ?? [];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content, tool_calls } = choice.delta ?? {};
      if (content || reasoning_content || tool_calls) {
        pieces++; // about as many as tokens, until the server's own figures come
        began ||= performance.now();
        if (pieces > 1) meter({ speed: (1e3 * (pieces - 1)) / (performance.now() - began) });
      }
      yield { text: content, thought: reasoning_content };
      for (const { index, id, function: named } of tool_calls ?? []) yield { call: { index, id, ...named } };
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    yield { note: "Stopped" };
    return;
  }
  if (!reason) throw new Error("the connection ended before the answer did");
  const { usage, timings } = last;
  meter({ speed: timings?.predicted_per_second, usage });
  yield { figures: figures(usage, timings), note: ending(reason, usage) };
}

/** How the server knows its joules, behind them. @param {any} cost */
export function certaintyOf(cost) {
  return cost.energy ? `, ${cost.energy.certainty}` : "";
}

/** @param {string} reason @param {any} usage */
function ending(reason, usage) {
  const budget = usage?.edge?.budget;
  if (budget) return `Stopped: the budget of ${budget} is spent`;
  if (reason === "length") return `Stopped after ${usage?.completion_tokens ?? "the most"} tokens`;
  return usage?.completion_tokens === 0 ? "No answer" : undefined;
}

/** @param {any} usage @param {any} timings */
function figures(usage, timings) {
  const speed = timings?.predicted_per_second;
  const joules = usage?.edge?.joules;
  return [
    usage && `${usage.completion_tokens} token${usage.completion_tokens === 1 ? "" : "s"}`,
    speed && `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`,
    joules !== undefined && `${joulesText(joules)} J${certaintyOf(usage.edge)}`,
  ].filter(Boolean).join(" · ");
}

/** What is said in a sound. @param {Blob} wav @param {string} model @param {AbortSignal} signal @returns {Promise<string>} */
export async function transcribe(wav, model, signal) {
  const body = new FormData();
  body.append("model", model);
  body.append("file", wav, "speech.wav");
  return (await (await call("v1/audio/transcriptions", { method: "POST", body, signal })).json()).text.trim();
}

/** The JSON of server-sent events. @param {Response} response */
async function* events(response) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split(/\r?\n/);
    rest = lines.pop() ?? "";
    for (const line of lines) {
      const data = /^data: ?(.*)/.exec(line)?.[1];
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
    if (done) return;
  }
}
