/** Talking to the service: one place for the token, for a busy server and for errors in words. */

const ATTEMPTS = 6;
const LONGEST_WAIT = 20;

/** An answer that is not a result; `message` says what to do. */
export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** What the page does when the service wants something: set by page.js. */
export const listeners = {
  /** Told how many seconds the next attempt is away; 0 when it succeeded.
   * @type {(seconds: number) => void} */
  busy: () => {},
  /** Asks for the token; null where people do not give one.
   * @type {(again: boolean) => Promise<string | null>} */
  token: async () => null,
};

let token = "";
let asking = null;

/** Asks for the token once, however many requests wait for it. */
function askToken(used) {
  if (token !== used) return Promise.resolve();
  asking ??= listeners.token(used !== "").then((given) => {
    asking = null;
    if (given === null) throw new ServiceError("This service works with its token only.", 401);
    token = given;
  });
  return asking;
}

/** Waits, unless the request is given up meanwhile. */
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
  const words = body.error ?? `The service answered ${response.status}.`;
  return new ServiceError(words, response.status);
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

/** Fetches; asks for a token on 401 and comes back politely on 429 and 503. */
async function request(path, options = {}, patient = true) {
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

function post(path, body, signal, patient) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal }, patient);
}

export async function models() {
  return (await (await request("/api/v1/models")).json()).models;
}

/** A test picture and what it is labelled. */
export async function sample(model, index, signal) {
  const response = await request(`/api/v1/models/${model}/samples/${index}`, { signal });
  return { blob: await response.blob(), label: response.headers.get("X-Label") };
}

/** What is read now. Gives up when the service is busy unless patient: the next stroke asks again. */
export async function predict(model, image, patient = false) {
  const response = await post("/api/v1/predict", { model, images: [image] }, undefined, patient);
  return (await response.json()).predictions[0];
}

export async function explain(model, image, options, signal) {
  const response = await post("/api/v1/explain", { model, images: [image], ...options }, signal);
  return (await response.json()).explanations[0];
}

export async function film(model, image, target, confidence) {
  return (await post("/api/v1/film", { model, image, target, confidence })).blob();
}

export async function sheet(model, image, targets, confidence) {
  return (await post("/api/v1/sheet", { model, image, targets, confidence })).blob();
}

/** Runs `work` on the newest argument only: one at a time, those overtaken are never begun. */
export function latest(work) {
  let running = false;
  let next = null;
  return async (argument) => {
    next = { argument };
    if (running) return;
    running = true;
    try {
      while (next) {
        const { argument: newest } = next;
        next = null;
        await work(newest);
      }
    } finally {
      running = false;
    }
  };
}
