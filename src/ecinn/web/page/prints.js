/** The pictures of the page: decoded once, painted at once. */

/** Smallest channel of full red and full blue in the service's heatmaps. */
const LEAST_OF_RED = 24;
const LEAST_OF_BLUE = 33;
/** Strength of the input's dark parts below a heatmap: pale, so that both colours show. */
const SHADE = 0.4;

/** A data URL as a bitmap, without fetching: a strict content policy allows that. */
export async function decode(url) {
  const bytes = Uint8Array.from(atob(url.split(",")[1]), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

/**
 * All frames of a path, ready to be painted.
 * @returns {Promise<{alpha: number, image: ImageBitmap, heatmap: ImageBitmap, posterior: number[]}[]>}
 */
export async function decodePath(path) {
  const images = await Promise.all(path.images.map(decode));
  const heatmaps = await Promise.all(path.heatmaps.map(decode));
  return path.alphas.map((alpha, step) => ({
    alpha,
    image: images[step],
    heatmap: heatmaps[step],
    posterior: path.posteriors[step],
  }));
}

function fit(canvas, bitmap) {
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) {
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
  }
  return canvas.getContext("2d", { willReadFrequently: true });
}

export function wipe(canvas) {
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
}

export function paint(canvas, bitmap) {
  fit(canvas, bitmap).drawImage(bitmap, 0, 0);
}

export function paintPixels(canvas, image) {
  fit(canvas, image).putImageData(image, 0, 0);
}

/** The heatmap over its input, which is grey and pale. */
export function paintOverlay(canvas, input, heatmap) {
  const context = fit(canvas, heatmap);
  const { width, height } = canvas;
  context.drawImage(input, 0, 0);
  const below = context.getImageData(0, 0, width, height).data;
  context.drawImage(heatmap, 0, 0);
  const above = context.getImageData(0, 0, width, height);
  for (let at = 0; at < below.length; at += 4) {
    const [red, green, blue] = above.data.subarray(at, at + 3);
    const least = red > blue ? LEAST_OF_RED : LEAST_OF_BLUE;
    const strength = (255 - Math.min(red, green, blue)) / (255 - least);
    const grey = 0.299 * below[at] + 0.587 * below[at + 1] + 0.114 * below[at + 2];
    const shade = SHADE * (255 - grey) * (1 - Math.min(strength, 1));
    for (let channel = 0; channel < 3; channel += 1) above.data[at + channel] -= shade;
  }
  context.putImageData(above, 0, 0);
}
