/** The page: its state, and what happens when the picture or the target changes. */

import * as api from "./api.js";
import { listen } from "./controls.js";
import { saveGif, saveJson, savePng, share } from "./download.js";
import { Easel, greyImage } from "./easel.js";
import * as link from "./link.js";
import * as panels from "./panels.js";
import { png, readPicture, wholePng } from "./photo.js";
import { peek } from "./peek.js";
import { Plot } from "./plot.js";
import { decode, decodePath, paint, paintOverlay, paintPixels, wipe } from "./prints.js";
import { inBrowser } from "./service.js";
import { Slider, stopsOf } from "./slider.js";
import { rows } from "./strokes.js";
import { at, attempt, notice, say } from "./messages.js";
import { arrange, settle } from "./tools.js";
import {
  ALPHA_1,
  brokenWords,
  changeWords,
  emptyHeadline,
  leadWords,
  liveWords,
  named,
  obtainedWords,
  percent,
  plotKeyWords,
  readerWords,
  restName,
  short,
  tieName,
  trainingWords,
  winner,
} from "./words.js";

/** Frames of a path; faces take the network thirty times as long, browsers three times. */
const FRAMES = { digits: 41, dots: 41 };
const FRAMES_OF_OTHERS = 21;
/** The picture of a first visit: a three that becomes an eight. */
const FIRST = { digits: { sample: 90, target: 8 }, dots: { sample: 4 } };
const SWEEP = 1600;
/** States of the stage in which the picture is predicted, but not explained yet. */
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
  /** The requested confidence of the counterfactual, or "alpha_1"; null for the network's default.
   * @type {number | "alpha_1" | null} */
  confidence: null,
  answer: null,
  frames: [],
  /** Pictures of the path that the explained classifier was asked about. */
  asked: [],
  step: 0,
  overlay: false,
};
/** Explanations of the present picture, by target. */
const explained = new Map();

let requests = new AbortController();

/** Aborts all requests. */
function renew() {
  requests.abort();
  requests = new AbortController();
  return requests.signal;
}

const easel = new Easel(at("pad"), { changed: drawn, settled: shown });
const plot = new Plot(at("plot"), (alpha) => slider.scrub(alpha));
const slider = new Slider({ input: at("slider"), stops: at("stops"), play: at("play") }, showFrame);

/* The picture on the easel */

function image() {
  const { source } = state;
  return source?.pixels ? { pixels: rows(source.pixels) } : source;
}

/** The input of the network: a part of a photograph, or a drawing. */
function ownSource() {
  const { width, height } = state.model;
  return easel.photo ? { png: png(easel.photo.cutToSend(width, height)) } : { pixels: easel.pixels() };
}

const predictLive = api.latest(async () => {
  const { source, model } = state;
  try {
    const prediction = await api.predict(model, image());
    if (state.source !== source || !WAITING.has(at("stage").dataset.state)) return;
    showPrediction(prediction);
    at("question").textContent = liveWords(model, prediction.predicted);
  } catch (error) {
    if (![429, 503].includes(error.status)) notice(error.message);
  }
});

/** Shows the input of the network, before its prediction. */
function showInput() {
  if (easel.drawable) paintPixels(at("input"), greyImage(easel.pixels()));
  else paint(at("input"), easel.photo?.cut(state.model.width, state.model.height) ?? easel.bitmap);
}

/** The picture changes: predict now, explain later. Until the list of networks is there, wait. */
function drawn() {
  if (!state.model) return;
  renew();
  slider.stop();
  explained.clear();
  state.source = ownSource();
  state.label = null;
  peek(null);
  showInput();
  at("zoom").value = String(easel.photo?.zoom ?? 1);
  settle("stale");
  arrange(state, easel);
  predictLive();
}

/** The picture is finished: explain it. */
function shown() {
  if (!state.model) return undefined;
  if (easel.blank) return empty();
  state.source = ownSource();
  state.label = null;
  return explain();
}

