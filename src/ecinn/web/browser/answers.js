/** The service's answers, computed here: the same keys, numbers and sentences. */

import { frameDigit } from "./framing.js";
import { argmax, correctAlpha, shortfall } from "./method.js";
import { stored } from "./network.js";
import { dataUrl, greyOf, greyPng, heatmapPng, robustLimit } from "./pictures.js";
import { sampleOf } from "./samples.js";
import { cautionOf, requestWords, sentencesOf } from "./sentences.js";
import { ALPHA_1 } from "./words.js";

/** End of a path as a multiple of the convincing α. */
const BEYOND = 1.3;
const VERSION = 1;

/** A question that cannot be answered; `message` says what to do. */
export class InputError extends Error {}

/** The 8-bit image of a request: a test picture, numbers, or a file. */
async function read(network, { sample, pixels, png }) {
  if (sample !== undefined) {
    const image = await sampleOf(network.about, sample);
    if (!image) throw new InputError("this site has no such test picture");
    return image;
  }
  if (pixels) return Uint8Array.from(pixels.flat());
  const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
  return frameDigit(await greyOf(new Blob([bytes])), network.about.width);
}

function named({ classes }, values) {
  return Object.fromEntries(classes.map((name, label) => [name, values[label]]));
}

/** What the network says about an image. */
async function readingOf(network, image, wanted) {
  const [{ z, log_p: logP, out_of_distribution: flags }] = await network.encode([image], wanted);
  const latent = Float64Array.from(z);
  const { about } = network;
  const logits = network.classes.logits(latent);
  const reasons = Object.keys(about.out_of_distribution.reasons).filter((_, at) => flags[at]);
  if (!logits.every(Number.isFinite)) {
    throw new InputError("this image is too far from the training images: use another one");
  }
  return {
    z: latent,
    logits,
    p: argmax(logits),
    answer: {
      predicted: about.classes[argmax(logits)],
      posterior: named(about, network.classes.posterior(latent)),
      log_p: logP[0],
      typical: !reasons.length,
      out_of_distribution: reasons,
      caution: cautionOf(about, reasons),
    },
  };
}

/** What was computed for the latest image: the page asks for a prediction, an end and a path. */
let known = { key: null };

async function remember(network, image, wanted) {
  const key = `${network.about.name} ${image.join()}`;
  if (known.key !== key) {
    const reading = await readingOf(network, image, wanted);
    known = { key, reading, ends: new Map() };
  }
  return known;
}

export async function predict(network, { images: [given] }, wanted) {
  const { reading } = await remember(network, await read(network, given), wanted);
  return { model: network.about.name, images: [reading.answer] };
}

function targetsOf({ targets }, { about }, { p, logits }) {
  if (targets === "all") return about.classes.map((_, label) => label).filter((label) => label !== p);
  if (targets?.includes(p)) {
    throw new InputError(`the image is already predicted as ${about.classes[p]}: choose another target`);
  }
  const second = logits.map((logit, label) => (label === p ? -Infinity : logit));
  return targets ?? [argmax(second)];
}

/** Images at these α of some lines, and their posteriors before and after storing. */
async function evaluate(network, points, wanted) {
  const images = await network.decode(points.map(({ line, alpha }) => line.at(alpha)), wanted);
  const eight = images.map(stored);
  const latents = await network.encode(eight, wanted);
  return points.map(({ line, alpha }, row) => ({
    alpha,
    pixels: images[row],
    image: eight[row],
    posterior: line.posterior(alpha),
    stored: network.classes.posterior(latents[row].z),
  }));
}

/** Tipping point and counterfactual of every target. */
async function endsOf(network, { z, p }, targets, confidence, correct, wanted) {
  const asked = targets.map((q) => {
    const line = network.classes.line(z, p, q);
    const paper = { alpha: line.convincingAlpha, reachable: true };
    return { line, q, ...(confidence === null ? paper : line.confidentAlpha(confidence)) };
  });
  const points = asked.flatMap(({ line, alpha }) => [line.tippingAlpha, alpha].map((each) => ({ line, alpha: each })));
  const found = await evaluate(network, points, wanted);
  const ends = [];
  for (const [row, { line, q, reachable }] of asked.entries()) {
    const again = async (alpha) => (await evaluate(network, [{ line, alpha }], wanted))[0];
    const first = { tipping: found[2 * row], end: found[2 * row + 1], reachable, corrections: 0 };
    const original = { alpha: 0, stored: network.classes.posterior(z) };
    const both = correct ? await correctAlpha(line, original, first, confidence, again) : first;
    ends.push({ line, q, ...both, reachable });
  }
  return ends;
}

