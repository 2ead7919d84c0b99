/** The page: what is on the easel, what the service says of it, and what is shown. */

import * as api from "./api.js";
import { listen } from "./controls.js";
import { saveGif, saveJson, savePng, share } from "./download.js";
import { Easel, greyImage } from "./easel.js";
import * as link from "./link.js";
import * as panels from "./panels.js";
import { png, readPicture, wholePng } from "./photo.js";
import { Plot } from "./plot.js";
import { decode, decodePath, paint, paintOverlay, paintPixels, wipe } from "./prints.js";
import { Slider, stopsOf } from "./slider.js";
import { rows } from "./strokes.js";
import { at, attempt, notice, say } from "./telling.js";
import { arrange, settle } from "./tools.js";
import { emptyHeadline, named, obtainedWords, percent, restName, winner } from "./words.js";

/** Of a path; faces take the network thirty times as long. */
const FRAMES = { digits: 41, dots: 41 };
const FRAMES_OF_OTHERS = 21;
/** What a first visit shows: a three that becomes an eight. */
const FIRST = { digits: { sample: 90, target: 8 }, dots: { sample: 4 } };
const SWEEP = 1600;
/** States of the stage in which nothing is known of the picture but what is read. */
const WAITING = new Set(["stale", "loading"]);

const state = {
  models: [],
  model: null,
  /** @type {{sample: number} | {pixels: Uint8Array} | {png: string} | null} */
  source: null,
  label: null,
  predicted: null,
  input: null,
  target: null,
  /** How sure the counterfactual shall be; null: as the paper's α₁ makes it. */
  confidence: null,
  answer: null,
  frames: [],
  step: 0,
  overlay: false,
};
/** What was explained of the present picture, by target. */
const explained = new Map();

let errand = new AbortController();

/** Gives up whatever the service is still asked for. */
function renew() {
  errand.abort();
  errand = new AbortController();
  return errand.signal;
}

const easel = new Easel(at("pad"), { changed: drawn, settled: shown });
const plot = new Plot(at("plot"), (alpha) => slider.scrub(alpha));
const slider = new Slider({ input: at("slider"), stops: at("stops"), play: at("play") }, showFrame);

/* What is on the easel */

function image() {
  const { source } = state;
  return source?.pixels ? { pixels: rows(source.pixels) } : source;
}

/** What the network would read of what people did. */
function ownSource() {
  const { width, height } = state.model;
  return easel.photo ? { png: png(easel.photo.cut(width, height)) } : { pixels: easel.pixels() };
}

const readLive = api.latest(async () => {
  const { source, model } = state;
  try {
    const reading = await api.predict(model.name, image());
    if (state.source !== source || !WAITING.has(at("stage").dataset.state)) return;
    showReading(reading);
    at("question").textContent = `This looks like ${named(model, reading.predicted)}.`;
  } catch (error) {
    if (![429, 503].includes(error.status)) notice(error.message);
  }
});

/** What the network will read, before it says so. */
function showInput() {
  if (easel.drawable) paintPixels(at("input"), greyImage(easel.pixels()));
  else paint(at("input"), easel.photo?.cut(state.model.width, state.model.height) ?? easel.bitmap);
}

/** Something moves on the easel: read it, explain later. */
function drawn() {
  renew();
  slider.stop();
  explained.clear();
  state.source = ownSource();
  state.label = null;
  showInput();
  at("zoom").value = String(easel.photo?.zoom ?? 1);
  settle("stale");
  arrange(state, easel);
  readLive();
}

/** It rests: explain what is there. */
function shown() {
  if (easel.blank) return empty();
  state.source = ownSource();
  state.label = null;
  return explain();
}

function empty() {
  renew();
  Object.assign(state, { source: null, predicted: null, target: null, answer: null, frames: [] });
  slider.forget();
  plot.show(null);
  for (const id of ["input", "answer", "change"]) wipe(at(id));
  panels.moveBars(at("bars"), null);
  panels.markTargets(at("targets"), state.model, null, null);
  at("verdict").textContent = "";
  at("caution").hidden = true;
  at("question").textContent = emptyHeadline(state.model);
  settle("empty");
  arrange(state, easel);
}

/* Pictures from elsewhere */

async function openSample(index, wish = {}) {
  const signal = renew();
  settle("loading");
  state.source = { sample: index };
  const { blob, label } = await api.sample(state.model.name, index, signal);
  const bitmap = await createImageBitmap(blob);
  signal.throwIfAborted();
  easel.show(bitmap);
  state.label = label;
  return explain(wish);
}

