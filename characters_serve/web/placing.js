/**
 * In: a picture, the size of the model's, and what a person does to it on a canvas. Out: on that
 * canvas the part that was placed. Knows nothing of files, the server or the rest of the page.
 */

/** Behind what is transparent or left empty; the server's colour for it. */
const BACKGROUND = "rgb(206 208 212)";
/** Faces in upright photos lie here, as a share of the height. */
const FACE_HEIGHT = 1 / 3;
/** The canvas is a whole multiple of the model's size, with a side of this at least. */
const FINE_PX = 1080;
const KEY_MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEY_ZOOMS = { "+": 1.1, "=": 1.1, "-": 1 / 1.1 };
/** Shares of the canvas. */
const KEY_MOVE = 0.02;
const KEY_MOVE_WITH_SHIFT = 0.1;

export class Placing {
  #canvas;
  /** Holds the zoom, as the binary logarithm of what makes the picture just cover the canvas. */
  #slider;
  /** @type {ImageBitmap|null} */
  #picture = null;
  /** The picture's point in the middle of the canvas, as shares of its width and height. */
  #middle = { x: 0.5, y: 0.5 };
  /** Where each finger is, or the mouse, in pixels of the canvas. */
  #pointers = new Map();

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLInputElement} slider a range with step="any"
   */
  constructor(canvas, slider) {
    this.#canvas = canvas;
    this.#slider = slider;
    slider.addEventListener("input", () => this.#draw());
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.#pointers.set(event.pointerId, this.#point(event));
    });
    canvas.addEventListener("pointermove", (event) => this.#onDrag(event));
    canvas.addEventListener("lostpointercapture", ({ pointerId }) => this.#pointers.delete(pointerId));
  }

  /** Covers the canvas, with the face of an upright photo in its middle. */
  show(/** @type {ImageBitmap} */ picture, /** @type {{width: number, height: number}} */ size) {
    this.#picture?.close();
    this.#picture = picture;
    const fineness = Math.ceil(FINE_PX / Math.max(size.width, size.height));
    this.#canvas.width = fineness * size.width;
    this.#canvas.height = fineness * size.height;
    this.#slider.value = "0";
    const visible = this.#canvas.height / (this.#scale * picture.height);
    this.#middle = { x: 0.5, y: Math.max(visible / 2, FACE_HEIGHT) };
    this.#draw();
  }

  /** Pixels of the canvas for one of the picture. */
  get #scale() {
    const cover = Math.max(this.#canvas.width / this.#picture.width, this.#canvas.height / this.#picture.height);
    return cover * 2 ** this.#slider.valueAsNumber;
  }

  /** By pixels of the canvas; some of the picture stays in its middle. */
  #move(dx, dy) {
    const inside = (share) => Math.min(1, Math.max(0, share));
    this.#middle.x = inside(this.#middle.x - dx / (this.#scale * this.#picture.width));
    this.#middle.y = inside(this.#middle.y - dy / (this.#scale * this.#picture.height));
    this.#draw();
  }

  /** What lies at that point of the canvas stays there; the slider keeps to its limits. */
  #zoom(factor, { x, y } = { x: this.#canvas.width / 2, y: this.#canvas.height / 2 }) {
    const before = this.#scale;
    this.#slider.valueAsNumber += Math.log2(factor);
    const grown = this.#scale / before;
    this.#move((1 - grown) * (x - this.#canvas.width / 2), (1 - grown) * (y - this.#canvas.height / 2));
  }

  #draw() {
    const { width, height } = this.#canvas;
    const context = this.#canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.fillStyle = BACKGROUND;
    context.fillRect(0, 0, width, height);
    const [w, h] = [this.#scale * this.#picture.width, this.#scale * this.#picture.height];
    context.drawImage(this.#picture, width / 2 - this.#middle.x * w, height / 2 - this.#middle.y * h, w, h);
    this.#slider.setAttribute("aria-valuetext", `${Math.round(100 * 2 ** this.#slider.valueAsNumber)} %`);
  }

  #onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [move, zoom] = [KEY_MOVES[event.key], KEY_ZOOMS[event.key]];
    if (!move && !zoom) return;
    event.preventDefault();
    const step = (event.shiftKey ? KEY_MOVE_WITH_SHIFT : KEY_MOVE) * this.#canvas.width;
    if (move) this.#move(step * move[0], step * move[1]);
    else this.#zoom(zoom);
  }

  /** A pinch on a touchpad comes as a wheel with Ctrl, in small numbers. */
  #onWheel(event) {
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1);
    this.#zoom(2 ** (-pixels / (event.ctrlKey ? 100 : 500)), this.#point(event));
  }

  #onDrag(event) {
    const from = this.#pointers.get(event.pointerId);
    if (!from) return;
    const to = this.#point(event);
    const fingers = this.#pointers.set(event.pointerId, to).size;
    this.#move((to.x - from.x) / fingers, (to.y - from.y) / fingers);
    if (fingers === 1) return;
    const [, other] = [...this.#pointers].find(([id]) => id !== event.pointerId);
    const apart = (point) => Math.max(1, Math.hypot(point.x - other.x, point.y - other.y));
    this.#zoom(apart(to) / apart(from), { x: (to.x + other.x) / 2, y: (to.y + other.y) / 2 });
  }

  #point({ offsetX, offsetY }) {
    const fine = this.#canvas.width / this.#canvas.clientWidth;
    return { x: offsetX * fine, y: offsetY * fine };
  }
}
