/** A picture of this device's camera, which is on only while its window is open. */
import { element, iconButton } from "./dom.js";

const WIDTH = 1568; // px, as of other pictures
const FAILURES = /** @type {Record<string, string>} */ ({
  NotAllowedError: "The camera is blocked: allow it for this page",
  NotFoundError: "There is no camera",
  NotReadableError: "The camera is used by another program",
});

/**
 * A button that opens the camera; null where the browser lends none, as to pages without HTTPS.
 * @param {(files: File[]) => void} add @param {(problem: string) => void} fail
 */
export function cameraButton(add, fail) {
  if (!navigator.mediaDevices?.getUserMedia) return null;
  return iconButton("camera", "Take a picture", async () => {
    try {
      show(await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: WIDTH } } }), add);
    } catch (error) {
      const { name, message } = /** @type {Error} */ (error);
      fail(FAILURES[name] ?? message);
    }
  });
}

/** @param {MediaStream} stream @param {(files: File[]) => void} add */
function show(stream, add) {
  const video = element("video", { srcObject: stream, autoplay: true, muted: true, playsInline: true });
  const take = element("button", { type: "button", className: "main", disabled: true, onclick: () => (keep(video, add), dialog.close()) }, ["Take"]);
  const leave = element("button", { type: "button", onclick: () => dialog.close() }, ["Cancel"]);
  const dialog = element("dialog", { className: "taking", ariaLabel: "Camera" }, [video, element("p", { className: "buttons" }, [leave, take])]);
  video.addEventListener("loadeddata", () => ((take.disabled = false), take.focus()));
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {HTMLVideoElement} video @param {(files: File[]) => void} add */
function keep(video, add) {
  const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
  /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).drawImage(video, 0, 0);
  canvas.toBlob((blob) => blob && add([new File([blob], "photo.png", { type: blob.type })]));
}
