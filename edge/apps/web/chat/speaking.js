/** A button that listens: beside a text area, with a line that says what goes on and what failed. */
import { saidOf } from "./chat.js";
import { icon, iconButton } from "./dom.js";

const FAILURES = /** @type {Record<string, string>} */ ({
  NotAllowedError: "The microphone is blocked: allow it for this page",
  NotFoundError: "There is no microphone",
  EncodingError: "Nothing was recorded",
  NotReadableError: "The microphone is used by another program",
});

export class SpeakButton {
  /** @param {HTMLTextAreaElement} text @param {HTMLElement} line @param {() => void} begin */
  constructor(text, line, begin) {
    this.text = text;
    this.line = line;
    /** @type {(() => void) | null} ends what goes on */
    this.end = null;
    this.button = iconButton("microphone", "", () => (this.end ? this.end() : begin()));
    this.show("Speak", "microphone");
  }

  /** @param {string} label @param {"microphone" | "stop"} shape @param {string} [said] */
  show(label, shape, said = "") {
    this.button.ariaLabel = this.button.title = label;
    this.button.replaceChildren(icon(shape));
    this.line.className = "hint";
    this.line.textContent = said;
  }

  /** @param {any} error */
  fail(error) {
    this.show("Speak", "microphone", FAILURES[error.name] ?? saidOf(error));
    this.line.className = "hint bad";
  }

  /** Type in place of the selection. @param {string} said */
  type(said) {
    const { text } = this;
    const spaced = /\S$/.test(text.value.slice(0, text.selectionStart)) ? ` ${said}` : said;
    text.setRangeText(spaced, text.selectionStart, text.selectionEnd, "end");
  }
}