async function openPixels(pixels, wish) {
  await easel.showPixels(pixels);
  state.source = { pixels };
  state.label = null;
  return explain(wish);
}

/** A file, dropped or pasted. The service frames digits; people frame faces. */
async function openPicture(blob) {
  const bitmap = await readPicture(blob);
  if (easel.drawable) {
    settle("loading");
    const picture = { png: wholePng(bitmap) };
    const { input } = await api.explain(state.model.name, picture, { targets: null }, renew());
    easel.show(await decode(input));
  } else {
    easel.showPhoto(bitmap);
    at("zoom").value = "1";
  }
  return shown();
}

/* What the service says */

function showReading({ predicted, posterior, typical, reasons }) {
  const { model, label } = state;
  state.predicted = predicted;
  panels.moveBars(at("bars"), posterior);
  const words = `${named(model, predicted)}, ${percent(posterior[predicted])}`;
  const truth = label === null ? "" : label === model.classes[predicted] ? "" : ` (labelled ${label})`;
  at("verdict").textContent = words + truth;
  at("input-words").textContent = `${model.classes[predicted]} · ${percent(posterior[predicted])}`;
  at("input").setAttribute("aria-label", `Input, read as ${words}`);
  at("caution").hidden = typical !== false;
  at("caution").textContent = `Unlike the pictures the network learned from: ${reasons.join(", and ")}.`;
  say(`Read as ${words}`);
}

/** What is stored shall be as sure as was asked, not only what is thought. */
function sureness() {
  return { confidence: state.confidence, verified: state.confidence !== null };
}

/** Asks for the path to a target, or takes what was asked before. */
async function ask(target, signal) {
  if (explained.has(target)) return explained.get(target);
  slider.forget();
  state.frames = [];
  const targets = target === null ? null : [target];
  const { name, kind } = state.model;
  const options = { targets, ...sureness() };
  if (!easel.drawable) await preview(await api.explain(name, image(), options, signal), signal);
  const frames = FRAMES[kind] ?? FRAMES_OF_OTHERS;
  const whole = await api.explain(name, image(), { ...options, frames }, signal);
  const [answer] = whole.targets;
  const found = { whole, answer, frames: await decodePath(answer.path) };
  signal.throwIfAborted();
  explained.set(answer.target, found);
  return found;
}

/** The end of the path, while the path itself is still computed. */
async function preview(whole, signal) {
  const [{ target, convincing, heatmap, words }] = whole.targets;
  const pictures = await Promise.all([convincing, heatmap].map(decode));
  signal.throwIfAborted();
  showReading(whole);
  paint(at("answer"), pictures[0]);
  paint(at("change"), pictures[1]);
  at("answer-words").textContent = "";
  panels.showQuestion(at("question"), state.model, whole.predicted, target);
  panels.markTargets(at("targets"), state.model, whole.predicted, target);
  panels.showWords(at("words"), words);
  settle("nearly");
}

/** Explains the picture on the easel from scratch. */
async function explain(wish = {}) {
  const signal = renew();
  explained.clear();
  state.target = wish.target ?? null;
  at("wall").dataset.fresh = "false";
  notice("");
  settle("loading");
  arrange(state, easel);
  showInput();
  readLive();
  await attempt(async () => {
    const found = await ask(await wished(wish, signal), signal);
    state.input = await decode(found.whole.input);
    paint(at("input"), state.input);
    showReading(found.whole);
    showAnswer(found, wish.alpha);
    await showWall(signal);
  });
}

/** The target that was wished for, unless the picture is read as that already. */
async function wished({ target = null }, signal) {
  if (target === null || target >= state.model.classes.length) return null;
  const { predicted } = await api.predict(state.model.name, image(), true);
  signal.throwIfAborted();
  return predicted === target ? null : target;
}

async function chooseTarget(target) {
  if (!state.source) return undefined;
  if (!explained.size) return again({ target });
  if (target === state.predicted) return undefined;
  const signal = renew();
  state.target = target;
  notice("");
  panels.markTargets(at("targets"), state.model, state.predicted, target);
  panels.markGrid(at("grid"), target);
  if (!explained.has(target)) settle("loading");
  return attempt(async () => {
    showAnswer(await ask(target, signal));
    if (at("wall").dataset.fresh === "false") await showWall(signal);
  });
}

/** As sure as people want the counterfactual to be. */
function chooseConfidence(confidence) {
  state.confidence = confidence;
  return state.source ? again({ target: state.target }) : undefined;
}

/** The same picture from scratch; a test picture may not have arrived yet. */
function again(wish) {
  const { sample } = state.source;
  return sample === undefined ? explain(wish) : attempt(() => openSample(sample, wish));
}

