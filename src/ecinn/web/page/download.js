/** Downloads and the link. */

import * as api from "./api.js";
import { at, attempt, say } from "./messages.js";

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
  return attempt(async () => save(await api.sheet(state.model, image, targets, state.confidence), name));
}

/** The path as a film. */
export function saveGif(state, image) {
  const name = fileName(state, "gif");
  return attempt(async () => save(await api.film(state.model, image, state.target, state.confidence), name));
}

/** The service's answer without the pictures of the path, and the link that shows it. */
export function saveJson(state, { answer }) {
  const withoutPictures = ({ path: { alphas, posterior }, ...target }) => ({ ...target, path: { alphas, posterior } });
  const images = answer.images.map((image) => ({ ...image, targets: image.targets.map(withoutPictures) }));
  const text = JSON.stringify({ ...answer, images, link: location.href }, null, 2);
  save(new Blob([text], { type: "application/json" }), fileName(state, "json"));
}

/** What the link contains, to know before sending it. */
function contents({ png, pixels }) {
  if (png) return "Your photo is not part of the link.";
  return pixels ? "The link contains the 28×28 picture." : "";
}

let noted;

/** Copies the address; browsers allow it only on HTTPS and localhost. */
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
