/** The page of a model that hears: what is said is typed, on the device. */
import { copyButton } from "./chat/dom.js";
import { SpeakButton } from "./chat/speaking.js";
import { listenTo } from "./edge/index.js";

/**
 * @param {import("./edge/index.js").Session} session
 * @param {HTMLFormElement} form with a text area and a button that sends, which goes
 * @param {HTMLElement} line that says what goes on and what failed
 */
export function makeListening(session, form, line) {
  const text = /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea"));
  const speak = new SpeakButton(text, line, listen);

  async function listen() {
    speak.end = () => {}; // until the microphone is there
    let words = false;
    try {
      const microphone = await listenTo();
      speak.end = () => (microphone.stop(), speak.show("Writing the rest", "stop", "Writing what was said"));
      speak.show("End the recording", "stop", "Listening: what you say is written at each pause");
      for await (const segment of session.transcribe(microphone.samples, { rate: microphone.rate, live: true })) {
        words = true;
        type(segment.text.trim());
      }
      speak.show("Speak", "microphone", words ? "" : "No words were heard");
    } catch (error) {
      speak.fail(error);
    } finally {
      speak.end = null;
    }
  }

  /** @param {string} said */
  function type(said) {
    speak.type(said);
    text.dispatchEvent(new Event("input", { bubbles: true }));
    text.scrollTop = text.scrollHeight;
  }

  const send = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
  form.addEventListener("submit", (event) => (event.preventDefault(), event.stopImmediatePropagation()), { capture: true });
  text.placeholder = "What you say";
  text.ariaLabel = "What was said";
  text.rows = 6;
  send.replaceWith(copyButton("Copy", () => text.value));
  if (navigator.mediaDevices && window.AudioWorkletNode) text.after(speak.button);
  else speak.show("Speak", "microphone", "This browser gives pages no microphone: open the page by https");
}
