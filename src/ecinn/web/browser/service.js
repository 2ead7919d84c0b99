/** The service's requests, answered in this browser: a worker runs the network. */

/** True where the network runs in the browser, which takes longer for a path. */
export const inBrowser = true;

/** A shorter load is not worth a message. */
const PATIENCE = 400;

/** An error answer; `message` says what to do. */
export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Set by messages.js; a browser is neither busy nor does it need a token. */
export const listeners = { loading: () => {} };

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let last = 0;
let loading;

worker.onmessage = ({ data: { id, megabytes, ...answer } }) => {
  if (id === undefined) return showLoading(megabytes);
  waiting.get(id)?.resolve(answer);
  waiting.delete(id);
  return undefined;
};

worker.onerror = () => {
  const error = new ServiceError("This browser cannot run the network: try a newer one.", 0);
  for (const { reject } of waiting.values()) reject(error);
  waiting.clear();
};

/** @param {number | null} megabytes that are loaded; null when they are there */
function showLoading(megabytes) {
  clearTimeout(loading);
  if (megabytes === null) {
    if (loading === "shown") listeners.loading("");
    loading = undefined;
    keepFiles();
    return;
  }
  const words = `Loading ${megabytes.toFixed(0)} MB …`;
  loading = setTimeout(() => {
    loading = "shown";
    listeners.loading(words);
  }, PATIENCE);
}

/** Answers as the service would; `body` is JSON. */
export async function request(path, { body = null, signal } = {}) {
  signal?.throwIfAborted();
  last += 1;
  const id = last;
  const answered = new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    signal?.addEventListener("abort", () => {
      worker.postMessage({ id, aborted: true });
      waiting.delete(id);
      reject(signal.reason);
    });
  });
  worker.postMessage({ id, path, body: JSON.parse(body) });
  const { status, content, headers } = await answered;
  if (status !== 200) throw new ServiceError(content.error, status);
  return new Response(content instanceof Blob ? content : JSON.stringify(content), { headers });
}

/** After the first visit the page works without a network. Keeping the files waits for the first
 * network, which needs the same line and processor. */
function keepFiles() {
  navigator.serviceWorker?.register("sw.js").catch(() => {});
}
