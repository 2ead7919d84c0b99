/** A photograph behind a square window: moved, enlarged, and cut out. */

const MOST_ENLARGED = 6;
/** CelebA's aligned faces, and the side of the central square that the networks know. */
const ALIGNED = { width: 178, height: 218, side: 148 };

export class Photo {
  /**
   * @param {ImageBitmap} bitmap
   * @param {boolean} face of a face with CelebA's aspect ratio, the networks' square is shown first
   */
  constructor(bitmap, face) {
    const { width, height, side } = ALIGNED;
    const aligned = face && Math.abs(bitmap.width - (bitmap.height * width) / height) < 1;
    this.bitmap = bitmap;
    this.face = face;
    this.zoom = aligned ? width / side : 1;
    this.x = bitmap.width / 2;
    this.y = bitmap.height / 2;
  }

  /** Side of the visible part, in pixels of the photograph. */
  get side() {
    return Math.min(this.bitmap.width, this.bitmap.height) / this.zoom;
  }

  /** Moves the photograph by a fraction of the window. */
  move(dx, dy) {
    this.x -= dx * this.side;
    this.y -= dy * this.side;
    this.stayInside();
  }

  enlarge(zoom) {
    this.zoom = Math.min(Math.max(zoom, 1), MOST_ENLARGED);
    this.stayInside();
  }

  stayInside() {
    const half = this.side / 2;
    this.x = Math.min(Math.max(this.x, half), this.bitmap.width - half);
    this.y = Math.min(Math.max(this.y, half), this.bitmap.height - half);
  }

  draw(context, width, height) {
    const { side } = this;
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.bitmap, this.x - side / 2, this.y - side / 2, side, side, 0, 0, width, height);
  }

  /** The visible part as the service needs it: it resizes faces itself, as before training. */
  cutToSend(width, height) {
    const factor = this.face ? Math.min(Math.max(this.side / width, 1), 3) : 1;
    return this.cut(Math.round(factor * width), Math.round(factor * height));
  }

  /** The visible part, at the size of the network's input. */
  cut(width, height) {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    this.draw(canvas.getContext("2d"), width, height);
    return canvas;
  }
}

/** A file as an upright bitmap. */
export async function readPicture(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    const error = new Error("This file is not a picture: use a PNG, JPEG or WebP.");
    throw Object.assign(error, { status: 415 });
  }
}

/** A canvas as the base64 of a PNG. */
export function png(canvas) {
  return canvas.toDataURL("image/png").split(",")[1];
}

/** The whole picture as the base64 of a PNG of at most so many pixels a side. */
export function wholePng(bitmap, most = 512) {
  const factor = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * factor));
  canvas.height = Math.max(1, Math.round(bitmap.height * factor));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return png(canvas);
}
