/**
 * One live conversation with a character: the whole browser client, no build step, no dependency.
 *
 * In: a character id or an image, a microphone, a <video>. Out: DOM events.
 * Knows nothing of the page around it.
 *
 *   import { CharacterSession } from "/client.js";
 *
 *   const session = new CharacterSession();
 *   session.addEventListener("transcript", ({ detail }) => console.log(detail.role, detail.text));
 *   await session.start({ character: "some-id", mic: true, video: document.querySelector("video") });
 *   session.say("Hello!");
 *   await session.stop();
 *
 * A session object is used once; make a new one for the next conversation. Types: client.d.ts.
 *
 * Events (all are CustomEvents; the payload is `event.detail`):
 *   state         {state, reason, message, inMs, queuePosition}   see State below
 *   transcript    {role: "user"|"character", turn, text, final, interrupted}
 *                 `text` is the turn so far; an event with the same role and turn replaces it
 *   speaking      {who: "user"|"character", speaking, interrupted, positionMs}
 *   metrics       {fps, buffer, late, held_ms, passes, rtt_ms, turn_latency_ms, turn}
 *                 `buffer`: chunks in hand; `late`: those that came late; `held_ms`: how long pictures
 *                 stood still for them; `passes`: of each chunk now; `turn`: milliseconds from the end
 *                 of the user's speech to each stage of the last turn: end_of_turn, transcript, reply,
 *                 first_audio, step, frames, voice, heard, ...
 *   ready         {listener, voice, picture}       what listens and what speaks, in words; `picture`
 *                 {expression, least, familiar} of an uploaded one, or null: where it is not familiar,
 *                 mouth and eyes may be off
 *   mic           {stream: MediaStream|null}       the microphone in use changed
 *   audioblocked  {}                               the browser wants a tap first: call unmuteOutput()
 *   error         CharacterError                   `fatal` says whether the session is over
 *   message       any server event, as it came: {label: "rtvi-ai", id, type, data}
 *   ended         {reason, message, failed, error} exactly once, last; `reason`: stop()'s own, an
 *                 error's code, or the server's words
 */

const PING_PERIOD_MS = 1000;
const PINGS_UNANSWERED = 5; // counted, not timed: a page that slept has heard nothing, but asked nothing
const RECONNECT_DELAYS_MS = [0, 300, 1200, 2700, 4800];
const RECONNECT_LIMIT_MS = 20_000;
const CONNECT_TIMEOUT_MS = 15_000;
const TAKEOVER_TIMEOUT_MS = 6000;
const POLL_PERIODS_MS = [100, 200, 300, 500]; // a prepared group is ready within milliseconds
const QUEUE_POLL_MS = 2000; // asking keeps the place in the queue
const START_TIMEOUT_MS = 180_000;
// The server may ignore candidates (it learns them from the checks), so gathering is barely awaited.
const GATHER_TIMEOUT_MS = 150;
// What the answer's sound is told by: its level, after at least one moment of quiet.
const AUDIBLE_LEVEL = 0.01;
const LISTEN_PERIOD_MS = 20;
const LISTEN_LIMIT_MS = 20_000;
// Equal on both receivers: the browser then has no reason to pull voice and picture apart.
const JITTER_BUFFER_TARGET_MS = 80;
// By then a buffer holds nothing from before, and the word that ends the silence may have been lost.
const LONGEST_HUSH_MS = 600;

/**
 * @typedef {"idle"|"microphone"|"creating"|"queued"|"starting"|"connecting"|"live"|"reconnecting"
 *   |"ending"|"ended"|"failed"} State
 * "ending" is still a live conversation: the server said that it will close in `inMs`.
 * While "queued" the server tells the place (`queuePosition`, 1 is the next) and ends a long wait.
 */

/** @typedef {{id: string, name: string, style: string, blurb: string, image: string}} Character */

/**
 * What POST /v1/sessions answers.
 * @typedef {object} SessionInfo
 * @property {string} id
 * @property {string} status
 * @property {number} [queue_position]
 * @property {{value: string, expires_at: number|string}} client_secret
 * @property {RTCIceServer[]} [ice_servers]
 * @property {number} [max_duration_s]
 * @property {number} [idle_timeout_s]
 * @property {{width: number, height: number, fps: number}} [video]
 */

/**
 * What went wrong. `code` is stable and meant for programs, `message` for people:
 * "busy" | "http" | "network" | "mic-refused" | "mic-missing" | "mic-unavailable" | "mic-lost" |
 * "connect-timeout" | "connect-failed" | "start-timeout" | "connection-lost" | "session-over" | "server" | "stopped" |
 * "misuse"
 */
export class CharacterError extends Error {
  /**
   * @param {string} code
   * @param {string} message
   * @param {{status?: number, field?: string|null, retryAfterS?: number|null, fatal?: boolean}} [more]
   */
  constructor(code, message, { status = 0, field = null, retryAfterS = null, fatal = true } = {}) {
    super(message);
    this.name = "CharacterError";
    this.code = code;
    this.status = status;
    this.field = field;
    this.retryAfterS = retryAfterS;
    this.fatal = fatal;
  }
}

