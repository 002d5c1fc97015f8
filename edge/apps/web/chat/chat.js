/** A conversation on a page: questions that wait for their turn, answers that stream, are stopped and tried again. */
import { makeComposer } from "./composer.js";
import { element } from "./dom.js";
import { answerItem, callsForm, drawAnswer, questionItem, resultItem } from "./turns.js";

const NEAR = 40; // px from the end, within which the view follows an answer

/**
 * A part that a back end yields: pieces of the answer; at last the reason of its end and its cost.
 * @typedef {import("./turns.js").Turn} Turn
 * @typedef {{text?: string, thought?: string, call?: {index: number, id?: string, name?: string, arguments?: string},
 *   note?: string, figures?: string}} Part
 */

export class Chat {
  /** @type {Turn[]} */
  turns = [];
  ready = false;
  /** @type {Turn[]} asked before the back end was ready, or during an answer */
  #waiting = [];
  /** @type {Map<Turn, HTMLElement[]>} */
  #shown = new Map();
  /** @type {AbortController | null} */
  #answering = null;
  #occupied = 0; // by an answer, until what `changed` does after it has ended, and by each `hold`
  /** @type {Promise<void>} of the answer that runs */
  #running = Promise.resolve();
  #list;
  #live;
  #answer;
  #changed;
  #answersCalls;

