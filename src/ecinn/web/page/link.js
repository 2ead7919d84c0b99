/** The state of the page as the part of its address after #, and back. */

import { SIDE } from "./strokes.js";
import { ALPHA_1 } from "./words.js";

function toText(pixels) {
  const letters = String.fromCharCode(...pixels);
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function toPixels(text) {
  const letters = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const pixels = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return pixels.length === SIDE * SIDE ? pixels : null;
}

/** Photographs are private and not part of links. */
export function write({ model, source, target, confidence, alpha }) {
  const parts = new URLSearchParams({ model });
  if (source?.sample !== undefined) parts.set("sample", String(source.sample));
  if (source?.pixels) parts.set("pixels", toText(source.pixels));
  if (target !== null) parts.set("target", String(target));
  if (confidence !== null) parts.set("confidence", String(confidence));
  if (alpha !== null) parts.set("alpha", alpha.toFixed(4));
  return `#${parts}`;
}

function whole(text) {
  return /^\d{1,6}$/.test(text ?? "") ? Number(text) : null;
}

/** A whole percentage that the page offers, or the paper's α₁; null for the network's default. */
export function sure(text) {
  if (text === ALPHA_1) return text;
  return /^0\.([5-9]|[5-9]\d)$/.test(text ?? "") ? Number(text) : null;
}

const WRONG = {
  sample: "the number of its test picture cannot be read",
  pixels: "its picture cannot be read",
  target: "its target cannot be read",
  confidence: "its confidence cannot be read",
  alpha: "its place on the slider cannot be read",
};

/** The state in a link; null for values that are missing or wrong, which `broken` names. */
export function read(hash) {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  let pixels = null;
  try {
    pixels = parts.has("pixels") ? toPixels(parts.get("pixels")) : null;
  } catch {
    pixels = null;
  }
  const alpha = Number.parseFloat(parts.get("alpha"));
  const state = {
    model: parts.get("model"),
    sample: whole(parts.get("sample")),
    pixels,
    target: whole(parts.get("target")),
    confidence: sure(parts.get("confidence")),
    alpha: Number.isFinite(alpha) ? alpha : null,
  };
  const broken = Object.keys(WRONG).filter((name) => parts.has(name) && state[name] === null);
  return { ...state, broken: broken.map((name) => WRONG[name]) };
}
