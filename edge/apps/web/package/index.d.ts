/** A language model in a web page, on the device, within a memory bound. */

export interface Progress {
  /** download: bytes from the network; load: bytes from this device's storage; ready: the end. */
  step: "download" | "load" | "ready";
  loaded: number;
  total: number;
}

export interface OpenOptions {
  /** A bound on the engine's memory: bytes, or a text such as "256MiB". A site whose manifest states more is refused, and a
   * GPU is used only if its buffers fit, too. Default: as exported. */
  memory?: number | string;
  /** Default: as many as the bundle has memory for and the device has cores; 1 where the page is not isolated. */
  threads?: number;
  /** On a site with programs for a GPU (`edge export --gpu`). auto: the module answers until a GPU is ready, which then runs
   * if it is faster; gpu: `open` waits for a GPU, and without one fails with unsupported. Default: auto. */
  engine?: "auto" | "cpu" | "gpu";
  /** One of the manifest's instruction sets, for tests; default: the best that this browser has. */
  isa?: string;
  onProgress?: (progress: Progress) => void;
  /** Aborts the download. Downloaded pieces stay in storage. */
  signal?: AbortSignal;
}

export interface SamplingOptions {
  // generated: Options
  /** 0 is greedy: the same answer every time. Default: as the model recommends. */
  temperature?: number;
  /** Draw from the k likeliest; 0 is off. Default: as the model recommends. */
  topK?: number;
  /** Draw from the likeliest that make up p; 1 is off. Default: as the model recommends. */
  topP?: number;
  /** Drop tokens below p times the likeliest; 0 is off. Default: as the model recommends. */
  minP?: number;
  /** Penalty on the last 64 tokens; 1 is off. Default: as the model recommends. */
  repeatPenalty?: number;
  /** Seed of the draws. Default: a new one for every answer. */
  seed?: number | bigint;
  /** Subtracted from the logits of the last 64 tokens; 0 is off. */
  presencePenalty?: number;
  /** Subtracted from the logits of the last 64 tokens, as often as each was drawn; 0 is off. */
  frequencyPenalty?: number;
  /** DRY penalty on tokens that would continue a repetition; 0 is off, 0.8 is usual. */
  dryMultiplier?: number;
  /** By which the DRY penalty grows with each repeated token. Default: 1.75. */
  dryBase?: number;
  /** Longest repetition without a DRY penalty, in tokens. Default: 2. */
  dryAllowedLength?: number;
  /** Tokens of the answer in which DRY looks for repetitions. Default: 1024. */
  dryLastN?: number;
  /** How often XTC excludes the likeliest tokens; 0 is off. */
  xtcProbability?: number;
  /** XTC excludes all tokens of this probability but the least likely of them; more than 0.5 is off. Default: 0.1. */
  xtcThreshold?: number;
  /** Tokens to generate. Default: no limit. */
  maxTokens?: number;
  /** Whether drafts of repeated text are verified; the answer is the same. 0: auto, 1: off. */
  speculate?: number;
  /** Never end the turn; go on. */
  ignoreEos?: boolean;
  /** Texts before which an answer ends: 16 of 128 bytes at most. */
  stop?: string[];
  /** Seconds that an answer and the prompt before it may take. Default: no limit. */
  time?: number;
  /** Joules that an answer and the prompt before it may cost, estimated without readings. Default: no limit. */
  energy?: number;
  /** Watts on average, estimated without readings; held by pauses. Default: no limit. */
  power?: number;
  // end
}

export interface StreamOptions extends SamplingOptions {
  signal?: AbortSignal;
  /** Default: "user". "raw": without the chat template. "ids": an Int32Array of token ids instead of a text. */
  role?: "user" | "raw" | "ids" | "result";
  /** Called while a long prompt runs: tokens that have run, of those asked. */
  onPrompt?: (done: number, asked: number) => void;
}

export interface EmbedOptions {
  /** Name of one of the model's prompts, such as "query" or "document", to stand before texts. Default: its own, if any. */
  prompt?: string;
  /** The first values only, for models that were trained for that. Default: all. */
  dimensions?: number;
  /** Scale vectors to length 1. Default: true. */
  normalize?: boolean;
  /** Leave out the end of a text that is longer than the cache. Default: false. */
  truncate?: boolean;
}

export interface TranscribeOptions {
  // generated: Hearing
  /** A code such as en. Default: the likeliest of the first window with a voice. */
  language?: string;
  /** Write in English what was said in another language. */
  translate?: boolean;
  /** Text that might have come before, for names and style. Default: none. */
  prompt?: string;
  /** The only one that is tried, from 0 to 1. Default: 0, and higher ones while a text repeats itself or is improbable.
   * */
  temperature?: number;
  /** Ask the model about silence and steady noise, too, which are passed over otherwise. */
  everything?: boolean;
  /** The text of a window is no prompt for the next. */
  alone?: boolean;
  /** The sound is made meanwhile: a window ends at a pause, instead of after 30 s. */
  live?: boolean;
  /** Each word gets its times. */
  words?: boolean;
  // end
  signal?: AbortSignal;
  /** Budgets, as in StreamOptions. */
  time?: number;
  energy?: number;
  power?: number;
}

