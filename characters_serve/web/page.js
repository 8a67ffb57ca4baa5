/**
 * The page: picks a character, starts a CharacterSession, and draws what it reports.
 * Knows nothing of WebRTC or HTTP; all of that is in client.js.
 */
import { CharacterSession } from "/client.js";
import { Placing } from "/placing.js";

const $ = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));

const MAX_IMAGE_BYTES = 30 * 1024 * 1024;
const MAX_IMAGE_SIDE_PX = 3072;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp"];
// A server key belongs on a server. For an operator's own test it may be given as #key=…, which
// browsers never send anywhere.
const serverKey = new URLSearchParams(location.hash.slice(1)).get("key") ?? undefined;

const STATE_WORDS = {
  idle: "Not connected",
  microphone: "Waiting for your microphone…",
  creating: "Finding a free seat…",
  queued: "Waiting in the queue…",
  starting: "Preparing the character…",
  connecting: "Connecting…",
  reconnecting: "Connection lost. Reconnecting…",
  ended: "Conversation ended",
  failed: "Not connected",
};

// Reasons that the server gives, in the page's words; any other is shown as it came.
const ENDING_WORDS = {
  "maximum duration": "The time limit is near.",
  "idle timeout": "Nobody has spoken for a while. Say something to go on.",
};

const END_WORDS = {
  "maximum duration": "It reached the time limit.",
  "idle timeout": "Nobody spoke for a while.",
  "session-over": "The server has closed it.",
};

/** @type {{kind: "preset"|"upload", id: string, name: string, style: string, blurb: string, image?: any}|null} */
let selected = null;
/** @type {{width: number, height: number}|null} The model's pictures, in pixels. */
let pictureSize = null;
/** @type {{blob: Blob, bitmap: ImageBitmap}|null} */
let upload = null;
/** @type {CharacterSession|null} */
let session = null;
/** Whatever runs only while a session is there: aborted with it. */
let sessionScope = new AbortController();
let state = "idle";
let queuePosition = 0;
const speaking = { user: false, character: false };
let endingAtMs = 0;
let liveSinceMs = 0;

// ---------------------------------------------------------------------------- choosing

async function loadCharacters() {
  const cards = $("cards");
  try {
    const { characters, video } = await CharacterSession.describeServer({ serverKey });
    pictureSize = video;
    document.documentElement.style.setProperty("--ratio", String(video.width / video.height));
    cards.replaceChildren(...characters.map((character) => card({ kind: "preset", ...character })));
    if (characters.length) select(cards.querySelector("input"));
    else setText("picker-hint", "This server has no presets; use an image of your own.");
    show("picker-hint", characters.length === 0);
  } catch (error) {
    cards.replaceChildren();
    showNotice({
      tone: "bad",
      title: "The characters could not be loaded",
      text: error.message,
      action: { label: "Reload", run: () => location.reload() },
    });
  }
  cards.removeAttribute("aria-busy");
  draw();
}

/** A radio button that looks like a picture: the arrow keys come with it. */
function card(character) {
  const label = document.createElement("label");
  label.className = "card";
  label.dataset.testid = `gallery-card-${character.id}`;
  const radio = document.createElement("input");
  Object.assign(radio, { type: "radio", name: "character", value: character.id });
  const words = document.createElement("span");
  words.className = "card-words";
  words.append(textNode("span", "card-name", character.name));
  if (character.style) words.append(textNode("span", "card-style", character.style));
  const tick = document.createElement("span");
  tick.className = "card-tick";
  tick.innerHTML = '<svg class="i" aria-hidden="true"><use href="#i-check"/></svg>';
  label.append(radio, character.kind === "upload" ? uploadThumbnail() : presetThumbnail(character), words, tick);
  radio.addEventListener("change", () => choose(character));
  return label;
}

function presetThumbnail({ image }) {
  const picture = document.createElement("img");
  Object.assign(picture, { src: image, alt: "", decoding: "async", draggable: false });
  return picture;
}

function uploadThumbnail() {
  const canvas = document.createElement("canvas");
  if (upload) paint(canvas, upload.bitmap, 360, 240);
  return canvas;
}

/** @param {HTMLInputElement} radio */
function select(radio) {
  radio.checked = true;
  radio.dispatchEvent(new Event("change"));
}

