/** Shows the tools that apply now, with their names. */

import { at } from "./messages.js";
import { arrowKeys, emptyWords, hint, sampleWords } from "./words.js";

/** Tools of the easel.
 * @param {{model: object, source: object | null}} state
 */
export function arrange({ model, source }, easel) {
  const test = source?.sample;
  at("board").dataset.kind = easel.photo ? "photo" : model.kind;
  const sample = sampleWords(model);
  const name = `${sample[0].toUpperCase()}${sample.slice(1)}`;
  at("index-words").textContent = name;
  nameSurface(at("pad"), test === undefined ? "Your picture" : `${name} ${test}`, arrowKeys(easel, model));
  at("empty").hidden = !easel.blank;
  at("empty").textContent = emptyWords(model);
  at("hint").textContent = hint(easel, model);
  at("undo").hidden = !easel.drawable;
  at("undo").disabled = easel.untouched;
  at("keep").hidden = model.kind !== "digits";
  at("zoom-row").hidden = !easel.photo;
  at("samples").hidden = !model.samples;
  at("index").max = String(model.samples - 1);
  if (test !== undefined) at("index").value = String(test);
}

/** Names the surface; it takes the focus only if keys do something. */
function nameSurface(pad, name, keys) {
  pad.setAttribute("role", keys ? "application" : "img");
  pad.setAttribute("aria-label", keys ? `${name}: ${keys}` : name);
  if (keys) pad.tabIndex = 0;
  else pad.removeAttribute("tabindex");
}

/** Tools of the stage.
 * @param {"empty" | "stale" | "loading" | "nearly" | "ready"} name
 */
export function settle(name) {
  at("stage").dataset.state = name;
  at("stage").ariaBusy = String(name === "loading" || name === "nearly");
  if (name === "empty") at("wall").hidden = true;
  for (const id of ["slider", "play", "overlay"]) at(id).disabled = name === "empty";
  for (const id of ["save-png", "save-gif", "save-json", "share"]) at(id).disabled = name !== "ready";
}
