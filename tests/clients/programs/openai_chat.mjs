// The npm package openai: a chat, whole and streamed.
import { createRequire } from "node:module";

const [folder, baseURL, model, content] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 16 };
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
}
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed }));
