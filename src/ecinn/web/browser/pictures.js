/** Pictures in and out: files as grey values, values as PNG files, heatmaps in colour. */

import { readPicture } from "./photo.js";

const ADDED = [178, 24, 43];
const REMOVED = [33, 102, 172];
const PERCENTILE = 99.5;

/** A file as grey values on white, as Pillow converts colours. */
export async function greyOf(blob) {
  const bitmap = await readPicture(blob);
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const values = new Uint8Array(width * height);
  for (let pixel = 0; pixel < values.length; pixel += 1) {
    const [red, green, blue] = data.subarray(4 * pixel, 4 * pixel + 3);
    values[pixel] = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16;
  }
  return { width, height, values };
}

/** @param {(pixel: number) => number[]} colour red, green and blue */
export function pngOf(width, height, colour) {
  const canvas = new OffscreenCanvas(width, height);
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel += 1) {
    image.data.set([...colour(pixel), 255], 4 * pixel);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.convertToBlob({ type: "image/png" });
}

export function greyPng(width, height, values) {
  return pngOf(width, height, (pixel) => [values[pixel], values[pixel], values[pixel]]);
}

export async function dataUrl(png) {
  const bytes = new Uint8Array(await (await png).arrayBuffer());
  return `data:image/png;base64,${btoa(String.fromCharCode(...bytes))}`;
}

/** Red is lighter, blue is darker, white is no change. */
export function heatmapPng(width, height, heatmap, limit) {
  return pngOf(width, height, (pixel) => {
    const strength = Math.min(Math.abs(heatmap[pixel]) / limit, 1);
    const full = heatmap[pixel] > 0 ? ADDED : REMOVED;
    return full.map((colour) => Math.round(255 + strength * (colour - 255)));
  });
}

/** The value at this share of the sorted values, between two of them if need be. */
export function percentile(values, share) {
  const sorted = Float64Array.from(values).sort();
  const place = (share / 100) * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

/** The change drawn in full colour: a few extreme pixels do not count. */
export function robustLimit(heatmap) {
  const sizes = heatmap.map(Math.abs);
  return percentile(sizes, PERCENTILE) || Math.max(...sizes) || 1;
}
