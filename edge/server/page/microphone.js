/** A button that records what is said, and types it as text. */
import { SpeakButton } from "./chat/speaking.js";

const RATE = 16000; // Hz, as models hear
const LONGEST = 300; // s of a recording, which has then 9.6 MB

/**
 * @param {HTMLFormElement} form with a text area and a button that sends
 * @param {HTMLElement} line that says what goes on and what failed
 * @param {(wav: Blob, signal: AbortSignal) => Promise<string>} transcribe
 */
export function makeMicrophone(form, line, transcribe) {
  const text = /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea"));
  const speak = new SpeakButton(text, line, record);
  let on = false;

  async function record() {
    const abort = new AbortController();
    speak.end = () => {}; // until the microphone is there
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const recorded = until(stream, (stop) => (speak.end = stop));
      speak.show("End the recording", "stop", "Listening: press again to end");
      const wav = await toWav(await recorded);
      speak.end = () => abort.abort();
      speak.show("Stop writing", "stop", "Writing what was said");
      const said = await transcribe(wav, abort.signal);
      speak.show("Speak", "microphone", said ? "" : "No words were heard");
      if (said) {
        speak.type(said);
        text.focus();
      }
    } catch (error) {
      if (abort.signal.aborted) speak.show("Speak", "microphone");
      else speak.fail(error);
    } finally {
      speak.end = null;
    }
  }

  async function place() {
    const devices = await navigator.mediaDevices?.enumerateDevices(); // undefined where the page is not secure
    if (on && window.MediaRecorder && devices?.some(({ kind }) => kind === "audioinput")) text.after(speak.button);
    else if (!speak.end) speak.button.remove();
  }

  navigator.mediaDevices?.addEventListener("devicechange", place);
  return {
    /** Whether the server has a model that hears. @param {boolean} hears */
    async enable(hears) {
      on = hears;
      await place();
    },
  };
}

/** What a microphone records until `stop`, which `begun` is given, or for LONGEST.
 * @param {MediaStream} stream @param {(stop: () => void) => void} begun @returns {Promise<Blob>} */
function until(stream, begun) {
  const recorder = new MediaRecorder(stream);
  /** @type {Blob[]} */
  const parts = [];
  const stop = () => recorder.state === "recording" && recorder.stop();
  const timer = setTimeout(stop, 1000 * LONGEST);
  recorder.ondataavailable = ({ data }) => parts.push(data);
  recorder.start();
  begun(stop);
  return new Promise((done) => {
    recorder.onstop = () => { // also where the microphone is unplugged
      clearTimeout(timer);
      for (const track of stream.getTracks()) track.stop();
      done(new Blob(parts));
    };
  });
}

/** A recording as WAV: mono, 16 bits, RATE. @param {Blob} recorded */
async function toWav(recorded) {
  const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recorded.arrayBuffer()); // at RATE
  const channels = Array.from({ length: sound.numberOfChannels }, (_, at) => sound.getChannelData(at));
  const view = new DataView(new ArrayBuffer(44 + 2 * sound.length));
  const name = (/** @type {number} */ at, /** @type {string} */ letters) => {
    for (const [index, letter] of [...letters].entries()) view.setUint8(at + index, letter.charCodeAt(0));
  };
  name(0, "RIFF");
  view.setUint32(4, 36 + 2 * sound.length, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes of a sample
  view.setUint16(34, 16, true); // bits of a sample
  name(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  for (let at = 0; at < sound.length; at++) {
    const sample = channels.reduce((sum, each) => sum + each[at], 0) / channels.length;
    view.setInt16(44 + 2 * at, Math.round(32767 * Math.max(-1, Math.min(1, sample))), true);
  }
  return new Blob([view], { type: "audio/wav" });
}
