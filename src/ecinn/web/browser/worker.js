/** Answers the service's requests in a worker, so that the page stays responsive. */

import { InputError, explain, predict } from "./answers.js";
import { film, sheet } from "./drawings.js";
import { Network, listModels } from "./network.js";
import { greyPng } from "./pictures.js";
import { sampleOf } from "./samples.js";

const loaded = new Map();
const aborted = new Set();
let models;

async function aboutOf(name) {
  const { models: all } = await models;
  const about = all.find((each) => each.name === name);
  if (!about) throw new InputError("this site has no model of that name");
  return about;
}

async function networkOf(name) {
  const about = await aboutOf(name);
  if (!loaded.has(name)) {
    postMessage({ megabytes: about.megabytes });
    const loading = Network.load(about).finally(() => postMessage({ megabytes: null }));
    loading.then(({ decoder }) => decoder).catch(() => loaded.delete(name));
    loaded.set(name, loading);
  }
  return loaded.get(name);
}

async function sample(name, index) {
  networkOf(name).catch(() => {}); // is needed next
  const about = await aboutOf(name);
  const image = await sampleOf(about, index);
  if (!image) throw new InputError("this site has no such test picture");
  const headers = { "X-Label": about.classes[about.labels[index]] };
  return { content: await greyPng(about.width, about.height, image), headers };
}

async function answer(path, body, wanted) {
  const [, question, name, , index] = path.match(/api\/v1\/(\w+)(?:\/([^/]+)\/(samples)\/(\d+))?$/);
  models ??= listModels();
  models.catch(() => (models = undefined));
  if (question === "models") return name ? sample(name, Number(index)) : { content: await models };
  const work = { predict, explain, sheet, film }[question];
  return { content: await work(await networkOf(body.model), body, wanted) };
}

onmessage = async ({ data: { id, path, body, aborted: left } }) => {
  if (left) {
    aborted.add(id);
    return;
  }
  const wanted = () => {
    if (aborted.has(id)) throw new Error("aborted");
  };
  try {
    postMessage({ id, status: 200, headers: {}, ...(await answer(path, body, wanted)) });
  } catch (error) {
    postMessage({ id, status: error instanceof InputError ? 422 : 500, content: { error: error.message } });
  }
  aborted.delete(id);
};
