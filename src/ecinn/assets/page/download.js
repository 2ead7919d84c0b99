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
  return attempt(async () => save(await api.sheet(state.model.name, image, targets), name));
}

/** The path as a film. */
export function saveGif(state, image) {
  const name = fileName(state, "gif");
  return attempt(async () => save(await api.film(state.model.name, image, state.target), name));
}

/** All numbers, and the pictures at the stops; those in between can be had again. */
export function saveJson(state, whole) {
  const { alphas, posteriors } = state.answer.path;
  const answer = { ...state.answer, path: { alphas, posteriors } };
  const { name: model, classes } = state.model;
  const kept = { model, classes, link: location.href, ...whole, targets: [answer] };
  const blob = new Blob([JSON.stringify(kept, null, 2)], { type: "application/json" });
  save(blob, fileName(state, "json"));
}

/** Puts the address on the clipboard; outside of HTTPS and localhost browsers do not let us. */
export async function share(isPhoto) {
  const copied = await navigator.clipboard?.writeText(location.href).then(
    () => true,
    () => false,
  );
  at("share").textContent = copied ? "Copied" : "See address bar";
  say(`${at("share").textContent}.${isPhoto ? " Your photo is not part of the link." : ""}`);
  setTimeout(() => (at("share").textContent = "Copy link"), 2000);
}
