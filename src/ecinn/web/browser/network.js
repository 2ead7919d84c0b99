/** A model in onnxruntime-web: f and f⁻¹ on one thread of WebAssembly, and its test pictures. */

import * as ort from "./ort/ort.wasm.min.js";
import { Classes } from "./method.js";

/** Images that go through the network at once: more are hardly faster, and others wait. */
const PART = 8;
const MODELS = new URL("../models/", import.meta.url);

export async function load(address, as) {
  const response = await fetch(address).catch(() => null);
  if (!response?.ok) throw new Error("A file of this page cannot be loaded. Are you offline?");
  return response[as]();
}

export const listModels = () => load(new URL("models.json", MODELS), "json");
export const folderOf = ({ name }) => new URL(`${name}/`, MODELS);

/* With one thread WebAssembly needs no special headers. */
const [mjs, wasm] = ["js", "wasm"].map((kind) => new URL(`ort/ort-wasm-simd-threaded.${kind}`, import.meta.url).href);
Object.assign(ort.env.wasm, { numThreads: 1, wasmPaths: { mjs, wasm } });
ort.env.logLevel = "error";

/** Lets messages in: those of aborted requests, and the next question. */
function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

let busy = Promise.resolve();

/** Runs one part after the other. */
function inTurn(work) {
  const done = busy.then(pause).then(work);
  busy = done.catch(() => {});
  return done;
}

/* Loads WebAssembly before it is known which network is needed: an empty graph is refused only
 * after that. */
inTurn(() => ort.InferenceSession.create(new Uint8Array(), { executionProviders: ["wasm"] })).catch(() => {});

function decoded(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function rowsOf(values, length) {
  const count = values.length / length;
  return Array.from({ length: count }, (_, row) => values.subarray(row * length, (row + 1) * length));
}

/** The weights of both graphs in float32: 8-bit rows times their scales.
 * @param {ArrayBuffer} file the scales of all rows, then the rows
 * @param {[number, number][]} shapes rows and columns of every kernel */
function converted(file, shapes) {
  const rows = shapes.flatMap(([count, columns]) => Array(count).fill(columns));
  const scales = new Float32Array(file, 0, rows.length);
  const kernels = new Int8Array(file, 4 * rows.length);
  const values = new Float32Array(kernels.length);
  let first = 0;
  rows.forEach((columns, row) => {
    for (let at = first; at < first + columns; at += 1) values[at] = kernels[at] * scales[row];
    first += columns;
  });
  return new Uint8Array(values.buffer);
}

export class Network {
  /** @param {object} about an entry of models.json */
  static async load(about) {
    const folder = folderOf(about);
    const files = ["encode.onnx", "decode.onnx", "weights.bin"].map((file) => load(new URL(file, folder), "arrayBuffer"));
    const model = await load(new URL("model.json", folder), "json");
    const data = converted(await files[2], model.weights);
    // Optimising the graphs takes seconds, and hardly makes them faster.
    const options = {
      executionProviders: ["wasm"],
      graphOptimizationLevel: "disabled",
      externalData: [{ path: "weights", data }],
    };
    const open = async (file) => {
      const bytes = await file;
      return inTurn(() => ort.InferenceSession.create(bytes, options));
    };
    const encoder = await open(files[0]);
    // After the prediction that waits for the encoder.
    const decoder = pause().then(() => open(files[1]));
    decoder.catch(() => {});
    return new Network({ ...model, ...about }, encoder, decoder);
  }

  constructor(about, encoder, decoder) {
    Object.assign(this, { about, encoder, decoder });
    this.size = about.channels * about.height * about.width;
    const means = (text) => rowsOf(decoded(text), this.size).map((mean) => Float64Array.from(mean));
    this.classes = new Classes(means(about.mu), means(about.mu_bar), about.tau);
  }

  /** Calls the network in parts, each of which `wanted` may refuse by throwing.
   * @param {Promise<ort.InferenceSession> | ort.InferenceSession} session */
  async inParts(session, name, shape, inputs, wanted) {
    const rows = [];
    const opened = await session;
    for (let first = 0; first < inputs.length; first += PART) {
      const part = inputs.slice(first, first + PART);
      const values = new Float32Array(part.length * this.size);
      part.forEach((input, row) => values.set(input, row * this.size));
      const feeds = { [name]: new ort.Tensor("float32", values, [part.length, ...shape]) };
      const outputs = await inTurn(() => {
        wanted();
        return opened.run(feeds);
      });
      const columns = Object.entries(outputs).map(([key, { data, dims }]) => [key, rowsOf(data, data.length / dims[0])]);
      for (let row = 0; row < part.length; row += 1) {
        rows.push(Object.fromEntries(columns.map(([key, column]) => [key, column[row]])));
      }
    }
    return rows;
  }

  /** f of 8-bit images: latents, log p(x) and out-of-distribution flags. */
  encode(images, wanted) {
    const { channels, height, width } = this.about;
    const pixels = images.map((image) => Float32Array.from(image, (value) => (value + 0.5) / 256));
    return this.inParts(this.encoder, "pixels", [channels, height, width], pixels, wanted);
  }

  /** f⁻¹: pixels, nearly all of them between 0 and 1. */
  async decode(latents, wanted) {
    const rows = await this.inParts(this.decoder, "z", [this.size], latents, wanted);
    return rows.map(({ pixels }) => pixels);
  }
}

/** The 8-bit image of decoded pixels. */
export function stored(pixels) {
  return Uint8Array.from(pixels, (pixel) => Math.min(Math.max(Math.floor(256 * pixel), 0), 255));
}
