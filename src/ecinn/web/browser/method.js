/** The method between f and f⁻¹, and the correction of α: equations.py and correction.py in
 * double precision, for one image at a time. */

const FARTHEST_ALPHA = 100;
const ROUNDS = 70;
/** Of corrections; see correction.py. */
const TOLERANCE = 0.05;
const MAX_CORRECTIONS = 8;
const RESERVED = 1;
const NEAREST_END = 0.1;
const GOLDEN = 0.382;
const STEPS = [0.1, 0.5];
const UNDECIDED = Math.log((0.5 + TOLERANCE) / (0.5 - TOLERANCE));
const SEEN = 0.01;
const FLOOR = 1e-7;

const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);

export function argmax(values) {
  return values.indexOf(Math.max(...values));
}

function softmax(logits) {
  const most = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - most));
  const total = powers.reduce((sum, power) => sum + power, 0);
  return powers.map((power) => power / total);
}

function logSumExp(values) {
  const most = Math.max(...values);
  return most + Math.log(values.reduce((sum, value) => sum + Math.exp(value - most), 0));
}

/** Where `tooLow` turns false. */
function bisect(tooLow, low, high) {
  for (let round = 0; round < ROUNDS; round += 1) {
    const middle = (low + high) / 2;
    if (tooLow(middle)) low = middle;
    else high = middle;
  }
  return (low + high) / 2;
}

/** The Gaussians of a model's classes. */
export class Classes {
  /**
   * @param {Float64Array[]} mu means that decide the prediction
   * @param {Float64Array[]} muBar measured means, which give the direction
   * @param {number} tau inverse temperature
   */
  constructor(mu, muBar, tau) {
    const centre = mu[0].map((_, at) => mu.reduce((sum, mean) => sum + mean[at], 0) / mu.length);
    this.muBar = muBar;
    this.tau = tau;
    /** Means without what they have in common, which would cost digits. */
    this.mu = mu.map((mean) => mean.map((value, at) => value - centre[at]));
    this.offsets = this.mu.map((mean) => dot(centre, mean) + dot(mean, mean) / 2);
  }

  /** z·μ_y − ½‖μ_y‖², about the centre of the means. */
  logits(z) {
    return this.mu.map((mean, label) => dot(mean, z) - this.offsets[label]);
  }

  /** softmax τ(z·μ_y − ½‖μ_y‖²) */
  posterior(z) {
    return softmax(this.logits(z).map((logit) => this.tau * logit));
  }

  /** The line z + αΔ from p to q, Δ = μ̄_q − μ̄_p. */
  line(z, p, q) {
    return new Line(this, z, p, q);
  }
}

export class Line {
  constructor(classes, z, p, q) {
    this.classes = classes;
    this.z = z;
    this.p = p;
    this.q = q;
    this.delta = classes.muBar[q].map((value, at) => value - classes.muBar[p][at]);
    this.start = classes.logits(z);
    this.slope = classes.mu.map((mean) => dot(mean, this.delta));
    /** Eqs. 6–8: where p and q are equally probable. */
    this.tippingAlpha = (this.start[p] - this.start[q]) / (this.slope[q] - this.slope[p]);
    /** Section 3.3. */
    this.convincingAlpha = 0.8 + 0.5 * this.tippingAlpha;
  }

  /** z + αΔ */
  at(alpha) {
    return Float32Array.from(this.z, (value, at) => value + alpha * this.delta[at]);
  }

  /** The posterior of z + αΔ. */
  posterior(alpha) {
    return softmax(this.start.map((start, label) => this.classes.tau * (start + alpha * this.slope[label])));
  }

  /** Log-odds of every class against q. */
  odds(alpha) {
    const { tau } = this.classes;
    const own = this.start[this.q] + alpha * this.slope[this.q];
    return this.start.map((start, label) => tau * (start + alpha * this.slope[label] - own));
  }

  /** The α at which p(q) equals the confidence; without one, that of the highest p(q). */
  confidentAlpha(confidence) {
    const least = Math.log(confidence);
    const rises = (alpha) => {
      const slope = this.slope.map((each) => each - this.slope[this.q]);
      return dot(softmax(this.odds(alpha)), slope) < 0;
    };
    const logPosterior = (alpha) => -logSumExp(this.odds(alpha));
    if (!rises(-FARTHEST_ALPHA)) return { alpha: 0, reachable: false };
    const highest = bisect(rises, -FARTHEST_ALPHA, FARTHEST_ALPHA);
    if (logPosterior(highest) < least) return { alpha: highest, reachable: false };
    const alpha = bisect((each) => logPosterior(each) < least, -FARTHEST_ALPHA, highest);
    return { alpha, reachable: true };
  }
}

/**
 * Distance of the stored image's posterior from the request; 0 if within the tolerance.
 * @param {number | null} confidence null for the paper's α₁, which requires that q wins
 */
