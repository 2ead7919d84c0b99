/** Telling people: what went wrong and what to do, what a screen reader says, the token. */

import { listeners } from "./api.js";

export const at = (id) => document.getElementById(id);

export function notice(words, retry = null) {
  at("notice").hidden = !words;
  at("notice-words").textContent = words;
  at("notice-retry").hidden = !retry;
  at("notice-retry").onclick = retry;
}

let speaking;

/** For screen readers, once things have come to rest. */
export function say(words) {
  clearTimeout(speaking);
  speaking = setTimeout(() => (at("spoken").textContent = words), 500);
}

/** Runs what may fail; a failure is told, with a way to try again. */
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (at("stage").ariaBusy === "true") at("stage").dataset.state = "stale";
    at("stage").ariaBusy = "false";
    notice(error.message, () => {
      notice("");
      attempt(work);
    });
  }
}

listeners.busy = (seconds) => {
  const words = `Many are asking just now. Trying again in ${Math.ceil(seconds)} s …`;
  notice(seconds ? words : "");
};

listeners.token = (again) =>
  new Promise((resolve) => {
    if (again) at("token-words").textContent = "That token was not accepted. Please try again.";
    const dialog = at("token-dialog");
    at("token").value = dialog.returnValue = "";
    const answer = () => resolve(dialog.returnValue === "ok" ? at("token").value : null);
    dialog.addEventListener("close", answer, { once: true });
    dialog.showModal();
  });