  /**
   * live: the element for screen readers, which gets whole answers. answer: the back end; its turns end with a question.
   * changed: called before and after each answer, when `turns` has changed. answersCalls: whether people answer calls of
   * tools.
   * @param {{list: HTMLElement, live: HTMLElement, form: HTMLFormElement,
   *   answer: (turns: Turn[], signal: AbortSignal) => AsyncIterable<Part>, changed: () => unknown,
   *   answersCalls?: boolean}} parts
   */
  constructor({ list, live, form, answer, changed, answersCalls = false }) {
    this.#list = list;
    this.#live = live;
    this.#answer = answer;
    this.#changed = changed;
    this.#answersCalls = answersCalls;
    this.composer = makeComposer(form, { send: (text, images) => this.ask(text, images), stop: () => this.#answering?.abort() });
  }

  get busy() {
    return this.#answering !== null;
  }

  /** Replace the conversation but for waiting questions; call `stop` before. @param {Turn[]} turns */
  show(turns) {
    for (const turn of this.#shown.keys()) if (!this.#waiting.includes(turn)) this.#remove(turn);
    for (const note of this.#list.querySelectorAll(":scope > .note")) note.remove();
    this.turns = turns;
    for (const turn of turns) this.#add(turn);
    this.#offerCalls();
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** @param {string} text @param {string[]} [images] */
  ask(text, images) {
    this.#list.querySelector(":scope > .theirs > form")?.remove(); // calls without a result
    const turn = /** @type {Turn} */ ({ role: "user", content: text, ...(images?.length ? { images } : {}) });
    const [item] = this.#add(turn);
    item.classList.add("waiting");
    this.#list.append(item);
    this.#waiting.push(turn);
    this.#list.scrollTop = this.#list.scrollHeight;
    return this.run();
  }

  /** Answer the waiting questions, when the back end is ready. */
  async run() {
    while (this.ready && !this.#occupied && this.#waiting.length) {
      const turn = /** @type {Turn} */ (this.#waiting.shift());
      this.#shown.get(turn)?.[0].classList.remove("waiting");
      this.turns.push(turn);
      await this.#reply();
    }
  }

  /** End the present answer, and forget the waiting questions. */
  async stop() {
    for (const turn of this.#waiting.splice(0)) this.#remove(turn);
    this.#answering?.abort();
    await this.#running;
  }

  /** Do `work`, for whose end questions wait, also those that come while an answer is being stopped.
   * @param {() => Promise<unknown>} work */
  async hold(work) {
    this.#occupied++;
    try {
      await work();
    } finally {
      this.#occupied--;
      void this.run();
    }
  }

  /** @param {string} text @param {boolean} [bad] */
  note(text, bad = false) {
    const item = element("li", { className: bad ? "note bad" : "note", textContent: text });
    this.#append(item);
    this.#list.scrollTop = this.#list.scrollHeight;
    return item;
  }

  /** @param {Turn} turn @param {string} text */
  async #edit(turn, text) {
    await this.hold(async () => {
      if (!(await this.#cut(turn))) return;
      this.composer.focus();
      void this.ask(text, turn.images);
    });
  }

  /** @param {Turn} turn an answer, to whose question another one is given */
  async #retry(turn) {
    await this.hold(async () => {
      if (await this.#cut(turn)) await this.#reply();
    });
  }

  /** @param {Turn} turn a question that failed */
  async #again(turn) {
    await this.hold(async () => {
      await this.stop();
      const at = this.turns.indexOf(turn);
      if (at < 0 || !turn.failed) return;
      for (const each of this.turns.splice(at + 1)) this.#remove(each);
      for (const each of this.#shown.get(turn)?.splice(1) ?? []) each.remove();
      delete turn.failed;
      await this.#reply();
    });
  }

  /** Forget a turn and all after it; false if it is already forgotten. @param {Turn} turn */
  async #cut(turn) {
    await this.stop();
    const at = this.turns.indexOf(turn);
    for (const each of at < 0 ? [] : this.turns.splice(at)) this.#remove(each);
    return at >= 0;
  }

  /** @param {Turn} turn */
  #remove(turn) {
    for (const each of this.#shown.get(turn) ?? []) each.remove();
    this.#shown.delete(turn);
  }

  async #reply() {
    const abort = new AbortController();
    this.#occupied++;
    this.#answering = abort;
    /** @type {() => void} */
    let end = () => {};
    this.#running = new Promise((done) => (end = done));
    this.composer.setBusy(true);
    const asked = this.turns.filter((each) => !each.failed);
    const turn = /** @type {Turn} */ ({ role: "assistant", content: "" });
    const [item] = this.#add(turn);
    drawAnswer(item, turn, true);
    let drawn = 0;
    const draw = () => {
      drawn = 0;
      this.#follow(() => drawAnswer(item, turn, true));
    };
    try {
      await this.#changed();
      for await (const part of this.#answer(asked, abort.signal)) {
        take(turn, part);
        drawn ||= requestAnimationFrame(draw); // one redraw for several parts
      }
      this.turns.push(turn);
    } catch (error) {
      this.#fail(turn, saidOf(error));
    } finally {
      cancelAnimationFrame(drawn);
      this.#follow(() => this.#finish(item, turn));
      this.#answering = null;
      this.composer.setBusy(false);
      try {
        await this.#changed();
      } catch (error) {
        this.note(saidOf(error), true);
      }
      this.#occupied--;
      end();
    }
  }

  /** Ends an answer with an error; the parts before it stay. @param {Turn} turn @param {string} why */
  #fail(turn, why) {
    if (turn.content || turn.thoughts || turn.calls) {
      turn.note = why;
      this.turns.push(turn);
      return;
    }
    const question = this.turns[this.turns.length - 1];
    this.#remove(turn);
    question.failed = why;
    this.#shown.get(question)?.push(this.#failure(question));
    this.#live.textContent = why;
  }

  /** @param {HTMLElement} item @param {Turn} turn */
  #finish(item, turn) {
    if (!item.isConnected) return;
    drawAnswer(item, turn);
    const said = /** @type {HTMLElement} */ (item.querySelector(":scope > .said"));
    this.#live.textContent = [said.innerText, turn.note].filter(Boolean).join("\n");
    if (turn.note) this.#shown.get(turn)?.push(this.note(turn.note));
    this.#offerCalls();
  }

  /** Shows a form for the results of calls, if the conversation ends with calls. */
  #offerCalls() {
    const turn = this.turns[this.turns.length - 1];
    const calls = turn?.calls;
    if (!this.#answersCalls || !calls || turn.note) return;
    const form = callsForm(calls, (results) => this.hold(async () => {
      form.remove();
      await this.stop();
      for (const [index, content] of results.entries()) {
        this.turns.push({ role: "tool", content, call: calls[index].id });
        this.#add(this.turns[this.turns.length - 1]);
      }
      await this.#reply();
    }));
    this.#shown.get(turn)?.[0].querySelector(":scope > .actions")?.before(form);
  }

  /** @param {Turn} turn */
  #add(turn) {
    const elements = [this.#item(turn)];
    this.#shown.set(turn, elements);
    this.#append(elements[0]);
    if (turn.note) elements.push(this.note(turn.note));
    if (turn.failed) elements.push(this.#failure(turn));
    return elements;
  }

  /** Inserts an item before the waiting questions. @param {HTMLElement} item */
  #append(item) {
    this.#list.insertBefore(item, this.#list.querySelector(":scope > .waiting"));
  }

  /** @param {Turn} turn */
  #item(turn) {
    if (turn.role === "tool") return resultItem(turn.content);
    if (turn.role === "user") return questionItem(turn, { edit: (text) => this.#edit(turn, text) });
    const item = answerItem(turn, { retry: () => this.#retry(turn) });
    drawAnswer(item, turn);
    return item;
  }

  /** @param {Turn} turn */
  #failure(turn) {
    const item = this.note(turn.failed ?? "", true);
    item.append(" ", element("button", { type: "button", className: "again", textContent: "Try again", onclick: () => this.#again(turn) }));
    return item;
  }

  /** Change the list, and stay at its end if it is shown. @param {() => void} change */
  #follow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#list;
    change();
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#list.scrollTop = this.#list.scrollHeight;
  }
}

/** @param {Turn} turn @param {Part} part */
function take(turn, { text, thought, call, note, figures }) {
  if (text) turn.content += text;
  if (thought) turn.thoughts = (turn.thoughts ?? "") + thought;
  if (note) turn.note = note;
  if (figures) turn.figures = figures;
  if (!call) return;
  turn.calls ??= [];
  const known = (turn.calls[call.index] ??= { name: "", arguments: "" });
  known.id ??= call.id;
  known.name += call.name ?? "";
  known.arguments += call.arguments ?? "";
}

/** An error's message, with a capital letter. @param {any} error */
export function saidOf(error) {
  const said = String(error?.message ?? error);
  return /^https?:/.test(said) ? said : said.charAt(0).toUpperCase() + said.slice(1);
}

/** Two digits below one joule, so that a short answer never costs 0.0. @param {number} joules */
export function joulesText(joules) {
  return joules < 1 ? String(Number(joules.toPrecision(2))) : joules.toFixed(joules < 100 ? 1 : 0);
}
