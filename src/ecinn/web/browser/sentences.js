/** What the service says in words; tests compare both. */

import { named, percent } from "./words.js";

export function requestWords(confidence, byDefault) {
  if (confidence === "alpha_1") return "α₁ (the paper's)";
  return `${Number((100 * confidence).toPrecision(6))} % requested${byDefault ? " (this model's default)" : ""}`;
}

/** Warns of an out-of-distribution image. */
export function cautionOf({ out_of_distribution: { reasons } }, flagged) {
  if (!flagged.length) return null;
  const words = flagged.map((reason) => reasons[reason]).join(" and ");
  return `This image does not look like a training image: it is ${words}.`;
}

/** Describes one counterfactual, the most important first. */
export function sentencesOf(about, found, caution) {
  const { p, q, confidence, correct, reachable, asRequested, tipping, end, request } = found;
  const name = about.classes.map((_, label) => named(about, label));
  const winner = end.stored.indexOf(Math.max(...end.stored));
  const lines = [`The stored image is classified as ${name[winner]} (${percent(end.stored[winner])}).`];
  if (winner !== q) lines.push(`The target, ${name[q]}, was not reached.`);
  if (!reachable) lines.push(`The highest reachable confidence is ${percent(end.posterior[q])}.`);
  else if (confidence !== null && !asRequested) lines.push(`It misses the request: ${request}.`);
  const most = tipping.stored.indexOf(Math.max(...tipping.stored));
  const said = [...new Set([p, q, most])].map((label) => `${name[label]} with ${percent(tipping.stored[label])}`);
  const tie = correct ? "" : `; before rounding to 8 bits, ${name[p]} and ${name[q]} tie`;
  lines.push(`The stored tipping point is ${said.join(" and ")}${tie}.`);
  if (caution) lines.push(`Caution: ${caution[0].toLowerCase()}${caution.slice(1)}`);
  return lines;
}