function choose(character) {
  selected = character;
  hideNotice();
  const isUpload = character.kind === "upload";
  $("portrait").hidden = isUpload;
  $("upload-portrait").hidden = !isUpload;
  if (isUpload && upload) paint($("upload-portrait"), upload.bitmap, upload.bitmap.width, upload.bitmap.height);
  else $("portrait").src = character.image;
  $("portrait").alt = `${character.name}, ${character.style}`;
  $("about-name").textContent = character.name;
  $("about-blurb").textContent = character.blurb.match(/^.*?[.!?](?=\s|$)/s)?.[0] ?? character.blurb;
  draw();
}

/** The page's policy allows no blob: pictures, and a canvas needs none. */
function paint(canvas, bitmap, width, height) {
  canvas.width = width;
  canvas.height = height;
  const scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h);
}

/** @param {Blob|undefined|null} file */
async function placeImage(file) {
  if (!file || session || !pictureSize) return;
  const complain = (title, text) => {
    $("placing").close();
    showNotice({ tone: "warn", title, text });
  };
  if (!IMAGE_TYPES.includes(file.type)) {
    return complain("That is not an image this server takes", "Use a PNG, JPEG or WebP picture.");
  }
  if (file.size > MAX_IMAGE_BYTES) return complain("That image is too large", "Use one below 30 MB.");
  let picture;
  try {
    picture = await decode(file);
  } catch {
    return complain("That image could not be read", "The file may be damaged. Try another one.");
  }
  if (session) return; // begun while a large one was read
  hideNotice();
  placing.show(picture, pictureSize);
  if (!$("placing").open) $("placing").showModal();
}

/** Upright, as the camera was held; large ones smaller, so that they follow the finger. */
async function decode(file) {
  const whole = await createImageBitmap(file);
  const scale = MAX_IMAGE_SIDE_PX / Math.max(whole.width, whole.height);
  if (scale >= 1) return whole;
  const [resizeWidth, resizeHeight] = [whole.width, whole.height].map((side) => Math.max(1, Math.round(side * scale)));
  const smaller = await createImageBitmap(whole, { resizeWidth, resizeHeight, resizeQuality: "high" });
  whole.close();
  return smaller;
}

