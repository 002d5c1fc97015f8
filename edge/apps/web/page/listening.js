/** The page of a model that hears: what is said is typed, on the device. */
import { saidOf } from "./chat/chat.js";
import { copyButton, icon, iconButton } from "./chat/dom.js";
import { listenTo } from "./edge/index.js";

const FAILURES = /** @type {Record<string, string>} */ ({
  NotAllowedError: "The microphone is blocked: allow it for this page",
  NotFoundError: "There is no microphone",
  NotReadableError: "The microphone is used by another program",
});

/**
 * @param {import("./edge/index.js").Session} session
 * @param {HTMLFormElement} form with a text area and a button that sends, which goes
 * @param {HTMLElement} line that says what goes on and what failed
 */
export function makeListening(session, form, line) {
  const text = /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea"));
  const button = iconButton("microphone", "", () => (stop ? stop() : listen()));
  /** @type {(() => void) | null} ends the recording */
  let stop = null;

  /** @param {string} label @param {"microphone" | "stop"} shape @param {string} [said] */
  function show(label, shape, said = "") {
    button.ariaLabel = button.title = label;
    button.replaceChildren(icon(shape));
    line.className = "hint";
    line.textContent = said;
  }

  async function listen() {
    stop = () => {}; // until the microphone is there
    let words = false;
    try {
      const microphone = await listenTo();
      stop = () => (microphone.stop(), show("Writing the rest", "stop", "Writing what was said"));
      show("End the recording", "stop", "Listening: what you say is written at each pause");
      for await (const segment of session.transcribe(microphone.samples, { rate: microphone.rate, live: true })) {
        words = true;
        type(segment.text.trim());
      }
      show("Speak", "microphone", words ? "" : "No words were heard");
    } catch (error) {
      show("Speak", "microphone");
      line.className = "hint bad";
      line.textContent = FAILURES[/** @type {any} */ (error).name] ?? saidOf(error);
    } finally {
      stop = null;
    }
  }

  /** @param {string} said */
  function type(said) {
    const before = text.value.slice(0, text.selectionStart);
    text.setRangeText(/\S$/.test(before) ? ` ${said}` : said, text.selectionStart, text.selectionEnd, "end");
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.scrollTop = text.scrollHeight;
  }

  const send = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
  form.addEventListener("submit", (event) => (event.preventDefault(), event.stopImmediatePropagation()), { capture: true });
  text.placeholder = "What you say";
  text.ariaLabel = "What was said";
  text.rows = 6;
  send.replaceWith(copyButton("Copy", () => text.value));
  if (navigator.mediaDevices && window.AudioWorkletNode) text.after(button);
  else line.textContent = "This browser gives pages no microphone: open the page by https";
  show("Speak", "microphone", line.textContent ?? "");
}