export class CharacterSession extends EventTarget {
  /** @type {State} */
  #state = "idle";
  #baseUrl;
  #serverKey;
  /** @type {SessionInfo|null} */
  #info = null;
  /**
   * Functions that the agent may call (`agent.realtime.tools` in the server's configuration).
   * @type {Record<string, (args: any) => unknown>}
   */
  tools = {};
  #token = "";
  /** @type {HTMLVideoElement|null} */
  #video = null;
  #output = new MediaStream();
  /** @type {MediaStream|null} */
  #micStream = null;
  #micIsOurs = false;
  #muted = false;
  /** @type {ReturnType<typeof setTimeout>|undefined} */
  #hushTimer;
  /** @type {RTCPeerConnection|null} */
  #pc = null;
  /** @type {RTCRtpSender|null} */
  #audioSender = null;
  /** @type {RTCDataChannel|null} */
  #events = null;
  /** @type {RTCDataChannel|null} */
  #probe = null;
  #answer = new FirstSound();
  #leastRttMs = Infinity;
  #nextPing = 0;
  #unanswered = 0;
  /** @type {Record<string, number|null>} */
  #metrics = { rtt_ms: null };
  #mediaMs = 0;
  #lastBytes = { bytes: 0, atMs: 0 };
  #finished = false;
  #endingReason = "";
  // Aborted when the session is over: every timer, listener and request of ours hangs on it.
  #life = new AbortController();
  #turns = new Turns();
  #characterSpeaks = false;
  #reconnections = 0;

  /** @param {{baseUrl?: string, serverKey?: string}} [options] serverKey: only where the page may hold it */
  constructor({ baseUrl = "", serverKey } = {}) {
    super();
    this.#baseUrl = baseUrl.replace(/\/+$/, "");
    this.#serverKey = serverKey;
  }

  /**
   * The preset characters of a server.
   * @param {{baseUrl?: string, serverKey?: string}} [options]
   * @returns {Promise<Character[]>}
   */
  static async listCharacters(options) {
    return (await CharacterSession.describeServer(options)).characters;
  }

  /**
   * What a server has: its preset characters, and the size of its pictures.
   * @param {{baseUrl?: string, serverKey?: string}} [options]
   * @returns {Promise<{characters: Character[], video: {width: number, height: number, fps: number}}>}
   */
  static async describeServer({ baseUrl = "", serverKey } = {}) {
    const response = await request(`${baseUrl.replace(/\/+$/, "")}/v1/characters`, { token: serverKey });
    const { characters, video } = await response.json();
    for (const character of characters) character.image = new URL(character.image, response.url).href;
    return { characters, video };
  }

  get state() {
    return this.#state;
  }

  /** What the server said when it made the session; null before. */
  get info() {
    return this.#info;
  }

  get micStream() {
    return this.#micStream;
  }

  get muted() {
    return this.#muted;
  }

