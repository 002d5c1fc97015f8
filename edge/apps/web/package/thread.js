/** A thread of the engine: an instance with a stack of its own, in the memory that all threads share. */
import { instantiate } from "./module.js";

addEventListener("message", async ({ data: { module, memory, number, stack } }) => {
  const exports = await instantiate(module, memory);
  exports.__stack_pointer.value = stack;
  exports.web_thread(number); // until the model is closed
  close();
});