function showAnswer({ answer, frames }, alpha = null) {
  const { model, predicted, confidence } = state;
  const { target, alpha_0: tipping, alpha_1: convincing } = answer;
  const obtained = answer.convincing_posterior[target];
  Object.assign(state, { target, answer, frames });
  const end = frames.at(-1).alpha;
  const marks = [tipping, convincing];
  settle("ready");
  const stops = stopsOf(answer, end, restName(confidence));
  slider.show({ frames, stops, names: model.classes, q: target });
  plot.show({ frames, end, p: predicted, q: target, names: model.classes, marks });
  panels.showQuestion(at("question"), model, predicted, target);
  panels.markTargets(at("targets"), model, predicted, target);
  panels.markGrid(at("grid"), target);
  const more = confidence === null ? [] : [obtainedWords(confidence, obtained, convincing)];
  panels.showWords(at("words"), [...more, ...answer.words]);
  if (alpha === null) slider.sweep(0, convincing, SWEEP);
  else slider.scrub(alpha);
}

/** Every other class; worth a wall only where there are several. */
async function showWall(signal) {
  const { model } = state;
  if (model.classes.length < 3) {
    at("wall").hidden = true;
    return;
  }
  const options = { targets: "all", ...sureness() };
  const { targets } = await api.explain(model.name, image(), options, signal);
  panels.showGrid(at("grid"), model, targets, chooseTarget);
  panels.markGrid(at("grid"), state.target);
  at("wall").dataset.fresh = "true";
  at("wall").hidden = false;
}

let writing;
function showFrame(step) {
  state.step = step;
  plot.moveTo(step);
  const { image: picture, posterior, alpha } = state.frames[step];
  const { model } = state;
  const most = winner(posterior);
  const words = `${model.classes[most]} · ${percent(posterior[most])}`;
  paint(at("answer"), picture);
  at("answer-words").textContent = words;
  at("answer").setAttribute("aria-label", `Counterfactual at α ${alpha.toFixed(2)}, read as ${words}`);
  showChange();
  clearTimeout(writing);
  writing = setTimeout(writeLink, 200);
}

function showChange() {
  const frame = state.frames[state.step];
  if (!frame) return;
  if (state.overlay) paintOverlay(at("change"), state.input, frame.heatmap);
  else paint(at("change"), frame.heatmap);
  const where = state.overlay ? ", over the input" : "";
  const words = `Heatmap at α ${frame.alpha.toFixed(2)}: red becomes lighter, blue darker${where}`;
  at("change").setAttribute("aria-label", words);
}

/* Taking it along */

function writeLink() {
  const alpha = state.frames[state.step]?.alpha ?? null;
  history.replaceState(null, "", link.write({ ...state, model: state.model.name, alpha }));
}

/* Beginning */

async function useModel(name, wish = null) {
  const model = state.models.find((each) => each.name === name) ?? state.models[0];
  renew();
  slider.forget();
  explained.clear();
  Object.assign(state, { model, source: null, target: null, answer: null, frames: [] });
  document.documentElement.dataset.kind = model.kind;
  easel.use(model);
  at("wall").hidden = true;
  panels.markModel(at("models"), model.name);
  panels.showBars(at("bars"), model);
  panels.showTargets(at("targets"), model, chooseTarget);
  await attempt(() => begin(model, wish ?? FIRST[model.kind] ?? {}));
}

function begin(model, wish) {
  if (wish.pixels && easel.drawable) return openPixels(wish.pixels, wish);
  if (!model.samples) return empty();
  const sample = wish.sample ?? FIRST[model.kind]?.sample ?? 0;
  return openSample(Math.min(sample, model.samples - 1), wish);
}

/** Shows what the address says; a bare address shows the first visit's picture. */
function follow() {
  const said = link.read(location.hash);
  state.confidence = said.confidence;
  panels.markSure(at("sure"), said.confidence);
  return useModel(said.model, said.model ? said : null);
}

listen({
  state,
  easel,
  slider,
  follow,
  chooseTarget,
  chooseConfidence,
  showChange,
  openSample: (index) => attempt(() => openSample(index)),
  openPicture: (blob) => attempt(() => openPicture(blob)),
  rest: shown,
  savePng: () => savePng(state, image()),
  saveGif: () => saveGif(state, image()),
  saveJson: () => saveJson(state, explained.get(state.target).whole),
  share() {
    writeLink();
    share(state.source);
  },
});

attempt(async () => {
  state.models = await api.models();
  panels.showModels(at("models"), state.models, (name) => useModel(name));
  await follow();
});
