/** Controls: buttons, files, keys, colours. */

import { read, sure } from "./link.js";
import { at } from "./messages.js";

const IN_A_FIELD = 'select, input:not([type="range"], [type="radio"], [type="checkbox"]), dialog *';
const TAKES_SPACE = "button, summary, input, a";

/** @param {object} page the actions of page.js */
export function listen(page) {
  listenToTools(page);
  listenToFiles(page);
  listenToKeys(page);
  listenToColours(at("theme"));
  listenToAddress(page);
}

/** Follows links to states of the page; the skip link leaves the address as it is. */
function listenToAddress({ follow }) {
  addEventListener("hashchange", () => {
    if (read(location.hash).model) follow();
  });
  at("skip").addEventListener("click", (event) => {
    event.preventDefault();
    (at("slider").disabled ? at("stage") : at("slider")).focus();
  });
}

function listenToTools({ state, easel, ...page }) {
  const click = (id, work) => at(id).addEventListener("click", work);
  click("clear", () => {
    easel.clear();
    page.rest();
  });
  click("undo", () => {
    easel.undo();
    page.rest();
  });
  click("keep", () => {
    easel.keep = !easel.keep;
    at("keep").setAttribute("aria-pressed", String(easel.keep));
  });
  click("overlay", () => {
    state.overlay = !state.overlay;
    at("overlay").setAttribute("aria-pressed", String(state.overlay));
    page.showChange();
  });
  click("previous", () => step(-1));
  click("next", () => step(1));
  click("random", () => page.openSample(Math.floor(Math.random() * state.model.samples)));
  click("save-png", page.savePng);
  click("save-gif", page.saveGif);
  click("save-json", page.saveJson);
  click("share", page.share);
  at("zoom").addEventListener("input", () => easel.enlarge(Number(at("zoom").value)));
  at("confidence").addEventListener("change", () => page.chooseConfidence(sure(at("confidence").value)));
  at("index").addEventListener("change", () => step(0));

  /** Opens another test picture, wrapping around. */
  function step(by) {
    const { samples } = state.model;
    const index = Math.trunc(Number(at("index").value)) + by;
    page.openSample(((index % samples) + samples) % samples);
  }
}

function listenToFiles({ openPicture }) {
  const take = (files) => {
    const picture = [...files].find((file) => file.type.startsWith("image/")) ?? files[0];
    if (picture) openPicture(picture);
  };
  at("choose").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", () => {
    take(at("file").files);
    at("file").value = "";
  });
  addEventListener("paste", (event) => take(event.clipboardData.files));
  addEventListener("dragover", (event) => {
    event.preventDefault();
    at("board").toggleAttribute("data-over", true);
  });
  addEventListener("dragleave", () => at("board").toggleAttribute("data-over", false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    at("board").toggleAttribute("data-over", false);
    take(event.dataTransfer.files);
  });
}

function listenToKeys({ state, chooseTarget }) {
  const press = (id) => () => !at(id).disabled && !at(id).closest("[hidden]") && at(id).click();
  const keys = {
    n: press("next"),
    p: press("previous"),
    r: press("random"),
    o: press("overlay"),
    c: press("clear"),
    u: press("undo"),
    " ": press("play"),
  };
  addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key === "z") return press("undo")();
    if (!at("shortcuts").checked || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    if (event.target.matches(IN_A_FIELD)) return undefined;
    if (event.key === " " && event.target.matches(TAKES_SPACE)) return undefined;
    if (/^\d$/.test(event.key) && Number(event.key) < (state.model?.classes.length ?? 0)) {
      return chooseTarget(Number(event.key));
    }
    const work = keys[event.key.toLowerCase()];
    if (!work) return undefined;
    event.preventDefault();
    return work();
  });
}

/** Uses the colours of the system until the button is pressed. */
function listenToColours(button) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  button.addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
}
