/** Types of client.js, which says what everything does. */

export type State =
  | "idle" | "microphone" | "creating" | "queued" | "starting" | "connecting"
  | "live" | "reconnecting" | "ending" | "ended" | "failed";

export type ErrorCode =
  | "busy" | "http" | "network" | "mic-refused" | "mic-missing" | "mic-unavailable" | "mic-lost"
  | "connect-timeout" | "connect-failed" | "start-timeout" | "connection-lost" | "session-over"
  | "server" | "stopped" | "misuse";

export interface Server {
  baseUrl?: string;
  /** Only where the page may hold it. */
  serverKey?: string;
}

export interface Character {
  id: string;
  name: string;
  style: string;
  blurb: string;
  image: string;
}

/** Of an uploaded image: where it is not familiar, mouth and eyes may be off. */
export interface Picture {
  expression: number;
  least: number;
  familiar: boolean;
}

export interface Video {
  width: number;
  height: number;
  fps: number;
}

/** What POST /v1/sessions answers. */
export interface SessionInfo {
  id: string;
  status: string;
  queue_position?: number;
  client_secret: { value: string; expires_at: number };
  ice_servers?: RTCIceServer[];
  max_duration_s?: number;
  idle_timeout_s?: number;
  video?: Video;
}

/** With one of character, image and session. */
export interface StartOptions {
  character?: string;
  image?: Blob;
  /** Of that image. */
  name?: string;
  /** Of that image: who it is, in words for a chat endpoint. */
  persona?: string;
  /** One that a backend of yours has made. */
  session?: SessionInfo;
  mic?: MediaStream | boolean;
  video?: HTMLVideoElement | null;
}

export interface Metrics {
  rtt_ms: number | null;
  fps?: number;
  buffer?: number;
  late?: number;
  held_ms?: number;
  passes?: number;
  turn_latency_ms?: number | null;
  turn?: Record<string, number>;
}

/** The `detail` of each event. */
export interface Events {
  state: { state: State; reason: string; message: string; inMs: number; queuePosition: number };
  transcript: {
    role: "user" | "character";
    turn: number;
    text: string;
    final: boolean;
    interrupted: boolean;
  };
  speaking: {
    who: "user" | "character";
    speaking: boolean;
    interrupted?: boolean;
    positionMs?: number | null;
  };
  metrics: Metrics;
  ready: { listener: string; voice: string; picture: Picture | null };
  mic: { stream: MediaStream | null };
  audioblocked: Record<string, never>;
  error: CharacterError;
  message: { label: "rtvi-ai"; id: string; type: string; data?: any };
  ended: { reason: string; message: string; failed: boolean; error: CharacterError | null };
}

export class CharacterError extends Error {
  readonly code: ErrorCode;
  readonly status: number;
  readonly field: string | null;
  readonly retryAfterS: number | null;
  readonly fatal: boolean;
}

export class CharacterSession extends EventTarget {
  constructor(options?: Server);
  static listCharacters(options?: Server): Promise<Character[]>;
  static describeServer(options?: Server): Promise<{ characters: Character[]; video: Video }>;

  tools: Record<string, (args: any) => unknown>;
  readonly state: State;
  readonly info: SessionInfo | null;
  readonly micStream: MediaStream | null;
  readonly muted: boolean;
  readonly metrics: Metrics;

  start(options: StartOptions): Promise<void>;
  stop(reason?: string): Promise<void>;
  mute(muted: boolean): void;
  setMic(mic: MediaStream | boolean): Promise<boolean>;
  interrupt(): void;
  say(text: string): void;
  speak(text: string): void;
  unmuteOutput(): Promise<void>;
  stats(): Promise<Record<string, number | null>>;

  addEventListener<K extends keyof Events>(
    type: K,
    listener: (event: CustomEvent<Events[K]>) => unknown,
    options?: boolean | AddEventListenerOptions,
  ): void;
  addEventListener(
    type: string,
    listener: EventListenerOrEventListenerObject | null,
    options?: boolean | AddEventListenerOptions,
  ): void;
}
