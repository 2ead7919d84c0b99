/** Every class's probability along the path, with a cursor that follows the slider. */

import { winner } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
/** Half a slider's thumb, so that plot and slider have one axis. */
const EDGE = 11;
const TOP = 16;
const BOTTOM = 8;

function element(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

export class Plot {
  /**
   * @param {SVGSVGElement} svg
   * @param {(alpha: number) => void} scrub receives the α that is pointed at
   */
  constructor(svg, scrub) {
    this.svg = svg;
    this.data = null;
    new ResizeObserver(() => this.draw()).observe(svg);
    const point = (event) => {
      if (!this.data || !event.buttons) return;
      const box = svg.getBoundingClientRect();
      const share = (event.clientX - box.left - EDGE) / (box.width - 2 * EDGE);
      scrub(Math.min(Math.max(share, 0), 1) * this.data.end);
    };
    svg.addEventListener("pointerdown", (event) => {
      svg.setPointerCapture(event.pointerId);
      point(event);
    });
    svg.addEventListener("pointermove", point);
  }

  /** @param {{frames: object[], end: number, p: number, q: number, names: string[], marks: number[],
   *   asked: {alpha: number, posterior: number[]}[]} | null} data */
  show(data) {
    this.data = data;
    this.draw();
  }

  x(alpha) {
    return EDGE + (alpha / this.data.end) * (this.svg.clientWidth - 2 * EDGE);
  }

  y(share) {
    const height = this.svg.clientHeight - TOP - BOTTOM;
    return TOP + (1 - share) * height;
  }

  draw() {
    this.svg.replaceChildren();
    if (!this.data || !this.svg.clientWidth) return;
    const { p, q, names, marks, asked } = this.data;
    const others = names.map((_, label) => label).filter((label) => label !== p && label !== q);
    this.cursorGroup = element("g", { class: "cursor" });
    this.svg.replaceChildren(
      ...[0, 0.5, 1].flatMap((share) => this.gridline(share)),
      ...marks.map((alpha) => this.upright(alpha, "stop")),
      ...others.map((label) => this.curve(label, "other")),
      this.curve(p, "from"),
      this.curve(q, "to"),
      ...asked.flatMap((point) => [this.ring(point, p, "from"), this.ring(point, q, "to")]),
      this.cursorGroup,
    );
    this.moveTo(this.step ?? 0);
  }

  gridline(share) {
    const y = this.y(share);
    const line = { x1: EDGE, x2: this.svg.clientWidth - EDGE, y1: y, y2: y, class: "gridline" };
    return [
      element("line", line),
      element("text", { x: this.svg.clientWidth - EDGE, y: y - 4, class: "tick" }, `${100 * share} %`),
    ];
  }

  upright(alpha, name) {
    const x = this.x(alpha);
    return element("line", { x1: x, x2: x, y1: this.y(1), y2: this.svg.clientHeight, class: name });
  }

  curve(label, name) {
    const points = this.data.frames.map(
      ({ alpha, posterior }) => `${this.x(alpha).toFixed(1)},${this.y(posterior[label]).toFixed(1)}`,
    );
    return element("polyline", { points: points.join(" "), class: `curve ${name}` });
  }

  /** An answer of the classifier that is explained. */
  ring({ alpha, posterior }, label, name) {
    const at = { cx: this.x(alpha), cy: this.y(posterior[label]), r: 6, class: `ring ${name}` };
    return element("circle", at);
  }

  moveTo(step) {
    this.step = step;
    const frame = this.data?.frames[step];
    if (!frame || !this.cursorGroup) return;
    const { p, q } = this.data;
    const most = winner(frame.posterior);
    this.cursorGroup.replaceChildren(
      this.upright(frame.alpha, "now"),
      ...(most === p || most === q ? [] : [this.dot(frame, most, "third")]),
      this.dot(frame, p, "from"),
      this.dot(frame, q, "to"),
    );
  }

  dot({ alpha, posterior }, label, name) {
    const at = { cx: this.x(alpha), cy: this.y(posterior[label]), r: 9, class: `dot ${name}` };
    const text = { x: at.cx, y: at.cy, class: `dot-name ${name}` };
    const group = element("g", {});
    const called = this.data.names[label];
    group.append(element("circle", called.length > 2 ? { ...at, r: 5 } : at));
    if (called.length <= 2) group.append(element("text", text, called));
    else if (name === "third") group.append(this.longName(at, called));
    return group;
  }

  /** A name that does not fit into its dot. */
  longName({ cx, cy }, called) {
    const left = cx > this.svg.clientWidth / 2;
    const text = { x: cx + (left ? -9 : 9), y: cy, class: left ? "long-name left" : "long-name" };
    return element("text", text, called);
  }
}
