/** The slider from the input to the tipping point, the counterfactual and beyond. */

import { percent } from "./words.js";

/** Distance, as a share of the slider, within which it snaps to a stop. */
const PULL = 0.012;
/** Where the names of the stops stand beside their marks; the first that has room is taken.
 * Bare stops have no name. */
const LEANS = [
  ["right", "middle", "left", "left"],
  ["right", "left", "left", "left"],
  ["right", "left", "right", "bare"],
  ["bare", "middle", "left", "left"],
  ["bare", "left", "right", "bare"],
  ["bare", "right", "left", "left"],
];
/** Pixels of a name to the left of its mark, as a share of its width. */
const LEFT = { right: 0, middle: 0.5, left: 1, bare: 0 };
/** Smallest distance between two names, in pixels. */
const APART = 7;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** The named stops of the slider, in order; it comes to rest at the counterfactual.
 * @param {string} tie the name of the stop at the tipping point
 * @param {string} name the name of the stop at the counterfactual
 */
export function stopsOf({ tippingAlpha, alpha }, end, tie, name) {
  const stops = [
    { alpha: 0, name: "input" },
    { alpha: tippingAlpha, name: tie },
    { alpha, name, rest: true },
  ].sort((a, b) => a.alpha - b.alpha);
  return stops.at(-1).alpha < end ? [...stops, { alpha: end, name: "beyond" }] : stops;
}

export class Slider {
  /**
   * @param {{input: HTMLInputElement, stops: HTMLElement, play: HTMLButtonElement}} parts
   * @param {(step: number) => void} moved receives the frame to show
   */
  constructor(parts, moved) {
    Object.assign(this, parts);
    this.moved = moved;
    this.frames = [];
    this.marks = [];
    this.input.addEventListener("input", () => this.scrub(Number(this.input.value)));
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.play.addEventListener("click", () => (this.playing ? this.stop() : this.playThrough()));
  }

  /** @param {{frames: object[], stops: {alpha: number, name: string}[], names: string[], q: number}} data */
  show({ frames, stops, names, q }) {
    this.stop();
    Object.assign(this, { frames, marks: stops, names, q });
    this.end = frames.at(-1).alpha;
    this.input.max = String(this.end);
    this.stops.replaceChildren(...stops.map((stop) => this.stopButton(stop)));
    this.align();
  }

  /** Shows nothing until the next path arrives. */
  forget() {
    this.stop();
    this.frames = [];
  }

  stopButton({ alpha, name }) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "stop-button";
    button.textContent = name;
    button.style.setProperty("--at", String(alpha / this.end));
    button.addEventListener("click", () => this.scrub(alpha));
    return button;
  }

  /** Places the names of the stops so that none covers another. */
  align() {
    const buttons = [...this.stops.children];
    const words = document.createRange();
    const widths = buttons.map((button) => {
      button.dataset.lean = "middle"; // bare ones have no width
      words.selectNodeContents(button);
      return words.getBoundingClientRect().width;
    });
    const places = this.marks.map(({ alpha }) => (this.stops.clientWidth * alpha) / this.end);
    /** The smallest distance between neighbours, or to the right end. */
    const room = (leans) => {
      const gaps = [APART];
      let end = -Infinity;
      places.forEach((place, i) => {
        if (leans[i] === "bare") return;
        gaps.push(place - LEFT[leans[i]] * widths[i] - end);
        end = place + (1 - LEFT[leans[i]]) * widths[i];
      });
      return Math.min(...gaps, this.stops.clientWidth - end + APART);
    };
    const rooms = LEANS.map(room);
    const leans = LEANS[rooms.indexOf(Math.max(...rooms))];
    buttons.forEach((button, i) => (button.dataset.lean = leans[i]));
  }

  /** The frame at this α, or that of a stop nearby. */
  nearest(alpha) {
    const stop = closest(this.marks, alpha);
    const pulled = Math.abs(stop.alpha - alpha) < PULL * this.end;
    return this.frames.indexOf(closest(this.frames, pulled ? stop.alpha : alpha));
  }

  /** Moves there and ends any animation. */
  scrub(alpha) {
    if (!this.frames.length) return;
    this.stop();
    this.go(this.nearest(alpha));
  }

  go(step) {
    this.step = Math.min(Math.max(step, 0), this.frames.length - 1);
    const { alpha, posterior } = this.frames[this.step];
    this.input.value = String(alpha);
    this.input.style.setProperty("--share", String(alpha / this.end));
    this.input.setAttribute("aria-valuetext", this.spoken(alpha, posterior));
    for (const [i, button] of [...this.stops.children].entries()) {
      button.toggleAttribute("data-here", this.nearest(this.marks[i].alpha) === this.step);
    }
    this.moved(this.step);
  }

  spoken(alpha, posterior) {
    const stop = this.marks.find((mark) => mark.alpha === alpha);
    const where = stop ? `${stop.name}, ` : "";
    return `${where}α ${alpha.toFixed(2)}, ${this.names[this.q]} ${percent(posterior[this.q])}`;
  }

  key(event) {
    if (!this.frames.length) return;
    const here = this.step;
    const after = this.marks.map(({ alpha }) => this.nearest(alpha));
    const steps = {
      ArrowRight: here + 1,
      ArrowUp: here + 1,
      ArrowLeft: here - 1,
      ArrowDown: here - 1,
      Home: 0,
      End: this.frames.length - 1,
      PageUp: after.find((step) => step > here) ?? this.frames.length - 1,
      PageDown: after.findLast((step) => step < here) ?? 0,
    };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.stop();
    this.go(steps[event.key]);
  }

  /** Moves smoothly, or at once if the system prefers less motion. */
  sweep(from, to, milliseconds) {
    if (calm.matches) {
      this.go(this.nearest(to));
      return;
    }
    this.run((share) => from + (to - from) * ease(share), milliseconds);
  }

  /** Plays from the input to the far end and back to the counterfactual. */
  playThrough() {
    if (!this.frames.length) return;
    const rest = this.marks.find((mark) => mark.rest)?.alpha ?? this.end;
    const turn = 0.8;
    this.play.setAttribute("aria-pressed", "true");
    this.run((share) => {
      if (share < turn) return this.end * ease(share / turn);
      return this.end + (rest - this.end) * ease((share - turn) / (1 - turn));
    }, 4500);
  }

  run(alphaAt, milliseconds) {
    this.halt();
    this.playing = true;
    const start = performance.now();
    const tick = (now) => {
      const share = Math.min(Math.max((now - start) / milliseconds, 0), 1);
      this.go(this.nearest(alphaAt(share)));
      if (share < 1) this.timer = requestAnimationFrame(tick);
      else this.stop();
    };
    this.timer = requestAnimationFrame(tick);
  }

  halt() {
    cancelAnimationFrame(this.timer);
    this.playing = false;
  }

  stop() {
    this.halt();
    this.play.setAttribute("aria-pressed", "false");
  }
}

/** The closest of several things on the path. */
function closest(things, alpha) {
  const away = (thing) => Math.abs(thing.alpha - alpha);
  return things.reduce((best, each) => (away(each) < away(best) ? each : best));
}

function ease(share) {
  return share * share * (3 - 2 * share);
}
