/** Pictures to keep: the sheet of all targets, and the film of a path. */

import { explain } from "./answers.js";
import { gif } from "./gif.js";
import { decode } from "./prints.js";
import { ALPHA_1, percent, withArticle } from "./words.js";

const [INK, MUTED, PAPER] = ["#1c2026", "#626a74", "#fff"];
const TILE = 112;
const GAP = 16;
const FILM_FRAMES = 22;
const FILM_SIDE = 336;

const letters = (size) => `${size}px system-ui, sans-serif`;

function paper(width, height) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.fillStyle = PAPER;
  context.fillRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  return context;
}

function write(context, words, x, y, size, colour = INK, align = "left") {
  Object.assign(context, { fillStyle: colour, font: letters(size), textAlign: align });
  context.fillText(words, x, y);
}

function question({ kind }, p, q) {
  if (kind === "dots") return `Why is this labelled ${p} and not ${q}?`;
  return `Why is this ${withArticle(p)} and not ${withArticle(q)}?`;
}

/** The service corrects α wherever a confidence is requested, also by default. */
function ask(network, { image, confidence }, options, wanted) {
  const asked = confidence ?? network.about.default_confidence;
  const body = { images: [image], confidence, correct: asked !== ALPHA_1, ...options };
  return explain(network, body, wanted);
}

/** The input, and a column for every target: tipping point, counterfactual and heatmap. */
export async function sheet(network, body, wanted) {
  const { images: [found], requested } = await ask(network, body, { targets: body.targets }, wanted);
  const { targets } = found;
  const left = TILE + 2 * GAP + 96;
  const top = 72;
  const height = top + 3 * (TILE + GAP) + 24;
  const context = paper(Math.max(left + targets.length * (TILE + GAP), 560), height);
  const other = targets.length > 1 ? "something else" : targets[0].target;
  write(context, question(network.about, found.predicted, other), GAP, 32, 20);
  write(context, `ECINN · ${network.about.title} · ${requested}`, GAP, 54, 13, MUTED);
  context.drawImage(await decode(found.image), GAP, top, TILE, TILE);
  write(context, `${found.predicted}: ${percent(found.posterior[found.predicted])}`, GAP, top + TILE + 18, 13);
  const names = ["tipping point", "counterfactual", "change"];
  names.forEach((name, row) => {
    write(context, name, left - GAP, top + row * (TILE + GAP) + TILE / 2, 13, MUTED, "right");
  });
  for (const [column, each] of targets.entries()) {
    const x = left + column * (TILE + GAP);
    const urls = [each.tipping_point.image, each.convincing.image, each.heatmap.image];
    for (const [row, url] of urls.entries()) {
      context.drawImage(await decode(url), x, top + row * (TILE + GAP), TILE, TILE);
    }
    const share = percent(each.convincing.stored_posterior[each.target]);
    write(context, `${each.target}: ${share}`, x + TILE / 2, height - 14, 13, INK, "center");
  }
  return context.canvas.convertToBlob({ type: "image/png" });
}

/** The path, forwards and backwards, with the question above it. */
export async function film(network, body, wanted) {
  const options = { targets: [body.target], path: FILM_FRAMES };
  const { images: [{ predicted, targets: [found] }] } = await ask(network, body, options, wanted);
  const [width, height, top] = [FILM_SIDE + 2 * GAP, FILM_SIDE + 88, 48];
  const { alphas, images, posterior } = found.path;
  const end = alphas.indexOf(found.alpha);
  const frames = [];
  for (let step = 0; step <= end; step += 1) {
    const context = paper(width, height);
    write(context, question(network.about, predicted, found.target), GAP, 32, 20);
    context.drawImage(await decode(images[step]), GAP, top, FILM_SIDE, FILM_SIDE);
    const share = percent(posterior[found.target][step]);
    write(context, `${found.target}: ${share}`, GAP, height - 14, 15);
    write(context, "ECINN", width - GAP, height - 14, 15, MUTED, "right");
    const { data } = context.getImageData(0, 0, width, height);
    const values = new Uint8Array(width * height).map((_, pixel) => data[4 * pixel + 1]);
    frames.push({ values, seconds: step === 0 || step === end ? 0.9 : 0.1 });
  }
  return gif(width, height, [...frames, ...frames.slice(1, -1).reverse()]);
}