/** A part of a transcript. */
export interface Segment {
  // generated: Segment
  /** Its number in the transcript. */
  id: number;
  /** What was said; empty: no segment is complete yet. */
  text: string;
  /** Seconds in the sound at which it begins, and next, ends. */
  start: number;
  end: number;
  /** The code of the language; empty: not yet known. */
  language: string;
  /** If asked for, in JSON: a list of objects with word, start, end, probability; else empty. */
  words: string;
  /** Of the window it was found in, as the next three. */
  temperature: number;
  /** Mean natural logarithm of the probabilities of tokens. */
  avgLogprob: number;
  /** Of the text's bytes to those of zlib: repetition if it is high. */
  compressionRatio: number;
  /** Probability that nothing was said. */
  noSpeechProb: number;
  /** Seconds of sound that were taken so far. */
  heard: number;
  // end
}

export interface Info {
  // generated: ModelInfo
  name: string;
  license: string;
  /** The policy that evicts KV rows. */
  policy: string;
  /** Type of KV rows. */
  kvDtype: string;
  /** The best instruction set of this CPU. */
  isa: string;
  /** Tokens of the vocabulary. */
  vocab: number;
  /** Positions that the model has learned. */
  context: number;
  /** KV rows. */
  capacity: number;
  /** Whether the model has a chat template. */
  chat: boolean;
  /** Rank of the largest adapter for which sessions have room; 0: none. */
  loraRank: number;
  /** Values of an embedding; 0: the bundle makes none. */
  dimensions: number;
  // end
  /** Whether the site's model sees pictures. */
  sees: boolean;
  /** Whether it hears sounds in prompts. */
  sounds: boolean;
  /** Whether the model writes what is said, and answers nothing: `Session.transcribe`. */
  hears: boolean;
  threads: number;
  /** Whether the model is in this device's storage, for the next visit. */
  stored: boolean;
  /** Whether the page may use threads: it is cross-origin isolated. */
  isolated: boolean;
  /** Bytes: of the plan; of the engine's memory now; bound: its maximum. */
  bytes: { weights: number; kv: number; scratch: number; now: number; bound: number };
}

export interface Report {
  // generated: Finish
  finish: "eos" | "stop" | "length" | "capacity" | "interrupted" | "time" | "energy" | "power" | "thermal" | "memory" | "tool-calls";
  // end
  promptTokens: number;
  tokens: number;
  /** Of the prompt, until the first token; and of all tokens after it. Measured. */
  promptSeconds: number;
  seconds: number;
  tokensPerSecond: number;
  joules: number;
  /** false: the joules are estimated from the time. */
  measured: boolean;
  /** Bytes of the engine's memory now, and its bound. */
  memory: { bytes: number; bound: number };
  rows: number;
  evicted: number;
  /** Verified drafted tokens, and the accepted ones among them. */
  drafted: number;
  accepted: number;
  /** Speed-up of the answer by drafts, from the times of its passes; null: not known. */
  gain: number | null;
  /** The engine of the answer's passes; both: one after the other. */
  engine: "cpu" | "gpu" | "both";
  /** Why the CPU runs passes although the site has programs for a GPU, or the result of a race; null: neither, or by choice. */
  engineReason: string | null;
}

export class EdgeError extends Error {
  /** bad-argument, bad-file, unsupported, no-memory, busy, full, failed, network, missing, cancelled, closed. */
  readonly code: string;
}

export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: object; strict?: boolean };
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: Record<string, unknown>;
}

