/** Keeps all files of the site, so that it works without a network after the first visit. */

/** Other sites of the same host keep theirs. */
const OURS = `ecinn ${registration.scope} `;
const VERSION = `${OURS}{{ version }}`;
const FILES = {{ files }};

addEventListener("install", (event) => {
  const fill = async () => {
    const cache = await caches.open(VERSION);
    // Asks the host if a file has changed, and loads it again only then.
    await cache.addAll(FILES.map((file) => new Request(file, { cache: "no-cache" })));
  };
  event.waitUntil(fill());
});

addEventListener("activate", (event) => {
  const clean = async () => {
    const own = (await caches.keys()).filter((name) => name.startsWith(OURS));
    await Promise.all(own.filter((name) => name !== VERSION).map((name) => caches.delete(name)));
  };
  event.waitUntil(clean());
});

addEventListener("fetch", (event) => {
  const kept = async () => {
    const cache = await caches.open(VERSION);
    const home = event.request.url.split(/[?#]/)[0] === `${registration.scope}index.html`;
    const asked = home ? "./" : event.request;
    return (await cache.match(asked, { ignoreSearch: true })) ?? fetch(event.request);
  };
  if (event.request.method === "GET") event.respondWith(kept());
});
