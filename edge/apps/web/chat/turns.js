/** The turns of a conversation as list items. */
import { sendOnEnter } from "./composer.js";
import { copyButton, element, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { shownPictures } from "./pictures.js";

/**
 * A turn: a message of chat completions, with fields of the page.
 * images: data URLs of pictures before a question. failed: why a question has no answer; the model does not see it again. note: how an answer ended. figures: its cost.
 * @typedef {{index?: number, id?: string, name: string, arguments: string}} Call
 * @typedef {{role: "user" | "assistant" | "tool", content: string, thoughts?: string, calls?: Call[], call?: string,
 *   images?: string[], failed?: string, note?: string, figures?: string}} Turn
 */

/** @param {Turn} turn */
export function questionItem({ content: text, images = [] }, /** @type {{edit: (text: string) => void}} */ on) {
  const said = element("div", { className: "said", textContent: text });
  const edit = iconButton("edit", "Edit the question", () => openEditor());
  const actions = element("div", { className: "actions" }, [edit, copyButton("Copy the question", () => text)]);
  const shown = images.length ? [shownPictures(images)] : [];
  const item = element("li", { className: "mine" }, [...shown, said, actions]);

  function openEditor() {
    const field = element("textarea", { value: text, ariaLabel: "Question" });
    const cancel = element("button", { type: "button", textContent: "Cancel", onclick: close });
    const save = element("button", { className: "main", textContent: "Ask again" });
    const form = element("form", { className: "editor" }, [field, element("p", { className: "buttons" }, [cancel, save])]);
    form.onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) on.edit(field.value.trim());
    };
    field.onkeydown = (event) => {
      sendOnEnter(event, form);
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it would stop an answer
      close();
    };
    item.replaceChildren(form);
    field.focus();
  }

  function close() {
    item.replaceChildren(...shown, said, actions);
    edit.focus();
  }

  return item;
}

/** @param {Turn} turn @param {{retry: () => void}} on */
export function answerItem(turn, on) {
  const said = element("div", { className: "said" });
  const actions = element("div", { className: "actions" }, [
    copyButton("Copy the answer", () => turn.content),
    iconButton("retry", "Another answer", on.retry),
    element("span", { className: "figures" }),
  ]);
  return element("li", { className: "theirs" }, [said, actions]);
}

/** Update an answer's item. @param {HTMLElement} item @param {Turn} turn @param {boolean} [busy] */
export function drawAnswer(item, turn, busy = false) {
  item.ariaBusy = String(busy);
  const said = /** @type {HTMLElement} */ (item.querySelector(":scope > .said"));
  render(said, turn.content);
  if (turn.thoughts) {
    const thoughts = folded(item, "thoughts", 0, said);
    thoughts.querySelector("summary")?.replaceChildren(busy && !turn.content ? "Thinking" : "Thoughts");
    render(/** @type {HTMLElement} */ (thoughts.lastElementChild), turn.thoughts);
  }
  for (const [index, call] of (turn.calls ?? []).entries()) {
    const shown = folded(item, "call", index, /** @type {HTMLElement} */ (item.querySelector(":scope > .actions")));
    shown.querySelector("summary")?.replaceChildren("Calls ", element("code", { textContent: call.name }));
    shown.lastElementChild?.replaceChildren(element("pre", { textContent: indented(call.arguments), tabIndex: 0 }));
  }
  /** @type {HTMLElement} */ (item.querySelector(".figures")).textContent = busy ? "" : (turn.figures ?? "");
}

/** A form in which people answer the calls of a turn. @param {Call[]} calls @param {(results: string[]) => void} send */
export function callsForm(calls, send) {
  const fields = calls.map(({ name }) => element("textarea", { required: true, ariaLabel: `Result of ${name}`, placeholder: `Result of ${name}` }));
  const button = element("button", { className: "main", textContent: calls.length > 1 ? "Send the results" : "Send the result" });
  const form = element("form", { className: "editor" }, [...fields, element("p", { className: "buttons" }, [button])]);
  form.onsubmit = (event) => {
    event.preventDefault();
    send(fields.map(({ value }) => value));
  };
  return form;
}

/** A result of a tool. @param {string} text */
export function resultItem(text) {
  const body = element("pre", { textContent: indented(text), tabIndex: 0 });
  return element("li", { className: "result" }, [element("details", {}, [element("summary", { textContent: "Result" }), body])]);
}

/** The details of a kind; made before an element if they are missing.
 * @param {HTMLElement} item @param {string} kind @param {number} index @param {HTMLElement} before */
function folded(item, kind, index, before) {
  const found = /** @type {HTMLElement | undefined} */ (item.querySelectorAll(`:scope > .${kind}`)[index]);
  if (found) return found;
  const made = element("details", { className: kind }, [element("summary"), element("div")]);
  before.before(made);
  return made;
}

/** @param {string} json */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still incomplete, or other text
  }
}