/** Made by `Edge.open`. */
export class Session {
  private constructor();
  readonly info: Info;
  /** Of the present or last answer; null before the first. */
  readonly report: Report | null;
  /** The answer, piece by piece. Leaving the loop early cancels it, as `signal` does; then the loop ends as usual, and
   * `report.finish` is "interrupted". A question that is cancelled before its first token is taken back. */
  stream(text: string | Int32Array, options?: StreamOptions): AsyncIterableIterator<string>;
  /** A whole answer. */
  ask(text: string | Int32Array, options?: StreamOptions): Promise<string>;
  /** Text before the first turn. */
  system(text: string): Promise<void>;
  /** An answer of an earlier conversation. */
  past(question: string, answer: string): Promise<void>;
  /** Forget the last turns; without a number, all. After evictions only all can be forgotten. */
  rewind(turns?: number): Promise<void>;
  /** The form of the next and later answers: JSON that matches a schema, or text that matches a regular expression as a whole;
   * null: any text. An answer ends where its form does. If the form is refused, answers are free: unsupported names what
   * cannot be enforced, bad-argument what is malformed. A schema is JSON, or of a library with Standard JSON Schema (zod 4.2). */
  constrain(form: { jsonSchema: object | string } | { regex: string } | null): Promise<void>;
  /** Adds to the logits of tokens, in the next and later answers: 100 makes a token all but certain, -100 rules it out. */
  bias(biases: Record<number, number>): Promise<void>;
  /** The page's functions that answers may call, before the conversation begins, in the form of OpenAI's protocol; null: none.
   * Fails with unsupported if the model's chat template writes tools in a notation that pages lack. */
  tools(list: Tool[] | null): Promise<void>;
  /** What the next and later answers may call: "auto", "none", "required", or the name of the one function that they must
   * call. Calls that must be made, and those of tools that are `strict`, match their schemas. parallel: several calls may
   * follow each other; default: true. */
  choose(choice: string, options?: { parallel?: boolean }): Promise<void>;
  /** The calls of the last answer, whose `report.finish` then is "tool_calls". */
  calls(): Promise<ToolCall[]>;
  /** The result of a call of the last answer: of its first one, then of the next. The last result is asked with:
   * `stream(text, { role: "result" })`. */
  result(text: string): Promise<void>;
  /** The conversation with its KV rows, for `load` with the same bundle. The states of successive turns begin with the
   * same bytes, but for a header, so a page that saves each needs to write only the pieces that changed. */
  save(): Promise<Uint8Array>;
  /** Replace the conversation. If the state is refused, the conversation stays as it was. */
  load(state: Uint8Array): Promise<void>;
  /** A LoRA adapter that `edge export-adapter` has made, from now on: its address, or its bytes; null: none. The whole
   * conversation is forgotten. scale: of its change; default: 1. Fails with unsupported if the site has no room for
   * adapters (`info.loraRank`), or a GPU that the file has no part for; with bad-file for one of another model. */
  setAdapter(adapter: string | URL | Uint8Array | null, options?: { scale?: number }): Promise<void>;
  tokenize(text: string, special?: boolean): Promise<Int32Array>;
  /** Show a picture, which stands before the text of the next call of `stream`, `ask` or `past`; several in their order. The
   * encoder is fetched, is in memory while it encodes, and goes again. tokens: the most that it takes; default: the model's
   * own. Fails with unsupported if `info.sees` is false, with full if it does not fit into the cache. */
  image(source: ImageData | ImageBitmapSource, options?: { tokens?: number }): Promise<void>;
  /** Tokens of a picture of this size in pixels, before it is encoded. */
  imageTokens(width: number, height: number, options?: { tokens?: number }): Promise<number>;
  /** Play a sound, mono samples from -1 to 1, `rate` of them a second, which stands before the text that comes next, as a picture
   * of `image` does. Fails with unsupported if `info.sounds` is false. */
  sound(samples: Float32Array, options: { rate: number }): Promise<void>;
  /** Tokens of a sound of so many samples, before it is encoded. */
  soundTokens(count: number, options: { rate: number }): Promise<number>;
  /** Fetch the encoder now, so that a service worker can store it for visits offline. */
  keepEyes(): Promise<void>;
  /** The embedding of a text, of `info.dimensions` values, or of each of several, which takes less time than one after the
   * other. The conversation is forgotten. Fails with unsupported if the site's model makes none, with full for a text that
   * is longer than the cache. */
  embed(text: string, options?: EmbedOptions): Promise<Float32Array>;
  embed(texts: string[], options?: EmbedOptions): Promise<Float32Array[]>;
  /** What is said in a sound, mono samples from -1 to 1, or in a stream of them as it comes, segment by segment. `rate` must
   * be given. Fails with unsupported if the site's model does not hear. */
  transcribe(
    sound: Float32Array | AsyncIterable<Float32Array>, options: TranscribeOptions & { rate: number },
  ): AsyncIterableIterator<Segment>;
  close(): Promise<void>;
}

/** Begin to listen to the microphone, for `Session.transcribe(samples, { rate, live: true })`. Fails as getUserMedia does. */
export function listenTo(): Promise<{
  rate: number;
  samples: AsyncGenerator<Float32Array, void, void>;
  stop: () => void;
}>;

export class Edge {
  /** Fetch a bundle's model, unless this device has it, and make it ready. url: of the folder with manifest.json. */
  static open(url: string | URL, options?: OpenOptions): Promise<Session>;
  /** Bytes of this bundle's model that this device stores already. */
  static stored(url: string | URL): Promise<number>;
  /** Delete them. */
  static forget(url: string | URL): Promise<void>;
}
