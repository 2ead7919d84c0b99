/** The drawing surface: pen, dots, test pictures and photographs. */

import { Photo } from "./photo.js";
import { PEN, SIDE, drawSoftly, framed, inPlace } from "./strokes.js";

/** Position of a face in the training pictures, in fractions of the side. */
const FACE = { x: 0.5, y: 0.59, width: 0.31, height: 0.4, eyes: 0.51 };

export class Easel {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{changed: () => void, settled: () => void}} listener called while a stroke is drawn
   *   and when it ends
   */
  constructor(canvas, listener) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.listener = listener;
    this.keep = false;
    this.dotting = false;
    this.frame = null;
    this.pointers = new Map();
    this.use({ kind: "digits" });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => this.up(event));
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /** Empties the easel for a model. */
  use(model) {
    this.model = model;
    this.clear();
  }

  get drawable() {
    return this.model.kind === "digits" || this.model.kind === "dots";
  }

  get blank() {
    return this.untouched && !this.bitmap && !this.photo;
  }

  /** True if nothing was drawn on the test picture. */
  get untouched() {
    return !this.strokes.length && this.dot === null;
  }

  clear() {
    this.strokes = [];
    this.background = null;
    this.bitmap = null;
    this.photo = null;
    this.dot = null;
    this.paint();
  }

  /** Shows a picture of the network's own size; grey ones can be drawn on. */
  show(bitmap) {
    this.clear();
    this.bitmap = bitmap;
    this.background = this.drawable ? greyPixels(bitmap) : null;
    this.paint();
  }

  /** @param {Uint8Array} pixels a digit at the size of the network, for instance from a link */
  async showPixels(pixels) {
    this.show(await createImageBitmap(greyImage(pixels)));
  }

  /** @param {ImageBitmap} bitmap a photograph of any size */
  showPhoto(bitmap) {
    this.clear();
    this.photo = new Photo(bitmap, this.model.kind === "faces");
    this.paint();
  }

  undo() {
    if (this.dot !== null && !this.strokes.length) this.dot = null;
    this.strokes.pop();
    this.paint();
  }

  /** A drawing as the input of the network: 28×28 grey values. */
  pixels() {
    let pixels = this.background ?? new Uint8Array(SIDE * SIDE);
    if (this.strokes.length) {
      pixels = this.background ? inPlace(this.strokes, this.background) : framed(this.strokes);
    }
    return this.dot === null ? pixels : withDot(pixels, this.dot);
  }

  enlarge(zoom) {
    this.photo?.enlarge(zoom);
    this.changed();
    this.rested();
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
  }

  down(event) {
    if (event.button > 0 || (!this.drawable && !this.photo)) return;
    this.canvas.setPointerCapture(event.pointerId);
    const point = this.place(event);
    this.pointers.set(event.pointerId, point);
    if (!this.photo) this.begin(point);
  }

  begin(point) {
    if (this.model.kind === "dots" && point.x < 1 / SIDE) {
      this.dot = Math.min(SIDE - 1, Math.max(0, Math.floor(point.y * SIDE)));
      this.dotting = true;
    } else {
      if (this.background && !this.keep && this.model.kind === "digits") this.clear();
      this.strokes.push([point, { ...point }]);
    }
    this.changed();
  }

  moved(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const point = this.place(event);
    this.pointers.set(event.pointerId, point);
    if (this.photo) {
      this.movePhoto(event.pointerId, before, point);
    } else if (this.dotting) {
      this.dot = Math.min(SIDE - 1, Math.max(0, Math.floor(point.y * SIDE)));
    } else {
      const passed = event.getCoalescedEvents?.() ?? [];
      const points = passed.length ? passed.map((each) => this.place(each)) : [point];
      this.strokes.at(-1).push(...points);
    }
    this.changed();
  }

  /** One finger moves the photograph; two enlarge it. */
  movePhoto(id, before, point) {
    const other = [...this.pointers].find(([each]) => each !== id)?.[1];
    if (other) {
      const distance = (a, b) => Math.hypot(a.x - b.x, a.y - b.y) || 1e-3;
      this.photo.enlarge((this.photo.zoom * distance(point, other)) / distance(before, other));
    } else {
      this.photo.move(point.x - before.x, point.y - before.y);
    }
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId) || this.pointers.size) return;
    this.dotting = false;
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.paint();
    this.listener.settled();
  }

  wheel(event) {
    if (!this.photo) return;
    event.preventDefault();
    this.photo.enlarge(this.photo.zoom * Math.exp(-event.deltaY / 500));
    this.changed();
    this.rested();
  }

  /** Arrow keys move the dot, or the photograph. */
  key(event) {
    const steps = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
    const step = steps[event.key];
    if (!step || (!this.photo && this.model.kind !== "dots")) return;
    event.preventDefault();
    if (this.photo) this.photo.move(0.02 * step[0], 0.02 * step[1]);
    else this.dot = Math.min(SIDE - 1, Math.max(0, (this.dot ?? this.dotOf()) + step[1]));
    this.changed();
    this.rested();
  }

  /** The row of the brightest pixel of the left column. */
  dotOf() {
    const pixels = this.pixels();
    const column = Array.from({ length: SIDE }, (_, row) => pixels[row * SIDE]);
    return column.indexOf(Math.max(...column));
  }

  /** Reports a settled picture after a short rest. */
  rested() {
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.listener.settled(), 250);
  }

  /** Paints and notifies the listener, once per frame of the screen. */
  changed() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
      this.listener.changed();
    });
  }

  paint() {
    const { context, canvas } = this;
    const side = canvas.width;
    context.fillStyle = "#000";
    context.fillRect(0, 0, side, side);
    if (this.photo) {
      this.photo.draw(context, side, side);
      if (this.model.kind === "faces") drawGuide(context, side, this.pointers.size > 0);
      return;
    }
    if (this.bitmap) {
      context.imageSmoothingEnabled = !this.drawable;
      context.drawImage(this.bitmap, 0, 0, side, side);
    }
    if (this.strokes.length) {
      context.shadowColor = "#fff";
      context.shadowBlur = side / SIDE;
      drawSoftly(context, this.strokes, { scale: side, x: 0, y: 0 }, (PEN * side) / SIDE, 0);
      context.shadowBlur = 0;
    }
    if (this.dot !== null) drawDot(context, side / SIDE, this.dot);
  }
}

