/** The test pictures of a model, all in one file. */

import { folderOf, load } from "./network.js";
import { greyOf } from "./pictures.js";

const files = new Map();

/** A test picture as 8-bit values; null if there is none. */
export async function sampleOf(about, index) {
  const { name, width, height, samples } = about;
  if (!(index < samples)) return null;
  if (!files.has(name)) files.set(name, load(new URL("samples.png", folderOf(about)), "blob").then(greyOf));
  const whole = await files.get(name).catch((error) => {
    files.delete(name);
    throw error;
  });
  const across = whole.width / width;
  const [left, top] = [width * (index % across), height * Math.floor(index / across)];
  return new Uint8Array(width * height).map((_, pixel) => {
    const [column, row] = [pixel % width, Math.floor(pixel / width)];
    return whole.values[(top + row) * whole.width + left + column];
  });
}
