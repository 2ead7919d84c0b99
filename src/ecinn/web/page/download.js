/** What people take with them: files, and the link. */

import * as api from "./api.js";
import { at, attempt, say } from "./telling.js";

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function fileName({ model, predicted, target }, kind) {
  const [from, to] = [predicted, target].map((label) => model.classes[label].replaceAll(/\W+/g, "-"));
  return `ecinn-${model.name}-${from}-to-${to}.${kind}`;
}

/** The sheet of all targets. */
export function savePng(state, image) {
  const name = fileName(state, "png");
  const targets = state.model.classes.length > 2 ? "all" : [state.target];
  return attempt(async () => save(await api.sheet(state.model.name, image, targets, state.confidence), name));
}

/** The path as a film. */
export function saveGif(state, image) {
  const name = fileName(state, "gif");
  return attempt(async () => save(await api.film(state.model.name, image, state.target, state.confidence), name));
}

/** All numbers, and the pictures at the stops; those in between can be had again. */
export function saveJson(state, whole) {
  const { alphas, posteriors } = state.answer.path;
  const answer = { ...state.answer, path: { alphas, posteriors } };
  const { name: model, classes } = state.model;
  const { confidence } = state;
  const kept = { model, classes, confidence, link: location.href, ...whole, targets: [answer] };
  const blob = new Blob([JSON.stringify(kept, null, 2)], { type: "application/json" });
  save(blob, fileName(state, "json"));
}

/** What people should know of a link before they send it. */
function contents({ png, pixels }) {
  if (png) return "Your photo is not part of the link.";
  return pixels ? "The link holds the 28×28 picture that was read." : "";
}

let noted;

/** Puts the address on the clipboard; outside of HTTPS and localhost browsers do not let us. */
export async function share(source) {
  const copied = await navigator.clipboard?.writeText(location.href).then(
    () => true,
    () => false,
  );
  at("share").textContent = copied ? "Copied" : "See address bar";
  at("share-note").textContent = contents(source);
  at("share-note").hidden = !contents(source);
  say(`${at("share").textContent}. ${contents(source)}`);
  clearTimeout(noted);
  noted = setTimeout(() => {
    at("share").textContent = "Copy link";
    at("share-note").hidden = true;
  }, 4000);
}