export function shortfall(obtained, q, confidence) {
  const behind = Math.max(...obtained) - obtained[q];
  if (confidence === null) return behind;
  const away = Math.abs(obtained[q] - confidence);
  const miss = away <= TOLERANCE ? 0 : away;
  return confidence <= 0.5 ? miss : miss + (behind > 0 ? 1 : 0);
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const log = (probability) => Math.log(Math.max(probability, FLOOR));

/** logit p(q) − logit c, or without a confidence log p(q) − log p of the best other class. */
function requestMargin(stored, q, confidence) {
  if (confidence !== null) return log(stored[q]) - log(1 - stored[q]) - Math.log(confidence / (1 - confidence));
  return log(stored[q]) - log(Math.max(...stored.filter((_, label) => label !== q)));
}

/** log p(q) − log p(p); very low where neither is seen. */
function tieMargin(stored, p, q) {
  return stored[p] + stored[q] >= SEEN ? log(stored[q]) - log(stored[p]) : Math.log(FLOOR);
}

/** The next α to ask about, given α and margins in the order in which they were asked. */
function nextAlpha(points, guess) {
  const above = points.filter(({ margin }) => margin >= 0);
  const high = Math.min(...above.map(({ alpha }) => alpha));
  const below = points.filter(({ alpha, margin }) => margin < 0 && alpha < high);
  const low = Math.max(...below.map(({ alpha }) => alpha));
  if (guess !== null && low < guess && guess < high) return guess;
  if (high === Infinity) return beyond(points, low);
  if (low === -Infinity) return high - STEPS[1];
  const marginAt = (place) => points.find(({ alpha }) => alpha === place).margin;
  const side = ({ margin }) => margin >= 0;
  const last = side(points.at(-1));
  let stays = points.length - 1;
  while (stays > 0 && points.slice(-1 - stays).some((point) => side(point) !== last)) stays -= 1;
  const stale = 0.5 ** stays;
  const [lower, upper] = [marginAt(low) * (last ? stale : 1), marginAt(high) * (last ? 1 : stale)];
  return low + clamp(lower / (lower - upper), NEAREST_END, 1 - NEAREST_END) * (high - low);
}

/** Without a point that is high enough: further on or, once the margin falls, about its maximum. */
function beyond(points, low) {
  const best = points.reduce((so, point) => (point.margin > so.margin ? point : so)).alpha;
  const left = Math.max(...points.map(({ alpha }) => alpha).filter((alpha) => alpha < best));
  const right = Math.min(...points.map(({ alpha }) => alpha).filter((alpha) => alpha > best));
  if (Number.isFinite(left) && Number.isFinite(right)) {
    const side = right - best > best - left ? right : left;
    return best + GOLDEN * (side - best);
  }
  const { margin } = points.find(({ alpha }) => alpha === low);
  const step = (margin * low) / (points[0].margin - margin);
  const smallest = Math.min(STEPS[0] * 2 ** (points.length - 2), STEPS[1]);
  return low + (step > 0 ? clamp(step, smallest, STEPS[1]) : STEPS[1]);
}

/**
 * Corrects counterfactual and tipping point until their stored images are as requested, or keeps
 * the best: `LineSearch` of correction.py, for one line.
 * @param {Line} line
 * @param {{alpha: number, stored: number[]}} original the image itself
 * @param first end, tipping: the points that are evaluated already; reachable: whether the
 *   confidence exists on the line, or α stays
 * @param {(alpha: number) => Promise<{alpha: number, stored: number[]}>} evaluate decodes and reads
 */
export async function correctAlpha(line, original, { end, tipping, reachable }, confidence, evaluate) {
  const { p, q } = line;
  const goals = {
    end: {
      margin: ({ stored }) => requestMargin(stored, q, confidence),
      miss: ({ stored }) => shortfall(stored, q, confidence),
      accepted: 0,
      first: end,
    },
    tipping: {
      margin: ({ stored }) => tieMargin(stored, p, q),
      miss: ({ stored }) => Math.abs(tieMargin(stored, p, q)),
      accepted: UNDECIDED,
      first: tipping,
    },
  };
  const asked = [original];
  const best = ({ miss }, points) => points.reduce((so, point) => (miss(point) < miss(so) ? point : so));
  const settled = (goal) => goal === goals.end && !reachable;
  const reached = (goal) => settled(goal) || asked.slice(1).some((point) => goal.miss(point) <= goal.accepted);
  const untried = new Set(Object.values(goals));
  let corrections = 0;
  for (let number = 0; number < 2 + MAX_CORRECTIONS; number += 1) {
    const last = number >= 2 + MAX_CORRECTIONS - RESERVED;
    const goal = last || reached(goals.end) ? goals.tipping : goals.end;
    if (reached(goal)) break;
    const points = asked.map((point) => ({ alpha: point.alpha, margin: goal.margin(point) }));
    const guess = untried.delete(goal) ? goal.first.alpha : null;
    const alpha = nextAlpha(points, guess);
    corrections += alpha === guess ? 0 : 1;
    asked.push(alpha === guess ? goal.first : await evaluate(alpha));
  }
  const found = [...asked.slice(1), end, tipping];
  return { end: reachable ? best(goals.end, found) : end, tipping: best(goals.tipping, found), corrections };
}
