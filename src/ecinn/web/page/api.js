/** Requests to the service: token, busy server, errors, and class names as numbers. */

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
  return (await (await request("api/v1/models")).json()).models;
}

/** A test picture and its label. */
export async function sample(model, index, signal) {
  const response = await request(`api/v1/models/${model}/samples/${index}`, { signal });
  return { blob: await response.blob(), label: response.headers.get("X-Label") };
}

/** Posterior as a list by class number; the service sends it by class name. */
function listed(model, posterior) {
  return model.classes.map((name) => posterior[name]);
}

/** A predicted image, with class numbers instead of names. */
function prediction(model, { predicted, posterior, answer, typical, caution }) {
  return {
    predicted: model.classes.indexOf(predicted),
    posterior: listed(model, answer ?? posterior),
    /** What the student of a classifier reads; null if the network explains itself. */
    student: answer ? listed(model, posterior) : null,
    typical,
    caution,
  };
}

function counterfactual(model, { image, posterior, stored_posterior: stored, answer, reached }) {
  return { image, reached, posterior: listed(model, answer ?? stored ?? posterior) };
}

function pathOf(model, { alphas, images, heatmaps, posterior }) {
  const posteriors = alphas.map((_, step) => model.classes.map((name) => posterior[name][step]));
  return { alphas, images, heatmaps, posteriors };
}

/** The explanation against one target, with class numbers instead of names. */
function targetOf(model, given) {
  return {
    target: model.classes.indexOf(given.target),
    tippingAlpha: given.alpha_0,
    alpha: given.alpha,
    paperAlpha: given.alpha_1,
    /** False if the classifier that is explained never answers as requested. */
    explained: given.explained ?? null,
    /** False if it is nowhere torn between the two classes. */
    tied: given.tied ?? null,
    tipping: counterfactual(model, given.tipping_point),
    convincing: counterfactual(model, given.convincing),
    heatmap: given.heatmap.image,
    sentences: given.sentences,
    path: given.path && pathOf(model, given.path),
  };
}

/** Predicts. Gives up when the service is busy unless patient: the next stroke asks again. */
export async function predict(model, image, patient = false) {
  const body = { model: model.name, images: [image] };
  const response = await post("api/v1/predict", body, undefined, patient);
  return prediction(model, (await response.json()).images[0]);
}

/** Explains; `answer` is the service's own JSON. */
export async function explain(model, image, options, signal) {
  const body = { model: model.name, images: [image], ...options };
  const answer = await (await post("api/v1/explain", body, signal)).json();
  const [given] = answer.images;
  const targets = given.targets.map((each) => targetOf(model, each));
  return { ...prediction(model, given), input: given.image, targets, answer };
}

export async function film(model, image, target, confidence) {
  return (await post("api/v1/film", { model: model.name, image, target, confidence })).blob();
}

export async function sheet(model, image, targets, confidence) {
  return (await post("api/v1/sheet", { model: model.name, image, targets, confidence })).blob();
}

/** Runs `work` one at a time, on the newest argument only; older ones are dropped. */
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