/** The class that wins at the tipping point if it is neither p nor q. */
function thirdOf(posterior, p, q) {
  const others = posterior.map((share, label) => (label === p || label === q ? -1 : share));
  const most = argmax(others);
  return others[most] > Math.max(posterior[p], posterior[q]) ? most : null;
}

async function certificate({ about }, { posterior, stored: read, image, pixels }, q) {
  const outside = pixels.filter((pixel) => pixel < 0 || pixel > 1).length;
  return {
    posterior: named(about, posterior),
    stored_posterior: named(about, read),
    winner: about.classes[argmax(read)],
    reached: argmax(read) === q,
    clamped: outside / pixels.length,
    image: await dataUrl(greyPng(about.width, about.height, image)),
  };
}

async function pathOf(network, { line, tipping, end }, count, heatmapUrl, wanted) {
  const even = Array.from({ length: count }, (_, step) => (BEYOND * end.alpha * step) / (count - 1));
  const alphas = [...even, tipping.alpha, end.alpha].sort((a, b) => a - b);
  const frames = await evaluate(network, alphas.map((alpha) => ({ line, alpha })), wanted);
  const { classes, width, height } = network.about;
  const along = (label) => frames.map((frame) => frame.stored[label]);
  return {
    alphas,
    posterior: Object.fromEntries(classes.map((name, label) => [name, along(label)])),
    images: await Promise.all(frames.map(({ image }) => dataUrl(greyPng(width, height, image)))),
    heatmaps: await Promise.all(frames.map(({ pixels }) => heatmapUrl(pixels))),
  };
}

export async function explain(network, body, wanted) {
  const { about } = network;
  const image = await read(network, body.images[0]);
  const { reading, ends: before } = await remember(network, image, wanted);
  const asked = body.confidence ?? about.default_confidence;
  const request = requestWords(asked, (body.confidence ?? null) === null);
  const confidence = asked === ALPHA_1 ? null : asked;
  const key = (q) => [q, confidence, body.correct].join();
  const targets = targetsOf(body, network, reading);
  const missing = targets.filter((q) => !before.has(key(q)));
  const found = await endsOf(network, reading, missing, confidence, body.correct, wanted);
  found.forEach((each) => before.set(key(each.q), each));
  const ends = targets.map((q) => before.get(key(q)));

  const x = Float32Array.from(image, (value) => (value + 0.5) / 256);
  const changeOf = (pixels) => pixels.map((pixel, at) => pixel - x[at]);
  // A planted dot changes by 1, beside which faint strokes shall look faint.
  const limits = ends.map(({ end }) => robustLimit(changeOf(end.pixels)));
  const limit = about.kind === "dots" ? 1 : Math.max(...limits);
  const heatmapUrl = (pixels) => dataUrl(heatmapPng(about.width, about.height, changeOf(pixels), limit));
  const { caution } = reading.answer;
  const words = { p: reading.p, confidence, correct: body.correct, request };
  const answers = [];
  for (const each of ends) {
    const { line, q, reachable, tipping, end, corrections } = each;
    const third = thirdOf(body.correct ? tipping.stored : tipping.posterior, reading.p, q);
    const asRequested = shortfall(end.stored, q, confidence) === 0;
    answers.push({
      target: about.classes[q],
      alpha_0: tipping.alpha,
      alpha_1: line.convincingAlpha,
      alpha: end.alpha,
      reachable,
      highest: reachable ? null : end.posterior[q],
      as_requested: asRequested,
      corrections,
      third_class: third === null ? null : about.classes[third],
      tipping_point: await certificate(network, tipping, q),
      convincing: await certificate(network, end, q),
      heatmap: { full_colour: limit, image: await heatmapUrl(end.pixels) },
      sentences: sentencesOf(about, { ...each, ...words, asRequested }, caution),
      path: body.path ? await pathOf(network, each, body.path, heatmapUrl, wanted) : null,
    });
  }
  const described = { ...reading.answer, image: await dataUrl(greyPng(about.width, about.height, image)) };
  return {
    version: VERSION,
    model: about.name,
    confidence: asked,
    requested: request,
    images: [{ ...described, targets: answers }],
    failures: [],
  };
}
