/** The questions of the page, and their answers with class numbers instead of names. */

import { request } from "./service.js";

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
    /** False if it is nowhere undecided between the two classes. */
    tied: given.tied ?? null,
    tipping: counterfactual(model, given.tipping_point),
    convincing: counterfactual(model, given.convincing),
    heatmap: given.heatmap.image,
    /** Change of a pixel that is drawn in full colour. */
    fullColour: given.heatmap.full_colour,
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
