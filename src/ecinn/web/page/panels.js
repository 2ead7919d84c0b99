/** The parts of the page that show classes: models, targets, bars, the grid, the sentences. */

import { ALPHA_1, brief, choiceWords, named, percent, question, short } from "./words.js";

/** Confidences that the page offers; links may contain others. */
const CONFIDENCES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99];
/** Bars are horizontal if a name is longer. */
const LONG_NAME = 2;

function make(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

export function showModels(fieldset, models, choose) {
  const options = models.map((model) => {
    const label = make("label", "model");
    const radio = make("input", "");
    Object.assign(radio, { type: "radio", name: "model", value: model.name });
    radio.addEventListener("change", () => choose(model.name));
    label.append(radio, make("span", "", model.title));
    return label;
  });
  fieldset.append(...options);
  // Networks beyond the right edge are hinted at.
  const hint = () => fieldset.toggleAttribute("data-more", fieldset.scrollWidth > fieldset.clientWidth);
  new ResizeObserver(hint).observe(fieldset);
}

export function markModel(fieldset, name) {
  for (const radio of fieldset.querySelectorAll("input")) {
    radio.checked = radio.value === name;
    const { offsetLeft, offsetWidth } = radio.parentElement;
    if (radio.checked) fieldset.scrollLeft = offsetLeft + (offsetWidth - fieldset.clientWidth) / 2;
  }
}

export function showBars(list, model) {
  list.dataset.lying = String(model.classes.some((name) => name.length > LONG_NAME));
  const bars = model.classes.map((name) => {
    const bar = make("li", "bar");
    const [track, short] = [make("span", "track"), make("span", "bar-short")];
    short.ariaHidden = "true";
    track.append(make("span", "fill"));
    bar.append(make("span", "bar-name", name), track, short, make("span", "bar-share"));
    return bar;
  });
  list.replaceChildren(...bars);
}

/** @param {number[] | null} posterior null without a picture */
export function moveBars(list, posterior) {
  const most = posterior ? Math.max(...posterior) : -1;
  [...list.children].forEach((bar, label) => {
    const share = posterior?.[label] ?? 0;
    bar.style.setProperty("--share", share.toFixed(4));
    bar.toggleAttribute("data-most", share === most);
    bar.children[2].textContent = posterior ? brief(share) : "";
    bar.lastElementChild.textContent = bar.title = posterior ? percent(share) : "";
  });
}

export function showTargets(group, model, choose) {
  const buttons = model.classes.map((name, label) => {
    const button = make("button", "target", name);
    button.type = "button";
    button.addEventListener("click", () => choose(label));
    return button;
  });
  group.replaceChildren(...buttons);
}

export function markTargets(group, model, p, q) {
  [...group.children].forEach((button, label) => {
    button.disabled = p === null || label === p;
    button.setAttribute("aria-pressed", String(label === q));
    button.setAttribute("aria-label", `Change to ${named(model, label)}`);
  });
}

/**
 * Offers the network's default, the paper's α₁ and other confidences.
 * @param {number | "alpha_1" | null} confidence null for the network's default
 */
export function showConfidences(select, { default_confidence: usual }, confidence) {
  const linked = typeof confidence === "number" ? [confidence] : [];
  const others = [...new Set([...CONFIDENCES, ...linked])].sort((a, b) => a - b);
  const choices = usual === ALPHA_1 ? others : [ALPHA_1, ...others];
  const first = usual === ALPHA_1 ? choiceWords(usual) : `${choiceWords(usual)} (the default)`;
  select.replaceChildren(new Option(first, ""), ...choices.map((each) => new Option(choiceWords(each), each)));
  select.value = confidence === usual ? "" : String(confidence ?? "");
}

export function showQuestion(heading, model, p, q) {
  const pieces = question(model, p, q).map((piece) =>
    typeof piece === "string" ? piece : make("em", piece.role, piece.text),
  );
  heading.replaceChildren(...pieces);
  document.title = `${heading.textContent} · ECINN`;
}

export function showSentences(list, sentences) {
  list.replaceChildren(...sentences.map((sentence) => make("li", "", sentence)));
}

/** The counterfactual and heatmap of every other class. */
export function showGrid(grid, model, targets, choose) {
  const cards = targets.map((each) => {
    const card = make("button", "card");
    card.type = "button";
    card.dataset.target = String(each.target);
    const share = each.convincing.posterior[each.target];
    for (const [url, kind] of [[each.convincing.image, "card-answer"], [each.heatmap, "card-change"]]) {
      const image = make("img", kind);
      Object.assign(image, { src: url, alt: "" });
      card.append(image);
    }
    const caption = make("span", "card-words");
    const failed = each.explained === false ? ", not explained" : "";
    const words = [short(model, each.target), `${percent(share)}${failed}`];
    caption.append(make("b", "", words[0]), " ", make("span", "", words[1]));
    card.append(caption);
    card.toggleAttribute("data-missed", !(each.explained ?? each.convincing.reached));
    card.setAttribute("aria-label", `Changed into ${named(model, each.target)}, ${words[1]}`);
    card.addEventListener("click", () => choose(each.target));
    return card;
  });
  grid.replaceChildren(...cards);
}

export function markGrid(grid, q) {
  for (const card of grid.children) {
    card.setAttribute("aria-pressed", String(Number(card.dataset.target) === q));
  }
}