  /**
   * Opens the microphone, makes a session, waits until the character is prepared, connects.
   * Resolves when the character is on screen; rejects with a CharacterError (and ends) otherwise.
   * A refused microphone is no failure: an `error` event with fatal=false, and the session listens only.
   *
   * @param {object} options
   * @param {string} [options.character] a preset's id
   * @param {Blob} [options.image] or an image of your own
   * @param {string} [options.name] a name for that image
   * @param {string} [options.persona] and who it is, in words for a chat endpoint
   * @param {SessionInfo} [options.session] or a session that your own backend has made
   * @param {MediaStream|boolean} [options.mic] a stream of yours (we never stop it), or true to ask
   * @param {HTMLVideoElement|null} [options.video] plays the picture and the voice
   */
  async start({ character, image, name, persona, session, mic = true, video = null }) {
    if (this.#state !== "idle") {
      throw new CharacterError("misuse", "A session object is used once; make a new one.");
    }
    this.#video = video;
    addEventListener("pagehide", () => this.#leave(), { signal: this.#life.signal });
    try {
      // Before a session exists: nobody's GPUs wait while a person reads a permission prompt.
      if (mic) {
        this.#setState("microphone");
        await this.setMic(mic);
      }
      this.#throwIfFinished();
      this.#setState("creating");
      const info = session ?? (await this.#create({ character, image, name, persona }));
      this.#info = info;
      this.#token = "";
      if (this.#finished) {
        await this.#release(); // stopped while the request was on its way: give the seat back
        this.#throwIfFinished();
      }
      await this.#untilReady(info);
      this.#setState("connecting");
      await this.#connect({ takeover: false, timeoutMs: CONNECT_TIMEOUT_MS });
      this.#goLive();
    } catch (cause) {
      const error = asCharacterError(cause);
      if (!this.#finished) this.#finish({ reason: error.code, failed: true, error });
      throw error;
    }
  }

  /** @param {boolean} muted stops or resumes sending your voice; the character stays audible */
  mute(muted) {
    this.#muted = muted;
    for (const track of this.#micStream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /**
   * Takes another microphone, or (false) none, at any time before or during a session.
   * @param {MediaStream|boolean} mic
   * @returns {Promise<boolean>} whether a microphone is in use now
   */
  async setMic(mic) {
    /** @type {MediaStream|null} */
    let stream = null;
    if (mic instanceof MediaStream) {
      stream = mic;
    } else if (mic) {
      try {
        stream = await askForMicrophone();
      } catch (cause) {
        this.#emit("error", microphoneError(cause));
        return this.#micStream !== null;
      }
      if (this.#finished) {
        for (const track of stream.getTracks()) track.stop();
        return false;
      }
    }
    this.#dropMic();
    this.#micStream = stream;
    this.#micIsOurs = mic === true;
    const track = stream?.getAudioTracks()[0] ?? null;
    if (track) {
      track.enabled = !this.#muted;
      track.addEventListener("ended", () => this.#micLost(stream), { signal: this.#life.signal });
    }
    await this.#audioSender?.replaceTrack(track);
    this.#emit("mic", { stream });
    return track !== null;
  }

  /** Stops the character in mid-sentence. */
  interrupt() {
    if (!this.#send("interrupt")) this.#post("interrupt");
  }

  /**
   * Says something to the character by text instead of by voice; it answers as it would to speech.
   * @param {string} text
   */
  say(text) {
    const content = text.trim();
    if (!content) return;
    if (this.#send("send-text", { content })) {
      this.#emit("transcript", this.#turns.typed(content));
    } else {
      const message = "Not connected; the text was not sent.";
      this.#emit("error", new CharacterError("misuse", message, { fatal: false }));
    }
  }

  /**
   * Makes the character speak these very words.
   * @param {string} text
   */
  speak(text) {
    this.#post("say", { text });
  }

  /** Lets the voice be heard after an `audioblocked` event; call it from a click. */
  async unmuteOutput() {
    if (!this.#video) return;
    this.#video.muted = false;
    await this.#video.play();
  }

  /**
   * Ends the session and releases the microphone, the connection and every timer, at once.
   * Resolves when the server has been told.
   */
  async stop(reason = "stopped") {
    if (this.#finished) return;
    const told = this.#release();
    this.#finish({ reason, failed: false, tellServer: false });
    await told;
  }

  /**
   * The last `metrics`.
   * @returns {Record<string, any>}
   */
  get metrics() {
    return { ...this.#metrics };
  }

  /**
   * A snapshot of the connection, from the browser's counters and the server's last metrics.
   * @returns {Promise<Record<string, number|null>>}
   */
  async stats() {
    const figures = { ...this.#metrics, media_ms: this.#mediaMs, reconnections: this.#reconnections };
    const report = await this.#pc?.getStats();
    if (!report) return figures;
    /** @type {any} */ let video = {};
    /** @type {any} */ let audio = {};
    for (const entry of report.values()) {
      if (entry.type !== "inbound-rtp") continue;
      if (entry.kind === "video") video = entry;
      else audio = entry;
    }
    const nowMs = performance.now();
    const bytes = (video.bytesReceived ?? 0) + (audio.bytesReceived ?? 0);
    const elapsedMs = nowMs - this.#lastBytes.atMs;
    const kbps = this.#lastBytes.atMs ? ((bytes - this.#lastBytes.bytes) * 8) / elapsedMs : null;
    this.#lastBytes = { bytes, atMs: nowMs };
    const offset = audio.estimatedPlayoutTimestamp - video.estimatedPlayoutTimestamp;
    return {
      ...figures,
      fps_shown: video.framesPerSecond ?? null,
      width: video.frameWidth ?? null,
      height: video.frameHeight ?? null,
      frames_decoded: video.framesDecoded ?? 0,
      frames_dropped: video.framesDropped ?? 0,
      freezes: video.freezeCount ?? 0,
      packets_lost: (video.packetsLost ?? 0) + (audio.packetsLost ?? 0),
      video_buffer_ms: meanDelayMs(video),
      audio_buffer_ms: meanDelayMs(audio),
      av_offset_ms: Number.isFinite(offset) ? Math.round(offset) : null,
      received_kbps: kbps === null ? null : Math.max(0, Math.round(kbps)),
    };
  }

  // ------------------------------------------------------------------ making the session

  /**
   * @param {{character?: string, image?: Blob, name?: string, persona?: string}} what
   * @returns {Promise<SessionInfo>}
   */
  async #create({ character, image, name, persona }) {
    /** @type {FormData|{character: string|undefined}} */
    let body = { character };
    if (image) {
      body = new FormData();
      body.append("image", image, image instanceof File ? image.name : "image");
      if (name) body.append("name", name);
      if (persona) body.append("persona", persona);
    }
    // Not cancelled by stop(): only its answer tells which seat to give back.
    const response = await request(`${this.#baseUrl}/v1/sessions`, {
      method: "POST",
      token: this.#serverKey,
      body,
    });
    return response.json();
  }

  /** @param {{status: string, reason?: string, queue_position?: number}} told */
  async #untilReady(told) {
    let deadlineMs = performance.now() + START_TIMEOUT_MS;
    let failures = 0;
    for (let polls = 0; ; polls++) {
      const { status, reason = "", queue_position: queuePosition } = told;
      const queued = status === "queued";
      if (status === "ready" || status === "live" || status === "reconnecting") return;
      if (["ending", "ended", "failed"].includes(status)) {
        throw new CharacterError("session-over", sentence(reason) || "The server could not prepare the character.");
      }
      this.#setState(queued ? "queued" : "starting", { reason, queuePosition });
      if (queued) deadlineMs = performance.now() + START_TIMEOUT_MS;
      if (performance.now() > deadlineMs) {
        throw new CharacterError("start-timeout", "The character was not ready in time.");
      }
      const startMs = POLL_PERIODS_MS[Math.min(polls, POLL_PERIODS_MS.length - 1)];
      await this.#sleep(queued ? QUEUE_POLL_MS : startMs);
      this.#throwIfFinished();
      try {
        told = await this.#status();
        failures = 0;
      } catch (error) {
        const refused = error instanceof CharacterError && error.status !== 0;
        if (refused || ++failures >= 5) throw error;
      }
    }
  }

  /** @returns {Promise<{status: string, reason?: string, queue_position?: number}>} */
  async #status() {
    const response = await this.#call("", { timeoutMs: 5000 });
    return response.json();
  }

  // ------------------------------------------------------------------ the connection

  /** @param {{takeover: boolean, timeoutMs: number}} options */
  async #connect({ takeover, timeoutMs }) {
    const deadlineMs = performance.now() + timeoutMs;
    const pc = new RTCPeerConnection({
      iceServers: this.#info?.ice_servers ?? [],
      bundlePolicy: "max-bundle",
    });
    this.#pc = pc;
    const track = this.#micStream?.getAudioTracks()[0];
    this.#audioSender = pc.addTransceiver(track ?? "audio", { direction: "sendrecv" }).sender;
    pc.addTransceiver("video", { direction: "recvonly" });
    this.#listen(pc);
    pc.addEventListener("track", ({ track, receiver }) => this.#attach(track, receiver));

    await pc.setLocalDescription();
    const gathered = () => pc.iceGatheringState === "complete";
    await this.#once(pc, "icegatheringstatechange", gathered, GATHER_TIMEOUT_MS);
    const response = await this.#call(`/webrtc${takeover ? "?takeover=1" : ""}`, {
      method: "POST",
      body: pc.localDescription?.sdp,
      timeoutMs,
    });
    // The secret connects once; from here on this token speaks for the session.
    this.#token = response.headers.get("Resume-Token") ?? this.#token;
    const sdp = await response.text();
    this.#throwIfFinished();
    await pc.setRemoteDescription({ type: "answer", sdp });

    const video = this.#video;
    const settled = () => ["connected", "failed", "closed"].includes(pc.connectionState);
    await this.#once(pc, "connectionstatechange", settled, deadlineMs - performance.now());
    // A page in a background tab decodes too, so this does not wait for anybody to look.
    const shown = () => !video || video.readyState >= HTMLMediaElement.HAVE_CURRENT_DATA;
    if (pc.connectionState === "connected") {
      await this.#once(video ?? pc, "loadeddata", shown, deadlineMs - performance.now());
    }
    this.#throwIfFinished();
    if (pc.connectionState !== "connected" || !shown()) {
      throw new CharacterError(
        "connect-timeout",
        "The sound and picture did not get through. A firewall may be blocking UDP.",
      );
    }
  }

  /** From here on a silent peer is a lost one. */
  #goLive() {
    const { pc, events, probe } = { pc: this.#pc, events: this.#events, probe: this.#probe };
    if (!pc) return;
    this.#setState("live");
    this.#unanswered = 0;
    const dead = () => ["failed", "closed"].includes(pc.connectionState) || events?.readyState === "closed";
    // A server that ends a session closes its side; waiting for pongs would cost five seconds.
    for (const [target, event] of /** @type {const} */ ([[pc, "connectionstatechange"], [events, "close"]])) {
      target?.addEventListener(event, () => dead() && this.#lost(pc), { signal: this.#life.signal });
    }
    const beat = setInterval(() => {
      if (pc !== this.#pc) return clearInterval(beat);
      if (this.#unanswered++ >= PINGS_UNANSWERED) return this.#lost(pc);
      if (probe?.readyState !== "open") return;
      probe.send(JSON.stringify({ t: "ping", id: this.#nextPing++, c: performance.now() }));
    }, PING_PERIOD_MS);
    this.#life.signal.addEventListener("abort", () => clearInterval(beat));
    if (dead()) this.#lost(pc);
  }

  /**
   * The two data channels of one peer connection.
   * @param {RTCPeerConnection} pc
   */
  #listen(pc) {
    const events = pc.createDataChannel("events");
    const probe = pc.createDataChannel("probe", { ordered: false, maxRetransmits: 0 });
    this.#events = events;
    this.#probe = probe;
    events.addEventListener("open", () => {
      this.#send("client-ready", { version: "2.0.0", about: { library: "characters-serve" } });
    });
    events.addEventListener("message", ({ data }) => {
      if (pc === this.#pc) this.#onServerEvent(data);
    });

    probe.addEventListener("message", ({ data }) => {
      const pong = parseJson(data);
      if (pong?.t !== "pong" || pc !== this.#pc) return;
      const nowMs = performance.now();
      this.#unanswered = 0;
      this.#mediaMs = pong.media_ms ?? this.#mediaMs;
      this.#metrics.rtt_ms = Math.round((nowMs - pong.c) * 10) / 10;
      this.#leastRttMs = Math.min(this.#leastRttMs, nowMs - pong.c);
      this.#emit("metrics", { ...this.#metrics });
    });
  }

  /** Tells the server when the first sound of the answer was played here. */
  #listenForAnswer() {
    const { pc, probe } = { pc: this.#pc, probe: this.#probe };
    const [track] = this.#output.getAudioTracks();
    if (!pc || !track) return;
    this.#answer.listen(track, (agoMs) => {
      const ago_ms = agoMs + this.#leastRttMs / 2;
      const known = Number.isFinite(ago_ms) && pc === this.#pc && probe?.readyState === "open";
      if (known) probe.send(JSON.stringify({ t: "heard", ago_ms }));
    });
  }

  /**
   * Both tracks live in one MediaStream that survives reconnections, so the last frame stays on screen.
   * @param {MediaStreamTrack} track
   * @param {RTCRtpReceiver} receiver
   */
  #attach(track, receiver) {
    if ("jitterBufferTarget" in receiver) receiver.jitterBufferTarget = JITTER_BUFFER_TARGET_MS;
    for (const old of this.#output.getTracks()) {
      if (old.kind === track.kind) this.#output.removeTrack(old);
    }
    this.#output.addTrack(track);
    const video = this.#video;
    if (!video || video.srcObject === this.#output) return;
    video.playsInline = true;
    video.autoplay = true;
    video.muted = false;
    video.srcObject = this.#output;
    video.play().catch(async (cause) => {
      if (cause.name !== "NotAllowedError" || this.#finished) return;
      video.muted = true;
      this.#emit("audioblocked", {});
      await video.play().catch(() => {}); // autoplay starts it once the browser lets it
    });
  }

  /** @param {RTCPeerConnection} pc */
  #lost(pc) {
    if (this.#finished || pc !== this.#pc) return;
    if (this.#state === "live" || this.#state === "ending") void this.#reconnect();
  }

  async #reconnect() {
    this.#setState("reconnecting");
    this.#closePeer();
    const deadlineMs = performance.now() + RECONNECT_LIMIT_MS;
    for (let attempt = 0; ; attempt++) {
      const delayMs = RECONNECT_DELAYS_MS[Math.min(attempt, RECONNECT_DELAYS_MS.length - 1)];
      if (performance.now() + delayMs >= deadlineMs) break;
      await this.#sleep(delayMs, "online");
      if (this.#finished) return;
      try {
        const { status, reason } = await this.#status();
        if (["ending", "ended", "failed"].includes(status)) {
          return this.#finish({
            reason: this.#endingReason || reason || status,
            failed: status === "failed",
            tellServer: false,
          });
        }
        await this.#connect({ takeover: true, timeoutMs: TAKEOVER_TIMEOUT_MS });
        this.#reconnections++;
        return this.#goLive();
      } catch (cause) {
        if (this.#finished) return;
        this.#closePeer();
        const error = asCharacterError(cause);
        if ((error.status >= 400 && error.status < 500) || error.status === 503) {
          return this.#finish({ reason: this.#endingReason || "session-over", failed: !this.#endingReason, error });
        }
      }
    }
    const error = new CharacterError("connection-lost", "The connection was lost and did not come back.");
    this.#finish({ reason: error.code, failed: true, error });
  }

  #closePeer() {
    const pc = this.#pc;
    this.#pc = this.#events = this.#probe = this.#audioSender = null;
    this.#lastBytes = { bytes: 0, atMs: 0 };
    pc?.close();
    this.#characterStopped(true, null);
  }

  // ------------------------------------------------------------------ server events

  /** @param {string} raw */
  #onServerEvent(raw) {
    const message = parseJson(raw);
    if (!message || message.label !== "rtvi-ai") return;
    const data = message.data ?? {};
    this.#emit("message", message);
    switch (message.type) {
      case "bot-ready":
        return this.#emit("ready", {
          listener: data.listener ?? "",
          voice: data.voice ?? "",
          picture: data.picture ?? null,
        });
      case "user-started-speaking":
        this.#answer.stop();
        return this.#emit("speaking", { who: "user", speaking: true });
      case "user-stopped-speaking":
        this.#listenForAnswer();
        return this.#emit("speaking", { who: "user", speaking: false });
      case "user-transcription": {
        const turn = this.#turns.heard(data.text ?? "", Boolean(data.final));
        if (turn) this.#emit("transcript", turn);
        return;
      }
      case "bot-started-speaking":
        this.#hush(false);
        this.#turns.start("character");
        this.#characterSpeaks = true;
        return this.#emit("speaking", { who: "character", speaking: true });
      case "bot-transcription":
        return this.#emit("transcript", this.#turns.add("character", data.text ?? ""));
      case "bot-stopped-speaking":
        return this.#characterStopped(Boolean(data.interrupted), data.position_ms ?? null);
      case "bot-interrupted":
        this.#hush(true);
        return this.#characterStopped(true, data.position_ms ?? null);
      case "metrics":
        this.#metrics = { ...this.#metrics, ...data, rtt_ms: this.#metrics.rtt_ms }; // ours is newer
        return this.#emit("metrics", { ...this.#metrics });
      case "llm-function-call":
        return void this.#runTool(data);
      case "error":
        return this.#emit("error", serverError(data.message));
      case "server-message":
        if (data.kind === "voice-waits") return this.#hush(true);
        if (data.kind === "voice-goes-on") return this.#hush(false);
        if (data.kind !== "session-ending") return;
        this.#endingReason = data.reason ?? "";
        return this.#setState("ending", { reason: this.#endingReason, inMs: data.in_ms ?? 0 });
    }
  }

  /** @param {{function_name: string, tool_call_id: string, args: Record<string, unknown>}} call */
  async #runTool({ function_name, tool_call_id, args }) {
    const tool = this.tools[function_name];
    /** @type {unknown} */
    let result = { error: `the page has no ${function_name}` };
    try {
      if (tool) result = (await tool(args)) ?? null;
    } catch (cause) {
      result = { error: String(cause) };
    }
    this.#send("llm-function-call-result", { function_name, tool_call_id, arguments: args, result });
  }

  /**
   * What the browser still holds of the voice when it stops is not played.
   * @param {boolean} silent
   */
  #hush(silent) {
    clearTimeout(this.#hushTimer);
    for (const track of this.#output?.getAudioTracks() ?? []) track.enabled = !silent;
    if (silent) this.#hushTimer = setTimeout(() => this.#hush(false), LONGEST_HUSH_MS);
  }

  /**
   * @param {boolean} interrupted
   * @param {number|null} positionMs
   */
  #characterStopped(interrupted, positionMs) {
    const turn = this.#turns.close("character", interrupted);
    if (turn) this.#emit("transcript", turn);
    // An interruption is told twice: at once, and again when its last sound has been played.
    if (!this.#characterSpeaks) return;
    this.#characterSpeaks = false;
    this.#emit("speaking", { who: "character", speaking: false, interrupted, positionMs });
  }

  /**
   * @param {string} type
   * @param {object} [data]
   * @returns {boolean} whether the channel took it
   */
  #send(type, data = {}) {
    if (this.#events?.readyState !== "open") return false;
    this.#events.send(JSON.stringify({ label: "rtvi-ai", id: newId(), type, data }));
    return true;
  }

  // ------------------------------------------------------------------ HTTP of this session

  /**
   * @param {string} path
   * @param {{method?: string, body?: unknown, timeoutMs?: number, keepalive?: boolean, detached?: boolean}} [options]
   */
  #call(path, { detached = false, timeoutMs, ...options } = {}) {
    if (!this.#info) throw new CharacterError("misuse", "There is no session yet.");
    const signals = detached ? [] : [this.#life.signal];
    if (timeoutMs) signals.push(AbortSignal.timeout(timeoutMs));
    return request(this.#url(path), { ...options, token: this.#secret, signal: anySignal(signals) });
  }

  /** @param {string} path */
  #url(path) {
    return `${this.#baseUrl}/v1/sessions/${encodeURIComponent(this.#info?.id ?? "")}${path}`;
  }

  get #secret() {
    return this.#token || (this.#info?.client_secret.value ?? "");
  }

  /**
   * @param {string} path
   * @param {object} [body]
   */
  #post(path, body = {}) {
    if (!this.#info || this.#finished) return;
    this.#call(`/${path}`, { method: "POST", body, timeoutMs: 5000 }).catch((cause) => {
      if (this.#finished) return;
      const error = asCharacterError(cause);
      error.fatal = false;
      this.#emit("error", error);
    });
  }

  /** A beacon, because a request with a header from another origin asks first, and that is too late. */
  #leave() {
    if (this.#info) navigator.sendBeacon(this.#url("/end"), this.#secret);
    this.#finish({ reason: "page-closed", failed: false, tellServer: false });
  }

  /** Tells the server that the seat is free. */
  async #release() {
    if (!this.#info) return;
    await this.#call("", { method: "DELETE", keepalive: true, detached: true }).catch(() => {
      // Nothing is left to do here: the server notices the missing heartbeat by itself.
    });
  }

  // ------------------------------------------------------------------ life and death

  /** @param {{reason: string, failed: boolean, error?: CharacterError|null, tellServer?: boolean}} end */
  #finish({ reason, failed, error = null, tellServer = true }) {
    if (this.#finished) return;
    this.#finished = true;
    this.#closePeer();
    this.#dropMic();
    if (this.#video?.srcObject === this.#output) this.#video.srcObject = null;
    this.#life.abort();
    this.#answer.close();
    if (tellServer) void this.#release();
    const message = error?.message ?? "";
    if (error) this.#emit("error", error);
    this.#setState(failed ? "failed" : "ended", { reason, message });
    this.#emit("ended", { reason, message, failed, error });
  }

  #dropMic() {
    if (this.#micIsOurs) for (const track of this.#micStream?.getTracks() ?? []) track.stop();
    this.#micStream = null;
    this.#micIsOurs = false;
  }

  /** @param {MediaStream|null} stream */
  #micLost(stream) {
    if (this.#finished || stream !== this.#micStream) return;
    void this.setMic(false);
    this.#emit("error", new CharacterError("mic-lost", "The microphone was disconnected.", { fatal: false }));
  }

  #throwIfFinished() {
    if (this.#finished) throw new CharacterError("stopped", "The session was stopped.");
  }

  /**
   * Returns after `ms`, or earlier when the session is over or `wakeOn` happens on the window.
   * @param {number} ms
   * @param {string} [wakeOn]
   * @returns {Promise<void>}
   */
  #sleep(ms, wakeOn) {
    const nap = new AbortController();
    return new Promise((resolve) => {
      const wake = () => {
        clearTimeout(timer);
        nap.abort();
        resolve();
      };
      const timer = setTimeout(wake, ms);
      if (this.#life.signal.aborted) return wake();
      this.#life.signal.addEventListener("abort", wake, { signal: nap.signal });
      if (wakeOn) addEventListener(wakeOn, wake, { signal: nap.signal });
    });
  }

  /**
   * Returns once `done()` holds (asked at each `event`), after `timeoutMs`, or when the session is over.
   * @param {EventTarget} target
   * @param {string} event
   * @param {() => boolean} done
   * @param {number} timeoutMs
   * @returns {Promise<void>}
   */
  #once(target, event, done, timeoutMs) {
    const wait = new AbortController();
    return new Promise((resolve) => {
      const settle = () => {
        clearTimeout(timer);
        wait.abort();
        resolve();
      };
      const timer = setTimeout(settle, Math.max(0, timeoutMs));
      if (done() || this.#life.signal.aborted) return settle();
      target.addEventListener(event, () => done() && settle(), { signal: wait.signal });
      this.#life.signal.addEventListener("abort", settle, { signal: wait.signal });
    });
  }

  /**
   * @param {State} state
   * @param {{reason?: string, message?: string, inMs?: number, queuePosition?: number}} [more]
   */
  #setState(state, { reason = "", message = "", inMs = 0, queuePosition = 0 } = {}) {
    const final = state === "ended" || state === "failed";
    if (this.#finished && !final) return;
    if (state === this.#state && state !== "ending" && state !== "queued" && !reason) return;
    this.#state = state;
    this.#emit("state", { state, reason, message, inMs, queuePosition });
  }

  /**
   * @param {string} type
   * @param {unknown} detail
   */
  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** Notices the first sound of a track after a quiet moment. */
export class FirstSound {
  /** @type {AudioContext|null} */
  #context = null;
  #stop = () => {};

  /**
   * Instead of whatever it listened to before; for LISTEN_LIMIT_MS at most.
   * @param {MediaStreamTrack} track
   * @param {(agoMs: number) => void} told how long ago the sound was played; called once at most
   */
  listen(track, told) {
    this.#stop(); // before the context goes on: this suspends it
    // Chromium gives no audio level of a receiver whose packets carry none, hence an analyser.
    const context = (this.#context ??= new AudioContext());
    void context.resume();
    const source = context.createMediaStreamSource(new MediaStream([track]));
    const analyser = new AnalyserNode(context, { fftSize: 1024 });
    source.connect(analyser);
    const samples = new Float32Array(analyser.fftSize);
    const untilMs = performance.now() + LISTEN_LIMIT_MS;
    let quiet = false;
    const timer = setInterval(() => {
      if (performance.now() > untilMs) return this.#stop();
      if (context.state !== "running") return;
      analyser.getFloatTimeDomainData(samples);
      const first = samples.findIndex((sample) => Math.abs(sample) >= AUDIBLE_LEVEL);
      if (first < 0) quiet = true;
      else if (quiet) {
        this.#stop();
        told(((samples.length - first) / context.sampleRate) * 1000);
      }
    }, LISTEN_PERIOD_MS);
    this.#stop = () => {
      clearInterval(timer);
      source.disconnect();
      if (context.state !== "closed") void context.suspend();
      this.#stop = () => {};
    };
  }

  stop() {
    this.#stop();
  }

  close() {
    this.#stop();
    void this.#context?.close();
  }
}

/** Who said what: numbers the turns of both sides and gathers their text. */
class Turns {
  #next = 1;
  /** @type {Record<string, {turn: number, text: string}|null>} */
  #current = { user: null, character: null };
  #typed = { text: "", atMs: -Infinity };

  /** @param {string} role */
  start(role) {
    // Its text may arrive a moment before the speaker is said to have started.
    this.#current[role] ??= { turn: this.#next++, text: "" };
    return this.#current[role];
  }

  /**
   * @param {string} role
   * @param {string} text
   */
  add(role, text) {
    const current = this.start(role) ?? { turn: 0, text: "" };
    current.text = current.text ? `${current.text.trimEnd()} ${text.trimStart()}` : text.trimStart();
    return { role, ...current, final: false, interrupted: false };
  }

  /**
   * @param {string} role
   * @param {boolean} interrupted
   */
  close(role, interrupted) {
    const current = this.#current[role];
    this.#current[role] = null;
    return current?.text ? { role, ...current, final: true, interrupted } : null;
  }

  /**
   * The server's transcription of the user, which replaces what it guessed before.
   * @param {string} text
   * @param {boolean} final
   */
  heard(text, final) {
    // A typed line comes back as a transcription; it is on screen already.
    const echo = text.trim() === this.#typed.text && performance.now() - this.#typed.atMs < 10_000;
    if (echo || !text.trim()) return null;
    const current = this.start("user") ?? { turn: 0, text: "" };
    current.text = text;
    if (final) this.#current.user = null;
    return { role: "user", ...current, final, interrupted: false };
  }

  /** @param {string} text */
  typed(text) {
    this.#typed = { text, atMs: performance.now() };
    return { role: "user", turn: this.#next++, text, final: true, interrupted: false };
  }
}

// -------------------------------------------------------------------- plain functions

/**
 * One HTTP request, never repeated; every refusal becomes a CharacterError.
 * @param {string} url
 * @param {{method?: string, token?: string, body?: unknown, signal?: AbortSignal, keepalive?: boolean}} [options]
 */
async function request(url, { method = "GET", token, body, signal, keepalive = false } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  /** @type {BodyInit|undefined} */
  let payload;
  if (typeof body === "string") {
    headers["Content-Type"] = "application/sdp";
    payload = body;
  } else if (body instanceof FormData) {
    payload = body; // the browser writes the boundary
  } else if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    payload = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(url, { method, headers, body: payload, signal, keepalive });
  } catch {
    const foreign = new URL(url, location.href).origin !== location.origin;
    const or = foreign ? ", or this page's origin is not in its server.allowed_origins" : "";
    throw new CharacterError("network", `The server cannot be reached${or}.`);
  }
  if (response.ok) return response;
  const problem = parseJson(await response.text().catch(() => "")) ?? {};
  const retryAfterS = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const busy = response.status === 503 || response.status === 429;
  const title = problem.title ?? `The server answered ${response.status}.`;
  throw new CharacterError(busy ? "busy" : "http", sentence(problem.detail ?? title), {
    status: response.status,
    field: problem.field ?? null,
    retryAfterS: Number.isFinite(retryAfterS) ? retryAfterS : null,
  });
}

async function askForMicrophone() {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new DOMException("no mediaDevices on this origin", "SecurityError");
  }
  return navigator.mediaDevices.getUserMedia({
    audio: { echoCancellation: true, noiseSuppression: true, autoGainControl: true },
  });
}

/** @param {unknown} cause */
function microphoneError(cause) {
  const name = cause instanceof DOMException || cause instanceof Error ? cause.name : "";
  if (name === "NotAllowedError") {
    return new CharacterError("mic-refused", "The microphone is not allowed for this page.", { fatal: false });
  }
  if (name === "NotFoundError") {
    return new CharacterError("mic-missing", "No microphone was found.", { fatal: false });
  }
  if (name === "SecurityError") {
    return new CharacterError("mic-unavailable", "Browsers give a microphone only to https pages and localhost.", { fatal: false });
  }
  return new CharacterError("mic-unavailable", "The microphone could not be opened.", { fatal: false });
}

/** @param {unknown} cause */
function asCharacterError(cause) {
  if (cause instanceof CharacterError) return cause;
  return new CharacterError("connect-failed", cause instanceof Error ? cause.message : String(cause));
}

/** @param {string|undefined} message */
function serverError(message) {
  const words = sentence(message ?? "") || "The server reported a problem.";
  return new CharacterError("server", words, { fatal: false });
}

/** @param {any} entry an inbound-rtp report */
function meanDelayMs(entry) {
  return entry.jitterBufferEmittedCount
    ? Math.round((1000 * entry.jitterBufferDelay) / entry.jitterBufferEmittedCount)
    : null;
}

/**
 * AbortSignal.any, which Safari has only since 17.4.
 * @param {AbortSignal[]} signals
 */
function anySignal(signals) {
  if (signals.length < 2) return signals[0];
  const either = new AbortController();
  for (const signal of signals) {
    if (signal.aborted) either.abort();
    signal.addEventListener("abort", () => either.abort(), { signal: either.signal });
  }
  return either.signal;
}

/**
 * @param {string} text
 * @returns {any} null when it is no JSON object
 */
function parseJson(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

/** @param {string} words */
function sentence(words) {
  return words && `${words[0].toUpperCase()}${words.slice(1).replace(/\.$/, "")}.`;
}

function newId() {
  // randomUUID exists only on secure origins; the id only pairs answers within one channel.
  return Math.random().toString(36).slice(2, 12);
}
