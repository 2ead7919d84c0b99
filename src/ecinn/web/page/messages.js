/** Messages: errors and what to do, text for screen readers, the token dialog. */

import { listeners } from "./service.js";

export const at = (id) => document.getElementById(id);

export function notice(words, retry = null) {
  at("notice").hidden = !words;
  at("notice-words").textContent = words;
  at("notice-retry").hidden = !retry;
  at("notice-retry").onclick = retry;
}

at("notice-close").onclick = () => notice("");

let speaking;

/** For screen readers, once nothing changes any more. */
export function say(words) {
  clearTimeout(speaking);
  speaking = setTimeout(() => (at("spoken").textContent = words), 500);
}

/** True if the same request may be answered later: the picture itself is not at fault. */
function mayPass({ status = 500 }) {
  return status >= 500 || status === 429;
}

/** Runs work that may fail; shows the failure, with a button to try again if that may help. */
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (at("stage").ariaBusy === "true") at("stage").dataset.state = "stale";
    at("stage").ariaBusy = "false";
    const again = () => {
      notice("");
      attempt(work);
    };
    notice(error.message, mayPass(error) ? again : null);
  }
}

listeners.busy = (seconds) => {
  const words = `The service is busy. Trying again in ${Math.ceil(seconds)} s …`;
  notice(seconds ? words : "");
};

/* Where the prediction will stand: nothing moves. */
listeners.loading = (words) => (at("verdict").textContent = words);

listeners.token = (again) =>
  new Promise((resolve) => {
    if (again) at("token-words").textContent = "That token was not accepted. Please try again.";
    const dialog = at("token-dialog");
    at("token").value = dialog.returnValue = "";
    const answer = () => resolve(dialog.returnValue === "ok" ? at("token").value : null);
    dialog.addEventListener("close", answer, { once: true });
    dialog.showModal();
  });
