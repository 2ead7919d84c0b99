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
  return /^8|^1[18]$/.test(name) ? "an" : "a";
}

/** A digit with its article, and other names as they are. */
export function withArticle(name) {
  return /^\d+$/.test(name) ? `${article(name)} ${name}` : name;
}

/** The class in a sentence: an 8, label 4, smiling. */
export function named(model, label) {
  const name = model.classes[label];
  if (model.kind === "digits") return withArticle(name);
  return model.kind === "dots" ? `label ${name}` : name;
}

/** The class below a picture, where there is little room: 8, label 4, smiling. */
export function short(model, label) {
  return model.kind === "dots" ? named(model, label) : model.classes[label];
}

/** The headline while a picture is drawn. */
export function liveWords(model, label) {
  if (model.kind === "digits") return `This looks like ${named(model, label)}.`;
  return model.kind === "dots" ? `This has ${named(model, label)}.` : `Classified as ${named(model, label)}.`;
}

/** A change of brightness, with two digits. */
export function changeWords(limit) {
  const value = 100 * limit;
  return `${value >= 10 ? Math.round(value) : value.toPrecision(2)} %`;
}

/** How the network was trained. */
export function trainingWords({ fine_tuned: fineTuned }) {
  return fineTuned
    ? "This network was fine-tuned: trained further so that other networks, too, see the target in its pictures."
    : "This network is plain: trained with the paper's loss, not fine-tuned.";
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
  return confidence === ALPHA_1 ? "as in the paper" : whole(confidence);
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
  const way = `${alpha.toFixed(2)} times the distance between the two class means`;
  if (confidence === ALPHA_1) {
    if (alpha === paperAlpha) return `The numbers moved by ${way}, as in the paper.`;
    return `The numbers moved by ${way}; in the paper, by ${paperAlpha.toFixed(2)} times.`;
  }
  const where = `${percent(obtained)}; the numbers moved by ${way}`;
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
  const photo = "Drop, paste or open a photo. It is sent to this service only.";
  if (!model.generated) return photo;
  return `This face was generated by a network: there are no photographs here. ${photo}`;
}

export function sampleWords({ generated }) {
  return generated ? "generated face" : "test picture";
}

/** What a link asked for and the page cannot show. */
export function brokenWords(parts) {
  return parts.length ? `This link is damaged: ${parts.join(", ")}. Something else is shown.` : "";
}

export function emptyHeadline(model) {
  if (model.kind === "faces") return "Add a face.";
  return model.kind === "images" ? "Add a picture." : "Draw a digit.";
}

export function emptyWords(model) {
  if (model.kind === "digits") return "Draw a digit here";
  if (model.kind === "dots") return "Tap the left edge for a dot, and draw a digit";
  const what = model.kind === "faces" ? "portrait photo" : "picture";
  if (model.samples) return `Drop a ${what} here, or choose a ${sampleWords(model)}`;
  return `This network has no test pictures here. Drop a ${what}, or open one.`;
}
