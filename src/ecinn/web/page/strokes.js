/** Strokes of a pen as the pixels of a digit, framed as MNIST frames its own. */

export const SIDE = 28;
const BOX = 20;
/** Width of the pen in pixels of the digit: that of MNIST's strokes. */
export const PEN = 2.3;
const HALO = 1.1;
const FINE = 8;
/** Largest enlargement, so that a dot does not fill the box. */
const MOST_ENLARGED = 2.5;

/**
 * @typedef {{x: number, y: number}} Point in fractions of the canvas
 * @typedef {{scale: number, x: number, y: number}} Placement pixels of the digit per canvas, shift
 */

/** Traces a stroke through the midpoints of its points, so that corners are round. */
export function trace(context, points, place) {
  const at = points.map((point) => ({
    x: place.x + place.scale * point.x,
    y: place.y + place.scale * point.y,
  }));
  context.beginPath();
  context.moveTo(at[0].x, at[0].y);
  for (let i = 1; i < at.length - 1; i += 1) {
    const middle = { x: (at[i].x + at[i + 1].x) / 2, y: (at[i].y + at[i + 1].y) / 2 };
    context.quadraticCurveTo(at[i].x, at[i].y, middle.x, middle.y);
  }
  const last = at[at.length - 1];
  context.lineTo(last.x, last.y);
  context.stroke();
}

/** White with a soft edge: a faint wide line below a full narrow one. */
export function drawSoftly(context, strokes, place, width, halo) {
  context.lineCap = context.lineJoin = "round";
  for (const [wide, alpha] of [[width + halo, 0.35], [width, 1]]) {
    context.lineWidth = wide;
    context.strokeStyle = `rgb(255 255 255 / ${alpha})`;
    for (const stroke of strokes) trace(context, stroke, place);
  }
}

/** The strokes on black, each pixel the mean of 8×8 finer ones. */
function rasterise(strokes, place) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE * FINE;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(FINE, FINE);
  drawSoftly(context, strokes, place, PEN, HALO);
  const fine = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const sums = new Float32Array(SIDE * SIDE);
  for (let row = 0; row < canvas.height; row += 1) {
    for (let column = 0; column < canvas.width; column += 1) {
      const pixel = Math.floor(row / FINE) * SIDE + Math.floor(column / FINE);
      sums[pixel] += fine[4 * (row * canvas.width + column)];
    }
  }
  return Uint8Array.from(sums, (sum) => Math.round(sum / (FINE * FINE)));
}

/** Rows of values, as the service needs them. */
export function rows(pixels) {
  return Array.from({ length: SIDE }, (_, row) => [...pixels.subarray(row * SIDE, (row + 1) * SIDE)]);
}

function extent(strokes) {
  const points = strokes.flat();
  const xs = points.map((point) => point.x);
  const ys = points.map((point) => point.y);
  return { left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys) };
}

function centreOfMass(pixels) {
  let total = 0;
  let x = 0;
  let y = 0;
  pixels.forEach((value, pixel) => {
    total += value;
    x += value * (pixel % SIDE);
    y += value * Math.floor(pixel / SIDE);
  });
  return { x: x / total + 0.5, y: y / total + 0.5 };
}

/** Scaled into a box of 20 pixels, its centre of mass in the middle of 28. */
export function framed(strokes) {
  const box = extent(strokes);
  const largest = Math.max(box.right - box.left, box.bottom - box.top, 1e-6);
  const scale = Math.min((BOX - PEN - HALO) / largest, SIDE * MOST_ENLARGED);
  const place = {
    scale,
    x: SIDE / 2 - (scale * (box.left + box.right)) / 2,
    y: SIDE / 2 - (scale * (box.top + box.bottom)) / 2,
  };
  const mass = centreOfMass(rasterise(strokes, place));
  place.x += Math.round(SIDE / 2 - mass.x);
  place.y += Math.round(SIDE / 2 - mass.y);
  return rasterise(strokes, place);
}

/** Keeps strokes where they were drawn, over a picture that is framed already. */
export function inPlace(strokes, background) {
  const drawn = rasterise(strokes, { scale: SIDE, x: 0, y: 0 });
  return drawn.map((value, pixel) => Math.max(value, background[pixel]));
}