/** Only what was placed leaves the device, and none of the camera's data. */
async function usePlaced() {
  const canvas = $("placing-picture");
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
  upload = { blob, bitmap: await createImageBitmap(canvas) };
  $("placing").close();
  document.querySelector('[data-testid="gallery-card-upload"]')?.remove();
  const own = card({
    kind: "upload",
    id: "upload",
    name: "Your character",
    style: "your image",
    blurb: "Drawn characters work best; a photo may look odd.",
  });
  $("cards").prepend(own);
  select(own.querySelector("input"));
  own.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// ---------------------------------------------------------------------------- a conversation

async function talk({ mic }) {
  if (session || !selected) return;
  hideNotice();
  clearCaptions();
  sessionScope = new AbortController();
  session = new CharacterSession({ serverKey });
  const mine = session;
  const on = (type, handler) => mine.addEventListener(type, ({ detail }) => handler(detail));
  on("state", onState);
  on("speaking", onSpeaking);
  on("transcript", onTranscript);
  on("ready", ({ listener, voice, picture }) => {
    if (picture && !picture.familiar) {
      showNotice({
        tone: "info",
        title: "An unusual picture",
        text: "It is unlike what the model has learnt: expect the mouth and eyes to be off.",
      });
    }
    $("engines").textContent = [listener && `Listening: ${listener}`, voice && `Voice: ${voice}`].filter(Boolean).join(" · ");
  });
  on("mic", ({ stream }) => onMicrophone(stream));
  on("metrics", ({ turn }) => drawTurn(turn));
  on("audioblocked", () => ($("unmute").hidden = false));
  on("error", onError);
  on("ended", onEnded);
  const source = selected.kind === "upload" ? { image: upload?.blob, name: $("upload-name").value.trim() || undefined } : { character: selected.id };
  await mine.start({ ...source, mic, video: $("video") }).catch(() => {}); // told by `error` and `ended`
}

function onState({ state: next, reason, inMs, queuePosition: position }) {
  queuePosition = position;
  if (next === "ending") {
    endingAtMs = performance.now() + inMs;
    showNotice({ tone: "info", title: "This conversation is about to end", text: wordsFor(reason, ENDING_WORDS) });
  } else {
    state = next;
  }
  if (next === "reconnecting") keepLastFrame();
  if (next === "live") $("video").requestVideoFrameCallback?.(() => show("last-frame", false)) ?? show("last-frame", false);
  if (next === "live" && !liveSinceMs) {
    liveSinceMs = performance.now();
    every(1000, drawClock);
    if (!$("stats").hidden) drawStats();
    every(1000, drawStats);
  }
  if (next === "creating" || next === "queued") startedWaitingMs = performance.now();
  draw();
  if (next === "live" && !session?.micStream) $("say-text").focus({ preventScroll: true });
}

/** A closed connection takes its picture with it; a still one is kinder than a black one. */
function keepLastFrame() {
  const video = $("video");
  if (!video.videoWidth) return;
  const canvas = $("last-frame");
  Object.assign(canvas, { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  show("last-frame", true);
}

function onSpeaking({ who, speaking: isSpeaking }) {
  speaking[who] = isSpeaking;
  draw();
}

function onError(error) {
  if (error.fatal) return; // onEnded tells it, with what can be done
  const microphone = {
    "mic-refused": "Allow it in the address bar to speak. Until then you can listen, and type.",
    "mic-missing": "Connect one to speak. Until then you can listen, and type.",
    "mic-unavailable": `${error.message} You can listen, and type.`,
    "mic-lost": "You can go on by typing, or connect it again.",
  }[error.code];
  if (!microphone) return showNotice({ tone: "warn", title: "Something went wrong", text: error.message });
  showNotice({
    tone: "warn",
    title: error.code === "mic-refused" ? "Microphone not allowed" : error.code === "mic-unavailable" ? "No microphone here" : error.message.replace(/\.$/, ""),
    text: microphone,
    action: { label: "Try again", run: async () => (await session?.setMic(true)) && hideNotice() },
  });
}

function onEnded({ reason, failed, error }) {
  session = null;
  sessionScope.abort();
  state = failed ? "failed" : "ended";
  speaking.user = speaking.character = false;
  liveSinceMs = endingAtMs = 0;
  $("unmute").hidden = true;
  $("last-frame").hidden = true;
  for (const bubble of document.querySelectorAll(".bubble.interim")) bubble.classList.remove("interim");
  if (reason === "stopped") hideNotice();
  else if (reason !== "page-closed") explainEnd(reason, failed, error);
  draw();
  if (document.activeElement === document.body) $("talk").focus({ preventScroll: true });
}

function explainEnd(reason, failed, error) {
  const again = { label: "Try again", run: () => talk({ mic: true }) };
  if (error?.code === "busy") return showBusy(error, again);
  if (error?.status === 401 || error?.status === 403) {
    return showNotice({ tone: "bad", title: "This server asks for a key", text: "Open the page as …/#key=YOUR_KEY, or ask its operator." });
  }
  if (error?.status >= 400 && error.status < 500) {
    return showNotice({ tone: "bad", title: "The server did not accept that", text: error.message });
  }
  const titles = {
    network: "The server cannot be reached",
    "connect-timeout": "The connection did not come up",
    "start-timeout": "The character took too long to prepare",
    "connection-lost": "The connection was lost",
  };
  showNotice({
    tone: failed ? "bad" : "info",
    title: titles[reason] ?? "The conversation has ended",
    text: error?.code === "network" ? "Check your connection and try again." : (error?.message ?? wordsFor(reason, END_WORDS)),
    action: again,
  });
}

function wordsFor(reason, words) {
  const known = words[reason.replaceAll("_", " ").replace("max duration", "maximum duration")];
  return known ?? (reason && `${reason[0].toUpperCase()}${reason.slice(1)}.`);
}

/** Says when a seat may be free and waits for a person to press the button: no retry of its own. */
function showBusy(error, again) {
  const freeAtMs = performance.now() + 1000 * (error.retryAfterS ?? 0);
  const write = () => {
    const leftS = Math.ceil((freeAtMs - performance.now()) / 1000);
    const then = leftS > 0 ? `Try again in ${leftS} s.` : "You can try again now.";
    $("error-text").textContent = `${error.message.replace(/[;,]? (please )?try again.*$/i, ".")} ${then}`;
    if (leftS <= 0) clearInterval(ticking);
  };
  showNotice({ tone: "warn", title: error.status === 429 ? "Too many tries" : "The server is busy", text: "", action: again });
  const ticking = setInterval(write, 1000);
  noticeScope.signal.addEventListener("abort", () => clearInterval(ticking));
  write();
}

// ---------------------------------------------------------------------------- microphone level

function onMicrophone(stream) {
  micScope.abort();
  micScope = new AbortController();
  draw();
  if (!stream) return;
  const context = new AudioContext();
  const analyser = new AnalyserNode(context, { fftSize: 1024, smoothingTimeConstant: 0 });
  context.createMediaStreamSource(stream).connect(analyser);
  const samples = new Float32Array(analyser.fftSize);
  const bars = [...$("meter").children];
  let level = 0;
  const timer = setInterval(() => {
    analyser.getFloatTimeDomainData(samples);
    const rms = Math.sqrt(samples.reduce((sum, x) => sum + x * x, 0) / samples.length);
    const decibels = 20 * Math.log10(rms + 1e-6);
    const now = session?.muted ? 0 : Math.min(1, Math.max(0, (decibels + 60) / 50)); // -60..-10 dB
    level = Math.max(now, level * 0.8);
    bars.forEach((bar, i) => bar.classList.toggle("on", level * bars.length > i + 0.3));
    $("meter").setAttribute("aria-valuenow", String(Math.round(level * 100)));
  }, 50);
  const close = () => {
    clearInterval(timer);
    void context.close();
  };
  micScope.signal.addEventListener("abort", close);
  sessionScope.signal.addEventListener("abort", () => micScope.abort());
}
let micScope = new AbortController();

// ---------------------------------------------------------------------------- captions

function onTranscript({ role, turn, text, final, interrupted }) {
  const captions = $("captions");
  $("empty").hidden = true;
  const id = `turn-${role}-${turn}`;
  const following = captions.scrollHeight - captions.scrollTop - captions.clientHeight < 60;
  let bubble = document.getElementById(id);
  if (!bubble) {
    bubble = document.createElement("div");
    bubble.id = id;
    bubble.dataset.role = role;
    bubble.append(
      textNode("p", "who", role === "user" ? "You" : characterName()),
      textNode("p", "words", ""),
    );
    captions.append(bubble);
  }
  bubble.className = final ? "bubble" : "bubble interim";
  if (interrupted) bubble.classList.add("cut");
  const words = bubble.querySelector(".words");
  if (words) words.textContent = text;
  if (following) captions.scrollTop = captions.scrollHeight;
}

function clearCaptions() {
  for (const bubble of document.querySelectorAll(".bubble")) bubble.remove();
  $("empty").hidden = false;
  $("engines").textContent = "";
}

// ---------------------------------------------------------------------------- figures

async function drawStats() {
  if (!session || $("stats").hidden) return;
  const s = await session.stats();
  const number = (value, unit, digits = 0) => (Number.isFinite(value) ? `${Number(value).toFixed(digits)} ${unit}`.trim() : "–");
  const rows = {
    "Frames shown": number(s.fps_shown, "fps"),
    "Frames made": number(s.fps, "fps", 1),
    Buffer: number(s.buffer, "chunks", 1),
    "Browser buffer": number(s.video_buffer_ms, "ms"),
    "Round trip": number(s.rtt_ms, "ms"),
    "Turn latency": number(s.turn_latency_ms, "ms"),
    "Late chunks": number(s.late, ""),
    Received: number(s.received_kbps, "kbit/s"),
    Picture: s.width ? `${s.width} × ${s.height}` : "–",
  };
  $("stats").replaceChildren(
    ...Object.entries(rows).map(([name, value]) => {
      const row = document.createElement("div");
      row.append(textNode("dt", "", name), textNode("dd", "", value));
      return row;
    }),
  );
}

/** The parts of a turn: who spends the time, what on, and the stage at which it is over. */
const TURN_PARTS = [
  ["agent", "pause", "end_of_turn"],
  ["agent", "words", "transcript"],
  ["agent", "thinking", "reply"],
  ["agent", "voice", "first_audio"],
  ["picture", "picture", "frames"],
  ["picture", "buffer", "voice"],
  ["way", "delivery", "heard"],
];

/** Drawn with the figures, once there is a turn: the same numbers that the server exports. */
function drawTurn(turn) {
  show("turn", Boolean(turn) && !$("stats").hidden);
  if (!turn || $("stats").hidden) return;
  let beforeMs = 0;
  const parts = [];
  for (const [owner, name, stage] of TURN_PARTS) {
    if (!Number.isFinite(turn[stage])) continue;
    const ms = Math.max(0, turn[stage] - beforeMs);
    beforeMs = Math.max(beforeMs, turn[stage]);
    parts.push({ owner, name, ms });
  }
  setText("turn-total", `${(beforeMs / 1000).toFixed(2)} s`);
  $("turn-bar").replaceChildren(
    ...parts.map(({ owner, ms }) => {
      const part = document.createElement("span");
      part.dataset.owner = owner;
      part.style.flexGrow = String(ms);
      return part;
    }),
  );
  $("turn-parts").replaceChildren(
    ...parts.map(({ owner, name, ms }) => {
      const item = textNode("li", "", `${name} `);
      item.dataset.owner = owner;
      item.append(textNode("b", "", `${Math.round(ms)} ms`));
      return item;
    }),
  );
}

function drawClock() {
  const seconds = Math.max(0, Math.floor((performance.now() - liveSinceMs) / 1000));
  const left = Math.ceil((endingAtMs - performance.now()) / 1000);
  $("clock").textContent = endingAtMs ? `ends in ${minutes(Math.max(0, left))}` : minutes(seconds);
}

function minutes(seconds) {
  return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

// ---------------------------------------------------------------------------- notices

let noticeScope = new AbortController();

/** @param {{tone: "info"|"warn"|"bad", title: string, text: string, action?: {label: string, run: () => unknown}}} notice */
function showNotice({ tone, title, text, action }) {
  noticeScope.abort();
  noticeScope = new AbortController();
  $("error").dataset.tone = tone;
  $("error-title").textContent = title;
  $("error-text").textContent = text;
  $("error-action").hidden = !action;
  if (action) {
    $("error-action").textContent = action.label;
    $("error-action").addEventListener("click", () => action.run(), { signal: noticeScope.signal });
  }
  $("error").hidden = false;
}

function hideNotice() {
  noticeScope.abort();
  $("error").hidden = true;
}

// ---------------------------------------------------------------------------- one place that draws

let startedWaitingMs = 0;
const PREPARING = ["microphone", "creating", "queued", "starting", "connecting"];

function draw() {
  const preparing = PREPARING.includes(state);
  const talking = state === "live" || state === "reconnecting";
  const busy = preparing || talking;
  document.body.dataset.phase = preparing ? "preparing" : talking ? state : "idle";

  const live = state === "live";
  const speaker = !live ? "none" : speaking.character ? "character" : speaking.user ? "user" : "listening";
  $("frame").dataset.speaker = speaker;
  const liveWords = {
    character: `${characterName()} is speaking`,
    user: "Listening to you",
    listening: session?.micStream && !session.muted ? "Live. Go ahead, speak" : "Live. Type to talk",
  };
  const words = state === "queued" ? queueWords() : (STATE_WORDS[state] ?? "");
  setText("state-text", live ? liveWords[speaker] : words);
  setText("announce", live ? "Connected" : words);
  $("state").dataset.tone = live ? "live" : preparing || state === "reconnecting" ? "busy" : "calm";

  show("progress", preparing || state === "reconnecting");
  setText("progress-title", words);
  show("steps", preparing);
  drawSteps();
  show("about", !busy && selected !== null);
  show("corner", talking);

  show("talk", !busy);
  show("talk-text", !busy);
  $("talk").disabled = $("talk-text").disabled = !selected;
  setText("talk-label", state === "ended" ? "Talk again" : "Talk");
  show("stop", busy);
  show("mute", talking);
  show("interrupt", talking);
  $("interrupt").disabled = !speaking.character;
  const hasMic = Boolean(session?.micStream);
  show("meter", talking && hasMic);
  const muted = Boolean(session?.muted);
  setText("mute-label", !hasMic ? "Use mic" : muted ? "Unmute" : "Mute");
  $("mute").setAttribute("aria-pressed", String(hasMic && muted));
  $("mute-icon").setAttribute("href", hasMic && !muted ? "#i-mic" : "#i-mic-off");
  $("meter").classList.toggle("muted", muted);
  if (!talking) toggleStats(false);

  $("gallery").disabled = busy;
  show("upload-name-field", selected?.kind === "upload");
  setText("persona", busy || selected?.kind !== "preset" ? "" : selected.blurb);
  setText("empty-text", emptyWords(preparing, live));
  $("say-text").disabled = $("say-send").disabled = !live;
  $("say-text").placeholder = live ? "Write a message" : "Or type here";
}

function queueWords() {
  if (!queuePosition) return STATE_WORDS.queued;
  return queuePosition === 1 ? "You are next in the queue…" : `You are number ${queuePosition} in the queue…`;
}

function emptyWords(preparing, live) {
  const name = characterName();
  if (preparing) return `${name} is getting ready.`;
  if (state === "reconnecting") return "One moment.";
  if (live) return session?.micStream ? "Go ahead, say hello." : "Write something below to begin.";
  return "Press Talk and say hello. You can interrupt at any time, just by speaking.";
}

/** An image of your own is called what you called it. */
function characterName() {
  const given = selected?.kind === "upload" ? $("upload-name").value.trim() : "";
  return given || selected?.name || "The character";
}

function drawSteps() {
  const order = ["microphone", "creating", "starting", "connecting"];
  const now = order.indexOf(state === "queued" ? "creating" : state);
  for (const item of $("steps").children) {
    const index = order.indexOf(item.dataset.step);
    item.className = index < now ? "done" : index === now ? "now" : "";
  }
  const waitedS = startedWaitingMs ? (performance.now() - startedWaitingMs) / 1000 : 0;
  const slow = waitedS > 6 && state === "starting";
  setText("progress-note", slow ? `${Math.round(waitedS)} s. The first start after a while loads the model and takes longer.` : "");
}

function toggleStats(open = $("stats").hidden) {
  if ($("stats").hidden === !open) return;
  $("stats").hidden = !open;
  $("stats-toggle").setAttribute("aria-expanded", String(open));
  drawTurn(open ? session?.metrics.turn : null);
  void drawStats();
}

function show(id, visible) {
  if ($(id).hidden !== !visible) $(id).hidden = !visible;
}

/** Writes only what changed, so that live regions speak once. */
function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function textNode(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

/** Repeats until the session is over. */
function every(ms, run) {
  const timer = setInterval(run, ms);
  sessionScope.signal.addEventListener("abort", () => clearInterval(timer));
}

// ---------------------------------------------------------------------------- what people do

$("talk").addEventListener("click", () => talk({ mic: true }));
$("talk-text").addEventListener("click", () => talk({ mic: false }));
$("stop").addEventListener("click", () => session?.stop());
$("interrupt").addEventListener("click", () => session?.interrupt());
$("mute").addEventListener("click", toggleMute);
$("unmute").addEventListener("click", async () => {
  await session?.unmuteOutput();
  $("unmute").hidden = true;
});
$("stats-toggle").addEventListener("click", () => toggleStats());
$("error-close").addEventListener("click", hideNotice);
$("say").addEventListener("submit", (event) => {
  event.preventDefault();
  session?.say($("say-text").value);
  $("say-text").value = "";
});

async function toggleMute() {
  if (!session) return;
  if (!session.micStream) {
    if (await session.setMic(true)) hideNotice();
  } else {
    session.mute(!session.muted);
  }
  draw();
}

addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement && event.target.type === "text";
  if (!session || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") session.interrupt();
  else if (event.key.toLowerCase() === "m" && !typing) void toggleMute();
});

const placing = new Placing($("placing-picture"), $("placing-zoom"));
$("placing-use").addEventListener("click", usePlaced);
$("placing-cancel").addEventListener("click", () => $("placing").close());
for (const id of ["pick", "placing-another"]) $(id).addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  void placeImage($("file").files?.[0]);
  $("file").value = "";
});
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])][0];
  if (!file) return;
  event.preventDefault();
  void placeImage(file);
});

let dragDepth = 0;
const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
const dragging = (depth) => {
  dragDepth = Math.max(0, depth);
  $("drag-veil").hidden = dragDepth === 0 || session !== null;
};
addEventListener("dragenter", (event) => carriesFile(event) && dragging(dragDepth + 1));
addEventListener("dragleave", (event) => carriesFile(event) && dragging(dragDepth - 1));
addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!carriesFile(event)) return;
  event.preventDefault();
  dragging(0);
  void placeImage(event.dataTransfer?.files[0]);
});

setInterval(() => PREPARING.includes(state) && drawSteps(), 1000);
draw();
void loadCharacters();
