/** The method between f and f⁻¹, and the correction of α: equations.py and correction.py in
 * double precision, for one image at a time. */

const FARTHEST_ALPHA = 100;
const ROUNDS = 70;
/** Of a correction; see correction.py. */
const TOLERANCE = 0.05;
const OFFSETS = [0.1, 0.2, 0.3, 0.4, 0.5, -0.1, -0.2, -0.3];
const MAX_STEP = 0.25;
const WAY_BACK = -0.5;
const RETURNING = 1.5;
const SLOWING = 0.8;

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

  /** (logit c − logit p(q)) / (d logit p(q) / dα), the slope taken in latent space, clamped. */
  newtonStep(alpha, obtained, confidence) {
    const { tau } = this.classes;
    const logits = this.start.map((start, label) => tau * (start + alpha * this.slope[label]));
    const others = softmax(logits.map((logit, label) => (label === this.q ? -Infinity : logit)));
    const slope = tau * (this.slope[this.q] - dot(others, this.slope));
    const share = Math.min(Math.max(obtained[this.q], 1e-6), 1 - 1e-6);
    const logit = (probability) => Math.log(probability / (1 - probability));
    const step = (logit(confidence) - logit(share)) / slope;
    return Math.min(Math.max(step, -MAX_STEP), MAX_STEP);
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

/**
 * Steps α where the stored image misses the request, and keeps the best.
 * @param {Line} line
 * @param {{alpha: number, stored: number[]}} end
 * @param {(alpha: number) => Promise<{alpha: number, stored: number[]}>} evaluate decodes and reads
 */
export async function correctAlpha(line, end, confidence, evaluate) {
  let best = end;
  let bestMiss = shortfall(end.stored, line.q, confidence);
  let at = end;
  let scale = 1;
  let corrections = 0;
  for (const offset of OFFSETS) {
    if (bestMiss <= 0) break;
    const step = confidence === null ? 0 : scale * line.newtonStep(at.alpha, at.stored, confidence);
    at = await evaluate(confidence === null ? end.alpha + offset : at.alpha + step);
    const miss = shortfall(at.stored, line.q, confidence);
    corrections += 1;
    const better = miss < bestMiss;
    const astray = miss > bestMiss + 0.01 || (miss >= 1 && !better);
    if (better) best = at;
    if (astray) at = best;
    scale *= astray ? WAY_BACK : better && scale < 0 ? RETURNING : SLOWING;
    bestMiss = Math.min(miss, bestMiss);
  }
  return { ...best, corrections };
}
