/**
 * The page without a network, and with the headers that threads need, where the server does not set them.
 *
 * Files come from the network while there is one, else as they last came. The model is not among them: the package keeps it.
 */
const CACHE = "edge";
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "Cross-Origin-Resource-Policy": "same-origin",
};

addEventListener("install", (event) => event.waitUntil(keepAll().then(() => skipWaiting())));
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  const { request } = event;
  const ours = new URL(request.url).origin === location.origin;
  if (ours && request.method === "GET" && !request.headers.has("Range")) event.respondWith(answer(request));
});

/** Every file of the site but the model and the modules, of which the browser has use for one. */
async function keepAll() {
  const manifest = await (await fetch("manifest.json", { cache: "no-cache" })).json();
  const names = Object.keys(manifest.files).filter((name) => /\.(html|js|css|svg|webmanifest)$/.test(name));
  await (await caches.open(CACHE)).addAll(["./", "manifest.json", ...names]);
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  let response;
  try {
    response = await fetch(request);
    if (response.ok && response.status === 200) await cache.put(request, response.clone());
  } catch (error) {
    response = await cache.match(request, { ignoreSearch: true });
    if (!response) throw error;
  }
  if (!response.status) return response; // of a redirect, say: it cannot be changed
  const headers = new Headers(response.headers);
  for (const [name, value] of Object.entries(HEADERS)) headers.set(name, value);
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}
