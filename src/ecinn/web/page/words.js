/** The words of the page. */

/** The name of the paper's α₁ among confidences. */
export const ALPHA_1 = "alpha_1";

/** A probability; never 100 % for what is not certain. */
export function percent(share) {
  if (share > 0.9995) return "> 99.9 %";
  if (share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

/** The same in whole percent, where there is little room; nothing below one. */
export function brief(share) {
  if (share < 0.01) return "";
  return share > 0.99 ? "> 99 %" : `${Math.round(100 * share)} %`;
}

function article(name) {
  return /^(8|11|18)/.test(name) ? "an" : "a";
}

/** The class in a sentence: an 8, label 4, smiling. */
export function named(model, label) {
  const name = model.classes[label];
  if (model.kind === "digits") return `${article(name)} ${name}`;
  return model.kind === "dots" ? `label ${name}` : name;
}

/** The headline, in pieces: words, or a class to be set in its colour. */
export function question(model, p, q) {
  const from = { text: model.classes[p], role: "from" };
  const to = { text: model.classes[q], role: "to" };
  if (model.kind === "digits") {
    const articles = [article(from.text), article(to.text)];
    return [`Why is this ${articles[0]} `, from, ` and not ${articles[1]} `, to, "?"];
  }
  if (model.kind === "dots") return ["Why is this labelled ", from, " and not ", to, "?"];
  return ["Classified as ", from, ". What would make it ", to, "?"];
}

/** Index of the largest. */
export function winner(posterior) {
  return posterior.indexOf(Math.max(...posterior));
}

export function whole(confidence) {
  return `${Math.round(100 * confidence)} %`;
}

/** A choice of confidence. */
export function choiceWords(confidence) {
  return confidence === ALPHA_1 ? "α₁ (the paper's)" : whole(confidence);
}

/** The name of the slider's stop at the counterfactual. */
export function restName(confidence, explained) {
  if (explained === false) return "best found";
  return confidence === ALPHA_1 ? "convincing" : whole(confidence);
}

/** The name of its stop at the tipping point, which an explained classifier may not have. */
export function tieName({ explained, tied }) {
  return explained !== null && !tied ? "nearest to a tie" : "tipping point";
}

/** What was requested and obtained; the service adds a sentence if it is the highest reachable. */
export function obtainedWords(requested, confidence, obtained, { alpha, paperAlpha }) {
  if (confidence === ALPHA_1) {
    if (alpha === paperAlpha) return `It lies at the paper's α₁ = ${alpha.toFixed(2)}.`;
    return `It lies at α = ${alpha.toFixed(2)}; the paper's α₁ is ${paperAlpha.toFixed(2)}.`;
  }
  const where = `${percent(obtained)}, at α = ${alpha.toFixed(2)}`;
  if (requested === null) return `This network's default of ${whole(confidence)} gives ${where}.`;
  return `You requested ${whole(confidence)} and got ${where}.`;
}

/** What the page is about. */
export function leadWords({ classifier }) {
  const first = classifier
    ? `${classifier} is explained by its student, a network that`
    : "This network";
  const last = classifier ? ` ${classifier} itself reads the tipping point and the counterfactual.` : "";
  return (
    `${first} runs in both directions: it turns a picture into numbers that determine its class, ` +
    "and such numbers back into a picture. So we can move the numbers towards another class and " +
    `see the picture that belongs to them.${last}`
  );
}

/** Who reads the picture. */
export function readerWords(model, student) {
  const most = winner(student);
  return `Read by ${model.classifier}. Its student reads ${named(model, most)}, ${percent(student[most])}.`;
}

/** Who reads the pictures of the path. */
export function plotKeyWords({ classifier }) {
  return classifier ? `Lines: read by the student. Rings: read by ${classifier}.` : "";
}

/** The function of the arrow keys on the easel, if any. */
export function arrowKeys(easel, model) {
  if (easel.photo) return "the arrow keys move the photograph";
  return model.kind === "dots" ? "the arrow keys move the dot" : null;
}

export function hint(easel, model) {
  if (model.kind === "dots") return "The dot at the left edge is the label. Tap the edge, or press ↑ and ↓ here, to move it. You can also draw.";
  if (model.kind === "digits") return "Draw a digit, drop a picture, or choose a test picture.";
  if (easel.photo && model.kind === "faces") return "Drag (or press the arrow keys here) and zoom until the face fills the oval, eyes on the line.";
  if (easel.photo) return "Drag (or press the arrow keys here) and zoom to choose the part that is classified.";
  return "Drop, paste or open a photo. It is sent to this service only.";
}

export function emptyHeadline(model) {
  if (model.kind === "faces") return "Add a face.";
  return model.kind === "images" ? "Add a picture." : "Draw a digit.";
}

export function emptyWords(model) {
  if (model.kind === "digits") return "Draw a digit here";
  if (model.kind === "dots") return "Tap the left edge for a dot, and draw a digit";
  const what = model.kind === "faces" ? "portrait photo" : "picture";
  if (model.samples) return `Drop a ${what} here, or choose a test picture`;
  return `This network has no test pictures here. Drop a ${what}, or open one.`;
}
