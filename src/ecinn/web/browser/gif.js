/** Grey frames as an endless GIF. */

const CLEAR = 256;
const END = 257;
const MOST_CODES = 4096;

/** LZW with codes of 9 to 12 bits. */
export function compress(values) {
  const bytes = [];
  const codes = new Map();
  let [bits, held, size, next] = [0, 0, 9, END + 1];
  const put = (code) => {
    bits |= code << held;
    held += size;
    for (; held >= 8; held -= 8) {
      bytes.push(bits & 255);
      bits >>>= 8;
    }
  };
  put(CLEAR);
  let prefix = values[0];
  for (const value of values.subarray(1)) {
    const longer = 256 * prefix + value;
    if (codes.has(longer)) {
      prefix = codes.get(longer);
      continue;
    }
    put(prefix);
    if (next === MOST_CODES) {
      put(CLEAR);
      codes.clear();
      [size, next] = [9, END + 1];
    } else {
      if (next === 1 << size) size += 1;
      codes.set(longer, next);
      next += 1;
    }
    prefix = value;
  }
  put(prefix);
  put(END);
  if (held) bytes.push(bits & 255);
  return bytes;
}

/** Parts of at most 255 bytes, each after its length. */
function blocks(bytes) {
  const parts = [];
  for (let first = 0; first < bytes.length; first += 255) {
    const part = bytes.slice(first, first + 255);
    parts.push(part.length, ...part);
  }
  return [...parts, 0];
}

const letters = (text) => [...text].map((letter) => letter.charCodeAt(0));
const short = (number) => [number & 255, number >> 8];

/** @param {{values: Uint8Array, seconds: number}[]} frames */
export function gif(width, height, frames) {
  const size = [...short(width), ...short(height)];
  const greys = Array.from({ length: 256 }, (_, grey) => [grey, grey, grey]).flat();
  const head = [...letters("GIF89a"), ...size, 0xf7, 0, 0, ...greys];
  const forever = [0x21, 0xff, 11, ...letters("NETSCAPE2.0"), 3, 1, 0, 0, 0];
  const parts = frames.map(({ values, seconds }) => {
    const control = [0x21, 0xf9, 4, 0, ...short(Math.round(100 * seconds)), 0, 0];
    return [...control, 0x2c, 0, 0, 0, 0, ...size, 0, 8, ...blocks(compress(values))];
  });
  return new Blob([head, forever, ...parts, [0x3b]].map((part) => new Uint8Array(part)), { type: "image/gif" });
}