function empty() {
  renew();
  Object.assign(state, { source: null, predicted: null, target: null, answer: null, frames: [] });
  slider.forget();
  peek(null);
  plot.show(null);
  for (const id of ["input", "answer", "change"]) wipe(at(id));
  panels.moveBars(at("bars"), null);
  panels.markTargets(at("targets"), state.model, null, null);
  at("verdict").textContent = "";
  for (const id of ["caution", "readers", "unexplained"]) at(id).hidden = true;
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

/** A file, dropped or pasted. The service frames digits; visitors frame faces, except CelebA's. */
async function openPicture(blob) {
  const bitmap = await readPicture(blob);
  if (easel.drawable) {
    settle("loading");
    const picture = { png: wholePng(bitmap) };
    const { input } = await api.explain(state.model, picture, { targets: null }, renew());
    easel.show(await decode(input));
  } else {
    easel.showPhoto(bitmap);
    at("zoom").value = String(easel.photo.zoom);
  }
  return shown();
}

/* Answers of the service */

function showPrediction({ predicted, posterior, student, typical, caution }) {
  const { model, label } = state;
  state.predicted = predicted;
  panels.moveBars(at("bars"), posterior);
  const text = `${named(model, predicted)}, ${percent(posterior[predicted])}`;
  const truth = label === null ? "" : label === model.classes[predicted] ? "" : ` (labelled ${label})`;
  at("verdict").textContent = text + truth;
  at("input-words").textContent = `${short(model, predicted)} · ${percent(posterior[predicted])}`;
  at("input").setAttribute("aria-label", `Input, classified as ${text}`);
  at("readers").hidden = !student;
  if (student) at("readers").textContent = readerWords(model, student);
  at("caution").hidden = typical !== false;
  at("caution").textContent = caution ?? "";
  say(`Classified as ${text}`);
}

/** The confidence of the counterfactual, by request or by default. */
function confidence() {
  return state.confidence ?? state.model.default_confidence;
}

/** A confidence shall hold for the stored picture. */
function confidenceOptions() {
  return { confidence: state.confidence, correct: confidence() !== ALPHA_1 };
}

/** Requests the path to a target, unless it is known already. */
async function ask(target, signal) {
  if (explained.has(target)) return explained.get(target);
  slider.forget();
  state.frames = [];
  const targets = target === null ? null : [target];
  const { model } = state;
  const options = { targets, ...confidenceOptions() };
  if (inBrowser || !easel.drawable) await preview(await api.explain(model, image(), options, signal), signal);
  const path = (!inBrowser && FRAMES[model.kind]) || FRAMES_OF_OTHERS;
  const whole = await api.explain(model, image(), { ...options, path }, signal);
  const [answer] = whole.targets;
  const explanation = { whole, answer, frames: await decodePath(answer.path) };
  signal.throwIfAborted();
  explained.set(answer.target, explanation);
  return explanation;
}

/** The end of the path, while the path itself is still computed. */
async function preview(whole, signal) {
  const [{ target, convincing, explained: isExplained, heatmap, fullColour, sentences }] = whole.targets;
  const pictures = await Promise.all([convincing.image, heatmap].map(decode));
  signal.throwIfAborted();
  showPrediction(whole);
  paint(at("answer"), pictures[0]);
  paint(at("change"), pictures[1]);
  showScale(fullColour);
  at("answer-words").textContent = "";
  panels.showQuestion(at("question"), state.model, whole.predicted, target);
  panels.markTargets(at("targets"), state.model, whole.predicted, target);
  showVerdict(isExplained, sentences);
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
  predictLive();
  await attempt(async () => {
    const explanation = await ask(await wished(wish, signal), signal);
    state.input = await decode(explanation.whole.input);
    paint(at("input"), state.input);
    showPrediction(explanation.whole);
    showAnswer(explanation, wish.alpha);
    await showWall(signal);
  });
}

/** The requested target, unless it is the predicted class. */
async function wished({ target = null }, signal) {
  if (target === null || target >= state.model.classes.length) return null;
  const { predicted } = await api.predict(state.model, image(), true);
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

function chooseConfidence(chosen) {
  state.confidence = chosen;
  return state.source ? again({ target: state.target }) : undefined;
}

/** Explains the same picture again; a test picture may not have arrived yet. */
function again(wish) {
  const { sample } = state.source;
  return sample === undefined ? explain(wish) : attempt(() => openSample(sample, wish));
}

/** The sentences about a counterfactual; what is not explained is said above the pictures.
 * @param {boolean | null} isExplained null if no other classifier was asked
 * @param {string[]} more sentences after the verdict
 */
function showVerdict(isExplained, sentences, more = []) {
  const [failure] = sentences;
  const [verdict, ...others] = isExplained === false ? sentences.slice(1) : sentences;
  at("unexplained").hidden = isExplained !== false;
  at("unexplained").textContent = isExplained === false ? failure : "";
  panels.showSentences(at("sentences"), [verdict, ...more, ...others]);
}

/** The pictures of the path that the explained classifier was asked about, with its answers. */
function askedOf({ whole, answer }) {
  if (!state.model.classifier) return [];
  return [
    { alpha: 0, posterior: whole.posterior },
    { alpha: answer.tippingAlpha, posterior: answer.tipping.posterior },
    { alpha: answer.alpha, posterior: answer.convincing.posterior },
  ];
}

/** The changes at both ends of the heatmap's colours. */
function showScale(fullColour) {
  at("scale-low").textContent = `−${changeWords(fullColour)}`;
  at("scale-high").textContent = `+${changeWords(fullColour)}`;
}

function showAnswer({ whole, answer, frames }, alpha = null) {
  const { model, predicted } = state;
  const { target, tippingAlpha, alpha: rest } = answer;
  const obtained = answer.convincing.posterior[target];
  const asked = askedOf({ whole, answer });
  Object.assign(state, { target, answer, frames, asked });
  const end = frames.at(-1).alpha;
  const marks = [tippingAlpha, rest];
  settle("ready");
  showScale(answer.fullColour);
  const stops = stopsOf(answer, end, tieName(answer), restName(confidence(), answer.explained));
  slider.show({ frames, stops, names: model.classes, q: target });
  plot.show({ frames, end, p: predicted, q: target, names: model.classes, marks, asked });
  panels.showQuestion(at("question"), model, predicted, target);
  panels.markTargets(at("targets"), model, predicted, target);
  panels.markGrid(at("grid"), target);
  const words = obtainedWords(state.confidence, confidence(), obtained, answer);
  showVerdict(answer.explained, answer.sentences, [words]);
  if (alpha === null) slider.sweep(0, rest, SWEEP);
  else slider.scrub(alpha);
}

/** Shows every other class, if there are several. */
async function showWall(signal) {
  const { model } = state;
  if (model.classes.length < 3) {
    at("wall").hidden = true;
    return;
  }
  const options = { targets: "all", ...confidenceOptions() };
  const { targets } = await api.explain(model, image(), options, signal);
  panels.showGrid(at("grid"), model, targets, chooseTarget);
  panels.markGrid(at("grid"), state.target);
  const [{ fullColour }] = targets;
  at("wall-scale").textContent = `Full colour: a change of ${changeWords(fullColour)}.`;
  at("wall").dataset.fresh = "true";
  at("wall").hidden = false;
}

let writing;
function showFrame(step) {
  state.step = step;
  plot.moveTo(step);
  const { image: picture, posterior, alpha } = state.frames[step];
  const { model } = state;
  const known = state.asked.find((each) => each.alpha === alpha)?.posterior;
  const shown = known ?? posterior;
  const most = winner(shown);
  const reader = model.classifier && !known ? "student: " : "";
  const words = `${reader}${short(model, most)} · ${percent(shown[most])}`;
  paint(at("answer"), picture);
  at("answer-words").textContent = words;
  peek(picture, `${at("input-words").textContent} → ${words}`);
  at("answer").setAttribute("aria-label", `Counterfactual at α ${alpha.toFixed(2)}, classified as ${words}`);
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
  const full = changeWords(state.answer.fullColour);
  const words = `Heatmap at α ${frame.alpha.toFixed(2)}: red becomes lighter, blue darker, by ${full} at full colour${where}`;
  at("change").setAttribute("aria-label", words);
}

/* The link */

function writeLink() {
  const alpha = state.frames[state.step]?.alpha ?? null;
  history.replaceState(null, "", link.write({ ...state, model: state.model.name, alpha }));
}

/* Start */

/** True if one picture can be the input of both networks. */
function sameInput(a, b) {
  return ["kind", "channels", "height", "width", "samples"].every((name) => a[name] === b[name]);
}

/** Another network of the same kind of pictures explains the picture that is there. */
async function useModel(name, wish = null) {
  const model = state.models.find((each) => each.name === name) ?? state.models[0];
  const kept = !wish && state.source && sameInput(state.model, model) ? state.source : null;
  const target = kept && String(state.model.classes) === String(model.classes) ? state.target : null;
  const first = !state.model && !wish?.model;
  renew();
  slider.forget();
  explained.clear();
  Object.assign(state, { model, source: kept, target: null, answer: null, frames: [] });
  document.documentElement.dataset.kind = model.kind;
  easel.model = model;
  // What was drawn before the networks were known stays.
  const begun = first && easel.drawable && !easel.untouched;
  if (!kept && !begun) easel.use(model);
  for (const id of ["wall", "readers", "unexplained"]) at(id).hidden = true;
  at("lead").textContent = leadWords(model);
  at("plot-key").hidden = !model.classifier;
  at("plot-key").textContent = plotKeyWords(model);
  panels.markModel(at("models"), model.name);
  panels.showBars(at("bars"), model);
  panels.showTargets(at("targets"), model, chooseTarget);
  panels.showConfidences(at("confidence"), model, state.confidence);
  at("training").textContent = trainingWords(model);
  if (kept) await again({ target });
  else if (begun) await shown();
  else await attempt(() => begin(model, wish?.model ? wish : (FIRST[model.kind] ?? {})));
}

function begin(model, wish) {
  if (wish.pixels && easel.drawable) return openPixels(wish.pixels, wish);
  if (!model.samples) return empty();
  const sample = wish.sample ?? FIRST[model.kind]?.sample ?? 0;
  return openSample(Math.min(sample, model.samples - 1), wish);
}

/** Shows the state in the address; without one, the picture of a first visit. */
async function follow() {
  const linked = link.read(location.hash);
  state.confidence = linked.confidence;
  if (!linked.model) return useModel(null, {});
  await useModel(linked.model, linked);
  const words = brokenWords(brokenParts(linked));
  if (words && at("notice").hidden) notice(words);
  return undefined;
}

/** The parts of a link that this page cannot show. */
function brokenParts({ broken, model: name, sample, target }) {
  const { model } = state;
  const parts = [...broken];
  if (model.name !== name) parts.push("its network is not served here");
  else if (sample !== null && sample >= model.samples) parts.push("it has no such test picture");
  if (target !== null && target >= model.classes.length) parts.push("its target is not a class");
  return parts;
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
