// llama.cpp in WebAssembly, by the npm package @wllama/wllama.
import { LoggerWithoutDebug, Wllama } from "/npm/@wllama/wllama/esm/index.js";

/** settings: model (address of a GGUF file), threads, rows. */
export async function open({ model, threads, rows }) {
  const quiet = { ...LoggerWithoutDebug, log: () => {}, warn: () => {} };
  const wllama = new Wllama({ default: "/npm/@wllama/wllama/esm/wasm/wllama.wasm" }, { logger: quiet });
  await wllama.loadModelFromUrl(new URL(model, location.href).href, {
    n_threads: threads, n_gpu_layers: 0, n_ctx: rows, n_batch: 512, n_ubatch: 512, n_parallel: 1,
  });
  if (wllama.getNumThreads() !== threads) throw new Error(`wllama has ${wllama.getNumThreads()} threads`);
  return {
    version: Wllama.getLibllamaVersion(),
    async run({ text }, tokens, onPiece) {
      const answer = await wllama.createCompletion({
        prompt: text, max_tokens: tokens, temperature: 0, ignore_eos: true, cache_prompt: false, stream: true,
      });
      let written = "", timings = null;
      for await (const chunk of answer) {
        if (!chunk.choices[0]?.finish_reason) onPiece();
        written += chunk.choices[0]?.text ?? "";
        timings = chunk.timings ?? timings;
      }
      return { text: written, tokens: timings.predicted_n, timings };
    },
    close: () => wllama.exit(),
  };
}
