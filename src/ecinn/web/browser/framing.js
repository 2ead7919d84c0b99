/** A photographed digit as MNIST frames its own: photographs.py for grey values. */

import { percentile } from "./pictures.js";

const BOX = 20;
const LOBES = 3;

/** The median: between the two values in the middle if their number is even. */
const median = (values) => percentile(values, 50);

/** Rounds halves to even numbers, as Python does. */
function rounded(value) {
  const below = Math.floor(value);
  if (value - below !== 0.5) return Math.round(value);
  return below % 2 ? below + 1 : below;
}

function border({ width, height, values }) {
  const rows = [...values.subarray(0, width), ...values.subarray((height - 1) * width)];
  for (let row = 0; row < height; row += 1) rows.push(values[row * width], values[(row + 1) * width - 1]);
  return rows;
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

/** Weights of Pillow's Lanczos filter for every place of the smaller or larger side. */
function lanczos(before, after) {
  const scale = before / after;
  const wide = Math.max(scale, 1);
  return Array.from({ length: after }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - LOBES * wide + 0.5), 0);
    const last = Math.min(Math.trunc(centre + LOBES * wide + 0.5), before);
    const weights = Array.from({ length: last - first }, (__, at) => {
      const x = (first + at - centre + 0.5) / wide;
      return Math.abs(x) < LOBES ? sinc(x) * sinc(x / LOBES) : 0;
    });
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    return { first, weights: weights.map((weight) => weight / total) };
  });
}

const clip = (value) => Math.min(Math.max(Math.floor(value + 0.5), 0), 255);

function resized({ width, height, values }, toWidth, toHeight) {
  const narrow = new Uint8Array(toWidth * height);
  lanczos(width, toWidth).forEach(({ first, weights }, column) => {
    for (let row = 0; row < height; row += 1) {
      const sum = weights.reduce((total, weight, at) => total + weight * values[row * width + first + at], 0);
      narrow[row * toWidth + column] = clip(sum);
    }
  });
  const small = new Uint8Array(toWidth * toHeight);
  lanczos(height, toHeight).forEach(({ first, weights }, row) => {
    for (let column = 0; column < toWidth; column += 1) {
      const sum = weights.reduce((total, weight, at) => total + weight * narrow[(first + at) * toWidth + column], 0);
      small[row * toWidth + column] = clip(sum);
    }
  });
  return { width: toWidth, height: toHeight, values: small };
}

/** Cut to the ink, which is then white; null if there is none. */
function inkOf({ width, height, values }) {
  const middle = median(values);
  const above = Float64Array.from(values, (value) => Math.max(value - middle, 0));
  const peak = percentile(above, 99.9) || above.reduce((most, value) => Math.max(most, value), 0) || 1;
  const ink = above.map((value) => Math.min(value / peak, 1)).map((value) => (value < 1 / 3 ? 0 : value));
  let [left, right, top, bottom] = [width, -1, height, -1];
  ink.forEach((value, pixel) => {
    if (!value) return;
    const [column, row] = [pixel % width, Math.floor(pixel / width)];
    [left, right] = [Math.min(left, column), Math.max(right, column)];
    [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
  });
  if (right < 0) return null;
  const size = { width: right - left + 1, height: bottom - top + 1 };
  const cut = new Uint8Array(size.width * size.height).map((_, pixel) => {
    const [column, row] = [pixel % size.width, Math.floor(pixel / size.width)];
    return rounded(255 * ink[(top + row) * width + left + column]);
  });
  return { ...size, values: cut };
}

/** Makes the digit light on black; cuts it out and centres it unless the size is right. */
export function frameDigit(picture, side) {
  const dark = median(border(picture)) <= 127;
  const values = dark ? picture.values : picture.values.map((value) => 255 - value);
  if (picture.width === side && picture.height === side) return values;
  const framed = new Uint8Array(side * side);
  const ink = inkOf({ ...picture, values });
  if (!ink) return framed;
  const factor = (BOX * side) / 28 / Math.max(ink.width, ink.height);
  const [width, height] = [ink.width, ink.height].map((length) => Math.max(1, rounded(length * factor)));
  const small = resized(ink, width, height);
  let [total, x, y] = [0, 0, 0];
  small.values.forEach((value, pixel) => {
    total += value;
    x += value * (pixel % width);
    y += value * Math.floor(pixel / width);
  });
  const start = (length, mass) => Math.min(Math.max(rounded((side - 1) / 2 - mass / (total || 1)), 0), side - length);
  const [left, top] = [start(width, x), start(height, y)];
  small.values.forEach((value, pixel) => {
    framed[(top + Math.floor(pixel / width)) * side + left + (pixel % width)] = value;
  });
  return framed;
}
