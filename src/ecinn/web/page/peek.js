/** On narrow screens: the answer at the lower edge, until the stage itself comes into view. */

import { at } from "./messages.js";
import { paint } from "./prints.js";

const narrow = matchMedia("(max-width: 58rem)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let answered = false;
let seen = true;

function arrange() {
  at("peek").hidden = seen || !answered || !narrow.matches;
}

/** @param {ImageBitmap | null} picture the counterfactual; null if there is none */
export function peek(picture, words = "") {
  answered = picture !== null;
  if (answered) {
    paint(at("peek-answer"), picture);
    at("peek-words").textContent = words;
  }
  arrange();
}

new IntersectionObserver(([{ isIntersecting }]) => {
  seen = isIntersecting;
  arrange();
}, { threshold: 0.6 }).observe(at("answer"));

narrow.addEventListener("change", arrange);
at("peek").addEventListener("click", (event) => {
  event.preventDefault();
  at("stage").focus({ preventScroll: true });
  at("stage").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth" });
});
