/** The microphone as a stream of samples, for `Session.transcribe`. */

/** Runs where sound is made: passes samples on, a tenth of a second at a time. */
const WORKLET = `
registerProcessor("edge-microphone", class extends AudioWorkletProcessor {
  constructor() {
    super();
    this.samples = new Float32Array(Math.ceil(sampleRate / 10));
    this.count = 0;
  }
  process([input]) {
    for (const [at, first] of (input[0] ?? []).entries()) {
      this.samples[this.count++] = input.length > 1 ? (first + input[1][at]) / 2 : first;
      if (this.count < this.samples.length) continue;
      this.port.postMessage(this.samples.slice());
      this.count = 0;
    }
    return true;
  }
});`;

/**
 * Begins to listen, which the browser asks the user about. Returns the rate of the samples, the samples as they come, and a
 * function that ends them. Fails as getUserMedia does.
 *
 * @returns {Promise<{rate: number, samples: AsyncGenerator<Float32Array, void, void>, stop: () => void}>}
 */
export async function listenTo() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const context = new AudioContext();
  const address = URL.createObjectURL(new Blob([WORKLET], { type: "text/javascript" }));
  try {
    await context.audioWorklet.addModule(address);
  } catch (error) {
    for (const track of stream.getTracks()) track.stop();
    await context.close();
    throw error;
  } finally {
    URL.revokeObjectURL(address);
  }
  const node = new AudioWorkletNode(context, "edge-microphone", { numberOfOutputs: 0 });
  const source = context.createMediaStreamSource(stream);
  source.connect(node);
  /** @type {Float32Array[]} */
  const waiting = [];
  let wake = () => {};
  let ended = false;
  const stop = () => {
    if (ended) return;
    ended = true;
    for (const track of stream.getTracks()) track.stop();
    source.disconnect();
    void context.close(); // here, since nobody may have asked for samples
    wake();
  };
  node.port.onmessage = ({ data }) => (waiting.push(data), wake());
  for (const track of stream.getTracks()) track.onended = stop; // the microphone was unplugged
  async function* samples() {
    try {
      for (;;) {
        while (waiting.length) yield /** @type {Float32Array} */ (waiting.shift());
        if (ended) return;
        await new Promise((/** @type {(value?: any) => void} */ done) => ((wake = done), (ended || waiting.length) && done()));
      }
    } finally {
      stop();
    }
  }
  return { rate: context.sampleRate, samples: samples(), stop };
}
