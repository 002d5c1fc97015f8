/** Pictures before a question: chosen, pasted or dropped, and made small enough to send and to keep. */
import { cameraButton } from "./camera.js";
import { element, icon, iconButton } from "./dom.js";

const SIDE = 1568; // px: encoders see little more
const QUALITY = 0.9; // of JPEG

/** @param {HTMLFormElement} form in which messages are written */
export function makePictures(form) {
  const choose = element("input", { type: "file", accept: "image/*", multiple: true, hidden: true });
  const button = iconButton("picture", "Add a picture", () => choose.click());
  const camera = cameraButton(add, (problem) => ((problems = [problem]), draw()));
  const tray = element("ul", { className: "pictures", ariaLabel: "Pictures" });
  /** @type {string[]} data URLs */
  let urls = [];
  /** @type {string[]} why there are no more */
  let problems = [];
  let on = false;

  function draw() {
    tray.replaceChildren(
      ...urls.map((src, at) => element("li", {}, [
        element("img", { src, alt: `Picture ${at + 1}` }),
        element("button", {
          type: "button", className: "small", ariaLabel: `Remove picture ${at + 1}`, title: "Remove",
          onclick: () => (urls.splice(at, 1), draw()),
        }, [icon("remove")]),
      ])),
      ...problems.map((problem) => element("li", { role: "alert" }, [problem])),
    );
  }

  /** @param {Iterable<File>} files */
  async function add(files) {
    problems = [];
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      const url = await small(file).catch(() => null);
      if (url) urls.push(url);
      else problems.push(`${file.name}: this browser cannot read it. Save it as JPEG or PNG first.`);
      draw();
    }
  }

  choose.addEventListener("change", () => {
    add([...(choose.files ?? [])]);
    choose.value = ""; // the same file may be chosen again
  });
  form.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!on || !files.length) return;
    event.preventDefault();
    add(files);
  });
  addEventListener("dragover", (event) => {
    if (on && event.dataTransfer?.types.includes("Files")) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!on || !event.dataTransfer?.files.length) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });

  return {
    /** Whether the model sees. @param {boolean} sees */
    enable(sees) {
      if (sees === on) return;
      on = sees;
      if (on) {
        form.prepend(button, ...(camera ? [camera] : []), choose);
        form.before(tray);
      } else {
        for (const each of [button, camera, choose, tray]) each?.remove();
        urls = [];
        problems = [];
      }
      draw();
    },
    /** The pictures, which are then part of a question. */
    take() {
      const taken = urls;
      urls = [];
      problems = [];
      draw();
      return taken;
    },
    get any() {
      return urls.length > 0;
    },
  };
}

/** A data URL of a picture, upright, no larger than SIDE, on white. @param {File} file */
async function small(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", {
    width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)),
  });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

/** A question's pictures. @param {string[]} urls */
export function shownPictures(urls) {
  return element("div", { className: "pictures" }, urls.map((src, at) => element("img", { src, alt: `Picture ${at + 1}` })));
}