/** FakeMNIST's label: the white pixel of the left column. */
function withDot(pixels, row) {
  return pixels.map((value, pixel) => {
    if (pixel % SIDE) return value;
    return pixel === row * SIDE ? 255 : 0;
  });
}

function drawDot(context, pixel, row) {
  context.fillStyle = "#000";
  context.fillRect(0, 0, pixel, SIDE * pixel);
  context.fillStyle = "#fff";
  context.fillRect(0, row * pixel, pixel, pixel);
}

/** Marks the place of face and eyes; stronger while the photograph is moved. */
function drawGuide(context, side, strong) {
  context.strokeStyle = `rgb(255 255 255 / ${strong ? 0.9 : 0.4})`;
  context.lineWidth = side / 200;
  context.setLineDash([side / 60, side / 60]);
  context.beginPath();
  context.ellipse(FACE.x * side, FACE.y * side, FACE.width * side, FACE.height * side, 0, 0, 2 * Math.PI);
  context.moveTo(0.26 * side, FACE.eyes * side);
  context.lineTo(0.74 * side, FACE.eyes * side);
  context.stroke();
  context.setLineDash([]);
}

export function greyPixels(bitmap) {
  const canvas = document.createElement("canvas");
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
  return Uint8Array.from({ length: data.length / 4 }, (_, pixel) => data[4 * pixel]);
}

export function greyImage(pixels) {
  const image = new ImageData(SIDE, SIDE);
  pixels.forEach((value, pixel) => image.data.set([value, value, value, 255], 4 * pixel));
  return image;
}
