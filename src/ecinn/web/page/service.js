/** Requests to the service: token, busy server, errors. `ecinn site` puts ../browser/service.js in
 * its place, which answers the same requests in the visitor's browser. */

/** True where the network runs in the browser, which takes longer for a path. */
export const inBrowser = false;

const ATTEMPTS = 6;
const LONGEST_WAIT = 20;

/** An error answer; `message` says what to do. */
export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Called when the service is busy or needs a token; set by messages.js. */
export const listeners = {
  /** Receives the seconds until the next attempt; 0 when it succeeded.
   * @type {(seconds: number) => void} */
  busy: () => {},
  /** Asks for the token; null if none is given.
   * @type {(again: boolean) => Promise<string | null>} */
  token: async () => null,
  /** Receives words while the network is loaded into the browser; "" when it is there.
   * @type {(words: string) => void} */
  loading: () => {},
};

let token = "";
let asking = null;

/** Asks for the token once, however many requests wait for it. */
function askToken(used) {
  if (token !== used) return Promise.resolve();
  asking ??= listeners.token(used !== "").then((given) => {
    asking = null;
    if (given === null) throw new ServiceError("This service needs a token.", 401);
    token = given;
  });
  return asking;
}

/** Waits, unless the request is aborted. */
function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  const message = body.error ?? `The service answered ${response.status}.`;
  return new ServiceError(message, response.status);
}

async function send(path, options) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  try {
    return await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError("The service does not answer. Is it still running?", 0);
  }
}

/** Fetches; asks for a token on 401, and retries on 429 and 503. */
export async function request(path, options = {}, patient = true) {
  for (let attempt = 1; ; attempt += 1) {
    const used = token;
    const response = await send(path, options);
    if (response.ok) {
      if (attempt > 1) listeners.busy(0);
      return response;
    }
    if (response.status === 401) {
      await askToken(used);
      continue;
    }
    const busy = response.status === 429 || response.status === 503;
    if (!busy || !patient || attempt === ATTEMPTS) throw await errorOf(response);
    const seconds = Math.min(Number(response.headers.get("Retry-After")) || 1, LONGEST_WAIT);
    listeners.busy(seconds);
    await pause(seconds, options.signal);
  }
}
