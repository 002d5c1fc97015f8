/** The form in which messages are written: Enter sends, Shift+Enter begins a line, Escape stops the answer. */
import { icon } from "./dom.js";
import { makePictures } from "./pictures.js";

/**
 * @param {HTMLFormElement} form with a text area and a button
 * @param {{send: (text: string, images: string[]) => void, stop: () => void}} on
 */
export function makeComposer(form, on) {
  const text = /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea"));
  const button = /** @type {HTMLButtonElement} */ (form.querySelector("button"));
  const pictures = makePictures(form);
  let busy = false;

  /** @param {boolean} answering */
  function setBusy(answering) {
    busy = answering;
    button.ariaLabel = answering ? "Stop" : "Send";
    button.replaceChildren(icon(answering ? "stop" : "send"));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const said = text.value.trim();
    text.value = said ? "" : text.value;
    if (said || pictures.any) on.send(said, pictures.take());
  });
  button.addEventListener("click", (event) => {
    if (!busy) return;
    event.preventDefault();
    on.stop();
  });
  text.addEventListener("keydown", (event) => sendOnEnter(event, form));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) on.stop();
  });
  setBusy(false);
  button.disabled = false;
  return { setBusy, pictures, focus: () => text.focus() };
}

/** @param {KeyboardEvent} event @param {HTMLFormElement} form */
export function sendOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}
